"""Staging: packed data copied once to a node's own disk, verified on the way, and read there.

A copy lies in <scratch>/trainyard-<uid>/<first 16 digits of the fingerprint>/. It is made beside that, under an flock,
and renamed when it is whole, so what bears the name is. We remove no copies: the next run on the node finds them, and
the node's own cleaning is expected to take what nobody has used for long.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import numpy as np

from trainyard.data.shards import INDEX, LOCAL_FILE_SYSTEMS, ShardError, ShardSet, find_file_system
from trainyard.files import hash_file

SCRATCH = "TRAINYARD_SCRATCH"
"""Environment variable: a folder on the node's own disk."""

NOTE = "copied.txt"
"""File of a copy: what making it took, and when that pays."""

_SPARE = 0.05  # share of free space beyond the data: a full disk harms everybody on the node
_STREAMS = 4  # files at once: one, read, hashed and written in turn, leaves network and disk idle most of the time
_PIECE_BYTES = 8 << 20
_LOOK_S = 0.5  # between two looks at `stop_asked`, and at the lock
_SAMPLE = 256  # records read for the break-even
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Staged:
    """Where packed data are to be read, and why there."""

    folder: Path
    reason: str
    copied: bool = False  # `folder` is the copy
    failed: bool = False  # a copy was wanted and cannot be had: worth a warning


class _Impossible(Exception):
    """There will be no copy; the message says why."""


class _Stopped(_Impossible):
    """The run is to end, so nobody needs a copy."""


def stage(
    source: Path,
    *,
    wanted: str,
    environ: Mapping[str, str],
    stop_asked: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = lambda line: None,
    mounts: Path = Path("/proc/self/mountinfo"),
) -> Staged:
    """Return a copy of packed data on this node's scratch, made now unless it is there; or `source` and the reason.

    Every rank of every job on the node calls this. The first to get the lock copies, the others wait. That a copy
    cannot be had (no space, scratch not usable) is no error.

    Args:
        source: packed data.
        wanted: option `data.stage`.
        stop_asked: called about twice a second while this waits or copies; True: leave no partial copy, return
            `source`.
        tell: called with a line for a person when something begins that may take minutes.
        mounts: for `file_system_of`.

    Raises:
        ShardError: a shard is missing, or damaged where it lies.
    """
    if why_not := _why_not(source, wanted, environ, mounts):
        return Staged(source, why_not)
    try:
        fingerprint = hash_file(source / INDEX)
        copy = _home(_scratch(source, environ[SCRATCH], mounts)) / fingerprint[:16]
        if not _is_whole(copy, fingerprint):
            with _alone(copy.with_suffix(".lock"), stop_asked, tell):
                if not _is_whole(copy, fingerprint):
                    _make(copy, source, stop_asked, tell)
        return Staged(copy, _use(copy), copied=True)
    except _Impossible as why:
        return Staged(source, str(why), failed=not isinstance(why, _Stopped))


def break_even(size_bytes: int, *, copy_s: float, there: float, here: float) -> str:
    """Say after how many epochs a copy has paid for itself.

    Args:
        size_bytes: what an epoch reads.
        there, here: bytes per second of reading the original and the copy.
    """
    saved_s = size_bytes / there - size_bytes / here
    if saved_s <= 0:
        return "scratch is not faster, so a copy does not pay here: data.stage=off"
    return f"the copy has paid for itself after {copy_s / saved_s:.2g} epochs"


# Whether and where


def _why_not(source: Path, wanted: str, environ: Mapping[str, str], mounts: Path) -> str:
    """Return why no copy is needed; "" if one is."""
    if wanted == "off":
        return "asked for"
    if SCRATCH not in environ:
        return f"no {SCRATCH}: the cluster file names no scratch"
    kind = find_file_system(source, mounts)
    return f"the data lie on {kind}, which is local" if kind in LOCAL_FILE_SYSTEMS else ""


