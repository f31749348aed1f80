"""Losses on the logarithm of the price."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.pricing import make_batch, make_config, make_module
from trainyard.data.shards import ShardSet

from . import losses, metrics


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_the_smape_term_is_twice_the_tanh_of_half_the_error_in_ln(predicted: float, true: float) -> None:
    log_error = torch.tensor(math.log(predicted) - math.log(true), dtype=torch.float64)
    term = metrics.compute_smape_terms(predicted, true).item()
    assert losses.smape_log(log_error).item() == pytest.approx(term, abs=1e-9)
    assert metrics.compute_smape_terms(true, predicted).item() == term <= 2


def test_the_losses_agree_near_zero_and_the_exact_one_is_bounded() -> None:
    log_error = torch.tensor([0.0, 1e-3, 0.3, -0.3, 2.0, 30.0], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        losses.smooth_l1(log_error, beta=0.5),
        torch.tensor([0, 1e-6, 0.09, 0.09, 1.75, 29.75], dtype=torch.float64),
    )
    exact = losses.smape_log(log_error)
    torch.autograd.backward(exact.sum())
    assert log_error.grad is not None
    assert exact.max() <= 2 and log_error.grad.abs().max() <= 1
    for share, expected in ((0.0, losses.smooth_l1(log_error, beta=0.5)), (1.0, exact)):
        assert torch.equal(losses.blend(log_error, beta=0.5, share=torch.tensor(share)), expected)


def test_the_exact_loss_replaces_smooth_l1_after_the_configured_epochs(data: ShardSet) -> None:
    config = make_config()
    config.loss.smape_after_epochs = 2.0
    module = make_module(data, config)
    batch = make_batch(data, list(range(8)))
    early, late = (
        {name: value.item() for name, value in module({**batch, "samples_seen": torch.tensor(n)}).items()}
        for n in (0, 700)
    )
    assert late["loss"] == pytest.approx(late["smape"] / 100, rel=1e-5)
    assert early["loss"] != pytest.approx(late["loss"], rel=1e-3)
