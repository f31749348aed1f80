"""Reads and writes the index of packed data, and refuses one that was changed, contradicts itself or leads elsewhere.

An index begins with 512 bytes that HDF5 leaves to its users: one line of text with the SHA-256 of everything after
them, so every byte is checked before HDF5 interprets any. Check by hand: `tail -c +513 index.h5 | sha256sum`.
"""

import contextlib
import fcntl
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from trainyard.data.hdf5 import (
    NUMBERS,
    ShardError,
    explain_malformed,
    make_refusal,
    open_hdf5,
    read_array,
    read_group,
    read_number,
    read_string,
    read_texts,
)
from trainyard.files import name_failed_file, open_untrusted, parse_json
from trainyard.text import quote_path

INDEX = "index.h5"

ENCODED_IMAGE, MASK, ARRAY, AUDIO, PCM = "image", "mask", "array", "audio", "pcm"
INPUT_PNG, INPUT_RAW = "input-png", "input-raw"
"""Kinds of records: an encoded image; a mask as PNG; an array of the same shape in all samples; the bytes of an audio
file; PCM audio; an image that packing resized to the model's input (`store.py`), as PNG or uncompressed."""

VARYING_AXES = {"ragged": 1, "ragged-2d": 2}
"""Kinds of arrays whose first axes vary between samples, and how many axes."""

INPUTS = (INPUT_PNG, INPUT_RAW)
IMAGE = "image"
"""Name of the record that augmentation is drawn for. Masks and images of other names follow it."""

REGION = ("box_y", "box_x", "box_height", "box_width")
"""Columns with the part of an image that counts as the whole, in px of the image before packing resized it to
the model's input, or in px of the image as packing encoded it again (`packing.store=jpeg`)."""

HEADER_BYTES = 512  # the smallest user block that HDF5 knows
_MARK = b"Trainyard index. SHA-256 of the bytes after the first 512: "

_SHARD_NAME = re.compile(r"shard-\d{5,9}\.h5")
_ROWS = 1 << 20  # rows checked at once, so that checking needs no second copy of a large index


@dataclass(frozen=True)
class Records:
    """Position and shape of the records of one field: N rows over all shards, in sample order."""

    start: np.ndarray  # (N,) int64 byte in the shard file
    size: np.ndarray  # (N,) int64 bytes
    crc: np.ndarray  # (N,) uint32, CRC-32C (Castagnoli) of those bytes
    shape: np.ndarray  # (N, ...) int32: an image's height, width, channels, and of INPUTS the original's height, width;
    # audio's frames, rate_hz; an array's shape
    kind: str  # ENCODED_IMAGE, ARRAY, ...
    dtype: str  # NumPy name of the elements; uint8 for encoded bytes

    @property
    def original_px(self) -> np.ndarray:
        """(N, 2) int32: height and width of images before packing resized any."""
        return self.shape[:, 3:] if self.kind in INPUTS else self.shape[:, :2]

    @property
    def varying_axes(self) -> int:
        """The number of an array's first axes that vary between samples; 0 for any other record."""
        return VARYING_AXES.get(self.kind, 0)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of each record, if all have one: of ARRAY and INPUT_RAW."""
        assert self.kind in (ARRAY, INPUT_RAW)
        return tuple(self.shape[0, : 3 if self.kind == INPUT_RAW else None].tolist())


def list_followers(records: Mapping[str, Records]) -> dict[str, Records]:
    """Return the masks and the further images, which the loader moves as augmentation moves a sample's `image`."""
    return {n: r for n, r in records.items() if r.kind == MASK or (r.kind == ENCODED_IMAGE and n != IMAGE)}


