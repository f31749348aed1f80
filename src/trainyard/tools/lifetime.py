"""Scratch folders of measurements, which are gone when the command that made them has ended."""

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

_HELD_AFTER_S = 60  # a folder is made and then held: a younger one may be on its way


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
