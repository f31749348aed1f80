"""Metrics on the price scale."""

import math

import numpy as np
import pytest

from tests.cases.pricing import make_module
from trainyard.data.shards import ShardSet

from . import metrics


@pytest.mark.parametrize(
    ("predicted", "true", "expected"),
    [
        ([100], [120], 100 * 20 / 110),
        ([120], [100], 100 * 20 / 110),
        ([0], [0], 0.0),
        ([0], [5], 200.0),
        ([1e-9], [1e9], 200.0),
        ([100, 0], [120, 0], 100 * 20 / 110 / 2),
    ],
)
def test_smape_of_known_cases(predicted: list[float], true: list[float], expected: float) -> None:
    assert metrics.smape(predicted, true) == pytest.approx(expected, abs=1e-9)
    assert metrics.smape([100], [120]) == pytest.approx(18.1818, abs=1e-4)


def test_the_score_takes_smape_on_prices_and_not_on_their_logarithms(data: ShardSet) -> None:
    """On the log1p scale an error of 20 % would score 4."""
    true = np.array([100.0] * 4)
    module = make_module(data)
    rows = {"predicted": true * 1.2, "price": true, "group": np.arange(4), "sample_id": np.arange(4)}
    assert module.score(rows)["smape"] == pytest.approx(18.1818, abs=1e-4)
    assert metrics.smape(np.log1p(true * 1.2), np.log1p(true)) == pytest.approx(3.8, abs=0.1)


def test_metrics_are_reported_by_decile_and_the_bootstrap_draws_groups() -> None:
    rng = np.random.default_rng(0)
    true = np.exp(rng.normal(3, 1, 500))
    found = metrics.compute_metrics(true * 1.1, true, constant=20.0)
    assert found["bias_log"] == pytest.approx(math.log(1.1)) == found["mae_log"]
    assert found["median_ratio"] == pytest.approx(1.1)
    assert [found[f"smape_decile_{n}"] for n in range(1, 11)] == pytest.approx([100 * 0.1 / 1.05] * 10)
    assert np.array_equal(np.bincount(metrics.assign_deciles(true)), [50] * 10)
    noisy = true * np.exp(np.repeat(rng.normal(0, 0.5, 10), 50))  # errors that whole groups share
    by_group, by_row = (
        metrics.compute_intervals(noisy, true, groups=groups, draws=400).to_metrics()
        for groups in (np.arange(500) // 50, np.arange(500))
    )
    width_by_group, width_by_row = (found["smape_high"] - found["smape_low"] for found in (by_group, by_row))
    assert width_by_group > 3 * width_by_row


def test_a_single_group_has_no_interval_instead_of_one_without_width() -> None:
    true = np.linspace(5, 50, 20)
    found = metrics.compute_intervals(true * 1.1, true, groups=np.zeros(20), draws=50)
    assert found.to_metrics() == {"draws_lost": 1.0}
    assert metrics.compute_intervals(true, true, groups=np.zeros(20), draws=0).to_metrics() == {}
