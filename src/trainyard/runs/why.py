"""Explains why a run waits, stopped or failed: the first fault, the attempts, and the next command."""

import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from trainyard.cluster.limits import NO_WAIT, Wait, explain_wait
from trainyard.config.frozen import read_options
from trainyard.errors import UserError
from trainyard.runs.changes import find_changes
from trainyard.runs.folder import CONFIG, ENV_FILE
from trainyard.runs.history import Attempt, locate_output_files, read_object, read_stderr
from trainyard.runs.observations import is_handled
from trainyard.runs.state import ACTIVE, Cause, ExitCode, State, describe_cause
from trainyard.runs.status import Status, format_headline, format_resume_command, read_statuses, suggest_command
from trainyard.runs.verdict import find_first_fault
from trainyard.text import SCREEN_WIDTH, align_columns, format_duration

_STDERR_LINES = 3
_FAULTS = (
    Cause.CRASH,
    Cause.HUNG,
    Cause.DISK_FULL,
    Cause.DISK_ERROR,
    Cause.DEVICE_OOM,
)  # after which a run may start again by itself


def explain_run(run: Path) -> str:
    """Explain a run in a few lines: its status, the first fault, its attempts, and the next command."""
    (status,), note = read_statuses([run])
    wait = NO_WAIT
    if status.state == State.WAITING and status.slurm_job_id and not status.slurm_unavailable_reason:
        try:
            wait = explain_wait(status.slurm_job_id, now=time.time())
        except UserError as error:
            note = f"{note} Whether a limit keeps it waiting was not found out. {error}".strip()
    return explain_status(status, note, wait)


def explain_status(status: Status, note: str = "", wait: Wait = NO_WAIT) -> str:
    """Explain a run from its status; `note` is the note about Slurm's answers, `wait` what Slurm says besides."""
    notes = [note] if note else []
    changes = [str(change) for change in find_changes(status.run)]
    lines = [format_headline(status), *_explain_cause(status, wait), *_list_attempts(status), *notes, *changes]
    advice = _advise(status)
    if wait.options and len(status.snapshot.slurm_job_ids) == 1:  # a job that packs takes none of them
        again = f"{format_resume_command(status)} {wait.options}"
        advice = f"trainyard cancel {shlex.quote(str(status.run))} && {again}"
    return "\n".join([*lines, f"next: {advice}"])


def _explain_cause(status: Status, wait: Wait) -> list[str]:
    newest = status.newest_attempt
    cause = [f"cause: {describe_cause(status.cause)}"] if status.cause else []
    reason = [f"It waits: {wait.text}."] if wait.text else []
    if status.state == State.SILENT:
        return ["It may hang, or a step takes long: see its log. Cancelling and resuming loses unsaved steps."]
    if status.state == State.WAITING and newest is not None and newest.cause in _FAULTS:
        return [*reason, "It resumes by itself. The failure:", *_describe_failure(status)]
    if status.state in (*ACTIVE, State.DONE, State.NEW):
        return [*cause, *reason] or ["Nothing is wrong."]
    host = [f"host: {newest.reason}"] if newest is not None and newest.reason else []
    return [*(_describe_failure(status) if status.state == State.FAILED else []), *cause, *host]


def _describe_failure(status: Status) -> list[str]:
    """Describe the first fault of the newest attempt; if none is known, show the end of standard error."""
    newest = status.newest_attempt
    if newest is not None and (fault := find_first_fault(status.snapshot, newest)):
        return fault.lines
    lines = [line for line in read_stderr(status.snapshot, newest) if line.strip()][-_STDERR_LINES:]
    job = newest.slurm_job_id if newest is not None else ""
    path = locate_output_files(status.run, status.snapshot.submission, job)[1]
    return [f"the end of {path}:", *(f"  {line}" for line in lines)] if lines else []


def _list_attempts(status: Status) -> list[str]:
    if not status.attempts:
        return []
    rows = [_build_row(attempt, status) for attempt in status.attempts]
    return ["attempts:", *align_columns(rows, indent="  ", width=SCREEN_WIDTH)]


