"""Why a run stops: signals, the runtime limit, and the exit code for the launcher."""

import signal
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, Self

from trainyard.runs.state import ExitCode


class Stop(IntEnum):
    """Reasons to save and exit, in rising precedence: ranks that differ agree on the highest."""

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
"""What a rank returns after it has saved, by reason."""

_SIGNALS = {signal.SIGINT: Stop.INTERRUPTED, signal.SIGTERM: Stop.PREEMPTED, signal.SIGUSR2: Stop.PREEMPTED}


class StopFlag:
    """Turns signals into a flag that the training loop reads between two steps.

    Saving in a handler could interrupt an optimizer step, and a rank cannot act alone. A second SIGINT raises
    KeyboardInterrupt, for a person who does not want to wait.
    """

    def __init__(self, on_signal: Callable[[signal.Signals], None] = lambda number: None) -> None:
        """Create the flag; it listens to signals inside its `with` block.

        Args:
            on_signal: called in the handler at each signal; may write a small file, must not touch training.
        """
        self.reason = Stop.NONE
        self._on_signal = on_signal
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_signal(signal.Signals(number))
        if number == signal.SIGINT and self.reason == Stop.INTERRUPTED:
            raise KeyboardInterrupt
        self.reason = max(self.reason, _SIGNALS[signal.Signals(number)])


class RuntimeLimit:
    """A wall-time limit for the process, with a reserve for the last step and save."""

    def __init__(self, minutes: float | None, *, started: float, now: Callable[[], float] = time.time) -> None:
        """Count from `started` (seconds since the epoch), so that the time for packing data is included."""
        self._end = None if minutes is None else started + 60 * minutes
        self._now = now

    def is_reached(self, *, reserve_s: float) -> bool:
        """Return whether at most `reserve_s` seconds are left."""
        return self._end is not None and self._now() + reserve_s >= self._end
