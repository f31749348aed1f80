"""What the folder of a run says: its submission, its attempts, and what went wrong first in one of them.

Any of its files may be missing, half written, or torn by the loss of a node. Loads no torch.
"""

import json
import re
import signal
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
"""The mark of our own `cancel` in the folder of a run."""

Object = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are seconds since the epoch."""

    id: str  # <job>-<number>, or local-<second of its start>
    start: float
    end: float | None  # the last that was seen of it, where it was ended from outside; None while it runs
    nodes: str
    cause: str  # a `Cause`, "signal <n>", or "done"; "" if it did not say
    world_size: int | None  # None: it did not come so far as to train
    steps: tuple[int, int] | None  # first, and last that was written down
    slurm_job_id: str = ""  # "" if no scheduler started it, as the following
    action: str = ""  # requeue | slurm | stop: who started it again, if anybody; "" while it runs
    code: int | None = None  # exit code; -1: Slurm ended it before it could leave
    reason: str = ""  # of its end, in the words of the batch script


class Fault(NamedTuple):
    """What went wrong first in an attempt."""

    cause: str
    who: str
    lines: list[str]  # for a screen


class RankError(NamedTuple):
    """What one rank wrote down when it failed."""

    attempt: str
    path: Path
    fields: Object

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
    def what(self) -> str:
        return f"{self.fields.get('type', 'Error')}: {self.fields.get('message', '')}".rstrip(": \n")


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that the folder of a run says, read once."""

    run: Path
    submission: Object
    cancelled: bool
    starts_and_ends: list[Object]  # of attempts.jsonl
    events: list[Object]
    heartbeat: Object
    errors: list[RankError]  # oldest first
    owner: Owner | None  # of the lock
    log_changed: float | None

    @property
    def slurm_job_id(self) -> str:
        """Return the id of the Slurm job that it was submitted as last; "" if Slurm is not concerned."""
        return str(self.submission.get("job", "")) if self.submission.get("scheduler") == "slurm" else ""

    @cached_property
    def attempts(self) -> list[Attempt]:
        return _attempts(self)  # oldest first

    @property
    def newest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    def newest_of(self, slurm_job_id: str) -> Attempt | None:
        """Return the last attempt of a Slurm job; "": of those that no scheduler started."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.slurm_job_id == slurm_job_id), None)

    @property
    def is_done(self) -> bool:
        """Tell whether its last attempt trained to the end."""
        told = (e["event"] for e in reversed(self.events) if e.get("event") in (*STARTS, *ENDS))
        return next(told, "") == "done"

    @property
    def is_held_here(self) -> bool:
        """Tell whether a living process of this host writes to it."""
        return self.owner is not None and self.owner.is_judged_here() and self.owner.lives()

    @property
    def last_activity(self) -> float | None:
        """Return when anything was written last."""
        signs = [error.time for error in self.errors]
        signs += [seconds(lines[-1]["time"]) for lines in (self.starts_and_ends, self.events) if lines]
        signs += [float(self.heartbeat["time"])] if self.heartbeat else []
        signs += [self.log_changed] if self.log_changed is not None else []
        return max(signs, default=None)

    def beat_of(self, attempt: str) -> Object:
        """Return the heartbeat if it is this attempt's, else nothing."""
        return self.heartbeat if self.heartbeat.get("attempt") == attempt else {}


def read_run(run: Path) -> RunSnapshot:
    """Read the folder of a run."""
    log = run / "log"
    return RunSnapshot(
        run=run,
        submission=read_object(run / SUBMISSION),
        cancelled=(run / CANCELLED).exists(),
        starts_and_ends=[line for line in _lines(run / "slurm" / "attempts.jsonl") if "time" in line],
        events=[line for line in _lines(run / "events.jsonl") if "time" in line],
        heartbeat=read_object(run / "heartbeat.json"),
        errors=read_errors(run),
        owner=_owner(run),
        log_changed=log.stat().st_mtime if log.exists() else None,
    )


def read_errors(run: Path) -> list[RankError]:
    """Return what the ranks of all attempts wrote down when they failed, oldest first."""
    found = ((path, read_object(path)) for path in run.glob("errors/*-rank*.json"))
    errors = [RankError(path.name.rpartition("-rank")[0], path, fields) for path, fields in found if fields]
    return sorted(errors, key=lambda error: error.time)


