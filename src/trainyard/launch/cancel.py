"""Cancels runs, on Slurm and on this machine."""

import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainyard.cluster import query as slurm
from trainyard.cluster.query import SlurmError
from trainyard.errors import UserError
from trainyard.files import restrict_umask, write_atomically
from trainyard.runs import sweep_file
from trainyard.runs.folder import format_run_name
from trainyard.runs.history import CANCELLED, find_named_run, read_run
from trainyard.runs.lock import Owner
from trainyard.runs.state import ACTIVE
from trainyard.runs.status import Status, describe_state, format_resume_command, read_statuses


def cancel(runs: Sequence[Path]) -> list[str]:
    """Cancel runs and return the outcome, one line per run. Checkpoints stay, so runs can be resumed.

    Raises:
        UserError: none of the runs is active, or one cannot be reached from here; then none was cancelled.
    """
    statuses, _ = read_statuses(runs)
    active = [status for status in statuses if status.state in ACTIVE]
    if not active:
        states = ", ".join(f"{format_run_name(status.run)} is {describe_state(status)}" for status in statuses[:5])
        raise UserError(f"Nothing to cancel: {states}. List the active runs: trainyard status")
    if unavailable_reasons := [status.slurm_unavailable_reason for status in active if status.slurm_unavailable_reason]:
        raise UserError(
            f"Nothing was cancelled: {unavailable_reasons[0]} Cancel from a machine that reaches that Slurm."
        )
    local = [_find_local_owner(status) for status in active if not status.slurm_job_id]
    _cancel_in_slurm([status for status in active if status.slurm_job_id])
    for owner in local:
        with contextlib.suppress(ProcessLookupError):  # it has exited in the meantime
            os.kill(owner.pid, signal.SIGINT)
    return [_describe_outcome(status) for status in statuses]


def _find_local_owner(status: Status) -> Owner:
    """Return the process on this host that owns a run.

    Raises:
        UserError: it is on another host, or has not started yet.
    """
    run, owner = status.run, status.snapshot.owner
    if owner is None:
        raise UserError(f"{run}: its process is starting. In a moment, type: trainyard cancel {shlex.quote(str(run))}")
    if not owner.is_checkable_here():
        raise UserError(
            f"{run}: is written by process {owner.pid} on {owner.host}, which cannot be reached from here. "
            f"On that host, type: kill -INT {owner.pid}"
        )
    return owner


@restrict_umask()
def _cancel_in_slurm(submitted: Sequence[Status]) -> None:
    """Cancel Slurm jobs. The mark is written first: a batch script whose ranks exit must not requeue the job."""
    shared = _find_unwanted_packing([status.run for status in submitted])
    marks = [run / CANCELLED for run in (*(status.run for status in submitted), *shared)]
    for mark in marks:
        write_atomically(mark, f"{datetime.now(UTC).isoformat(timespec='seconds')}\n", inside=True)
    try:
        slurm.cancel([*shared.values(), *(id for status in submitted for id in _list_own_jobs(status))])
    except SlurmError:
        for mark in marks:
            mark.unlink()
        raise


def _list_own_jobs(status: Status) -> list[str]:
    """Return the Slurm jobs of a run, without one that also packs data for other runs."""
    jobs = status.snapshot.slurm_job_ids
    return jobs if find_named_run(status.snapshot.submission, "packing_run") is None else jobs[-1:]


def _find_unwanted_packing(cancelled: Sequence[Path]) -> dict[Path, str]:
    """Return the folders and Slurm jobs that pack data for sweeps of which no run will be left to train on them."""
    jobs: dict[Path, str] = {}
    for run in cancelled:
        snapshot = read_run(run)
        folder = find_named_run(snapshot.submission, "packing_run")
        if folder is None or folder in jobs or len(snapshot.slurm_job_ids) < 2:
            continue
        sweep = sweep_file.load(str(folder.parents[1]), folder.parents[3])
        others = (read_run(element.run) for element in sweep.elements if element.run not in cancelled)
        if not any(snapshot.slurm_job_id in kept.slurm_job_ids for kept in others):
            jobs[folder] = snapshot.slurm_job_id
    return jobs


def _describe_outcome(before: Status) -> str:
    """Describe the outcome for a run, given its status before."""
    name = format_run_name(before.run)
    if before.state not in ACTIVE:
        return f"{name}: is {describe_state(before)}, so there is nothing to cancel."
    jobs = " and ".join(_list_own_jobs(before))
    did = f"cancelled Slurm job {jobs}" if before.slurm_job_id else "told its process to save and exit"
    return f"{name}: {did}. Resume: {format_resume_command(before)}"