@dataclass(frozen=True)
class Shard:
    """One file of a data set, as the index describes it."""

    path: Path
    first: int  # sample id of its first record
    count: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The content of an index, except the keys, which few need."""

    path: Path
    fingerprint: str  # SHA-256 of its HDF5 content: the identity of the data set
    meta: dict[str, Any]
    content: str  # digest of the shards' digests
    count: int
    skipped: int
    shards: list[Shard]
    columns: dict[str, np.ndarray]
    vocabulary: dict[str, list[str]]
    artifacts: dict[str, str]
    records: dict[str, Records]

    def check_family(self, family: str) -> None:
        """Refuse data that was packed for another family than the job's.

        Raises:
            ShardError: it was.
        """
        packed = self.meta.get("family", family)  # none if `pack` was called directly
        if packed != family:
            raise ShardError(
                f"{self.path.parent}: packed for the family {packed!a}, but this job's family is '{family}'. "
                f"Give it other data: data.path=FOLDER, or pack the raw files for it: trainyard pack JOB RAW OUT"
            )


def seal_index(content: bytes) -> bytes:
    """Return an HDF5 file with the header that states its digest."""
    return _make_header(hashlib.sha256(content).hexdigest()) + content


def read_fingerprint(path: Path) -> str:
    """Return the SHA-256 of an index's HDF5 content, which its header states.

    Raises:
        ShardError: the file was changed since it was written.
    """
    with name_failed_file(path), path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if header != _make_header(digest):
        raise ShardError(
            f"{path}: damaged: its content differs from the SHA-256 in its first line. Copy it again, or delete it and "
            "run the same trainyard pack again, which keeps the shards."
        )
    return digest


def find_index(folder: Path) -> Path:
    """Return the path of a data set's index.

    Raises:
        ShardError: there is none.
    """
    index = folder / INDEX
    if not folder.is_dir():
        command = f"trainyard pack JOB RAW {quote_path(folder)}"
        raise ShardError(f"{folder}: no such folder. Expected packed data. Pack it: {command}")
    if not index.is_file():
        raise ShardError(
            f"{folder}: contains no {INDEX}, so it is not packed data. Pack it: trainyard pack JOB RAW OUT"
        )
    return index


def hold_packed(folder: Path) -> BinaryIO:
    """Open a data set's index with a shared flock, so that `trainyard gc` leaves the data until it is closed.

    Every reader does. It needs no right to write. A file system without flock has no such lock; there, gc asks.

    Raises:
        ShardError: there is no index.
    """
    file = find_index(folder).open("rb")
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def is_index(path: Path) -> bool:
    """Return whether a file begins as packing begins an index, and is no link; the rest is not read."""
    try:
        with open_untrusted(path) as file:
            return file.read(len(_MARK)) == _MARK
    except OSError:
        return False


def read_index(folder: Path) -> Index:
    """Read an index.

    Raises:
        FormatError: it states another format number, or none.
        ShardError: there is none, it was changed, or its content cannot be true.
    """
    path = find_index(folder)
    fingerprint = read_fingerprint(path)
    with open_hdf5(path) as file, explain_malformed(path):
        count = read_number(file, "count")
        shards = _read_shards(file, folder, count)
        vocabulary = {name: read_texts(read_group(file["vocabulary"], name)) for name in read_group(file, "vocabulary")}
        return Index(
            path,
            fingerprint,
            _read_meta(file),
            read_string(file, "content"),
            count,
            read_number(file, "skipped"),
            shards,
            _read_columns(file, count, vocabulary),
            vocabulary,
            {
                name: read_array(file["artifacts"], name, dtype="uint8").tobytes().decode()
                for name in read_group(file, "artifacts")
            },
            {name: _read_records(file["records"], name, shards) for name in read_group(file, "records")},
        )


def read_keys(folder: Path, ids: np.ndarray | None = None) -> list[str]:
    """Return the keys of some samples, or of all.

    Raises:
        ShardError: as in `read_index`.
    """
    path = find_index(folder)
    read_fingerprint(path)
    with open_hdf5(path) as file, explain_malformed(path):
        group = read_group(file, "key")
        if ids is None:
            return read_texts(group)
        ends = [group["offset"][i : i + 2].tolist() for i in ids.tolist()]  # few of many
        return [group["blob"][begin:end].tobytes().decode() for begin, end in ends]


def _make_header(sha256: str) -> bytes:
    return (_MARK + sha256.encode() + b"\n").ljust(HEADER_BYTES, b"\n")


def _read_meta(file: h5py.File) -> dict[str, Any]:
    try:
        meta = parse_json(read_string(file, "meta"))
    except ValueError as error:
        raise make_refusal(Path(file.filename), f"attribute 'meta' is not JSON ({error})") from None
    if not isinstance(meta, dict):
        raise make_refusal(Path(file.filename), "attribute 'meta' is not a JSON object")
    return meta


def _read_shards(file: h5py.File, folder: Path, count: int) -> list[Shard]:
    """Read the list of shards; a name must be one that packing gives, so that none leads out of the folder."""
    path, group = Path(file.filename), read_group(file, "shards")
    names, digests = (read_texts(read_group(group, name)) for name in ("name", "sha256"))
    counts, sizes = (read_array(group, name, dtype="int64", length=len(names)) for name in ("count", "size_bytes"))
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise make_refusal(path, f"names the shard {name!a}, expected one such as shard-00000.h5")
    if len(set(names)) != len(names) or len(digests) != len(names) or not names:
        raise make_refusal(path, "lists no shards, or one of them twice")
    if min(counts.tolist()) < 1 or min(sizes.tolist()) < 0 or sum(counts.tolist()) != count:
        raise make_refusal(path, f"counts {sum(counts.tolist())} samples in its shards, but {count} in all")
    first = np.cumsum(counts) - counts
    rows = zip(names, first.tolist(), counts.tolist(), sizes.tolist(), digests, strict=True)
    return [Shard(folder / name, f, c, s, digest) for name, f, c, s, digest in rows]


def _read_columns(file: h5py.File, count: int, vocabulary: dict[str, list[str]]) -> dict[str, np.ndarray]:
    group = read_group(file, "columns")
    dtypes = {name: "float64" if getattr(group[name], "dtype", None) == np.float64 else "int64" for name in group}
    columns = {name: read_array(group, name, dtype=dtype, length=count) for name, dtype in dtypes.items()}
    for name, texts in vocabulary.items():
        codes = columns.get(name, np.empty(0))
        if codes.dtype != np.int64 or codes.min() < 0 or codes.max() >= len(texts):
            raise make_refusal(Path(file.filename), f"column '{name}' names texts that are not in its vocabulary")
    if len(read_group(file, "key").get("offset", ())) != count + 1:
        raise make_refusal(Path(file.filename), f"has not one key for each of its {count} samples")
    return columns


def _read_records(parent: h5py.Group, name: str, shards: list[Shard]) -> Records:
    group, path = read_group(parent, name), Path(parent.file.filename)
    kind, dtype = read_string(group, "kind"), read_string(group, "dtype")
    if kind not in (ENCODED_IMAGE, MASK, ARRAY, AUDIO, PCM, *VARYING_AXES, *INPUTS):
        raise make_refusal(path, f"{group.name} is of the unknown kind {kind!a}")
    if dtype not in NUMBERS or (kind in (ENCODED_IMAGE, MASK, AUDIO, *INPUTS) and dtype != "uint8"):
        raise make_refusal(path, f"{group.name} has elements of type {dtype!a}")
    count = shards[-1].first + shards[-1].count
    records = Records(
        start=read_array(group, "start", dtype="int64", length=count),
        size=read_array(group, "size", dtype="int64", length=count),
        crc=read_array(group, "crc", dtype="uint32", length=count),
        shape=read_array(group, "shape", dtype="int32", length=count, axes=2),
        kind=kind,
        dtype=dtype,
    )
    for shard, rows in _cut_rows(shards):
        if fault := _find_fault(records, shard, rows):
            raise make_refusal(path, f"{group.name}: {fault} in {shard.path.name}")
    return records


def _cut_rows(shards: list[Shard]) -> Iterator[tuple[Shard, slice]]:
    """Yield the rows of each shard in parts, each part beginning with the last row of the one before."""
    for shard in shards:
        for begin in range(0, shard.count, _ROWS):
            first = shard.first + max(begin - 1, 0)
            yield shard, slice(first, shard.first + min(begin + _ROWS, shard.count))


def _find_fault(records: Records, shard: Shard, rows: slice) -> str:
    """Return what cannot be true of some rows of a shard; "" if nothing."""
    start, size, shape = records.start[rows], records.size[rows], records.shape[rows]
    if start.min() < 0 or size.min() < 0 or (size > shard.size_bytes - start).any():
        return "a record lies outside the file"
    if records.kind in (ENCODED_IMAGE, MASK, AUDIO):
        axes = 2 if records.kind == AUDIO else 3
        return "" if shape.shape[1] == axes and shape.min() >= 0 else "a shape cannot be true"
    if records.kind in INPUTS:
        alike = shape.shape[1] == 5 and shape.min() >= 1 and (shape[:, :3] == records.shape[0, :3]).all()
        if not alike or records.kind == INPUT_PNG:
            return "" if alike else "a shape cannot be true"
        if (size != shape[:, :3].prod(axis=1, dtype=np.float64)).any():
            return "a shape cannot be true"
        return "uncompressed images do not follow each other" if (np.diff(start) != size[0]).any() else ""
    itemsize = np.dtype(records.dtype).itemsize
    if shape.min(initial=0) < 0 or (shape.prod(axis=1, dtype=np.float64) * itemsize != size).any():
        return "a shape does not match the size of its record"
    if records.kind == ARRAY and (shape != records.shape[0]).any():
        return "arrays that should have one shape differ"
    if records.kind == ARRAY and (np.diff(start) != size[0]).any():
        return "arrays of one shape do not follow each other"
    if records.kind == PCM and (shape.shape[1] != 1 or records.dtype != "int16"):
        return "a shape cannot be true"
    if shape.shape[1] < records.varying_axes:
        return "a shape has fewer axes than vary"
    if (shape[:, records.varying_axes or 1 :] != shape[0, records.varying_axes or 1 :]).any():
        return "a shape differs beyond the axes that vary"
    return ""
