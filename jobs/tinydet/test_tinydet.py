"""The tinydet family: reading, tiles, boxes, pixels, networks, matching, losses, evaluation and weights."""

import argparse
import io
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from PIL import Image
from safetensors.torch import save_file
from torchvision.ops import generalized_box_iou, sigmoid_focal_loss

from trainyard.data.loader import Loader
from trainyard.data.order import shuffle
from trainyard.data.pack import pack
from trainyard.data.shards import BadRecord, Sample, ShardSet
from trainyard.errors import UserError
from trainyard.train.module import DataInfo
from trainyard.train.step import copy_for_average, enable_activation_checkpointing

from . import geometry, photometric
from .coco import Rules, read_collection
from .config import Config, PhotometricSettings
from .denoising import build_denoising_queries
from .evaluation import Detections, GroundTruth, evaluate
from .losses import compute_losses, compute_mean_repeats, focal, varifocal
from .matching import LossTerms, Objects, compute_costs, match, solve_assignments
from .module import TinyDet, build, build_network
from .multiscale import DeformableAttention, DeformableDETR, sample_levels
from .network import Backbone, Outputs, Predictions
from .overfit import make_small_config, overfit, record_learning_curve
from .pack import cut_tiles, fit_artifacts, load_image, parse_key, samples, splits, synthesize, unlabelled
from .synthesis import CATEGORIES, draw_scene
from .weights import load_backbone, load_detector

SMALL = (
    "data.synthetic=72",
    "packing.tile_px=0",
    "image.height_px=64",
    "image.width_px=64",
    "augment.scale_min=1",
    "augment.scale_max=1.5",
    "photometric.blur_px=5",
    "photometric.paste_px=10",
    "model.backbone=small",
    "model.width=8",
    "model.strides=[8,16]",
    "model.dims=32",
    "model.heads=4",
    "model.points=2",
    "model.feedforward=32",
    "model.decoder_layers=2",
    "model.queries=20",
    "model.denoising=20",
    "global_batch_size=16",
    "micro_batch_size=0",
    "max_duration=8st",
    "schedule.warmup=0st",
    "eval_every=4st",
    "checkpoint.every=3st",
    "evaluation.detections=20",
    "evaluation.pictures=2",
    "trackers=[]",
)
"""Makes a run of this family take seconds, for tests that cover all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and the scores that it must get.

    A scene is drawn from its number, which is the code of its file name.
    """
    scenes = [draw_scene(number, 0) for number in columns["picture"][ids].tolist()]
    most = max(len(labels) for _, _, labels in scenes)
    rows = {
        "box": np.stack([pad(boxes, most) for _, boxes, _ in scenes]).astype(np.float32),
        "score": np.stack([pad(np.ones(len(labels)), most) for _, _, labels in scenes]).astype(np.float32),
        "label": np.stack([pad(labels, most) for _, _, labels in scenes]),
        "sample_id": ids,
    }
    return rows, {"ap": 1.0, "ap50": 1.0, "ap_verytiny": 1.0, "ap_tiny": 1.0, "ap_car": 1.0, "ap_ball": 1.0}


def pad(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), dtype=values.dtype)])


