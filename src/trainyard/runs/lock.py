"""The lock that gives each run folder one writer: taking it, and taking it over from a dead owner."""

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
    """The process that writes to a run, identified so that no later process can be mistaken for it."""

    host: str
    boot_id: str
    pid_namespace: str  # a process id is valid only inside its container
    pid: int
    started_ticks: int  # after boot
    since: str  # local time, for users
    attempt: str = ""  # "<Slurm job id>-<restarts>" if Slurm started it

    @classmethod
    def from_this_process(cls, attempt: str) -> "Owner":
        started_ticks = _read_started_ticks(os.getpid())
        assert started_ticks is not None
        return cls(
            host=socket.gethostname(),
            boot_id=_read_boot_id(),
            pid_namespace=_read_pid_namespace(),
            pid=os.getpid(),
            started_ticks=started_ticks,
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            attempt=attempt,
        )

    def is_checkable_here(self) -> bool:
        """Tell whether this process can find out if the owner is alive, even across a reboot of this host."""
        if self.host != socket.gethostname():
            return False
        return self.boot_id != _read_boot_id() or self.pid_namespace == _read_pid_namespace()

    def is_alive(self) -> bool:
        """Tell whether the owner still runs. Valid only if `is_checkable_here`."""
        return self.boot_id == _read_boot_id() and self.started_ticks == _read_started_ticks(self.pid)

    def is_superseded_by(self, attempt: str) -> bool:
        """Tell whether `attempt` is a later start of the same Slurm job: then this owner may not write any more."""
        (mine, _, number), (other, _, later) = self.attempt.rpartition("-"), attempt.rpartition("-")
        return bool(mine) and mine == other and number.isdigit() and later.isdigit() and int(number) < int(later)


class RunLock:
    """Makes this process the only writer of a run, for a `with` block.

    The lock of a dead process is taken over and the takeover is logged; if several processes try, exactly one
    succeeds. A forked child may leave the block without releasing its parent's lock. Works where `O_EXCL` works:
    local disks, NFS version 3 and later, Lustre. Taking over also needs flock.

    Args:
        run: folder of the run.
        break_other_host: also take over a lock whose owner this host cannot see. Only for callers that know it is dead.
        attempt: "<Slurm job id>-<restarts>", or empty. The lock of an earlier attempt of the same Slurm job is taken
            over even if its owner is alive: when Slurm loses a node that keeps running, the job runs twice.

    Raises:
        UserError: on entering, if the run has a living writer or one that this host cannot check.
    """

    def __init__(self, run: Path, *, break_other_host: bool = False, attempt: str = "") -> None:
        self._path = run / LOCK
        self._break_other_host = break_other_host
        self._attempt = attempt
        self._owner: Owner | None = None

    def check(self) -> None:
        """Raise if this process has lost its lock. Call it before each write.

        Raises:
            UserError: another process has taken over the run.
        """
        found = read_owner(self._path)
        if found != self._owner:
            who = f"process {found.pid} on {found.host} writes to it now" if found else "its lock was deleted"
            raise UserError(f"{self._path.parent}: this attempt no longer owns the run: {who}. It stops here.")

    def __enter__(self) -> Self:
        owner = Owner.from_this_process(self._attempt)
        content = json.dumps(asdict(owner), indent=2) + "\n"
        while not _create(self._path, content):
            with _guard(self._path):
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
        """Replace the lock of a dead owner, or return False if it was released in the meantime.

        Other processes see the old lock or the new one, never none, so they come here too, one at a time.
        """
        run, old = self._path.parent, read_owner(self._path)
        if old is None:
            return False
        if not old.is_superseded_by(self._attempt):
            self._refuse_if_maybe_alive(old)
        logger.warning(f"{run}: took over the lock that process {old.pid} on {old.host} held since {old.since}")
        write_atomically(self._path, content)
        return True

    def _refuse_if_maybe_alive(self, old: Owner) -> None:
        run = self._path.parent
        who = f"process {old.pid} on {old.host} has been writing to this run since {old.since}"
        if old.is_checkable_here():
            if old.is_alive():
                raise UserError(f"{run}: {who}. That is this host. Wait for it, or stop it: kill {old.pid}")
        elif not self._break_other_host:
            raise UserError(
                f"{run}: {who}, and cannot be seen from here. Check on that host whether it still runs: "
                f"ps -p {old.pid}. If it does not, add --break-lock."
            )


def release(run: Path) -> None:
    """Delete the lock of a run whose Slurm job has ended. The caller must have queried Slurm.

    The owner may be on a node that cannot be seen from here. If it is alive after all, it finds its lock gone before
    its next write, and stops.
    """
    owner = read_owner(run / LOCK)
    if owner is not None and owner.attempt and not (owner.is_checkable_here() and owner.is_alive()):
        logger.info(f"{run}: released the lock of attempt {owner.attempt} on {owner.host}: its Slurm job has ended")
        (run / LOCK).unlink()


def _create(path: Path, content: str) -> bool:
    """Create the file, or return False if it exists."""
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
    """Return the owner of a lock; None if there is no lock.

    Raises:
        UserError: the file is not a lock.
    """
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: is not a readable lock: its writer is just starting, or died while starting. Try again; "
            f"if the message comes back and nothing writes to the run, delete it: rm {path}"
        ) from None


@contextlib.contextmanager
def _guard(lock: Path) -> Iterator[None]:
    """Let one process at a time check a lock and take it over; others wait a few milliseconds."""
    try:
        with exclusive_lock(lock.with_name(f"{LOCK}.guard")):
            yield
    except FlockRefused as error:
        raise UserError(
            f"{lock.parent}: is locked, and this file system cannot tell whether the lock is stale ({error}). If "
            f"nothing writes to the run, delete the lock: rm {lock}"
        ) from None


def _read_started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot, or None if there is none (proc(5), stat, field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the process name in parentheses may contain anything
    return None if state in "ZX" else int(rest[18])


def _read_boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""  # sandboxes such as gVisor have none


def _read_pid_namespace() -> str:
    link = Path("/proc/self/ns/pid")
    return str(link.readlink()) if link.is_symlink() else ""
