"""Stages packed data: copies it once to a node's local disk, verifies it on the way, and reads it there.

A copy is in <scratch>/trainyard-<uid>/<first 16 digits of the fingerprint>/. It is written to a folder next to that,
under an flock, and renamed when complete, so a folder with the final name is complete. We never remove copies: the next
run on the node uses them, and the node's own clean-up removes those unused for long.
"""

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trainyard.data.hdf5 import ShardError
from trainyard.data.index import INDEX, find_index, read_fingerprint
from trainyard.data.shards import LOCAL_FILE_SYSTEMS, ShardSet, find_file_system
from trainyard.errors import UserError
from trainyard.files import hash_file, make_own_folder, rename
from trainyard.text import quote_path

SCRATCH = "TRAINYARD_SCRATCH"
"""Environment variable: a folder on the node's local disk."""

NOTE = "copied.txt"
"""File in a copy: what copying cost."""

_SPARE = 0.05  # free space required beyond the data, as a share of it: a full disk affects everybody on the node
_STREAMS = 4  # files copied at once; a single one leaves network and disk idle most of the time
_CHUNK_BYTES = 8 << 20
_POLL_S = 0.5  # interval of checking `stop_requested` and the lock


@dataclass(frozen=True)
class Staged:
    """Where to read packed data, and why."""

    folder: Path
    reason: str
    copied: bool = False  # `folder` is the copy
    is_new: bool = field(default=False, compare=False)  # this process made the copy
    failed: bool = False  # a copy was wanted but is impossible: worth a warning


class _NoCopy(Exception):
    """A copy is impossible; the message has the reason."""


class _Stopped(_NoCopy):
    """The run is about to stop, so nobody needs a copy."""


def stage(
    source: Path,
    *,
    wanted: str,
    environ: Mapping[str, str],
    stop_requested: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = lambda line: None,
    mounts: Path = Path("/proc/self/mountinfo"),
) -> Staged:
    """Return a copy of packed data on this node's scratch, made now if missing; or `source` and the reason.

    Every rank of every run on the node calls this. The first to get the lock copies, the others wait. If a copy is
    impossible (no space, unusable scratch), that is not an error.

    Args:
        source: packed data.
        wanted: option `data.stage`.
        stop_requested: called about twice a second while waiting or copying; True: leave no partial copy, return
            `source`.
        tell: called with a log line before anything that may take minutes.
        mounts: as in `find_file_system`.

    Raises:
        ShardError: a shard of `source` is missing or damaged.
    """
    if reason := _explain_no_copy(source, wanted, environ, mounts):
        return Staged(source, reason)
    try:
        fingerprint = read_fingerprint(find_index(source))
        scratch = _prepare_scratch(source, environ[SCRATCH], mounts)
        try:  # a folder in which nobody else can place files that we would read as data
            copy = make_own_folder(scratch / f"trainyard-{os.getuid()}") / fingerprint[:16]
        except UserError as error:
            raise _NoCopy(str(error)) from error
        is_new = False
        if not _is_complete(copy, fingerprint):
            with _lock(copy.with_suffix(".lock"), stop_requested, tell):
                if not _is_complete(copy, fingerprint):
                    _make_copy(copy, source, stop_requested, tell)
                    is_new = True
        return Staged(copy, _touch_copy(copy), copied=True, is_new=is_new)
    except _NoCopy as error:
        return Staged(source, str(error), failed=not isinstance(error, _Stopped))


# Whether and where


def _explain_no_copy(source: Path, wanted: str, environ: Mapping[str, str], mounts: Path) -> str:
    """Return why no copy is needed; "" if one is needed."""
    if wanted == "off":
        return "requested"
    if SCRATCH not in environ:
        return f"no {SCRATCH}: the cluster file names no scratch"
    kind = find_file_system(source, mounts)
    return f"the data is on {kind}, which is local" if kind in LOCAL_FILE_SYSTEMS else ""


def _prepare_scratch(source: Path, text: str, mounts: Path) -> Path:
    """Return the scratch folder, created if only its last part is missing, for example in /scratch/$USER."""
    scratch = Path(text)
    if not scratch.is_absolute():
        raise _NoCopy(f"{SCRATCH} is '{text}', not an absolute path. Does the node set the variables in it?")
    with _turn_os_errors_into_no_copy(scratch):
        scratch.mkdir(exist_ok=True)  # without parents, so that an unmounted disk does not look like an empty one
        if scratch.stat().st_dev == source.stat().st_dev:
            raise _NoCopy(f"{scratch} is on the same file system as the data")
    kind = find_file_system(scratch, mounts)
    if kind not in LOCAL_FILE_SYSTEMS:  # locks and renames may be unreliable, and two nodes may share the folder
        raise _NoCopy(f"{scratch} is on {kind}, which is not known to be local")
    return scratch


@contextmanager
def _turn_os_errors_into_no_copy(path: Path) -> Iterator[None]:
    """Turn an error of the scratch's file system into a reason for having no copy."""
    try:
        yield
    except OSError as error:
        raise _NoCopy(f"{path}: {error.strerror}") from error


