"""Measuring alternatives side by side: rounds in shuffled order, medians with spread, ratios within a round, one file.

Ratios are formed within a round, because both sides of one met the same state of the machine. A number whose spread is
above 0.1, or that was measured in fewer than three rounds, is marked: do not quote it.
"""

import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.environment import environment_record
from trainyard.files import write_atomically
from trainyard.text import align_columns

QUOTABLE_SPREAD = 0.1
QUOTABLE_ROUNDS = 3


@dataclass(frozen=True)
class Candidate:
    """One of the alternatives, or one number of it."""

    name: str
    measure: Callable[[], float]  # does the work once, and returns the number
    unit: str  # such as "images/s"
    note: str = ""  # where its work or its output differs
    beside: str = ""  # the way it is held against: the ratio is this one's number over that one's


@dataclass(frozen=True)
class Summary:
    """Several rounds of one number."""

    median: float
    spread: float  # (largest - smallest) / median
    quotable: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        middle = median(values)
        spread = (max(values) - min(values)) / abs(middle) if middle else 0.0
        return cls(middle, spread, spread <= QUOTABLE_SPREAD and len(values) >= QUOTABLE_ROUNDS)

    def text(self, form: str = ",.1f") -> str:
        """Return the median with its spread, and a question mark if it is not to be quoted."""
        return f"{self.median:{form}} +-{self.spread:.0%}{'' if self.quotable else ' ?'}"


def side_by_side(
    ways: Sequence[Candidate], *, rounds: int, warm_up: bool = False, tell: Callable[[str], object] = print
) -> list[dict[str, Any]]:
    """Measure every way in each round, in an order shuffled anew; return one line for each.

    Args:
        warm_up: take one round more before the others, and forget it.
        tell: called with a line for each number measured.
    """
    values: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(-1 if warm_up else 0, rounds):
        for way in random.Random(number).sample(list(ways), len(ways)):
            value = way.measure()
            if number >= 0:
                values[way.name].append(value)
                tell(f"round {number + 1}/{rounds}  {way.name:34} {value:14,.2f} {way.unit}")
    return [_line(way, values) for way in ways]


def for_at_least(seconds: float, work: Callable[[], int]) -> float:
    """Repeat work that returns how many samples it did; return samples per second."""
    begin, done = time.perf_counter(), work()
    while time.perf_counter() - begin < seconds:
        done += work()
    return done / (time.perf_counter() - begin)


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines of `side_by_side` for reading."""
    rows = [("", "median +- spread", "ratio", "")]
    for line in lines:
        ratio = f"{Summary(**line['ratio']).text('.2f')} x {line['beside']}" if "ratio" in line else ""
        rows.append((line["name"], f"{Summary(**line['summary']).text(',.2f')} {line['unit']}", ratio, line["note"]))
    return "\n".join(align_columns(rows))


def header(suite: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one must know to judge the numbers below it."""
    return {
        "kind": "header",
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["trainyard", *sys.argv[1:]]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "environment": environment_record(),
    }


def write_new(folder: Path, suite: str, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write `<folder>/<suite>-<date>.jsonl`, or with -2, -3, ... where that is taken; return its path."""
    path = new_file(folder, f"{suite}-{datetime.now(UTC):%Y-%m-%d}")
    write_results(path, lines)
    return path


def new_file(folder: Path, stem: str) -> Path:
    """Return the first free name of `<stem>.jsonl`, `<stem>-2.jsonl`, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / f"{stem}{'' if n == 1 else f'-{n}'}.jsonl" for n in count(1))
    return next(path for path in paths if not path.exists())


def write_results(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace a result file as a whole."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def _line(way: Candidate, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    mine = values[way.name]
    line: dict[str, Any] = {"kind": "result", "name": way.name, "unit": way.unit, "note": way.note, "rounds": mine}
    line["summary"] = asdict(Summary.of(mine))
    if way.beside:
        ratios = [one / other for one, other in zip(mine, values[way.beside], strict=True)]
        line |= {"beside": way.beside, "ratio": asdict(Summary.of(ratios))}
    return line
