"""What became of a run: its state, its log, why it stopped, and its end where somebody asks for it.

Nothing here is remembered: each answer is read anew from the folder of the run and from Slurm. What is believed, in
this order: the event `done`; what Slurm says of the job now; a living process of this host that holds the lock; how
the last attempt ended; the heartbeat. Loads no torch.
"""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from trainyard.errors import UserError
from trainyard.launch import slurm
from trainyard.launch.config import write_atomically
from trainyard.launch.runs import CONFIG, LOCK, RECORD, SUBMISSION, Owner, read_owner, short_name
from trainyard.launch.slurm import SlurmError, SlurmJob
from trainyard.train.console import format_duration

ACTIVE = ("waiting", "running", "silent")
"""States in which a run goes on without anybody's doing."""

SILENT_S = 600.0  # heartbeats come every few seconds, but a long evaluation or a first compilation may hold them up
_START_S = 60.0  # a process in the background may take so long to its first line
_CONTROLS = "slurm"  # folder inside the run's
_WIDTH = 120
_LOOK_S, _ASK_S = 0.5, 5.0  # following a log: how often the files are read, and how often Slurm is asked

_Object = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are seconds since the epoch."""

    id: str  # <job>-<number>, or local-<second of its start>
    job: str  # "" if no scheduler started it
    number: int  # of starts of this job before
    start: float
    end: float | None  # the last that was seen of it, where it was ended from outside; None while it runs
    nodes: str
    partition: str
    cause: str  # see CAUSES; "" if it did not say
    action: str  # requeue | slurm | stop: who started it again, if anybody; "" while it runs and if it is local
    code: int | None  # exit code; -1: Slurm ended it before it could leave
    reason: str  # of its end, in the words of the batch script
    world_size: int | None  # None: it did not come so far as to train
    steps: tuple[int, int] | None  # first, and last that was written down


@dataclass(frozen=True)
class Status:
    """How a run stands."""

    run: Path
    state: str  # waiting | running | silent | done | stopped | failed | lost | new
    detail: str
    step: int | None
    total_steps: int | None
    samples_per_s: float | None  # while it runs
    last_sign_s: float | None  # age of the newest sign of life
    job: str  # "" if it is, or was last, run without a scheduler
    partition: str
    gpus: int
    attempts: list[Attempt]
    cause: str  # see CAUSES; "" if nothing is wrong
    next_command: str


CAUSES = {
    "preempted": "preempted",
    "time_limit": "time limit",
    "node_failure": "node lost",
    "crash": "crashed",
    "device_oom": "out of memory on the GPU",
    "host_oom": "out of memory on the host",
    "not_finite": "NaN or infinite gradients",
    "disk_full": "disk full",
    "lost_peer": "another rank was lost",
    "bug": "an error in the code",
    "user_error": "your mistake",
    "asked": "asked to stop",
    "cancelled": "cancelled",
    "max_runtime": "max_runtime reached",
    "held": "held in the queue until somebody releases it",
    "never_starts": "cannot start as it was submitted",
    "no_progress": "no progress: attempts without a new checkpoint",
    "budget": "budget of attempts used up",
}
"""Why a run does not go on, in words. One more is made of its number: "signal 9"."""


def status_of(run: Path, known: Mapping[str, SlurmJob], *, now: float, asked: bool = True) -> Status:
    """Return how a run stands, from its folder and from what Slurm knows.

    Args:
        known: what Slurm knows, by job id.
        now: seconds since the epoch.
        asked: whether Slurm was asked and answered: only then does a job's absence from `known` mean anything.
    """
    return _status(_read(run), known, now=now, asked=asked)


def statuses(runs: Sequence[Path]) -> tuple[list[Status], str]:
    """Return how runs stand, in their order, and what to know about the answers of Slurm ("" if nothing).

    Slurm is asked once for all of them, and not at all for runs that are done or were never submitted.
    """
    folders = [_read(run) for run in runs]
    ids = [folder.job for folder in folders if folder.job and not folder.is_done]
    known: dict[str, SlurmJob] = {}
    note, problem = "", slurm.absent() if ids else None
    if ids and not problem:
        try:
            known, note = slurm.jobs(ids)
        except SlurmError as error:  # it went away just now
            problem = str(error)
    found = [_status(folder, known, now=time.time(), asked=not problem) for folder in folders]
    return found, f"Answered from the folders of the runs. {problem}" if problem else note


def table(statuses: Sequence[Status], now: float) -> str:
    """Return one line per run, a second one where there is something to say, and what to type next."""
    if not statuses:
        return "No runs. next: trainyard jobs"
    rows = [_row(status, now) for status in statuses]
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    lines = [_aligned(_HEAD, widths)]
    for status, row in zip(statuses, rows, strict=True):
        lines.append(_aligned(row, widths))
        if status.detail and status.state not in ("running", "done"):
            lines.append(_cut(f"    {status.detail}", _WIDTH))
    urgent = min(statuses, key=lambda status: _URGENCY.index(status.state))
    return "\n".join([*lines, f"next: {urgent.next_command}"])


def why(run: Path) -> str:
    """Return, in few lines, how a run stands, what went wrong first, what happened before, and what to type next."""
    folder = _read(run)
    (status,), note = statuses([run])
    lines = [_headline(status), *_explanation(folder, status), *_history(status)]
    return "\n".join([*lines, *([note] if note else []), f"next: {_advice(folder, status)}"])


def follow(run: Path, *, follow: bool, out: Callable[[str], object]) -> None:
    """Hand a run's log to `out` line by line, with what srun and ranks other than 0 have to say.

    Args:
        follow: go on until the run ends, over as many attempts as it takes.
        out: takes a line without its end.
    """
    output = _Output(run)
    said = output.say(out)
    if not follow:
        if not said:
            (status,), _ = statuses([run])
            out(f"{run}: no output yet. {_headline(status)}")
        return
    state, ended, asked = "", 0, -_ASK_S
    while ended < 2:  # between a preemption and the requeue Slurm calls a job ended: believe it the second time
        if time.monotonic() - asked >= _ASK_S:
            (status,), _ = statuses([run])
            asked = time.monotonic()
            ended = 0 if status.state in ACTIVE else 2 if status.state == "done" else ended + 1
            if state not in ("", status.state) or (not said and status.state != state):
                out(f"-- {_headline(status)}")
            state = status.state
        said |= output.say(out)
        if ended < 2:
            time.sleep(_LOOK_S)


def cancel(runs: Sequence[Path]) -> list[str]:
    """End runs for good, and say of each what was done. What they saved stays, and they can be resumed.

    Raises:
        UserError: none of them goes on, or one is out of reach from here; then none was ended.
    """
    found, _ = statuses(runs)
    active = [status for status in found if status.state in ACTIVE]
    if not active:
        states = ", ".join(f"{short_name(status.run)} is {_state(status)}" for status in found[:5])
        raise UserError(f"Nothing to cancel: {states}. What runs: trainyard status")
    submitted = [status for status in active if status.job]
    local = [_owner_here(status.run) for status in active if not status.job]
    if submitted:
        _cancel_in_slurm(submitted)
    for owner in local:
        os.kill(owner.pid, signal.SIGINT)
    return [_cancelled(status) for status in found]


def pending_reason(text: str) -> str:
    """Return in words why Slurm lets a job wait; a reason that is not known, as Slurm says it."""
    plain = text.strip("() ")
    for beginning, words in _REASONS.items():
        if plain.lower().startswith(beginning.lower()):
            return words
    return f"Slurm says: {plain}" if plain and plain != "None" else "Slurm has not looked at it yet"


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
    "Licenses": "waits for a licence",
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
    "Prolog": "its nodes are being made ready",
    "Cleaning": "its nodes are being cleaned up after it",
}
"""By how Slurm's reason begins, the longer beginning first."""

