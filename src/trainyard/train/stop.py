"""Why a run stops, how the world asks for it, and the exit code that tells the launcher."""

import signal
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, Self

from trainyard.runs.state import ExitCode


class Stop(IntEnum):
    """Reasons to save and leave, in rising order of precedence: ranks that differ agree on the highest."""

    NONE = 0
    INTERRUPTED = 1  # SIGINT: a person
    TIME_LIMIT = 2  # max_runtime
    PREEMPTED = 3  # SIGTERM, SIGUSR2: the scheduler


EXIT_CODES = {
    Stop.NONE: ExitCode.DONE,
    Stop.PREEMPTED: ExitCode.PREEMPTED,
    Stop.TIME_LIMIT: ExitCode.MAX_RUNTIME,
    Stop.INTERRUPTED: ExitCode.INTERRUPTED,
}
"""What a rank returns that has saved and left."""

_SIGNALS = {signal.SIGINT: Stop.INTERRUPTED, signal.SIGTERM: Stop.PREEMPTED, signal.SIGUSR2: Stop.PREEMPTED}


class StopFlag:
    """Turns signals into a flag that the training loop reads between two steps.

    Saving in a handler could cut an optimizer step in half, and no rank can act alone. A second SIGINT raises
    KeyboardInterrupt, for the person who does not want to wait.
    """

    def __init__(self, note: Callable[[signal.Signals], None] = lambda number: None) -> None:
        """Do not listen yet.

        Args:
            note: called in the handler at each signal; may write a small file, must not touch training.
        """
        self.reason = Stop.NONE
        self._tell = note
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._tell(signal.Signals(number))
        if number == signal.SIGINT and self.reason == Stop.INTERRUPTED:
            raise KeyboardInterrupt
        self.reason = max(self.reason, _SIGNALS[signal.Signals(number)])


class RuntimeLimit:
    """A wall-time limit counted from the start of the process, with room left for the last step and save."""

    def __init__(self, minutes: float | None, *, started: float, now: Callable[[], float] = time.time) -> None:
        """Count from `started` (seconds since the epoch): a session's clock runs while data are packed, too."""
        self._end = None if minutes is None else started + 60 * minutes
        self._now = now

    def reached(self, *, reserve_s: float) -> bool:
        """Tell whether less than `reserve_s` seconds are left."""
        return self._end is not None and self._now() + reserve_s >= self._end
