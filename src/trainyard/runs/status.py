"""Run status, on one screen.

Nothing is cached: each answer is read from the run's folder and from Slurm. What is believed, in this order: the event
`done`; what Slurm says of the job now; a living process on this host that holds the lock; how the last attempt ended;
the heartbeat. Loads no torch.
"""

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from trainyard.cluster import query as slurm
from trainyard.cluster.query import SlurmError, SlurmJob
from trainyard.runs.folder import short_name
from trainyard.runs.history import Attempt, Object, RunSnapshot, first_fault, read_run, seconds
from trainyard.runs.state import RESUMABLE, Cause, State, describe_cause
from trainyard.text import SCREEN_WIDTH, align_columns, cut, format_duration

SILENT_S = 600.0  # heartbeats come every few seconds, but a long evaluation or a first compilation may hold them up
_START_S = 60.0  # a process in the background may take so long to its first line
_SCREEN = 20


@dataclass(frozen=True)
class Status:
    """How a run stands."""

    folder: RunSnapshot  # from which this was read
    state: State
    detail: str
    cause: str  # a `Cause`, or "signal <n>"; "" if nothing is wrong
    step: int | None
    total_steps: int | None
    samples_per_s: float | None  # while it runs
    last_activity_s: float | None  # age of the newest sign of life
    slurm_job_id: str  # "" if it is, or was last, run without a scheduler
    partition: str
    gpus: int
    slurm_unavailable_reason: str  # why Slurm was not asked about its job; "" if it was, or need not be

    @property
    def run(self) -> Path:
        return self.folder.run

    @property
    def attempts(self) -> list[Attempt]:
        return self.folder.attempts

    @property
    def newest(self) -> Attempt | None:
        """Return the last attempt of its present job, or the last without one."""
        return self.folder.newest_of(self.slurm_job_id)


