"""Loads, measures and checks the samples of one shard, and writes them to an HDF5 file that is complete or absent."""

import hashlib
import io
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import h5py
import numpy as np
import simplejpeg
from h5py import h5d, h5p, h5s, h5t
from PIL import Image, ImageOps, UnidentifiedImageError

from trainyard.config.families import describe_value, forbid_own_randomness, locate_code
from trainyard.data.hdf5 import NUMBERS
from trainyard.data.headers import BadRecord, read_audio_shape, read_image_shape
from trainyard.data.index import ARRAY, AUDIO, ENCODED_IMAGE, IMAGE, MASK, PCM, VARYING_AXES
from trainyard.data.shards import KEY, Audio, Loaded, Mask, Ragged, Sample
from trainyard.data.store import InputStore, JpegStore, Store, encode_png, find_region, scale_region
from trainyard.errors import ContractError, UserError, find_place
from trainyard.files import DISK_FULL, FORMATS, PACKED_DATA, open_atomically, raise_failed_disk
from trainyard.text import join_names

_SEEDED = "numpy.random.default_rng(seed) or random.Random(key)"
_RESERVED = {"sample_id", "epoch", "samples_seen", KEY}
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_JPEG_END = b"\xff\xd9"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # x, y, steps
_MAP_BYTES = 8 << 20  # of the memory that records are copied to
_FORMAT = {"libver": "v110", "alignment_threshold": 1, "alignment_interval": 4096}


@dataclass(frozen=True)
class ShardTask:
    """One shard to write: everything a worker process needs."""

    path: Path
    samples: list[Sample]
    listing: str  # digest of the raw files and options that the shard is made from
    skip_bad: bool
    artifacts: Mapping[str, str] | None  # argument of `load`; None: no argument
    store: Store | None = None  # how images are changed; None: their bytes are kept


@dataclass(frozen=True)
class _Blob:
    """A record of variable length, with its entries in the index (`shards.Records`)."""

    data: bytes | memoryview
    kind: str
    dtype: str
    shape: tuple[int, ...]


class _JoinedBlobs:
    """The records of variable length of one name, whose bytes are copied one after the other.

    Into separate maps: between the buffers of decoding, records leave gaps that neither fills again. 128 MiB of
    uncompressed images took 223 MiB then, and 440 once the worker wrote its next shard.
    """

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self.kinds: set[tuple[str, str, tuple[int, ...]]] = set()  # kind, dtype, axes that must be equal
        self.sizes: list[int] = []
        self.checksums: list[int] = []
        self.shapes: list[tuple[int, ...]] = []

    def append(self, blob: _Blob) -> None:
        """Copy a record."""
        rest = memoryview(blob.data)
        while rest:
            if not self._maps or self._maps[-1].tell() == _MAP_BYTES:
                self._maps.append(mmap.mmap(-1, _MAP_BYTES, mmap.MAP_PRIVATE))
            room = _MAP_BYTES - self._maps[-1].tell()
            self._maps[-1].write(rest[:room])
            rest = rest[room:]
        self.kinds.add((blob.kind, blob.dtype, blob.shape[VARYING_AXES.get(blob.kind, len(blob.shape)) :]))
        self.sizes.append(len(blob.data))
        self.checksums.append(crc32c.crc32c(blob.data))
        self.shapes.append(blob.shape)

    def get_parts(self) -> list[memoryview]:
        """Return all bytes, in parts that follow each other."""
        return [memoryview(memory)[: memory.tell()] for memory in self._maps]


@dataclass(frozen=True)
class _Region:
    """The records of one name, which follow each other in the file."""

    start: int  # first byte in the file
    parts: Sequence[memoryview]  # their bytes, wherever they are cut


_Value = np.ndarray | int | float | str
_Row = dict[str, _Value | _JoinedBlobs]  # those of one name share one `_JoinedBlobs`


@dataclass(frozen=True)
class WrittenShard:
    """The result of a task."""

    path: Path
    sha256: str  # empty if the shard was not written because of bad files
    count: int
    bad: list[tuple[str, str]]  # key, reason
    resumed: bool = False  # an earlier call wrote it