def find_shared_data(name: str) -> Path:
    """Return a folder of real data, which is not part of the repository; skip the test if it is missing."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "detection" / name
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def make_config(variant: str = "ms", **model: Any) -> Config:
    config = make_small_config(variant, tile_px=64, scale=1.0)
    config.packing.tile_px = 0
    wanted = {"width": 8, "strides": [8, 16], "dims": 32, "feedforward": 32, "decoder_layers": 2, "queries": 12}
    for name, value in {**wanted, "denoising": 8, **model}.items():
        setattr(config.model, name, value)
    config.evaluation.detections = 12
    return config


ARTIFACTS = {
    "categories": json.dumps([{"id": 3, "name": "car"}, {"id": 7, "name": "ball"}]),
    "objects": json.dumps(
        {"pictures": 2, "width_px": 64, "height_px": 64, "side_px": 8.0, "per_sample": 2.0, "most": 3}
    ),
}


def make_module(config: Config) -> TinyDet:
    torch.manual_seed(0)
    return build(config, DataInfo({}, {}, np.arange(2), ARTIFACTS))


def make_batch(*, boxes: int = 3, images: int = 2, noise: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    corner = 5 + 40 * torch.rand(images, boxes, 2, generator=generator)
    batch = {
        "image": torch.rand(images, 3, 64, 64, generator=generator),
        "boxes": torch.cat([corner, corner + 4 + 8 * torch.rand(images, boxes, 2, generator=generator)], dim=2),
        "labels": torch.randint(2, (images, boxes), generator=generator),
        "boxes_count": torch.tensor([boxes, *[max(0, boxes - 1)] * (images - 1)]),
        "affine": torch.eye(3)[:2].repeat(images, 1, 1),
        "image_px": torch.full((images, 2), 64.0),
        "sample_id": torch.arange(images),
    }
    return {**batch, "noise": torch.rand(images, 32, generator=generator)} if noise else batch


# B1: evaluation


def score_fixture(areas: str) -> dict[str, float]:
    folder = find_shared_data("coco_eval_fixture")
    truth, found = (json.loads((folder / name).read_text()) for name in ("gt.json", "dt.json"))
    labels = {entry["id"]: i for i, entry in enumerate(truth["categories"])}

    def table(entries: list[dict[str, Any]], image: int, name: str) -> np.ndarray:
        chosen = [entry for entry in entries if entry["image_id"] == image]
        if name == "bbox":
            rows = np.array([entry["bbox"] for entry in chosen], dtype=float).reshape(-1, 4)
            return np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:]], axis=1)
        return np.array([labels[e[name]] if name == "category_id" else e[name] for e in chosen])

    truths, detections = [], []
    for image in [entry["id"] for entry in truth["images"]]:
        t, d = truth["annotations"], found
        crowd = table(t, image, "iscrowd") > 0
        truths.append(
            GroundTruth(table(t, image, "bbox"), table(t, image, "area"), table(t, image, "category_id"), crowd)
        )
        detections.append(Detections(table(d, image, "bbox"), table(d, image, "score"), table(d, image, "category_id")))
    return evaluate(truths, detections, categories=[e["name"] for e in truth["categories"]], areas=areas)


def test_the_fixture_gets_the_scores_of_pycocotools():
    metrics = score_fixture("coco")
    expected = {
        "ap": 0.071954, "ap50": 0.184978, "ap75": 0.069383, "ap_large": 0.077099,
        "ar_1": 0.011876, "ar_10": 0.032862, "ar_100": 0.075788,
    }  # fmt: skip
    assert {name: round(metrics[name], 6) for name in expected} == expected
    assert "ap_small" not in metrics, "the fixture has no object of that size"


def test_the_fixture_has_the_same_ap_with_the_sizes_and_limits_of_aitod():
    metrics = score_fixture("aitod")
    assert [round(metrics[name], 6) for name in ("ap", "ap50", "ap75", "ar_1500")] == [
        0.071954,
        0.184978,
        0.069383,
        0.075788,
    ]
    assert {"ap_medium", "ar_1", "ar_100", "ar_1500"} <= set(metrics) and "ap_large" not in metrics


def make_grid_of_boxes(count: int, side: float) -> np.ndarray:
    corner = np.stack(np.divmod(np.arange(count), 40), axis=1) * 20.0
    return np.concatenate([corner, corner + side], axis=1)


def one_image(count: int, found: int) -> tuple[list[GroundTruth], list[Detections]]:
    boxes, zeros = make_grid_of_boxes(count, 10), np.zeros(count, dtype=np.int64)
    truth = GroundTruth(boxes, np.full(count, 100.0), zeros, zeros > 0)
    return [truth], [Detections(boxes[:found], np.linspace(1, 0.5, found), zeros[:found])]


def test_more_than_100_objects_need_the_limits_of_aitod():
    truths, detections = one_image(300, 300)
    assert evaluate(truths, detections, categories=["a"], areas="aitod")["ap"] == pytest.approx(1.0)
    assert evaluate(truths, detections, categories=["a"], areas="coco")["ap"] == pytest.approx(34 / 101)


@pytest.mark.parametrize("found", [1, 2])
def test_a_crowd_is_neither_right_nor_wrong(found):
    truths, detections = one_image(2, found)
    with_crowd = [replace(truths[0], crowd=np.array([False, True]))]
    assert evaluate(with_crowd, detections, categories=["a"], areas="aitod")["ap"] == pytest.approx(1.0)


def test_a_detection_in_an_image_without_objects_is_wrong():
    truths, detections = one_image(1, 1)
    empty = GroundTruth(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    sure = Detections(np.array([[0.0, 0, 5, 5]]), np.array([2.0]), np.array([0]))
    assert evaluate([*truths, empty], [*detections, sure], categories=["a"], areas="aitod")["ap50"] == pytest.approx(
        0.5
    )


def test_no_detections_score_0(capsys):
    truths, _ = one_image(2, 2)
    nothing = [Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64))]
    assert evaluate(truths, nothing, categories=["a"], areas="aitod")["ap"] == 0
    assert capsys.readouterr().out == "", "the evaluator prints nothing"


# B2: matching and distances


def make_objects(rng: np.random.Generator, count: int, *, images: int = 1, length: int | None = None) -> Objects:
    length = count if length is None else length
    boxes = torch.from_numpy(rng.uniform(0.1, 0.4, (images, length, 4))).float()
    labels = torch.from_numpy(rng.integers(0, 3, (images, length)))
    return Objects(boxes, labels, torch.arange(length).expand(images, -1) < count, (64, 96))


def random_predictions(rng: np.random.Generator, *, layers: int = 1, images: int = 1, queries: int = 6) -> Predictions:
    boxes = torch.from_numpy(rng.uniform(0.05, 0.5, (layers, images, queries, 4))).float()
    return Predictions(torch.from_numpy(rng.normal(size=(layers, images, queries, 3))).float(), boxes)


FOCAL = LossTerms("focal", 2, 2, 5, 2)


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.parametrize("terms", [FOCAL, replace(FOCAL, nwd_share=0.5), LossTerms("softmax", 1, 1, 5, 2)])
def test_the_matcher_equals_brute_force(count, terms):
    rng = np.random.default_rng(count)
    for _ in range(5):
        predictions, objects = random_predictions(rng), make_objects(rng, count)
        found = match(*predictions, objects, terms)
        cost = compute_costs(*predictions, objects, terms)[0, 0].numpy()
        best = min(sum(cost[list(order), range(count)]) for order in itertools.permutations(range(6), count))
        assert cost[found.query_M, found.object_M].sum() == pytest.approx(best, abs=1e-5)
        assert sorted(found.object_M.tolist()) == list(range(count))


def test_the_costs_are_those_of_the_papers():
    logits = torch.tensor([0.8, 0.3]).logit().view(1, 1, 1, 2)
    ours, theirs = torch.tensor([0.5, 0.5, 0.2, 0.2]), torch.tensor([0.6, 0.5, 0.2, 0.2])
    predictions = Predictions(logits, ours.view(1, 1, 1, 4))
    objects = Objects(theirs.view(1, 1, 4), torch.tensor([[0]]), torch.tensor([[True]]), (120, 60))
    category = 0.25 * 0.2**2 * -math.log(0.8) - 0.75 * 0.8**2 * -math.log(0.2)
    overlap = 1 / 3 - 0.0  # nothing of the hull is empty
    assert float(compute_costs(*predictions, objects, FOCAL)) == pytest.approx(
        2 * category + 5 * 0.1 - 2 * overlap, rel=1e-5
    )
    nwd = math.exp(-6 / 12.8)  # a tenth of 60 px
    with_nwd = 2 * category + 5 * 0.1 - 2 * (0.25 * overlap + 0.75 * nwd)
    assert float(compute_costs(*predictions, objects, replace(FOCAL, nwd_share=0.75))) == pytest.approx(
        with_nwd, rel=1e-5
    )
    softmax = LossTerms("softmax", 1, 1, 5, 2)
    probability = 0.8 / 0.2 / (0.8 / 0.2 + 0.3 / 0.7)
    assert float(compute_costs(*predictions, objects, softmax)) == pytest.approx(
        -probability + 5 * 0.1 - 2 * overlap, rel=1e-5
    )


def test_padding_is_never_matched_and_layers_and_images_are_matched_separately():
    rng = np.random.default_rng(0)
    predictions, objects = random_predictions(rng, layers=3, images=4), make_objects(rng, 2, images=4, length=5)
    objects = objects._replace(valid_BL=torch.tensor([False, True, False, True, False]).expand(4, -1))
    together = match(*predictions, objects, FOCAL)
    assert len(together.query_M) == 3 * 4 * 2 and set(together.object_M.tolist()) == {1, 3}
    for layer, image in itertools.product(range(3), range(4)):
        part = Objects(*(values[image : image + 1] for values in objects[:3]), objects.size_px)
        alone = match(
            predictions.logits_DBQK[layer : layer + 1, image : image + 1],
            predictions.boxes_DBQ4[layer : layer + 1, image : image + 1],
            part,
            FOCAL,
        )
        here = (together.layer_M == layer) & (together.image_M == image)
        assert dict(zip(together.query_M[here].tolist(), together.object_M[here].tolist(), strict=True)) == dict(
            zip(alone.query_M.tolist(), alone.object_M.tolist(), strict=True)
        )


def test_non_finite_costs_are_counted_and_never_abort_the_step():
    rng = np.random.default_rng(0)
    predictions, objects = random_predictions(rng, images=2), make_objects(rng, 3, images=2)
    predictions.logits_DBQK[0, 0, 2] = math.nan
    predictions.boxes_DBQ4[0, 0, 4] = math.inf
    found = match(*predictions, objects, FOCAL)
    assert found.non_finite == 2 * 3 and len(found.query_M) == 2 * 3
    in_first = found.image_M == 0
    assert not {2, 4} & set(found.query_M[in_first].tolist()), "there are enough finite costs"
    everything = solve_assignments(
        np.full((1, 1, 4, 2), np.nan, np.float32), np.ones((1, 2), bool), device=torch.device("cpu")
    )
    assert everything.non_finite == 8 and len(everything.query_M) == 2


@pytest.mark.parametrize(
    ("side", "shift", "iou", "nwd"), [(12, 6, 1 / 3, 0.6258), (6, 6, 0.0, 0.6258), (6, 1, 5 / 7, 0.9248), (12, 0, 1, 1)]
)
def test_iou_and_nwd_have_their_known_values(side, shift, iou, nwd):
    a = torch.tensor([20.0, 20, 20 + side, 20 + side], dtype=torch.float64)
    b = a + torch.tensor([shift, 0, shift, 0.0])
    assert float(geometry.iou(a, b)[0]) == pytest.approx(iou, abs=1e-9)
    found = geometry.nwd(geometry.xyxy_to_cxcywh(a), geometry.xyxy_to_cxcywh(b), 12.8)
    assert float(found) == pytest.approx(nwd, abs=5e-5)


def test_nwd_counts_half_the_difference_of_sides():
    a, b = torch.tensor([5.0, 5, 12, 12]), torch.tensor([5.0, 5, 6, 6])
    assert float(geometry.nwd(a, b, 12.8)) == pytest.approx(math.exp(-math.sqrt((36 + 36) / 4) / 12.8))


def test_giou_equals_torchvision_and_falls_with_the_distance_of_disjoint_boxes():
    rng = np.random.default_rng(0)
    a, b = (geometry.cxcywh_to_xyxy(torch.from_numpy(rng.uniform(0.1, 0.5, (30, 4)))) for _ in range(2))
    assert torch.allclose(geometry.giou(a[:, None], b[None]), generalized_box_iou(a, b), atol=1e-12)
    still = torch.tensor([0.0, 0, 1, 1])
    away = [float(geometry.giou(still, still + torch.tensor([d, 0.0, d, 0.0]))) for d in (2, 3, 9)]
    assert away == pytest.approx([-1 / 3, -2 / 4, -8 / 10])


def test_an_empty_box_and_a_box_compared_with_itself_have_finite_gradients():
    for a, b in ((torch.full((4,), 0.5), torch.tensor([0.5, 0.5, 1e-6, 1e-6])), (torch.full((4,), 0.3),) * 2):
        a = a.clone().requires_grad_()
        overlap = geometry.giou(geometry.cxcywh_to_xyxy(a), geometry.cxcywh_to_xyxy(b)) + geometry.nwd(
            100 * a, 100 * b, 12.8
        )
        overlap.backward()
        assert a.grad is not None and a.grad.isfinite().all()


# Losses


def test_focal_loss_equals_torchvision():
    rng = np.random.default_rng(0)
    logits, target = torch.from_numpy(rng.normal(size=(40, 5))), torch.from_numpy(rng.integers(0, 2, (40, 5))).double()
    assert torch.allclose(focal(logits, target, target), sigmoid_focal_loss(logits, target))


def test_varifocal_loss_has_the_iou_as_target_and_weight():
    logits, quality = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.7, 0.0, 0.0])
    found = varifocal(logits, quality, torch.tensor([1.0, 0.0, 0.0]))
    p = logits.sigmoid()
    assert float(found[0]) == pytest.approx(0.7 * -(0.7 * math.log(0.5) + 0.3 * math.log(0.5)), rel=1e-6)
    assert found[1:].tolist() == pytest.approx((0.75 * p.square() * -(1 - p).log())[1:].tolist(), rel=1e-5)


def test_softmax_loss_equals_torch_s_mean_weighted_by_category():
    rng = np.random.default_rng(0)
    objects = make_objects(rng, 2)
    logits = torch.from_numpy(rng.normal(size=(1, 1, 6, 4))).float()
    predictions = Predictions(logits, random_predictions(rng).boxes_DBQ4)
    terms = LossTerms("softmax", 1, 1, 0, 0)
    found = match(*predictions, objects, terms)
    target = torch.full((6,), 3)
    target[found.query_M] = objects.labels_BL[0, found.object_M]
    expected = torch.nn.functional.cross_entropy(logits[0, 0], target, weight=torch.tensor([1.0, 1, 1, 0.1]))
    assert float(compute_total_loss(predictions, objects, terms)["loss"]) == pytest.approx(float(expected), rel=1e-5)


def compute_total_loss(predictions: Predictions, objects: Objects, terms: LossTerms) -> dict[str, torch.Tensor]:
    return compute_losses(Outputs(predictions), None, objects, terms=terms, divisor=torch.tensor(2.0))


@pytest.mark.parametrize("name", ["focal", "varifocal", "softmax"])
def test_right_predictions_cost_next_to_nothing_and_wrong_ones_more(name):
    objects = make_objects(np.random.default_rng(0), 3)
    boxes = torch.full((2, 1, 8, 4), 0.9)
    boxes[:, :, :3] = objects.boxes_BL4
    logits = torch.full((2, 1, 8, 4 if name == "softmax" else 3), -12.0)
    logits[:, 0, torch.arange(3), objects.labels_BL[0]] = 12.0
    if name == "softmax":
        logits[:, :, 3:, 3] = 12.0
    terms = replace(FOCAL, classification=name)
    right = compute_total_loss(Predictions(logits, boxes), objects, terms)
    assert float(right["loss"]) < 1e-4
    assert float(compute_total_loss(Predictions(logits, boxes + 0.05), objects, terms)["loss"]) > 0.5
    assert float(compute_total_loss(Predictions(logits.roll(1, -1), boxes), objects, terms)["loss"]) > 0.5


def test_every_layer_and_the_proposals_have_the_same_weights():
    rng = np.random.default_rng(0)
    predictions, objects = random_predictions(rng, layers=3, images=2), make_objects(rng, 2, images=2)
    alone = [
        compute_total_loss(
            Predictions(predictions.logits_DBQK[i : i + 1], predictions.boxes_DBQ4[i : i + 1]), objects, FOCAL
        )["loss"]
        for i in range(3)
    ]
    together = compute_total_loss(predictions, objects, FOCAL)
    assert float(together["loss"]) == pytest.approx(float(sum(alone)), rel=1e-5)
    assert float(together["earlier_loss"]) == pytest.approx(float(alone[0] + alone[1]), rel=1e-5)
    parts = 2 * together["class_loss"] + 5 * together["box_loss"] + 2 * together["overlap_loss"]
    assert float(parts) == pytest.approx(float(alone[2]), rel=1e-5)
    last = Predictions(predictions.logits_DBQK[2:], predictions.boxes_DBQ4[2:])
    first = Predictions(predictions.logits_DBQK[:1], predictions.boxes_DBQ4[:1])
    two_stage = compute_losses(Outputs(last, first), None, objects, terms=FOCAL, divisor=torch.tensor(2.0))
    assert float(two_stage["loss"]) == pytest.approx(float(alone[0] + alone[2]), rel=1e-5)


def test_the_loss_of_images_without_objects_is_finite_and_teaches_to_find_none():
    for variant in ("vanilla", "cond", "ms"):
        module = make_module(make_config(variant))
        batch = {**make_batch(), "boxes": torch.zeros(2, 0, 4), "labels": torch.zeros(2, 0, dtype=torch.long)}
        losses = module({**batch, "boxes_count": torch.zeros(2, dtype=torch.long)})
        losses["loss"].backward()
        assert losses["box_loss"].item() == 0 and losses["class_loss"].item() > 0 and float(losses["objects"]) == 0
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_normalised_by_the_data_a_batch_has_the_mean_loss_of_its_halves():
    config = make_config(denoising=0)
    config.loss.normalise = "data"
    module, batch = make_module(config), make_batch(images=4)
    whole = module(batch)["loss"].item()
    halves = [module({k: v[i : i + 2] for k, v in batch.items()})["loss"].item() for i in (0, 2)]
    assert whole == pytest.approx(sum(halves) / 2, rel=1e-5)


# B3, B4, B5: networks


def test_vanilla_trains_as_many_parameters_as_detr():
    config = Config()
    model = config.model
    model.variant, model.queries, model.feedforward, model.encoder_layers, model.dropout = "vanilla", 100, 2048, 6, 0.1
    backbone = Backbone("resnet50", norm="frozen", width=32, dilated=False)
    network = build_network(model, backbone, categories=91)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == 41_302_368
    assert sum(p.numel() for p in network.parameters()) == 41_302_368 + 222_400  # stem and first stage are frozen


def test_a_dilated_backbone_ends_at_stride_16():
    for dilated, side in ((False, 2), (True, 4)):
        backbone = Backbone("resnet50", norm="frozen", width=32, dilated=dilated).eval()
        with torch.no_grad():
            assert backbone(torch.zeros(1, 3, 64, 64))[-1].shape == (1, 2048, side, side)


def make_deformable_case(dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grids = [(5, 4), (3, 2)]
    values = torch.randn(2, 26, 2, 3, generator=generator, dtype=dtype)
    at = torch.rand(2, 4, 2, 2, 3, 2, generator=generator, dtype=dtype) * 1.4 - 0.2  # some outside
    weights = torch.rand(2, 4, 2, 2, 3, generator=generator, dtype=dtype)
    return values, grids, at, weights


def read_at(level: torch.Tensor, x: float, y: float) -> torch.Tensor:
    """Sample (h, w, c) bilinearly at relative x, y, cell by cell; zero outside."""
    h, w, _ = level.shape
    column, row = x * w - 0.5, y * h - 0.5
    found = torch.zeros(level.shape[2], dtype=level.dtype)
    for i, j in itertools.product((math.floor(row), math.floor(row) + 1), (math.floor(column), math.floor(column) + 1)):
        if 0 <= i < h and 0 <= j < w:
            found += (1 - abs(row - i)) * (1 - abs(column - j)) * level[i, j]
    return found


def test_deformable_attention_equals_a_loop_over_points():
    values, grids, at, weights = make_deformable_case(torch.float32)
    found = sample_levels(values, grids, at, weights)
    starts = np.cumsum([0, *[h * w for h, w in grids]])
    for b, q, m in itertools.product(range(2), range(4), range(2)):
        expected = torch.zeros(3)
        for number, p in itertools.product(range(2), range(3)):
            level = values[b, starts[number] : starts[number + 1], m].view(*grids[number], 3)
            expected += weights[b, q, m, number, p] * read_at(level, *at[b, q, m, number, p].tolist())
        assert torch.allclose(found[b, q, 3 * m : 3 * m + 3], expected, atol=1e-5)


def test_deformable_attention_has_the_right_gradients():
    values, grids, at, weights = (
        x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in make_deformable_case(torch.float64)
    )
    assert torch.autograd.gradcheck(lambda v, a, w: sample_levels(v, grids, a, w), (values, at, weights))


def test_each_head_initially_samples_along_its_own_line_within_the_box():
    attention = DeformableAttention(32, heads=8, levels=2, points=4)
    offsets = attention.offsets.bias.view(8, 2, 4, 2)
    assert offsets.abs().amax() == 4 and torch.equal(offsets[:, 0], offsets[:, 1])
    assert torch.allclose(offsets[:, 0].abs().amax(dim=-1), torch.arange(1.0, 5).expand(8, -1))
    angles = torch.atan2(offsets[:, 0, 0, 1], offsets[:, 0, 0, 0])
    assert len(angles.round(decimals=3).unique()) == 8


def test_queries_do_not_attend_to_denoising_queries_nor_groups_to_each_other():
    config = make_config(denoising=24)
    network = make_module(config).network.eval()
    assert isinstance(network, DeformableDETR)
    batch, objects = make_batch(), make_objects(np.random.default_rng(0), 3, images=2)
    objects = objects._replace(
        labels_BL=objects.labels_BL % 2, valid_BL=torch.tensor([[True] * 3, [True, True, False]])
    )
    torch.manual_seed(0)
    one = build_denoising_queries(*objects[:3], count=24, categories=2, label_noise=0.5, box_noise=1.0)
    with torch.no_grad():
        for parameter in [*network.decoder.parameters(), *network.bbox_embed.parameters()]:  # so that leaks would show
            parameter.add_(0.1 * torch.randn_like(parameter))
        args = (batch["image"], batch["affine"], batch["image_px"])
        before = network(*args, one)
        changed = one._replace(boxes_BN4=torch.rand_like(one.boxes_BN4), labels_BN=1 - one.labels_BN)
        after = network(*args, changed)
        assert torch.equal(before.predictions.logits_DBQK, after.predictions.logits_DBQK)
        assert torch.equal(before.predictions.boxes_DBQ4, after.predictions.boxes_DBQ4)
        assert not torch.equal(before.denoising.boxes_DBQ4, after.denoising.boxes_DBQ4)
        first = one.group_N == 0
        other = one._replace(boxes_BN4=torch.where(first[:, None], one.boxes_BN4, changed.boxes_BN4))
        third = network(*args, other)
        assert torch.equal(before.denoising.boxes_DBQ4[:, :, first], third.denoising.boxes_DBQ4[:, :, first])
        assert torch.equal(before.denoising.logits_DBQK[:, :, first], third.denoising.logits_DBQK[:, :, first])
        assert not torch.equal(before.denoising.boxes_DBQ4[:, :, ~first], third.denoising.boxes_DBQ4[:, :, ~first])


@pytest.mark.parametrize(("objects", "groups"), [(1, 10), (3, 3), (10, 1), (25, 0.4)])
def test_the_number_of_denoising_queries_does_not_depend_on_the_objects(objects, groups):
    torch.manual_seed(0)
    made = make_objects(np.random.default_rng(0), objects, images=2)
    found = build_denoising_queries(*made[:3], count=20, categories=3, label_noise=0.5, box_noise=1.0)
    assert found.labels_BN.shape == (2, 20) and found.boxes_BN4.shape == (2, 20, 4)
    assert compute_mean_repeats(found, objects) == pytest.approx(groups)
    assert int(found.positive_BN.sum()) == 2 * round(groups * objects)
    assert ((found.boxes_BN4 >= 0) & (found.boxes_BN4 <= 1)).all()


def test_positive_noise_stays_within_half_a_side_and_negative_noise_does_not():
    torch.manual_seed(0)
    made = make_objects(np.random.default_rng(0), 2, images=50)._replace(
        boxes_BL4=torch.tensor([0.5, 0.5, 0.2, 0.1]).expand(50, 2, 4)
    )
    found = build_denoising_queries(*made[:3], count=8, categories=3, label_noise=0.5, box_noise=1.0)
    true = geometry.cxcywh_to_xyxy(torch.tensor([0.5, 0.5, 0.2, 0.1]))
    half = torch.tensor([0.1, 0.05, 0.1, 0.05])
    near = geometry.cxcywh_to_xyxy(found.boxes_BN4[found.positive_BN])
    assert ((near - true).abs() <= half + 1e-6).all()
    edges = (
        (geometry.cxcywh_to_xyxy(found.boxes_BN4[found.used_BN & ~found.positive_BN]) - true).abs() > half - 1e-6
    ).float()
    assert edges.mean() > 0.7  # swapped edges become a box with the same centre
    labels = (found.labels_BN != made.labels_BL.gather(1, found.target_BN))[found.used_BN].float().mean()
    assert 0.1 < float(labels) < 0.25  # 0.5 / 2; a third of these draw the old label again


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_every_parameter_of_every_variant_is_trained(variant):
    module = make_module(make_config(variant))
    for parameter in module.parameters():  # layers that start at 0 would block the gradients of those before them
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    module(make_batch())["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None] == [], "ranks would wait for them forever"
    still = [name for name, grad in gradients.items() if not grad.any()]
    nothing_yet = "decoder.layers.0.sa_"  # the first layer of Conditional DETR has only positions to attend to
    assert [name for name in still if nothing_yet not in name] == []


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_in_half_precision_losses_and_boxes_are_float32(variant):
    module, batch = make_module(make_config(variant)), make_batch(noise=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses = module(batch)
        module.eval()
        rows = module.predict(batch)
    assert all(value.dtype == torch.float32 and value.isfinite() for value in losses.values())
    assert rows["box"].dtype == rows["score"].dtype == torch.float32
    module.train()
    assert losses["loss"].item() == pytest.approx(module(batch)["loss"].item(), rel=0.2)  # 8 bits, other denoising


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_gradient_checkpointing_changes_no_gradient(variant):
    grads = []
    for checkpointing in (False, True):
        module = make_module(make_config(variant, encoder_layers=2))
        if checkpointing:
            assert enable_activation_checkpointing(module) == 4
        torch.manual_seed(1)
        module(make_batch())["loss"].backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True) if a is not None)


def test_a_compiled_module_has_the_same_losses():
    config = make_config()
    losses = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):  # eager: only tracing can go wrong
        module = wrap(make_module(config))
        torch.manual_seed(1)
        losses.append({name: value.item() for name, value in module(make_batch(noise=True)).items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_averaged_weights_can_be_copied_with_open_data(tmp_path):
    data, config, _ = pack_tiles(tmp_path)
    data.read("image", np.arange(2))  # opens and maps its files
    module = build(config, data)
    averaged = copy_for_average(module)
    assert averaged.score(make_true_rows(data)) == module.score(make_true_rows(data))
    assert not any(p.requires_grad for p in averaged.parameters())


def test_predictions_have_a_fixed_number_of_detections_in_pixels_of_the_sample():
    config = make_config(queries=5)
    config.evaluation.detections = 16
    module, batch = make_module(config).eval(), make_batch()
    batch["affine"] = torch.tensor([[[0.5, 0, 0], [0, 0.5, 0]]]).repeat(2, 1, 1)
    batch["image_px"] = torch.tensor([[100.0, 128.0]]).repeat(2, 1)
    rows = module.predict(batch)
    assert rows["box"].shape == (2, 16, 4) and rows["score"].shape == rows["label"].shape == (2, 16)
    assert (rows["score"][:, :10] > 0).all() and (rows["score"][:, 10:] == 0).all()  # 5 queries, 2 categories
    assert (
        (rows["box"] >= 0).all() and (rows["box"][..., [0, 2]] <= 128).all() and (rows["box"][..., [1, 3]] <= 100).all()
    )
    assert rows["box"][..., 2].amax() > 64, "boxes are in pixels of the sample, twice the size of the input"


@pytest.mark.parametrize("variant", ["vanilla", "ms"])
def test_padding_next_to_an_image_gets_no_proposals_and_no_attention(variant):
    module = make_module(make_config(variant)).eval()
    batch = make_batch(images=1)
    batch["image_px"] = torch.tensor([[64.0, 32.0]])
    outputs = module.network(batch["image"], batch["affine"], batch["image_px"])
    if outputs.proposals is not None:
        assert (outputs.proposals.boxes_DBQ4[..., 0] < 0.5).all()
    mask = geometry.make_image_mask(batch["affine"], batch["image_px"], (64, 64), (8, 8))
    assert torch.equal(mask[0], (torch.arange(8) < 4).expand(8, -1))


# Learning


def test_the_detector_for_tiny_objects_overfits_two_scenes():
    config = make_small_config("ms", tile_px=160, scale=1.0)
    config.image.height_px, config.image.width_px = 128, 160
    config.model.width, config.model.dims, config.model.feedforward, config.model.queries = 16, 64, 96, 40
    config.evaluation.detections = 40
    made = []
    for number in range(2):
        pixels, boxes, labels = draw_scene(number, 5)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        made.append((str(number), png.getvalue(), boxes.astype(np.float32), labels))
    curve = list(record_learning_curve(config, made, ARTIFACTS, steps=60, every=30, lr=2e-3))
    assert curve[-1]["ap50"] > 0.9 and curve[-1]["loss"] < 0.8 * curve[0]["loss"], curve


def test_overfitting_writes_a_curve_for_each_variant_on_the_same_tiles(tmp_path):
    raw = write_coco(tmp_path / "raw")
    options: dict[str, Any] = {"steps": 2, "tiles": 2, "tile_px": 32, "scale": 1.0, "results": tmp_path}
    path = overfit(raw, variants=["ms", "vanilla"], **options)
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (
        head["options"]["objects"] == 2
        and len(head["options"]["tiles"]) == 2
        and head["environment"]["versions"]["torch"]
    )
    assert [(line["variant"], line["step"]) for line in lines] == [("ms", 1), ("ms", 2), ("vanilla", 1), ("vanilla", 2)]
    assert overfit(raw, variants=["cond"], **options) != path, "no result file is overwritten"
    with pytest.raises(UserError, match="expected some of ms, cond, vanilla, found yolo"):
        overfit(raw, variants=["yolo"], **options)


# Boxes through augmentation


def write_rectangles(folder: Path, *, size: tuple[int, int] = (120, 90)) -> Path:
    """Write images with one red and one green rectangle each, and their annotations."""
    (folder / "images").mkdir(parents=True)
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}],
    }
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
        for category, left in ((0, 8), (1, 68)):
            w, h = rng.integers(12, 24, 2).tolist()
            x, y = left + int(rng.integers(0, 20)), int(rng.integers(8, 60))
            pixels[y : y + h, x : x + w, category] = 255
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": category + 1}
            content["annotations"].append({**entry, "bbox": [x, y, w, h], "iscrowd": 0})
        Image.fromarray(pixels).save(folder / "images" / f"{number:02d}.png")
        content["images"].append({"id": number, "file_name": f"{number:02d}.png", "width": size[0], "height": size[1]})
    (folder / "instances_train.json").write_text(json.dumps(content))
    return folder


def pack_folder(raw: Path, out: Path, config: Config) -> ShardSet:
    return pack(samples(raw, config), out, meta={}, workers=1, artifacts=fit_artifacts(raw, config))


def make_loader(data: ShardSet, config: Config, decode: str) -> Loader:
    return Loader(
        data, settings=config.data, image=config.image, augmentation=config.augment, seed=0, rank=0, world_size=1,
        device=torch.device("cpu"), threads=1, channels_last=False, decode=decode,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rectangles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("painted")
    raw = write_rectangles(folder / "raw")
    config = Config()
    config.image.channels, config.image.fit, config.image.fill = 3, "letterbox", 0
    config.image.height_px, config.image.width_px = 96, 128
    data = pack_folder(raw, folder / "packed", config)
    yield data, config
    data.close()


AUGMENTATIONS = {
    "none": {},
    "flip": {"flip": 1.0},
    "smaller": {"scale_min": 0.6, "scale_max": 0.9},
    "larger": {"scale_min": 1.5, "scale_max": 2.0, "crop_keeps": "boxes"},
    "rotated": {"rotate_deg": 30.0},
    "everything": {"flip": 0.5, "scale_min": 0.7, "scale_max": 1.5, "crop_keeps": "boxes", "shift": 0.05, "zoom": 0.1},
}


@pytest.mark.parametrize("decode", ["cpu", "dali"])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_boxes_follow_the_image_to_less_than_a_pixel(rectangles, name, decode):
    if decode == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    data, config = rectangles
    config.augment = type(config.augment)(**AUGMENTATIONS[name])
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


def test_boxes_go_through_the_affine_map_and_back():
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


def test_clipped_boxes_stay_valid_if_enough_of_them_is_left():
    boxes = torch.tensor([[[-6.0, 0, 4, 10], [-5, 0, 5, 10], [0, 0, 0.5, 9], [70, 0, 80, 9], [0, 0, 0, 0]]])
    cut, valid = geometry.clip_boxes(boxes, (64, 64), visible=0.5, side_min_px=1)
    assert valid.tolist() == [[False, True, False, False, False]]
    assert cut[0, 1].tolist() == [0, 0, 5, 10]


# Pixels


def make_noise(images: int, **columns: float) -> torch.Tensor:
    noise = torch.full((images, 32), 0.5)
    for name, value in columns.items():
        noise[:, getattr(photometric, name)] = value
    return noise


def test_lab_has_its_known_values_and_converts_back():
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0.5, 0.5, 0.5]]).T.view(1, 3, 1, 5)
    known = [[53.24, 80.09, 67.20], [87.73, -86.18, 83.18], [32.30, 79.19, -107.86], [100, 0, 0], [53.39, 0, 0]]
    lab = photometric.rgb_to_lab(colours)
    assert torch.allclose(lab[0, :, 0].T, torch.tensor(known), atol=0.02)
    image = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(photometric.lab_to_rgb(photometric.rgb_to_lab(image)), image, atol=1e-5)


def equalise(level: np.ndarray, *, clip: float, tiles: int) -> np.ndarray:
    """Apply CLAHE to integer levels 0..255 by its definition, pixel by pixel; sides are multiples of `tiles`."""
    tall, wide = level.shape[0] // tiles, level.shape[1] // tiles
    curves = np.zeros((tiles, tiles, 256))
    for i, j in itertools.product(range(tiles), range(tiles)):
        counts = np.bincount(level[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide].ravel(), minlength=256).astype(
            float
        )
        limit = max(1.0, clip * tall * wide / 256)
        counts = np.minimum(counts, limit) + np.maximum(counts - limit, 0).sum() / 256
        curves[i, j] = np.minimum(255, np.cumsum(counts) * 255 / (tall * wide))
    out = np.zeros(level.shape)
    for y, x in np.ndindex(*level.shape):
        at_y, at_x = (y + 0.5) / tall - 0.5, (x + 0.5) / wide - 0.5
        for i, j in itertools.product(
            (math.floor(at_y), math.floor(at_y) + 1), (math.floor(at_x), math.floor(at_x) + 1)
        ):
            share = (1 - abs(at_y - i)) * (1 - abs(at_x - j))
            out[y, x] += share * curves[min(max(i, 0), tiles - 1), min(max(j, 0), tiles - 1), level[y, x]]
    return out


def test_clahe_equals_its_definition():
    rng = np.random.default_rng(0)
    gray = np.clip(rng.normal(0.4, 0.05, (24, 32)), 0, 1) ** 2
    image = torch.from_numpy(gray).float().expand(1, 3, -1, -1)
    level = (photometric.rgb_to_lab(image)[0, 0] * 2.55).clamp(0, 255)
    expected = equalise(level.round().numpy().astype(int), clip=2.0, tiles=4)
    found = photometric.rgb_to_lab(photometric.apply_clahe(image, clip=2.0, tiles=4))[0, 0] * 2.55
    assert np.abs(found.numpy() - expected).max() < 0.05
    assert found.std() > 1.5 * level.std(), "CLAHE raises local contrast"


def test_clahe_keeps_colour_and_accepts_any_size():
    image = 0.3 + 0.3 * torch.rand(1, 3, 37, 50, generator=torch.Generator().manual_seed(0))
    changed = photometric.apply_clahe(image, clip=1.5, tiles=8)
    assert changed.shape == image.shape and not torch.allclose(changed, image)
    inside = ((changed > 0.001) & (changed < 0.999)).all(dim=1)  # colours outside the gamut are clamped
    difference = (photometric.rgb_to_lab(changed) - photometric.rgb_to_lab(image))[:, 1:].abs().amax(dim=1)
    assert inside.float().mean() > 0.5 and difference[inside].max() < 0.01


def test_motion_blur_draws_a_line_and_moves_nothing():
    point = torch.zeros(3, 3, 31, 31)
    point[:, :, 15, 15] = 1
    length = torch.tensor([1.0, 5.0, 9.0])
    found = photometric.apply_motion_blur(point, length, torch.tensor([0.0, 0.0, math.pi / 4]), longest=15)
    assert torch.allclose(found[0], point[0], atol=1e-6)
    assert found[1, 0, 15, 12:19].tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2, 0], abs=1e-6)
    assert torch.allclose(found.sum(dim=(2, 3)), torch.ones(3, 3), atol=1e-5)
    assert torch.allclose(found, found.flip(2, 3), atol=1e-6), "symmetric, so that boxes stay valid"
    assert found[2, 0].diagonal().sum() > 0.6 and found[2, 0].diagonal().count_nonzero() > 5
    flat = torch.full((1, 3, 16, 16), 0.7)
    assert torch.allclose(photometric.apply_motion_blur(flat, length[2:], length[:1], longest=15), flat, atol=1e-6)


def test_colour_jitter_at_the_middle_of_its_range_changes_nothing_and_hue_keeps_gray():
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = PhotometricSettings()
    assert torch.allclose(photometric.jitter_colour(image, make_noise(2), settings), image, atol=1e-3)
    brighter = photometric.jitter_colour(image * 0.5, make_noise(2, BRIGHTNESS=1.0), settings)
    assert torch.allclose(brighter, image * 0.5 * 1.2, atol=1e-3)
    gray = image[:, :1].expand(-1, 3, -1, -1)
    assert torch.allclose(
        photometric.jitter_colour(gray, make_noise(2, HUE=1.0, SATURATION=0.0), settings), gray, atol=1e-3
    )


def test_each_change_happens_with_its_probability_and_otherwise_not_at_all():
    image = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(64, 32, generator=torch.Generator().manual_seed(1))
    assert photometric.augment(image, noise, PhotometricSettings()) is image
    for name, column in (("colour_p", "COLOUR"), ("clahe_p", "CLAHE"), ("blur_p", "BLUR")):
        settings = PhotometricSettings(**{name: 0.5}, clahe_tiles=4)
        changed = photometric.augment(image, noise, settings)
        same = (changed == image).flatten(1).all(dim=1)
        assert torch.equal(~same, noise[:, getattr(photometric, column)] < 0.5), name
        assert ((changed >= 0) & (changed <= 1)).all()


def make_paste_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    image = torch.zeros(2, 3, 64, 64)
    image[1, 0, 10:16, 20:28] = 1.0  # copied from the second image to the first
    image[1, 1, 30:60, 4:44] = 1.0  # too large to be copied
    boxes = torch.tensor([[[40.0, 40, 50, 50], [0, 0, 0, 0]], [[20, 10, 28, 16], [4, 30, 44, 60]]])
    return image, boxes, torch.tensor([[0, 0], [1, 0]]), torch.tensor([[True, False], [True, True]])


def test_pasted_objects_are_pixel_for_pixel_the_small_ones_of_the_neighbour():
    image, boxes, labels, valid = make_paste_case()
    settings = PhotometricSettings(paste_p=1.0, paste_count=1, paste_px=16)
    noise = make_noise(2)
    noise[:, photometric.PASTED + 1], noise[:, photometric.PASTED + 2] = 0.137, 0.41  # not whole pixels
    found, new_boxes, new_labels, new_valid = photometric.paste(image, boxes, labels, valid, noise, settings)
    assert new_boxes.shape == (2, 3, 4) and new_valid[0].tolist() == [True, False, True] and int(new_labels[0, 2]) == 1
    x1, y1, x2, y2 = new_boxes[0, 2].int().tolist()
    assert (x2 - x1, y2 - y1) == (8, 6)
    assert torch.equal(found[0, :, y1:y2, x1:x2], image[1, :, 10:16, 20:28])
    rest = found[0].clone()
    rest[:, y1 - 2 : y2 + 2, x1 - 2 : x2 + 2] = 0
    assert not rest.any() and torch.equal(new_boxes[:, :2], boxes)
    assert new_valid[1].tolist() == [True, True, True] or not new_valid[1, 2]


def test_nothing_is_pasted_onto_an_object_or_without_a_donor():
    image, boxes, labels, valid = make_paste_case()
    settings = PhotometricSettings(paste_p=1.0, paste_count=4, paste_px=16)
    everywhere = boxes.clone()
    everywhere[0, 0] = torch.tensor([0.0, 0, 64, 64])
    found, _, _, good = photometric.paste(image, everywhere, labels, valid, make_noise(2), settings)
    assert not good[0, 2:].any() and torch.equal(found[0], image[0])
    none = valid & torch.tensor([[True], [False]])
    found, _, _, good = photometric.paste(image, boxes, labels, none, make_noise(2), settings)
    assert not good[0, 2:].any() and torch.equal(found[0], image[0])
    rare = replace(settings, paste_p=0.4)
    assert torch.equal(photometric.paste(image, boxes, labels, valid, make_noise(2), rare)[0], image)


# Reading annotations


def write_coco(folder: Path, *, annotations: list[dict[str, Any]] | None = None, **change: Any) -> Path:
    """Write three images of 60 x 40 with an object each, and their annotations; `change` replaces entries."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images = [list_image(10 * n + 5, f"{n}.png") for n in range(3)]
    for entry in images:
        Image.new("RGB", (60, 40), (90, 90, 90)).save(folder / "images" / entry["file_name"])
    if annotations is None:
        annotations = [{"id": n, "image_id": 10 * n + 5, "category_id": 7, "bbox": [4 + n, 5, 10, 8]} for n in range(3)]
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 7, "name": "ball"}, {"id": 3, "name": "car"}],
    }
    (folder / "instances_train.json").write_text(json.dumps({**content, **change}))
    return folder


