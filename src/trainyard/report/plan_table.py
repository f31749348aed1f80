"""What a run was predicted to take, and what it took, as a table of its report and lines of its summary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainyard.report.html import render_table
from trainyard.runs.observations import Amounts, read_amounts
from trainyard.text import format_size

_NAMES = {
    "memory_gib": "GPU memory, peak",
    "micro_batch_size": "micro-batch",
    "samples_per_s": "samples/s",
    "hours": "hours",
    "disk_bytes": "disk, checkpoints",
}


_NOT_PREDICTED, _NOT_OBSERVED = "not predicted", "not observed"


class _Row(NamedTuple):
    name: str
    predicted: str
    observed: str
    why_predicted: str
    why_observed: str


def render_plan(env: Mapping[str, Any]) -> str:
    """Return the table in HTML; "" if the run did not record what it took."""
    rows = _list_rows(env)
    return render_table(["", "predicted", "observed", "prediction", "observation"], rows, numbers=False) if rows else ""


def list_plan(env: Mapping[str, Any]) -> list[str]:
    """Return a line of text for each amount that was predicted and observed to be another; the page has them all."""
    return [
        f"{row.name:<18} predicted {row.predicted:<14} observed {row.observed:<14}".rstrip()
        for row in _list_rows(env)
        if row.predicted != row.observed and row.predicted != _NOT_PREDICTED and row.observed != _NOT_OBSERVED
    ]


def _list_rows(env: Mapping[str, Any]) -> list[_Row]:
    found = read_amounts(env)
    if found is None:
        return []
    predicted, observed = found
    return [
        _Row(
            title,
            _format(predicted, name, _NOT_PREDICTED),
            _format(observed, name, _NOT_OBSERVED),
            (predicted.reasons or {}).get(name, ""),
            (observed.reasons or {}).get(name, ""),
        )
        for name, title in _NAMES.items()
    ]


def _format(amounts: Amounts, name: str, absent: str) -> str:
    value = getattr(amounts, name)
    if value is None:
        return absent
    return {
        "memory_gib": "{:.2f} GiB",
        "micro_batch_size": "{}",
        "samples_per_s": "{:.4g}",
        "hours": "{:.3g}",
    }.get(name, "").format(value) or format_size(value)
