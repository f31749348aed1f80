"""Splits a catalogue into parts with similar prices and no near-duplicates in common."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

DECILES = 10


def assign_folds(groups: Sequence[str], log_price: np.ndarray, *, folds: int, seed: int) -> np.ndarray:
    """Assign groups to folds so that each fold gets a similar share of every price decile.

    Takes the largest group first, ties in the order of a hash of (seed, name), and puts each into the fold that
    keeps the counts per decile and in total most even (least sum of squares). Costs groups x folds x deciles.

    Args:
        groups: (N,) the group of each row.
        log_price: (N,) float.

    Returns:
        (N,) int64 in 0 .. folds - 1.
    """
    names, group_index = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    edges = np.quantile(log_price, np.linspace(0, 1, DECILES + 1)[1:-1])
    decile = np.searchsorted(edges, log_price, side="right")
    counts = np.zeros((len(names), DECILES + 1))
    np.add.at(counts, (group_index, decile), 1)
    counts[:, DECILES] = counts.sum(axis=1)
    weight = 1 / counts.sum(axis=0).clip(1)
    digests = [hashlib.blake2b(f"{seed}:{name}".encode()).digest() for name in names]
    order = sorted(range(len(names)), key=lambda g: (-counts[g, DECILES], digests[g]))
    filled = np.zeros((folds, DECILES + 1))
    chosen = np.empty(len(names), dtype=np.int64)
    for g in order:
        growth = ((2 * filled + counts[g]) * counts[g] * weight).sum(axis=1)  # of the sum of squares
        chosen[g] = int(np.argmin(growth))
        filled[chosen[g]] += counts[g]
    return chosen[group_index]


def split_rows(
    groups: Sequence[str], log_price: np.ndarray, *, folds: int, fold: int, val_share: float, seed: int
) -> np.ndarray:
    """Return (N,) "train", "val" or "test": fold `fold` of `folds` is the test set, a share of the rest validates.

    Args:
        fold: -1: no test set; every row trains or validates.
    """
    parts = np.full(len(groups), "train", dtype="<U5")
    if fold >= 0:
        parts[assign_folds(groups, log_price, folds=folds, seed=seed) == fold] = "test"
    if val_share > 0:
        rest = np.flatnonzero(parts == "train")
        left = [groups[i] for i in rest.tolist()]
        inner = assign_folds(left, log_price[rest], folds=max(2, round(1 / val_share)), seed=seed + 1)
        parts[rest[inner == _pick_median_fold(inner, left)]] = "val"
    return parts


def _pick_median_fold(fold: np.ndarray, groups: Sequence[str]) -> int:
    """Return the fold with the median number of groups: a fold with one large group says little about unseen ones."""
    count: Counter[int] = Counter(number for number, _ in set(zip(fold.tolist(), groups, strict=True)))
    return sorted(count, key=lambda number: (count[number], number))[len(count) // 2]