def list_image(number: int, file: str) -> dict[str, Any]:
    return {"id": number, "file_name": file, "width": 60, "height": 40}


def make_entry(*bbox: float, **change: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 5, "category_id": 7, "bbox": list(bbox), **change}


def load_samples(raw: Path, config: Config | None = None) -> list[dict[str, Any]]:
    config = config or Config()
    return [{**sample.columns, **sample.load(), "key": sample.key} for sample in samples(raw, config)]


def test_sparse_category_ids_become_0_to_k(tmp_path):
    raw = write_coco(tmp_path, annotations=[make_entry(4, 5, 10, 8), make_entry(20, 5, 6, 6, id=2, category_id=3)])
    artifacts = fit_artifacts(raw, Config())
    assert json.loads(artifacts["categories"]) == [{"id": 3, "name": "car"}, {"id": 7, "name": "ball"}]
    first = load_samples(raw)[0]
    assert first["labels"].values.tolist() == [1, 0] and first["boxes"].values.tolist() == [
        [4, 5, 14, 13],
        [20, 5, 26, 11],
    ]
    assert first["boxes"].values.dtype == np.float32 and first["labels"].values.dtype == np.int64
    objects = json.loads(artifacts["objects"])
    assert objects["pictures"] == 3 and objects["most"] == 2 and objects["per_sample"] == pytest.approx(2 / 3)
    assert objects["side_px"] == pytest.approx((math.sqrt(80) + 6) / 2)