_HELD = ("jobheld", "launch failed requeued held", "job requeued in held state")
_NEVER_STARTS = (
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "QOSMaxWallDuration",
)


# What the folder of a run says


class _RankError(NamedTuple):
    """What one rank wrote down when it failed."""

    attempt: str
    path: Path
    fields: _Object

    @property
    def time(self) -> float:
        return float(self.fields.get("time", 0.0))

    @property
    def who(self) -> str:
        return f"rank {self.fields.get('rank', '?')} on {self.fields.get('host', '?')}"

    @property
    def what(self) -> str:
        return f"{self.fields.get('type', 'Error')}: {self.fields.get('message', '')}".rstrip(": \n")


@dataclass(frozen=True)
class _Folder:
    """Everything that the folder of a run says, read once."""

    run: Path
    submission: _Object
    cancelled: bool
    lines: list[_Object]  # of attempts.jsonl
    events: list[_Object]
    heartbeat: _Object
    errors: list[_RankError]  # oldest first
    owner: Owner | None  # of the lock
    log_changed: float | None

    @property
    def job(self) -> str:
        """Id of the Slurm job that it was submitted as last."""
        return str(self.submission.get("job", "")) if self.submission.get("scheduler") == "slurm" else ""

    def is_starting(self, newest: Attempt | None, now: float) -> bool:
        """Whether it was handed to this machine's background just now, and no process of it has written anything."""
        if self.submission.get("scheduler") != "local":
            return False
        submitted = _seconds(self.submission["submitted"])
        return now - submitted < _START_S and (newest is None or newest.start < submitted - 1)

    @property
    def is_done(self) -> bool:
        return self.outcome == "done"

    @property
    def outcome(self) -> str:
        """The last event that begins or ends an attempt; "" if there is none."""
        words = ("start", "resume", "done", "stop", "failed")
        return next((e["event"] for e in reversed(self.events) if e.get("event") in words), "")

    @property
    def last_sign(self) -> float | None:
        signs = [error.time for error in self.errors]
        signs += [_seconds(lines[-1]["time"]) for lines in (self.lines, self.events) if lines]
        signs += [float(self.heartbeat["time"])] if self.heartbeat else []
        signs += [self.log_changed] if self.log_changed is not None else []
        return max(signs, default=None)

    @property
    def is_held_here(self) -> bool:
        """Whether a living process of this host writes to it."""
        return self.owner is not None and self.owner.is_judged_here() and self.owner.lives()


def _read(run: Path) -> _Folder:
    controls, log = run / _CONTROLS, run / "log"
    return _Folder(
        run=run,
        submission=_object(run / SUBMISSION),
        cancelled=(controls / "cancelled").exists(),
        lines=[line for line in _objects(controls / "attempts.jsonl") if "time" in line],
        events=[line for line in _objects(run / "events.jsonl") if "time" in line],
        heartbeat=_object(run / "heartbeat.json"),
        errors=_errors(run),
        owner=_owner(run),
        log_changed=log.stat().st_mtime if log.exists() else None,
    )


