"""How a run is, why it does not go on, and what its processes return: one word or number for each, used by all.

The words are stored in runs' folders (attempts.jsonl, errors/) and typed by people; a word that changes stays readable.
"""

from enum import IntEnum, StrEnum


class State(StrEnum):
    """Where a run is now."""

    WAITING = "waiting"
    RUNNING = "running"
    SILENT = "silent"  # its processes are there, but nothing has been written for minutes
    DONE = "done"
    STOPPED = "stopped"  # saved, or kept its last checkpoint, and can simply be resumed
    FAILED = "failed"
    LOST = "lost"  # gone without a word
    NEW = "new"  # created, never started


ACTIVE = (State.WAITING, State.RUNNING, State.SILENT)
"""States that a run leaves without anybody's doing."""


class Cause(StrEnum):
    """Why an attempt ended or a run does not go on. One more is made of its number: "signal 9"."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    CRASH = "crash"
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
"""Causes after which a run has saved, or kept its last checkpoint. The others are failures."""

_DESCRIPTIONS = {
    Cause.PREEMPTED: "preempted",
    Cause.TIME_LIMIT: "time limit",
    Cause.NODE_FAILURE: "node lost",
    Cause.CRASH: "crashed",
    Cause.DEVICE_OOM: "out of memory on the GPU",
    Cause.HOST_OOM: "out of memory on the host",
    Cause.NOT_FINITE: "NaN or infinite gradients",
    Cause.DISK_FULL: "disk full",
    Cause.LOST_PEER: "another rank was lost",
    Cause.BUG: "an error in the code",
    Cause.USER_ERROR: "your mistake",
    Cause.INTERRUPTED: "interrupted by a person",
    Cause.CANCELLED: "cancelled",
    Cause.MAX_RUNTIME: "max_runtime reached",
    Cause.HELD: "held in the queue until somebody releases it",
    Cause.NEVER_STARTS: "cannot start as it was submitted",
    Cause.NO_PROGRESS: "no progress: attempts without a new checkpoint",
    Cause.BUDGET: "budget of attempts used up",
}

_FORMER = {"asked": Cause.INTERRUPTED, "time limit": Cause.MAX_RUNTIME}
"""Words that runs of earlier versions, and the `stop` events of all, use for a cause."""


def read_cause(stored: str) -> str:
    """Return the cause that a stored word means: a `Cause`, "signal <n>", "done" or ""."""
    return _FORMER.get(stored, stored)


def describe_cause(cause: str) -> str:
    """Return a cause as people read it."""
    if cause.startswith("signal "):
        return f"killed by {cause}"
    return _DESCRIPTIONS[Cause(cause)] if cause in _DESCRIPTIONS else cause


class ExitCode(IntEnum):
    """What a rank returns. From 85 on it has saved and left; attempt.sh judges by these on the host."""

    DONE = 0
    FAILED = 1
    USER_ERROR = 2
    PREEMPTED = 85
    MAX_RUNTIME = 86
    INTERRUPTED = 87


def exit_codes_for_shell() -> str:
    """Return a line of shell that sets TY_<name> for each exit code."""
    return " ".join(f"TY_{code.name}={code.value}" for code in ExitCode) + "\n"
