"""Run folders: the record of the environment, the errors of ranks, and finding runs by name.

Loads no torch.
"""

import bisect
import contextlib
import errno
import itertools
import json
import re
import socket
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.choice import Choice
from trainyard.errors import (
    DiskError,
    DiskFull,
    Hung,
    Killed,
    NoDeterministicKernel,
    NotFinite,
    OutOfDeviceMemory,
    PeerFailed,
    UserError,
    Vanished,
    is_out_of_memory,
)
from trainyard.files import DISK_THREADS, FORMATS, RUN, check_format, load_json, write_json
from trainyard.masking import mask_text
from trainyard.runs.manifest import hash_fields
from trainyard.runs.state import Cause
from trainyard.text import find_nearest, join_names

CONFIG = "config.yaml"
ENV_FILE = "env.json"
DIFF = "code.diff"
SUBMISSION = "slurm/submission.json"


class EnvChanged(UserError):
    """env.json is readable, but not as the run wrote it."""


# The environment record


def update_env(run: Path, section: str, values: Mapping[str, Any]) -> None:
    """Add `values` to one section of the run's env.json. For the run's owner only: two writers lose updates.

    Raises:
        UserError: as for `read_env`.
    """
    record = read_env(run)
    write_env(run, {**record, section: {**record.get(section, {}), **values}})


def record_choices(run: Path, choices: Mapping[str, Choice[Any]]) -> None:
    """Record choices with their reasons in the run's env.json; raises, and is for whom, as `update_env`."""
    update_env(run, "choices", {name: choice._asdict() for name, choice in choices.items()})


