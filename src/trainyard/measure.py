"""What a measurement writes: medians with spread, and one result file with all that is needed to judge them.

A number with a spread above 0.1, or measured in fewer than three rounds, is marked: do not quote it.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.environment import THIS_CODE, collect_environment, find_checkout
from trainyard.files import require_writable, write_atomically

QUOTABLE_SPREAD = 0.1
QUOTABLE_ROUNDS = 3
WORTH = 1.1
"""What fixing a fault has to give, as a factor of the rate, to be the verdict: on a quiet machine the medians of two
measurements differ by up to 5 %, so a tenth is a difference."""


@dataclass(frozen=True)
class Summary:
    """Several rounds of one number."""

    median: float
    spread: float  # (largest - smallest) / median
    quotable: bool

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Summary":
        middle = median(values)
        spread = (max(values) - min(values)) / abs(middle) if middle else 0.0
        return cls(middle, spread, spread <= QUOTABLE_SPREAD and len(values) >= QUOTABLE_ROUNDS)

    def format(self, form: str = ",.1f") -> str:
        """Return the median with its spread, and a question mark if it must not be quoted."""
        return f"{self.median:{form}} +-{self.spread:.0%}{'' if self.quotable else ' ?'}"


def make_header(suite: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header line of a result file: everything needed to judge the numbers below it."""
    return {
        "kind": "header",
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["trainyard", *sys.argv[1:]]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "environment": collect_environment(find_checkout(THIS_CODE)[0]),
    }


def write_new(folder: Path, suite: str, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write `<folder>/<suite>-<date>.jsonl`, with -2, -3, ... if that name is taken; return its path."""
    path = find_free_path(folder, f"{suite}-{datetime.now(UTC):%Y-%m-%d}")
    write_results(path, lines)
    return path


def find_free_path(folder: Path, stem: str) -> Path:
    """Return the first free name of `<stem>.jsonl`, `<stem>-2.jsonl`, ... in a folder, which is created if missing.

    Raises:
        UserError: the folder cannot be written to.
    """
    require_writable(folder, flag="--results")
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / f"{stem}{'' if n == 1 else f'-{n}'}.jsonl" for n in count(1))
    return next(path for path in paths if not path.exists())


def write_results(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write or replace a result file, atomically."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