def _errors(run: Path) -> list[_RankError]:
    """Return what the ranks of all attempts wrote down when they failed, oldest first."""
    found = ((path, _object(path)) for path in run.glob("errors/*-rank*.json"))
    errors = [_RankError(path.name.rpartition("-rank")[0], path, fields) for path, fields in found if fields]
    return sorted(errors, key=lambda error: error.time)


def _owner(run: Path) -> Owner | None:
    """Return who holds the lock. One that cannot be read belongs to a process that starts now or died starting."""
    try:
        return read_owner(run / LOCK)
    except UserError:
        return None


def _object(path: Path) -> _Object:
    """Return what a JSON file holds; nothing if it is missing or, as a crash of a node may leave it, torn."""
    return next(iter(_decoded([path.read_bytes()])), {}) if path.is_file() else {}


def _objects(path: Path) -> list[_Object]:
    """Return the whole lines of a file of JSON lines.

    A torn line may stand anywhere: the next attempt appends behind what a lost node left.
    """
    return list(_decoded(path.read_bytes().split(b"\n"))) if path.is_file() else []


def _decoded(texts: Iterable[bytes]) -> Iterator[_Object]:
    for text in texts:
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# Attempts: what the batch script and the training wrote, put together


def _attempts(folder: _Folder) -> list[Attempt]:
    sessions = _sessions(folder.events)
    submitted = []
    for lines in _by_attempt(folder.lines):
        own = next((session for session in sessions if _falls_into(session, lines)), [])
        sessions = [session for session in sessions if session is not own]
        submitted.append(_submitted_attempt(lines, own, folder.heartbeat))
    return sorted(submitted + _local_attempts(folder, sessions), key=lambda attempt: attempt.start)


def _sessions(events: Sequence[_Object]) -> list[list[_Object]]:
    """Split events where an attempt starts or resumes."""
    sessions: list[list[_Object]] = []
    for event in events:
        if event.get("event") in ("start", "resume") or not sessions:
            sessions.append([])
        sessions[-1].append(event)
    return sessions


def _by_attempt(lines: Sequence[_Object]) -> list[list[_Object]]:
    """Group the lines of attempts.jsonl: a start, and its end if it is known. An end without a start is dropped."""
    groups: dict[tuple[str, int], list[_Object]] = {}
    for line in lines:
        key = (str(line.get("job")), int(line.get("attempt", 0)))
        if line.get("event") == "start":
            groups[key] = [line]
        elif key in groups:
            groups[key].append(line)
    return list(groups.values())


def _falls_into(session: Sequence[_Object], lines: Sequence[_Object]) -> bool:
    """Whether a session began during a submitted attempt. Both times come from the attempt's first node.

    An end that the next attempt wrote says nothing of when it was: Slurm starts a job again after all its processes.
    """
    start, ends = lines[0], [line for line in lines[1:] if line.get("code") != -1]
    began = _seconds(session[0]["time"])
    return _seconds(start["time"]) <= began and all(began <= _seconds(line["time"]) for line in ends)


def _submitted_attempt(lines: Sequence[_Object], session: Sequence[_Object], heartbeat: _Object) -> Attempt:
    start, end = lines[0], lines[-1] if len(lines) > 1 else {}
    name = f"{start['job']}-{start['attempt']}"
    last_s = _seconds(end["time"]) if end else None
    if end.get("code") == -1:  # written when the next attempt started, which may be hours later
        last_s = _last_sign(name, session, heartbeat)
    return Attempt(
        id=name,
        job=str(start["job"]),
        number=int(start["attempt"]),
        start=_seconds(start["time"]),
        end=last_s,
        nodes=str(start.get("nodes", "")),
        partition=str(start.get("partition", "")),
        cause=str(end.get("cause", "")),
        action=str(end.get("action", "")),
        code=end.get("code"),
        reason=str(end.get("reason", "")),
        world_size=session[0].get("world_size") if session else None,
        steps=_steps(name, session, heartbeat),
    )


def _last_sign(attempt: str, session: Sequence[_Object], heartbeat: _Object) -> float | None:
    signs = [_seconds(session[-1]["time"])] if session else []
    signs += [float(heartbeat["time"])] if heartbeat.get("attempt") == attempt else []
    return max(signs, default=None)


def _steps(attempt: str, session: Sequence[_Object], heartbeat: _Object) -> tuple[int, int] | None:
    if not session:
        return None
    last = max(int(event.get("step", 0)) for event in session)
    if heartbeat.get("attempt") == attempt:
        last = max(last, int(heartbeat.get("step") or 0))
    return int(session[0].get("step", 0)), last


def _local_attempts(folder: _Folder, sessions: Sequence[Sequence[_Object]]) -> list[Attempt]:
    """Put together what no batch script recorded: sessions, and attempts that failed before they trained."""
    named = {error.attempt for error in folder.errors} | {str(folder.heartbeat.get("attempt", ""))}
    named |= {folder.owner.attempt} if folder.owner is not None else set()
    free = sorted((name for name in named if re.fullmatch(r"local-\d+", name)), key=_local_second)
    attempts = []
    for session in sessions:
        name = _claim(free, session, folder.errors) or f"local-{int(_seconds(session[0]['time']))}"
        free = [other for other in free if other != name]
        attempts.append(_local_attempt(name, session, folder))
    return attempts + [_local_attempt(name, [], folder) for name in free]


