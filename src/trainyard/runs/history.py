"""Reads a run folder: the submission, the attempts, and the errors of ranks.

Any file may be missing, incomplete, or torn by the loss of a node. Loads no torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.errors import UserError
from trainyard.files import parse_json, read_file
from trainyard.runs.events import ENDS, EXTENDED, STARTS
from trainyard.runs.folder import SUBMISSION, read_creation_time
from trainyard.runs.lock import LOCK, Owner, read_owner
from trainyard.runs.manifest import MOST
from trainyard.runs.state import Cause

CANCELLED = "slurm/cancelled"
"""File that `trainyard cancel` creates in a run folder before it cancels the Slurm job."""

RANKS = "ranks"
"""Folder in a run folder with the current attempt's notes of each rank (train/watchdog.py), and stacks of hung ones."""

JsonObject = dict[str, Any]

ATTEMPTS = "slurm/attempts.jsonl"
"""File with a line for each start and each end of an attempt that Slurm started."""

_MOST_BYTES = 2**30  # of a file of events
_MOST_STDERR_BYTES = 2**24


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are seconds since the epoch."""

    id: str  # "<Slurm job id>-<restarts>", or "local-<second of its start>"
    start: float
    end: float | None  # its last activity if it was killed; None while it runs
    nodes: str
    cause: str  # a `Cause`, "signal <n>", or "done"; "" if none was recorded
    world_size: int | None  # None: it has not trained
    steps: tuple[int, int] | None  # first and last recorded step
    # Set only for attempts that Slurm started:
    slurm_job_id: str = ""
    action: str = ""  # how it was started again: "requeue" by us, "slurm", or "stop": not at all; "" while it runs
    excluded: str = ""  # nodes that failed, which the next attempt does without, with commas
    successor: str = ""  # the Slurm job that "requeue" submitted, because Slurm does not requeue this one; "" else
    code: int | None = None  # exit code; -1: Slurm ended it before it could exit
    reason: str = ""  # why it ended, as the batch script recorded it
    only_packs: bool = False  # it packed the data that another Slurm job trains on


class RankError(NamedTuple):
    """The error that one rank recorded when it failed."""

    attempt: str
    path: Path
    fields: JsonObject

    @property
    def time(self) -> float:
        return float(self.fields.get("time", 0.0))

    @property
    def cause(self) -> str:
        return str(self.fields.get("cause", Cause.BUG))

    @property
    def who(self) -> str:
        return f"rank {self.fields.get('rank', '?')} on {self.fields.get('host', '?')}"

    @property
    def summary(self) -> str:
        return f"{self.fields.get('type', 'Error')}: {self.fields.get('message', '')}".rstrip(": \n")


@dataclass(frozen=True)
class RunSnapshot:
    """The contents of a run folder, read once."""

    run: Path
    submission: JsonObject
    cancelled: bool
    starts_and_ends: list[JsonObject]  # lines of attempts.jsonl
    events: list[JsonObject]
    heartbeat: JsonObject
    errors: list[RankError]  # oldest first
    owner: Owner | None  # of the lock
    log_changed: float | None  # modification time of the log
    created: str = ""  # as `folder.read_creation_time` returns it; "" if that is damaged
    damage: str = ""  # of its files, as sentences; "" if none

    @cached_property
    def slurm_job_ids(self) -> list[str]:
        """Ids of the Slurm jobs of the latest submission, or of their last successors; empty if there are none.

        There are two while the first packs the data that the second trains on; after that, only the second. If the
        first packs for all runs of a sweep, a run that was cancelled has nothing more to do with it.
        """
        is_in_slurm = self.submission.get("scheduler") == "slurm"
        jobs = _list_jobs(self.submission, self.starts_and_ends) if is_in_slurm else []
        return jobs[-1:] if self.cancelled and find_named_run(self.submission, "packing_run") else jobs

    @property
    def slurm_job_id(self) -> str:
        """Id of the Slurm job that the run is in now; "" if not submitted to Slurm."""
        return self.slurm_job_ids[0] if self.slurm_job_ids else ""

    @property
    def training_job_id(self) -> str:
        """Id of the Slurm job that trains; "" if not submitted to Slurm."""
        return self.slurm_job_ids[-1] if self.slurm_job_ids else ""

    @cached_property
    def attempts(self) -> list[Attempt]:
        return _build_attempts(self)  # oldest first

    @property
    def newest_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    def find_newest_attempt(self, slurm_job_id: str) -> Attempt | None:
        """Return the newest attempt of a Slurm job and those that it succeeds; with "": that no scheduler started."""
        jobs, successors = {slurm_job_id}, _list_successors(self.starts_and_ends)
        while earlier := {job for job, later in successors.items() if later in jobs} - jobs:
            jobs |= earlier
        return next((attempt for attempt in reversed(self.attempts) if attempt.slurm_job_id in jobs), None)

    @property
    def is_done(self) -> bool:
        """Whether the last attempt trained to the end, and the run was not extended since."""
        deciding = (e["event"] for e in reversed(self.events) if e.get("event") in (*STARTS, *ENDS, EXTENDED))
        return next(deciding, "") == "done"

    @property
    def has_live_writer_here(self) -> bool:
        """Whether a live process on this host writes to the run."""
        return self.owner is not None and self.owner.is_checkable_here() and self.owner.is_alive()

    @property
    def last_activity(self) -> float | None:
        """Time of the newest write of any kind."""
        times = [error.time for error in self.errors]
        times += [parse_time(line["time"]) for line in (*self.starts_and_ends, *self.events[-1:])]
        times += [float(self.heartbeat["time"])] if self.heartbeat else []
        times += [self.log_changed] if self.log_changed is not None else []
        return max(times, default=None)

    def get_heartbeat(self, attempt: str) -> JsonObject:
        """Return the heartbeat if it is from this attempt, else an empty object."""
        return self.heartbeat if self.heartbeat.get("attempt") == attempt else {}


def read_run(run: Path) -> RunSnapshot:
    """Read a run folder. Damaged parts are left out, and named in `damage`."""
    damage: list[str] = []

    def filter_valid(path: Path, lines: list[JsonObject], kinds: _Kinds) -> list[JsonObject]:
        misfits = [line for line in lines if not _has_kinds(line, kinds)]
        if misfits:
            damage.append(f"{path}: has {len(misfits)} lines that no run writes, such as {str(misfits[0])[:60]}.")
        return [line for line in lines if line not in misfits] if misfits else lines

    def read_valid_object(path: Path, kinds: _Kinds) -> JsonObject:
        return next(iter(filter_valid(path, [read_object(path)], kinds)), {})

    def read_valid_lines(path: Path, kinds: _Kinds) -> list[JsonObject]:
        return filter_valid(path, [line for line in _read_json_lines(path) if "time" in line], kinds)

    log = run / "log"
    submission = read_valid_object(run / SUBMISSION, _SUBMISSION)
    folders, events = list_folders(run, submission), read_valid_lines(run / "events.jsonl", _EVENT)
    heartbeats = [read_valid_object(folder / "heartbeat.json", _HEARTBEAT) for folder in folders]
    trained = [name for name in _group_events(events) if name]
    snapshot = RunSnapshot(
        run=run,
        submission=submission,
        cancelled=(run / CANCELLED).exists(),
        starts_and_ends=[line for folder in folders for line in read_valid_lines(folder / ATTEMPTS, _START_OR_END)],
        events=events,
        # A writer that was replaced, and wakes up, may still write one: it is not of the newest attempt.
        heartbeat=max(
            (beat for beat in heartbeats if beat.get("attempt") not in trained[:-1]),
            key=lambda beat: float(beat.get("time", 0.0)),
            default={},
        ),
        errors=[error for folder in folders for error in read_errors(folder)],
        owner=_read_owner(run),
        log_changed=log.stat().st_mtime if log.exists() else None,
    )
    try:
        snapshot = replace(snapshot, created=read_creation_time(run))
    except UserError as error:
        damage.append(str(error))
    return replace(snapshot, damage=" ".join(damage))


_Kinds = Mapping[str, str]
_TIME = "time"  # ISO 8601
_START_OR_END = {
    **{"time": _TIME, "event": "text", "attempt": "count", "code": "number", "cause": "text"},
    **{"job": "text", "successor": "text", "excluded": "text"},
}
_EVENT = {"time": _TIME, "event": "text", "step": "count", "total_steps": "count", "world_size": "count"}
_HEARTBEAT = {
    **{"time": "number", "phase": "text", "attempt": "text", "previous": "text"},
    **{"step": "count", "total_steps": "count", "samples_per_s": "number"},
}
_RANK = {"time": "number", "rank": "count", "host": "text"}
_SUBMISSION = {
    **{"submitted": _TIME, "scheduler": "text", "gpus": "count", "nodes": "count", "folder": "text"},
    **{"packing": "text", "packing_run": "text", "after": "text"},
}


def _has_kinds(fields: JsonObject, kinds: _Kinds) -> bool:
    """Return whether the values are of these kinds; all but the first may be missing, and the whole object too."""
    first = next(iter(kinds))
    is_complete = not fields or fields.get(first) is not None
    return is_complete and all(_is_of_kind(fields[name], kinds[name]) for name in kinds if fields.get(name) is not None)


def _is_of_kind(value: object, kind: str) -> bool:
    """Return whether a value from a file is a time, a text, a count, or a number that torch and C can represent."""
    if kind in (_TIME, "text"):
        return isinstance(value, str) and (kind == "text" or _is_time(value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
    return is_number and (kind == "number" or (isinstance(value, int) and value >= 0))


def _is_time(text: str) -> bool:
    try:
        return parse_time(text) >= 0
    except (ValueError, OverflowError):
        return False


def find_named_run(submission: JsonObject, key: str) -> Path | None:
    """Return the folder that a submission names; None if it names none.

    Args:
        key: "packing_run": where a Slurm job packs the data of all runs of a sweep; "after": the run that comes first.
    """
    path = str(submission.get(key, ""))
    return Path(path) if path.startswith("/") and path.isprintable() else None


def list_folders(run: Path, submission: JsonObject) -> list[Path]:
    """Return the folders in which the Slurm jobs of a run record, in order: its own is the last."""
    packing_run = find_named_run(submission, "packing_run")
    return [run] if packing_run is None else [packing_run, run]


def read_errors(run: Path) -> list[RankError]:
    """Return the errors that ranks recorded in all attempts, oldest first."""
    records = ((path, read_object(path)) for path in run.glob("errors/*-rank*.json"))
    errors = [
        RankError(path.name.rpartition("-rank")[0], path, fields)
        for path, fields in records
        if fields and _is_of_kind(fields.get("time", 0.0), "number")
    ]
    return sorted(errors, key=lambda error: (error.time, error.path))  # file systems list names in any order


def find_lost_rank(snapshot: RunSnapshot, attempt: Attempt) -> str:
    """Return the rank that disappeared first from an attempt, and where it ran: it neither ended nor failed by itself.

    "" if nothing tells. A rank's record is removed when it ends, whatever the reason, unless it is killed.
    """
    failed = {error.fields.get("rank") for error in snapshot.errors if error.attempt == attempt.id}
    records = (read_object(path) for path in (snapshot.run / RANKS).glob(f"{attempt.id}-rank*.json"))
    lost = [record for record in records if _has_kinds(record, _RANK) and record and record.get("rank") not in failed]
    first = min(lost, key=lambda record: (float(record["time"]), int(record.get("rank", 0))), default=None)
    return "" if first is None else f"rank {first.get('rank', '?')} on {first.get('host', '?')}"


def read_object(path: Path) -> JsonObject:
    """Return the contents of a JSON file; an empty object if it is missing or torn."""
    return next(_parse_json([_read(path)]), {})


def locate_output_files(run: Path, submission: JsonObject, job: str = "") -> tuple[Path, Path]:
    """Return the paths of rank 0's standard output and standard error. The batch script also writes to the latter.

    Args:
        job: a Slurm job id; "": the current one.
    """
    folder, job = Path(submission.get("folder", run / "slurm")), job or _list_current_jobs(run, submission)[0]
    return folder / f"{job}_0_log.out", folder / f"{job}_0_log.err"


def find_current_folder(run: Path, submission: JsonObject) -> Path:
    """Return the folder in which a run's current Slurm job records."""
    return list_folders(run, submission)[0] if len(_list_current_jobs(run, submission)) > 1 else run


