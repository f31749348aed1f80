"""Run status, on one screen.

Nothing is cached: each status is read from the run folder and from Slurm. verdict.py judges it. Loads no torch.
"""

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.cluster import query as slurm
from trainyard.cluster.query import JobUsage, SlurmError, SlurmJob
from trainyard.runs.events import METRICS_FILE, read_last_lines
from trainyard.runs.folder import format_run_name
from trainyard.runs.history import Attempt, RunSnapshot, read_run
from trainyard.runs.state import Cause, State
from trainyard.runs.verdict import ENDING, is_managed_by_slurm, judge_run
from trainyard.text import SCREEN_WIDTH, align_columns, count_nouns, cut, format_duration

_SCREEN_LINES = 20
_LINES_OF_A_STEP = 64  # of metrics: one of training, and one for each evaluated set


@dataclass(frozen=True)
class Status:
    """The current status of a run."""

    snapshot: RunSnapshot  # its source
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
    is_ending: bool  # Slurm has decided the end of its job, whose processes still save

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
    in_slurm = is_managed_by_slurm(snapshot, job)
    verdict = judge_run(snapshot, job, in_slurm=in_slurm, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    submission = snapshot.submission if in_slurm else {}
    totals = [line.get("total_steps") for line in (snapshot.heartbeat, *reversed(snapshot.events))]
    newest = snapshot.find_newest_attempt(snapshot.slurm_job_id if in_slurm else "")
    is_running = verdict.state == State.RUNNING
    return Status(
        snapshot=snapshot,
        state=verdict.state,
        detail=verdict.detail,
        cause=verdict.cause,
        step=_find_step(snapshot),
        total_steps=next((total for total in totals if total is not None), None),
        samples_per_s=snapshot.get_heartbeat(newest.id).get("samples_per_s") if newest and is_running else None,
        last_activity_s=None if snapshot.last_activity is None else max(0.0, now - snapshot.last_activity),
        slurm_job_id=snapshot.slurm_job_id if in_slurm else "",
        partition=str(submission.get("partition", "")),
        gpus=int(submission.get("gpus", 0)) if in_slurm else (newest and newest.world_size) or 0,
        slurm_unavailable_reason=slurm_unavailable_reason if in_slurm else "",
        is_ending=is_running and in_slurm and job is not None and job.state == ENDING,
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
    """Render one line per run, a second one if there are details, and the next command."""
    return "\n".join([*_render_rows(statuses, now), f"next: {suggest_command(_sort_by_urgency(statuses)[0])}"])


def render_overview(statuses: Sequence[Status], now: float) -> str:
    """Render the number of runs per state, the unfinished runs that fit on a screen, and the next command."""
    counts = Counter(status.state for status in statuses)
    urgent = _sort_by_urgency(statuses)
    left = [status for status in urgent if status.state != State.DONE]
    lines = _render_rows(left, now)[: _SCREEN_LINES - 3] if left else []
    shown = sum(not line.startswith(_INDENT) for line in lines[1:])
    more = [f"and {len(left) - shown} more: trainyard runs lists all"] if shown < len(left) else []
    total = f"{count_nouns(len(statuses), 'run')}: " + ", ".join(
        f"{counts[state]} {state}" for state in _URGENCY if counts[state]
    )
    return "\n".join([total, *lines, *more, f"next: {suggest_command(urgent[0])}"])


def render_usage(statuses: Sequence[Status], usage: Mapping[str, JobUsage]) -> str:
    """Render a line per run in Slurm: its newest job's request, and the usage of it."""
    head = ("RUN", "JOB", "FOR", "CORES", "BUSY", "MEMORY", "LARGEST RANK", "GPUS", "DEVICE")
    rows = [head]
    for status in statuses:
        if (used := usage.get(status.slurm_job_id)) is None:
            continue
        available_s = used.cores * used.elapsed_s
        cells = (
            f"{used.busy_s / available_s:.0%}" if available_s else "",
            "" if used.memory_gib is None else f"{used.memory_gib:.3g} GiB",
            "" if used.largest_gib is None else f"{used.largest_gib:.2g} GiB",
        )
        name, job = format_run_name(status.run), status.slurm_job_id
        requested = format_duration(used.elapsed_s), str(used.cores)
        rows.append((name, job, *requested, *cells, str(status.gpus), _format_device_usage(status.run)))
    note = (
        "BUSY: of the cores' time; MEMORY: requested of a node; LARGEST RANK: the most that one held, at its end\n"
        "DEVICE: the most that rank 0's GPU held, or its process on the CPU, and how much of its last steps it computed"
    )
    return "\n".join([*align_columns(rows, width=SCREEN_WIDTH), note])


def _format_device_usage(run: Path) -> str:
    """Return memory and busy share of rank 0's device by the last training line; "" before the first."""
    lines = read_last_lines(run / METRICS_FILE, _LINES_OF_A_STEP)
    last = next((line for line in reversed(lines) if line["kind"] == "train" and line.get("step_ms")), None)
    if last is None or "memory_gib" not in last:
        return ""
    return f"{last['memory_gib']:.3g} GiB, {last.get('compute_ms', 0) / last['step_ms']:.0%}"


def format_headline(status: Status) -> str:
    """Return the status of a run in one line."""
    step = f" at step {_format_progress(status)}" if status.step is not None else ""
    rate = f", {status.samples_per_s:.4g} samples/s" if status.samples_per_s is not None else ""
    detail = f": {status.detail}" if status.detail else ""
    job = f" (job {status.slurm_job_id})" if status.slurm_job_id else ""
    damage = f" -- {status.snapshot.damage}" if status.snapshot.damage else ""
    return f"{status.run}{job}: {status.state}{step}{rate}{detail}{damage}"


def suggest_command(status: Status, name: str = "") -> str:
    """Return the command to type next: to see more of a run, or to resume it.

    Args:
        name: of the run in the command; "": its path.
    """
    run = shlex.quote(name or str(status.run))
    if status.cause == Cause.HELD:
        return f"scontrol release {status.slurm_job_id}"
    if status.cause == Cause.NEVER_STARTS:
        return f"trainyard cancel {run}"
    if status.state in (State.WAITING, State.RUNNING):
        return f"trainyard logs -f {run}"
    if status.state in (State.FAILED, State.LOST, State.SILENT):
        return f"trainyard why {run}"
    return f"trainyard report {run}" if status.state == State.DONE else format_resume_command(status, name)


def format_resume_command(status: Status, name: str = "") -> str:
    """Return the command that resumes a run where it was submitted; `name` as for `suggest_command`."""
    here = " --here" if status.snapshot.submission.get("scheduler") == "local" else ""
    return f"trainyard resume {shlex.quote(name or str(status.run))}{here}"


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


def _find_step(snapshot: RunSnapshot) -> int | None:
    """Return the step of the heartbeat or of the last event, whichever is higher: both are of the newest attempt."""
    heartbeat, event = snapshot.heartbeat, snapshot.events[-1] if snapshot.events else {}
    # While a run prepares, its heartbeat does not know the step: the checkpoint has not been read yet.
    is_known = heartbeat.get("phase") not in ("preparing", "packing")
    steps = [event.get("step"), heartbeat.get("step") if is_known else None]
    return max((int(step) for step in steps if step is not None), default=None)


# The table


_HEAD = ("RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "IDLE", "JOB", "ON")
_LIMITS = (40, 7, 15, 9, 6, 6, 13, 12)  # JOB: "12345678_1234"; if all are full, ON is cut: SCREEN_WIDTH is 2 less
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
        is_packing = len(status.snapshot.slurm_job_ids) > 1
        detail = status.detail if is_packing or status.state not in (State.RUNNING, State.DONE) else ""
        if detail and detail != previous:
            lines.append(cut(f"{_INDENT}{detail}", SCREEN_WIDTH))
        previous = detail
        if status.snapshot.damage:
            lines.append(f"{_INDENT}{status.snapshot.damage}")
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
