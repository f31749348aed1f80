"""How far prices are off: SMAPE on the price scale, per price decile, with bias and confidence intervals."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

DECILES = 10


def smape_terms(predicted: ArrayLike, true: ArrayLike) -> Floats:
    """Return |p - t| / ((|t| + |p|) / 2) of each pair, 0..2; 0 where both are 0.

    On prices, never on their logarithms: an error of 20 % reads 18.2 % here and 4 % there. For p, t > 0 each term is
    2 tanh(|ln p - ln t| / 2), so what it measures is the error of the logarithm, bounded.
    """
    p, t = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    scale = (np.abs(t) + np.abs(p)) / 2
    terms: Floats = np.divide(np.abs(p - t), scale, out=np.zeros_like(scale), where=scale > 0)
    return terms


def smape(predicted: ArrayLike, true: ArrayLike) -> float:
    """Return the symmetric mean absolute percentage error, 0..200."""
    return 100 * float(smape_terms(predicted, true).mean())


def report(
    predicted: ArrayLike, true: ArrayLike, *, groups: ArrayLike, constant: float, draws: int, seed: int = 0
) -> dict[str, float]:
    """Return every metric of one set.

    Args:
        predicted, true: (N,) prices above 0.
        groups: (N,) near-duplicates share one: intervals draw groups, not rows, for their errors go together.
        constant: one price for everything, such as the training median: what knowing nothing scores.
        draws: bootstrap resamples behind the 95 % interval; 0: no interval.

    Returns:
        smape, smape_low, smape_high, smape_constant; mae_log; bias_log (mean ln p - ln t, above 0: too dear) and
        median_ratio (p / t); smape_decile_1 (the cheapest tenth of the set) ... smape_decile_10.
    """
    p, t = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    terms = smape_terms(p, t)
    off = np.log(p) - np.log(t)
    metrics = {
        "smape": 100 * float(terms.mean()),
        "smape_constant": smape(np.full_like(t, constant), t),
        "mae_log": float(np.abs(off).mean()),
        "bias_log": float(off.mean()),
        "median_ratio": float(np.exp(np.median(off))),
    }
    if draws:
        metrics["smape_low"], metrics["smape_high"] = _interval(terms, np.asarray(groups), draws, seed)
    decile = deciles(t)
    for number in range(DECILES):
        if (decile == number).any():
            metrics[f"smape_decile_{number + 1}"] = 100 * float(terms[decile == number].mean())
    return metrics


def deciles(true: ArrayLike) -> NDArray[np.int64]:
    """Return the tenth of the set that each price falls into, 0 the cheapest; equal prices fall together."""
    t = np.asarray(true, dtype=np.float64)
    edges = np.quantile(t, np.linspace(0, 1, DECILES + 1)[1:-1])
    tenth: NDArray[np.int64] = np.searchsorted(edges, t, side="right")
    return tenth


def _interval(terms: Floats, groups: NDArray[np.generic], draws: int, seed: int) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of SMAPE over resampled groups."""
    _, group_of = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(group_of, weights=terms), np.bincount(group_of)
    chosen = np.random.default_rng(seed).integers(len(counts), size=(draws, len(counts)))
    means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    low, high = np.quantile(100 * means, [0.025, 0.975])
    return float(low), float(high)
