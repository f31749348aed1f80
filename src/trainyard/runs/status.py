"""Run status, on one screen.

Nothing is cached: each status is read from the run folder and from Slurm. Evidence, strongest first: the event `done`;
what Slurm reports about the job now; a live process on this host that owns the lock; how the last attempt ended; the
heartbeat. Loads no torch.
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
from trainyard.runs.folder import format_run_name
from trainyard.runs.history import Attempt, JsonObject, RunSnapshot, find_first_fault, parse_time, read_run
from trainyard.runs.state import RESUMABLE, Cause, State, describe_cause
from trainyard.text import SCREEN_WIDTH, align_columns, cut, format_duration

SILENT_S = 600.0  # heartbeats come every few seconds, but a long evaluation or a first compilation may delay them
_START_S = 60.0  # time that a background process may take to write its first line
_SCREEN_LINES = 20


@dataclass(frozen=True)
class Status:
    """The current status of a run."""

    snapshot: RunSnapshot  # what it was derived from
    state: State
    detail: str
    cause: str  # a `Cause`, or "signal <n>"; "" if nothing is wrong
    step: int | None
    total_steps: int | None
    samples_per_s: float | None  # while it runs
    last_activity_s: float | None  # seconds since the last activity
    slurm_job_id: str  # "" if it runs, or ran last, outside Slurm
    partition: str
    gpus: int
    slurm_unavailable_reason: str  # why Slurm was not queried about its job; "" if it was, or did not have to be

    @property
    def run(self) -> Path:
        return self.snapshot.run

    @property
    def attempts(self) -> list[Attempt]:
        return self.snapshot.attempts

    @property
    def newest_attempt(self) -> Attempt | None:
        """The newest attempt of its current Slurm job, or the newest outside Slurm."""
        return self.snapshot.find_newest_attempt(self.slurm_job_id)


def read_status(
    snapshot: RunSnapshot, job: SlurmJob | None, *, now: float, slurm_unavailable_reason: str = ""
) -> Status:
    """Determine the status of a run from its folder and from what Slurm reports about its job.

    Args:
        job: None: Slurm does not know the job, or was not queried.
        now: seconds since the epoch.
        slurm_unavailable_reason: why Slurm was not queried. Only if it is "" does `job=None` mean that Slurm does not
            know the job.
    """
    in_slurm = bool(snapshot.slurm_job_id) and (_is_queued(job) or not _was_resumed_outside_slurm(snapshot))
    if snapshot.is_done:
        verdict = _Verdict(State.DONE)
    elif in_slurm:
        verdict = _judge_slurm_run(snapshot, job, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    else:
        verdict = _judge_local_run(snapshot, now=now)
    submission = snapshot.submission if in_slurm else {}
    newest = snapshot.find_newest_attempt(snapshot.slurm_job_id if in_slurm else "")
    return Status(
        snapshot=snapshot,
        state=verdict.state,
        detail=verdict.detail,
        cause=verdict.cause,
        step=_find_step(snapshot),
        total_steps=_find_total_steps(snapshot),
        samples_per_s=_get_heartbeat(snapshot, newest).get("samples_per_s") if verdict.state == State.RUNNING else None,
        last_activity_s=None if snapshot.last_activity is None else max(0.0, now - snapshot.last_activity),
        slurm_job_id=str(submission.get("job", "")),
        partition=str(submission.get("partition", "")),
        gpus=int(submission.get("gpus", 0)) if in_slurm else (newest and newest.world_size) or 0,
        slurm_unavailable_reason=slurm_unavailable_reason if in_slurm else "",
    )


def read_statuses(runs: Sequence[Path]) -> tuple[list[Status], str]:
    """Return the statuses of runs, in order, and a note about Slurm's answers ("" if there is nothing to note).

    Queries Slurm once for all runs, and not at all for runs that are done or were never submitted.
    """
    snapshots = [read_run(run) for run in runs]
    submitted = [snapshot for snapshot in snapshots if snapshot.slurm_job_id and not snapshot.is_done]
    known, unavailable_reasons, note = _query_slurm(submitted) if submitted else ({}, {}, "")
    now = time.time()
    return [
        read_status(s, known.get(s.run), now=now, slurm_unavailable_reason=unavailable_reasons.get(s.run, ""))
        for s in snapshots
    ], note


def render_table(statuses: Sequence[Status], now: float) -> str:
    """Render one line per run, a second one if there are details, and what to type next."""
    return "\n".join([*_render_rows(statuses, now), f"next: {suggest_command(_sort_by_urgency(statuses)[0])}"])


def render_overview(statuses: Sequence[Status], now: float) -> str:
    """Render the number of runs per state, the unfinished runs that fit on a screen, and what to type next."""
    counts = Counter(status.state for status in statuses)
    urgent = _sort_by_urgency(statuses)
    left = [status for status in urgent if status.state != State.DONE]
    lines = _render_rows(left, now)[: _SCREEN_LINES - 3] if left else []
    shown = sum(not line.startswith(_INDENT) for line in lines[1:])
    more = [f"and {len(left) - shown} more: trainyard runs lists all"] if shown < len(left) else []
    total = f"{len(statuses)} runs: " + ", ".join(f"{counts[state]} {state}" for state in _URGENCY if counts[state])
    return "\n".join([total, *lines, *more, f"next: {suggest_command(urgent[0])}"])


def format_headline(status: Status) -> str:
    """Return the status of a run in one line."""
    step = f" at step {_format_progress(status)}" if status.step is not None else ""
    rate = f", {status.samples_per_s:.4g} samples/s" if status.samples_per_s is not None else ""
    detail = f": {status.detail}" if status.detail else ""
    job = f" (job {status.slurm_job_id})" if status.slurm_job_id else ""
    return f"{status.run}{job}: {status.state}{step}{rate}{detail}"


def suggest_command(status: Status) -> str:
    """Return the command to type next: to see more of a run, or to resume it."""
    run = shlex.quote(str(status.run))
    if status.cause == Cause.HELD:
        return f"scontrol release {status.slurm_job_id}"
    if status.cause == Cause.NEVER_STARTS:
        return f"trainyard cancel {run}"
    if status.state in (State.WAITING, State.RUNNING):
        return f"trainyard logs -f {run}"
    if status.state in (State.FAILED, State.LOST, State.SILENT):
        return f"trainyard why {run}"
    return f"trainyard report {run}" if status.state == State.DONE else format_resume_command(status)


def format_resume_command(status: Status) -> str:
    """Return the command that resumes a run where it was submitted."""
    here = " --here" if status.snapshot.submission.get("scheduler") == "local" else ""
    return f"trainyard resume {shlex.quote(str(status.run))}{here}"


# Querying Slurm


def _query_slurm(submitted: Sequence[RunSnapshot]) -> tuple[dict[Path, SlurmJob], dict[Path, str], str]:
    """Return, by run, its Slurm job, or why Slurm was not queried about it; and a note for the user."""
    known: dict[Path, SlurmJob] = {}
    note = ""
    try:
        if absent := slurm.explain_absence():
            raise SlurmError(absent)
        unavailable_reasons = _find_foreign_jobs(submitted, slurm.query_cluster_name())
        ours = [snapshot for snapshot in submitted if snapshot.run not in unavailable_reasons]
        jobs, note = slurm.query_jobs([snapshot.slurm_job_id for snapshot in ours])
        known = {snapshot.run: jobs[snapshot.slurm_job_id] for snapshot in ours if snapshot.slurm_job_id in jobs}
    except SlurmError as error:  # also if Slurm stopped answering just now
        unavailable_reasons = {snapshot.run: str(error) for snapshot in submitted}
    reasons = list(dict.fromkeys(unavailable_reasons.values()))
    more = f" ({len(reasons) - 1} more like this.)" if len(reasons) > 1 else ""
    unavailable = f"Answered from the run folders only. {reasons[0]}{more}" if reasons else ""
    return known, unavailable_reasons, " ".join(part for part in (unavailable, note) if part)


def _find_foreign_jobs(submitted: Sequence[RunSnapshot], here: str) -> dict[Path, str]:
    """Explain which runs belong to another Slurm cluster: their job ids mean nothing here."""
    names = {snapshot.run: str(snapshot.submission.get("slurm_name", "")) for snapshot in submitted}
    return {
        snapshot.run: f"Job {snapshot.slurm_job_id} belongs to the Slurm '{names[snapshot.run]}', this one is '{here}'."
        for snapshot in submitted
        if names[snapshot.run] not in ("", here)
    }


_REASONS = {
    "Priority": "other jobs are ahead of it in the queue",
    "Resources": "next in the queue; waits until enough GPUs are free",
    "Nodes required for job are DOWN": "its nodes are down, drained or reserved for other jobs",
    "ReqNodeNotAvail": "its nodes are down, drained or reserved",
    "BeginTime": "its begin time has not come; after a requeue Slurm waits up to two minutes",
    "DependencyNeverSatisfied": "a job it depends on failed, so it will never start",
    "Dependency": "waits for another job to end",
    "JobArrayTaskLimit": "its sweep already runs as many jobs as it may at once",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator",
    "launch failed requeued held": "Slurm could not start it on a node, and holds it",
    "job requeued in held state": "requeued, and held",
    "PartitionTimeLimit": "requests more time than the partition allows; it will not start",
    "PartitionNodeLimit": "requests more nodes than the partition allows; it will not start",
    "PartitionDown": "the partition is down and starts no jobs",
    "PartitionInactive": "the partition is inactive and starts no jobs",
    "BadConstraints": "no node can ever satisfy its constraints",
    "Reservation": "waits for its reservation",
    "QOSMaxGRESPerUser": "you already use as many GPUs as your QOS allows per user",
    "QOSMaxJobsPerUser": "you already run as many jobs as your QOS allows per user",
    "QOSMaxWallDuration": "requests more time than its QOS allows; it will not start",
    "QOSGrpGRES": "all GPUs of its QOS are in use",
    "QOS": "a limit of its QOS is reached",
    "AssocGrpGRES": "all GPUs of your account are in use",
    "AssocMaxJobs": "you already run as many jobs as your account allows",
    "AssocGrp": "your account is at its limit",
    "AssocMax": "requests more than your account allows",
    "Assoc": "a limit of your account is reached",
    "None": "Slurm has not considered it yet",
}
"""Why a job waits, by prefix of Slurm's reason. A longer prefix comes before a shorter one that it begins with."""