def read_status(folder: RunSnapshot, job: SlurmJob | None, *, now: float, slurm_unavailable_reason: str = "") -> Status:
    """Return how a run stands, from its folder and from what Slurm says of its job.

    Args:
        job: None: Slurm knows nothing of it, or was not asked.
        now: seconds since the epoch.
        doubt: why Slurm was not asked; "" if it was: only then does its silence mean anything.
    """
    in_slurm = bool(folder.slurm_job_id) and (_is_queued(job) or not _is_resumed_here(folder))
    if folder.is_done:
        verdict = _Verdict(State.DONE)
    elif in_slurm:
        verdict = _job_verdict(folder, job, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    else:
        verdict = _local_verdict(folder, now=now)
    submission = folder.submission if in_slurm else {}
    newest = folder.newest_of(folder.slurm_job_id if in_slurm else "")
    return Status(
        folder=folder,
        state=verdict.state,
        detail=verdict.detail,
        cause=verdict.cause,
        step=_step(folder),
        total_steps=_total_steps(folder),
        samples_per_s=_beat(folder, newest).get("samples_per_s") if verdict.state == State.RUNNING else None,
        last_activity_s=None if folder.last_activity is None else max(0.0, now - folder.last_activity),
        slurm_job_id=str(submission.get("job", "")),
        partition=str(submission.get("partition", "")),
        gpus=int(submission.get("gpus", 0)) if in_slurm else (newest and newest.world_size) or 0,
        slurm_unavailable_reason=slurm_unavailable_reason if in_slurm else "",
    )


def statuses(runs: Sequence[Path]) -> tuple[list[Status], str]:
    """Return how runs stand, in their order, and what to know about the answers of Slurm ("" if nothing).

    Slurm is asked once for all of them, and not at all for runs that are done or were never submitted.
    """
    folders = [read_run(run) for run in runs]
    submitted = [folder for folder in folders if folder.slurm_job_id and not folder.is_done]
    known, unavailable_reasons, note = _ask(submitted) if submitted else ({}, {}, "")
    now = time.time()
    return [
        read_status(f, known.get(f.run), now=now, slurm_unavailable_reason=unavailable_reasons.get(f.run, ""))
        for f in folders
    ], note


def table(statuses: Sequence[Status], now: float) -> str:
    """Return one line per run, another where there is something new to say, and what to type next."""
    return "\n".join([*_rows(statuses, now), f"next: {next_command(_most_urgent(statuses)[0])}"])


def overview(statuses: Sequence[Status], now: float) -> str:
    """Return how many runs stand how, those that are not done as far as a screen holds them, and what to type next."""
    counts = Counter(status.state for status in statuses)
    urgent = _most_urgent(statuses)
    left = [status for status in urgent if status.state != State.DONE]
    lines = _rows(left, now)[: _SCREEN - 3] if left else []
    shown = sum(not line.startswith(_INDENT) for line in lines[1:])
    more = [f"and {len(left) - shown} more: trainyard runs lists all"] if shown < len(left) else []
    total = f"{len(statuses)} runs: " + ", ".join(f"{counts[state]} {state}" for state in _URGENCY if counts[state])
    return "\n".join([total, *lines, *more, f"next: {next_command(urgent[0])}"])


def headline(status: Status) -> str:
    """Return in one line how a run stands."""
    step = f" at step {_progress(status)}" if status.step is not None else ""
    rate = f", {status.samples_per_s:.4g} samples/s" if status.samples_per_s is not None else ""
    detail = f": {status.detail}" if status.detail else ""
    job = f" (job {status.slurm_job_id})" if status.slurm_job_id else ""
    return f"{status.run}{job}: {status.state}{step}{rate}{detail}"


def next_command(status: Status) -> str:
    """Return what one types to see more of a run, or to go on."""
    run = shlex.quote(str(status.run))
    if status.cause == Cause.HELD:
        return f"scontrol release {status.slurm_job_id}"
    if status.cause == Cause.NEVER_STARTS:
        return f"trainyard cancel {run}"
    if status.state in (State.WAITING, State.RUNNING):
        return f"trainyard logs -f {run}"
    if status.state in (State.FAILED, State.LOST, State.SILENT):
        return f"trainyard why {run}"
    return f"trainyard report {run}" if status.state == State.DONE else resume_command(status)


def resume_command(status: Status) -> str:
    """Return what one types to go on with a run where it was submitted."""
    here = " --here" if status.folder.submission.get("scheduler") == "local" else ""
    return f"trainyard resume {shlex.quote(str(status.run))}{here}"


# Asking Slurm


def _ask(submitted: Sequence[RunSnapshot]) -> tuple[dict[Path, SlurmJob], dict[Path, str], str]:
    """Return, by run, what Slurm says of its job, or why it was not asked; and a note for people."""
    known: dict[Path, SlurmJob] = {}
    note = ""
    try:
        if absent := slurm.absent():
            raise SlurmError(absent)
        unavailable_reasons = _of_other_slurms(submitted, slurm.cluster_name())
        ours = [folder for folder in submitted if folder.run not in unavailable_reasons]
        jobs, note = slurm.jobs([folder.slurm_job_id for folder in ours])
        known = {folder.run: jobs[folder.slurm_job_id] for folder in ours if folder.slurm_job_id in jobs}
    except SlurmError as error:  # also of one that went away just now
        unavailable_reasons = {folder.run: str(error) for folder in submitted}
    reasons = list(dict.fromkeys(unavailable_reasons.values()))
    more = f" ({len(reasons) - 1} more like it.)" if len(reasons) > 1 else ""
    unasked = f"Answered from the folders of the runs. {reasons[0]}{more}" if reasons else ""
    return known, unavailable_reasons, " ".join(part for part in (unasked, note) if part)


def _of_other_slurms(submitted: Sequence[RunSnapshot], here: str) -> dict[Path, str]:
    """Say of runs that were submitted to another Slurm than this that they were: their ids mean nothing here."""
    names = {folder.run: str(folder.submission.get("slurm_name", "")) for folder in submitted}
    return {
        folder.run: f"Job {folder.slurm_job_id} belongs to the Slurm '{names[folder.run]}', this one is '{here}'."
        for folder in submitted
        if names[folder.run] not in ("", here)
    }


_REASONS = {
    "Priority": "other jobs are before it in the queue",
    "Resources": "next in the queue; waits until enough GPUs are free",
    "Nodes required for job are DOWN": "its nodes are down, drained or reserved for other jobs",
    "ReqNodeNotAvail": "its nodes are down, drained or reserved",
    "BeginTime": "its begin time has not come; after a requeue Slurm waits up to two minutes",
    "DependencyNeverSatisfied": "a job it depends on failed, so it will never start",
    "Dependency": "waits for another job to end",
    "JobArrayTaskLimit": "as many runs of its sweep are running as may run at once",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator",
    "launch failed requeued held": "Slurm could not start it on a node, and holds it",
    "job requeued in held state": "put back into the queue, and held",
    "PartitionTimeLimit": "asks for more time than the partition gives; it will not start",
    "PartitionNodeLimit": "asks for more nodes than the partition gives; it will not start",
    "PartitionDown": "the partition takes no jobs to its nodes",
    "PartitionInactive": "the partition takes no jobs to its nodes",
    "BadConstraints": "no node can ever meet what it asks for",
    "Reservation": "waits for a reservation of nodes",
    "QOSMaxGRESPerUser": "you use as many GPUs as your QOS allows one user",
    "QOSMaxJobsPerUser": "you run as many jobs as your QOS allows one user",
    "QOSMaxWallDuration": "asks for more time than its QOS gives; it will not start",
    "QOSGrpGRES": "all GPUs of its QOS are in use",
    "QOS": "a limit of its QOS is reached",
    "AssocGrpGRES": "all GPUs of your account are in use",
    "AssocMaxJobs": "you run as many jobs as your account allows",
    "AssocGrp": "your account is at its limit",
    "AssocMax": "asks for more than your account allows",
    "Assoc": "a limit of your account is reached",
    "None": "Slurm has not looked at it yet",
}
"""Why a job waits, by how Slurm's reason begins, the longer beginning first."""

_HELD = ("JobHeld", "launch failed requeued held", "job requeued in held state")
_NEVER_STARTS = (
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "QOSMaxWallDuration",
)


def pending_reason(reason: str) -> str:
    """Return in words why Slurm lets a job wait; a reason that is not known, as Slurm says it."""
    return next((said for start, said in _REASONS.items() if reason.startswith(start)), f"Slurm says: {reason}")


# Judging


class _Verdict(NamedTuple):
    state: State
    detail: str = ""
    cause: str = ""


_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

_AGAIN: dict[str, str] = {
    Cause.PREEMPTED: "starts again after preemption",
    Cause.TIME_LIMIT: "goes on after its time limit",
    Cause.NODE_FAILURE: "starts again after the loss of a node",
    Cause.CRASH: "starts again after a crash",
}

_SLURM_ENDS = {
    "CANCELLED": Cause.CANCELLED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
}

_NOT_ASKED = "Slurm could not be asked"


def _is_queued(job: SlurmJob | None) -> bool:
    return job is not None and job.state in (*_WAITING, *_RUNNING)


def _is_resumed_here(folder: RunSnapshot) -> bool:
    """Whether somebody went on with a run outside Slurm after it was submitted."""
    newest = folder.newest
    if folder.is_held_here and not (newest and newest.slurm_job_id and newest.end is None):
        return True
    return newest is not None and not newest.slurm_job_id and newest.start > seconds(folder.submission["submitted"])


def _job_verdict(folder: RunSnapshot, job: SlurmJob | None, *, now: float, slurm_unavailable_reason: str) -> _Verdict:
    newest = folder.newest_of(folder.slurm_job_id)
    if job is None:
        return _unknown_job(folder, newest, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    if job.state in _WAITING:
        return _waiting(folder, job, newest)
    if job.state in _RUNNING:
        return _running_job(folder, job, newest, now=now)
    return _ended_job(folder, job, newest)


def _waiting(folder: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    reason, cause = pending_reason(job.reason), ""
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or job.reason.startswith(_HELD):
        cause = Cause.HELD
    elif job.reason.startswith(_NEVER_STARTS):
        cause = Cause.NEVER_STARTS
    if newest is None and not job.restarts:
        return _Verdict(State.WAITING, reason, cause)
    return _Verdict(State.WAITING, f"{_again(folder, newest)}: {reason}", cause)


def _again(folder: RunSnapshot, newest: Attempt | None) -> str:
    """Say after what a job starts again. One that Slurm ended could not write it; a preempted one was warned before."""
    if newest is None:
        return "starts again"
    warned = (folder.run / "slurm" / f"signal-{newest.id}").exists()
    return _AGAIN.get(newest.cause or (Cause.PREEMPTED if warned else ""), "starts again")


def _running_job(folder: RunSnapshot, job: SlurmJob, newest: Attempt | None, *, now: float) -> _Verdict:
    where = f" on {job.nodes}" if job.nodes else ""
    if folder.cancelled:
        return _Verdict(State.RUNNING, f"being cancelled{where}")
    if job.state == "SUSPENDED":
        return _Verdict(State.RUNNING, f"suspended by Slurm{where}")
    if newest is not None and not newest.action:
        return _alive(folder, newest, where, now=now)
    if newest is not None and job.state == "COMPLETING":
        return _left(folder, newest) if newest.action == "stop" else _Verdict(State.WAITING, _again(folder, newest))
    return _Verdict(State.RUNNING, f"starting{where}")


def _alive(folder: RunSnapshot, newest: Attempt | None, where: str, *, now: float) -> _Verdict:
    """Judge a run whose process is there: does it do anything?"""
    phase = str(_beat(folder, newest).get("phase", "starting"))
    sign = folder.last_activity
    if sign is not None and now - sign > SILENT_S:
        since = f"{datetime.fromtimestamp(sign):%Y-%m-%d %H:%M}"
        return _Verdict(
            State.SILENT, f"no sign of life for {format_duration(now - sign)}, since {since}, {phase}{where}"
        )
    return _Verdict(State.RUNNING, f"{phase}{where}")


def _ended_job(folder: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    cause = _SLURM_ENDS.get(job.state, "")
    if newest is not None and newest.action == "stop":
        return _left(folder, newest)
    if cause == Cause.CANCELLED:
        return _Verdict(State.STOPPED, describe_cause(cause), cause)
    if newest is not None and newest.action == "requeue":
        again = f"{describe_cause(newest.cause)}; Slurm did not start it again ({job.state})"
        return _Verdict(_end_state(newest.cause), again, newest.cause)
    if job.state == "COMPLETED":
        return _Verdict(State.STOPPED, "Slurm says COMPLETED, but the run is not complete")
    if cause:
        return _Verdict(_end_state(cause), f"{describe_cause(cause)} (Slurm says {job.state})", cause)
    return _failed(folder, newest, Cause.CRASH, otherwise=f"Slurm says {job.state}")


def _end_state(cause: str) -> State:
    return State.STOPPED if cause in RESUMABLE else State.FAILED


def _left(folder: RunSnapshot, attempt: Attempt) -> _Verdict:
    """Judge a run whose last attempt said how it ended and that it is not to be started again."""
    if attempt.cause in RESUMABLE:
        reason = f": {attempt.reason}" if attempt.reason else ""
        return _Verdict(State.STOPPED, f"{describe_cause(attempt.cause)}{reason}", attempt.cause)
    if attempt.cause == "done":
        return _Verdict(State.STOPPED, "left as if it were done, but recorded no end")
    return _failed(folder, attempt, attempt.cause, otherwise=attempt.reason or f"exit code {attempt.code}")


def _failed(folder: RunSnapshot, attempt: Attempt | None, cause: str, *, otherwise: str) -> _Verdict:
    fault = first_fault(folder, attempt) if attempt else None
    if fault is None:
        return _Verdict(State.FAILED, f"{describe_cause(cause)}: {otherwise}", cause)
    gave_up = f"; {describe_cause(cause)}" if cause in (Cause.BUDGET, Cause.NO_PROGRESS) else ""
    return _Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}{gave_up}", fault.cause)


def _unknown_job(folder: RunSnapshot, newest: Attempt | None, *, now: float, slurm_unavailable_reason: str) -> _Verdict:
    """Judge a submitted run of whose job Slurm says nothing: it forgot it, or could not be asked."""
    if newest is not None and newest.action == "stop":
        return _left(folder, newest)
    if folder.cancelled:
        return _Verdict(State.STOPPED, describe_cause(Cause.CANCELLED), Cause.CANCELLED)
    beat = _beat(folder, newest)
    if newest and beat and not newest.action and now - beat["time"] <= SILENT_S:
        return _alive(folder, newest, f" on {newest.nodes}", now=now)
    if not slurm_unavailable_reason:
        return _Verdict(State.LOST, f"Slurm does not know job {folder.slurm_job_id}, and nothing writes to the run")
    if newest is None:
        return _Verdict(
            State.WAITING, f"submitted {folder.submission['submitted'][:16]}, not started yet; {_NOT_ASKED}"
        )
    if newest.action:
        return _Verdict(State.WAITING, f"{_again(folder, newest)}; {_NOT_ASKED}")
    verdict = _alive(folder, newest, "", now=now)
    return verdict._replace(detail=f"{verdict.detail}; {_NOT_ASKED}")


def _local_verdict(folder: RunSnapshot, *, now: float) -> _Verdict:
    newest, owner = folder.newest, folder.owner
    if owner is not None and (folder.is_held_here or not owner.is_judged_here()):
        return _alive(folder, newest, f", process {owner.pid} on {owner.host}", now=now)
    if _is_starting(folder, now):
        return _Verdict(State.WAITING, "starting on this machine")
    if newest is None:
        return _Verdict(State.NEW, "created, never started")
    if newest.cause in RESUMABLE:
        return _Verdict(State.STOPPED, describe_cause(newest.cause), newest.cause)
    if fault := first_fault(folder, newest):
        return _Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}", fault.cause)
    if owner is not None:
        return _Verdict(State.LOST, f"process {owner.pid} on {owner.host} is gone without a word: it was killed")
    return _Verdict(State.FAILED, f"ended without saying why; its log is {folder.run / 'log'}", Cause.CRASH)


def _is_starting(folder: RunSnapshot, now: float) -> bool:
    """Whether it was handed to this machine's background just now, and no process of it has written anything."""
    if folder.submission.get("scheduler") != "local":
        return False
    submitted = seconds(folder.submission["submitted"])
    return now - submitted < _START_S and (folder.newest is None or folder.newest.start < submitted - 1)


def _beat(folder: RunSnapshot, newest: Attempt | None) -> Object:
    return folder.beat_of(newest.id) if newest is not None else {}


def _step(folder: RunSnapshot) -> int | None:
    """Return the step of whichever is newer, heartbeat or last event."""
    beat, event = folder.heartbeat, folder.events[-1] if folder.events else {}
    trains = beat.get("phase") != "preparing"  # before that the checkpoint has not been read
    if trains and beat.get("step") is not None and (not event or float(beat["time"]) >= seconds(event["time"])):
        return int(beat["step"])
    return event.get("step")


def _total_steps(folder: RunSnapshot) -> int | None:
    said = [line.get("total_steps") for line in (folder.heartbeat, *reversed(folder.events))]
    return next((total for total in said if total is not None), None)


# The table


_HEAD = ("RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "SIGN", "JOB", "ON")
_LIMITS = (40, 7, 15, 9, 6, 6, 11, 12)  # with two spaces between them, a line of SCREEN_WIDTH
_INDENT = "    "
_URGENCY = (
    *(State.FAILED, State.SILENT, State.LOST, State.STOPPED),
    *(State.RUNNING, State.WAITING, State.NEW, State.DONE),
)


def _rows(statuses: Sequence[Status], now: float) -> list[str]:
    """Return a head and a line per run; below it, unless the run above said so too, what there is to say."""
    head, *rows = align_columns([_HEAD, *(_row(status, now) for status in statuses)], width=SCREEN_WIDTH)
    lines, said = [head], ""
    for status, row in zip(statuses, rows, strict=True):
        lines.append(row)
        detail = status.detail if status.state not in (State.RUNNING, State.DONE) else ""
        if detail and detail != said:
            lines.append(cut(f"{_INDENT}{detail}", SCREEN_WIDTH))
        said = detail
    return lines


def _row(status: Status, now: float) -> tuple[str, ...]:
    rate, newest = status.samples_per_s, status.newest
    lasts = status.state in (State.RUNNING, State.SILENT) and newest is not None
    cells = (
        short_name(status.run),
        status.state,
        _progress(status),
        "" if rate is None else f"{rate:.{0 if rate >= 10 else 2}f}",
        format_duration(max(0.0, now - newest.start)) if lasts and newest else "",
        "" if status.last_activity_s is None else format_duration(status.last_activity_s),
        status.slurm_job_id,
        f"{status.partition} x{status.gpus}".strip() if status.gpus else status.partition,
    )
    return tuple(cut(cell, limit) for cell, limit in zip(cells, _LIMITS, strict=True))


def _progress(status: Status) -> str:
    if status.step is None:
        return ""
    return f"{status.step}/{status.total_steps}" if status.total_steps is not None else str(status.step)


def _most_urgent(statuses: Sequence[Status]) -> list[Status]:
    return sorted(statuses, key=lambda status: _URGENCY.index(status.state))


# Cancelling


def describe_state(status: Status) -> str:
    return f"{status.state} ({status.detail})" if status.detail else status.state
