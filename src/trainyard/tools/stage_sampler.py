"""Samples the stacks of threads, without a line of code in theirs, and counts the share of time of each stage."""

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Self

_INTERVAL_S = 0.03
"""A sample costs 170 us of a core with what waking up takes, and holds the interpreter's lock for 20 us of them: every
4 ms that was 3 % of the time of loops in Python, the worst case, and every 15 ms 1 %."""
_STAGES = (
    ("decode_dali.py", "decode"),
    ("decode_cpu.py", "decode"),
    ("transfer.py", "copy"),
    ("device.py", "augment"),
    ("augment.py", "augment"),
    ("host_batch.py", "augment"),
    ("shards.py", "read"),
    ("array_map.py", "read"),
    ("arrays.py", "read"),
    ("hdf5.py", "read"),
)
"""Files of trainyard/data, and the stage whose code they have; the innermost on a thread's stack counts."""


class StageSampler:
    """Samples the stacks of the loader's threads inside its `with` block.

    A thread that waits for work counts as "idle"; one in none of the files of `_STAGES` as "prepare".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stages", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        self._thread.join()

    def compute_shares(self) -> dict[str, float]:
        """Return the share of the threads' time that each stage took, the largest first; empty without a thread."""
        total = sum(self.counts.values())
        return {stage: count / total for stage, count in self.counts.most_common()} if total else {}

    def _sample(self) -> None:
        while not self._leaving.is_set():
            loaders = {thread.ident for thread in threading.enumerate() if thread.name == "loader"}
            for ident, frame in sys._current_frames().items():
                if ident in loaders:
                    self.counts[find_stage(frame)] += 1
            time.sleep(_INTERVAL_S)


def find_stage(frame: FrameType | None) -> str:
    """Return the stage of a loader's thread from its innermost frame."""
    if frame is not None and frame.f_code.co_filename.endswith("/data/prefetch.py"):
        return "idle"
    while frame is not None:
        _, _, name = frame.f_code.co_filename.rpartition("/trainyard/data/")
        stage = next((stage for file, stage in _STAGES if name == file), "")
        if stage:
            return stage
        frame = frame.f_back
    return "prepare"