def _build_row(attempt: Attempt, status: Status) -> Sequence[str]:
    is_last = attempt is status.newest_attempt and status.state not in ACTIVE
    cause = attempt.cause or (status.cause if is_last else "")  # of the last one, Slurm or an error may tell it
    words = attempt.reason if attempt.reason.startswith(Cause.CANCELLED) else describe_cause(cause)  # by whom
    trained = f"steps {attempt.steps[0]}-{attempt.steps[1]}" if attempt.steps else "no step"
    ranks = f"{attempt.world_size} ranks " if attempt.world_size and attempt.world_size > 1 else ""
    again = {"requeue": "requeued", "slurm": "started again by Slurm", "stop": "final"}.get(attempt.action, "")
    again = f"continued as Slurm job {attempt.successor}" if attempt.successor else again
    without = f"without {attempt.excluded}, where it failed" if attempt.excluded else ""
    return (
        attempt.id,
        f"{datetime.fromtimestamp(attempt.start):%Y-%m-%d %H:%M}",
        "" if attempt.end is None else f"for {format_duration(max(0.0, attempt.end - attempt.start))}",
        f"{ranks}on {attempt.nodes}" if attempt.nodes else "",
        "packing" if attempt.only_packs else trained,
        ", ".join(part for part in (words, again, without) if part),
    )


def _advise(status: Status) -> str:
    """Return the next command: it resumes the run, with the change to make before or with it."""
    if status.state == State.SILENT:
        return f"trainyard logs -f {shlex.quote(str(status.run))}"
    if status.state not in (State.FAILED, State.LOST):
        return suggest_command(status)
    newest = status.newest_attempt
    resume = format_resume_command(status)
    restart = f"trainyard {'submit' if status.slurm_job_id else 'run'} {shlex.quote(status.run.absolute().parent.name)}"
    match status.cause:
        case Cause.DEVICE_OOM if any(is_handled(error) for error in status.snapshot.errors):
            return f"{resume} (with half the micro-batch)"
        case Cause.DEVICE_OOM:
            larger = f"{resume} --hw TYPE" if status.slurm_job_id else resume
            tried = read_object(status.run / ENV_FILE).get("choices", {}).get("micro_batch_size", {})
            size = int(tried.get("value", 1))  # 1: it ended before training
            smaller = f"micro_batch_size={size // 2}" if size > 1 else "gradient_checkpointing=true"
            return f"{larger} (with more memory), or start again with: {restart} {smaller}"
        case Cause.HOST_OOM:
            more = ", or raise memory_gib_per_gpu in the cluster's file" if status.slurm_job_id else ""
            return f"{resume} data.threads=2 data.prefetch=1{more}"
        case Cause.NOT_FINITE:
            try:
                half_lr = f"{float(read_options(status.run / CONFIG)[0]['optimizer.lr']) / 2:g}"
            except (UserError, LookupError, TypeError, ValueError):  # which another line of the answer says
                half_lr = "NUMBER"
            return f"start again with a lower learning rate: {restart} optimizer.lr={half_lr}"
        case Cause.DISK_FULL:
            return f"free disk space for {status.run}, then: {resume}"
        case Cause.DISK_ERROR:
            return f"see the system's messages about the disk of {status.run} (dmesg), then: {resume}"
        case Cause.NO_COMMAND:
            return (
                f"have that node provide it, or correct setup, python or container in the cluster file, then: {resume}"
            )
        case Cause.HUNG:
            return f"see where in the stacks; if that was only slow: {resume} hang_minutes=10; else: {resume}"
        case Cause.BUG:
            return f"fix the code, then: {resume}{' --update-code' if status.slurm_job_id else ''}"
        case Cause.USER_ERROR:
            return f"follow the message, then: {resume} (for an option that a run keeps: {restart} OPTION=VALUE)"
        case Cause.NO_PROGRESS if newest is not None and newest.code == ExitCode.PREEMPTED:
            return f"save more often: {resume} checkpoint.every=5min, or give it more time: {resume} --time LENGTH"
        case Cause.NO_PROGRESS:
            return f"read the log, then: {resume}"
        case _:
            return resume
