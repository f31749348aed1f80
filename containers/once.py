"""What several processes of one machine make once and share: one makes it, the others wait and say so."""

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(lock: Path, *, doing: str) -> Iterator[int]:
    """Be the only process that does something; others wait here, with a line on stderr.

    The kernel frees the lock when its last holder is gone, so kill -9 leaves nothing behind. Give the lock to the
    programs that do the work (`pass_fds`): they may outlive this process, and nobody else may begin before they end.

    Args:
        lock: file beside what is made; created if missing, never deleted.
        doing: for the line that waiting processes print, such as "unpacking Apptainer".

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
    """Make a folder that is complete from the moment it exists; return whether this process made it.

    Args:
        make: fills an empty folder beside `folder`, which is then renamed; its second argument is the lock's file
            descriptor, for the programs it starts.
        doing: as in `hold_lock`.
    """
    if folder.exists():
        return False
    with hold_lock(folder.with_name(f"{folder.name}.lock"), doing=doing) as lock:
        if folder.exists():
            return False
        for abandoned in folder.parent.glob(f"{folder.name}.new*"):  # by processes that were killed
            shutil.rmtree(abandoned)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.new-", dir=folder.parent))
        try:
            make(partial, lock)
        except BaseException:
            shutil.rmtree(partial)
            raise
        partial.rename(folder)
    return True
