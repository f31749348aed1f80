"""Reads the arrays of a micro-batch into tensors: those of one shape as they are, others padded."""

import math
import weakref
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from trainyard.data.index import ARRAY
from trainyard.data.shards import ShardSet


def read_arrays(
    data: ShardSet, ids: np.ndarray, *, check_crc: str, memory: "Mapping[str, BatchMemory] | None"
) -> dict[str, Tensor]:
    """Return the arrays of some samples by name, in new memory.

    Arrays of fixed shape are (B, ...). Those of varying length are (B, L, ...), padded with zeros, with their lengths
    (B,) under `<name>_count`; those that vary in two axes (B, L, M, ...), with counts (B, 2).

    Args:
        ids: (B,) int64, at least one.
        check_crc: option `data.check_crc`.
        memory: for arrays of fixed shape, by name. None: a GPU will copy them, so they are read straight into pinned
            memory, which torch caches.

    Raises:
        ShardError: a record is damaged.
    """
    arrays: dict[str, Tensor] = {}
    for name, records in data.records.items():
        if records.kind == ARRAY:
            shape = (len(ids), *records.row_shape)
            if memory is None:
                dtype = torch.from_numpy(np.empty(0, dtype=records.dtype)).dtype
                arrays[name] = torch.empty(shape, dtype=dtype, pin_memory=True)
            else:
                arrays[name] = torch.from_numpy(memory[name].lend(shape, records.dtype))
            data.read_into(name, ids, arrays[name].numpy(), check_crc=check_crc)
        elif records.varying_axes:
            padded, count = _pad(data.read_arrays(name, ids, check_crc=check_crc))
            arrays[name] = torch.from_numpy(padded)
            arrays[f"{name}_count"] = torch.from_numpy(count[:, 0] if records.varying_axes == 1 else count[:, :2])
    return arrays


class BatchMemory:
    """Lends memory for one array of each batch, and takes it back when the last tensor or view of it is gone.

    On the CPU only. With memory of malloc instead, two threads read 0.72 times as many raw 224 x 224 images per CPU
    second (suite raw of benchmarks/README.md, two EPYC cores); one thread reads as many.

    The newest free buffer is lent first: it is still in the processor's cache; malloc rotates through many times as
    many addresses. Memory is never returned to the system; there is as much as was lent at once. Threads may share it.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lent: dict[int, weakref.ref[np.ndarray]] = {}

    def lend(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array with arbitrary values; a tensor that `torch.from_numpy` makes of it holds it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = self._take(size)
        array = block[:size].view(dtype).reshape(shape)
        self._lent[id(block)] = weakref.ref(array, lambda gone: self._take_back(block))
        return array

    def _take(self, size: int) -> np.ndarray:
        """Return a free block of at least this size; one that is too small is given up for it.

        New memory is torch's, which begins at a row of a cache. malloc's, 16 bytes into a page, is the worst there is:
        some processors take 1.4 times as long to copy to it from rows of a file, which begin on a page.
        """
        with suppress(IndexError):
            block = self._free.pop()
            if len(block) >= size:
                return block
        return torch.empty(size, dtype=torch.uint8).numpy()

    def _take_back(self, block: np.ndarray) -> None:
        del self._lent[id(block)]
        self._free.append(block)


def _pad(values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays of D axes and different lengths as one, padded with zeros, and their shapes (B, D) int64."""
    shapes = np.array([array.shape for array in values], dtype=np.int64)
    padded = np.zeros((len(values), *shapes.max(axis=0).tolist()), dtype=values[0].dtype)
    for row, array in zip(padded, values, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return padded, shapes
