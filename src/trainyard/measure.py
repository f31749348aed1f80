"""Measures alternatives side by side: shuffled rounds, medians with spread, one result file.

A number with a spread above 0.1, or measured in fewer than three rounds, is marked: do not quote it.
"""

import json
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.environment import collect_environment
from trainyard.files import require_writable, write_atomically

QUOTABLE_SPREAD = 0.1
QUOTABLE_ROUNDS = 3


@dataclass(frozen=True)
class Candidate:
    """One alternative, or one of its numbers."""

    name: str
    measure: Callable[[], float]  # does the work once and returns the number
    unit: str  # such as "images/s"


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


def measure_candidates(
    candidates: Sequence[Candidate], *, rounds: int, warm_up: bool = False, tell: Callable[[str], object] = print
) -> list[dict[str, Any]]:
    """Measure every candidate in each round, in a new random order per round; return one line per candidate.

    Args:
        warm_up: run one extra round first and discard it.
        tell: called with a text line for each measured number.
    """
    values: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(-1 if warm_up else 0, rounds):
        for candidate in random.Random(number).sample(list(candidates), len(candidates)):
            value = candidate.measure()
            if number >= 0:
                values[candidate.name].append(value)
                tell(f"round {number + 1}/{rounds}  {candidate.name:34} {value:14,.2f} {candidate.unit}")
    return [
        {"name": name, "rounds": numbers, "summary": asdict(Summary.from_values(numbers))}
        for name, numbers in values.items()
    ]


def make_header(suite: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header line of a result file: everything needed to judge the numbers below it."""
    return {
        "kind": "header",
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["trainyard", *sys.argv[1:]]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "environment": collect_environment(),
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
