"""Why a run waits, stopped or failed: what went wrong first, what happened before, and what to type next."""

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from trainyard.runs.folder import CONFIG, ENV_FILE
from trainyard.runs.history import Attempt, first_fault, output_files, read_object, stderr_of
from trainyard.runs.state import ACTIVE, Cause, State, describe_cause
from trainyard.runs.status import Status, headline, next_command, resume_command, statuses
from trainyard.text import SCREEN_WIDTH, align_columns, format_duration

_LAST_WORDS = 3


def why(run: Path) -> str:
    """Return, in few lines, how a run stands, what went wrong first, what happened before, and what to type next."""
    (status,), note = statuses([run])
    return explain(status, note)


def explain(status: Status, note: str = "") -> str:
    """Do the same for a run of which is known how it stands; `note` is what to know about Slurm's answers."""
    notes = [note] if note else []
    lines = [headline(status), *_explanation(status), *_history(status), *notes, f"next: {_advice(status)}"]
    return "\n".join(lines)


def _explanation(status: Status) -> list[str]:
    newest = status.newest
    cause = [f"cause: {describe_cause(status.cause)}"] if status.cause else []
    if status.state == State.SILENT:
        return ["It may hang, or do something long: look at its log. To cancel and resume loses what is not saved."]
    if status.state == State.WAITING and newest is not None and newest.cause == Cause.CRASH:
        return ["It goes on by itself. What crashed:", *_what_failed(status)]
    if status.state in (*ACTIVE, State.DONE, State.NEW):
        return cause or ["Nothing is wrong."]
    host = [f"host: {newest.reason}"] if newest is not None and newest.reason else []
    return [*(_what_failed(status) if status.state == State.FAILED else []), *cause, *host]


def _what_failed(status: Status) -> list[str]:
    """Return what is known of the last attempt's fault; if nothing is, the last that was written to standard error."""
    if status.newest is not None and (fault := first_fault(status.folder, status.newest)):
        return fault.lines
    said = [line for line in stderr_of(status.folder, status.newest) if line.strip()][-_LAST_WORDS:]
    path = output_files(status.run, status.folder.submission)[1]
    return [f"the end of {path}:", *(f"  {line}" for line in said)] if said else []


def _history(status: Status) -> list[str]:
    if not status.attempts:
        return []
    rows = [_row(attempt, _cause(attempt, status)) for attempt in status.attempts]
    return ["attempts:", *align_columns(rows, indent="  ", width=SCREEN_WIDTH)]


def _cause(attempt: Attempt, status: Status) -> str:
    """Return why an attempt ended. What the last could not say, Slurm or an error told."""
    told = status.cause if attempt is status.newest and status.state not in ACTIVE else ""
    return attempt.cause or told


def _row(attempt: Attempt, cause: str) -> Sequence[str]:
    ranks = f"{attempt.world_size} ranks " if attempt.world_size and attempt.world_size > 1 else ""
    again = {"requeue": "requeued", "slurm": "started again by Slurm", "stop": "final"}.get(attempt.action, "")
    return (
        attempt.id,
        f"{datetime.fromtimestamp(attempt.start):%Y-%m-%d %H:%M}",
        "" if attempt.end is None else f"for {format_duration(max(0.0, attempt.end - attempt.start))}",
        f"{ranks}on {attempt.nodes}" if attempt.nodes else "",
        f"steps {attempt.steps[0]}-{attempt.steps[1]}" if attempt.steps else "no step",
        ", ".join(part for part in (describe_cause(cause), again) if part),
    )


def _advice(status: Status) -> str:
    """Return what to type after having read why: the command that goes on, with what to change before or with it."""
    if status.state == State.SILENT:
        return f"trainyard logs -f {shlex.quote(str(status.run))}"
    if status.state not in (State.FAILED, State.LOST):
        return next_command(status)
    resume = resume_command(status)
    anew = f"trainyard {'submit' if status.slurm_job_id else 'run'} {shlex.quote(status.run.absolute().parent.name)}"
    match status.cause:
        case Cause.DEVICE_OOM:
            half = max(1, _micro_batch_size(status.run) // 2)
            larger = f"{resume} --hw TYPE" if status.slurm_job_id else resume
            return f"{larger} (with more memory), or anew with less at once: {anew} micro_batch_size={half}"
        case Cause.HOST_OOM:
            more = ", or raise memory_gib_per_gpu in the cluster's file" if status.slurm_job_id else ""
            return f"{resume} data.threads=2 data.prefetch=1{more}"
        case Cause.NOT_FINITE:
            return f"anew with a lower rate: {anew} optimizer.lr={_learning_rate(status.run) / 2:g}"
        case Cause.DISK_FULL:
            return f"make room where {status.run} lies, then: {resume}"
        case Cause.BUG:
            return f"mend the code, then: {resume}{' --update-code' if status.slurm_job_id else ''}"
        case Cause.USER_ERROR:
            return f"do what the message says, then: {resume}"
        case Cause.NO_PROGRESS:
            return f"save more often, or look into the log: {resume} checkpoint.every=5min"
        case _:
            return resume


def _micro_batch_size(run: Path) -> int:
    """Return what a rank took at once in the last attempt, by the run's record; 1 if it did not come so far."""
    choices = read_object(run / ENV_FILE).get("choices", {})
    return int(choices.get("micro_batch_size", {}).get("value", 1))


def _learning_rate(run: Path) -> float:
    return float(yaml.safe_load((run / CONFIG).read_text())["optimizer"]["lr"])