def _list_current_jobs(run: Path, submission: JsonObject) -> list[str]:
    lines = (line for place in list_folders(run, submission) for line in _read_json_lines(place / ATTEMPTS))
    return _list_jobs(submission, [line for line in lines if _has_kinds(line, _START_OR_END)])


def read_stderr(snapshot: RunSnapshot, attempt: Attempt | None) -> list[str]:
    """Return the standard error of the batch script, srun and rank 0 in an attempt.

    All attempts of a Slurm job append to one file, each after a header line from attempt.sh. Only its end is read: what
    a user's code writes there has no bounds.

    Args:
        attempt: None: the whole file of the latest submission, which has no attempt yet.
    """
    _, path = locate_output_files(snapshot.run, snapshot.submission, attempt.slurm_job_id if attempt else "")
    if not path.is_file():
        return []
    with path.open("rb") as file:
        is_cut = file.seek(max(0, path.stat().st_size - _MOST_STDERR_BYTES)) > 0
        text = file.read(_MOST_STDERR_BYTES).decode(errors="replace")
    if attempt is not None:
        _, header, own = text.partition(f"{_ATTEMPT_HEADER} {attempt.id} on ")
        own = own if header or not is_cut else text  # its header was before the end
        text = own.partition(f"{_ATTEMPT_HEADER} ")[0].partition("\n")[2]
    return text.splitlines()


