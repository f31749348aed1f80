"""The heartbeat: says every few seconds that rank 0 lives."""

import json
import math
import socket
import time
from pathlib import Path

from trainyard.files import write_atomically

HEARTBEAT_FILE = "heartbeat.json"


class Heartbeat:
    """Says in `heartbeat.json`, every few seconds, that rank 0 lives, what it does and how far it is.

    Written between steps and not by a thread of its own, so a run that hangs falls silent.
    """

    def __init__(self, run: Path, attempt: str, *, every_s: float = 5.0) -> None:
        self.samples_per_s: float | None = None
        self.attempt, self._path, self._every_s = attempt, run / HEARTBEAT_FILE, every_s
        self._last_s = -math.inf

    def beat(self, phase: str, *, step: int = 0, total_steps: int | None = None, now: bool = False) -> None:
        """Write a sign of life, unless the last one is younger than `every_s`.

        Args:
            phase: "preparing", "training", "evaluating" or "saving".
            now: write in any case, because what begins may take long.
        """
        if not now and time.monotonic() - self._last_s < self._every_s:
            return
        self._last_s = time.monotonic()
        content = {"time": time.time(), "phase": phase, "step": step, "total_steps": total_steps}
        content |= {"samples_per_s": self.samples_per_s, "host": socket.gethostname(), "attempt": self.attempt}
        write_atomically(self._path, json.dumps(content), durable=False)
