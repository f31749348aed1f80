"""The folder of a run: created whole, recorded, owned by one writer, found again. Loads no torch, h5py or DALI."""

import contextlib
import difflib
import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loguru import logger

from trainyard.environment import NO_VARIABLES, THIS_CODE, checkout_of, environment_beside
from trainyard.errors import NotFinite, UserError
from trainyard.launch.config import freeze, write_atomically
from trainyard.settings import TrainConfig

CONFIG = "config.yaml"
RECORD = "env.json"
DIFF = "code.diff"
LOCK = "lock"
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
    checkout, diff = checkout_of(code)
    record = environment_beside(environ, checkout)
    family_of_runs = root / config.job
    family_of_runs.mkdir(parents=True, exist_ok=True)
    aside = family_of_runs / f".new-{secrets.token_hex(8)}"
    aside.mkdir()
    try:
        freeze(config, aside / CONFIG)
        write_atomically(aside / RECORD, _to_json(record))
        if diff:
            (aside / DIFF).write_bytes(diff)
        return _settle(aside, name, default=f"{datetime.now():%Y%m%d-%H%M%S}-{(checkout['commit'] or 'nogit')[:7]}")
    except BaseException:
        shutil.rmtree(aside)
        raise


def update_record(run: Path, section: str, values: Mapping[str, Any]) -> None:
    """Add `values` to one section of the run's env.json. For the owner of the run only: two writers lose updates."""
    path = run / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    record[section] = {**record.get(section, {}), **values}
    write_atomically(path, _to_json(record))


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


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


# One writer


@dataclass(frozen=True)
class Owner:
    """The process that writes to a run, such that no later process can be mistaken for it."""

    host: str
    boot_id: str
    pid_namespace: str  # a process id means nothing in the container next door
    pid: int
    started_ticks: int  # after boot
    since: str  # local time, for people
    attempt: str = ""  # "<Slurm job>-<restarts>", where Slurm started it

    @classmethod
    def me(cls, attempt: str) -> "Owner":
        started_ticks = _started_ticks(os.getpid())
        assert started_ticks is not None
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started_ticks=started_ticks,
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            attempt=attempt,
        )

    def is_judged_here(self) -> bool:
        """Whether a process of this one can tell if the owner lives. A reboot of this host does not matter."""
        if self.host != socket.gethostname():
            return False
        return self.boot_id != _boot_id() or self.pid_namespace == _pid_namespace()

    def lives(self) -> bool:
        """Whether the owner still runs, if `is_judged_here`."""
        return self.boot_id == _boot_id() and self.started_ticks == _started_ticks(self.pid)

    def is_succeeded_by(self, attempt: str) -> bool:
        """Whether Slurm has started the same job again, so that whatever is left of this attempt has lost its right."""
        (mine, _, number), (other, _, later) = self.attempt.rpartition("-"), attempt.rpartition("-")
        return bool(mine) and mine == other and number.isdigit() and later.isdigit() and int(number) < int(later)


class RunLock:
    """Makes this process the one writer of a run, for a `with` block.

    A lock whose process is dead is taken over, with a line in the log; of several processes that find it, one gets
    it. A forked child may leave the block without releasing its parent's lock. Works where `O_EXCL` does: local disks,
    NFS since version 3, Lustre. Taking over also needs flock.

    Args:
        run: folder of the run.
        break_other_host: take over a lock whose owner this host cannot see, too. Only for callers that know it dead.
        attempt: "<Slurm job>-<restarts>", or empty. A lock of an earlier attempt of the same job is taken over even if
            its owner lives: when a node is lost to Slurm but not dead, the job runs twice.

    Raises:
        UserError: on entering: the run has a living writer, or one that this host cannot judge.
    """

    def __init__(self, run: Path, *, break_other_host: bool = False, attempt: str = "") -> None:
        self._path = run / LOCK
        self._break_other_host = break_other_host
        self._attempt = attempt
        self._owner: Owner | None = None

    def check(self) -> None:
        """Stop a process that has lost its lock before it writes.

        Raises:
            UserError: another process has taken over the run.
        """
        found = read_owner(self._path)
        if found != self._owner:
            who = f"process {found.pid} on {found.host} writes to it now" if found else "its lock was deleted"
            raise UserError(f"{self._path.parent}: this attempt no longer owns the run: {who}. It stops here.")

    def __enter__(self) -> Self:
        owner = Owner.me(self._attempt)
        content = _to_json(asdict(owner))
        while not _create(self._path, content):
            with _alone_with(self._path):
                if self._take_over(content):
                    break
        self._owner = owner
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._owner is not None
        if self._owner.pid != os.getpid():
            return
        if read_owner(self._path) == self._owner:
            self._path.unlink()

    def _take_over(self, content: str) -> bool:
        """Replace a lock whose owner is dead, or return False if it was released meanwhile.

        Newcomers see the old lock or the new one, never none, so they come here too, and one at a time.
        """
        run, old = self._path.parent, read_owner(self._path)
        if old is None:
            return False
        if not old.is_succeeded_by(self._attempt):
            self._refuse_if_it_may_live(old)
        logger.warning(f"{run}: took over the lock that process {old.pid} on {old.host} held since {old.since}")
        write_atomically(self._path, content)
        return True

    def _refuse_if_it_may_live(self, old: Owner) -> None:
        run = self._path.parent
        who = f"process {old.pid} on {old.host} writes to this run since {old.since}"
        if old.is_judged_here():
            if old.lives():
                raise UserError(f"{run}: {who}. That is this host. Wait for it, or stop it: kill {old.pid}")
        elif not self._break_other_host:
            raise UserError(
                f"{run}: {who}, and cannot be seen from here. Look there whether it still runs: ps -p {old.pid}. If "
                "it does not, add --break-lock."
            )


