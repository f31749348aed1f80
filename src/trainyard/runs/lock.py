"""The lock that gives each run folder one writer: taking it, and taking it over from a dead owner."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from loguru import logger

from trainyard.errors import UserError
from trainyard.files import (
    AppendedFile,
    FlockRefused,
    exclusive_lock,
    load_json,
    name_failed_file,
    open_untrusted,
    remove_partial_files,
    replace,
)
from trainyard.text import quote_path

LOCK = "lock"
_OWNERS_FILES = ("config.yaml", "env.json", "heartbeat.json")
"""Nobody else replaces these: a leftover of a write is a dead owner's."""


@dataclass(frozen=True)
class Owner:
    """The process that writes to a run, identified so that no later process can be mistaken for it."""

    host: str
    boot_id: str
    pid_namespace: str  # a process id is valid only inside its container
    pid: int
    started_ticks: int  # after boot
    since: str  # local time, for users
    attempt: str  # "<Slurm job id>-<restarts>" if Slurm started it, else ""
    token: str  # names the second name of its lock, which it holds an flock on

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
            token=secrets.token_hex(8),
        )

    def is_checkable_here(self) -> bool:
        """Return whether this process sees the owner's process id, or knows that this host rebooted since."""
        if self.host != socket.gethostname():
            return False
        return self.boot_id != _read_boot_id() or self.pid_namespace == _read_pid_namespace()

    def is_alive(self) -> bool:
        """Return whether the owner still runs. Valid only if `is_checkable_here`."""
        return self.boot_id == _read_boot_id() and self.started_ticks == _read_started_ticks(self.pid)

    def is_superseded_by(self, attempt: str) -> bool:
        """Return whether `attempt` is a later start of the same Slurm job: then this owner may not write any more."""
        (mine, _, number), (other, _, later) = self.attempt.rpartition("-"), attempt.rpartition("-")
        same_job = _is_of_slurm(self.attempt) and mine == other
        return same_job and number.isdigit() and later.isdigit() and int(number) < int(later)

    def find_alive(self, lock: Path) -> bool | None:
        """Return whether the owner of `lock` still runs; None if this process cannot find out.

        Within one kernel the owner's flock tells, also from another container, whose host name and process ids differ.
        """
        if self.is_checkable_here():
            return self.is_alive()
        second = _name_second(lock, self.token)
        if not self.boot_id or self.boot_id != _read_boot_id() or not _is_same_file(lock, second):
            return None
        return _is_flocked(lock)


