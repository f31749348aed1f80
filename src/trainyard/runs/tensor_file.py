"""Writes safetensors files of float32 arrays in place, and maps those that a stranger may have written.

A file is the length of its header (8 bytes, little-endian), the header in JSON, and the arrays one after the other:
https://github.com/huggingface/safetensors, "Format". Here every number is a float32. The library reads the header of a
stranger's file; it writes only arrays that are in memory, so arrays written part by part are laid out here.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trainyard.errors import UserError
from trainyard.files import name_failed_file, name_partial, open_untrusted, parse_json, rename

Array = NDArray[np.float32]

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
) -> Iterator[Mapping[str, Array]]:
    """Yield arrays to fill, which become the file `path` when the block ends; nothing is left if it raises.

    The space is reserved first: a full disk is an error here, and not a signal that kills the process later.

    Args:
        shapes: by name; no array is empty.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        assert math.prod(shape) > 0, shapes
        begin, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": _DTYPE, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps({_METADATA: dict(metadata), **entries}).encode()
    header += b" " * (-len(header) % 8)  # so that the data are aligned, as the format asks
    size = 8 + len(header) + end
    partial = name_partial(path)
    try:
        with name_failed_file(path, size_bytes=size), partial.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            arrays = _map_arrays(file, "r+", entries, 8 + len(header))
            yield arrays
            for array in arrays.values():
                array.flush()
        rename(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def map_tensor_file(path: Path, *, remedy: str) -> TensorFile:
    """Map a file that `create_tensor_file` wrote, after checking that the header describes exactly its bytes.

    Args:
        remedy: the command that makes such a file, for the error.

    Raises:
        TensorFileError: it is missing, a link, damaged, or another kind of file.
    """
    try:
        with open_untrusted(path) as file:
            return _map(file)
    except (OSError, ValueError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = "".join(filter(str.isprintable, reason))  # it quotes the file
        raise TensorFileError(f"{path}: cannot be used: {reason}. Write it again: {remedy}") from None


def _map(file: BinaryIO) -> TensorFile:
    with safe_open(f"/dev/fd/{file.fileno()}", "np") as checked:  # refuses a header that does not describe the file
        metadata = checked.metadata() or {}
    length = int.from_bytes(file.read(8), "little")
    header = parse_json(file.read(length))
    header.pop(_METADATA, None)
    for name, entry in header.items():
        if entry["dtype"] != _DTYPE or 0 in entry["shape"]:
            raise ValueError(f"{name!a} is {entry['dtype']} {entry['shape']}, expected {_DTYPE} (float32), not empty")
    return TensorFile(_map_arrays(file, "r", header, 8 + length), metadata)


def _map_arrays(
    file: BinaryIO, mode: Literal["r", "r+"], header: Mapping[str, Any], begin: int
) -> dict[str, np.memmap[Any, np.dtype[np.float32]]]:
    return {
        name: np.memmap(file, "<f4", mode, begin + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
    }