def open_image(data: bytes) -> Image.Image:
    """Decode a whole image file, so that a broken file is found during packing and not in training.

    Raises:
        BadRecord: the file is empty, cut off, broken or of a format that Pillow does not know.
    """
    if not data:
        raise BadRecord("the file is empty")
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        image.getexif()
    except UnidentifiedImageError:
        raise BadRecord("the file is not an image, whatever its name says") from None
    except (MemoryError, BadRecord):
        raise
    except Exception as error:  # Pillow's readers raise struct.error, IndexError and others for broken files
        raise BadRecord(f"the image cannot be decoded: {error or type(error).__name__}") from None
    if image.format == "PNG":
        _check_png(data)
    elif image.format == "JPEG":
        _check_jpeg(data)
    return image


def _check_jpeg(data: bytes) -> None:
    """Refuse a JPEG whose data end before the image does: libjpeg fills the rest with gray and only warns."""
    ended = data if data.endswith(_JPEG_END) else data.rstrip(b"\0").removesuffix(_JPEG_END) + _JPEG_END
    try:
        simplejpeg.decode_jpeg(ended, "GRAY", fastdct=True, strict=True)
    except ValueError as error:  # other warnings are of files that are whole
        if "premature end" in str(error).lower():
            raise BadRecord("truncated: its data end before the image does") from None


