"""Judges the state of a run, and why it failed, from its folder and from Slurm's answer. Loads no torch.

Evidence for the state of a run in Slurm, strongest first:

1. the event `done`;
2. Slurm's job, while it is pending or running; while it is completing, the end that the last attempt recorded;
3. the end that the last attempt recorded, if the attempt was the final one (action "stop");
4. of a job that has ended: Slurm's state CANCELLED, a recorded end after which Slurm should have started the job again
   (action "requeue"), any other state of Slurm;
5. of a job that Slurm does not know, or if Slurm was not queried: the mark of `trainyard cancel`, then the heartbeat.

Evidence for the state of a run outside Slurm: the event `done`; the process that owns the lock; a submission less than
a minute old; the end that the last attempt recorded; its first fault; a lock whose process is dead.

Evidence for the cause of a failure, strongest first (`find_first_fault`):

1. the error that a rank recorded, or that another recorded of it because it was killed or hung; unless it only reports
   the loss of another rank;
2. what srun and slurmstepd wrote about a rank that ran out of memory or was killed;
3. what srun or bash wrote about a command that the node does not have, if srun ended with their code for that;
4. the signal in srun's exit code;
5. the rank that disappeared, if others recorded that they lost one;
6. the error of a rank that lost another rank.

Without any of these, the cause is the one that attempt.sh recorded, or else Slurm's.
"""

import re
import signal
from datetime import datetime
from typing import NamedTuple

from trainyard.cluster.query import SlurmJob
from trainyard.errors import is_library
from trainyard.files import name_user, read_file
from trainyard.runs.events import EXTENDED
from trainyard.runs.folder import format_run_name
from trainyard.runs.history import (
    RANKS,
    Attempt,
    RankError,
    RunSnapshot,
    find_lost_rank,
    find_named_run,
    is_slurm_message,
    parse_time,
    read_run,
    read_stderr,
)
from trainyard.runs.state import ACTIVE, RESUMABLE, Cause, State, describe_cause
from trainyard.text import SCREEN_WIDTH, cut, format_duration

SILENT_S = 600.0  # heartbeats come every few seconds, but a long evaluation or a first compilation may delay them
_MOST_NOTE = 1000  # bytes
_START_S = 60.0  # time that a background process may take to write its first line


class Verdict(NamedTuple):
    """The state of a run."""

    state: State
    detail: str = ""
    cause: str = ""  # a `Cause`, or "signal <n>"; "" if nothing is wrong


class Fault(NamedTuple):
    """The first fault of an attempt."""

    cause: str
    who: str
    lines: list[str]  # details for the user


def is_managed_by_slurm(snapshot: RunSnapshot, job: SlurmJob | None) -> bool:
    """Return whether the run's current or last execution is its Slurm job, not one that was started outside Slurm."""
    if not snapshot.slurm_job_id:
        return False
    if job is not None and job.state in (*_PENDING_STATES, *_RUNNING_STATES):
        return True
    newest = snapshot.newest_attempt
    if snapshot.has_live_writer_here and not (newest and newest.slurm_job_id and newest.end is None):
        return False
    if newest is None or newest.slurm_job_id:
        return True
    return newest.start <= parse_time(snapshot.submission["submitted"])


def judge_run(
    snapshot: RunSnapshot, job: SlurmJob | None, *, in_slurm: bool, now: float, slurm_unavailable_reason: str
) -> Verdict:
    """Judge a run; the top of this file tells the order of evidence.

    Args:
        job: None: Slurm does not know the job, or was not queried.
        in_slurm: what `is_managed_by_slurm` says.
        now: seconds since the epoch.
        slurm_unavailable_reason: why Slurm was not queried; "" if it was.
    """
    if snapshot.is_done:
        return Verdict(State.DONE)
    if not in_slurm:
        return _judge_local_run(snapshot, now=now)
    newest = snapshot.find_newest_attempt(snapshot.slurm_job_id)
    verdict = _judge_slurm_job(snapshot, job, newest, now=now, slurm_unavailable_reason=slurm_unavailable_reason)
    return _name_both_jobs(snapshot, newest, verdict) if len(snapshot.slurm_job_ids) > 1 else verdict


# Runs in Slurm


