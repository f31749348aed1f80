"""Price metrics: SMAPE with a confidence interval and by price decile, errors in ln(price), bias."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainyard.scoring import Intervals, draw_groups, summarize_draws

Floats = NDArray[np.float64]

DECILES = 10


def compute_smape_terms(predicted: ArrayLike, true: ArrayLike) -> Floats:
    """Return |p - t| / ((|t| + |p|) / 2) for each pair, 0..2; 0 if both are 0.

    Pass prices, never their logarithms: an error of 20 % scores 18.2 % on prices and 4 % on logarithms. For p, t > 0
    each term is 2 tanh(|ln p - ln t| / 2), a bounded error of the logarithm.
    """
    p, t = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    scale = (np.abs(t) + np.abs(p)) / 2
    terms: Floats = np.divide(np.abs(p - t), scale, out=np.zeros_like(scale), where=scale > 0)
    return terms


def smape(predicted: ArrayLike, true: ArrayLike) -> float:
    """Return the symmetric mean absolute percentage error, 0..200."""
    return 100 * float(compute_smape_terms(predicted, true).mean())


def compute_metrics(predicted: ArrayLike, true: ArrayLike, *, constant: float) -> dict[str, float]:
    """Return all metrics of one set.

    Args:
        predicted, true: (N,) prices above 0.
        constant: a constant prediction to compare with, such as the training median.

    Returns:
        smape, smape_constant; mae_log; bias_log (mean ln p - ln t, above 0: too high) and median_ratio (p / t);
        smape_decile_1 (the cheapest tenth of the set) ... smape_decile_10.
    """
    p, t = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    terms = compute_smape_terms(p, t)
    log_error = np.log(p) - np.log(t)
    metrics = {
        "smape": 100 * float(terms.mean()),
        "smape_constant": smape(np.full_like(t, constant), t),
        "mae_log": float(np.abs(log_error).mean()),
        "bias_log": float(log_error.mean()),
        "median_ratio": float(np.exp(np.median(log_error))),
    }
    decile = assign_deciles(t)
    for number in range(DECILES):
        if (decile == number).any():
            metrics[f"smape_decile_{number + 1}"] = 100 * float(terms[decile == number].mean())
    return metrics


def assign_deciles(true: ArrayLike) -> NDArray[np.int64]:
    """Return the decile of each price within the set, 0 for the cheapest; equal prices share a decile."""
    t = np.asarray(true, dtype=np.float64)
    edges = np.quantile(t, np.linspace(0, 1, DECILES + 1)[1:-1])
    decile: NDArray[np.int64] = np.searchsorted(edges, t, side="right")
    return decile


def compute_intervals(
    predicted: ArrayLike, true: ArrayLike, *, groups: ArrayLike, draws: int, seed: int = 0
) -> Intervals:
    """Return the 95 % interval of SMAPE over resampled groups; none of fewer than four (`scoring.draw_groups`).

    Args:
        predicted, true: (N,) prices above 0.
        groups: (N,) shared by near-duplicates, whose errors correlate: the bootstrap draws groups, not rows.
        draws: resamples; 0: no interval.
    """
    _, group_index = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(group_index, weights=compute_smape_terms(predicted, true))
    counts = np.bincount(group_index)
    drawn = draw_groups(len(counts), draws, seed=seed)
    return summarize_draws([{"smape": float(100 * sums[i].sum() / counts[i].sum())} for i in drawn], draws=draws)
