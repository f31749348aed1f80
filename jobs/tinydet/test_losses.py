"""Losses: known values, layers, images without objects, normalisation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import sigmoid_focal_loss  # type: ignore[import-untyped]

from tests.cases.tinydet import FOCAL, make_batch, make_config, make_module, make_objects, make_predictions

from .config import LossSettings
from .losses import compute_losses, focal, varifocal
from .matching import Objects, match
from .network import Outputs, Predictions


def test_focal_loss_equals_torchvision() -> None:
    rng = np.random.default_rng(0)
    logits, target = torch.from_numpy(rng.normal(size=(40, 5))), torch.from_numpy(rng.integers(0, 2, (40, 5))).double()
    assert torch.allclose(focal(logits, target, target), sigmoid_focal_loss(logits, target))


def test_varifocal_loss_has_the_iou_as_target_and_weight() -> None:
    logits, quality = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.7, 0.0, 0.0])
    found = varifocal(logits, quality, torch.tensor([1.0, 0.0, 0.0]))
    p = logits.sigmoid()
    assert float(found[0]) == pytest.approx(0.7 * -(0.7 * math.log(0.5) + 0.3 * math.log(0.5)), rel=1e-6)
    assert found[1:].tolist() == pytest.approx((0.75 * p.square() * -(1 - p).log())[1:].tolist(), rel=1e-5)


def test_softmax_loss_equals_torch_s_mean_weighted_by_category() -> None:
    rng = np.random.default_rng(0)
    objects = make_objects(rng, 2)
    logits = torch.from_numpy(rng.normal(size=(1, 1, 6, 4))).float()
    predictions = Predictions(logits, make_predictions(rng).boxes_DBQ4)
    terms = LossSettings("softmax", 1, 1, 0, 0)
    found = match(*predictions, objects, terms)
    target = torch.full((6,), 3)
    target[found.query_M] = objects.labels_BL[0, found.object_M]
    expected = torch.nn.functional.cross_entropy(logits[0, 0], target, weight=torch.tensor([1.0, 1, 1, 0.1]))
    assert float(compute_total_loss(predictions, objects, terms)["loss"]) == pytest.approx(float(expected), rel=1e-5)


def compute_total_loss(predictions: Predictions, objects: Objects, terms: LossSettings) -> dict[str, torch.Tensor]:
    return compute_losses(Outputs(predictions), None, objects, terms=terms, divisor=torch.tensor(2.0))


@pytest.mark.parametrize("name", ["focal", "varifocal", "softmax"])
def test_right_predictions_cost_next_to_nothing_and_wrong_ones_more(name: str) -> None:
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


def test_every_layer_and_the_proposals_have_the_same_weights() -> None:
    rng = np.random.default_rng(0)
    predictions, objects = make_predictions(rng, layers=3, images=2), make_objects(rng, 2, images=2)
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


def test_the_loss_of_images_without_objects_is_finite_and_teaches_to_find_none() -> None:
    for variant in ("vanilla", "cond", "ms"):
        module = make_module(make_config(variant))
        batch = {**make_batch(), "boxes": torch.zeros(2, 0, 4), "labels": torch.zeros(2, 0, dtype=torch.long)}
        losses = module({**batch, "boxes_count": torch.zeros(2, dtype=torch.long)})
        losses["loss"].backward()
        assert losses["box_loss"].item() == 0 and losses["class_loss"].item() > 0 and float(losses["objects"]) == 0
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_normalised_by_the_data_a_batch_has_the_mean_loss_of_its_halves() -> None:
    config = make_config(denoising=0)
    config.loss.normalise = "data"
    module, batch = make_module(config), make_batch(images=4)
    whole = module(batch)["loss"].item()
    halves = [module({k: v[i : i + 2] for k, v in batch.items()})["loss"].item() for i in (0, 2)]
    assert whole == pytest.approx(sum(halves) / 2, rel=1e-5)
