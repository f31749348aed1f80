"""Packing: raw files into shards, in parallel, resumable after a kill, the same bytes for the same input."""

import errno
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import h5py
import numpy as np
import soundfile
from PIL import Image, UnidentifiedImageError

from trainyard.data.shards import (
    ARRAY,
    INDEX,
    KEY,
    PCM,
    PICTURE,
    RAGGED,
    SCHEMA_VERSION,
    SOUND,
    BadRecord,
    Loaded,
    Ragged,
    Sample,
    ShardSet,
    Sound,
    open_shard,
    read_text,
)
from trainyard.errors import UserError

_DEFAULT_COUNT = 4096  # samples per shard where nothing tells their size
_PROBE = 64  # samples whose sizes give the mean
_SHOWN = 5  # bad files named in an error
JOURNAL = "packing.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)

Progress = Callable[[int], object]
"""Called with the number of samples done since the last call."""


class PackError(UserError):
    """Raw files cannot be packed, or not into this folder."""


@dataclass(frozen=True)
class _Task:
    """One shard to write: everything a worker process needs."""

    path: Path
    samples: list[Sample]
    listing: str  # digest of what the shard is made of
    skip_bad: bool
    learned: Mapping[str, str] | None  # what `load` is called with; None: with nothing


@dataclass(frozen=True)
class _Blob:
    """A record whose length is its own, with what the index says of it (`shards.Records`)."""

    data: bytes
    kind: str
    dtype: str
    shape: tuple[int, ...]


_Row = dict[str, _Blob | np.ndarray | int | float | str]


@dataclass(frozen=True)
class _Written:
    path: Path
    sha256: str  # empty if the shard was not written, because of bad files
    count: int
    bad: list[tuple[str, str]]  # key, reason


def pack(
    samples: Iterable[Sample],
    out: Path,
    *,
    meta: dict[str, Any],
    workers: int,
    skip_bad: bool = False,
    shard_mib: float = 256,
    learned: Mapping[str, str] | None = None,
    progress: Progress = lambda done: None,
) -> ShardSet:
    """Write a data set, or finish one that was interrupted.

    A shard is written aside, flushed to disk and renamed, so each file under its final name is whole; a second call
    with the same input keeps those and writes the rest. The index comes last: without it there is no data set.
    Nothing of the time, machine or number of workers enters the files; what raw files they were made of, which tells
    whether they are up to date, stands beside them in `packing.json`.

    Args:
        samples: in their final order; read lazily, a few shards ahead of the writing.
        out: created if missing.
        meta: plain values that describe the packing and decide, with the samples, whether `out` is up to date.
        workers: processes.
        skip_bad: leave out raw files that cannot be read, instead of failing after all were tried.
        shard_mib: size a shard aims at.
        learned: texts that the samples' `load` is called with, a function of raw files and `meta`; kept in the index.

    Raises:
        PackError: no samples, two with one key, files that cannot be read, another data set in `out`, or no space.
    """
    stream = iter(samples)
    head = list(itertools.islice(stream, _PROBE))
    if not head:
        raise PackError(f"Nothing to pack: the raw folder holds no sample this job knows. {meta.get('expects', '')}")
    count = _samples_per_shard(head, shard_mib)
    out.mkdir(parents=True, exist_ok=True)
    try:
        tasks = _tasks(itertools.chain(head, stream), out, count, skip_bad, meta, learned)
        written = _write_all(tasks, _Journal(out), workers, progress)
        _refuse_bad(written, skip_bad)
        return _finish(out, written, meta, learned or {})
    except BrokenProcessPool:
        raise PackError(
            f"A packing process was killed, most likely because memory ran out ({workers} processes, each holding a "
            f"shard of about {shard_mib} MiB three times). Finished shards are kept; go on with --workers 1."
        ) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(out).free / 2**20
        raise PackError(
            f"{out}: no space left ({free:.0f} MiB free). Finished shards are kept: make room, then type the same "
            "command again, and it goes on from there."
        ) from None