def test_images_without_objects_are_kept(tmp_path):
    found = load_samples(write_coco(tmp_path, annotations=[]))
    assert len(found) == 3 and all(
        one["boxes"].values.shape == (0, 4) and one["truth"].values.shape == (0, 7) for one in found
    )


def test_a_crowd_is_kept_for_evaluation_and_not_trained_on(tmp_path):
    raw = write_coco(tmp_path, annotations=[make_entry(4, 5, 10, 8), make_entry(0, 0, 50, 30, id=2, iscrowd=1)])
    first = load_samples(raw)[0]
    assert len(first["boxes"].values) == 1 and first["truth"].values[:, 6].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"annotations": [make_entry(70, 5, 10, 8)]},
            r"1, bbox \[70, 5, 10, 8\]: it is outside its image.* 60 x 40.*outside=skip",
        ),
        (
            {"annotations": [make_entry(4, 5, -10, 8)]},
            r"annotation 1.*width or height is negative.*packing.outside=skip",
        ),
        ({"annotations": [make_entry(4, math.nan, 10, 8)]}, r"annotation 1.*not finite"),
        (
            {"annotations": [make_entry(4, 5, 10, 8, category_id=2)]},
            r"category 2, which is unknown. Known: 3 car, 7 ball",
        ),
        (
            {"annotations": [make_entry(4, 5, 10, 8, image_id=9)]},
            r"annotation 1 refers to image 9, which is not listed",
        ),
        ({"annotations": [make_entry(4, 5, 10, 8), make_entry(4, 5, 9, 9)]}, r"annotation id 1 is used more than once"),
        ({"categories": [{"id": 7, "name": "a"}, {"id": 7, "name": "b"}]}, r"category id 7 is used more than once"),
        ({"images": [list_image(5, "0.png"), list_image(5, "1.png")]}, r"image id 5 is used more than once"),
        ({"images": [list_image(number, "0.png") for number in (5, 15, 25)]}, r"'0.png' is listed twice"),
    ],
)  # fmt: skip
def test_an_error_about_annotations_names_file_and_entry(tmp_path, change, message):
    raw = write_coco(tmp_path, **change)
    with pytest.raises(UserError, match=message) as error:
        list(samples(raw, Config()))
    assert "instances_train.json" in str(error.value)


