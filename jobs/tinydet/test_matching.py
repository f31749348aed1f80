"""The matcher: costs, optimality, padding, non-finite costs."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cases.tinydet import FOCAL, make_objects, make_predictions

from .config import LossSettings
from .matching import Objects, compute_costs, match, solve_assignments
from .network import Predictions


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.parametrize("terms", [FOCAL, replace(FOCAL, nwd_share=0.5), LossSettings("softmax", 1, 1, 5, 2)])
def test_the_matcher_equals_brute_force(count: int, terms: LossSettings) -> None:
    rng = np.random.default_rng(count)
    for _ in range(5):
        predictions, objects = make_predictions(rng), make_objects(rng, count)
        found = match(*predictions, objects, terms)
        cost = compute_costs(*predictions, objects, terms)[0, 0].numpy()
        best = min(sum(cost[list(order), range(count)]) for order in itertools.permutations(range(6), count))
        assert cost[found.query_M, found.object_M].sum() == pytest.approx(best, abs=1e-5)
        assert sorted(found.object_M.tolist()) == list(range(count))


def test_the_costs_are_those_of_the_papers() -> None:
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
    softmax = LossSettings("softmax", 1, 1, 5, 2)
    probability = 0.8 / 0.2 / (0.8 / 0.2 + 0.3 / 0.7)
    assert float(compute_costs(*predictions, objects, softmax)) == pytest.approx(
        -probability + 5 * 0.1 - 2 * overlap, rel=1e-5
    )


def test_padding_is_never_matched_and_layers_and_images_are_matched_separately() -> None:
    rng = np.random.default_rng(0)
    predictions, objects = make_predictions(rng, layers=3, images=4), make_objects(rng, 2, images=4, length=5)
    objects = objects._replace(valid_BL=torch.tensor([False, True, False, True, False]).expand(4, -1))
    together = match(*predictions, objects, FOCAL)
    assert len(together.query_M) == 3 * 4 * 2 and set(together.object_M.tolist()) == {1, 3}
    for layer, image in itertools.product(range(3), range(4)):
        one = slice(image, image + 1)
        part = Objects(objects.boxes_BL4[one], objects.labels_BL[one], objects.valid_BL[one], objects.size_px)
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


def test_non_finite_costs_are_counted_and_never_abort_the_step() -> None:
    rng = np.random.default_rng(0)
    predictions, objects = make_predictions(rng, images=2), make_objects(rng, 3, images=2)
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