_HELD = ("JobHeld", "launch failed requeued held", "job requeued in held state")
_NEVER_STARTS = (
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "QOSMaxWallDuration",
)


def explain_pending_reason(reason: str) -> str:
    """Explain why Slurm keeps a job waiting; an unknown reason is quoted as it is."""
    return next((text for prefix, text in _REASONS.items() if reason.startswith(prefix)), f"Slurm says: {reason}")


# Judging


class _Verdict(NamedTuple):
    state: State
    detail: str = ""
    cause: str = ""


_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

_RESTARTS: dict[str, str] = {
    Cause.PREEMPTED: "starts again after preemption",
    Cause.TIME_LIMIT: "resumes after its time limit",
    Cause.NODE_FAILURE: "starts again after the loss of a node",
    Cause.CRASH: "starts again after a crash",
}

_SLURM_END_CAUSES = {
    "CANCELLED": Cause.CANCELLED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
}

_UNAVAILABLE = "Slurm could not be queried"


def _is_queued(job: SlurmJob | None) -> bool:
    return job is not None and job.state in (*_WAITING, *_RUNNING)


def _was_resumed_outside_slurm(snapshot: RunSnapshot) -> bool:
    """Tell whether somebody resumed the run outside Slurm after it was submitted."""
    newest = snapshot.newest_attempt
    if snapshot.has_live_writer_here and not (newest and newest.slurm_job_id and newest.end is None):
        return True
    if newest is None or newest.slurm_job_id:
        return False
    return newest.start > parse_time(snapshot.submission["submitted"])


