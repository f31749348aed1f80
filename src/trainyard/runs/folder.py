"""The folder of a run: created whole, its environment recorded, found again by name. Loads no torch."""

import errno
import itertools
import json
import re
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from trainyard.config import freeze
from trainyard.environment import NO_VARIABLES, THIS_CODE, environment_beside, find_checkout
from trainyard.errors import NotFinite, UserError
from trainyard.files import DISK_FULL, write_json
from trainyard.runs.state import Cause
from trainyard.settings import TrainConfig
from trainyard.text import join_names, nearest

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
) -> Path:
    """Create the folder of a new run, complete from the moment it can be seen, and return it.

    It is `<root>/<job>/<YYYYmmdd-HHMMSS>-<commit>` (local time, 7 digits of the commit, or "nogit"), with -2, -3, ...
    appended where that is taken. It holds config.yaml (every option), env.json (`environment_record`) and, if the
    checkout differs from its commit, code.diff.

    Args:
        root: folder of all runs; made if it is missing.
        name: a name for the folder instead of time and commit.
        environ: environment variables; a few known ones are recorded, the rest is not.
        code: any folder of the git checkout whose state is recorded.

    Raises:
        UserError: `name` is not a plain file name, or a run bears it already.
    """
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(
            f"'{name}' cannot name a run. Use letters, digits and . _ + - only, and begin with a letter or digit."
        )
    checkout, diff = find_checkout(code)
    record = environment_beside(environ, checkout)
    family_of_runs = root / config.job
    family_of_runs.mkdir(parents=True, exist_ok=True)
    aside = family_of_runs / f".new-{secrets.token_hex(8)}"
    aside.mkdir()
    try:
        freeze(config, aside / CONFIG)
        write_json(aside / ENV_FILE, record)
        if diff:
            (aside / DIFF).write_bytes(diff)
        return _settle(aside, name, default=f"{datetime.now():%Y%m%d-%H%M%S}-{(checkout['commit'] or 'nogit')[:7]}")
    except BaseException:
        shutil.rmtree(aside)
        raise


def update_env(run: Path, section: str, values: Mapping[str, Any]) -> None:
    """Add `values` to one section of the run's env.json. For the owner of the run only: two writers lose updates."""
    path = run / ENV_FILE
    record = json.loads(path.read_text(encoding="utf-8"))
    record[section] = {**record.get(section, {}), **values}
    write_json(path, record)


def _settle(aside: Path, name: str | None, *, default: str) -> Path:
    """Rename a finished folder to its place. A rename onto a folder with content fails, so no run is replaced."""
    attempt = 1
    while True:
        target = aside.with_name(name or (default if attempt == 1 else f"{default}-{attempt}"))
        try:
            return aside.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if name:
            raise UserError(
                f"{target}: there is a run of this name. Choose another, or resume it: trainyard resume {target}"
            )
        attempt += 1


# One writer


# What went wrong


def record_error(run: Path, error: BaseException, *, attempt: str, rank: int) -> Path:
    """Write why a rank failed, for `trainyard why`, and return the file.

    Several ranks may fail at once, and the file system may be the reason, so each writes its own file.
    """
    folder = run / "errors"
    folder.mkdir(exist_ok=True)
    path = folder / f"{attempt}-rank{rank}.json"
    content = {
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "cause": cause_of(error),
    }
    write_json(path, content)
    return path


def cause_of(error: BaseException) -> Cause:
    """Return the kind of a failure in one word; torch's errors are known by name, because torch may be missing."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, NotFinite):
        return Cause.NOT_FINITE
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Cause.DISK_FULL
    if isinstance(error, UserError):
        return Cause.USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return Cause.INTERRUPTED
    if name == "OutOfMemoryError":
        return Cause.DEVICE_OOM
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return Cause.HOST_OOM
    if name.startswith("Dist") or any(sign in text for sign in _LOST_PEER):
        return Cause.LOST_PEER
    return Cause.BUG


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "Socket Timeout",
)
"""What gloo, NCCL and the store say in the ranks that are left when one has died."""


# Finding a run


def latest_run(root: Path, job: str) -> Path:
    """Return the run of a job that was created last.

    Raises:
        UserError: the job has no run in `root`.
    """
    runs = _runs(root)
    candidates = [run for run in runs if run.parent.name == job]
    if not candidates:
        others = sorted({run.parent.name for run in runs})
        have = f"There are runs of: {', '.join(others)}." if others else "There are no runs at all."
        raise UserError(f"{root}: no run of job '{job}'. {have} Start one: trainyard run {job}")
    return max(candidates, key=_created)


def newest(root: Path, count: int | None, *, job: str | None = None) -> list[Path]:
    """Return the newest runs, newest first; all if `count` is None."""
    found = [run for run in _runs(root) if job in (None, run.parent.name)]
    return sorted(found, key=_created, reverse=True)[:count]


def short_name(run: Path) -> str:
    """Return what people type for a run in the usual folder."""
    return f"{run.parent.name}/{run.name}"


def free_name(path: Path) -> Path:
    """Return `path`, or path-2, path-3, ... where that is taken."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


def resolve_run(text: str, root: Path) -> Path:
    """Return the run that a person names.

    Args:
        text: a path; or a job, for its newest run; or the beginning of `<job>/<run>` or `<run>` that only one run has.
        root: folder of all runs.

    Raises:
        UserError: no run is so named, or several are; names them.
    """
    if (Path(text) / CONFIG).is_file():
        return Path(text)
    named = {f"{run.parent.name}/{run.name}": run for run in _runs(root)}
    if any(run.parent.name == text for run in named.values()):
        return latest_run(root, text)
    exact = [name for name, run in named.items() if text in (name, run.name)]
    matches = exact or [name for name, run in named.items() if name.startswith(text) or run.name.startswith(text)]
    if len(matches) == 1:
        return named[matches[0]]
    if matches:
        raise UserError(
            f"{root}: {len(matches)} runs begin with '{text}': {join_names(matches)}. Type more of the name."
        )
    if not named:
        raise UserError(f"{root}: there are no runs, so none is '{text}'. Give the path of a run's folder.")
    near = nearest(text, {run.parent.name for run in named.values()} | set(named), most=3)
    newest = sorted(named, key=lambda name: _created(named[name]), reverse=True)
    hint = f"Nearest: {join_names(near)}." if near else f"Newest: {join_names(newest[:3])}."
    raise UserError(f"{root}: no run is '{text}'. {hint} Give a path, a job, or the beginning of a run's name.")


def _runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/[!.]*/{CONFIG}"))


def _created(run: Path) -> str:
    """Return the time in UTC at which the run was created; such texts sort as their times do."""
    try:
        return str(json.loads((run / ENV_FILE).read_text(encoding="utf-8"))["created"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{run / ENV_FILE}: does not say when the run was created ({error}). A whole run folder has it; move this "
            "one out of the folder of runs."
        ) from None
