"""Run folders: creating them with a record of the environment, recording errors, finding runs by name.

Loads no torch.
"""

import errno
import itertools
import json
import re
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.config import freeze
from trainyard.environment import NO_VARIABLES, THIS_CODE, describe_environment, find_checkout
from trainyard.errors import DiskFull, NotFinite, UserError
from trainyard.files import create_common_folder, limit_writers, share_folder, write_json
from trainyard.masking import mask_text
from trainyard.runs.state import Cause
from trainyard.settings import TrainConfig
from trainyard.text import find_nearest, join_names

CONFIG = "config.yaml"
ENV_FILE = "env.json"
DIFF = "code.diff"
SUBMISSION = "slurm/submission.json"

# Creating a run


def create_run(
    root: Path,
    config: TrainConfig,
    *,
    name: str | None = None,
    environ: Mapping[str, str] = NO_VARIABLES,
    code: Path = THIS_CODE,
    group: str = "",
) -> Path:
    """Create the folder of a new run and return it. It is complete as soon as it is visible.

    The path is `<root>/<job>/<YYYYmmdd-HHMMSS>-<commit>` (local time; 7 digits of the commit, or "nogit"), with
    -2, -3, ... appended if it is taken. The folder contains config.yaml (every option), env.json
    (`environment_record`) and, if the checkout differs from its commit, code.diff.

    Args:
        root: folder of all runs; created if missing.
        name: name of the folder; default: time and commit.
        environ: environment variables; only a few known ones are recorded.
        code: any folder of the git checkout to record.
        group: whose members may add files to the run and delete checkpoints; "": only its owner can change it.

    Raises:
        UserError: `name` is not a plain file name, a run already has it, or this user is not in `group`.
    """
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(
            f"'{name}' cannot name a run. Use letters, digits and . _ + - only, and begin with a letter or digit."
        )
    checkout, diff = find_checkout(code)
    record = describe_environment(environ, checkout)
    for folder in (root, root / config.job):
        create_common_folder(folder, group=group)
    temporary = root / config.job / f".new-{secrets.token_hex(8)}"
    with limit_writers():
        temporary.mkdir()
        try:
            freeze(config, temporary / CONFIG)
            write_json(temporary / ENV_FILE, record)
            if diff:
                _write_diff(temporary / DIFF, diff, masked=checkout.get("masked", []))
            if group:
                (temporary / "checkpoints").mkdir()
                share_folder(temporary / "checkpoints", group, sticky=False)
                share_folder(temporary, group)
            default = f"{datetime.now():%Y%m%d-%H%M%S}-{(checkout['commit'] or 'nogit')[:7]}"
            return _move_into_place(temporary, name, default=default)
        except BaseException:
            shutil.rmtree(temporary)
            raise


def _write_diff(path: Path, diff: bytes, *, masked: Sequence[str]) -> None:
    """Write the diff for the run's owner alone: what was not committed may not be meant for others."""
    note = "".join(f"# masked, because it looks like a secret: {place}\n" for place in masked)
    path.touch(mode=0o600)
    path.write_bytes(note.encode() + diff)
    if masked:
        logger.warning("{}: masked what looks like secrets: {}", path.name, join_names(list(masked)))


def update_env(run: Path, section: str, values: Mapping[str, Any]) -> None:
    """Add `values` to one section of the run's env.json. For the run's owner only: two writers lose updates."""
    path = run / ENV_FILE
    record = json.loads(path.read_text(encoding="utf-8"))
    record[section] = {**record.get(section, {}), **values}
    write_json(path, record)


def _move_into_place(temporary: Path, name: str | None, *, default: str) -> Path:
    """Rename a finished folder to its final name. Renaming onto a non-empty folder fails, so no run is replaced."""
    number = 1
    while True:
        target = temporary.with_name(name or (default if number == 1 else f"{default}-{number}"))
        try:
            return temporary.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if name:
            raise UserError(
                f"{target}: there is a run of this name. Choose another, or resume it: trainyard resume {target}"
            )
        number += 1


# Recording errors


