"""Why a run stops: signals, the runtime limit, and the exit code for the launcher. Loads nothing that takes time."""

import contextlib
import os
import signal
import stat
import sys
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
    MAX_RUNTIME = 2  # max_runtime
    PREEMPTED = 3  # SIGTERM, SIGUSR2: the scheduler; SIGHUP, SIGQUIT: a closed terminal, Ctrl-\\


EXIT_CODES = {
    Stop.NONE: ExitCode.DONE,
    Stop.PREEMPTED: ExitCode.PREEMPTED,
    Stop.MAX_RUNTIME: ExitCode.MAX_RUNTIME,
    Stop.INTERRUPTED: ExitCode.INTERRUPTED,
}
"""Exit code of a rank after it has saved, by reason."""

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop a run, except SIGINT, which a terminal sends to every process by itself."""

STOP_SIGNALS = (signal.SIGINT, *FORWARDED_SIGNALS)
"""Signals that make a run save and exit."""


def exit_on_signals() -> None:
    """Make this process exit with a stop's code at a signal, until a `StopFlag` listens: there is nothing to save yet.

    Call it first of all, because the default action of these signals is to kill. SIGINT already raises.
    """
    for number in FORWARDED_SIGNALS:
        if not _is_ignored(number):
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    leave_closed_terminal()
    with contextlib.suppress(OSError):  # a pipe that nobody reads any more
        os.write(2, b"Stopped by a signal before training began. The same command starts it again.\n")
    sys.exit(ExitCode.PREEMPTED)


def _is_ignored(number: signal.Signals) -> bool:
    """Return whether the starter of this process wants a signal ignored, as nohup does."""
    return number in (signal.SIGHUP, signal.SIGQUIT) and signal.getsignal(number) is signal.SIG_IGN


def leave_closed_terminal() -> None:
    """Point standard streams of a terminal that is gone to /dev/null: every write to it would fail."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):  # it may be closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(null, descriptor)
    os.close(null)


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
        for number in STOP_SIGNALS:
            if not _is_ignored(number):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher of several ranks blocks them
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self._on_signal(signal.Signals(number))
        if number == signal.SIGINT and self.reason == Stop.INTERRUPTED:
            raise KeyboardInterrupt
        self.reason = max(self.reason, Stop.INTERRUPTED if number == signal.SIGINT else Stop.PREEMPTED)


class RuntimeLimit:
    """A wall-time limit for the process, with a reserve for the last step and save."""

    def __init__(self, minutes: float | None, *, started: float, now: Callable[[], float] = time.time) -> None:
        """Count from `started` (seconds since the epoch), so that the time for packing data is included."""
        self._end = None if minutes is None else started + 60 * minutes
        self._now = now

    def is_reached(self, *, reserve_s: float) -> bool:
        """Return whether at most `reserve_s` seconds are left."""
        return self._end is not None and self._now() + reserve_s >= self._end
