"""Classification heads and their losses."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from . import metrics
from .losses import AmSoftmax, CrossEntropy, Decision, OcSoftmax, compute_class_weights


def test_class_weights_follow_the_counts() -> None:
    assert compute_class_weights((50, 50)).tolist() == [1.0, 1.0]
    spoof, bonafide = compute_class_weights((22800, 2580)).tolist()
    assert spoof / (spoof + bonafide) == pytest.approx(0.1, abs=0.002)
    assert (22800 * spoof + 2580 * bonafide) / 25380 == pytest.approx(1.0)


def test_weighted_cross_entropy_is_that_of_torch_times_the_mean_weight_of_the_batch() -> None:
    torch.manual_seed(0)
    decision, x, label = CrossEntropy(8, counts=(9, 1)), torch.randn(6, 8), torch.tensor([0, 1, 0, 0, 1, 0])
    theirs = functional.cross_entropy(decision.logits(x), label, weight=decision.weight_2)
    torch.testing.assert_close(decision(x, label), theirs * decision.weight_2[label].mean())
    halves = (decision(x[:2], label[:2]) * 2 + decision(x[2:], label[2:]) * 4) / 6
    torch.testing.assert_close(decision(x, label), halves)


def test_an_offset_is_added_to_the_log_odds_and_what_is_learned_besides_it_is_penalised() -> None:
    torch.manual_seed(0)
    decision, x, label = CrossEntropy(8, counts=(9, 1)), torch.randn(6, 8), torch.tensor([0, 1, 0, 0, 1, 0])
    offset, own = torch.linspace(-3, 3, 6), decision.score(x)
    p = (own + offset).sigmoid()
    by_hand = -decision.weight_2[label] * torch.where(label == 1, p, 1 - p).log() + own**2
    torch.testing.assert_close(decision(x, label, offset), by_hand.mean())
    assert torch.equal(decision.predict_bonafide(x, offset), p > 0.5)
    nn.init.zeros_(decision.logits.weight)
    decision(x, label, torch.where(label == 1, 30.0, -30.0)).backward()
    assert decision.logits.weight.grad is not None and decision.logits.weight.grad.abs().max() < 1e-6, "nothing to add"


def test_focal_loss_down_weights_easy_samples() -> None:
    torch.manual_seed(0)
    plain, focal = CrossEntropy(8, counts=(1, 1)), CrossEntropy(8, counts=(1, 1), gamma=2.0)
    focal.load_state_dict(plain.state_dict())
    x, label = torch.randn(5, 8), torch.tensor([0, 1, 1, 0, 1])
    p = plain.logits(x).softmax(dim=1)[torch.arange(5), label]
    torch.testing.assert_close(focal(x, label), (-((1 - p) ** 2) * p.log()).mean())


def test_the_score_is_the_log_odds_and_high_for_bona_fide() -> None:
    decision, x = CrossEntropy(4, counts=(3, 1)), torch.randn(7, 4)
    p = decision.logits(x).softmax(dim=1)
    torch.testing.assert_close(decision.score(x), (p[:, 1] / p[:, 0]).log())


@pytest.mark.parametrize(
    "decision",
    [
        CrossEntropy(6, counts=(5, 5)),
        CrossEntropy(6, counts=(5, 5), gamma=2.0),
        AmSoftmax(6, scale=20, margin=0.9),
        OcSoftmax(6, scale=20, margin_bonafide=0.9, margin_spoof=0.2),
    ],
)
def test_every_loss_drives_bona_fide_scores_up_and_spoofed_ones_down(decision: Decision) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 6, requires_grad=True)
    label = torch.tensor([0, 1] * 6)
    optimizer = torch.optim.SGD([x], lr=10.0)
    for _ in range(100):
        optimizer.zero_grad()
        decision(x, label).backward()
        optimizer.step()
    score = decision.score(x).detach()
    assert metrics.eer(score[label == 1], score[label == 0]) == 0
    assert bool((decision.predict_bonafide(x) == (label == 1)).all())


def test_margins_are_those_of_the_papers() -> None:
    torch.manual_seed(0)
    x, label = torch.randn(4, 6), torch.tensor([0, 1, 1, 0])
    am = AmSoftmax(6, scale=20, margin=0.9)
    cosine = functional.cosine_similarity(x[:, None], am.directions_2D[None], dim=2)
    right, wrong = cosine[torch.arange(4), label], cosine[torch.arange(4), 1 - label]
    by_hand = -torch.log((20 * (right - 0.9)).exp() / ((20 * (right - 0.9)).exp() + (20 * wrong).exp()))
    torch.testing.assert_close(am(x, label), by_hand.mean())
    assert torch.equal(am.score(x), am._compute_cosines(x)[:, 1])
    oc = OcSoftmax(6, scale=20, margin_bonafide=0.9, margin_spoof=0.2)
    cosine = functional.cosine_similarity(x, oc.direction_D[None])
    violation = torch.stack([cosine[0] - 0.2, 0.9 - cosine[1], 0.9 - cosine[2], cosine[3] - 0.2])
    torch.testing.assert_close(oc(x, label), torch.log(1 + torch.exp(20 * violation)).mean())