class RunLock:
    """Makes this process the only writer of a run, for a `with` block.

    The lock of a dead process is taken over and the takeover is logged; if several processes try, exactly one
    succeeds. A forked child may leave the block without releasing its parent's lock. The lock is written under a second
    name and linked, so it appears whole or not at all. Works where link(2) or `O_EXCL` works: local disks, NFS version
    3 and later, Lustre. Taking over also needs flock.

    Args:
        run: folder of the run.
        break_other_host: also take over a lock that is not readable, or whose owner this host cannot see. Only for
            callers that know it is dead.
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
        self._second: _SecondName | None = None

    def check(self) -> None:
        """Raise if this process has lost its lock. Call it before each write.

        Raises:
            UserError: another process has taken over the run.
        """
        owner = read_owner(self._path)
        if owner != self._owner:
            who = f"process {owner.pid} on {owner.host} writes to it now" if owner else "its lock was deleted"
            raise UserError(f"{self._path.parent}: this attempt no longer owns the run: {who}. It stops here.")

    def __enter__(self) -> Self:
        owner = Owner.from_this_process(self._attempt)
        with name_failed_file(self._path):
            while True:
                second = _SecondName(self._path, owner)
                try:
                    if second.link() or self._take_over(second):
                        break
                except BaseException:
                    second.remove()
                    raise
                second.remove()
        self._owner, self._second = owner, second
        second.remove_others()
        for name in _OWNERS_FILES:
            remove_partial_files(self._path.with_name(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._owner is not None and self._second is not None
        if self._owner.pid != os.getpid():
            return
        try:
            if read_owner(self._path) == self._owner:
                self._path.unlink()
        finally:
            self._second.remove()

    def _take_over(self, second: "_SecondName") -> bool:
        """Replace the lock of a dead owner, or return False if it was released in the meantime.

        Other processes see the old lock or the new one, never none, so they come here too, one at a time.
        """
        with _guard(self._path):
            if not self._may_replace():
                return False
            return second.replace()

    def _may_replace(self) -> bool:
        """Return whether there is a lock and its owner is dead.

        Raises:
            UserError: it is alive, or may be.
        """
        run = self._path.parent
        try:
            old = read_owner(self._path)
        except UserError:
            # Slurm runs one attempt of a job at a time, and whoever writes all the same finds its lock gone: `check`.
            may_break = self._break_other_host or _is_of_slurm(self._attempt)
            if not may_break or self._path.is_dir() or _is_flocked(self._path):
                raise
            logger.warning(f"{run}: replaced a lock that cannot be read, and that no process on this machine holds")
            return True
        if old is None:
            return False
        if not old.is_superseded_by(self._attempt):
            self._check_owner_ended(old)
        logger.warning(f"{run}: took over the lock that process {old.pid} on {old.host} held since {old.since}")
        return True

    def _check_owner_ended(self, old: Owner) -> None:
        run = self._path.parent
        who = f"process {old.pid} on {old.host} has been writing to this run since {old.since}"
        alive = old.find_alive(self._path)
        if alive and old.is_checkable_here():
            raise UserError(f"{run}: {who}. That is this host. Wait for it, or stop it: kill {old.pid}")
        if alive:
            raise UserError(
                f"{run}: {who}, in another container of this machine. Wait for it, or stop that container: "
                f"docker stop {old.host} (docker ps lists those that run)"
            )
        if alive is None and not self._break_other_host:
            raise UserError(
                f"{run}: {who}, and cannot be seen from here. Check on that host whether it still runs: "
                f"ps -p {old.pid}. If it does not, or if {old.host} was a container that is gone, add --break-lock."
            )


class _SecondName:
    """A second name of the lock file: the lock is written under it first, and the owner holds an flock on the file.

    So a lock is whole when it appears, and the kernel tells every container of this machine when its owner dies.
    """

    def __init__(self, lock: Path, owner: Owner) -> None:
        self._lock, self._path = lock, _name_second(lock, owner.token)
        self._content = json.dumps(asdict(owner), indent=2) + "\n"
        self._file = AppendedFile(self._path)
        try:
            with contextlib.suppress(OSError):  # without flock, other containers cannot tell, and report that
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(self._content.encode())
            self._file.sync()
        except BaseException:
            self.remove()
            raise

    def link(self) -> bool:
        """Create the lock, or return False if there is one."""
        try:
            os.link(self._path, self._lock)
        except FileExistsError:  # over NFS a repeated request may find the first one's link
            return _is_same_file(self._path, self._lock)
        except FileNotFoundError:  # a new owner removed it as a leftover
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return _create_in_place(self._lock, self._content)
        return True

    def replace(self) -> bool:
        """Replace the lock atomically, or return False if a new owner removed this as a leftover."""
        third = self._path.with_suffix(".new")
        third.unlink(missing_ok=True)  # of a process that was killed between the next two lines
        with contextlib.suppress(FileNotFoundError):
            try:
                os.link(self._path, third)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                third = self._path
            replace(third, self._lock)
            return True
        return False

    def remove(self) -> None:
        """Release the flock and remove the second name."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def remove_others(self) -> None:
        """Remove the second names that killed owners left. For the owner alone."""
        for path in self._lock.parent.glob(f".{LOCK}.*"):
            if path != self._path and not path.is_dir():
                path.unlink(missing_ok=True)


_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of link(2) on file systems without hard links, such as FAT."""


def _name_second(lock: Path, token: str) -> Path:
    return lock.with_name(f".{LOCK}.{token}")


def _is_same_file(one: Path, other: Path) -> bool:
    """Return whether both names are of one file: not after the folder was copied, or the lock was written by hand."""
    try:
        return one.samefile(other)
    except OSError:  # released meanwhile, or a link to itself
        return False


def _is_flocked(path: Path) -> bool | None:
    """Return whether a process on this machine holds an flock on the file; None if the file system cannot tell."""
    try:
        with open_untrusted(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is_of_slurm(attempt: str) -> bool:
    return bool(attempt) and not attempt.startswith("local-")


def release(run: Path) -> None:
    """Delete the lock of a run whose Slurm job has ended. The caller must have queried Slurm.

    The owner may be on a node that cannot be seen from here. If it is alive after all, it finds its lock gone before
    its next write, and stops. A lock that cannot be read is deleted too, unless a process on this machine holds it.
    """
    lock = run / LOCK
    try:
        owner = read_owner(lock)
    except UserError:
        if lock.is_dir() or _is_flocked(lock):
            raise
        logger.info(f"{run}: deleted a lock that cannot be read: the run's Slurm job has ended")
        lock.unlink()
        return
    if owner is not None and owner.attempt and not (owner.is_checkable_here() and owner.is_alive()):
        logger.info(f"{run}: released the lock of attempt {owner.attempt} on {owner.host}: its Slurm job has ended")
        lock.unlink()


def _create_in_place(path: Path, content: str) -> bool:
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
        return Owner(**load_json(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        remove = "rm -r" if path.is_dir() and not path.is_symlink() else "rm"
        raise UserError(
            f"{path}: is not a lock: {error.strerror or error}. If nothing writes to the run, delete it: {remove} "
            f"{quote_path(path)}"
        ) from None
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: is not a readable lock: its writer is just starting, or died while starting. Try again; "
            f"if the message comes back and nothing writes to the run, add --break-lock, or delete it: "
            f"rm {quote_path(path)}"
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
            f"nothing writes to the run, delete the lock: rm {quote_path(lock)}"
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
