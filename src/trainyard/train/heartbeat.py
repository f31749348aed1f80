"""The heartbeat: a file that shows that rank 0 is alive."""

import json
import math
import socket
import time
from pathlib import Path

from trainyard.files import write_atomically

HEARTBEAT_FILE = "heartbeat.json"


class Heartbeat:
    """Writes to `heartbeat.json`, every few seconds, that rank 0 is alive, what it is doing and how far it is.

    It is written between steps and not by a separate thread, so it stops if the run hangs.
    """

    def __init__(self, run: Path, attempt: str, *, every_s: float = 5.0) -> None:
        self.samples_per_s: float | None = None
        self.attempt, self._path, self._every_s = attempt, run / HEARTBEAT_FILE, every_s
        self._last_s = -math.inf

    def beat(self, phase: str, *, step: int = 0, total_steps: int | None = None, now: bool = False) -> None:
        """Write a heartbeat, unless the last one is younger than `every_s`.

        Args:
            phase: "preparing", "training", "evaluating" or "saving".
            now: write in any case, because the phase that begins may take long.
        """
        if not now and time.monotonic() - self._last_s < self._every_s:
            return
        self._last_s = time.monotonic()
        content = {"time": time.time(), "phase": phase, "step": step, "total_steps": total_steps}
        content |= {"samples_per_s": self.samples_per_s, "host": socket.gethostname(), "attempt": self.attempt}
        write_atomically(self._path, json.dumps(content), durable=False)
