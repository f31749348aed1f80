"""Locks for files that processes on one machine make once and share: one works, the others wait with a message."""

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(lock: Path, *, doing: str) -> Iterator[int]:
    """Hold an exclusive lock; if another process has it, print one line to stderr and wait.

    The kernel releases the lock when its last holder exits, so kill -9 leaves nothing behind. Pass the descriptor to
    child programs (`pass_fds`): they may outlive this process, and no other process may start before they end.

    Args:
        lock: lock file; created if missing, never deleted.
        doing: what waiting processes print, such as "unpacking Apptainer".

    Returns:
        The lock's file descriptor.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another process is {doing}: waiting until it is done ({lock}).", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def make_folder_once(folder: Path, make: Callable[[Path, int], None], *, doing: str) -> bool:
    """Create a folder that is complete as soon as it exists; return whether this process created it.

    Args:
        make: fills an empty temporary folder, which is then renamed; its second argument is the lock's file
            descriptor, for child programs.
        doing: as in `hold_lock`.
    """
    if folder.exists():
        return False
    with hold_lock(folder.with_name(f"{folder.name}.lock"), doing=doing) as lock:
        if folder.exists():
            return False
        for abandoned in folder.parent.glob(f"{folder.name}.new*"):  # left by killed processes
            shutil.rmtree(abandoned)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.new-", dir=folder.parent))
        try:
            make(partial, lock)
        except BaseException:
            shutil.rmtree(partial)
            raise
        partial.rename(folder)
    return True
