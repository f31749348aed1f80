"""Processes and scratch folders of measurements, which are gone when the command that made them has ended."""

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HELD_AFTER_S = 60  # a folder is made and then held: a younger one may be on its way


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, however it ends.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


@contextmanager
def make_scratch(prefix: str) -> Iterator[Path]:
    """Yield a new folder among the system's temporary files, deleted when the block ends, at SIGTERM and SIGHUP too.

    A killed process deletes nothing. Each holds a lock on its folder, which the system takes back from a process that
    is gone, so this user's folders of this prefix that nobody holds are deleted first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        found = left.lstat()  # a link is not followed
        is_old = time.time() - found.st_mtime > _HELD_AFTER_S
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_old:
            _delete_unless_held(left)
    with interrupt_on(signal.SIGTERM, signal.SIGHUP):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield folder
        finally:
            shutil.rmtree(folder)
            os.close(held)


def _delete_unless_held(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


@contextmanager
def interrupt_on(*numbers: signal.Signals) -> Iterator[None]:
    """Make signals raise KeyboardInterrupt, so that what is being done is ended and cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
