"""One writer for each run folder: the lock, its owner, and taking over from a dead one."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from loguru import logger

from trainyard.errors import UserError
from trainyard.files import FlockRefused, exclusive_lock, write_atomically

LOCK = "lock"


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
        content = json.dumps(asdict(owner), indent=2) + "\n"
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
        with exclusive_lock(lock.with_name(f"{LOCK}.guard")):
            yield
    except FlockRefused as error:
        raise UserError(
            f"{lock.parent}: is locked, and this file system cannot tell whether for good ({error}). If nothing writes "
            f"to the run, delete the lock: rm {lock}"
        ) from None


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
