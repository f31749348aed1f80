"""Numbers and metrics as text, the same on the screen and in reports."""

import math
from collections.abc import Sequence

from trainyard.runs.events import Line, has_interval, name_interval_ends

ABSENT = "not recorded"


def format_metric(line: Line, name: str) -> str:
    """Format a metric of a line, with its 95 % interval in brackets if it has one; "-" if the line lacks it."""
    if name not in line:
        return "-"
    if not has_interval(line, name):
        return format_score(line[name])
    low, high = (format_score(line[end]) for end in name_interval_ends(name))
    return f"{format_score(line[name])} [{low}, {high}]"


def format_alike(lines: Sequence[Line], name: str) -> list[str]:
    """Format a metric of several evaluations: if it is a count in one of them, a 1 has no decimals in another."""
    values = [float(line[name]) for line in lines if name in line]
    if any(value > 1 for value in values) and all(value.is_integer() for value in values):
        return [f"{line[name]:,.0f}" if name in line else "-" for line in lines]
    return [format_metric(line, name) for line in lines]


def format_score(value: float) -> str:
    """Format with four significant digits, trailing zeros included, so that columns are easy to compare.

    A whole number above one is a count (of trials, of draws): it has no decimals.
    """
    if isinstance(value, float) and value > 1 and value.is_integer():
        return f"{value:,.0f}"
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) and abs(value) < 1000 else format_value(value)


def format_value(value: object) -> str:
    """Format any recorded value."""
    if value is None:
        return ABSENT
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