def read_object(path: Path) -> Object:
    """Return what a JSON file holds; nothing if it is missing or torn."""
    return next(_decoded([path.read_bytes()]), {}) if path.is_file() else {}


def output_files(run: Path, submission: Object) -> tuple[Path, Path]:
    """Return the files of rank 0's standard output and error. The latter is the batch script's, too."""
    folder, job = Path(submission.get("folder", run / "slurm")), submission.get("job", "")
    return folder / f"{job}_0_log.out", folder / f"{job}_0_log.err"


def stderr_of(folder: RunSnapshot, attempt: Attempt | None) -> list[str]:
    """Return what the batch script, srun and rank 0 wrote to standard error in an attempt; None: before any began.

    All attempts of a job append to one file, each after a line of attempt.sh.
    """
    path = output_files(folder.run, folder.submission | ({"job": attempt.slurm_job_id} if attempt else {}))[1]
    text = path.read_text(errors="replace") if path.is_file() else ""
    if attempt is not None:
        text = text.partition(f"{_BEGINS} {attempt.id} on ")[2].partition(f"{_BEGINS} ")[0].partition("\n")[2]
    return text.splitlines()


def is_complaint(line: str) -> bool:
    """Tell whether srun or slurmstepd wrote this line."""
    return re.match(r"(srun|slurmstepd)(-\S+)?: ", line) is not None


def seconds(text: str) -> float:
    """Return a time in ISO 8601 as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


_BEGINS = "trainyard: attempt"


def _owner(run: Path) -> Owner | None:
    """Return who holds the lock. One that cannot be read belongs to a process that starts now or died starting."""
    try:
        return read_owner(run / LOCK)
    except UserError:
        return None


def _lines(path: Path) -> list[Object]:
    """Return the whole lines of a file of JSON lines; the next attempt appends behind what a lost node left torn."""
    return list(_decoded(path.read_bytes().split(b"\n"))) if path.is_file() else []


def _decoded(texts: Iterable[bytes]) -> Iterator[Object]:
    for text in texts:
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


# Attempts: what the batch script and the training wrote, put together


def _attempts(folder: RunSnapshot) -> list[Attempt]:
    sessions, submitted = _sessions(folder.events), _by_attempt(folder.starts_and_ends)
    attempts = [_submitted(folder, name, lines, sessions.get(name, [])) for name, lines in submitted.items()]
    attempts += [_local(folder, name, sessions.get(name, [])) for name in _local_names(folder, sessions)]
    return sorted(attempts, key=lambda attempt: attempt.start)


def _sessions(events: Sequence[Object]) -> dict[str, list[Object]]:
    """Group events by the attempt that their `start` or `resume` names; "": those of none, in a torn file."""
    sessions: dict[str, list[Object]] = {}
    name = ""
    for event in events:
        if event.get("event") in STARTS:
            name = str(event.get("attempt", ""))
        sessions.setdefault(name, []).append(event)
    return sessions


def _by_attempt(lines: Sequence[Object]) -> dict[str, list[Object]]:
    """Group the lines of attempts.jsonl: a start, and its end if it is known. An end without a start is dropped."""
    groups: dict[str, list[Object]] = {}
    for line in lines:
        name = f"{line.get('job')}-{line.get('attempt')}"
        if line.get("event") == "start":
            groups[name] = [line]
        elif name in groups:
            groups[name].append(line)
    return groups


def _local_names(folder: RunSnapshot, sessions: Iterable[str]) -> set[str]:
    """Return the attempts that no batch script recorded: those that trained, and those that did not come so far."""
    names = {*sessions, *(error.attempt for error in folder.errors), str(folder.heartbeat.get("attempt", ""))}
    names |= {folder.owner.attempt} if folder.owner is not None else set()
    return {name for name in names if re.fullmatch(r"local-\d+", name)}


def _submitted(folder: RunSnapshot, name: str, lines: Sequence[Object], session: Sequence[Object]) -> Attempt:
    start, end = lines[0], lines[-1] if len(lines) > 1 else {}
    beat = folder.beat_of(name)
    ended = seconds(end["time"]) if end else None
    if end.get("code") == -1:  # written when the next attempt started, which may be hours later
        ended = _last_seen(session, beat)
    return Attempt(
        id=name,
        start=seconds(start["time"]),
        end=ended,
        nodes=str(start.get("nodes", "")),
        cause=read_cause(str(end.get("cause", ""))),
        world_size=session[0].get("world_size") if session else None,
        steps=_steps(session, beat),
        slurm_job_id=str(start["job"]),
        action=str(end.get("action", "")),
        code=end.get("code"),
        reason=str(end.get("reason", "")),
    )


def _last_seen(session: Sequence[Object], beat: Object) -> float | None:
    return max([*(seconds(event["time"]) for event in session), *([float(beat["time"])] if beat else [])], default=None)


def _steps(session: Sequence[Object], beat: Object) -> tuple[int, int] | None:
    steps = [int(event.get("step", 0)) for event in session]
    return (steps[0], max(*steps, int(beat.get("step") or 0))) if steps else None


def _local(folder: RunSnapshot, name: str, session: Sequence[Object]) -> Attempt:
    errors = [error for error in folder.errors if error.attempt == name]
    beat, first, last = folder.beat_of(name), session[0] if session else {}, session[-1] if session else {}
    end = seconds(last["time"]) if last.get("event") in ENDS else errors[0].time if errors else None
    if end is None and not folder.is_held_here:
        end = _last_seen(session, beat)
    return Attempt(
        id=name,
        start=float(name.removeprefix("local-")),
        end=end,
        nodes=str(first.get("host") or (errors[0].fields.get("host", "") if errors else "")),
        cause=_local_cause(last, errors),
        world_size=first.get("world_size"),
        steps=_steps(session, beat),
    )


def _local_cause(last: Object, errors: Sequence[RankError]) -> str:
    if last.get("event") == "done":
        return "done"
    if last.get("event") == "stop":
        return read_cause(str(last.get("reason", "")))
    return errors[0].cause if errors else ""


# What went wrong first

_RANK_ENDED = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>[^(]+)")
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out of memory", re.IGNORECASE)
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


def first_fault(folder: RunSnapshot, attempt: Attempt) -> Fault | None:
    """Return what went wrong first: a rank's own error, else what srun says of a killed one, else its consequence."""
    errors = [error for error in folder.errors if error.attempt == attempt.id]
    own = [error for error in errors if error.cause != Cause.LOST_PEER]
    return _by_error(own) or _by_srun(folder, attempt) or _by_error(errors)


