"""Opens, reads and verifies packed data: HDF5 shards of records and columns, and one index file.

A data set is a folder. `index.h5` contains everything needed to plan reading: the columns, and the position, checksum
and shape of each record. `shard-00000.h5` and so on contain the records: encoded images, audio and ragged arrays as one
contiguous unfiltered byte array; fixed-shape arrays as one contiguous array. HDF5 describes and writes them; reading
bypasses it and goes straight to the bytes, because h5py takes a global lock and several times as long (benchmarks/).
"""

import functools
import hashlib
import mmap
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import crc32c
import numpy as np
from loguru import logger

from trainyard.choice import Choice
from trainyard.data.array_map import ArrayMap, Part, can_map
from trainyard.data.hdf5 import ShardError
from trainyard.data.headers import BadRecord as BadRecord  # families import it from here
from trainyard.data.headers import find_misfit
from trainyard.data.index import (
    AUDIO,
    ENCODED_IMAGE,
    INPUT_PNG,
    INPUTS,
    MASK,
    Records,
    Shard,
    hold_packed,
    read_index,
    read_keys,
)
from trainyard.files import raise_failed_disk, raise_open_files
from trainyard.text import quote_path

KEY = "key"
FIRST, ALWAYS, OFF = "first", "always", "off"
"""When a record is compared with its checksum: option `data.check_crc`."""

_FILES_OF_A_SHARD = 2  # Python duplicates the descriptor of a memory map

LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


@dataclass(frozen=True)
class Ragged:
    """An array whose first axis, or first two, vary between samples; dtype and further axes are the same in all."""

    values: np.ndarray
    varying_axes: int = 1  # or 2


@dataclass(frozen=True)
class Audio:
    """Mono 16-bit audio: the bytes of a WAV or FLAC file, or PCM (frames,) int16."""

    data: bytes | np.ndarray


@dataclass(frozen=True)
class Mask:
    """The class of each pixel of the sample's `image`, (H, W) uint8 at any resolution; packed as PNG."""

    values: np.ndarray


Loaded = dict[str, bytes | np.ndarray | Mask | Ragged | Audio | int | float | str]
_Place = tuple[int, int, int]  # shard, first byte in it, end of the record in the buffer


@dataclass(frozen=True)
class Sample:
    """One training sample as a family's `pack.samples(raw, config)` yields it: cheap to list, loaded later.

    `samples` is a generator in a deterministic order that reads no file contents. `load` runs in a worker process, so
    it must be picklable (a module-level function, or functools.partial of one). It is called with the artifacts if the
    family has `pack.fit_artifacts`.
    """

    key: str  # unique and stable, for example the path relative to the raw folder
    load: Callable[..., Loaded]  # bytes: an encoded image; array: same shape in all samples; number, text: a column
    columns: Mapping[str, int | float | str] = field(default_factory=dict)  # columns known from the listing
    source: Path | None = None  # the raw file; its size and time show whether packed data is stale


@dataclass(frozen=True)
class Damage:
    """One defect that `verify` found."""

    shard: Path
    what: str  # "image of 'a/1.png'" or "the file"
    reason: str


