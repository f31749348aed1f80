"""Atomic file writes, file hashes, and locks that the kernel releases."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write that failed because the disk or quota is full."""


_PARTIAL = ".partial"


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write or replace the file `path`: a reader, a kill or a crash finds the old or the new content, never a part.

    Args:
        content: text is encoded as UTF-8.
        durable: wait until the content is on disk, so that it survives a power cut; off for files that are written
            every few seconds and worthless after a crash.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        fsync_path(path.parent)


def remove_partials(folder: Path) -> None:
    """Remove partial files that killed writers left in a folder. Call it only when nobody is writing there."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write or replace the file `path` with readable JSON, as `write_atomically` does."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; reads it in chunks, because it may be larger than memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FlockRefused(Exception):
    """The file system does not support flock."""


class LockHeld(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive_lock(guard: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an flock on the file `guard`; the kernel releases it if the process dies.

    Args:
        wait: until another process releases it.

    Raises:
        FlockRefused: the file system does not support flock; raised on entry.
        LockHeld: another process holds it, and `wait` is false.
    """
    with guard.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockHeld from None
        except OSError as error:
            raise FlockRefused(error.strerror) from None
        yield