def record_error(run: Path, error: BaseException, *, attempt: str, rank: int) -> Path:
    """Write down why a rank failed, for `trainyard why`, and return the file.

    Each rank writes its own file: several may fail at once, and the file system may be the reason.
    """
    folder = run / "errors"
    folder.mkdir(exist_ok=True)
    path = folder / f"{attempt}-rank{rank}.json"
    content = {
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": mask_text(str(error)),
        "traceback": mask_text("".join(traceback.format_exception(error))),
        "cause": classify_error(error),
    }
    write_json(path, content)
    return path


def classify_error(error: BaseException) -> Cause:
    """Return the cause that an exception stands for. Matches torch's errors by name, because torch may be missing."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, NotFinite):
        return Cause.NOT_FINITE
    if isinstance(error, DiskFull):
        return Cause.DISK_FULL
    if isinstance(error, UserError):
        return Cause.USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return Cause.INTERRUPTED
    if name == "OutOfMemoryError":
        return Cause.DEVICE_OOM
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return Cause.HOST_OOM
    if name.startswith("Dist") or any(message in text for message in _LOST_PEER):
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


# Finding runs


def find_latest_run(root: Path, job: str) -> Path:
    """Return the most recently created run of a job.

    Raises:
        UserError: the job has no run in `root`.
    """
    runs = _list_runs(root)
    candidates = [run for run in runs if run.parent.name == job]
    if not candidates:
        others = sorted({run.parent.name for run in runs})
        have = f"There are runs of: {', '.join(others)}." if others else "There are no runs at all."
        raise UserError(f"{root}: no run of job '{job}'. {have} Start one: trainyard run {job}")
    return max(candidates, key=_read_creation_time)


def list_newest_runs(root: Path, count: int | None, *, job: str | None = None) -> list[Path]:
    """Return the `count` newest runs, newest first; all runs if `count` is None."""
    found = [run for run in _list_runs(root) if job in (None, run.parent.name)]
    return sorted(found, key=_read_creation_time, reverse=True)[:count]


def format_run_name(run: Path) -> str:
    """Return the short name that users type for a run: `<job>/<run>`."""
    return f"{run.parent.name}/{run.name}"


def find_free_name(path: Path) -> Path:
    """Return `path`, or path-2, path-3, ... if that is taken."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


def resolve_run(text: str, root: Path) -> Path:
    """Return the run that the user named.

    Args:
        text: a path; a job, for its newest run; or an unambiguous prefix of `<job>/<run>` or `<run>`.
        root: folder of all runs.

    Raises:
        UserError: no run matches, or several do; the message lists them.
    """
    if (Path(text) / CONFIG).is_file():
        return Path(text)
    named = {f"{run.parent.name}/{run.name}": run for run in _list_runs(root)}
    if any(run.parent.name == text for run in named.values()):
        return find_latest_run(root, text)
    exact = [name for name, run in named.items() if text in (name, run.name)]
    matches = exact or [name for name, run in named.items() if name.startswith(text) or run.name.startswith(text)]
    if len(matches) == 1:
        return named[matches[0]]
    if matches:
        raise UserError(
            f"{root}: {len(matches)} runs begin with '{text}': {join_names(matches)}. Type more of the name."
        )
    if not named:
        raise UserError(f"{root}: there are no runs, so none is '{text}'. Give the path of a run folder.")
    similar = find_nearest(text, {run.parent.name for run in named.values()} | set(named), most=3)
    newest = sorted(named, key=lambda name: _read_creation_time(named[name]), reverse=True)
    hint = f"Nearest: {join_names(similar)}." if similar else f"Newest: {join_names(newest[:3])}."
    raise UserError(f"{root}: no run is '{text}'. {hint} Give a path, a job, or the beginning of a run's name.")


def _list_runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/[!.]*/{CONFIG}"))


def _read_creation_time(run: Path) -> str:
    """Return when the run was created, as text in UTC that sorts by time."""
    try:
        return str(json.loads((run / ENV_FILE).read_text(encoding="utf-8"))["created"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{run / ENV_FILE}: does not say when the run was created ({error}). Every complete run folder does; move "
            "this one out of the folder of runs."
        ) from None