def is_slurm_message(line: str) -> bool:
    """Return whether srun or slurmstepd wrote this line."""
    return re.match(r"(srun|slurmstepd)(-\S+)?: ", line) is not None


def parse_time(text: str) -> float:
    """Convert an ISO 8601 time to seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


_ATTEMPT_HEADER = "trainyard: attempt"
"""Beginning of the line that attempt.sh writes to standard error when an attempt starts."""


def _read_owner(run: Path) -> Owner | None:
    """Return the owner of the lock; None if it cannot be read: its process is just starting, or died while starting."""
    try:
        return read_owner(run / LOCK)
    except UserError:
        return None


def _read_json_lines(path: Path) -> list[JsonObject]:
    """Return the intact lines of a JSON lines file. Any line may be torn: attempts append after a lost node."""
    return list(_parse_json(_read(path).split(b"\n")))


def _read(path: Path) -> bytes:
    """Return the content of a file; nothing if it is missing, or no file of a run (see `files.open_untrusted`)."""
    try:
        return read_file(path, most_bytes=_MOST_BYTES)
    except OSError:
        return b""


def _parse_json(texts: Iterable[bytes]) -> Iterator[JsonObject]:
    for text in texts:
        try:
            value = parse_json(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


# Attempts, from the records of the batch script and of the training


def _build_attempts(snapshot: RunSnapshot) -> list[Attempt]:
    events, submitted = _group_events(snapshot.events), _group_attempt_lines(snapshot.starts_and_ends)
    local = _find_local_attempts(snapshot, events)
    attempts = [_build_slurm_attempt(snapshot, id, lines, events.get(id, [])) for id, lines in submitted.items()]
    attempts += [_build_local_attempt(snapshot, id, events.get(id, [])) for id in local]
    orders = [list(submitted), [name for name in events if name]]
    orders += [[str(snapshot.heartbeat.get("previous")), str(snapshot.heartbeat.get("attempt"))]]
    for event in snapshot.events:
        if isinstance(before := event.get("previous"), dict):
            orders.append([str(before.get("attempt")), str(event.get("attempt"))])
    return _sort_attempts(attempts, [pair for order in orders for pair in pairwise(order)])


def _sort_attempts(attempts: Sequence[Attempt], recorded: Iterable[tuple[str, str]]) -> list[Attempt]:
    """Sort attempts, oldest first, by the records; a clock, which may go back, decides only where there is none.

    Args:
        recorded: ids of an attempt and of a later one.
    """
    by_id = {attempt.id: attempt for attempt in attempts}
    sorter = TopologicalSorter({id: set[str]() for id in by_id})
    for before, after in recorded:
        if before in by_id and after in by_id and before != after:
            sorter.add(after, before)
    merged: list[Attempt] = []
    ready: list[tuple[float, str]] = []
    try:
        sorter.prepare()
    except CycleError:  # the files are damaged
        return sorted(attempts, key=lambda attempt: attempt.start)
    while sorter:
        for id in sorter.get_ready():
            heappush(ready, (by_id[id].start, id))
        _, id = heappop(ready)
        merged.append(by_id[id])
        sorter.done(id)
    return merged


def _group_events(events: Sequence[JsonObject]) -> dict[str, list[JsonObject]]:
    """Group events by the attempt that their `start` or `resume` names; "": no attempt is named, in a torn file."""
    groups: dict[str, list[JsonObject]] = {}
    name = ""
    for event in events:
        if event.get("event") in STARTS:
            name = str(event.get("attempt", ""))
        groups.setdefault(name, []).append(event)
    return groups


def _group_attempt_lines(lines: Sequence[JsonObject]) -> dict[str, list[JsonObject]]:
    """Group the lines of attempts.jsonl by attempt: its start, and its end if known. Drops an end without a start."""
    groups: dict[str, list[JsonObject]] = {}
    for line in lines:
        name = f"{line.get('job')}-{line.get('attempt')}"
        if line.get("event") == "start":
            groups[name] = [line]
        elif name in groups and line.get("event") in ("successor", "exclude"):
            groups[name][-1] = groups[name][-1] | {key: line[key] for key in ("successor", "excluded") if key in line}
        elif name in groups:
            groups[name].append(line)
    return groups


def _list_successors(lines: Iterable[JsonObject]) -> dict[str, str]:
    """Return which Slurm job continues the run of another: attempt.sh submits one where Slurm does not requeue."""
    pairs = [(str(line.get("job")), str(line.get("successor"))) for line in lines if line.get("event") == "successor"]
    return {job: later for job, later in pairs if re.fullmatch(r"\d+(_\d+)?", later)}


def _list_jobs(submission: JsonObject, lines: Sequence[JsonObject]) -> list[str]:
    """Return the Slurm jobs of a submission that are not over, in order: the one that packs, the one that trains."""
    successors = _list_successors(lines)
    first, training = str(submission.get("packing", "")), str(submission.get("job", ""))
    last = [_find_last_successor(job, successors) for job in (first, training)]
    has_packed = any(
        (line.get("job") == last[0] and line.get("cause") == "done")
        or (line.get("job") in (training, last[1]) and line.get("event") == "start")
        for line in lines
    )
    return last[1:] if not re.fullmatch(r"\d+", first) or has_packed else last


def _find_last_successor(job: str, successors: Mapping[str, str]) -> str:
    seen = set()
    while job in successors and job not in seen:
        seen.add(job)
        job = successors[job]
    return job


def _find_local_attempts(snapshot: RunSnapshot, attempts_with_events: Iterable[str]) -> set[str]:
    """Return the ids of attempts that no batch script recorded, including those that failed before training."""
    names = {*attempts_with_events, *(error.attempt for error in snapshot.errors)}
    names |= {str(snapshot.heartbeat.get("attempt", "")), snapshot.owner.attempt if snapshot.owner else ""}
    return {name for name in names if re.fullmatch(r"local-[0-9]{1,11}", name)}


def _build_slurm_attempt(
    snapshot: RunSnapshot, id: str, lines: Sequence[JsonObject], events: Sequence[JsonObject]
) -> Attempt:
    start, end = lines[0], lines[-1] if len(lines) > 1 else {}
    heartbeat = snapshot.get_heartbeat(id)
    ended = parse_time(end["time"]) if end else None
    if end.get("code") == -1:  # written when the next attempt started, which may be hours later
        ended = _find_last_activity(events, heartbeat)
    return Attempt(
        id=id,
        start=parse_time(start["time"]),
        end=ended,
        nodes=str(start.get("nodes", "")),
        cause=str(end.get("cause", "")),
        world_size=events[0].get("world_size") if events else None,
        steps=_find_step_range(events, heartbeat),
        slurm_job_id=str(start.get("job", "")),
        action=str(end.get("action", "")),
        excluded=str(end.get("excluded", "")),
        successor=str(end.get("successor", "")),
        code=end.get("code"),
        reason=str(end.get("reason", "")),
        only_packs=start.get("task") == "packing",
    )


def _find_last_activity(events: Sequence[JsonObject], heartbeat: JsonObject) -> float | None:
    times = [parse_time(event["time"]) for event in events] + ([float(heartbeat["time"])] if heartbeat else [])
    return max(times, default=None)


def _find_step_range(events: Sequence[JsonObject], heartbeat: JsonObject) -> tuple[int, int] | None:
    steps = [int(event.get("step", 0)) for event in events]
    return (steps[0], max(*steps, int(heartbeat.get("step") or 0))) if steps else None


def _build_local_attempt(snapshot: RunSnapshot, id: str, events: Sequence[JsonObject]) -> Attempt:
    errors = [error for error in snapshot.errors if error.attempt == id]
    heartbeat, first, last = snapshot.get_heartbeat(id), events[0] if events else {}, events[-1] if events else {}
    end = parse_time(last["time"]) if last.get("event") in ENDS else errors[0].time if errors else None
    if end is None and not snapshot.has_live_writer_here:
        end = _find_last_activity(events, heartbeat)
    return Attempt(
        id=id,
        start=float(id.removeprefix("local-")),
        end=end,
        nodes=str(first.get("host") or (errors[0].fields.get("host", "") if errors else "")),
        cause=_find_local_cause(last, errors),
        world_size=first.get("world_size"),
        steps=_find_step_range(events, heartbeat),
    )


def _find_local_cause(last: JsonObject, errors: Sequence[RankError]) -> str:
    if last.get("event") == "done":
        return "done"
    if last.get("event") == "stop":
        return str(last.get("reason", ""))
    causes = [error.cause for error in errors]
    return next((cause for cause in causes if cause != Cause.LOST_PEER), causes[0] if causes else "")