def open_picture(data: bytes) -> Image.Image:
    """Decode a whole picture file, so that a broken one is found when packing and not in training.

    Raises:
        BadRecord: it is empty, of no kind Pillow knows, cut off or otherwise broken.
    """
    if not data:
        raise BadRecord("the file is empty")
    try:
        picture = Image.open(io.BytesIO(data))
        picture.load()
        picture.getexif()
    except UnidentifiedImageError:
        raise BadRecord("the file is no picture, whatever its name says") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's words for broken files
        raise BadRecord(f"the picture cannot be decoded: {error}") from None
    return picture


def listing_of(samples: Iterable[Sample], meta: dict[str, Any]) -> tuple[int, str]:
    """Return how many samples there are, and a digest of their names, raw files' sizes and times, and `meta`."""
    count, digest = 0, hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    stream = iter(samples)
    while chunk := list(itertools.islice(stream, _DEFAULT_COUNT)):
        count += len(chunk)
        digest.update(_listing(chunk, meta).encode())
    return count, digest.hexdigest()


def _samples_per_shard(head: Sequence[Sample], shard_mib: float) -> int:
    sources = [sample.source for sample in head if sample.source]
    if not sources:
        return _DEFAULT_COUNT
    mean = max(1.0, sum(source.stat().st_size for source in set(sources)) / len(sources))  # several may share a file
    return max(1, math.ceil(shard_mib * 2**20 / mean))


def _tasks(
    samples: Iterable[Sample],
    out: Path,
    count: int,
    skip_bad: bool,
    meta: dict[str, Any],
    learned: Mapping[str, str] | None,
) -> Iterator[_Task]:
    stream = iter(samples)
    for number in itertools.count():
        chunk = list(itertools.islice(stream, count))
        if not chunk:
            return
        yield _Task(out / f"shard-{number:05d}.h5", chunk, _listing(chunk, meta), skip_bad, learned)


def _listing(chunk: Sequence[Sample], meta: dict[str, Any]) -> str:
    """Digest what a shard is made of: names, columns, and size and time of the raw files.

    Not of `skip_bad`: whoever is told to skip bad files keeps the shards that have none.
    """
    digest = hashlib.sha256(json.dumps([SCHEMA_VERSION, meta], sort_keys=True).encode())
    for sample in chunk:
        stat = sample.source.stat() if sample.source else None
        stamp = [stat.st_size, stat.st_mtime_ns] if stat else None
        digest.update(json.dumps([sample.key, sorted(sample.columns.items()), stamp]).encode())
    return digest.hexdigest()


