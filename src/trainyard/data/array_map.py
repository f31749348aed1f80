"""Maps an array that is spread over files as one array, so that one call gathers rows from any of them.

A copy of each row out of a map per file reads 0.06 times as many rows of 256 bytes per CPU second, 0.3 of 4 KiB and 0.8
of 50 KiB or more; one call per file 0.1, 0.5 and 0.5 (two EPYC cores, batches of 128).
"""

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.data.hdf5 import ShardError

_MAP_FIXED = 0x10  # mmap(2): at this address, in place of the present mapping
_MOST_BYTES = 1 << 46  # half of the addresses of a process


@dataclass(frozen=True)
class Part:
    """The rows of an array that are in one file."""

    path: Path
    start: int  # byte of the first row
    count: int


class ArrayMap:
    """An array of rows of equal shape in several files.

    The files are mapped next to each other, at addresses at which their rows line up: each begins at a multiple of as
    many rows as fill whole pages. Nobody may touch the rows between, which do not exist.
    """

    def __init__(self, parts: Sequence[Part], shape: tuple[int, ...], dtype: str) -> None:
        """Map the files; they need not stay open. Takes addresses, but no memory.

        Args:
            parts: for which `can_map` is true.
            shape: of a row.

        Raises:
            ShardError: a file ends before its last row.
            OSError: a file cannot be opened or mapped.
        """
        row_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        taken = _count_rows(parts, row_bytes)
        self.first = np.cumsum(taken) - taken
        """(files,) int64, the number of each file's first row in `rows`."""
        reserved = mmap.mmap(-1, int(taken.sum()) * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        self.rows = np.frombuffer(reserved, dtype=dtype).reshape(-1, *shape)
        """(rows, ...), read only; keeps the maps."""
        for part, first in zip(parts, self.first.tolist(), strict=True):
            _map_file(part, part.count * row_bytes, self.rows.ctypes.data + first * row_bytes)


def can_map(parts: Sequence[Part], shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether each file's rows begin on a page, which not all do if pages are larger than the usual 4 KiB, have
    a size, and line up within the addresses of a process.
    """
    row_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    on_pages = all(part.start % mmap.PAGESIZE == 0 for part in parts)
    return on_pages and row_bytes > 0 and int(_count_rows(parts, row_bytes).sum()) * row_bytes <= _MOST_BYTES


def _count_rows(parts: Sequence[Part], row_bytes: int) -> np.ndarray:
    """Return (files,) int64, how many rows of addresses each file takes: rounded up to whole pages."""
    step = math.lcm(row_bytes, mmap.PAGESIZE) // row_bytes
    return np.array([-(-part.count // step) * step for part in parts])


def _map_file(part: Part, size: int, address: int) -> None:
    """Map the rows of a file at an address, in place of the reserved range; Python's mmap cannot choose it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    with part.path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < part.start + size:  # touching it beyond its end would kill the process
            raise ShardError(f"{part.path}: the file ends early. Copy it again, or pack the data again.")
        mapped = libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file.fileno(), part.start)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(part.path))