def test_unusable_boxes_are_left_out_and_counted(tmp_path):
    annotations = [
        make_entry(4, 5, 10, 8),
        make_entry(4, 5, 0, 8, id=2),
        make_entry(4, 5, 6, 0.5, id=3),
        make_entry(55, 30, 20, 20, id=4),
        make_entry(90, 5, 4, 4, id=5),
    ]
    raw = write_coco(tmp_path, annotations=annotations)
    config = Config()
    config.packing.outside = "skip"
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}")
    try:
        first = load_samples(raw, config)[0]
    finally:
        logger.remove(sink)
    assert first["boxes"].values.tolist() == [[4, 5, 14, 13], [55, 30, 60, 40]]
    assert [line.split(" boxes ")[0] for line in messages] == ["1", "2", "1"]
    assert (
        "clipped" in messages[0]
        and "a side below 1 px were left out" in messages[1]
        and "outside their image" in messages[2]
    )


def test_too_many_objects_in_a_sample_are_an_error(tmp_path):
    many = [make_entry(n % 50, n % 30, 4, 4, id=n) for n in range(1501)]
    with pytest.raises(
        UserError, match=r"0.png has 1501 objects, expected 1500 at most. Cut images into tiles: packing.tile_px=512"
    ):
        list(samples(write_coco(tmp_path, annotations=many), Config()))
    config = Config()
    config.packing.objects_max = 2000
    assert len(load_samples(tmp_path, config)[0]["boxes"].values) == 1501


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "the annotations list it, but the file is missing"),
        ("empty", "the file is empty"),
        ("text", "not an image"),
        ("half", "cannot be decoded"),
        ("other size", "it is 50 x 40 pixels, but the annotations say 60 x 40"),
        ("16 bits", "mode I;16 of unknown range"),
    ],
)
def test_a_missing_or_broken_image_is_refused_with_the_reason(tmp_path, content, reason):
    raw = write_coco(tmp_path)
    path = raw / "images" / "0.png"
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    if content == "missing":
        path.unlink()
    elif content == "other size":
        Image.new("RGB", (50, 40)).save(path)
    elif content == "16 bits":
        Image.fromarray(np.zeros((40, 60), dtype=np.uint16)).save(path)
    else:
        path.write_bytes({"empty": b"", "text": b"a car", "half": data[: len(data) // 2]}[content])
    (sample,) = [sample for sample in samples(raw, Config()) if sample.columns["picture"] == "0.png"]
    with pytest.raises(BadRecord, match=reason):
        sample.load()


def test_a_folder_without_annotations_or_with_other_json_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no annotations. Expected COCO JSON"):
        list(samples(tmp_path, Config()))
    (tmp_path / "notes.json").write_text('{"images": []}')
    with pytest.raises(UserError, match=r"notes.json: not COCO annotations: annotations, categories missing"):
        list(samples(tmp_path, Config()))
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(UserError, match=r"notes.json: not JSON"):
        list(samples(tmp_path, Config()))


def test_files_name_their_sets_and_other_images_are_assigned_by_sequence(tmp_path):
    images = [{"id": n, "file_name": f"{n}.png", "width": 60, "height": 40, "sequence": n // 4} for n in range(80)]
    raw = write_coco(tmp_path, images=images, annotations=[])
    (raw / "instances_train.json").rename(raw / "all.json")
    found = read_collection(raw, Rules(val_share=0.3, test_share=0.2))
    sets = {name: {p.image_id // 4 for p in found.images if p.set == name} for name in ("train", "val", "test")}
    assert all(sets.values()) and sum(len(s) for s in sets.values()) == 20, "a sequence is in one set"
    (raw / "all.json").rename(raw / "instances_val.json")
    with pytest.raises(UserError, match="none of the 80 images is left to train on"):
        read_collection(raw, Rules())


def test_a_union_of_sets_is_not_read_in_addition_to_them():
    found = read_collection(find_shared_data("bccd"), Rules())
    assert [sum(p.set == name for p in found.images) for name in ("train", "val", "test")] == [205, 87, 72]
    assert sum(len(p.boxes) for p in found.images) == 4886


# Tiles


@pytest.mark.parametrize(
    ("size", "side", "overlap"), [((882, 215), 256, 0.2), ((100, 100), 30, 0.5), ((64, 64), 64, 0.2), ((65, 40), 64, 0)]
)
def test_tiles_cover_an_image_overlap_and_stay_within_it(size, side, overlap):
    found = cut_tiles(size, side_px=side, overlap=overlap)
    covered = np.zeros(size[::-1], dtype=int)
    for tile in found:
        assert tile.x >= 0 and tile.y >= 0 and tile.x + tile.width <= size[0] and tile.y + tile.height <= size[1]
        covered[tile.y : tile.y + tile.height, tile.x : tile.x + tile.width] += 1
    assert covered.min() >= 1 and len(set(found)) == len(found)
    starts = sorted({tile.x for tile in found})
    assert all(b - a <= max(1, round(side * (1 - overlap))) for a, b in itertools.pairwise(starts))
    assert cut_tiles(size, side_px=0, overlap=0.2)[0].width == size[0]


def test_a_tile_has_every_object_that_it_shows_enough_of(tmp_path):
    raw = write_coco(tmp_path, annotations=[make_entry(16, 5, 10, 8), make_entry(22, 20, 6, 4, id=2)])
    config = Config()
    config.packing.tile_px, config.packing.tile_overlap, config.packing.tile_visible = 24, 0.0, 0.4
    found = [one for one in load_samples(raw, config) if one["picture"] == "0.png"]
    assert [one["key"] for one in found[:4]] == ["0.png@0,0", "0.png@24,0", "0.png@36,0", "0.png@0,16"]
    assert found[0]["boxes"].values.tolist() == [[16, 5, 24, 13]], "8 of 10 columns of one object, 2 of 6 of the other"
    assert found[1]["boxes"].values.tolist() == [[0, 20, 4, 24]], "4 of 6 columns; of the first object 2 of 10"
    assert [len(one["truth"].values) for one in found] == [2, 0, 0, 0, 0, 0]
    for one in found:
        with Image.open(io.BytesIO(one["image"])) as image:
            assert image.size == (24, 24)
    assert parse_key("a@b.png@24,16") == ("a@b.png", 24, 16) and parse_key("a@b.png") == ("a@b.png", 0, 0)


def test_scaled_images_have_scaled_boxes_and_areas():
    config = Config()
    config.packing.scale = 0.5
    raw = find_shared_data("kit_ais_cars")
    whole, half = (read_collection(raw, Rules(scale=scale)) for scale in (1.0, 0.5))
    assert (len(whole.images), sum(len(p.boxes) for p in whole.images)) == (65, 2593)
    sides = np.concatenate([np.sqrt((p.boxes[:, 2:] - p.boxes[:, :2]).prod(axis=1)) for p in half.images])
    assert np.median(sides) == pytest.approx(12.5, abs=0.1)
    one, other = whole.images[0], half.images[0]
    assert (
        other.size_px == (882, 215)
        and np.allclose(other.boxes, one.boxes / 2)
        and np.allclose(other.areas, one.areas / 4)
    )
    sample = next(iter(samples(raw, config)))
    with Image.open(io.BytesIO(sample.load()["image"])) as image:  # type: ignore[arg-type]
        assert image.size == (882, 215)
    sets = {name: {str(p.name) for p in whole.images if p.set == name} for name in ("train", "val")}
    assert [len(names) for names in sets.values()] == [45, 20]


def test_files_are_stored_byte_for_byte_unless_cut_rotated_or_of_another_format(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    original, whole = Image.fromarray(pixels), cut_tiles((60, 40), side_px=0, overlap=0)[0]
    turned = Image.Exif()
    turned[0x0112] = 6
    cases = {"a.jpg": ({}, True), "b.png": ({}, True), "c.bmp": ({}, False), "d.jpg": ({"exif": turned}, False)}
    for name, (options, kept) in cases.items():
        stored = original.transpose(Image.Transpose.ROTATE_90) if options else original
        stored.save(tmp_path / name, **options)
        image = load_image(tmp_path / name, (60, 40), (60, 40), whole)["image"]
        assert isinstance(image, bytes) and (image == (tmp_path / name).read_bytes()) == kept, name
        with Image.open(io.BytesIO(image)) as again:
            assert again.size == (60, 40)


def pack_tiles(tmp_path: Path) -> tuple[DataInfo, Config, list[Sample]]:
    raw = write_coco(
        tmp_path / "raw",
        annotations=[
            make_entry(16, 5, 10, 8),
            make_entry(40, 20, 6, 6, id=2),
            make_entry(2, 2, 5, 5, id=3, image_id=15),
        ],
    )
    config = make_config()
    config.packing.tile_px, config.packing.tile_overlap, config.packing.tile_visible = 32, 0.5, 0.1
    data = pack_folder(raw, tmp_path / "packed", config)
    return DataInfo.of(data, np.arange(data.count)), config, list(samples(raw, config))


def make_true_rows(data: DataInfo, *, length: int = 4) -> dict[str, np.ndarray]:
    """Return each tile's objects as its detections; the more of an object it shows, the higher the score."""
    ids = np.arange(len(data.columns["tile_x"]))
    boxes, labels = data.read("boxes", ids), data.read("labels", ids)
    area = [(b[:, 2:] - b[:, :2]).prod(axis=1) for b in boxes]
    return {
        "sample_id": ids,
        "box": np.stack([pad(b, length) for b in boxes]),
        "score": np.stack([pad(a / 100, length) for a in area]),
        "label": np.stack([pad(b, length) for b in labels]),
    }


@pytest.mark.parametrize("by", ["iou", "nwd"])
def test_the_tiles_of_an_image_are_merged_before_scoring(tmp_path, by):
    data, config, _ = pack_tiles(tmp_path)
    config.evaluation.merge, config.evaluation.merge_above = by, 0.1 if by == "iou" else 0.5
    module = build(config, data)
    rows = make_true_rows(data)
    assert (rows["score"] > 0).sum() > 3, "some objects are in several tiles"
    metrics = module.score(rows)
    assert metrics["ap"] == pytest.approx(1.0) and metrics["ar_1500"] == pytest.approx(1.0)
    config.evaluation.merge_above = 1.0
    assert module.score(rows)["ap"] < 0.9, "an object found twice is wrong once"


def test_prediction_rows_have_each_object_once_in_pixels_of_the_whole_image(tmp_path):
    data, config, listed = pack_tiles(tmp_path)
    config.evaluation.merge_above = 0.1
    prediction_rows = list(build(config, data).prediction_rows(make_true_rows(data), [sample.key for sample in listed]))
    assert len(prediction_rows) == len(listed) and [a["tile_x"] for a in prediction_rows] == [
        s.columns["tile_x"] for s in listed
    ]
    first = [entry for a in prediction_rows if a["picture"] == "0.png" for entry in json.loads(str(a["detections"]))]
    assert sorted(entry[2:] for entry in first) == [[16, 5, 26, 13], [40, 20, 46, 26]]
    assert {entry[0] for entry in first} == {"ball"}


def test_unlabelled_images_are_cut_like_labelled_ones(tmp_path):
    raw = write_coco(tmp_path / "raw")
    config = Config()
    config.packing.tile_px, config.packing.scale = 20, 0.5
    known = {sample.key: sample.load()["image"] for sample in samples(raw, config)}
    new = {sample.key: sample.load({}) for sample in unlabelled(raw / "images", config, {})}
    assert len(new) == 6 and {key: value["image"] for key, value in new.items()} == known


def test_report_figures_show_precision_by_size_and_samples_with_boxes(tmp_path):
    data, config, _ = pack_tiles(tmp_path)
    config.evaluation.pictures = 3
    found = build(config, data).report_figures(make_true_rows(data))
    assert len(found) == 4 and next(iter(found)) == "Average precision by size"
    drawn = [title for title in found if title.startswith("0.png at 0,0")]
    assert len(drawn) == 1
    with Image.open(io.BytesIO(found[drawn[0]])) as image:
        colours = {colour for _, colour in image.getcolors(1 << 20)}
        assert image.size == (704, 704) and (40, 200, 60) in colours and (235, 60, 40) in colours


# Weights


def make_vanilla(categories: int) -> torch.nn.Module:
    config = make_config("vanilla")
    torch.manual_seed(categories)
    return build_network(
        config.model, Backbone("resnet18", norm="frozen", width=8, dilated=False), categories=categories
    )


def rename_as_published(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights with the names of facebookresearch/detr."""
    renamed = {}
    for name, value in network.state_dict().items():
        name = name.replace("backbone.body.", "backbone.0.body.").replace("decoder_norm.", "transformer.decoder.norm.")
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("kind", ["pth", "safetensors", "ours"])
def test_a_detector_trained_on_other_categories_gets_a_new_classifier(tmp_path, kind):
    published, ours = make_vanilla(91), make_vanilla(2)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    file = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        save_file(rename_as_published(published), file)
    elif kind == "pth":
        torch.save({"model": rename_as_published(published), "args": argparse.Namespace(lr=1e-4)}, file)
    else:
        named = {f"network.{name}": value for name, value in published.state_dict().items()}
        torch.save({"model": named, "ema": None, "progress": {"step": 3}}, file)
    load_detector(ours, str(file))
    for name, value in ours.state_dict().items():
        expected = before[name] if name.startswith("class_embed") else published.state_dict()[name]
        assert torch.equal(value, expected), name


def test_a_conditional_detector_loads_weights_with_their_published_names(tmp_path):
    config = make_config("cond")
    backbone = Backbone("resnet18", norm="frozen", width=8, dilated=False)
    one, other = (build_network(config.model, backbone, categories=2) for _ in range(2))
    moved = ("query_scale.", "ref_point_head.")
    named = {
        (f"transformer.decoder.{name}" if name.startswith(moved) else name): value
        for name, value in rename_as_published(one).items()
    }
    torch.save({"model": named}, tmp_path / "cond.pth")
    load_detector(other, str(tmp_path / "cond.pth"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("input_proj.weight"), r"it contains no 'input_proj.weight'; nearest"),
        (
            lambda w: w.update({"query_embed.weight": torch.zeros(100, 32)}),
            r"'query_embed.weight' is \(100, 32\).*model.queries",
        ),
        (lambda w: w.update({"input_proj.weight": torch.zeros(3)}), r"'input_proj.weight' is \(3,\).*model.dims|dims"),
        (lambda w: w.clear(), r"it contains no tensors"),
    ],
)
def test_a_detector_that_does_not_fit_is_refused(tmp_path, change, message):
    weights = rename_as_published(make_vanilla(91))
    change(weights)
    torch.save({"model": weights}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message):
        load_detector(make_vanilla(2), str(tmp_path / "w.pth"))


def test_missing_weights_and_weights_that_could_run_code_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_detector(make_vanilla(2), str(tmp_path / "none.pth"))
    torch.save({"model": Path("/")}, tmp_path / "code.pth")
    with pytest.raises(UserError, match="not a file of tensors"):
        load_detector(make_vanilla(2), str(tmp_path / "code.pth"))


def test_a_backbone_starts_from_torchvision_s_weights_and_learns_slower(tmp_path):
    import torchvision

    torch.manual_seed(3)
    published = torchvision.models.resnet18(weights=None)
    torch.save(published.state_dict(), tmp_path / "resnet18.pth")
    config = make_config(backbone="resnet18", backbone_weights=str(tmp_path / "resnet18.pth"))
    module = make_module(config)
    assert torch.equal(module.network.backbone.body.layer3[1].conv2.weight, published.layer3[1].conv2.weight)
    assert not module.network.backbone.body.conv1.weight.requires_grad, "stem and first stage are frozen"
    groups = module.parameter_groups(1e-4)
    crop_scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert crop_scale[id(module.network.backbone.body.layer3[1].conv2.weight)] == 0.1
    assert crop_scale[id(module.network.class_embed[0].weight)] == 1.0
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(crop_scale) == len(trained) == sum(len(group["params"]) for group in groups)
    assert all((group["weight_decay"] > 0) == (p.ndim >= 2) for group in groups for p in group["params"])
    with pytest.raises(UserError, match=r"'layer1.0.conv1.weight' is \(64, 64, 3, 3\), but the model expects"):
        load_backbone(Backbone("resnet50", norm="frozen", width=8, dilated=False), str(tmp_path / "resnet18.pth"))


def test_a_resnet_trained_from_scratch_has_no_batch_statistics():
    module = make_module(make_config(backbone="resnet18"))
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules())
    assert all(p.requires_grad for p in module.parameters())


# What is said at the start


@pytest.mark.parametrize(
    ("images", "weights", "warned"), [(60, "", True), (9_999, "", True), (10_000, "", False), (60, "file", False)]
)
def test_training_from_scratch_on_few_images_warns(tmp_path, images, weights, warned):
    config = make_config("vanilla", backbone="resnet18")
    if weights:
        torch.save(rename_as_published(make_vanilla(91)), tmp_path / "w.pth")
        config.model.weights = str(tmp_path / "w.pth")
    objects = {**json.loads(ARTIFACTS["objects"]), "pictures": images}
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}", level="WARNING")
    try:
        build(config, DataInfo({}, {}, np.arange(2), {**ARTIFACTS, "objects": json.dumps(objects)}))
    finally:
        logger.remove(sink)
    assert any("known to find little" in line and "model.weights=FILE" in line for line in messages) == warned


def test_more_objects_than_queries_warn():
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}", level="WARNING")
    try:
        make_module(make_config(queries=2))
    finally:
        logger.remove(sink)
    assert any("up to 3 objects, but at most model.queries=2" in line for line in messages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image.fit": "stretch"}, r"image.fit=stretch: it changes the shape"),
        ({"image.height_px": 100}, r"expected multiples of 32, such as image.height_px=96"),
        ({"image.channels": 1}, r"image.channels=1: tinydet needs RGB"),
        ({"model.dims": 36}, r"model.dims=36: expected a multiple of 4 model.heads=16"),
        ({"model.strides": [4, 16]}, r"model.strides=\[4, 16\]: expected neighbours"),
        ({"loss.classification": "softmax"}, r"loss.classification=softmax: only model.variant=vanilla"),
        ({"model.variant": "vanilla", "loss.classification": "focal"}, r"model.variant=vanilla needs softmax"),
        ({"model.weights": "x", "model.norm": "group"}, r"model.norm=group: pretrained weights have batch norm"),
    ],
)
def test_contradictory_options_are_refused(change, message):
    config = make_config()
    for name, value in change.items():
        part, option = name.split(".")
        setattr(getattr(config, part), option, value)
    with pytest.raises(UserError, match=message):
        make_module(config)


# Synthetic scenes


def test_scenes_depend_only_on_the_seed_and_can_be_read(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=12, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.*"))
    assert len(files) == 14
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    found = read_collection(tmp_path / "once", Rules())
    assert [sum(p.set == name for p in found.images) for name in ("train", "val")] == [10, 2]
    assert found.categories == ["car", "ball"] and found.category_ids == [number for number, _ in CATEGORIES]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(UserError, match="already contains files"):
        synthesize(tmp_path / "once", count=12, seed=3)
    with pytest.raises(UserError, match="expected 6 or more"):
        synthesize(tmp_path / "few", count=5, seed=3)


def test_objects_in_scenes_are_tiny_disjoint_and_inside_their_boxes():
    sides = []
    for number in range(20):
        pixels, boxes, labels = draw_scene(number, 0)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= [160, 128]).all()
        sides += np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1)).tolist()
        overlap = geometry.iou(torch.from_numpy(boxes)[:, None], torch.from_numpy(boxes)[None])[0]
        assert overlap.fill_diagonal_(0).max() == 0
        for (x1, y1, x2, y2), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            if label == 1:  # a ball is brighter than the ground
                inner = pixels[int(y1) + 1 : int(y2), int(x1) + 1 : int(x2)].mean()
                assert inner > np.median(pixels)
    assert min(sides) >= 4 and max(sides) <= 20 and 8 < np.mean(sides) < 13


def test_multi_scale_training_draws_shapes_of_multiples_of_32_and_boxes_to_match(rectangles):
    data, config = rectangles
    config.augment = type(config.augment)()
    config = replace(config, image=replace(config.image, scales=[1.0, 2.0]))
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


def test_splits_are_the_packed_sets():
    columns = {"set": np.array([1, 0, 1, 1])}
    found = splits(columns, {"set": ["train", "val"]}, Config())
    assert {name: ids.tolist() for name, ids in found.items()} == {"train": [1], "val": [0, 2, 3]}