def _local_second(name: str) -> int:
    return int(name.removeprefix("local-"))


def _claim(free: Sequence[str], session: Sequence[_Object], errors: Sequence[_RankError]) -> str | None:
    """Return the attempt a session belongs to: the last that started before it and had not failed by then."""
    began = _seconds(session[0]["time"]) + 1  # both are whole seconds
    failed = {error.attempt for error in errors if error.time < began - 1}
    return next((name for name in reversed(free) if _local_second(name) <= began and name not in failed), None)


def _local_attempt(name: str, session: Sequence[_Object], folder: _Folder) -> Attempt:
    errors = [error for error in folder.errors if error.attempt == name]
    last = session[-1] if session else {}
    ended = last.get("event") in ("done", "stop", "failed")
    end = _seconds(last["time"]) if ended else errors[0].time if errors else None
    if end is None and not folder.is_held_here:
        end = _last_sign(name, session, folder.heartbeat)
    first = session[0] if session else {}
    return Attempt(
        id=name,
        job="",
        number=0,
        start=min(_local_second(name), _seconds(first["time"])) if first else _local_second(name),
        end=end,
        nodes=str(first.get("host") or (errors[0].fields.get("host", "") if errors else "")),
        partition="",
        cause=_local_cause(last, errors),
        action="",
        code=None,
        reason="",
        world_size=first.get("world_size"),
        steps=_steps(name, session, folder.heartbeat),
    )


def _local_cause(last: _Object, errors: Sequence[_RankError]) -> str:
    if last.get("event") == "done":
        return "done"
    if last.get("event") == "stop":
        # The reasons of train.stop.Stop, as the recorder writes them. Its time limit is max_runtime.
        return {"time limit": "max_runtime"}.get(str(last.get("reason")), str(last.get("reason", "")))
    return _fault_of(errors).cause if errors else ""


# Judging


class _Verdict(NamedTuple):
    state: str
    detail: str = ""
    cause: str = ""


_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

_AGAIN = {
    "preempted": "starts again after preemption",
    "time_limit": "goes on after its time limit",
    "node_failure": "starts again after the loss of a node",
    "crash": "starts again after a crash",
}

_STOPPED_BY = ("preempted", "time_limit", "asked", "cancelled", "max_runtime")
"""Causes after which a run has saved, or kept its last checkpoint, and can simply go on. The others are failures."""

_SLURM_ENDS = {
    "CANCELLED": ("stopped", "cancelled"),
    "TIMEOUT": ("stopped", "time_limit"),
    "DEADLINE": ("stopped", "time_limit"),
    "PREEMPTED": ("stopped", "preempted"),
    "NODE_FAIL": ("failed", "node_failure"),
    "BOOT_FAIL": ("failed", "node_failure"),
    "OUT_OF_MEMORY": ("failed", "host_oom"),
}


def _status(folder: _Folder, known: Mapping[str, SlurmJob], *, now: float, asked: bool) -> Status:
    attempts = _attempts(folder)
    newest = attempts[-1] if attempts else None
    by_slurm = bool(folder.job) and (_is_queued(folder, known) or not _is_resumed_here(folder, newest))
    verdict = _verdict(folder, attempts, known.get(folder.job) if by_slurm else None, by_slurm, now=now, asked=asked)
    status = Status(
        run=folder.run,
        state=verdict.state,
        detail=verdict.detail,
        step=_step(folder),
        total_steps=_total_steps(folder),
        samples_per_s=_rate(folder, newest) if verdict.state == "running" else None,
        last_sign_s=None if folder.last_sign is None else max(0.0, now - folder.last_sign),
        job=folder.job if by_slurm else "",
        partition=str(folder.submission.get("partition", "")) if by_slurm else "",
        gpus=int(folder.submission.get("gpus", 0)) if by_slurm else (newest and newest.world_size) or 0,
        attempts=attempts,
        cause=verdict.cause,
        next_command="",
    )
    return replace(status, next_command=_next_command(status))


def _is_queued(folder: _Folder, known: Mapping[str, SlurmJob]) -> bool:
    return folder.job in known and known[folder.job].state in (*_WAITING, *_RUNNING)


def _is_resumed_here(folder: _Folder, newest: Attempt | None) -> bool:
    """Whether somebody went on with a run outside Slurm after it was submitted."""
    if folder.is_held_here and not _runs_in_slurm(newest):
        return True
    return newest is not None and not newest.job and newest.start > _seconds(folder.submission["submitted"])


def _runs_in_slurm(newest: Attempt | None) -> bool:
    return newest is not None and bool(newest.job) and newest.end is None


def _verdict(
    folder: _Folder, attempts: Sequence[Attempt], job: SlurmJob | None, by_slurm: bool, *, now: float, asked: bool
) -> _Verdict:
    if folder.is_done:
        return _Verdict("done")
    if not by_slurm:
        return _local_verdict(folder, attempts, now=now)
    own = [attempt for attempt in attempts if attempt.job == folder.job]
    newest = own[-1] if own else None
    if job is not None and job.state in _WAITING:
        return _waiting(folder, job, newest)
    if job is not None and job.state in _RUNNING:
        return _running_job(folder, job, newest, now=now)
    if job is not None:
        return _ended_job(folder, job, newest)
    return _unknown_job(folder, newest, now=now, asked=asked)