def release(run: Path) -> None:
    """Delete the lock of a run whose Slurm job is over, for a caller who has asked Slurm.

    The owner may lie on a node that cannot be seen from here. Should it live against all appearances, it finds its
    lock gone at its next write, and stops.
    """
    owner = read_owner(run / LOCK)
    if owner is not None and owner.attempt and not (owner.is_judged_here() and owner.lives()):
        logger.info(f"{run}: released the lock of attempt {owner.attempt} on {owner.host}, whose job is over")
        (run / LOCK).unlink()


def _create(path: Path, content: str) -> bool:
    """Write a new file, or return False if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return True


def read_owner(path: Path) -> Owner | None:
    """Return who holds a lock, None if nobody does.

    Raises:
        UserError: the file is no lock.
    """
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: is not a readable lock: its writer is starting just now, or died while it started. Try again; "
            f"if this message comes back and nothing writes to the run, delete it: rm {path}"
        ) from None


@contextlib.contextmanager
def _alone_with(lock: Path) -> Iterator[None]:
    """Judge a lock while nobody else does; others wait the milliseconds that takes."""
    try:
        with alone(lock.with_name(f"{LOCK}.guard")):
            yield
    except FlockRefused as error:
        raise UserError(
            f"{lock.parent}: is locked, and this file system cannot tell whether for good ({error}). If nothing writes "
            f"to the run, delete the lock: rm {lock}"
        ) from None


class FlockRefused(Exception):
    """The file system knows no flock."""


@contextlib.contextmanager
def alone(guard: Path) -> Iterator[None]:
    """Hold an flock on the file `guard`, after those who hold it; the kernel frees it if the process dies.

    Raises:
        FlockRefused: on entering.
    """
    with guard.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise FlockRefused(error.strerror) from None
        yield


def _started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot, or None if there is none (proc(5), stat, field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""  # sandboxes such as gVisor have none


def _pid_namespace() -> str:
    link = Path("/proc/self/ns/pid")
    return str(link.readlink()) if link.is_symlink() else ""


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
    write_atomically(path, _to_json(content))
    return path


def cause_of(error: BaseException) -> str:
    """Return the kind of a failure in one word; torch's errors are known by name, because torch may be missing."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, NotFinite):
        return "not_finite"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if isinstance(error, UserError):
        return "user_error"
    if isinstance(error, KeyboardInterrupt):
        return "asked"
    if name == "OutOfMemoryError":
        return "device_oom"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return "host_oom"
    if name.startswith("Dist") or any(sign in text for sign in _LOST_PEER):
        return "lost_peer"
    return "bug"


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
        raise UserError(f"{root}: {len(matches)} runs begin with '{text}': {_some(matches)}. Type more of the name.")
    if not named:
        raise UserError(f"{root}: there are no runs, so none is '{text}'. Give the path of a run's folder.")
    near = difflib.get_close_matches(text, {run.parent.name for run in named.values()} | set(named), n=3)
    newest = sorted(named, key=lambda name: _created(named[name]), reverse=True)
    hint = f"Nearest: {_some(near)}." if near else f"Newest: {_some(newest[:3])}."
    raise UserError(f"{root}: no run is '{text}'. {hint} Give a path, a job, or the beginning of a run's name.")


def _runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/[!.]*/{CONFIG}"))


def _created(run: Path) -> str:
    """Return the time in UTC at which the run was created; such texts sort as their times do."""
    try:
        return str(json.loads((run / RECORD).read_text(encoding="utf-8"))["created"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{run / RECORD}: does not say when the run was created ({error}). A whole run folder has it; move this "
            "one out of the folder of runs."
        ) from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