def _judge_slurm_job(
    snapshot: RunSnapshot, job: SlurmJob | None, newest: Attempt | None, *, now: float, slurm_unavailable_reason: str
) -> Verdict:
    """Judge the Slurm job that a run is in: the one that packs its data, or the one that trains."""
    if job is not None and job.state in _PENDING_STATES:
        return _judge_pending_job(snapshot, job, newest)
    if job is not None and job.state in _RUNNING_STATES:
        return _judge_running_job(snapshot, job, newest, now=now)
    if newest is not None and newest.action == "stop":
        return _judge_recorded_end(snapshot, newest)
    if job is not None:
        return _judge_ended_job(snapshot, job, newest)
    return _judge_unknown_job(snapshot, newest, now=now, slurm_unavailable_reason=slurm_unavailable_reason)


def _name_both_jobs(snapshot: RunSnapshot, newest: Attempt | None, verdict: Verdict) -> Verdict:
    """Extend the verdict on a packing job by its meaning for the job that trains on the data."""
    packing, training = snapshot.slurm_job_ids
    fault = find_first_fault(snapshot, newest) if newest is not None and verdict.state == State.FAILED else None
    error = fault.lines[0].removeprefix(f"{fault.who}: ") if fault else verdict.detail
    reason = cut(" ".join(error.split()), SCREEN_WIDTH) or verdict.state
    then = "waits for it" if verdict.state in ACTIVE else "does not start"
    return verdict._replace(detail=f"packing (Slurm job {packing}): {reason} -> training (Slurm job {training}) {then}")


def _judge_pending_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> Verdict:
    reason, cause = explain_pending_reason(job.reason), ""
    if job.reason == "Dependency" and (before := find_named_run(snapshot.submission, "after")):
        reason = f"waits until {format_run_name(before)} is done"
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or job.reason.startswith(_HELD):
        cause = Cause.HELD
    elif job.reason.startswith(_NEVER_STARTS):
        cause = Cause.NEVER_STARTS
    if newest is None and not job.restarts:
        return Verdict(State.WAITING, reason, cause)
    return Verdict(State.WAITING, f"{_describe_restart(snapshot, newest, is_pending=True)}: {reason}", cause)


def _judge_running_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None, *, now: float) -> Verdict:
    where = f" on {job.nodes}" if job.nodes else ""
    if snapshot.cancelled:
        return Verdict(State.RUNNING, f"being cancelled{where}", Cause.CANCELLED)
    if job.state == "SUSPENDED":
        return Verdict(State.RUNNING, f"suspended by Slurm{where}")
    if newest is not None and newest.action == "requeue" and _read_requeue_note(snapshot, newest):
        return Verdict(State.WAITING, _describe_restart(snapshot, newest))
    if newest is not None and not newest.action:
        if job.state == ENDING:
            return Verdict(State.RUNNING, f"being ended by Slurm{where}")
        return _judge_live_run(snapshot, newest, where, now=now)
    if newest is not None and job.state == ENDING:
        if newest.action == "stop":
            return _judge_recorded_end(snapshot, newest)
        return Verdict(State.WAITING, _describe_restart(snapshot, newest))
    return Verdict(State.RUNNING, f"starting{where}")


def _judge_recorded_end(snapshot: RunSnapshot, attempt: Attempt) -> Verdict:
    """Judge a run by its final attempt: it recorded how it ended and that it does not start again."""
    if attempt.cause in RESUMABLE:
        reason = f": {attempt.reason}" if attempt.reason else ""
        return Verdict(State.STOPPED, f"{describe_cause(attempt.cause)}{reason}", attempt.cause)
    if attempt.cause == "done":
        was_extended = any(event.get("event") == EXTENDED for event in snapshot.events)
        missing = "exited as if done, but the event `done` is missing"
        return Verdict(State.STOPPED, "extended, but not resumed since" if was_extended else missing)
    return _judge_failure(snapshot, attempt, attempt.cause, otherwise=attempt.reason or f"exit code {attempt.code}")


