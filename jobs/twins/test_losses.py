"""Losses: relations within a batch, ArcFace, triplets, pairs, and how branches are summed."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.cases.twins import make_config, make_module

from .module import Relation, arcface_logits, pair_loss, triplet_loss


def make_relation(person: list[int], family: list[int], sample: list[int] | None = None) -> Relation:
    ids = sample or list(range(len(person)))
    return Relation(*(torch.tensor(values) for values in (person, family, ids)))


def test_all_pairs_of_a_batch_are_formed_and_a_repeated_image_is_no_pair_with_itself() -> None:
    relation = make_relation([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], [10, 11, 12, 13, 14, 14])
    assert [int(m.sum()) // 2 for m in (relation.same, relation.twin, relation.stranger)] == [2, 4, 8]
    assert float(make_module()._count_pairs_per_image(relation)) == pytest.approx((15 - 1) / 6)
    listed = make_module(make_config(pair_strangers=False))
    assert float(listed._count_pairs_per_image(make_relation([0, 0, 1, 2], [0, 0, 4, 4]))) == 2 / 4
    assert not (relation.same & relation.different).any()


def test_arcface_adds_the_margin_only_to_the_true_person() -> None:
    angle, target = torch.rand(4, 6) * 2.5 + 0.05, torch.tensor([0, 5, 2, 2])
    logits = arcface_logits(angle.cos(), target, scale=32.0, margin=0.3)
    expected = 32 * (angle + 0.3 * functional.one_hot(target, 6)).cos()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    beyond = arcface_logits(
        torch.linspace(-1, -0.9, 20)[:, None], torch.zeros(20, dtype=torch.long), scale=1, margin=0.3
    )
    assert (beyond.diff(dim=0) > 0).all()


def test_the_triplet_loss_uses_the_hardest_positive_and_the_hardest_image_of_the_twin() -> None:
    torch.manual_seed(0)
    person, family = [0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 0, 0, 1, 1, 2]
    feature = functional.normalize(torch.randn(8, 4), dim=1)
    cosine = feature @ feature.T
    terms = []
    for i in range(8):
        same = [float(cosine[i, j]) for j in range(8) if j != i and person[j] == person[i]]
        twin = [float(cosine[i, j]) for j in range(8) if family[j] == family[i] and person[j] != person[i]]
        other = [float(cosine[i, j]) for j in range(8) if person[j] != person[i]]
        if same:
            terms.append(max(0.0, 0.5 - min(same) + max(twin or other)))
    found = triplet_loss(cosine, make_relation(person, family), margin=0.5)
    assert float(found) == pytest.approx(np.mean(terms), rel=1e-5)
    assert len(terms) == 7
    assert float(triplet_loss(cosine[:1, :1], make_relation([0], [0]), margin=0.5)) == 0.0


def test_the_pair_loss_weights_same_and_different_pairs_equally_and_can_leave_out_strangers() -> None:
    relation = make_relation([0, 0, 1, 2], [0, 0, 0, 1])
    logits = torch.randn(4, 4)
    logits = logits + logits.T

    def mean(pairs: list[tuple[int, int]], target: float) -> float:
        chosen = torch.stack([logits[i, j] for i, j in pairs])
        return float(functional.binary_cross_entropy_with_logits(chosen, torch.full_like(chosen, target)))

    same, twin, strangers = [(0, 1)], [(0, 2), (1, 2)], [(0, 3), (1, 3), (2, 3)]
    all_pairs = (mean(same, 1.0) + mean(twin + strangers, 0.0)) / 2
    assert float(pair_loss(logits, relation, strangers=True)) == pytest.approx(all_pairs, rel=1e-5)
    within_family = (mean(same, 1.0) + mean(twin, 0.0)) / 2
    assert float(pair_loss(logits, relation, strangers=False)) == pytest.approx(within_family, rel=1e-5)


def test_branch_losses_are_summed_by_learned_uncertainty_or_by_fixed_shares() -> None:
    module, losses = make_module(), torch.tensor([2.0, 3.0, 5.0])
    assert module._weight_losses(losses) == 5.0
    with torch.no_grad():
        module.uncertainty.copy_(losses.log())  # where the gradient of the uncertainties is zero
    total = module._weight_losses(losses)
    total.backward()  # type: ignore[no-untyped-call]
    assert module.uncertainty.grad is not None
    assert total.item() == pytest.approx((3 + np.log(30)) / 2, rel=1e-6)
    assert float(module.uncertainty.grad.abs().max()) < 1e-6
    fixed = make_module(make_config(weighting="fixed"))
    assert fixed._weight_losses(losses).item() == pytest.approx(2 + 3 + 0.3 * 5)