def _judge_slurm_run(
    snapshot: RunSnapshot, job: SlurmJob | None, *, now: float, slurm_unavailable_reason: str
) -> _Verdict:
    newest = snapshot.find_newest_attempt(snapshot.slurm_job_id)
    if job is None:
        return _judge_unknown_job(snapshot, newest, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    if job.state in _WAITING:
        return _judge_waiting_job(snapshot, job, newest)
    if job.state in _RUNNING:
        return _judge_running_job(snapshot, job, newest, now=now)
    return _judge_ended_job(snapshot, job, newest)


def _judge_waiting_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    reason, cause = explain_pending_reason(job.reason), ""
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or job.reason.startswith(_HELD):
        cause = Cause.HELD
    elif job.reason.startswith(_NEVER_STARTS):
        cause = Cause.NEVER_STARTS
    if newest is None and not job.restarts:
        return _Verdict(State.WAITING, reason, cause)
    return _Verdict(State.WAITING, f"{_describe_restart(snapshot, newest)}: {reason}", cause)


def _describe_restart(snapshot: RunSnapshot, newest: Attempt | None) -> str:
    """Say after what a job starts again. If Slurm killed it, it could record nothing; a preempted one got a signal."""
    if newest is None:
        return "starts again"
    warned = (snapshot.run / "slurm" / f"signal-{newest.id}").exists()
    return _RESTARTS.get(newest.cause or (Cause.PREEMPTED if warned else ""), "starts again")


def _judge_running_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None, *, now: float) -> _Verdict:
    where = f" on {job.nodes}" if job.nodes else ""
    if snapshot.cancelled:
        return _Verdict(State.RUNNING, f"being cancelled{where}")
    if job.state == "SUSPENDED":
        return _Verdict(State.RUNNING, f"suspended by Slurm{where}")
    if newest is not None and not newest.action:
        return _judge_live_run(snapshot, newest, where, now=now)
    if newest is not None and job.state == "COMPLETING":
        if newest.action == "stop":
            return _judge_final_attempt(snapshot, newest)
        return _Verdict(State.WAITING, _describe_restart(snapshot, newest))
    return _Verdict(State.RUNNING, f"starting{where}")