def _scratch(source: Path, text: str, mounts: Path) -> Path:
    """Return the scratch folder, made if it is missing from an existing folder, such as /scratch/$USER."""
    scratch = Path(text)
    if not scratch.is_absolute():
        raise _Impossible(f"{SCRATCH} is '{text}', no absolute path: does the node set the variables in it?")
    with _needing(scratch):
        scratch.mkdir(exist_ok=True)  # not its parents: a disk that is not mounted must not be taken for an empty one
        if scratch.stat().st_dev == source.stat().st_dev:
            raise _Impossible(f"{scratch} is on the file system that the data lie on")
    kind = find_file_system(scratch, mounts)
    if kind not in LOCAL_FILE_SYSTEMS:  # locks and renames could not be relied on, and two nodes might meet there
        raise _Impossible(f"{scratch} is on {kind}, which is not known as local")
    return scratch


def _home(scratch: Path) -> Path:
    """Return our folder on scratch, where nobody else can put what we would take for data."""
    home = scratch / f"trainyard-{os.getuid()}"
    with _needing(home):
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _Impossible(f"{home} is not a folder that only this user can write to")
    return home


@contextmanager
def _needing(path: Path) -> Iterator[None]:
    """Turn an error of the scratch's file system into a reason to do without it."""
    try:
        yield
    except OSError as error:
        raise _Impossible(f"{path}: {error.strerror}") from error


@contextmanager
def _alone(guard: Path, stop_asked: Callable[[], bool], tell: Callable[[str], object]) -> Iterator[None]:
    """Hold an flock on the file `guard`, after those who hold it; the kernel frees it if the process dies."""
    with _needing(guard):
        file = guard.open("w")
    with file:
        waiting = False
        while not _locked(file.fileno(), guard):
            if not waiting:
                tell(f"waiting for the process of this node that holds {guard}")
            waiting = True
            if stop_asked():
                raise _Stopped("asked to stop while another process was copying")
            time.sleep(_LOOK_S)
        yield


def _locked(descriptor: int, guard: Path) -> bool:
    with _needing(guard):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# The copy


def _is_whole(copy: Path, fingerprint: str) -> bool:
    """Tell whether there is a copy that can be read; reads its index only."""
    try:
        if not (copy / NOTE).is_file() or hash_file(copy / INDEX) != fingerprint:
            return False
        ShardSet(copy)
    except (FileNotFoundError, ShardError):  # the node's cleaning, a disk that lost power, or one who makes it anew
        return False
    return True


def _use(copy: Path) -> str:
    """Make a copy young again, for cleaning goes by the age of each file; return its note."""
    with _needing(copy):
        for path in (*copy.iterdir(), copy):
            os.utime(path)
        return (copy / NOTE).read_text(encoding="utf-8")


def _make(copy: Path, source: Path, stop_asked: Callable[[], bool], tell: Callable[[str], object]) -> None:
    """Copy the data; the caller holds the lock."""
    data = ShardSet(source)
    files = {source / INDEX: data.fingerprint, **{shard.path: shard.sha256 for shard in data.shards}}
    size_bytes = sum(path.stat().st_size for path in files)
    partial = copy.with_suffix(".partial")
    with _needing(copy):
        for useless in (path for path in (copy, partial) if path.exists()):  # of one who was killed
            shutil.rmtree(useless)
        _check_space(copy.parent, size_bytes)
        partial.mkdir()
    tell(f"copying {_amount(size_bytes)} from {source} to {copy}, where it stays until the node is cleaned")
    try:
        began = time.monotonic()
        read_s = _copy_files(files, partial, stop_asked)
        copy_s = time.monotonic() - began
        there = _read_rate(data, source)
        with _needing(copy):
            note = _account(size_bytes, copy_s=copy_s, read_s=read_s, there=there, here=_read_rate(data, partial))
            (partial / NOTE).write_text(note, encoding="utf-8")
            partial.rename(copy)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # what resists is not taken for whole, and the next one tries again
        raise