class ShardSet:
    """An open data set. Keeps its arrays in memory, no Python object per sample."""

    def __init__(self, folder: Path) -> None:
        """Read the index and check the files against it.

        Raises:
            ShardError: no index, another schema, or a shard that is missing or has another size than in the index.
        """
        self.folder = folder
        self._hold = hold_packed(folder)
        self.index = index = read_index(folder)
        self.fingerprint, self.meta = index.fingerprint, index.meta
        self.count, self.skipped = index.count, index.skipped
        self.shards, self.columns, self.vocabulary = index.shards, index.columns, index.vocabulary
        self.artifacts, self.records = index.artifacts, index.records
        self._first = np.array([shard.first for shard in self.shards])
        self.reader, self.reader_reason = choose_reader(find_file_system(folder))
        self._opened: dict[int, _OpenShard] = {}
        self._maps: dict[str, tuple[np.ndarray, np.ndarray] | None] = {}
        self._opening, self._most_open = threading.Lock(), len(self.shards)
        # (N,) bool of each name: records whose checksum was correct when first read; none once all were
        self._checked = {name: np.zeros(self.count, dtype=bool) for name in self.records}
        for shard in self.shards:
            check_size(shard)

    def read_keys(self, ids: np.ndarray) -> list[str]:
        """Return the keys of some samples; reads them from the index on demand, because few are ever needed."""
        return read_keys(self.folder, ids)

    def read_bytes(
        self, name: str, ids: np.ndarray, *, check_crc: str = FIRST, buffer: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Read encoded records.

        Args:
            check_crc: when to compare records with their checksums: option `data.check_crc`.
            buffer: uint8 memory to read into, which saves a sixth of the time; new memory if None or too small.

        Returns:
            B uint8 arrays, views of one buffer.

        Raises:
            ShardError: a record is cut off, or its checksum is wrong.
        """
        records = self.records[name]
        sizes = records.size[ids]
        ends = np.cumsum(sizes)
        needed = int(ends[-1]) if len(ids) else 0
        if buffer is None or len(buffer) < needed:
            buffer = np.empty(needed, dtype=np.uint8)
        owners = np.searchsorted(self._first, ids, side="right") - 1
        places = zip(owners.tolist(), records.start[ids].tolist(), ends.tolist(), strict=True)
        read = self._read_from_maps if self.reader == "map" else self._read_with_pread
        cut_off = read(buffer.data, list(places))
        if cut_off is not None:
            raise self._make_error(name, ids[cut_off:], int(owners[cut_off]), "the file ends early")
        views = [buffer[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
        self._verify_checksums(name, ids, views, owners, when=check_crc)
        return views

    def read_arrays(
        self, name: str, ids: np.ndarray, *, check_crc: str = FIRST, buffer: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Read records as they were packed: arrays in their shape, encoded records as uint8 bytes.

        Args:
            buffer: as in `read_bytes`.

        Raises:
            ShardError: as in `read_bytes`.
        """
        records = self.records[name]
        read = self.read_bytes(name, ids, check_crc=check_crc, buffer=buffer)
        if records.kind in (ENCODED_IMAGE, MASK, AUDIO, INPUT_PNG):
            return read
        shapes = records.shape[ids, : 3 if records.kind in INPUTS else None].tolist()
        return [data.view(records.dtype).reshape(shape) for data, shape in zip(read, shapes, strict=True)]

    def read_into(self, name: str, ids: np.ndarray, out: np.ndarray, *, check_crc: str = FIRST) -> None:
        """Copy records of one shape, arrays or uncompressed images, into `out` (B, ...): contiguous, of their dtype.

        Raises:
            ShardError: a record is cut off, or its checksum is wrong.
        """
        mapped = self._map_arrays(name) if self.reader == "map" else None
        if mapped is None:
            self.read_bytes(name, ids, check_crc=check_crc, buffer=out.reshape(-1).view(np.uint8))
            return
        owners = self._first.searchsorted(ids, side="right") - 1
        rows, shift = mapped
        rows.take(ids + shift[owners], axis=0, out=out, mode="clip")  # one call instead of a loop in Python
        self._verify_checksums(name, ids, out, owners, when=check_crc)

    def check_headers(self, name: str, ids: np.ndarray) -> None:
        """Raise if the header of a record contradicts the index: for records that cannot be decoded.

        Raises:
            ShardError: names the first of them.
        """
        records = self.records[name]
        for i in ids:
            (data,) = self.read_bytes(name, np.array([i]), check_crc=OFF)
            if reason := find_misfit(records.kind, data, records.shape[i].tolist()):
                owner = int(self._first.searchsorted(i, side="right")) - 1
                raise self._make_error(name, np.array([i]), owner, reason)

    def close(self) -> None:
        """Release file descriptors, memory maps and the data itself; a later read opens the first two again."""
        self._hold.close()
        self._opened.clear()
        self._maps.clear()

    def _read_with_pread(self, whole: memoryview, places: Sequence[_Place]) -> int | None:
        """Read records by system calls; return the index of the first record that is cut off."""
        begin = 0
        for i, (owner, start, end) in enumerate(places):
            try:
                count = os.preadv(self._open(owner).fileno(), [whole[begin:end]], start)
            except OSError as error:
                raise_failed_disk(error, self.shards[owner].path)
                raise
            if count != end - begin:
                return i
            begin = end
        return None

    def _read_from_maps(self, whole: memoryview, places: Sequence[_Place]) -> int | None:
        """Copy records from memory maps, twice as fast as `_read_with_pread`; return the first that is cut off.

        Touching a map beyond the end of its file kills the process, so each batch checks the file's size first.
        """
        length: dict[int, int] = {}
        begin = 0
        for i, (owner, start, end) in enumerate(places):
            shard, stop = self._open(owner), start + end - begin
            if owner not in length or self._are_too_many:
                length[owner] = os.fstat(shard.fileno()).st_size
            if stop > length[owner]:
                return i
            whole[begin:end] = shard.map[start:stop]
            begin = end
        return None

    def _open(self, owner: int) -> "_OpenShard":
        """Return an open shard; of more shards than may be open, the one unused for longest is let go."""
        shard = self._opened.get(owner)
        if shard is not None and not self._are_too_many:
            return shard
        with self._opening:
            if not self._opened:
                self._most_open = allow_open_files(len(self.shards))
            shard = self._opened.pop(owner, None) or _OpenShard(self.shards[owner].path)
            self._opened[owner] = shard  # the last one is the one used last
            if len(self._opened) > self._most_open:
                del self._opened[next(iter(self._opened))]
            return shard

    @property
    def _are_too_many(self) -> bool:
        return self._most_open < len(self.shards)

    def _map_arrays(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the records of a name in all shards, and for each shard the offset from ids to their rows there.

        None: they cannot be mapped as one array.
        """
        with self._opening:
            if name not in self._maps:
                records = self.records[name]
                parts = [Part(shard.path, int(records.start[shard.first]), shard.count) for shard in self.shards]
                array = (records.row_shape, records.dtype)
                self._maps[name] = None
                if can_map(parts, *array):
                    mapped = ArrayMap(parts, *array)
                    self._maps[name] = mapped.rows, mapped.first - self._first
            return self._maps[name]

    def _verify_checksums(
        self, name: str, ids: np.ndarray, views: Sequence[np.ndarray] | np.ndarray, owners: np.ndarray, *, when: str
    ) -> None:
        """Compare records with their checksums: those read for the first time, all of them, or none."""
        if when == OFF:
            return
        checked = self._checked.get(name)
        if when == FIRST and (checked is None or checked[ids].all()):
            return
        crc = self.records[name].crc
        for i in range(len(ids)) if when == ALWAYS or checked is None else np.flatnonzero(~checked[ids]).tolist():
            if crc32c.crc32c(views[i].data) != crc[ids[i]]:
                raise self._make_error(name, ids[i : i + 1], int(owners[i]), "its checksum differs")
        if checked is not None:
            checked[ids] = True
            if checked.all():  # looks up to the first that is not
                self._checked.pop(name, None)

    def _make_error(self, name: str, ids: np.ndarray, owner: int, reason: str) -> ShardError:
        return ShardError(
            f"{self.shards[owner].path}: {name} of '{self.read_keys(ids[:1])[0]}' is damaged: {reason}. "
            f"List all damage: trainyard verify {quote_path(self.folder)}"
        )


def choose_reader(file_system: str) -> Choice[str]:
    """Return how to read records, "map" or "pread", and the reason."""
    if file_system in LOCAL_FILE_SYSTEMS:
        return Choice("map", f"{file_system} is local: a memory map saves a system call for each record")
    return Choice(
        "pread",
        f"{file_system} is not known to be local: a failed read is an error, a failed map would kill the run",
    )


def find_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that contains `path`, for example ext4 or nfs4; "unknown" without `mounts`.

    Args:
        mounts: proc_pid_mountinfo(5): field 5 is the mount point, with octal escapes; the type follows " - ".
    """
    if not mounts.is_file():
        return "unknown"
    mount, kind = Path("/"), "unknown"
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        if path.resolve().is_relative_to(point) and point.is_relative_to(mount):
            mount, kind = point, after.split()[0]
    return kind


def verify(folder: Path, progress: Callable[[int], object] = lambda bytes_read: None) -> Iterator[Damage]:
    """Check every shard against the index, and yield every damaged record, and every one of another shape.

    Args:
        progress: called with the bytes read since the last call.

    Raises:
        ShardError: there is no readable index.
    """
    with hold_packed(folder):
        index, keys = read_index(folder), read_keys(folder)
        for shard in index.shards:
            if not shard.path.is_file():
                yield Damage(shard.path, "the file", "missing")
                continue
            check_no_link_out(shard)
            size = shard.path.stat().st_size
            if size != shard.size_bytes:
                yield Damage(shard.path, "the file", f"{size} bytes, expected {shard.size_bytes}")
            content = np.memmap(shard.path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
            any_record = False
            for damage in _find_damaged_records(shard, index.records, keys, content):
                any_record = True
                yield damage
            is_whole = size != shard.size_bytes or hashlib.sha256(content.data).hexdigest() == shard.sha256
            if not any_record and not is_whole:
                yield Damage(shard.path, "the file", "its description is damaged; every record in it is intact")
            progress(size)


def _find_damaged_records(
    shard: Shard, records: dict[str, Records], keys: list[str], content: np.ndarray
) -> Iterator[Damage]:
    for i in range(shard.first, shard.first + shard.count):
        for name, place in records.items():
            start, size = int(place.start[i]), int(place.size[i])
            data = content[start : start + size]
            if len(data) < size or crc32c.crc32c(data.data) != place.crc[i]:
                reason = "cut off" if len(data) < size else "checksum differs"
            else:
                reason = find_misfit(place.kind, data, place.shape[i].tolist())
            if reason:
                yield Damage(shard.path, f"{name} of '{keys[i]}'", reason)


def check_size(shard: Shard) -> None:
    """Compare a shard file's size with the index.

    Raises:
        ShardError: the file is missing or has another size.
    """
    if not shard.path.is_file():
        raise ShardError(f"{shard.path}: missing, but the index lists it. Copy it again, or pack the data again.")
    check_no_link_out(shard)
    size = shard.path.stat().st_size
    if size != shard.size_bytes:
        raise ShardError(
            f"{shard.path}: {size} bytes, the index says {shard.size_bytes}: the file is "
            f"{'cut off' if size < shard.size_bytes else 'not the one packed'}. "
            "Copy it again, or delete it and pack again. List the lost records: "
            f"trainyard verify {quote_path(shard.path.parent)}"
        )


def check_no_link_out(shard: Shard) -> None:
    """Refuse a shard that is a link to a file elsewhere, which a stranger's packed data could use to read ours.

    Raises:
        ShardError: it is one.
    """
    real = shard.path.resolve()
    if real.parent != shard.path.parent.resolve():
        raise ShardError(
            f"{shard.path}: a link to {real}, outside its folder. Packed data contains its shards itself. "
            f"If you trust it: cp --remove-destination {shlex.quote(str(real))} {shlex.quote(str(shard.path))}"
        )


def allow_open_files(count: int) -> int:
    """Raise the limit on open files so that every shard can stay open; return how many can."""
    wanted = _FILES_OF_A_SHARD * count + 256
    spare = raise_open_files(wanted)
    if spare >= wanted:
        return count
    most = max(1, (spare - min(256, spare // 2)) // _FILES_OF_A_SHARD)
    logger.warning(
        "{} shards, but this system allows this process {} more open files (ulimit -Hn): {} shards are open at a time, "
        "and reading in random order opens them again and again",
        count,
        spare,
        most,
    )
    return most


class _OpenShard:
    """A shard's file, and its memory map if somebody asks for it; closed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def fileno(self) -> int:
        return self._file.fileno()

    @functools.cached_property
    def map(self) -> memoryview:
        """The file's bytes, read only."""
        return memoryview(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ))