def _by_error(errors: Sequence[RankError]) -> Fault | None:
    if not errors:
        return None
    first = errors[0]
    place = _place(str(first.fields.get("traceback", "")))
    lines = [f"{first.who}: {first.what}", *([f"  {place}"] if place else []), f"  whole traceback: {first.path}"]
    return Fault(first.cause, first.who, lines)


def _place(traceback: str) -> str:
    """Return the last place of a traceback that lies in the user's code, or else in any, with the line itself."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in (\S+)\n(?:    (?![\^~ ])(.*)\n)?', traceback, re.MULTILINE)
    foreign = re.compile(r"/(site|dist)-packages/|/lib/python3|/trainyard/(data|train|launch|tools|cli)/|^<")
    theirs = [frame for frame in frames if not foreign.search(frame[0])]
    if not frames:
        return ""
    path, line, function, text = (theirs or frames)[-1]
    return f"{path}:{line} in {function}" + (f": {text.strip()}" if text else "")


def _by_srun(folder: RunSnapshot, attempt: Attempt) -> Fault | None:
    """Read what srun and slurmstepd wrote, else srun's exit code. The first rank to end drew the others after it."""
    said = [line for line in stderr_of(folder, attempt) if is_complaint(line)]
    ended = [match for line in said if (match := _RANK_ENDED.search(line))]
    killed = [match for match in ended if match["how"].strip() in _SIGNALS]
    memory = [line for line in said if _OUT_OF_MEMORY.search(line)]
    culprits = [match for match in ended if _OUT_OF_MEMORY.search(match["how"])] or killed
    who = f"rank {culprits[0]['ranks']} on {culprits[0]['node']}" if culprits else f"on {attempt.nodes}"
    if memory:
        return Fault(Cause.HOST_OOM, who, memory[:2])
    if killed:
        return Fault(f"signal {_SIGNALS[killed[0]['how'].strip()]}", who, [killed[0].string])
    if attempt.code is not None and attempt.code > 128:
        number = attempt.code - 128
        return Fault(f"signal {number}", who, [f"srun ended with code {attempt.code}: signal {number}"])
    return None
