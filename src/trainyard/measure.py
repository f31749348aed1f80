"""Writes measurements: medians with spread, and one result file with all that is needed to judge them.

A number with a spread above 0.1, or measured in fewer than three rounds, is marked: do not quote it.
"""

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from trainyard.environment import THIS_CODE, collect_environment, find_checkout
from trainyard.files import require_writable, write_atomically

QUOTABLE_SPREAD = 0.1
QUOTABLE_ROUNDS = 3
WORTH = 1.1
"""Least gain of fixing a fault, as a factor of the rate, to be the verdict: on a quiet machine the medians of two
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


def compute_half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean of two or more independent values.

    It is t * s / sqrt(n), with t the quantile of Student's distribution for n - 1 degrees of freedom (Student, "The
    probable error of a mean", Biometrika 6, 1908). It assumes normally distributed values.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here: it loads for a third of a second

    t = float(stdtrit(len(values) - 1, 0.975))  # Student's distribution has 95 % of its mass within +- t
    return t * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times that were measured in turns, with Student's 95 % interval; above 1: the second is faster."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(cls, before_s: Sequence[float], after_s: Sequence[float]) -> "Ratio":
        """Compare two times that were measured in the same rounds: two rounds or more, seconds."""
        logs = [math.log(before / after) for before, after in zip(before_s, after_s, strict=True)]
        half = compute_half_width(logs)
        return cls(*(math.exp(fmean(logs) + shift) for shift in (0.0, -half, half)))

    @property
    def half_width(self) -> float:
        """Half of the interval, as a fraction of the mean."""
        return (self.high - self.low) / 2 / self.mean

    def covers(self, value: float) -> bool:
        """Return whether the interval includes a value."""
        return self.low <= value <= self.high

    def format(self) -> str:
        """Return the ratio with its interval."""
        return f"x{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def make_header(suite: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header line of a result file: everything needed to judge the numbers below it."""
    return {
        "kind": "header",
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([_name_program(), *map(shlex.quote, sys.argv[1:])]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "environment": collect_environment(find_checkout(THIS_CODE)[0]),
    }


def _name_program() -> str:
    """Return how the program that runs was started: `trainyard`, or `python -m` and its module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    return "trainyard" if name in ("", "trainyard") else f"python -m {name}"


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