def _judge_live_run(snapshot: RunSnapshot, newest: Attempt | None, where: str, *, now: float) -> _Verdict:
    """Judge a run that has a process: does it make progress?"""
    phase = str(_get_heartbeat(snapshot, newest).get("phase", "starting"))
    last = snapshot.last_activity
    if last is not None and now - last > SILENT_S:
        since = f"{datetime.fromtimestamp(last):%Y-%m-%d %H:%M}"
        return _Verdict(
            State.SILENT, f"no sign of life for {format_duration(now - last)}, since {since}, {phase}{where}"
        )
    return _Verdict(State.RUNNING, f"{phase}{where}")


def _judge_ended_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    cause = _SLURM_END_CAUSES.get(job.state, "")
    if newest is not None and newest.action == "stop":
        return _judge_final_attempt(snapshot, newest)
    if cause == Cause.CANCELLED:
        return _Verdict(State.STOPPED, describe_cause(cause), cause)
    if newest is not None and newest.action == "requeue":
        detail = f"{describe_cause(newest.cause)}; Slurm did not start it again ({job.state})"
        return _Verdict(_classify_end(newest.cause), detail, newest.cause)
    if job.state == "COMPLETED":
        return _Verdict(State.STOPPED, "Slurm says COMPLETED, but the run is not complete")
    if cause:
        return _Verdict(_classify_end(cause), f"{describe_cause(cause)} (Slurm says {job.state})", cause)
    return _judge_failure(snapshot, newest, Cause.CRASH, otherwise=f"Slurm says {job.state}")


def _classify_end(cause: str) -> State:
    return State.STOPPED if cause in RESUMABLE else State.FAILED


def _judge_final_attempt(snapshot: RunSnapshot, attempt: Attempt) -> _Verdict:
    """Judge a run whose last attempt recorded how it ended and that it does not start again."""
    if attempt.cause in RESUMABLE:
        reason = f": {attempt.reason}" if attempt.reason else ""
        return _Verdict(State.STOPPED, f"{describe_cause(attempt.cause)}{reason}", attempt.cause)
    if attempt.cause == "done":
        return _Verdict(State.STOPPED, "exited as if done, but the event `done` is missing")
    return _judge_failure(snapshot, attempt, attempt.cause, otherwise=attempt.reason or f"exit code {attempt.code}")


def _judge_failure(snapshot: RunSnapshot, attempt: Attempt | None, cause: str, *, otherwise: str) -> _Verdict:
    fault = find_first_fault(snapshot, attempt) if attempt else None
    if fault is None:
        return _Verdict(State.FAILED, f"{describe_cause(cause)}: {otherwise}", cause)
    gave_up = f"; {describe_cause(cause)}" if cause in (Cause.BUDGET, Cause.NO_PROGRESS) else ""
    return _Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}{gave_up}", fault.cause)


def _judge_unknown_job(
    snapshot: RunSnapshot, newest: Attempt | None, *, now: float, slurm_unavailable_reason: str
) -> _Verdict:
    """Judge a submitted run without an answer from Slurm: it forgot the job, or could not be queried."""
    if newest is not None and newest.action == "stop":
        return _judge_final_attempt(snapshot, newest)
    if snapshot.cancelled:
        return _Verdict(State.STOPPED, describe_cause(Cause.CANCELLED), Cause.CANCELLED)
    heartbeat = _get_heartbeat(snapshot, newest)
    if newest and heartbeat and not newest.action and now - heartbeat["time"] <= SILENT_S:
        return _judge_live_run(snapshot, newest, f" on {newest.nodes}", now=now)
    if not slurm_unavailable_reason:
        return _Verdict(State.LOST, f"Slurm does not know job {snapshot.slurm_job_id}, and nothing writes to the run")
    if newest is None:
        return _Verdict(
            State.WAITING, f"submitted {snapshot.submission['submitted'][:16]}, not started yet; {_UNAVAILABLE}"
        )
    if newest.action:
        return _Verdict(State.WAITING, f"{_describe_restart(snapshot, newest)}; {_UNAVAILABLE}")
    verdict = _judge_live_run(snapshot, newest, "", now=now)
    return verdict._replace(detail=f"{verdict.detail}; {_UNAVAILABLE}")


