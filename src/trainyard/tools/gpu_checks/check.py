"""What one check of `trainyard gpu-check` is, and how much work it may do. Loads no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Figures: TypeAlias = dict[str, Any]
"""What a check found: numbers and words by name, flat, so that one line of JSON holds them."""


class NotRun(Exception):
    """This check says nothing on this machine; the message says why."""


class CheckFailed(Exception):
    """What was checked is not so; the message says what was found."""


@dataclass(frozen=True)
class Sizes:
    """How much work the checks do, and where."""

    jobs: Path  # folder of families
    data: Path  # synthetic data, kept for the next call
    scratch: Path  # runs, deleted at the end
    environ: Mapping[str, str] = field(default_factory=dict)
    small: bool = False  # the families' smoke and demo presets instead of those of full size
    steps: int = 20  # optimizer steps of a first contact
    run_steps: int = 24  # optimizer steps of a whole run
    rounds: int = 3  # of each timing
    seconds: float = 1.0  # shortest time of a round
    matrix: int = 8192  # rows and columns of the matrices whose product is timed


Work: TypeAlias = Callable[["torch.device", Sizes], Figures]


@dataclass(frozen=True)
class Check:
    """One line of the result: a function, which runs in a process of its own, or the reason why it does not."""

    step: str  # a key of `STEPS`
    name: str  # what is checked, such as "fingerprint_demo/fp16"
    work: Work
    card_only: str = ""  # why a machine without a GPU cannot answer; "": it can
    left_out: str = ""  # why this call does without it; "": it does not

    @property
    def full_name(self) -> str:
        """Return the name that --only and file names use."""
        return f"{self.step}/{self.name}"

    def matches(self, pattern: str) -> bool:
        """Return whether --only PATTERN means this check: its whole name, or one part of it."""
        parts = (self.full_name, self.name, *self.full_name.split("/"))
        return any(fnmatch(part, pattern) for part in parts)

    def explain_absence(self, device: str) -> str:
        """Return why this call does not run it on a "cuda" or "cpu" device; "": it does."""
        return self.left_out or (self.card_only if device == "cpu" else "")

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.full_name)


STEPS: Mapping[str, tuple[str, float]] = {
    "environment": ("the card, its driver, and what torch can do with them", 0.05),
    "contact": ("the first optimizer steps of every preset", 0.35),
    "bitwise": ("two runs and a resumed one end bit by bit equal", 0.15),
    "decode": ("decoding in the background gives the images of a synchronised decoder", 0.10),
    "speed": ("optimizer steps of full size: rates, memory, share of the card's peak", 0.21),
    "overlap": ("loader alone, compute alone, both together", 0.10),
    "memory": ("predicted memory of a step against observed", 0.04),
}
"""The steps in their order: what each shows, and its share of the time. Time that is left goes to the next one."""

ONE_FAMILY = ("bitwise", "speed", "overlap", "memory")
"""The steps that --quick takes with one family on a CPU: they cost the most, and their rates say nothing there."""

SMALL = ("_smoke", "_demo")
"""How presets end that train on generated data on every machine."""