@contextmanager
def _lock(lock: Path, stop_requested: Callable[[], bool], tell: Callable[[str], object]) -> Iterator[None]:
    """Wait for an flock on the file `lock` and hold it; the kernel releases it if the process dies."""
    with _turn_os_errors_into_no_copy(lock):
        file = lock.open("w")
    with file:
        waiting = False
        while not _try_lock(file.fileno(), lock):
            if not waiting:
                tell(f"waiting for the process on this node that holds {lock}")
            waiting = True
            if stop_requested():
                raise _Stopped("stop requested while another process was copying")
            time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int, lock: Path) -> bool:
    with _turn_os_errors_into_no_copy(lock):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# The copy


def _is_complete(copy: Path, fingerprint: str) -> bool:
    """Return whether there is a readable copy; reads only its index."""
    try:
        if not (copy / NOTE).is_file() or read_fingerprint(copy / INDEX) != fingerprint:
            return False
        ShardSet(copy)
    except (FileNotFoundError, ShardError):  # cleaned up, damaged by a power cut, or being copied again
        return False
    return True


def _touch_copy(copy: Path) -> str:
    """Set the files' times to now, because clean-up goes by their age; return the copy's note."""
    with _turn_os_errors_into_no_copy(copy):
        for path in (*copy.iterdir(), copy):
            os.utime(path)
        return (copy / NOTE).read_text(encoding="utf-8")


def _make_copy(copy: Path, source: Path, stop_requested: Callable[[], bool], tell: Callable[[str], object]) -> None:
    """Copy the data; the caller holds the lock."""
    shards = ShardSet(source).shards
    files = {source / INDEX: hash_file(source / INDEX), **{shard.path: shard.sha256 for shard in shards}}
    size_bytes = sum(path.stat().st_size for path in files)
    partial = copy.with_suffix(".partial")
    with _turn_os_errors_into_no_copy(copy):
        for leftover in (path for path in (copy, partial) if path.exists()):  # of a process that was killed
            shutil.rmtree(leftover)
        _check_space(copy.parent, size_bytes)
        partial.mkdir()
    tell(f"copying {_format_bytes(size_bytes)} from {source} to {copy}, where it stays until the node's clean-up")
    try:
        began = time.monotonic()
        read_s = _copy_files(files, partial, stop_requested)
        note = (
            f"{_format_bytes(size_bytes)} copied on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC in "
            f"{time.monotonic() - began:.1f} s (read there at {_format_bytes(size_bytes / max(read_s, 1e-9))}/s)"
        )
        with _turn_os_errors_into_no_copy(copy):
            (partial / NOTE).write_text(note, encoding="utf-8")
            rename(partial, copy)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a leftover is never read as data, and the next copier removes it
        raise


def _check_space(folder: Path, size_bytes: int) -> None:
    free_bytes, needed = shutil.disk_usage(folder).free, int(size_bytes * (1 + _SPARE))
    if free_bytes < needed:
        raise _NoCopy(f"{folder} has {_format_bytes(free_bytes)} free, the copy needs {_format_bytes(needed)}")


def _copy_files(files: Mapping[Path, str], into: Path, stop_requested: Callable[[], bool]) -> float:
    """Copy files and compare each with its SHA-256; return the seconds that reading alone would have taken."""
    streams = min(_STREAMS, len(files))
    cancelled = threading.Event()
    with ThreadPoolExecutor(streams) as pool:
        copies = [pool.submit(_copy_file, path, digest, into, cancelled) for path, digest in files.items()]
        pending = set(copies)
        try:
            while pending:
                if stop_requested():
                    raise _Stopped("stop requested while copying")
                done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                for copy in done:
                    copy.result()
        except BaseException:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
    return sum(copy.result() for copy in copies) / streams


def _copy_file(path: Path, sha256: str, into: Path, cancelled: threading.Event) -> float:
    """Copy one file in chunks, until `cancelled`; return the seconds spent reading."""
    digest, read_s, memory = hashlib.sha256(), 0.0, memoryview(bytearray(_CHUNK_BYTES))
    target = into / path.name
    with _turn_os_errors_into_no_copy(target):
        copy = target.open("wb", buffering=0)
    with copy, path.open("rb", buffering=0) as original:
        while not cancelled.is_set():
            began = time.monotonic()
            chunk = memory[: original.readinto(memory)]
            read_s += time.monotonic() - began
            if not chunk:
                break
            digest.update(chunk)
            with _turn_os_errors_into_no_copy(target):
                while chunk:
                    chunk = chunk[copy.write(chunk) :]
        with _turn_os_errors_into_no_copy(target):
            os.fsync(copy.fileno())  # after a power cut, the final name must not exist without the content
    if digest.hexdigest() != sha256 and not cancelled.is_set():
        raise ShardError(
            f"{path}: is damaged: its SHA-256 differs from {INDEX}. Not copied to {into.parent}. "
            f"List the lost records: trainyard verify {quote_path(path.parent)}"
        )
    return read_s


def _format_bytes(count_bytes: float) -> str:
    return f"{count_bytes / 1e9:.4g} GB" if count_bytes >= 1e9 else f"{count_bytes / 1e6:.4g} MB"