def _check_space(folder: Path, size_bytes: int) -> None:
    free_bytes, needed = shutil.disk_usage(folder).free, int(size_bytes * (1 + _SPARE))
    if free_bytes < needed:
        raise _Impossible(f"{folder} has {_amount(free_bytes)} free, the copy needs {_amount(needed)}")


def _copy_files(files: Mapping[Path, str], into: Path, stop_asked: Callable[[], bool]) -> float:
    """Copy files and compare each with its SHA-256; return the seconds that reading alone would have taken."""
    streams = min(_STREAMS, len(files))
    ended = threading.Event()
    with ThreadPoolExecutor(streams) as pool:
        copies = [pool.submit(_copy_file, path, digest, into, ended) for path, digest in files.items()]
        pending = set(copies)
        try:
            while pending:
                if stop_asked():
                    raise _Stopped("asked to stop while copying")
                done, pending = wait(pending, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
                for copy in done:
                    copy.result()
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise
    return sum(copy.result() for copy in copies) / streams


def _copy_file(path: Path, sha256: str, into: Path, ended: threading.Event) -> float:
    """Copy one file in pieces, until `ended`; return the seconds spent reading."""
    digest, read_s, memory = hashlib.sha256(), 0.0, memoryview(bytearray(_PIECE_BYTES))
    target = into / path.name
    with path.open("rb", buffering=0) as original, _created(target) as copy:
        while not ended.is_set():
            began = time.monotonic()
            piece = memory[: original.readinto(memory)]
            read_s += time.monotonic() - began
            if not piece:
                break
            digest.update(piece)
            with _needing(target):
                while piece:
                    piece = piece[copy.write(piece) :]
        with _needing(target):
            os.fsync(copy.fileno())  # the new name must not outlive, over a power cut, what it stands for
    if digest.hexdigest() != sha256 and not ended.is_set():
        raise ShardError(
            f"{path}: is damaged: its SHA-256 is not the one in {INDEX}. Not copied to {into.parent}. "
            f"See what is lost: trainyard verify {path.parent}"
        )
    return read_s


def _created(target: Path) -> FileIO:
    with _needing(target):
        return target.open("wb", buffering=0)


# What it is worth


def _account(size_bytes: int, *, copy_s: float, read_s: float, there: float, here: float) -> str:
    reading = f"{_amount(size_bytes / max(read_s, 1e-9))}/s"
    return (
        f"{_amount(size_bytes)} copied on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC in {copy_s:.1f} s "
        f"(read there at {reading}); random records, one after another: "
        f"{_amount(there)}/s there, {_amount(here)}/s here: "
        f"{break_even(size_bytes, copy_s=copy_s, there=there, here=here)}"
    )


def _read_rate(data: ShardSet, folder: Path) -> float:
    """Return the bytes per second at which random records are read from `folder`, not from the page cache."""
    name = max(data.records, key=lambda name: int(data.records[name].size.sum()))
    records = data.records[name]
    ids = np.random.default_rng(0).choice(data.count, min(_SAMPLE, data.count), replace=False)
    owners = np.searchsorted([shard.first for shard in data.shards], ids, side="right") - 1
    places = list(zip(owners.tolist(), records.start[ids].tolist(), records.size[ids].tolist(), strict=True))
    descriptors = {owner: os.open(folder / data.shards[owner].path.name, os.O_RDONLY) for owner in {*owners.tolist()}}
    try:
        for owner, start, size in places:
            first = start // _PAGE_BYTES * _PAGE_BYTES  # part of a page is not dropped
            os.posix_fadvise(descriptors[owner], first, size + 2 * _PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        read_bytes = sum(len(os.pread(descriptors[owner], size, start)) for owner, start, size in places)
        return max(read_bytes, 1) / (time.monotonic() - began)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _amount(count_bytes: float) -> str:
    return f"{count_bytes / 1e9:.4g} GB" if count_bytes >= 1e9 else f"{count_bytes / 1e6:.4g} MB"
