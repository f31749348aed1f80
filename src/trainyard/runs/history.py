"""Reads a run folder: the submission, the attempts, and the errors of ranks.

Any file may be missing, incomplete, or torn by the loss of a node. Loads no torch.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.errors import UserError
from trainyard.runs.events import ENDS, STARTS
from trainyard.runs.folder import SUBMISSION
from trainyard.runs.lock import LOCK, Owner, read_owner
from trainyard.runs.state import Cause, read_cause

CANCELLED = "slurm/cancelled"
"""File that `trainyard cancel` creates in a run folder before it cancels the Slurm job."""

JsonObject = dict[str, Any]


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
    code: int | None = None  # exit code; -1: Slurm ended it before it could exit
    reason: str = ""  # why it ended, as the batch script recorded it


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
        return read_cause(str(self.fields.get("cause", Cause.BUG)))

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

    @property
    def slurm_job_id(self) -> str:
        """Id of the Slurm job of the latest submission; "" if it was not submitted to Slurm."""
        return str(self.submission.get("job", "")) if self.submission.get("scheduler") == "slurm" else ""

    @cached_property
    def attempts(self) -> list[Attempt]:
        return _build_attempts(self)  # oldest first

    @property
    def newest_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    def find_newest_attempt(self, slurm_job_id: str) -> Attempt | None:
        """Return the newest attempt of a Slurm job; with "": the newest that no scheduler started."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.slurm_job_id == slurm_job_id), None)

    @property
    def is_done(self) -> bool:
        """Whether the last attempt trained to the end."""
        starts_and_ends = (e["event"] for e in reversed(self.events) if e.get("event") in (*STARTS, *ENDS))
        return next(starts_and_ends, "") == "done"

    @property
    def has_live_writer_here(self) -> bool:
        """Whether a live process on this host writes to the run."""
        return self.owner is not None and self.owner.is_checkable_here() and self.owner.is_alive()

    @property
    def last_activity(self) -> float | None:
        """Time of the newest write of any kind."""
        times = [error.time for error in self.errors]
        times += [parse_time(lines[-1]["time"]) for lines in (self.starts_and_ends, self.events) if lines]
        times += [float(self.heartbeat["time"])] if self.heartbeat else []
        times += [self.log_changed] if self.log_changed is not None else []
        return max(times, default=None)

    def get_heartbeat(self, attempt: str) -> JsonObject:
        """Return the heartbeat if it is from this attempt, else an empty object."""
        return self.heartbeat if self.heartbeat.get("attempt") == attempt else {}


def read_run(run: Path) -> RunSnapshot:
    """Read a run folder."""
    log = run / "log"
    return RunSnapshot(
        run=run,
        submission=read_object(run / SUBMISSION),
        cancelled=(run / CANCELLED).exists(),
        starts_and_ends=[line for line in _read_json_lines(run / "slurm" / "attempts.jsonl") if "time" in line],
        events=[line for line in _read_json_lines(run / "events.jsonl") if "time" in line],
        heartbeat=read_object(run / "heartbeat.json"),
        errors=read_errors(run),
        owner=_read_owner(run),
        log_changed=log.stat().st_mtime if log.exists() else None,
    )


def read_errors(run: Path) -> list[RankError]:
    """Return the errors that ranks recorded in all attempts, oldest first."""
    found = ((path, read_object(path)) for path in run.glob("errors/*-rank*.json"))
    errors = [RankError(path.name.rpartition("-rank")[0], path, fields) for path, fields in found if fields]
    return sorted(errors, key=lambda error: error.time)


def read_object(path: Path) -> JsonObject:
    """Return the contents of a JSON file; an empty object if it is missing or torn."""
    return next(_parse_json([path.read_bytes()]), {}) if path.is_file() else {}


def locate_output_files(run: Path, submission: JsonObject) -> tuple[Path, Path]:
    """Return the paths of rank 0's standard output and standard error. The batch script also writes to the latter."""
    folder, job = Path(submission.get("folder", run / "slurm")), submission.get("job", "")
    return folder / f"{job}_0_log.out", folder / f"{job}_0_log.err"


def read_stderr(snapshot: RunSnapshot, attempt: Attempt | None) -> list[str]:
    """Return what the batch script, srun and rank 0 wrote to standard error in an attempt.

    All attempts of a Slurm job append to one file, each after a header line from attempt.sh.

    Args:
        attempt: None: the whole file of the latest submission, which has no attempt yet.
    """
    path = locate_output_files(snapshot.run, snapshot.submission | ({"job": attempt.slurm_job_id} if attempt else {}))[
        1
    ]
    text = path.read_text(errors="replace") if path.is_file() else ""
    if attempt is not None:
        text = (
            text.partition(f"{_ATTEMPT_HEADER} {attempt.id} on ")[2]
            .partition(f"{_ATTEMPT_HEADER} ")[0]
            .partition("\n")[2]
        )
    return text.splitlines()


def is_slurm_message(line: str) -> bool:
    """Tell whether srun or slurmstepd wrote this line."""
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
    return list(_parse_json(path.read_bytes().split(b"\n"))) if path.is_file() else []


def _parse_json(texts: Iterable[bytes]) -> Iterator[JsonObject]:
    for text in texts:
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


# Attempts, from the records of the batch script and of the training


def _build_attempts(snapshot: RunSnapshot) -> list[Attempt]:
    events, submitted = _group_events(snapshot.events), _group_attempt_lines(snapshot.starts_and_ends)
    attempts = [_build_slurm_attempt(snapshot, id, lines, events.get(id, [])) for id, lines in submitted.items()]
    attempts += [
        _build_local_attempt(snapshot, id, events.get(id, [])) for id in _find_local_attempts(snapshot, events)
    ]
    return sorted(attempts, key=lambda attempt: attempt.start)


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
        elif name in groups:
            groups[name].append(line)
    return groups


def _find_local_attempts(snapshot: RunSnapshot, attempts_with_events: Iterable[str]) -> set[str]:
    """Return the ids of attempts that no batch script recorded, including those that failed before training."""
    names = {
        *attempts_with_events,
        *(error.attempt for error in snapshot.errors),
        str(snapshot.heartbeat.get("attempt", "")),
    }
    names |= {snapshot.owner.attempt} if snapshot.owner is not None else set()
    return {name for name in names if re.fullmatch(r"local-\d+", name)}


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
        cause=read_cause(str(end.get("cause", ""))),
        world_size=events[0].get("world_size") if events else None,
        steps=_find_step_range(events, heartbeat),
        slurm_job_id=str(start["job"]),
        action=str(end.get("action", "")),
        code=end.get("code"),
        reason=str(end.get("reason", "")),
    )


def _find_last_activity(events: Sequence[JsonObject], heartbeat: JsonObject) -> float | None:
    return max(
        [*(parse_time(event["time"]) for event in events), *([float(heartbeat["time"])] if heartbeat else [])],
        default=None,
    )


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
        return read_cause(str(last.get("reason", "")))
    return errors[0].cause if errors else ""
