"""Compares saved states bit by bit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

VARYING = ("progress/train_s", "metrics_position")
"""What may differ between two runs that compute the same: time spent, and the bytes that recording it takes."""


def flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state, such as a checkpoint, as a flat mapping: "optimizer/state/0/exp_avg" -> value."""
    return dict(_walk(state))


def find_differences(a: Mapping[str, Any], b: Mapping[str, Any], *, ignore: Sequence[str] = VARYING) -> list[str]:
    """Return the names of the entries that two flat states do not share, or that differ in a bit."""
    missing = sorted(a.keys() ^ b.keys())
    return missing + [name for name in a if name in b and name not in ignore and not _is_equal(a[name], b[name])]


def _walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, f"{prefix}/{name}" if prefix else str(name))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _walk(inner, f"{prefix}/{i}")
    else:
        yield prefix, value


def _is_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
