"""Boxes: overlap measures, affine maps and augmentation."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.ops import generalized_box_iou  # type: ignore[import-untyped]

from tests.cases.tinydet import make_loader
from trainyard.data.order import shuffle
from trainyard.data.shards import ShardSet

from . import geometry
from .config import Config


@pytest.mark.parametrize(
    ("side", "shift", "iou", "nwd"), [(12, 6, 1 / 3, 0.6258), (6, 6, 0.0, 0.6258), (6, 1, 5 / 7, 0.9248), (12, 0, 1, 1)]
)
def test_iou_and_nwd_have_their_known_values(side: int, shift: int, iou: float, nwd: float) -> None:
    a = torch.tensor([20.0, 20, 20 + side, 20 + side], dtype=torch.float64)
    b = a + torch.tensor([shift, 0, shift, 0.0])
    assert float(geometry.iou(a, b)[0]) == pytest.approx(iou, abs=1e-9)
    found = geometry.nwd(geometry.xyxy_to_cxcywh(a), geometry.xyxy_to_cxcywh(b), 12.8)
    assert float(found) == pytest.approx(nwd, abs=5e-5)


def test_nwd_counts_half_the_difference_of_sides() -> None:
    a, b = torch.tensor([5.0, 5, 12, 12]), torch.tensor([5.0, 5, 6, 6])
    assert float(geometry.nwd(a, b, 12.8)) == pytest.approx(math.exp(-math.sqrt((36 + 36) / 4) / 12.8))


def test_giou_equals_torchvision_and_falls_with_the_distance_of_disjoint_boxes() -> None:
    rng = np.random.default_rng(0)
    a, b = (geometry.cxcywh_to_xyxy(torch.from_numpy(rng.uniform(0.1, 0.5, (30, 4)))) for _ in range(2))
    assert torch.allclose(geometry.giou(a[:, None], b[None]), generalized_box_iou(a, b), atol=1e-12)
    unit = torch.tensor([0.0, 0, 1, 1])
    away = [float(geometry.giou(unit, unit + torch.tensor([d, 0.0, d, 0.0]))) for d in (2, 3, 9)]
    assert away == pytest.approx([-1 / 3, -2 / 4, -8 / 10])


def test_an_empty_box_and_a_box_compared_with_itself_have_finite_gradients() -> None:
    for a, b in ((torch.full((4,), 0.5), torch.tensor([0.5, 0.5, 1e-6, 1e-6])), (torch.full((4,), 0.3),) * 2):
        a = a.clone().requires_grad_()
        overlap = geometry.giou(geometry.cxcywh_to_xyxy(a), geometry.cxcywh_to_xyxy(b)) + geometry.nwd(
            100 * a, 100 * b, 12.8
        )
        overlap.backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None and a.grad.isfinite().all()


AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "flip": {"flip": 1.0},
    "smaller": {"scale_min": 0.6, "scale_max": 0.9},
    "larger": {"scale_min": 1.5, "scale_max": 2.0, "crop_keeps": "boxes"},
    "rotated": {"rotate_deg": 30.0},
    "everything": {"flip": 0.5, "scale_min": 0.7, "scale_max": 1.5, "crop_keeps": "boxes", "shift": 0.05, "zoom": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("decode", ["cpu", "dali"])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_boxes_follow_the_image_to_less_than_a_pixel(
    rectangles: tuple[ShardSet, Config], name: str, decode: str
) -> None:
    if decode == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    data, config = rectangles
    config = replace(config, augment=type(config.augment)(**AUGMENTATIONS[name]))
    ids = np.arange(data.count)
    stream = make_loader(data, config, decode).train(
        lambda epoch: shuffle(ids, seed=0, epoch=epoch, global_batch_size=12), epoch=0, start=0, micro_batch_size=0
    )
    batch = next(stream).batch
    stream.close()
    moved = geometry.map_to_input(batch["boxes"], batch["affine"])
    cut, valid = geometry.clip_boxes(moved, (96, 128), visible=0.999, side_min_px=1)
    assert valid.any(dim=1).all() if "crop_keeps" in AUGMENTATIONS[name] or name == "none" else valid.any()
    for image, box in zip(*torch.nonzero(valid, as_tuple=True), strict=True):
        weight = batch["image"][image, batch["labels"][image, box]].clamp(min=0).double()
        y, x = (torch.arange(n, dtype=torch.float64) + 0.5 for n in weight.shape)
        centre = torch.stack([(weight.sum(0) * x).sum(), (weight.sum(1) * y).sum()]) / weight.sum()
        expected = geometry.xyxy_to_cxcywh(cut[image, box])[:2]
        assert (centre - expected).abs().amax() < 0.35, (name, image, centre, expected)
        if name != "rotated":  # rotated boxes enclose more than the rectangle
            bright = torch.nonzero(weight > 0.5)
            edges = torch.cat([bright.amin(0).flip(0), bright.amax(0).flip(0) + 1]).double()
            assert (edges - cut[image, box]).abs().amax() < 1.0, (name, edges, cut[image, box])


def test_boxes_go_through_the_affine_map_and_back() -> None:
    rng = np.random.default_rng(0)
    boxes = torch.from_numpy(np.sort(rng.uniform(0, 100, (3, 5, 2, 2)), axis=2).reshape(3, 5, 4)).float()
    turn = torch.tensor([[[-0.7, 0, 90], [0, 0.6, -5]], [[1.3, 0, 4], [0, 2.0, 8]], [[0.5, 0.5, 0], [-0.5, 0.5, 60]]])
    moved = geometry.map_to_input(boxes, turn)
    for b, n in itertools.product(range(3), range(5)):
        x1, y1, x2, y2 = boxes[b, n].tolist()
        points = torch.tensor([[x, y, 1.0] for x in (x1, x2) for y in (y1, y2)]) @ turn[b].T
        assert torch.allclose(moved[b, n], torch.cat([points.amin(0), points.amax(0)]), atol=1e-4)
    size = torch.full((3, 2), 1000.0)
    back = geometry.map_from_input(moved, turn, size)
    assert torch.allclose(back[:2], boxes[:2], atol=1e-3), "exact except for rotations"
    assert (back[2, :, :2] <= boxes[2, :, :2] + 1e-3).all() and (back[2, :, 2:] >= boxes[2, :, 2:] - 1e-3).all()


def test_clipped_boxes_stay_valid_if_enough_of_them_is_left() -> None:
    boxes = torch.tensor([[[-6.0, 0, 4, 10], [-5, 0, 5, 10], [0, 0, 0.5, 9], [70, 0, 80, 9], [0, 0, 0, 0]]])
    cut, valid = geometry.clip_boxes(boxes, (64, 64), visible=0.5, side_min_px=1)
    assert valid.tolist() == [[False, True, False, False, False]]
    assert cut[0, 1].tolist() == [0, 0, 5, 10]


def test_multi_scale_training_draws_shapes_of_multiples_of_32_and_boxes_to_match(
    rectangles: tuple[ShardSet, Config],
) -> None:
    data, config = rectangles
    config = replace(config, augment=type(config.augment)(), image=replace(config.image, scales=[1.0, 2.0]))
    stream = make_loader(data, config, "cpu").train(
        lambda epoch: shuffle(np.arange(12), seed=0, epoch=epoch, global_batch_size=4),
        epoch=0,
        start=0,
        micro_batch_size=0,
    )
    shapes = set()
    for batch in (next(stream).batch for _ in range(9)):
        height, width = batch["image"].shape[2:]
        shapes.add((height, width))
        moved = geometry.map_to_input(batch["boxes"], batch["affine"])
        assert torch.allclose(moved, batch["boxes"] * (height / 90), atol=0.5)
    stream.close()
    assert shapes == {(96, 128), (192, 256)}
