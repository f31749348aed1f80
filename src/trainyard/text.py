"""Text for people: durations, columns, lists of names, the nearest name to a wrong one."""

import difflib
from collections.abc import Iterable, Sequence

SCREEN_WIDTH = 120


def format_duration(seconds: float) -> str:
    """Return a length of time to two figures or better: 45s, 3m12s, 12m, 1h05m, 2d03h."""
    whole_s = round(seconds)
    if whole_s < 60:
        return f"{whole_s}s"
    if whole_s < 600:
        return f"{whole_s // 60}m{whole_s % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def align_columns(rows: Sequence[Sequence[str]], *, indent: str = "", width: int | None = None) -> list[str]:
    """Return rows of cells as lines with columns of equal width, two spaces between them.

    Args:
        width: cut lines that are longer; None: keep them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)] for row in rows)
    lines = [f"{indent}{'  '.join(row)}".rstrip() for row in padded]
    return lines if width is None else [cut(line, width) for line in lines]


def cut(text: str, width: int) -> str:
    """Return a text, shortened where it is longer than `width` characters, with ".." to show it."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def join_names(names: Sequence[str], *, most: int = 8) -> str:
    """Return names with commas between; of many the first, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(wrong: str, names: Iterable[str], *, most: int = 1, always: bool = False) -> list[str]:
    """Return the names that look most like a wrong one, the nearest first.

    Args:
        always: return names even where none looks alike.
    """
    return difflib.get_close_matches(wrong, [name for name in names if name], n=most, cutoff=0.0 if always else 0.6)


def nearest_hint(wrong: str, names: Iterable[str]) -> str:
    """Return " Nearest: x.", to end a sentence about a wrong name; "" if nothing is near."""
    return "".join(f" Nearest: {name}." for name in nearest(wrong, names))
