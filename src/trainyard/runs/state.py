"""Run states, causes of an end, and exit codes: one enum each, used everywhere.

The words are stored in run folders (attempts.jsonl, errors/) and typed by users. When a word changes, the old one
must stay readable.
"""

from enum import IntEnum, StrEnum
from typing import Self

from trainyard.errors import DiskError, DiskFull, OutOfDeviceMemory, UserError


class State(StrEnum):
    """Where a run is now."""

    WAITING = "waiting"
    RUNNING = "running"
    SILENT = "silent"  # its processes exist, but nothing has been written for minutes
    DONE = "done"
    STOPPED = "stopped"  # saved, or has its last checkpoint; it can simply be resumed
    FAILED = "failed"
    LOST = "lost"  # disappeared without recording an end
    NEW = "new"  # created, never started


ACTIVE = (State.WAITING, State.RUNNING, State.SILENT)
"""States that a run leaves without user action."""


class Cause(StrEnum):
    """Why an attempt ended or a run stopped. Killed ranks have a cause that is not listed here: "signal <n>"."""

    words: str  # for the user

    def __new__(cls, value: str, words: str) -> Self:
        cause = str.__new__(cls, value)
        cause._value_, cause.words = value, words
        return cause

    PREEMPTED = "preempted", "preempted"
    TIME_LIMIT = "time_limit", "time limit"
    NODE_FAILURE = "node_failure", "node lost"
    CRASH = "crash", "crashed"
    HUNG = "hung", "hung"
    DEVICE_OOM = "device_oom", "out of memory on the GPU"
    HOST_OOM = "host_oom", "out of memory on the host"
    NOT_FINITE = "not_finite", "NaN or infinite gradients"
    DISK_FULL = "disk_full", "disk full or read-only"
    DISK_ERROR = "disk_error", "an error of the disk, or of the network to it"
    NO_COMMAND = "no_command", "a command of the site was not found"
    LOST_PEER = "lost_peer", "a rank was lost"
    BUG = "bug", "an error in the code"
    USER_ERROR = "user_error", "user error"
    INTERRUPTED = "interrupted", "interrupted by a person"
    CANCELLED = "cancelled", "cancelled"
    MAX_RUNTIME = "max_runtime", "max_runtime reached"
    HELD = "held", "held in the queue until somebody releases it"
    NEVER_STARTS = "never_starts", "can never start as submitted"
    NO_PROGRESS = "no_progress", "no progress: crashes or time limits without a new checkpoint"
    BUDGET = "budget", "attempt budget used up"


RESUMABLE = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.INTERRUPTED, Cause.CANCELLED, Cause.MAX_RUNTIME)
"""Causes that leave a run with a checkpoint to resume from. All others are failures."""


def describe_cause(cause: str) -> str:
    """Return a cause in words for the user."""
    if cause.startswith("signal "):
        return f"killed by {cause}"
    return next((known.words for known in Cause if known == cause), cause)


class ExitCode(IntEnum):
    """Exit code of a rank. 85 and above: it saved and exited. attempt.sh evaluates these codes on the host."""

    DONE = 0
    FAILED = 1
    USER_ERROR = 2
    DISK_FULL = 74  # or read-only; sysexits.h calls 74 an input/output error
    DEVICE_OOM = 71  # and the run continues with half the micro-batch; sysexits.h calls 71 a system error
    DISK_ERROR = 72  # of the disk itself; sysexits.h calls 72 a missing file of the system
    HUNG = 75  # its watchdog ended it; sysexits.h calls 75 a temporary failure
    PREEMPTED = 85
    MAX_RUNTIME = 86
    INTERRUPTED = 87


def choose_exit_code(error: UserError) -> ExitCode:
    """Return the exit code of a command or a rank that a `UserError` ended."""
    if isinstance(error, DiskFull):
        return ExitCode.DISK_FULL
    if isinstance(error, DiskError):
        return ExitCode.DISK_ERROR
    if isinstance(error, OutOfDeviceMemory) and error.next_micro_batch_size:
        return ExitCode.DEVICE_OOM
    return ExitCode.USER_ERROR


def render_exit_codes() -> str:
    """Return a line of shell code that sets TY_<name> for each exit code."""
    return " ".join(f"TY_{code.name}={code.value}" for code in ExitCode) + "\n"