class _Journal:
    """What the shards of a folder were made of: `packing.json`, kept by the one process that packs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._packed_elsewhere = (folder / INDEX).exists() and not self._path.exists()
        self._shards: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def finished(self, task: _Task) -> _Written | None:
        """Return what an earlier, interrupted call wrote, if it is made of the same raw files."""
        if not task.path.exists():
            return None
        if self._packed_elsewhere:
            raise PackError(
                f"{task.path.parent}: holds packed data without the {JOURNAL} that says what they were made of. "
                "Use them as they are, or choose an empty folder for the output."
            )
        entry = self._shards.get(task.path.name)
        if entry is None:
            return None  # killed before it was noted: written again, to the same bytes
        if entry["listing"] != task.listing:
            raise PackError(
                f"{task.path}: made of other raw files, or packed with other options. "
                "Choose an empty folder for the output, or delete this one."
            )
        bad = [(str(key), str(reason)) for key, reason in entry["bad"]]
        return _Written(task.path, entry["sha256"], int(entry["count"]), bad)

    def note(self, task: _Task, written: _Written) -> None:
        """Add a shard that is whole and on disk."""
        entry = {"listing": task.listing, "sha256": written.sha256, "count": written.count, "bad": written.bad}
        self._shards[task.path.name] = entry
        aside = self._path.with_suffix(".partial")
        try:
            aside.write_text(json.dumps(dict(sorted(self._shards.items())), indent=1))
            aside.replace(self._path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _write_all(tasks: Iterator[_Task], journal: _Journal, workers: int, progress: Progress) -> list[_Written]:
    """Write the shards that are missing, a bounded number at a time; return all, in order."""
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks
    done = context.Value("q", 0)
    written: list[_Written] = []
    running: dict[Future[_Written], _Task] = {}
    reported = 0
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(sys.path, done)) as pool:
        try:
            for task in itertools.chain(tasks, [None]):
                if task is not None:
                    kept = journal.finished(task)
                    if kept is None:
                        running[pool.submit(_write_shard, task)] = task
                    else:
                        written.append(kept)
                        progress(len(task.samples))
                while running and (task is None or len(running) >= 2 * workers):
                    for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                        written.append(future.result())
                        finished = running.pop(future)
                        if written[-1].sha256:
                            journal.note(finished, written[-1])
                    progress(done.value - reported)
                    reported = done.value
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(written, key=lambda shard: shard.path)


_done: Any = None


def _start_worker(path: list[str], done: Any) -> None:
    """Give a worker the parent's import path, on which the jobs folder lies, and the shared counter.

    The worker ends with the parent, however that ends: one that outlived a killed packing would write into the next.
    """
    global _done
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a terminal and Slurm signal the whole tree; the parent decides
    sys.path[:] = path
    _done = done
    threading.Thread(target=_follow_parent, name="follow parent", daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_shard(task: _Task) -> _Written:
    rows: list[_Row] = []
    bad: list[tuple[str, str]] = []
    for sample in task.samples:
        try:
            loaded = sample.load() if task.learned is None else sample.load(task.learned)
            rows.append(_measured({**sample.columns, **loaded, KEY: sample.key}))
        except (BadRecord, OSError) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            bad.append((sample.key, str(error) or type(error).__name__))
        with _done.get_lock():
            _done.value += 1
    if bad and not task.skip_bad:
        return _Written(task.path, "", len(rows), bad)
    with _in_memory() as file:
        file.attrs.update(schema_version=SCHEMA_VERSION, count=len(rows))
        if rows:
            _write_rows(file, rows)
        return _Written(task.path, publish(file, task.path), len(rows), bad)


def _in_memory() -> h5py.File:
    """Open a new HDF5 file in memory, so that a full disk meets a plain write and not the middle of HDF5."""
    options = {"libver": "v110", "alignment_threshold": 1, "alignment_interval": 4096}
    return h5py.File("new", "w", driver="core", backing_store=False, **options)


def _measured(loaded: Loaded) -> _Row:
    """Read the size of each picture and sound from its header."""
    return {
        name: _blob(value) if isinstance(value, bytes | Ragged | Sound) else value for name, value in loaded.items()
    }


def _blob(value: bytes | Ragged | Sound) -> _Blob:
    if isinstance(value, bytes):
        return _Blob(value, PICTURE, "uint8", _picture_shape(value))
    if isinstance(value, Ragged):
        array = np.ascontiguousarray(value.values)
        return _Blob(array.tobytes(), RAGGED, array.dtype.name, array.shape)
    if isinstance(value.data, bytes):
        return _Blob(value.data, SOUND, "uint8", _sound_shape(value.data))
    assert value.data.dtype == np.int16 and value.data.ndim == 1, "PCM is (frames,) int16"
    return _Blob(value.data.tobytes(), PCM, "int16", value.data.shape)


def _write_rows(file: h5py.File, rows: list[_Row]) -> None:
    """Write one column or one set of records per name; all samples have the same names."""
    columns, records = file.create_group("columns"), file.create_group("records")  # one that HDF5 adds bears the time
    names = list(rows[0])
    assert not {"sample_id", "samples_seen"} & set(names), "a batch has these already"
    for row in rows:
        assert list(row) == names, f"{row[KEY]!r} has {list(row)}, the samples before it {names}"
    for name in names:
        values: list[Any] = [row[name] for row in rows]
        first = values[0]
        if isinstance(first, _Blob):
            _write_blobs(records.create_group(name), values)
        elif isinstance(first, np.ndarray):
            _write_arrays(records.create_group(name), np.stack(values))
        elif isinstance(first, str):
            _write_text(columns.create_group(name), values)
        else:
            numbers = np.array(values)  # one fraction among them makes all of them float
            columns[name] = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)


def _write_blobs(group: h5py.Group, values: list[_Blob]) -> None:
    data = [value.data for value in values]
    size = np.array([len(one) for one in data], dtype=np.int64)
    blob = group.create_dataset("blob", data=np.frombuffer(b"".join(data), dtype=np.uint8))
    group["start"] = (blob.id.get_offset() or 0) + np.cumsum(size) - size  # no offset: all of them are empty
    group["size"] = size
    group["crc"] = np.array([crc32c.crc32c(one) for one in data], dtype=np.uint32)
    group["shape"] = np.array([value.shape for value in values], dtype=np.int32)
    group.attrs.update(kind=values[0].kind, dtype=values[0].dtype)
    kinds = {(value.kind, value.dtype, value.shape[1:] if value.kind == RAGGED else ()) for value in values}
    assert len(kinds) == 1, f"{group.name} is not the same in all samples: {sorted(kinds)}"


def _write_arrays(group: h5py.Group, values: np.ndarray) -> None:
    data = group.create_dataset("data", data=values)
    size = values[0].nbytes
    group["start"] = data.id.get_offset() + np.arange(len(values), dtype=np.int64) * size
    group["size"] = np.full(len(values), size, dtype=np.int64)
    group["crc"] = np.array([crc32c.crc32c(row.data) for row in values], dtype=np.uint32)
    group["shape"] = np.tile(np.array(values.shape[1:], dtype=np.int32), (len(values), 1))
    group.attrs.update(kind=ARRAY, dtype=values.dtype.name)


def _write_text(group: h5py.Group, values: Sequence[Any]) -> None:
    encoded = [str(value).encode() for value in values]
    group["blob"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    group["offset"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _picture_shape(data: bytes) -> tuple[int, int, int]:
    """Return height, width and channels.

    Raises:
        BadRecord: the header is of no picture, or of one that is too large.
    """
    try:
        with Image.open(io.BytesIO(data)) as picture:  # reads the header alone
            return picture.height, picture.width, len(picture.getbands())
    except UnidentifiedImageError:
        raise BadRecord("no picture of a known kind") from None
    except Image.DecompressionBombError as error:
        raise BadRecord(str(error)) from None


def _sound_shape(data: bytes) -> tuple[int, int]:
    """Return frames and rate in Hz.

    Raises:
        BadRecord: no header of a sound file, or of one with more than one channel, without frames, or not of 16 bits.
    """
    try:
        about = soundfile.info(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        raise BadRecord(f"no sound of a known kind: {error}") from None
    if about.channels != 1 or about.subtype != "PCM_16" or not about.frames:
        raise BadRecord(
            f"{about.frames} frames of {about.channels} channels in {about.subtype}: expected one channel of 16 bits"
        )
    return about.frames, about.samplerate


def _refuse_bad(written: Sequence[_Written], skip_bad: bool) -> None:
    bad = [entry for shard in written for entry in shard.bad]
    if bad and not skip_bad:
        shown = "".join(f"\n  {key}: {reason}" for key, reason in bad[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise PackError(
            f"{len(bad)} of {sum(s.count + len(s.bad) for s in written)} raw samples cannot be read:{shown}{more}\n"
            "Mend or remove them, or leave them out: data.on_error=skip"
        )
    if not any(shard.count for shard in written):
        raise PackError(f"None of the {len(bad)} raw files can be read; the first: {bad[0][0]}: {bad[0][1]}")


def _finish(out: Path, written: Sequence[_Written], meta: dict[str, Any], learned: Mapping[str, str]) -> ShardSet:
    """Write the index, unless the one there says the same; remove what is left of a longer, earlier packing."""
    content = hashlib.sha256("".join(shard.sha256 for shard in written).encode()).hexdigest()
    index = out / INDEX
    if index.exists():
        with open_shard(index) as file:
            if file.attrs["content"] == content:
                return ShardSet(out)
    extra = sorted(set(out.glob("shard-*.h5")) - {shard.path for shard in written})
    if extra:
        raise PackError(f"{extra[0]}: left over from another data set. Choose an empty folder, or delete this one.")
    with _in_memory() as file:
        file.attrs.update(schema_version=SCHEMA_VERSION, content=content, meta=json.dumps(meta, sort_keys=True))
        file.attrs["skipped"] = sum(len(shard.bad) for shard in written)
        _write_index(file, [shard for shard in written if shard.count])
        kept = file.create_group("learned")
        for name, text in learned.items():
            kept[name] = np.frombuffer(text.encode(), dtype=np.uint8)
        publish(file, index)
    return ShardSet(out)


def _write_index(file: h5py.File, written: Sequence[_Written]) -> None:
    """Join the shards' columns and record places; code text columns by a vocabulary over all shards."""
    file.attrs["count"] = sum(shard.count for shard in written)
    shards = file.create_group("shards")
    _write_text(shards.create_group("name"), [shard.path.name for shard in written])
    _write_text(shards.create_group("sha256"), [shard.sha256 for shard in written])
    shards["count"] = np.array([shard.count for shard in written])
    shards["size_bytes"] = np.array([shard.path.stat().st_size for shard in written])
    parts = [open_shard(shard.path) for shard in written]
    try:
        keys = [key for part in parts for key in read_text(part[f"columns/{KEY}"])]
        _refuse_doubles(keys)
        _write_text(file.create_group(KEY), keys)
        for group in ("columns", "vocabulary", "records"):
            file.create_group(group)
        for name in sorted(set(parts[0]["columns"]) - {KEY}):
            _join_column(file, name, parts)
        for name in parts[0]["records"]:
            group = file.create_group(f"records/{name}")
            kinds = {_kind(part[f"records/{name}"]) for part in parts}
            assert len(kinds) == 1, f"{name} is not the same in all shards: {sorted(kinds)}"
            group.attrs.update(parts[0][f"records/{name}"].attrs)
            for array in ("start", "size", "crc", "shape"):
                group[array] = np.concatenate([part[f"records/{name}/{array}"][:] for part in parts])
    finally:
        for part in parts:
            part.close()