def _judge_local_run(snapshot: RunSnapshot, *, now: float) -> _Verdict:
    newest, owner = snapshot.newest_attempt, snapshot.owner
    if owner is not None and (snapshot.has_live_writer_here or not owner.is_checkable_here()):
        return _judge_live_run(snapshot, newest, f", process {owner.pid} on {owner.host}", now=now)
    if _is_starting(snapshot, now):
        return _Verdict(State.WAITING, "starting on this machine")
    if newest is None:
        return _Verdict(State.NEW, "created, never started")
    if newest.cause in RESUMABLE:
        return _Verdict(State.STOPPED, describe_cause(newest.cause), newest.cause)
    if fault := find_first_fault(snapshot, newest):
        return _Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}", fault.cause)
    if owner is not None:
        return _Verdict(State.LOST, f"process {owner.pid} on {owner.host} is gone and recorded no end: it was killed")
    return _Verdict(State.FAILED, f"ended without recording why; see {snapshot.run / 'log'}", Cause.CRASH)


def _is_starting(snapshot: RunSnapshot, now: float) -> bool:
    """Tell whether it was just submitted to this machine and none of its processes has written anything yet."""
    if snapshot.submission.get("scheduler") != "local":
        return False
    newest, submitted = snapshot.newest_attempt, parse_time(snapshot.submission["submitted"])
    return now - submitted < _START_S and (newest is None or newest.start < submitted - 1)


def _get_heartbeat(snapshot: RunSnapshot, newest: Attempt | None) -> JsonObject:
    return snapshot.get_heartbeat(newest.id) if newest is not None else {}


def _find_step(snapshot: RunSnapshot) -> int | None:
    """Return the step of the heartbeat or of the last event, whichever is newer."""
    heartbeat, event = snapshot.heartbeat, snapshot.events[-1] if snapshot.events else {}
    # While a run prepares, its heartbeat does not know the step: the checkpoint has not been read yet.
    has_step = heartbeat.get("phase") != "preparing" and heartbeat.get("step") is not None
    if has_step and (not event or float(heartbeat["time"]) >= parse_time(event["time"])):
        return int(heartbeat["step"])
    return event.get("step")


def _find_total_steps(snapshot: RunSnapshot) -> int | None:
    totals = [line.get("total_steps") for line in (snapshot.heartbeat, *reversed(snapshot.events))]
    return next((total for total in totals if total is not None), None)


# The table


_HEAD = ("RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "IDLE", "JOB", "ON")
_LIMITS = (40, 7, 15, 9, 6, 6, 11, 12)  # with two spaces between them, a line of SCREEN_WIDTH
_INDENT = "    "
_URGENCY = (
    *(State.FAILED, State.SILENT, State.LOST, State.STOPPED),
    *(State.RUNNING, State.WAITING, State.NEW, State.DONE),
)


def _render_rows(statuses: Sequence[Status], now: float) -> list[str]:
    """Return a header and a line per run, with details below it unless they repeat those of the run above."""
    head, *rows = align_columns([_HEAD, *(_build_row(status, now) for status in statuses)], width=SCREEN_WIDTH)
    lines, previous = [head], ""
    for status, row in zip(statuses, rows, strict=True):
        lines.append(row)
        detail = status.detail if status.state not in (State.RUNNING, State.DONE) else ""
        if detail and detail != previous:
            lines.append(cut(f"{_INDENT}{detail}", SCREEN_WIDTH))
        previous = detail
    return lines


def _build_row(status: Status, now: float) -> tuple[str, ...]:
    rate, newest = status.samples_per_s, status.newest_attempt
    has_process = status.state in (State.RUNNING, State.SILENT) and newest is not None
    cells = (
        format_run_name(status.run),
        status.state,
        _format_progress(status),
        "" if rate is None else f"{rate:.{0 if rate >= 10 else 2}f}",
        format_duration(max(0.0, now - newest.start)) if has_process and newest else "",
        "" if status.last_activity_s is None else format_duration(status.last_activity_s),
        status.slurm_job_id,
        f"{status.partition} x{status.gpus}".strip() if status.gpus else status.partition,
    )
    return tuple(cut(cell, limit) for cell, limit in zip(cells, _LIMITS, strict=True))


def _format_progress(status: Status) -> str:
    if status.step is None:
        return ""
    return f"{status.step}/{status.total_steps}" if status.total_steps is not None else str(status.step)


def _sort_by_urgency(statuses: Sequence[Status]) -> list[Status]:
    return sorted(statuses, key=lambda status: _URGENCY.index(status.state))


def describe_state(status: Status) -> str:
    return f"{status.state} ({status.detail})" if status.detail else status.state