def _judge_ended_job(snapshot: RunSnapshot, job: SlurmJob, newest: Attempt | None) -> Verdict:
    """Judge a job that has ended although its last attempt, if any, did not record a final end."""
    cause = _SLURM_END_CAUSES.get(job.state, "")
    if cause == Cause.CANCELLED:
        broken = _explain_broken_chain(snapshot, newest)
        return Verdict(State.STOPPED, broken or _describe_cancellation(snapshot, job), cause)
    if newest is not None and newest.action == "requeue":
        detail = f"{describe_cause(newest.cause)}; Slurm did not start it again ({job.state})"
        return Verdict(_classify_end(newest.cause), detail, newest.cause)
    if job.state == "COMPLETED":
        return Verdict(State.STOPPED, "Slurm says COMPLETED, but the run is not complete")
    if cause:
        return Verdict(_classify_end(cause), f"{describe_cause(cause)} (Slurm says {job.state})", cause)
    return _judge_failure(snapshot, newest, Cause.CRASH, otherwise=f"Slurm says {job.state}")


def _describe_cancellation(snapshot: RunSnapshot, job: SlurmJob) -> str:
    """Name the user who cancelled a job, unless it was its owner; Slurm knows that only with accounting."""
    if snapshot.cancelled or job.cancelled_by == snapshot.run.stat().st_uid:
        return describe_cause(Cause.CANCELLED)
    return f"cancelled {'outside Trainyard' if job.cancelled_by is None else f'by {name_user(job.cancelled_by)}'}"


def _explain_broken_chain(snapshot: RunSnapshot, newest: Attempt | None) -> str:
    """Explain why a run that waited for another never started; "" if there is another reason."""
    if newest is not None or not (path := find_named_run(snapshot.submission, "after")):
        return ""
    before = read_run(path)
    last = before.find_newest_attempt(before.slurm_job_id)
    has_ended = before.cancelled or (last is not None and last.action == "stop")
    if before.is_done or not has_ended:
        return ""
    return f"cancelled by Slurm, because {format_run_name(before.run)} ended without being done"


def _classify_end(cause: str) -> State:
    return State.STOPPED if cause in RESUMABLE else State.FAILED


def _judge_failure(snapshot: RunSnapshot, attempt: Attempt | None, cause: str, *, otherwise: str) -> Verdict:
    """Judge a failed run by the first fault of its last attempt; if there is none, by `cause` and `otherwise`."""
    fault = find_first_fault(snapshot, attempt) if attempt else None
    if fault is None:
        return Verdict(State.FAILED, f"{describe_cause(cause)}: {otherwise}", cause)
    gave_up = f"; {describe_cause(cause)}" if cause in (Cause.BUDGET, Cause.NO_PROGRESS) else ""
    return Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}{gave_up}", fault.cause)


def _judge_unknown_job(
    snapshot: RunSnapshot, newest: Attempt | None, *, now: float, slurm_unavailable_reason: str
) -> Verdict:
    """Judge a submitted run without an answer from Slurm: it forgot the job, or could not be queried."""
    if snapshot.cancelled:
        return Verdict(State.STOPPED, describe_cause(Cause.CANCELLED), Cause.CANCELLED)
    if newest is not None and not newest.action:
        heartbeat = snapshot.get_heartbeat(newest.id)
        if heartbeat and now - heartbeat["time"] <= SILENT_S:
            return _judge_live_run(snapshot, newest, f" on {newest.nodes}", now=now)
    if not slurm_unavailable_reason:
        if broken := _explain_broken_chain(snapshot, newest):
            return Verdict(State.STOPPED, broken, Cause.CANCELLED)
        return Verdict(State.LOST, f"Slurm does not know job {snapshot.slurm_job_id}, and nothing writes to the run")
    not_queried = "Slurm could not be queried"
    if newest is None:
        submitted = snapshot.submission["submitted"][:16]
        return Verdict(State.WAITING, f"submitted {submitted}, not started yet; {not_queried}")
    if newest.action:
        return Verdict(State.WAITING, f"{_describe_restart(snapshot, newest)}; {not_queried}")
    verdict = _judge_live_run(snapshot, newest, "", now=now)
    return verdict._replace(detail=f"{verdict.detail}; {not_queried}")