def _kind(group: h5py.Group) -> tuple[str, str, tuple[int, ...]]:
    """Return what all shards must agree on: the kind, the element type, and an array's shape as far as it is fixed."""
    kind, shape = str(group.attrs["kind"]), tuple(group["shape"][0].tolist())
    return kind, str(group.attrs["dtype"]), {ARRAY: shape, RAGGED: shape[1:]}.get(kind, ())


def _join_column(file: h5py.File, name: str, parts: Sequence[h5py.File]) -> None:
    if isinstance(parts[0][f"columns/{name}"], h5py.Dataset):
        file[f"columns/{name}"] = np.concatenate([part[f"columns/{name}"][:] for part in parts])
        return
    texts = [text for part in parts for text in read_text(part[f"columns/{name}"])]
    vocabulary = sorted(set(texts))
    code = {text: i for i, text in enumerate(vocabulary)}
    file[f"columns/{name}"] = np.array([code[text] for text in texts], dtype=np.int64)
    _write_text(file.create_group(f"vocabulary/{name}"), vocabulary)


def _refuse_doubles(keys: list[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise PackError(f"Two samples have the key '{key}'; a key must name one sample.")
        seen.add(key)


def publish(file: h5py.File, path: Path) -> str:
    """Write an in-memory file durably: the name never points to half of it, even after a power cut.

    Returns:
        The SHA-256 of its bytes.
    """
    file.flush()
    image = file.id.get_file_image()
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as target:
            target.write(image)
            target.flush()
            os.fsync(target.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return hashlib.sha256(image).hexdigest()