def _waiting(folder: _Folder, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    reason, cause = pending_reason(job.reason), ""
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or job.reason.strip("(").lower().startswith(_HELD):
        cause = "held"
    elif job.reason.strip("(").startswith(_NEVER_STARTS):
        cause = "never_starts"
    if newest is None and not job.restarts:
        return _Verdict("waiting", reason, cause)
    return _Verdict("waiting", f"{_again(folder, newest)}: {reason}", cause)


def _again(folder: _Folder, newest: Attempt | None) -> str:
    """Say after what a job starts again. One that Slurm ended could not write it; a preempted one was warned before."""
    if newest is None:
        return "starts again"
    warned = (folder.run / _CONTROLS / f"signal-{newest.id}").exists()
    return _AGAIN.get(newest.cause or ("preempted" if warned else ""), "starts again")


def _running_job(folder: _Folder, job: SlurmJob, newest: Attempt | None, *, now: float) -> _Verdict:
    where = f" on {job.nodes}" if job.nodes else ""
    if folder.cancelled:
        return _Verdict("running", f"being cancelled{where}")
    if job.state == "SUSPENDED":
        return _Verdict("running", f"suspended by Slurm{where}")
    if newest is None or newest.action:
        if job.state == "COMPLETING" and newest is not None:
            return _left(folder, newest) if newest.action == "stop" else _Verdict("waiting", _again(folder, newest))
        return _Verdict("running", f"starting{where}")
    return _alive(folder, newest, where, now=now)


def _alive(folder: _Folder, newest: Attempt | None, where: str, *, now: float) -> _Verdict:
    """Judge a run whose process is there: does it do anything?"""
    beat = folder.heartbeat if newest is not None and folder.heartbeat.get("attempt") == newest.id else {}
    phase = str(beat.get("phase", "starting"))
    sign = folder.last_sign
    if sign is not None and now - sign > SILENT_S:
        since = f"{datetime.fromtimestamp(sign):%Y-%m-%d %H:%M}"
        return _Verdict("silent", f"no sign of life for {format_duration(now - sign)}, since {since}, {phase}{where}")
    return _Verdict("running", f"{phase}{where}")


def _ended_job(folder: _Folder, job: SlurmJob, newest: Attempt | None) -> _Verdict:
    if newest is not None and newest.action == "stop":
        return _left(folder, newest)
    state, cause = _SLURM_ENDS.get(job.state, ("failed", "crash"))
    if cause == "cancelled":
        return _Verdict(state, CAUSES[cause], cause)
    if newest is not None and newest.action == "requeue":
        again = "stopped" if newest.cause in _STOPPED_BY else "failed"
        return _Verdict(again, f"{_words(newest.cause)}; Slurm did not start it again ({job.state})", newest.cause)
    if job.state == "COMPLETED":
        return _Verdict("stopped", "Slurm says COMPLETED, but the run is not complete")
    if cause != "crash":
        return _Verdict(state, f"{_words(cause)} (Slurm says {job.state})", cause)
    return _failed(folder, newest, cause, otherwise=f"Slurm says {job.state}")


def _left(folder: _Folder, attempt: Attempt) -> _Verdict:
    """Judge a run whose last attempt said how it ended and that it is not to be started again."""
    if attempt.cause in _STOPPED_BY:
        return _Verdict("stopped", _with_reason(attempt), attempt.cause)
    if attempt.cause == "done":
        return _Verdict("stopped", "left as if it were done, but recorded no end")
    return _failed(folder, attempt, attempt.cause, otherwise=attempt.reason or f"exit code {attempt.code}")


def _failed(folder: _Folder, attempt: Attempt | None, cause: str, *, otherwise: str) -> _Verdict:
    fault = _fault(folder, attempt)
    gave_up = f"; {_words(cause)}" if cause in ("budget", "no_progress") else ""
    if fault is None:
        return _Verdict("failed", f"{_words(cause)}: {otherwise}", cause)
    return _Verdict("failed", f"{_words(fault.cause)}, {fault.who}{gave_up}", fault.cause)


def _with_reason(attempt: Attempt) -> str:
    return f"{_words(attempt.cause)}: {attempt.reason}" if attempt.reason else _words(attempt.cause)


def _unknown_job(folder: _Folder, newest: Attempt | None, *, now: float, asked: bool) -> _Verdict:
    """Judge a submitted run of whose job Slurm says nothing: it forgot it, or does not answer."""
    if newest is not None and newest.action == "stop":
        return _left(folder, newest)
    if folder.cancelled:
        return _Verdict("stopped", CAUSES["cancelled"], "cancelled")
    beats = newest is not None and folder.heartbeat.get("attempt") == newest.id and not newest.action
    if beats and now - folder.heartbeat["time"] <= SILENT_S:
        return _alive(folder, newest, f" on {newest.nodes}" if newest and newest.nodes else "", now=now)
    if asked:
        return _Verdict("lost", f"Slurm does not know job {folder.job}, and nothing writes to the run")
    unsure = "Slurm does not answer"
    if newest is None:
        return _Verdict("waiting", f"submitted {folder.submission['submitted'][:16]}, not started yet; {unsure}")
    if newest.action:
        return _Verdict("waiting", f"{_again(folder, newest)}; {unsure}")
    verdict = _alive(folder, newest, "", now=now)
    return verdict._replace(detail=f"{verdict.detail}; {unsure}")


def _local_verdict(folder: _Folder, attempts: Sequence[Attempt], *, now: float) -> _Verdict:
    newest = attempts[-1] if attempts else None
    owner = folder.owner
    if owner is not None and (folder.is_held_here or not owner.is_judged_here()):
        return _alive(folder, newest, f", process {owner.pid} on {owner.host}", now=now)
    if folder.is_starting(newest, now):
        return _Verdict("waiting", "starting on this machine")
    if newest is None:
        return _Verdict("new", "created, never started")
    if newest.cause in _STOPPED_BY:
        return _Verdict("stopped", _words(newest.cause), newest.cause)
    if fault := _fault(folder, newest):
        return _Verdict("failed", f"{_words(fault.cause)}, {fault.who}", fault.cause)
    if owner is not None:
        return _Verdict("lost", f"process {owner.pid} on {owner.host} is gone without a word: it was killed")
    return _Verdict("failed", f"ended without saying why; its log is {folder.run / 'log'}", "crash")


def _rate(folder: _Folder, newest: Attempt | None) -> float | None:
    if newest is None or folder.heartbeat.get("attempt") != newest.id:
        return None
    return folder.heartbeat.get("samples_per_s")


def _step(folder: _Folder) -> int | None:
    """Return the step of whichever is newer, heartbeat or last event."""
    beat, event = folder.heartbeat, folder.events[-1] if folder.events else {}
    trains = beat.get("phase") != "preparing"  # before that the checkpoint has not been read
    if trains and beat.get("step") is not None and (not event or float(beat["time"]) >= _seconds(event["time"])):
        return int(beat["step"])
    return event.get("step")


def _total_steps(folder: _Folder) -> int | None:
    said = [e["total_steps"] for e in folder.events if e.get("total_steps") is not None]
    total = folder.heartbeat.get("total_steps")
    return total if total is not None else said[-1] if said else None


def _words(cause: str) -> str:
    if cause.startswith("signal "):
        return f"killed by {cause}"
    return CAUSES.get(cause, cause or "ended")


# What went wrong first


class _Fault(NamedTuple):
    """The first cause of a failed attempt."""

    cause: str
    who: str
    lines: list[str]  # for a screen


_COMPLAINT = re.compile(r"^(srun|slurmstepd)(-\S+)?: ")
_RANK_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>[^(]+)")
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out of memory", re.IGNORECASE)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_CANCELLED_AT = re.compile(r"slurmstepd\S*: error: \*\*\* \w+ \S+ ON \S+ CANCELLED AT ([\d:T-]+)")


def _fault(folder: _Folder, attempt: Attempt | None) -> _Fault | None:
    """Return what went wrong first: a rank's own error, else what srun says of a killed one, else its consequence."""
    if attempt is None:
        return None
    errors = [error for error in folder.errors if error.attempt == attempt.id]
    own = [error for error in errors if error.fields.get("cause") != "lost_peer"]
    if own:
        return _fault_of(own)
    complained = _complaint(folder, attempt) or _by_code(attempt)
    return complained or (_fault_of(errors) if errors else None)


def _fault_of(errors: Sequence[_RankError]) -> _Fault:
    first = errors[0]
    place = _place(str(first.fields.get("traceback", "")))
    lines = [f"{first.who}: {first.what}", *([f"  {place}"] if place else []), f"  whole traceback: {first.path}"]
    return _Fault(str(first.fields.get("cause", "bug")), first.who, lines)


def _place(traceback: str) -> str:
    """Return the last place of a traceback that lies in the user's code, or else in any, with the line itself."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in (\S+)\n(?:    (?![\^~ ])(.*)\n)?', traceback, re.MULTILINE)
    foreign = re.compile(r"/(site|dist)-packages/|/lib/python3|/trainyard/(data|train|launch|tools|cli)/|^<")
    theirs = [frame for frame in frames if not foreign.search(frame[0])]
    if not frames:
        return ""
    path, line, function, text = (theirs or frames)[-1]
    return f"{path}:{line} in {function}" + (f": {text.strip()}" if text else "")


def _complaint(folder: _Folder, attempt: Attempt) -> _Fault | None:
    """Read what srun and slurmstepd wrote about an attempt. The first to end drew the others after it."""
    said = _complaints(folder, attempt)
    ended = [match for line in said if (match := _RANK_ENDED.search(line))]
    killed = [match for match in ended if match["how"].strip() in _SIGNALS]
    memory = [line for line in said if _OUT_OF_MEMORY.search(line)]
    culprits = [match for match in ended if _OUT_OF_MEMORY.search(match["how"])] or killed
    who = f"rank {culprits[0]['ranks']} on {culprits[0]['node']}" if culprits else f"on {attempt.nodes}"
    if memory:
        return _Fault("host_oom", who, memory[:2])
    if killed:
        return _Fault(f"signal {_SIGNALS[killed[0]['how'].strip()]}", who, [killed[0].string])
    return None


def _complaints(folder: _Folder, attempt: Attempt) -> list[str]:
    """Return what srun and slurmstepd wrote of the newest attempt, into a file that all attempts append to.

    slurmstepd ends an attempt that is started again with a line that bears the time, so what stands behind the last of
    those from before this attempt is this attempt's.
    """
    path = _outputs(folder.submission | {"job": attempt.job})[1]
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    ends = [(i, match[1]) for i, line in enumerate(lines) if (match := _CANCELLED_AT.match(line))]
    begin = max((i + 1 for i, time in ends if _seconds(time) <= attempt.start), default=0)
    return [line for line in lines[begin:] if _COMPLAINT.match(line)]


def _by_code(attempt: Attempt) -> _Fault | None:
    if attempt.code is None or attempt.code <= 128:
        return None
    number = attempt.code - 128
    return _Fault(f"signal {number}", f"on {attempt.nodes}", [f"srun ended with code {attempt.code}: signal {number}"])


def _outputs(submission: _Object) -> tuple[Path, Path]:
    """Return the files of rank 0's standard output and error."""
    folder, job = Path(submission.get("folder", "")), submission.get("job", "")
    return folder / f"{job}_0_log.out", folder / f"{job}_0_log.err"


# The screens


_HEAD = ("RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "SIGN", "JOB", "ON")
_LIMITS = (40, 7, 15, 9, 6, 6, 11, 12)  # with two spaces between them, a line of _WIDTH
_URGENCY = ("failed", "silent", "lost", "stopped", "running", "waiting", "new", "done")


def _row(status: Status, now: float) -> tuple[str, ...]:
    rate = status.samples_per_s
    newest = status.attempts[-1] if status.attempts else None
    lasts = status.state in ("running", "silent") and newest is not None
    cells = (
        short_name(status.run),
        status.state,
        _progress(status),
        "" if rate is None else f"{rate:.{0 if rate >= 10 else 2}f}",
        format_duration(max(0.0, now - newest.start)) if lasts and newest else "",
        "" if status.last_sign_s is None else format_duration(status.last_sign_s),
        status.job,
        f"{status.partition} x{status.gpus}".strip() if status.gpus else status.partition,
    )
    return tuple(_cut(cell, limit) for cell, limit in zip(cells, _LIMITS, strict=True))


def _progress(status: Status) -> str:
    if status.step is None:
        return ""
    return f"{status.step}/{status.total_steps}" if status.total_steps is not None else str(status.step)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _state(status: Status) -> str:
    return f"{status.state} ({status.detail})" if status.detail else status.state


def _headline(status: Status) -> str:
    step = f" at step {_progress(status)}" if status.step is not None else ""
    rate = f", {status.samples_per_s:.4g} samples/s" if status.samples_per_s is not None else ""
    detail = f": {status.detail}" if status.detail else ""
    job = f" (job {status.job})" if status.job else ""
    return f"{status.run}{job}: {status.state}{step}{rate}{detail}"


def _explanation(folder: _Folder, status: Status) -> list[str]:
    newest = status.attempts[-1] if status.attempts else None
    if status.state == "silent":
        return ["It may hang, or do something long: look at its log. To cancel and resume loses what is not saved."]
    if status.state == "waiting" and newest is not None and newest.cause == "crash":
        fault = _fault(folder, newest)
        return ["It goes on by itself. What crashed:", *(fault.lines if fault else [newest.reason])]
    if status.state in (*ACTIVE, "done", "new"):
        return [f"cause: {_words(status.cause)}" if status.cause else "Nothing is wrong."]
    fault = _fault(folder, newest) if status.state == "failed" else None
    cause = [f"cause: {_words(status.cause)}"] if status.cause else []
    host = [f"host: {newest.reason}"] if newest is not None and newest.reason else []
    return [*(fault.lines if fault else []), *cause, *host]


def _history(status: Status) -> list[str]:
    if not status.attempts:
        return []
    *attempts, newest = status.attempts
    if not newest.cause and status.state not in ACTIVE:
        newest = replace(newest, cause=status.cause)  # what Slurm or an error tells of one that could not say it
    attempts.append(newest)
    rows = [_attempt_row(attempt) for attempt in attempts]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["attempts:", *(_cut(f"  {_aligned(row, widths)}", _WIDTH) for row in rows)]


def _attempt_row(attempt: Attempt) -> tuple[str, ...]:
    ranks = f"{attempt.world_size} ranks " if attempt.world_size and attempt.world_size > 1 else ""
    again = {"requeue": "requeued", "slurm": "started again by Slurm", "stop": "final"}.get(attempt.action, "")
    return (
        attempt.id,
        f"{datetime.fromtimestamp(attempt.start):%Y-%m-%d %H:%M}",
        "" if attempt.end is None else f"for {format_duration(max(0.0, attempt.end - attempt.start))}",
        f"{ranks}on {attempt.nodes}" if attempt.nodes else "",
        f"steps {attempt.steps[0]}-{attempt.steps[1]}" if attempt.steps else "no step",
        ", ".join(part for part in (_words(attempt.cause) if attempt.cause else "", again) if part),
    )


def _next_command(status: Status) -> str:
    """Return what one types next to see more, or to go on."""
    run = shlex.quote(str(status.run))
    if status.cause == "held":
        return f"scontrol release {status.job}"
    if status.cause == "never_starts":
        return f"trainyard cancel {run}"
    if status.state in ("waiting", "running"):
        return f"trainyard logs -f {run}"
    if status.state in ("failed", "lost", "silent"):
        return f"trainyard why {run}"
    return f"trainyard report {run}" if status.state == "done" else _resume(status.run)


def _resume(run: Path) -> str:
    here = " --here" if _object(run / SUBMISSION).get("scheduler") == "local" else ""
    return f"trainyard resume {shlex.quote(str(run))}{here}"


def _advice(folder: _Folder, status: Status) -> str:
    """Return what to type after having read why: the command that goes on, with what to change before or with it."""
    if status.state == "silent":
        return f"trainyard logs -f {shlex.quote(str(status.run))}"
    if status.state not in ("failed", "lost"):
        return status.next_command
    resume = _resume(status.run)
    anew = f"trainyard {'submit' if status.job else 'run'} {shlex.quote(status.run.absolute().parent.name)}"
    match status.cause:
        case "device_oom":
            half = max(1, _micro_batch_size(folder) // 2)
            larger = f"{resume} --hw TYPE" if status.job else resume
            return f"{larger} (with more memory), or anew with less at once: {anew} micro_batch_size={half}"
        case "host_oom":
            more = ", or raise memory_gib_per_gpu in the cluster's file" if status.job else ""
            return f"{resume} data.threads=2 data.prefetch=1{more}"
        case "not_finite":
            return f"anew with a lower rate: {anew} optimizer.lr={_learning_rate(folder) / 2:g}"
        case "disk_full":
            return f"make room where {status.run} lies, then: {resume}"
        case "bug":
            return f"mend the code, then: {resume}{' --update-code' if status.job else ''}"
        case "user_error":
            return f"do what the message says, then: {resume}"
        case "no_progress":
            return f"save more often, or look into the log: {resume} checkpoint.every=5min"
        case _:
            return resume


def _micro_batch_size(folder: _Folder) -> int:
    """Return what a rank took at once in the last attempt, by the run's record; 1 if it did not come so far."""
    choices = _object(folder.run / RECORD).get("choices", {})
    return int(choices.get("micro_batch_size", {}).get("value", 1))


def _learning_rate(folder: _Folder) -> float:
    return float(yaml.safe_load((folder.run / CONFIG).read_text())["optimizer"]["lr"])


# Following a log


class _Output:
    """What a run and its ranks say, from several files, each line once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[Path, _Tail] = {}
        attempts = _attempts(folder := _read(run))
        newest = attempts[-1].id if attempts else ""
        self._told = {error.path for error in folder.errors if error.attempt != newest}

    def say(self, out: Callable[[str], object]) -> bool:
        """Hand over what is new; tell whether anything was."""
        lines = list(self._new())
        for line in lines:
            out(line)
        return bool(lines)

    def _new(self) -> Iterator[str]:
        log = self._run / "log"
        has_log = log.is_file()
        yield from self._tail(log)
        submission = _object(self._run / SUBMISSION)
        if submission:
            standard_out, standard_error = _outputs(submission)
            if not has_log:
                yield from self._tail(standard_out)
            # Rank 0 says there what it also writes to its log; srun says there what nobody else does.
            yield from (line for line in self._tail(standard_error) if not has_log or _COMPLAINT.match(line))
        for error in _errors(self._run):
            if error.path not in self._told:
                self._told.add(error.path)
                yield f"{error.who}: {error.what} (whole traceback: {error.path})"

    def _tail(self, path: Path) -> Iterator[str]:
        return self._tails.setdefault(path, _Tail(path)).lines()


class _Tail:
    """The lines that a file has got since one looked last. A line is handed out when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def lines(self) -> Iterator[str]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            if self._position > os.fstat(file.fileno()).st_size:  # written anew
                self._position = 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode(errors="replace").rstrip()


# Cancelling


def _owner_here(run: Path) -> Owner:
    """Return the process of this host that writes to a run.

    Raises:
        UserError: it is on another host, or has just gone.
    """
    owner = _owner(run)
    if owner is None or (owner.is_judged_here() and not owner.lives()):
        raise UserError(f"{run}: its process has just left. Look again: trainyard status {shlex.quote(str(run))}")
    if not owner.is_judged_here():
        raise UserError(
            f"{run}: process {owner.pid} on {owner.host} writes to it, which cannot be reached from here. "
            f"Type there: kill -INT {owner.pid}"
        )
    return owner


def _cancelled(before: Status) -> str:
    """Say what was done to a run that stood so."""
    name = short_name(before.run)
    if before.state not in ACTIVE:
        return f"{name}: is {_state(before)}, so there is nothing to cancel."
    if before.job:
        return f"{name}: cancelled job {before.job}. Go on: {_resume(before.run)}"
    return f"{name}: asked its process to save and leave. Go on: {_resume(before.run)}"


def _cancel_in_slurm(submitted: Sequence[Status]) -> None:
    """Cancel jobs. The mark comes first: a batch script that sees its ranks leave must not start them again."""
    marks = [status.run / _CONTROLS / "cancelled" for status in submitted]
    for mark in marks:
        write_atomically(mark, f"{datetime.now(UTC).isoformat(timespec='seconds')}\n")
    try:
        slurm.cancel([status.job for status in submitted])
    except UserError:
        for mark in marks:
            mark.unlink()
        raise