def _check_png(data: bytes) -> None:
    """Refuse a PNG whose compressed rows end before the image does: Pillow leaves the rest black."""
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    bits, at, rows, inflated = depth * _PNG_CHANNELS[colour], 8, zlib.decompressobj(), 0
    grids = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = ((-((x - width) // step_x), -((y - height) // step_y)) for x, y, step_x, step_y in grids)
    expected = sum(high * (1 + (wide * bits + 7) // 8) for wide, high in sizes if wide > 0 and high > 0)
    while at + 8 <= len(data) and inflated < expected:
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            inflated += len(rows.decompress(data[at + 8 : at + 8 + size], expected - inflated))
        at += 12 + size
    if inflated < expected:
        raise BadRecord("truncated: its data end before the image does")


def read_image(path: Path) -> tuple[bytes, Image.Image]:
    """Return the bytes to store of an image file, and the decoded image.

    The bytes of an upright 8-bit gray or RGB JPEG or PNG are those of the file; anything else becomes PNG.

    Raises:
        BadRecord: as in `open_image`, or pixels of an unknown value range.
    """
    data = path.read_bytes()
    image = open_image(data)
    is_rotated = image.getexif().get(_ORIENTATION, 1) != 1
    if image.format in ("JPEG", "PNG") and image.mode in ("L", "RGB") and not is_rotated:
        return data, image
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "YCbCr", "CMYK"):
        raise BadRecord(f"pixel mode {image.mode} has an unknown value range: convert the image to 8-bit RGB or gray")
    png = io.BytesIO()
    ImageOps.exif_transpose(image).convert("L" if image.mode == "L" else "RGB").save(png, "PNG", compress_level=1)
    return png.getvalue(), image


def write_shard(task: ShardTask, *, on_sample: Callable[[], object]) -> WrittenShard:
    """Load the samples of a task and write them, or return the bad files; runs in a worker process.

    Args:
        on_sample: called after each sample that was loaded, or is bad.
    """
    rows: list[_Row] = []
    blobs: dict[str, _JoinedBlobs] = {}
    bad: list[tuple[str, str]] = []
    first: Loaded = {}
    for sample in task.samples:
        try:
            with nullcontext() if first else forbid_own_randomness(locate_load(sample), _SEEDED):
                loaded = sample.load() if task.artifacts is None else sample.load(task.artifacts)
            _check_loaded(sample, loaded, first)
            first = first or loaded
            measured = _measure({**sample.columns, **loaded, KEY: sample.key}, task.store)
        except Exception as error:
            if isinstance(error, UserError | MemoryError) or getattr(error, "errno", None) in DISK_FULL:
                raise
            raise_failed_disk(error, sample.source or Path(sample.key))
            bad.append((sample.key, _describe_error(error)))
        else:
            rows.append({name: _join(blobs, name, value) for name, value in measured.items()})
        on_sample()
    if bad and not task.skip_bad:
        return WrittenShard(task.path, "", len(rows), bad)
    return WrittenShard(task.path, _write_file(task.path, rows), len(rows), bad)


def locate_load(sample: Sample) -> str:
    """Return where the function is written that loads a sample, and the sample's key."""
    return f"{locate_code(sample.load)} of sample '{sample.key}'"


def _check_loaded(sample: Sample, loaded: Any, first: Loaded) -> None:
    """Raise a UserError about the family's code unless `load` returned what can be packed, as for the first sample."""
    where = locate_load(sample)
    if not isinstance(loaded, dict):
        raise ContractError(
            f"{where} returned {type(loaded).__name__}; expected a dict of records and columns by name."
        )
    if first and list(loaded) != list(first):
        raise ContractError(f"{where} returned {join_names(list(loaded))}, and of the first {join_names(list(first))}.")
    for name, value in {**sample.columns, **loaded}.items():
        if name in _RESERVED:
            raise ContractError(f"{where}: '{name}' is reserved: a batch has it already. Choose another name.")
        if isinstance(value, bytes | Mask) and not isinstance(loaded.get(IMAGE), bytes):
            raise ContractError(
                f"{where}: '{name}' is {_describe_form(value)}, which follows the augmentation of '{IMAGE}', and there "
                f"is none. Name the first image '{IMAGE}'."
            )
        if not (form := _describe_form(value)):
            kind = describe_value(value) if isinstance(value, np.ndarray) else type(value).__name__
            raise ContractError(
                f"{where}: '{name}' is {kind}; expected an image's bytes, Mask of (H, W) uint8, a NumPy array of "
                "numbers, Ragged, Audio, a number or text."
            )
        example = first.get(name, value)
        if isinstance(value, np.ndarray) and isinstance(example, np.ndarray) and value.shape != example.shape:
            raise ContractError(
                f"{where}: '{name}' has the shape {value.shape}, and of the first {example.shape}. Wrap arrays that "
                "vary in their first axis: Ragged(array); in their first two: Ragged(array, varying_axes=2)"
            )
        if form != (of_first := _describe_form(example)):
            raise ContractError(f"{where}: '{name}' is {form}, and of the first {of_first}. All samples need the same.")


def _describe_form(value: Any) -> str:
    """Describe the form that all samples must share in a record or a column; "" if it cannot be packed."""
    if isinstance(value, np.ndarray):
        return f"an array {value.shape}" if value.dtype.name in NUMBERS else ""
    if isinstance(value, Mask):
        mask = value.values
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.uint8 and mask.ndim == 2 and mask.size
        return "a mask" if is_mask else ""
    if isinstance(value, Ragged):
        array, axes = value.values, value.varying_axes
        is_array = isinstance(array, np.ndarray) and array.dtype.name in NUMBERS
        if not is_array or not 1 <= axes <= min(array.ndim, len(VARYING_AXES)):
            return ""
        return f"Ragged {('n', 'm')[:axes] + array.shape[axes:]} of {array.dtype}".replace("'", "")
    if isinstance(value, Audio):
        pcm = value.data
        is_pcm = isinstance(pcm, np.ndarray) and pcm.dtype == np.int16 and pcm.ndim == 1
        return "Audio of a file" if isinstance(pcm, bytes) else "Audio of samples" if is_pcm else ""
    kinds = {bytes: "bytes of an image", str: "text"}
    named = next((name for kind, name in kinds.items() if isinstance(value, kind)), "")
    return named or ("a number" if isinstance(value, int | float | np.number | np.bool_) else "")


def _describe_error(error: Exception) -> str:
    """Explain why a sample is bad; for an error that no loader expects, add the place in the code."""
    if isinstance(error, BadRecord | OSError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error} ({find_place(error)})"


def _join(blobs: dict[str, _JoinedBlobs], name: str, value: _Value | _Blob) -> _Value | _JoinedBlobs:
    """Copy a record of variable length to the others of its name; return anything else as it is."""
    if not isinstance(value, _Blob):
        return value
    joined = blobs.setdefault(name, _JoinedBlobs())
    joined.append(value)
    return joined


def _write_file(path: Path, rows: list[_Row]) -> str:
    """Write rows as an HDF5 file, and return its SHA-256.

    HDF5 writes its description into memory and leaves the records' places empty. The file is written in one pass from
    that and from the records, which are not copied: memory holds them once, and a full disk fails a plain write and not
    a call inside HDF5.
    """
    with os.fdopen(os.memfd_create(path.name), "w+b", buffering=0) as described:
        with h5py.File(described, "w", **_FORMAT) as file:
            file.attrs.update(format=FORMATS[PACKED_DATA], count=len(rows))
            regions = _write_rows(file, rows) if rows else []
        size_bytes = os.fstat(described.fileno()).st_size
        digest = hashlib.sha256()
        with open_atomically(path, size_bytes=size_bytes) as out:
            for part in _join_regions(described.fileno(), size_bytes, regions):
                digest.update(part)
                out.write(part)
    return digest.hexdigest()


def _join_regions(described: int, size_bytes: int, regions: list[_Region]) -> Iterator[bytes | memoryview]:
    """Yield a file from its first byte to its last: what HDF5 wrote, and records where it left room."""
    at = 0
    for region in sorted(regions, key=lambda region: region.start):
        yield os.pread(described, region.start - at, at)
        yield from region.parts
        at = region.start + sum(len(part) for part in region.parts)
    yield os.pread(described, size_bytes - at, at)


def open_in_memory() -> h5py.File:
    """Open a new HDF5 file in memory, so that a full disk fails a plain write and not a call inside HDF5."""
    return h5py.File("new", "w", driver="core", backing_store=False, **_FORMAT)


def _measure(loaded: Loaded, store: Store | None) -> dict[str, _Value | _Blob]:
    """Read the shape of each image and audio file from its header; change the image if there is a store."""
    row: dict[str, _Value | _Blob] = {
        name: _encode_blob(value) if isinstance(value, bytes | Mask | Ragged | Audio) else value
        for name, value in loaded.items()
    }
    data = loaded.get(IMAGE)
    if isinstance(store, JpegStore) and isinstance(data, bytes):
        height, width, _ = read_image_shape(data)
        row[IMAGE] = blob = _encode_blob(store.encode(data))
        if blob.shape[:2] != (height, width):
            _check_scalable(loaded)
            row |= scale_region(loaded, (height, width), blob.shape[:2])
    elif isinstance(store, InputStore) and isinstance(data, bytes):
        height, width, _ = read_image_shape(data)
        shape = (store.height_px, store.width_px, store.channels, height, width)
        row[IMAGE] = _Blob(store.encode(data, find_region(loaded, height, width)), store.kind, "uint8", shape)
    return row


def _check_scalable(loaded: Loaded) -> None:
    """Refuse to scale an image that has arrays of varying length, such as boxes in px of it."""
    names = [name for name, value in loaded.items() if isinstance(value, Ragged)]
    if names:
        raise UserError(
            f"packing.longest_side_px scales images, but not their '{names[0]}', which may be boxes in px of the image "
            "as it was. Type packing.longest_side_px=0, which scales none."
        )


def _encode_blob(value: bytes | Mask | Ragged | Audio) -> _Blob:
    if isinstance(value, bytes):
        return _Blob(value, ENCODED_IMAGE, "uint8", read_image_shape(value))
    if isinstance(value, Mask):
        return _Blob(encode_png(value.values[:, :, None]), MASK, "uint8", (*value.values.shape, 1))
    if isinstance(value, Ragged):
        array = _make_native(value.values, value.values.dtype)
        return _Blob(_view_bytes(array), list(VARYING_AXES)[value.varying_axes - 1], array.dtype.name, array.shape)
    if isinstance(value.data, bytes):
        return _Blob(value.data, AUDIO, "uint8", read_audio_shape(value.data))
    assert value.data.dtype == np.int16 and value.data.ndim == 1, "PCM is (frames,) int16"
    return _Blob(_view_bytes(np.ascontiguousarray(value.data)), PCM, "int16", value.data.shape)


def _make_native(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array in this dtype and this machine's byte order, because an index names types without one."""
    assert dtype.name in NUMBERS, f"{dtype} cannot be packed, only {', '.join(sorted(NUMBERS))}"
    return np.asarray(values, dtype=dtype.newbyteorder("="), order="C")


def _view_bytes(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _write_rows(file: h5py.File, rows: list[_Row]) -> list[_Region]:
    """Write one column or one set of records per name, the records' bytes left out; all samples have the same names."""
    columns, records = file.create_group("columns"), file.create_group("records")  # implicit groups store the time
    names = list(rows[0])
    for row in rows:
        assert list(row) == names, f"{row[KEY]!r} has {list(row)}, the samples before it {names}"
    regions = []
    for name in names:
        values: list[Any] = [row[name] for row in rows]
        first = values[0]
        if isinstance(first, _JoinedBlobs):
            regions.append(_write_blobs(records.create_group(name), first))
        elif isinstance(first, np.ndarray):
            regions.append(_write_arrays(records.create_group(name), values))
        elif isinstance(first, str):
            write_texts(columns.create_group(name), values)
        else:
            numbers = np.array(values)  # float if any value is
            columns[name] = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)
    return regions


def _write_blobs(group: h5py.Group, blobs: _JoinedBlobs) -> _Region:
    assert len(blobs.kinds) == 1, f"{group.name} differs between samples: {sorted(blobs.kinds)}"
    (kind, dtype, _), size = *blobs.kinds, np.array(blobs.sizes, dtype=np.int64)
    start = _describe_records(group, "blob", np.dtype(np.uint8), (int(size.sum()),), size, blobs.checksums)
    group["shape"] = np.array(blobs.shapes, dtype=np.int32)
    group.attrs.update(kind=kind, dtype=dtype)
    return _Region(start, blobs.get_parts())


def _write_arrays(group: h5py.Group, values: list[np.ndarray]) -> _Region:
    shapes = {value.shape for value in values}
    assert len(shapes) == 1, f"{group.name} differs between samples: {sorted(shapes)}"
    common = np.result_type(*{value.dtype for value in values})
    native = [_make_native(value, common) for value in values]
    parts, shape = [_view_bytes(value) for value in native], native[0].shape
    size, checksums = np.full(len(parts), len(parts[0])), [crc32c.crc32c(part) for part in parts]
    start = _describe_records(group, "data", native[0].dtype, (len(parts), *shape), size, checksums)
    group["shape"] = np.tile(np.array(shape, dtype=np.int32), (len(values), 1))
    group.attrs.update(kind=ARRAY, dtype=native[0].dtype.name)
    return _Region(start, parts)


def _describe_records(
    group: h5py.Group,
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    size: np.ndarray,
    checksums: Sequence[int],
) -> int:
    """Make a dataset of this shape without values; add its records' sizes, places, CRC-32C. Return its first byte."""
    created = h5p.create(h5p.DATASET_CREATE)
    created.set_layout(h5d.CONTIGUOUS)
    created.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    created.set_fill_time(h5d.FILL_TIME_NEVER)
    created.set_obj_track_times(False)
    space = h5s.create_simple(shape)
    dataset = h5d.create(group.id, name.encode(), h5t.py_create(dtype, logical=True), space, created)
    start = dataset.get_offset() or 0  # None if all records are empty
    group["start"] = start + np.cumsum(size) - size
    group["size"] = size
    group["crc"] = np.array(checksums, dtype=np.uint32)
    return start


def write_texts(group: h5py.Group, values: Sequence[Any]) -> None:
    """Write a text column as UTF-8 bytes and N + 1 offsets."""
    encoded = [str(value).encode() for value in values]
    group["blob"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    group["offset"] = np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def take_image(file: h5py.File) -> bytes:
    """Return the bytes of an in-memory file."""
    file.flush()
    image: bytes = file.id.get_file_image()
    return image
