"""The heartbeat: shows that a rank makes progress, to its watchdog in memory and to people in a file."""

import json
import math
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from trainyard.files import write_atomically

HEARTBEAT_FILE = "heartbeat.json"


@dataclass
class Progress:
    """What a rank is doing. Written by its main thread, read by its watchdog."""

    count: int = 0  # rises with each piece of work that is done
    phase: str = "preparing"
    step: int = 0


class Heartbeat:
    """Counts what this rank does; on rank 0, also writes it to `heartbeat.json`, every few seconds.

    It is called between steps and not by a separate thread, so it stops if the run hangs.
    """

    def __init__(self, run: Path, attempt: str, *, is_main: bool = True, every_s: float = 5.0) -> None:
        self.samples_per_s: float | None = None
        self.progress = Progress()
        self.attempt, self._path, self._every_s = attempt, run / HEARTBEAT_FILE if is_main else None, every_s
        self._last_s = -math.inf

    def touch(self, samples: int = 0) -> None:
        """Note that some work is done, such as a micro-batch, of however many samples. Costs nothing."""
        self.progress.count += 1

    def beat(self, phase: str, *, step: int = 0, total_steps: int | None = None, now: bool = False) -> None:
        """Note what this rank does; write the file, unless it is younger than `every_s`.

        Args:
            phase: "preparing", "waiting" (for rank 0 to pack), "training", "evaluating" or "saving".
            now: write in any case, because the phase that begins may take long.
        """
        self.progress.phase, self.progress.step = phase, step
        self.touch()
        if self._path is None or (not now and time.monotonic() - self._last_s < self._every_s):
            return
        self._last_s = time.monotonic()
        content = {"time": time.time(), "phase": phase, "step": step, "total_steps": total_steps}
        content |= {"samples_per_s": self.samples_per_s, "host": socket.gethostname(), "attempt": self.attempt}
        write_atomically(self._path, json.dumps(content), durable=False)
