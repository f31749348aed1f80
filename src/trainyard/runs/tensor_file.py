"""Writes safetensors files of float32 arrays in place, and maps those that a stranger may have written.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the arrays one after the other:
https://github.com/huggingface/safetensors, "Format". Here every number is a float32, and no byte belongs to nothing.
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import UserError
from trainyard.files import fsync_path, name_failed_write, open_file, parse_json

Array = NDArray[np.float32]

_MOST_HEADER_BYTES = 2**20
_DTYPE = "F32"
_METADATA = "__metadata__"


class TensorFileError(UserError):
    """A file of embeddings or scores is missing, damaged, or not one that Trainyard wrote."""


@dataclass(frozen=True)
class TensorFile:
    """The arrays of a file, mapped into memory and read-only, and the texts in its header."""

    arrays: Mapping[str, Array]
    metadata: Mapping[str, str]


@contextlib.contextmanager
def create_tensor_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, metadata: Mapping[str, str]
) -> Iterator[dict[str, Array]]:
    """Yield arrays to fill, which become the file `path` when the block ends; nothing is left if it raises.

    The space is reserved first: a full disk is an error here, and not a signal that kills the process later.

    Args:
        shapes: by name; no array is empty.
    """
    header = _encode_header(shapes, metadata)
    size = len(header) + 4 * sum(math.prod(shape) for shape in shapes.values())
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with name_failed_write(path, size_bytes=size), partial.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            file.flush()
            mapped = mmap.mmap(file.fileno(), size)
            yield _view_arrays(mapped, shapes, len(header))
            mapped.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        fsync_path(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def map_tensor_file(path: Path, *, remedy: str) -> TensorFile:
    """Map a file that `create_tensor_file` wrote, after checking that the header describes exactly its bytes.

    Args:
        remedy: what to type to get such a file, for the error.

    Raises:
        TensorFileError: it is missing, a link, damaged, or another kind of file.
    """
    try:
        with open_file(path) as file:
            return _map(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TensorFileError(f"{path}: cannot be used: {reason}. Write it again: {remedy}") from None


def _map(file: BinaryIO) -> TensorFile:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
        raise ValueError("it does not begin as a safetensors file does, or is cut off")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise ValueError("its metadata are not texts")
    shapes = _check_entries(header, size - 8 - length)
    mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    return TensorFile(_view_arrays(mapped, shapes, 8 + length), metadata)


def _check_entries(header: Mapping[str, Any], data_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array; they must fill the data in the order of the header, without a gap."""
    shapes: dict[str, tuple[int, ...]] = {}
    end = 0
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the entry of {name!a} is not that of an array")
        shape = entry["shape"]
        if entry["dtype"] != _DTYPE:
            raise ValueError(f"{name!a} is {str(entry['dtype'])[:20]!a}, expected {_DTYPE} (float32)")
        if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
            raise ValueError(f"the shape of {name!a} is not a list of whole numbers above 0")
        begin, end = end, end + 4 * math.prod(shape)
        if entry["data_offsets"] != [begin, end] or end > data_bytes:
            raise ValueError(f"{name!a} of shape {tuple(shape)} is not where the header says, or is cut off")
        shapes[name] = tuple(shape)
    if end != data_bytes:
        raise ValueError(f"it has {data_bytes} bytes of data, but its header describes {end}")
    return shapes


def _view_arrays(mapped: mmap.mmap, shapes: Mapping[str, tuple[int, ...]], offset: int) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(mapped, dtype="<f4", count=count, offset=offset).reshape(shape)
        offset += 4 * count
    return arrays


def _encode_header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        assert math.prod(shape) > 0, shapes
        begin, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": _DTYPE, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the data are aligned, as the format asks
    return len(header).to_bytes(8, "little") + header
