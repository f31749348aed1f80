"""Files that hold their old content or their new one, never half of it; hashes; locks that the kernel releases."""

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
"""Error numbers of a write for which there is no room."""


_PARTIAL = ".partial"


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the file `path`: a reader, a kill or a crash sees the old content or the new one, never a part.

    Args:
        content: text is written as UTF-8.
        durable: wait until the disk has it, so that a power cut cannot take it back; off for what is written every
            few seconds and worthless after a crash.
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
    """Remove what killed writers left in a folder. For callers who know that nobody writes there now."""
    for partial in folder.glob(f"*{_PARTIAL}"):
        partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """Replace the file `path` by JSON that people can read, as `write_atomically` does."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a directory's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text; reads it in pieces, for it may be larger than memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FlockRefused(Exception):
    """The file system knows no flock."""


@contextlib.contextmanager
def exclusive_lock(guard: Path) -> Iterator[None]:
    """Hold an flock on the file `guard`, after those who hold it; the kernel releases it if the process dies.

    Raises:
        FlockRefused: on entering.
    """
    with guard.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise FlockRefused(error.strerror) from None
        yield