def write_env(run: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write env.json with the number of the run's format and a digest of its content.

    Args:
        durable: as of `files.open_atomically`; off in a folder that `files.rename` flushes.
    """
    fields = json.loads(json.dumps({"format": FORMATS[RUN], **record}))  # as read back: string keys, no tuples
    write_json(run / ENV_FILE, {**fields, ENV_DIGEST: hash_fields(fields)}, durable=durable)


def read_env(run: Path, *, checked: bool = True) -> dict[str, Any]:
    """Return the content of env.json, without its format number and digest.

    Args:
        checked: compare it with its digest.

    Raises:
        FormatError: the run is of another format.
        UserError: it cannot be read, is not a JSON object, or does not match its digest.
    """
    path = run / ENV_FILE
    try:
        record = load_json(path, most_bytes=_MOST_ENV_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"{path}: is damaged, not JSON: {error}.") from None
    if not isinstance(record, dict) or any(not isinstance(record.get(name, {}), dict) for name in _ENV_SECTIONS):
        raise UserError(f"{path}: is damaged: expected a JSON object with objects in it, found {str(record)[:60]}.")
    stated = record.pop(ENV_DIGEST, None)
    if checked and stated != hash_fields(record):
        raise EnvChanged(f"{path}: was changed: its content does not match the digest in it.")
    check_format(path, record.pop("format", None), kind=RUN)
    return record


def select_fixed_env(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of env.json that is written when the run is created, and never again."""
    return {name: record[name] for name in ("created", "versions", "machine", "code", "environ") if name in record}


ENV_DIGEST = "sha256"
_ENV_SECTIONS = ("choices", "data", "machine", "versions", "code", "environ")
_MOST_ENV_BYTES = 16 * 2**20


# Recording errors


def record_error(
    run: Path, error: BaseException, *, attempt: str, rank: int, host: str = "", by: int | None = None
) -> Path:
    """Write down why a rank failed, for `trainyard why`, and return the file.

    Each rank writes its own file: several may fail at once, and the file system may be the reason.

    Args:
        rank: which failed.
        host: where it ran; "": here.
        by: the rank that writes this; None: `rank` itself.
    """
    path = find_error_file(run, attempt=attempt, rank=rank if by is None else by)
    content = {
        "time": time.time(),
        "rank": rank,
        "host": host or socket.gethostname(),
        "type": type(error).__name__,
        "message": mask_text(str(error)),
        "traceback": mask_text("".join(traceback.format_exception(error))),
        "cause": classify_error(error),
    }
    if isinstance(error, NoDeterministicKernel):
        content["operator"] = error.operator
    if isinstance(error, OutOfDeviceMemory):
        content |= {**error.details, "next_micro_batch_size": error.next_micro_batch_size}
    write_json(path, content, inside=True)
    return path


def find_error_file(run: Path, *, attempt: str, rank: int) -> Path:
    """Return the file in which a rank records why it failed; it may not exist."""
    return run / "errors" / f"{attempt}-rank{rank}.json"


def classify_error(error: BaseException) -> str:
    """Return the cause that an exception stands for. Matches torch's errors by name, because torch may be missing."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, Killed):
        return f"signal {error.number}"
    if isinstance(error, Vanished):
        return Cause.CRASH
    if isinstance(error, Hung):
        return Cause.HUNG
    if isinstance(error, OutOfDeviceMemory) or is_out_of_memory(error):
        return Cause.DEVICE_OOM
    if isinstance(error, NotFinite):
        return Cause.NOT_FINITE
    if isinstance(error, DiskFull):
        return Cause.DISK_FULL
    if isinstance(error, DiskError):
        return Cause.DISK_ERROR
    if isinstance(error, UserError):
        return Cause.USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return Cause.INTERRUPTED
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return Cause.HOST_OOM
    if isinstance(error, PeerFailed) or name.startswith("Dist") or any(message in text for message in _LOST_PEER):
        return Cause.LOST_PEER
    return Cause.BUG


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "Socket Timeout",
)
"""Messages of gloo, NCCL and the store in the surviving ranks after one has died."""


# Naming and finding runs


def check_name(name: str | None, *, of: str) -> None:
    """Raise a UserError if a name is not a plain file name; None is no name.

    Args:
        of: its kind: a run or a sweep.
    """
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(
            f"'{name}' cannot name a {of}. Use letters, digits and . _ + - only, and begin with a letter or digit."
        )


def find_latest_run(root: Path, job: str, *, trained: bool = False) -> Path:
    """Return the most recently created run of a job.

    Args:
        trained: pass over runs without a checkpoint, if any run has one.

    Raises:
        UserError: the job has no run in `root`.
    """
    runs = _list_change_times(root)
    candidates = sorted(((latest, run) for run, latest in runs.items() if run.parent.name == job), reverse=True)
    if not candidates:
        others = sorted({run.parent.name for run in runs})
        have = f"There are runs of: {', '.join(others)}." if others else "There are no runs at all."
        raise UserError(f"{root}: no run of job '{job}'. {have} Start one: trainyard run {job}")
    if trained and (with_weights := [pair for pair in candidates if any((pair[1] / "checkpoints").glob("*.ckpt"))]):
        passed_over = candidates.index(with_weights[0])
        candidates = with_weights
        if passed_over:
            logger.info("{}: newest run of {} with weights", candidates[0][1], job)
    created: dict[Path, str] = {}
    damaged = []
    for latest, run in candidates:
        if created and max(created.values()) > latest:
            break
        try:
            created[run] = read_creation_time(run)
        except UserError as error:
            damaged.append(str(error))
    if not created:
        raise UserError("\n".join(damaged))
    for problem in damaged:
        logger.warning("{} So it is not considered when the newest run of {} is chosen.", problem, job)
    return max(created, key=lambda run: created[run])


def list_newest_runs(root: Path, count: int | None, *, job: str | None = None) -> list[Path]:
    """Return the `count` newest runs, newest first; all runs if `count` is None.

    Opens a few files more than `count`: no run is newer than its options.
    """
    newest: list[tuple[str, Path]] = []
    changed = ((latest, run) for run, latest in _list_change_times(root).items() if job in (None, run.parent.name))
    for latest, run in sorted(changed, reverse=True):  # none was created after its options were last written
        if len(newest) == count and newest[0][0] > latest:
            break
        bisect.insort(newest, (estimate_creation_time(run), run))  # the oldest first
        if count is not None:
            del newest[:-count]
    return [run for _, run in reversed(newest)]


def format_run_name(run: Path) -> str:
    """Return the short name that users type for a run: `<job>/<run>`."""
    return f"{run.parent.name}/{run.name}"


def find_free_name(path: Path) -> Path:
    """Return `path`, or path-2, path-3, ... if that is taken."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


def resolve_run(text: str, root: Path, *, trained: bool = False) -> Path:
    """Return the run that the user named.

    Args:
        text: a path; a job, for its newest run; or an unambiguous prefix of `<job>/<run>` or `<run>`.
        root: folder of all runs.
        trained: of a job, as for `find_latest_run`.

    Raises:
        UserError: no run matches, or several do; the message lists them.
    """
    if (Path(text) / CONFIG).is_file():
        return Path(text)
    named = {f"{run.parent.name}/{run.name}": run for run in list_runs(root)}
    if any(run.parent.name == text for run in named.values()):
        return find_latest_run(root, text, trained=trained)
    exact = [name for name, run in named.items() if text in (name, run.name)]
    matches = exact or [name for name, run in named.items() if name.startswith(text) or run.name.startswith(text)]
    if len(matches) == 1:
        return named[matches[0]]
    if matches:
        raise UserError(
            f"{root}: {len(matches)} runs begin with '{text}': {join_names(matches)}. Type more of the name."
        )
    if not named:
        raise UserError(
            f"{root}: there are no runs, so none is '{text}'. Start one: trainyard run JOB (trainyard jobs lists "
            "them), or give the path of a run folder."
        )
    similar = find_nearest(text, {run.parent.name for run in named.values()} | set(named), most=3)
    newest = sorted(named, key=lambda name: estimate_creation_time(named[name]), reverse=True)
    hint = f"Nearest: {join_names(similar)}." if similar else f"Newest: {join_names(newest[:3])}."
    raise UserError(f"{root}: no run is '{text}'. {hint} Give a path, a job, or the beginning of a run's name.")


def list_runs(root: Path) -> list[Path]:
    """Return all runs by name, without opening a file of theirs."""
    return sorted(_list_change_times(root))


def read_creation_time(run: Path) -> str:
    """Return when the run was created, as text in UTC that sorts by time.

    Raises:
        UserError: its env.json is damaged.
    """
    created = read_env(run).get("created")
    if not isinstance(created, str):
        raise UserError(
            f"{run / ENV_FILE}: does not say when the run was created. Every complete run folder does; move this one "
            "out of the folder of runs."
        )
    return created


def estimate_creation_time(run: Path) -> str:
    """Return when the run was created, or its options changed if that is damaged: to list it among the others."""
    try:
        return read_creation_time(run)
    except UserError:
        return _read_change_time(run / CONFIG)


def _list_change_times(root: Path) -> dict[Path, str]:
    """Return when the options of each run were last written. Asks the file system once for each run."""
    runs: list[Path] = []
    for job in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(NotADirectoryError, PermissionError):  # another user's: not among this user's runs
            runs += (run for run in job.iterdir() if not run.name.startswith("."))

    def read(run: Path) -> str:
        try:
            return _read_change_time(run / CONFIG)
        except OSError as error:  # Python has no exception class for ELOOP
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
                raise
            return ""

    with ThreadPoolExecutor(DISK_THREADS) as pool:
        return {run: changed for run, changed in zip(runs, pool.map(read, runs), strict=True) if changed}


def _read_change_time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="microseconds")
