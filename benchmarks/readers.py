"""The suite "read": gather 64 encoded records, chosen at random, into one buffer that is used again."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import pictures
from benchmarks.contract import BATCH, Compared, Setting
from benchmarks.ours import rgb_shards

BUFFER_BYTES = 64 << 20


def random_ids(count: int) -> Iterator[np.ndarray]:
    """Yield (64,) int64 batches of ids below `count`, each once per pass, without end."""
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(count)
        yield from order[: count // BATCH * BATCH].reshape(-1, BATCH)


def ours(folder: Path, setting: Setting, *, check_crc: bool) -> Iterator[np.ndarray]:
    from trainyard.data.shards import ShardSet

    shards = ShardSet(folder)
    buffer = np.empty(BUFFER_BYTES, np.uint8)
    for ids in random_ids(shards.count):
        views = shards.read_bytes("image", ids, check_crc=check_crc, buffer=buffer)
        yield np.array([len(view) for view in views])


def h5py_vlen(path: Path, setting: Setting) -> Iterator[np.ndarray]:
    import h5py

    images = h5py.File(path, "r")["images"]
    return _gathered(len(images), lambda index: images[index])


def h5py_flat(path: Path, setting: Setting) -> Iterator[np.ndarray]:
    import h5py

    file = h5py.File(path, "r")
    blob, offset = file["blob"], file["offset"][:].tolist()
    return _gathered(len(offset) - 1, lambda index: blob[offset[index] : offset[index + 1]])


def _gathered(count: int, read: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
    buffer = np.empty(BUFFER_BYTES, np.uint8)
    for ids in random_ids(count):
        sizes, position = [], 0
        for index in ids.tolist():
            record = read(index)
            buffer[position : position + len(record)] = record
            position += len(record)
            sizes.append(len(record))
        yield np.array(sizes)


def file_per_sample(folder: Path, setting: Setting) -> Iterator[np.ndarray]:
    """The cheapest way to read a file in Python: three system calls, straight into the buffer."""
    files = [str(path) for path in pictures.paths(folder)]
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for ids in random_ids(len(files)):
        sizes, position = [], 0
        for index in ids.tolist():
            descriptor = os.open(files[index], os.O_RDONLY)
            sizes.append(os.readv(descriptor, [buffer[position : position + (1 << 20)]]))
            os.close(descriptor)
            position += sizes[-1]
        yield np.array(sizes)


def configurations() -> list[Compared]:
    ours_versions, h5py_versions = ("trainyard", "numpy"), ("h5py", "numpy")
    unchecked = partial(ours, check_crc=False)
    checked = partial(ours, check_crc=True)
    return [
        Compared("read", "ours", rgb_shards, unchecked, ours_versions, "one thread, no checksums: as the others"),
        Compared("read", "ours_crc", rgb_shards, checked, ours_versions, "and compares checksums at first reading"),
        Compared("read", "h5py_vlen", partial(pictures.vlen_hdf5, kind="rgb"), h5py_vlen, h5py_versions),
        Compared("read", "h5py_flat", partial(pictures.flat_hdf5, kind="rgb"), h5py_flat, h5py_versions),
        Compared("read", "files", partial(pictures.picture_files, kind="rgb"), file_per_sample, ("numpy",)),
    ]
