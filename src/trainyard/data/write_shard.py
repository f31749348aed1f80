"""One shard: its samples loaded, measured, checked and written as an HDF5 file that is whole or absent."""

import hashlib
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
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
    ENCODED_IMAGE,
    KEY,
    PCM,
    RAGGED,
    SCHEMA_VERSION,
    SOUND,
    Audio,
    BadRecord,
    Loaded,
    Ragged,
    Sample,
)
from trainyard.files import DISK_FULL, write_atomically


@dataclass(frozen=True)
class ShardTask:
    """One shard to write: everything a worker process needs."""

    path: Path
    samples: list[Sample]
    listing: str  # digest of what the shard is made of
    skip_bad: bool
    artifacts: Mapping[str, str] | None  # what `load` is called with; None: with nothing


@dataclass(frozen=True)
class _Blob:
    """A record whose length is its own, with what the index says of it (`shards.Records`)."""

    data: bytes
    kind: str
    dtype: str
    shape: tuple[int, ...]


_Row = dict[str, _Blob | np.ndarray | int | float | str]


@dataclass(frozen=True)
class WrittenShard:
    """What became of a task."""

    path: Path
    sha256: str  # empty if the shard was not written, because of bad files
    count: int
    bad: list[tuple[str, str]]  # key, reason


def open_image(data: bytes) -> Image.Image:
    """Decode a whole image file, so that a broken one is found when packing and not in training.

    Raises:
        BadRecord: it is empty, of no kind Pillow knows, cut off or otherwise broken.
    """
    if not data:
        raise BadRecord("the file is empty")
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        image.getexif()
    except UnidentifiedImageError:
        raise BadRecord("the file is no image, whatever its name says") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's words for broken files
        raise BadRecord(f"the image cannot be decoded: {error}") from None
    return image


_done: Any = None


def start_worker(path: list[str], done: Any) -> None:
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


def write_shard(task: ShardTask) -> WrittenShard:
    rows: list[_Row] = []
    bad: list[tuple[str, str]] = []
    for sample in task.samples:
        try:
            loaded = sample.load() if task.artifacts is None else sample.load(task.artifacts)
            rows.append(_measure({**sample.columns, **loaded, KEY: sample.key}))
        except (BadRecord, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            bad.append((sample.key, str(error) or type(error).__name__))
        with _done.get_lock():
            _done.value += 1
    if bad and not task.skip_bad:
        return WrittenShard(task.path, "", len(rows), bad)
    with open_in_memory() as file:
        file.attrs.update(schema_version=SCHEMA_VERSION, count=len(rows))
        if rows:
            _write_rows(file, rows)
        return WrittenShard(task.path, publish(file, task.path), len(rows), bad)


def open_in_memory() -> h5py.File:
    """Open a new HDF5 file in memory, so that a full disk meets a plain write and not the middle of HDF5."""
    options = {"libver": "v110", "alignment_threshold": 1, "alignment_interval": 4096}
    return h5py.File("new", "w", driver="core", backing_store=False, **options)


def _measure(loaded: Loaded) -> _Row:
    """Read the size of each image and sound from its header."""
    return {
        name: _encode_blob(value) if isinstance(value, bytes | Ragged | Audio) else value
        for name, value in loaded.items()
    }


def _encode_blob(value: bytes | Ragged | Audio) -> _Blob:
    if isinstance(value, bytes):
        return _Blob(value, ENCODED_IMAGE, "uint8", _image_shape(value))
    if isinstance(value, Ragged):
        array = np.ascontiguousarray(value.values)
        return _Blob(array.tobytes(), RAGGED, array.dtype.name, array.shape)
    if isinstance(value.data, bytes):
        return _Blob(value.data, SOUND, "uint8", _audio_shape(value.data))
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
            write_texts(columns.create_group(name), values)
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


def write_texts(group: h5py.Group, values: Sequence[Any]) -> None:
    encoded = [str(value).encode() for value in values]
    group["blob"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    group["offset"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def _image_shape(data: bytes) -> tuple[int, int, int]:
    """Return height, width and channels.

    Raises:
        BadRecord: the header is of no image, or of one that is too large.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:  # reads the header alone
            return image.height, image.width, len(image.getbands())
    except UnidentifiedImageError:
        raise BadRecord("no image of a known kind") from None
    except Image.DecompressionBombError as error:
        raise BadRecord(str(error)) from None


def _audio_shape(data: bytes) -> tuple[int, int]:
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


def publish(file: h5py.File, path: Path) -> str:
    """Write an in-memory file durably: the name never points to half of it, even after a power cut.

    Returns:
        The SHA-256 of its bytes.
    """
    file.flush()
    image = file.id.get_file_image()
    write_atomically(path, image)
    return hashlib.sha256(image).hexdigest()
