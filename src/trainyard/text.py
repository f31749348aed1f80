"""Text for people: durations, sizes, columns, lists of names, the nearest match for a wrong name, commands."""

import difflib
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

SCREEN_WIDTH = 120


def format_duration(seconds: float) -> str:
    """Format a duration to at least two significant digits: 45s, 3m12s, 12m, 1h05m, 2d03h."""
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


def format_size(count_bytes: int) -> str:
    """Format a size in GiB to three decimals, or in whole KiB where that would read 0.000: 0.008 GiB, 12 KiB."""
    return f"{count_bytes / 2**30:.3f} GiB" if count_bytes >= 2**20 else f"{-(-count_bytes // 2**10)} KiB"


def count_nouns(number: int, noun: str) -> str:
    """Return "1 rank" or "3 ranks" for the noun "rank"."""
    plural = f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def align_columns(rows: Sequence[Sequence[str]], *, indent: str = "", width: int | None = None) -> list[str]:
    """Format rows of cells as lines with aligned columns, separated by two spaces.

    Args:
        width: cut longer lines to this width; None: keep them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)] for row in rows)
    lines = [f"{indent}{'  '.join(row)}".rstrip() for row in padded]
    return lines if width is None else [cut(line, width) for line in lines]


def make_slug(text: str) -> str:
    """Return the text as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text)


def compose_letters(name: str) -> str:
    """Return a name as most programs write it (NFC): a Mac decomposes letters with accents in names of files."""
    return unicodedata.normalize("NFC", name)


def make_printable(text: str) -> str:
    """Return a text with its control characters, all but line ends and tabs, as visible escapes: \\x1b[31m.

    These are obeyed by a terminal (C0, C1), or change the order of letters (bidirectional marks), or are line ends,
    or bytes of file names that are not UTF-8, which cannot be printed.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def cut(text: str, width: int) -> str:
    """Cut a text that is longer than `width` characters; ".." marks the cut."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def join_names(names: Sequence[str], *, most: int = 8) -> str:
    """Join names with commas; of more than `most` show the first ones and the number of the rest.

    Line breaks and other characters that cannot be printed are escaped: names may be of a stranger.
    """
    shown = [name if name.isprintable() else ascii(name)[1:-1] for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def find_nearest(wrong: str, names: Iterable[str], *, most: int = 1, similarity: float = 0.6) -> list[str]:
    """Return the names that look most like a wrong one, nearest first.

    Args:
        similarity: how much of both has to be the same, in 0..1; 0: names are returned even if none is similar.
    """
    return difflib.get_close_matches(wrong, [name for name in names if name], n=most, cutoff=similarity)


def suggest_nearest(wrong: str, names: Iterable[str]) -> str:
    """Return " Nearest: x.", to append to a sentence about a wrong name; "" if none is similar."""
    return "".join(f" Nearest: {name}." for name in find_nearest(wrong, names))


def format_override(name: str, value: str | Sequence[str]) -> str:
    """Write an option with a text or a list of texts as one word for a shell, which `compose` reads back."""
    if isinstance(value, str):
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        return shlex.quote(f"{name}={_quote_for_hydra(value) if is_quoted else _escape_interpolation(value)}")
    texts = [text if re.fullmatch(r"[\w.:/*-]+", text, re.ASCII) else _quote_for_hydra(text) for text in value]
    return shlex.quote(f"{name}=[{','.join(texts)}]")


def shorten_path(path: Path) -> Path:
    """Return a path as one would type it here, so that a page with it says nothing about the machine."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def quote_path(path: Path | str) -> str:
    """Write a path as one word for a shell; "./" before a dash, so that no command reads it as an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _quote_for_hydra(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(_escape_interpolation(text), Quote.double).with_quotes()


def _escape_interpolation(text: str) -> str:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