def _describe_restart(snapshot: RunSnapshot, newest: Attempt | None, *, is_pending: bool = False) -> str:
    """Name the cause of a job's restart. If Slurm killed it, it could record nothing; a preempted one got a signal.

    Args:
        is_pending: Slurm has requeued it, so its attempt asks no more, though its note may be there.
    """
    if newest is None:
        return "starts again"
    warned = (snapshot.run / "slurm" / f"signal-{newest.id}").exists()
    again = _RESTARTS.get(newest.cause or (Cause.PREEMPTED if warned else ""), "starts again")
    answer = _read_requeue_note(snapshot, newest) if newest.action == "requeue" and not is_pending else ""
    return f"{again}: its attempt keeps asking Slurm to requeue it ({answer})" if answer else again


def _read_requeue_note(snapshot: RunSnapshot, attempt: Attempt) -> str:
    """Return when and what Slurm last answered to a batch script that asks again; "" if none asks."""
    try:
        note = read_file(snapshot.run / "slurm" / f"requeue-{attempt.id}", most_bytes=_MOST_NOTE)
    except OSError:  # the usual case: there is none
        return ""
    return "".join(filter(str.isprintable, note.decode(errors="replace")))


# Runs outside Slurm


def _judge_local_run(snapshot: RunSnapshot, *, now: float) -> Verdict:
    newest, owner = snapshot.newest_attempt, snapshot.owner
    if owner is not None and (snapshot.has_live_writer_here or not owner.is_checkable_here()):
        return _judge_live_run(snapshot, newest, f", process {owner.pid} on {owner.host}", now=now)
    if _is_starting(snapshot, now):
        return Verdict(State.WAITING, "starting on this machine")
    if newest is None:
        return Verdict(State.NEW, "created, never started")
    if newest.cause in RESUMABLE:
        return Verdict(State.STOPPED, describe_cause(newest.cause), newest.cause)
    if fault := find_first_fault(snapshot, newest):
        return Verdict(State.FAILED, f"{describe_cause(fault.cause)}, {fault.who}", fault.cause)
    if owner is not None:
        return Verdict(State.LOST, f"process {owner.pid} on {owner.host} is gone and recorded no end: it was killed")
    return Verdict(State.FAILED, f"ended without recording why; see {snapshot.run / 'log'}", Cause.CRASH)


def _is_starting(snapshot: RunSnapshot, now: float) -> bool:
    """Return whether it was just submitted to this machine and none of its processes has written anything yet."""
    if snapshot.submission.get("scheduler") != "local":
        return False
    newest, submitted = snapshot.newest_attempt, parse_time(snapshot.submission["submitted"])
    return now - submitted < _START_S and (newest is None or newest.start < submitted - 1)


def _judge_live_run(snapshot: RunSnapshot, newest: Attempt | None, where: str, *, now: float) -> Verdict:
    """Judge a run that has a process, in Slurm or not: does it make progress?"""
    heartbeat = snapshot.get_heartbeat(newest.id) if newest is not None else {}
    phase = str(heartbeat.get("phase", "starting"))
    last = snapshot.last_activity
    if last is None or now - last <= SILENT_S:
        return Verdict(State.RUNNING, f"{phase}{where}")
    since = f"{datetime.fromtimestamp(last):%Y-%m-%d %H:%M}"
    return Verdict(State.SILENT, f"no sign of life for {format_duration(now - last)}, since {since}, {phase}{where}")


# The first fault of an attempt


def find_first_fault(snapshot: RunSnapshot, attempt: Attempt) -> Fault | None:
    """Return what went wrong first in an attempt, None if nothing tells; the top of this file says in which order."""
    errors = [error for error in snapshot.errors if error.attempt == attempt.id]
    for error in errors:
        if error.cause != Cause.LOST_PEER:
            return _describe_rank_error(error)
    fault = _find_killed_rank(snapshot, attempt)
    if fault is None and errors:
        return _describe_lost_rank(snapshot, attempt, errors[0])
    return fault


def _describe_lost_rank(snapshot: RunSnapshot, attempt: Attempt, error: RankError) -> Fault:
    """Name the rank that disappeared, not the one that noticed."""
    fault = _describe_rank_error(error)
    if not (lost := find_lost_rank(snapshot, attempt)):
        return fault._replace(who=f"noticed by {fault.who}")
    line = f"{lost} ended without a word: it was killed, or its node was lost. Noticed by {error.who}: {error.path}"
    return Fault(fault.cause, lost, [line])


