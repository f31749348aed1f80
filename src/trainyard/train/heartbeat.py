"""The heartbeat: shows that a rank makes progress, to its watchdog in memory and to people in a file.

It also counts the seconds of each phase, which runs/goodput.py reads.
"""

import json
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.files import forgive_failed_write, write_atomically
from trainyard.runs.history import read_object

HEARTBEAT_FILE = "heartbeat.json"


@dataclass
class Progress:
    """The current work of a rank. Written by its main thread, read by its watchdog."""

    count: int = 0  # rises with each piece of work that is done
    phase: str = "preparing"
    step: int = 0


class Heartbeat:
    """Counts the work of this rank; on rank 0, also writes it to `heartbeat.json`, every few seconds.

    It is called between steps and not by a separate thread, so it stops if the run hangs.
    """

    def __init__(
        self, run: Path, attempt: str, *, is_main: bool = True, every_s: float = 5.0, started: float | None = None
    ) -> None:
        """Begin to count.

        Args:
            started: when the attempt began, seconds since the epoch; None: now.
        """
        self.samples_per_s: float | None = None
        self.progress = Progress()
        self.attempt, self._path, self._every_s = attempt, run / HEARTBEAT_FILE if is_main else None, every_s
        self._last_s = -math.inf
        self._spent = {self.progress.phase: max(0.0, time.time() - started) if started else 0.0}
        self._counted_until = time.monotonic()
        self.input_wait_s = 0.0  # of training so far
        self.failed_writes = 0
        self.previous = _read_previous(self._path) if self._path is not None else {}
        self.check_owner: Callable[[], None] = lambda: None  # raises if another process has taken over the run

    def touch(self, samples: int = 0) -> None:
        """Note that some work is done, such as a micro-batch, of however many samples. Costs nothing."""
        self.progress.count += 1

    def beat(self, phase: str, *, step: int = 0, total_steps: int | None = None, now: bool = False) -> None:
        """Record the work of this rank; write the file, unless it is younger than `every_s`.

        Args:
            phase: "preparing", "packing", "waiting" (for rank 0 to pack), "compiling", "training", "evaluating" or
                "saving".
            now: write in any case, because the phase that begins may take long.

        Raises:
            UserError: another process has taken over the run.
        """
        self._count()
        self.progress.phase, self.progress.step = phase, step
        self.touch()
        if self._path is None or (not now and time.monotonic() - self._last_s < self._every_s):
            return
        self._last_s = time.monotonic()
        content = {"time": time.time(), "phase": phase, "step": step, "total_steps": total_steps}
        content |= {"samples_per_s": self.samples_per_s, "host": socket.gethostname(), "attempt": self.attempt}
        content |= {"previous": self.previous["attempt"]} if "attempt" in self.previous else {}
        self.check_owner()
        with forgive_failed_write(self._count_failed_write):
            write_atomically(self._path, json.dumps(content | {"spent": self.read_spent()}), durable=False)

    def _count_failed_write(self, error: OSError) -> None:
        if not self.failed_writes:
            logger.warning("{}: not written: {}. The run goes on, and looks silent until it is", self._path, error)
        self.failed_writes += 1

    def read_spent(self) -> dict[str, float]:
        """Return the seconds of this attempt so far by phase, with "input": those of training that waited for data."""
        self._count()
        wait_s = min(self.input_wait_s, self._spent.get("training", 0.0))
        spent = self._spent | ({"training": self._spent["training"] - wait_s, "input": wait_s} if wait_s else {})
        return {phase: round(seconds, 3) for phase, seconds in spent.items()}

    def _count(self) -> None:
        now, phase = time.monotonic(), self.progress.phase
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._counted_until
        self._counted_until = now


def _read_previous(path: Path) -> dict[str, Any]:
    """Return the seconds that the attempt before had counted at its last heartbeat."""
    last = read_object(path)
    return {name: last[name] for name in ("attempt", "spent") if name in last}
