"""Reads the arrays of a micro-batch into tensors: those of one shape as they are, others padded."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trainyard.data.batch_memory import BatchMemory
from trainyard.data.index import ARRAY, RAGGED
from trainyard.data.shards import ShardSet


def read_arrays(
    data: ShardSet, ids: np.ndarray, *, check_crc: str, memory: Mapping[str, BatchMemory] | None
) -> dict[str, Tensor]:
    """Return the arrays of some samples by name, in memory of their own.

    Arrays of fixed shape are (B, ...). Those of varying length are (B, L, ...), padded with zeros, with their lengths
    under `<name>_count`.

    Args:
        ids: (B,) int64, at least one.
        check_crc: option `data.check_crc`.
        memory: for arrays of fixed shape, by name. None: a GPU will copy them, so they are read straight into pinned
            memory, of which torch keeps what is free.

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
        elif records.kind == RAGGED:
            padded = _pad(data.read_arrays(name, ids, check_crc=check_crc))
            arrays[name], arrays[f"{name}_count"] = map(torch.from_numpy, padded)
    return arrays


def _pad(values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays of different lengths as one, (B, L, ...), padded with zeros, and their lengths (B,) int64."""
    count = np.array([len(array) for array in values], dtype=np.int64)
    padded = np.zeros((len(values), int(count.max()), *values[0].shape[1:]), dtype=values[0].dtype)
    for row, array in zip(padded, values, strict=True):
        row[: len(array)] = array
    return padded, count