def _describe_rank_error(error: RankError) -> Fault:
    place = _find_failing_line(str(error.fields.get("traceback", "")))
    more = [f"  {place}"] if place else []
    if error.cause == Cause.HUNG:
        more += [f"  stacks of all ranks: {error.path.parents[1] / RANKS}/{error.attempt}-rank*-stacks.txt"]
    elif not error.cause.startswith("signal "):
        more += [f"  whole traceback: {error.path}"]
    return Fault(error.cause, error.who, [f"{error.who}: {error.summary}", *more])


def _find_failing_line(traceback: str) -> str:
    """Return file, line and text of the last traceback frame in the user's code, or of the last frame at all."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in (\S+)\n(?:    (?![\^~ ])(.*)\n)?', traceback, re.MULTILINE)
    user_frames = [frame for frame in frames if not is_library(frame[0])]
    if not frames:
        return ""
    path, line, function, text = (user_frames or frames)[-1]
    return f"{path}:{line} in {function}" + (f": {text.strip()}" if text else "")


def _find_killed_rank(snapshot: RunSnapshot, attempt: Attempt) -> Fault | None:
    """Find the first killed rank in messages of srun and slurmstepd, else the signal in srun's exit code."""
    lines = read_stderr(snapshot, attempt)
    messages = [line for line in lines if is_slurm_message(line)]
    ended = [match for line in messages if (match := _RANK_ENDED.search(line))]
    killed = [match for match in ended if match["how"].strip() in _SIGNALS]
    out_of_memory = [line for line in messages if _OUT_OF_MEMORY.search(line)]
    culprits = [match for match in ended if _OUT_OF_MEMORY.search(match["how"])] or killed
    who = f"rank {culprits[0]['ranks']} on {culprits[0]['node']}" if culprits else f"on {attempt.nodes}"
    if out_of_memory:
        return Fault(Cause.HOST_OOM, who, out_of_memory[:2])
    if killed:
        return Fault(f"signal {_SIGNALS[killed[0]['how'].strip()]}", who, [killed[0].string])
    if attempt.code in (2, 127) and (missing := next(filter(None, map(_NOT_FOUND.search, lines)), None)):
        who = f"on {ended[0]['node'] if ended else attempt.nodes}"
        return Fault(Cause.NO_COMMAND, who, [f"{who}: there is no {missing[1] or missing[2]}"])
    number = (attempt.code or 0) - 128
    if number in signal.valid_signals():  # srun also has other codes, such as 255
        return Fault(f"signal {number}", who, [f"srun ended with code {attempt.code}: signal {number}"])
    return None


_RANK_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>[^(]+)")
_NOT_FOUND = re.compile(r"^slurmstepd.* execve\(\): (.+): No such|: line \d+: (.+): command not found$")
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out of memory", re.IGNORECASE)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


# Slurm's words


def explain_pending_reason(reason: str) -> str:
    """Explain why Slurm keeps a job waiting; an unknown reason is quoted as it is."""
    return next((text for prefix, text in _REASONS.items() if reason.startswith(prefix)), f"Slurm says: {reason}")


ENDING = "COMPLETING"
"""Slurm's state of a job whose end is decided, while its processes save and exit."""

_PENDING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING_STATES = ("RUNNING", ENDING, "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

_SLURM_END_CAUSES = {
    "CANCELLED": Cause.CANCELLED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
}

_RESTARTS: dict[str, str] = {
    Cause.PREEMPTED: "starts again after preemption",
    Cause.TIME_LIMIT: "resumes after its time limit",
    Cause.NODE_FAILURE: "starts again after the loss of a node",
    Cause.CRASH: "starts again after a crash",
    Cause.HUNG: "starts again after a hang",
    Cause.DEVICE_OOM: "resumes with half the micro-batch",
    Cause.DISK_ERROR: "starts again after an error of the disk",
    Cause.DISK_FULL: "starts again, because the disk was full or read-only",
}

_REASONS = {
    "Priority": "other jobs are ahead of it in the queue",
    "Resources": "next in the queue; waits until enough GPUs are free",
    "Nodes required for job are DOWN": "its nodes are down, drained or reserved for other jobs",
    "ReqNodeNotAvail, Reserved for maintenance": "its nodes are reserved for maintenance before it could end",
    "ReqNodeNotAvail, May be reserved for other job": "its nodes are reserved for others before it could end",
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
    "AssocMaxWallDuration",
)
