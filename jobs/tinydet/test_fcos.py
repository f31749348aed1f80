"""FCOS: which cells an object has, what is suppressed, and what it learns."""

import pytest
import torch

from tests.cases.tinydet import make_batch, make_config, make_module
from trainyard.errors import UserError

from .fcos import FCOS, apply_fast_nms, assign, compute_centrality, list_cells


def list_levels(side_px: int, *strides: int) -> torch.Tensor:
    return torch.cat(
        [list_cells(torch.zeros(1, 1, side_px // stride, side_px // stride), stride) for stride in strides]
    )


def test_cells_are_named_by_their_centres() -> None:
    assert list_cells(torch.zeros(1, 1, 2, 2), 8).tolist() == [[4, 4, 8], [12, 4, 8], [4, 12, 8], [12, 12, 8]]


def test_cells_near_the_centre_belong_to_the_smallest_object_of_their_level() -> None:
    cells = list_levels(128, 4, 8)
    corners = torch.tensor([[10.0, 10, 34, 34], [20, 20, 32, 32], [0, 0, 128, 128], [50, 50, 60, 60]])
    index, has = assign(cells, corners, torch.tensor([True, True, True, False]))
    for number, cell in enumerate(cells.tolist()):
        x, y, stride = cell
        inside = [
            i
            for i, (x1, y1, x2, y2) in enumerate(corners[:3].tolist())
            if max(abs(x - (x1 + x2) / 2), abs(y - (y1 + y2) / 2)) <= min(1.5 * stride, (x2 - x1) / 2)
            and (max(x - x1, x2 - x, y - y1, y2 - y) < 32) == (stride == 4)
        ]
        expected = min(inside, key=lambda i: float((corners[i, 2] - corners[i, 0]) ** 2), default=None)
        assert bool(has[number]) == (expected is not None), cell
        assert expected is None or int(index[number]) == expected, cell
    assert set(index[has].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("place", [0.0, 1.3, 2.0, 3.7])
def test_an_object_smaller_than_a_cell_has_a_cell(place: float) -> None:
    corners = torch.tensor([[20 + place, 20 + place, 21 + place, 21 + place]])
    _, has = assign(list_levels(64, 4, 8, 16), corners, torch.tensor([True]))
    assert has.any()


def test_centrality_falls_from_the_centre_to_the_edges() -> None:
    cells = torch.tensor([[10.0, 10, 4], [5, 10, 4], [0, 10, 4], [30, 10, 4]])
    corners = torch.tensor([[0.0, 0, 20, 20]]).expand(1, 4, 4)
    expected = torch.tensor([[1.0, (5 / 15) ** 0.5, 0, 0]])
    torch.testing.assert_close(compute_centrality(cells, corners), expected)


def test_a_detection_that_overlaps_a_better_one_of_its_category_is_suppressed() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [1, 0, 11, 10], [20, 20, 30, 30]])
    assert apply_fast_nms(boxes[None], torch.tensor([[0, 0, 1, 0]]), 0.6).tolist() == [[True, False, True, True]]
    assert apply_fast_nms(boxes[None], torch.tensor([[0, 0, 1, 0]]), 0.9).all()


def test_it_learns_two_images_and_finds_each_object_once() -> None:
    module, batch = make_module(make_config("fcos", strides=[4, 8], width=16)), make_batch()
    assert isinstance(module.network, FCOS)
    optimizer = torch.optim.AdamW(module.parameters(), 2e-3)
    for _ in range(120):
        loss = module(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        rows = module.eval().predict(batch)
    assert rows["box"].shape == (len(batch["image"]), 12, 4)
    for i, count in enumerate(batch["boxes_count"].tolist()):
        found = rows["box"][i][rows["score"][i] > 0.5]
        truth = batch["boxes"][i, :count]
        assert len(found) == count
        torch.testing.assert_close(found.sort(dim=0).values, truth.sort(dim=0).values, atol=2.0, rtol=0)


def test_an_image_without_objects_gives_every_parameter_a_finite_gradient() -> None:
    module, batch = make_module(make_config("fcos")), make_batch()
    batch["boxes_count"] = torch.zeros_like(batch["boxes_count"])
    module(batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_options_of_transformers_are_refused() -> None:
    config = make_config("fcos")
    config.loss.normalise = "data"
    with pytest.raises(UserError, match=r"Use loss\.classification=auto loss\.normalise=batch"):
        make_module(config)
    with pytest.raises(UserError, match=r"reads no published detector\. Use model\.backbone_weights=FILE"):
        make_module(make_config("fcos", weights="detr.pth"))
