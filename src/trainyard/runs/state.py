"""Run states, causes of an end, and exit codes: one enum each, used everywhere.

The words are stored in run folders (attempts.jsonl, errors/) and typed by users. When a word changes, the old one
must stay readable.
"""

from enum import IntEnum, StrEnum

from trainyard.errors import DiskFull, OutOfDeviceMemory, UserError


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

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    CRASH = "crash"
    HUNG = "hung"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    NOT_FINITE = "not_finite"
    DISK_FULL = "disk_full"
    LOST_PEER = "lost_peer"
    BUG = "bug"
    USER_ERROR = "user_error"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    MAX_RUNTIME = "max_runtime"
    HELD = "held"
    NEVER_STARTS = "never_starts"
    NO_PROGRESS = "no_progress"
    BUDGET = "budget"


RESUMABLE = (Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.INTERRUPTED, Cause.CANCELLED, Cause.MAX_RUNTIME)
"""Causes that leave a run with a checkpoint to resume from. All others are failures."""

_DESCRIPTIONS = {
    Cause.PREEMPTED: "preempted",
    Cause.TIME_LIMIT: "time limit",
    Cause.NODE_FAILURE: "node lost",
    Cause.CRASH: "crashed",
    Cause.HUNG: "hung",
    Cause.DEVICE_OOM: "out of memory on the GPU",
    Cause.HOST_OOM: "out of memory on the host",
    Cause.NOT_FINITE: "NaN or infinite gradients",
    Cause.DISK_FULL: "disk full or read-only",
    Cause.LOST_PEER: "a rank was lost",
    Cause.BUG: "an error in the code",
    Cause.USER_ERROR: "user error",
    Cause.INTERRUPTED: "interrupted by a person",
    Cause.CANCELLED: "cancelled",
    Cause.MAX_RUNTIME: "max_runtime reached",
    Cause.HELD: "held in the queue until somebody releases it",
    Cause.NEVER_STARTS: "can never start as submitted",
    Cause.NO_PROGRESS: "no progress: crashes or time limits without a new checkpoint",
    Cause.BUDGET: "attempt budget used up",
}


def describe_cause(cause: str) -> str:
    """Return a cause in words for the user."""
    if cause.startswith("signal "):
        return f"killed by {cause}"
    return _DESCRIPTIONS[Cause(cause)] if cause in _DESCRIPTIONS else cause


class ExitCode(IntEnum):
    """Exit code of a rank. 85 and above: it saved and exited. attempt.sh evaluates these codes on the host."""

    DONE = 0
    FAILED = 1
    USER_ERROR = 2
    DISK_FULL = 74  # or read-only; sysexits.h calls 74 an input/output error
    DEVICE_OOM = 71  # and the run continues with half the micro-batch; sysexits.h calls 71 a system error
    HUNG = 75  # its watchdog ended it; sysexits.h calls 75 a temporary failure
    PREEMPTED = 85
    MAX_RUNTIME = 86
    INTERRUPTED = 87


def choose_exit_code(error: UserError) -> ExitCode:
    """Return the exit code of a command or a rank that a `UserError` ended."""
    if isinstance(error, DiskFull):
        return ExitCode.DISK_FULL
    if isinstance(error, OutOfDeviceMemory) and error.next_micro_batch_size:
        return ExitCode.DEVICE_OOM
    return ExitCode.USER_ERROR


def render_exit_codes() -> str:
    """Return a line of shell code that sets TY_<name> for each exit code."""
    return " ".join(f"TY_{code.name}={code.value}" for code in ExitCode) + "\n"
