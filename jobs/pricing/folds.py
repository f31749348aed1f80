"""Cutting a catalogue into parts that share no group of near-duplicates and have like prices."""

import hashlib
from collections.abc import Sequence

import numpy as np

DECILES = 10


def fold_of(groups: Sequence[str], log_price: np.ndarray, *, folds: int, seed: int) -> np.ndarray:
    """Deal groups out to folds, so that each fold gets a like share of every decile of the price.

    Groups go largest first, equally large ones in the order of a hash of (seed, name), each to the fold where it
    brings the counts per decile nearest to even (least sum of squares, over the total as well). Costs
    groups x folds x deciles.

    Args:
        groups: (N,) the group of each row.
        log_price: (N,) float.

    Returns:
        (N,) int64 in 0 .. folds - 1.
    """
    names, group_of = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    edges = np.quantile(log_price, np.linspace(0, 1, DECILES + 1)[1:-1])
    decile = np.searchsorted(edges, log_price, side="right")
    counts = np.zeros((len(names), DECILES + 1))
    np.add.at(counts, (group_of, decile), 1)
    counts[:, DECILES] = counts.sum(axis=1)
    weight = 1 / counts.sum(axis=0).clip(1)
    rank = [hashlib.blake2b(f"{seed}:{name}".encode()).digest() for name in names]
    order = sorted(range(len(names)), key=lambda g: (-counts[g, DECILES], rank[g]))
    have = np.zeros((folds, DECILES + 1))
    chosen = np.empty(len(names), dtype=np.int64)
    for g in order:
        growth = ((2 * have + counts[g]) * counts[g] * weight).sum(axis=1)  # of the sum of squares
        chosen[g] = int(np.argmin(growth))
        have[chosen[g]] += counts[g]
    return chosen[group_of]


def cut(
    groups: Sequence[str], log_price: np.ndarray, *, folds: int, fold: int, val_share: float, seed: int
) -> np.ndarray:
    """Return (N,) "train", "val" or "test": fold `fold` of `folds` is tested, a share of the rest validates.

    Args:
        fold: -1: nothing is tested, and all that does not validate trains.
    """
    parts = np.full(len(groups), "train", dtype="<U5")
    if fold >= 0:
        parts[fold_of(groups, log_price, folds=folds, seed=seed) == fold] = "test"
    if val_share > 0:
        rest = np.flatnonzero(parts == "train")
        inner = fold_of(
            [groups[i] for i in rest.tolist()], log_price[rest], folds=max(2, round(1 / val_share)), seed=seed + 1
        )
        parts[rest[inner == _usual(inner, [groups[i] for i in rest.tolist()])]] = "val"
    return parts


def _usual(fold: np.ndarray, groups: Sequence[str]) -> int:
    """Return the fold with the median number of groups: one that a single group fills says little of unseen ones."""
    held: dict[int, set[str]] = {}
    for number, group in zip(fold.tolist(), groups, strict=True):
        held.setdefault(number, set()).add(group)
    return sorted(held, key=lambda number: (len(held[number]), number))[len(held) // 2]
