"""Numeric features of an item, fitted on the training rows only."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .parsing import FLAGS, Item

KINDS = ("g", "ml", "count", "mm", "other")
INNER_FOLDS = 5
SMOOTHING = 20  # weight of the overall mean in a brand's mean, in rows
CLIP = 5.0  # standard deviations
BRAND_MIN = 2  # rows that a brand needs to be kept

_SENTENCE = re.compile(r"[.!?]+(?:\s|$)")


@dataclass(frozen=True)
class Features:
    """The fitted state: turns an item into numbers without the training rows. Field names are JSON keys."""

    names: tuple[str, ...]  # (F,)
    columns: tuple[str, ...]  # further numeric columns of the catalogue, in order
    mean: tuple[float, ...]
    std: tuple[float, ...]
    log_price: float  # mean over the training rows
    brands: Mapping[str, tuple[tuple[int, ...], tuple[float, ...]]]  # row count and sum of log prices per inner fold

    def to_json(self) -> str:
        """Return the state as JSON; equal states give equal text."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "Features":
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        brands = {name: (tuple(count), tuple(total)) for name, (count, total) in fields.pop("brands").items()}
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**plain, brands=brands)

    def compute_row(self, item: Item, numbers: Sequence[float], *, inner_fold: int | None) -> np.ndarray:
        """Return (F,) float32: standardised, clipped to +-5, 0 for unknown values (indicators mark these).

        Args:
            numbers: the further numeric columns; nan where empty.
            inner_fold: of a training row, so that its brand's mean price excludes its own fold; None for other rows.
        """
        raw = np.array(_compute_raw(item, numbers, self._estimate_brand_price(item, inner_fold)), dtype=np.float64)
        scaled = (raw - np.array(self.mean)) / np.array(self.std)
        return np.where(np.isnan(raw), 0.0, np.clip(scaled, -CLIP, CLIP)).astype(np.float32)

    def _estimate_brand_price(self, item: Item, inner_fold: int | None) -> tuple[float, float]:
        """Return the smoothed mean of the brand's log prices and log1p of its row count (Micci-Barreca 2001)."""
        for name in item.brand:
            if name in self.brands:
                counts, sums = self.brands[name]
                other_folds = [k for k in range(INNER_FOLDS) if k != inner_fold]
                count, total = sum(counts[k] for k in other_folds), sum(sums[k] for k in other_folds)
                return (total + SMOOTHING * self.log_price) / (count + SMOOTHING), math.log1p(count)
        return self.log_price, 0.0


def fit(
    items: Sequence[Item],
    numbers: Sequence[Sequence[float]],
    log_price: np.ndarray,
    inner_folds: Sequence[int],
    *,
    columns: Sequence[str],
) -> Features:
    """Fit on the training rows.

    Args:
        numbers: (N, C) the further numeric columns; nan where empty.
        log_price: (N,) float64.
        inner_folds: (N,) from `assign_inner_fold`.
        columns: (C,) names.
    """
    prior = float(log_price.mean())
    names = _list_names(columns)
    count = len(names)
    unscaled = Features(
        names, tuple(columns), (0.0,) * count, (1.0,) * count, prior, _collect_brands(items, log_price, inner_folds)
    )
    raw = np.array(
        [
            _compute_raw(item, row, unscaled._estimate_brand_price(item, fold))
            for item, row, fold in zip(items, numbers, inner_folds, strict=True)
        ],
        dtype=np.float64,
    )
    known = ~np.isnan(raw)
    known_count = known.sum(axis=0).clip(1)
    mean = np.where(known, raw, 0).sum(axis=0) / known_count
    std = np.sqrt(np.where(known, (raw - mean) ** 2, 0).sum(axis=0) / known_count)
    std = np.where(std > 1e-9, std, 1.0)
    return Features(names, tuple(columns), tuple(mean.tolist()), tuple(std.tolist()), prior, unscaled.brands)


def assign_inner_fold(group: str) -> int:
    """Return the inner fold of a training row; near-duplicates share a fold, so none reveals another's price."""
    return hashlib.blake2b(group.encode(), digest_size=8).digest()[0] % INNER_FOLDS


def _collect_brands(
    items: Sequence[Item], log_price: np.ndarray, inner_folds: Sequence[int]
) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    counts: dict[str, list[int]] = {}
    sums: dict[str, list[float]] = {}
    for item, price, fold in zip(items, log_price.tolist(), inner_folds, strict=True):
        for name in item.brand:
            counts.setdefault(name, [0] * INNER_FOLDS)[fold] += 1
            sums.setdefault(name, [0.0] * INNER_FOLDS)[fold] += price
    return {name: (tuple(counts[name]), tuple(sums[name])) for name in sorted(counts) if sum(counts[name]) >= BRAND_MIN}


def _list_names(columns: Sequence[str]) -> tuple[str, ...]:
    own = [
        "value_log", "pack_log", "total_log", *(f"{kind}_log" for kind in KINDS), *(f"has_{kind}" for kind in KINDS),
        "brand_price", "brand_rows", "characters", "words", "digits", "sentences", "uppercase", "distinct_words",
        "bullets", "pieces", "sides", "side_max", "side_mean", *FLAGS,
    ]  # fmt: skip
    further = [f"{name}_{part}" for name in columns for part in ("log", "known")]
    return (*own, *further, *(("columns_mean",) if columns else ()))


def _compute_raw(item: Item, numbers: Sequence[float], brand: tuple[float, float]) -> list[float]:
    """Return the features before standardisation; nan for unknown values."""
    nan = math.nan
    whole_text = " ".join([item.title, *item.bullets, item.description])
    words = whole_text.lower().split()
    amount = nan if item.amount is None else math.log1p(item.amount)
    letters = sum(map(str.isalpha, whole_text))
    logs = [math.log1p(n) if n >= 0 else nan for n in numbers]  # nan >= 0 is false
    known = [n for n in logs if not math.isnan(n)]
    return [
        nan if item.value is None else math.log1p(item.value),
        math.log(item.pack),
        nan if item.value is None else math.log1p(item.value * item.pack),
        *(amount if item.kind == kind else nan for kind in KINDS),
        *(float(item.kind == kind) for kind in KINDS),
        *brand,
        math.log1p(len(whole_text)),
        math.log1p(len(words)),
        math.log1p(sum(map(str.isdigit, whole_text))),
        math.log1p(len(_SENTENCE.findall(whole_text))),
        sum(map(str.isupper, whole_text)) / max(1, letters),
        len(set(words)) / max(1, len(words)),
        float(len(item.bullets)),
        math.log1p(item.pieces),
        float(len(item.sizes_mm)),
        math.log(max(item.sizes_mm)) if item.sizes_mm and max(item.sizes_mm) > 0 else nan,
        sum(math.log1p(side) for side in item.sizes_mm) / len(item.sizes_mm) if item.sizes_mm else nan,
        *(float(flag in item.flags) for flag in FLAGS),
        *(part for log in logs for part in (log, float(not math.isnan(log)))),
        *([sum(known) / len(known) if known else nan] if numbers else []),
    ]
