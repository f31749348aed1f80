"""The suite "read": gather 64 random encoded records into one reused buffer."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import images
from benchmarks.contract import BATCH, Configuration, Setting
from benchmarks.ours import pack_images

BUFFER_BYTES = 64 << 20


def draw_ids(count: int) -> Iterator[np.ndarray]:
    """Yield (64,) int64 batches of shuffled ids below `count`, each at most once per pass, without end."""
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(count)
        yield from order[: count // BATCH * BATCH].reshape(-1, BATCH)


def iterate_ours(folder: Path, setting: Setting, *, check_crc: str) -> Iterator[np.ndarray]:
    from trainyard.data.shards import ShardSet

    shards = ShardSet(folder)
    buffer = np.empty(BUFFER_BYTES, np.uint8)
    for ids in draw_ids(shards.count):
        views = shards.read_bytes("image", ids, check_crc=check_crc, buffer=buffer)
        yield np.array([len(view) for view in views])


def iterate_h5py_vlen(path: Path, setting: Setting) -> Iterator[np.ndarray]:
    import h5py

    records = h5py.File(path, "r")["images"]
    return _gather(len(records), lambda index: records[index])


def iterate_h5py_flat(path: Path, setting: Setting) -> Iterator[np.ndarray]:
    import h5py

    file = h5py.File(path, "r")
    blob, offset = file["blob"], file["offset"][:].tolist()
    return _gather(len(offset) - 1, lambda index: blob[offset[index] : offset[index + 1]])


def _gather(count: int, read: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
    buffer = np.empty(BUFFER_BYTES, np.uint8)
    for ids in draw_ids(count):
        sizes, position = [], 0
        for index in ids.tolist():
            record = read(index)
            buffer[position : position + len(record)] = record
            position += len(record)
            sizes.append(len(record))
        yield np.array(sizes)


def iterate_files(folder: Path, setting: Setting) -> Iterator[np.ndarray]:
    """Read each file in the cheapest way Python has: three system calls, directly into the buffer."""
    files = [str(path) for path in images.list_files(folder)]
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for ids in draw_ids(len(files)):
        sizes, position = [], 0
        for index in ids.tolist():
            descriptor = os.open(files[index], os.O_RDONLY)
            sizes.append(os.readv(descriptor, [buffer[position : position + (1 << 20)]]))
            os.close(descriptor)
            position += sizes[-1]
        yield np.array(sizes)


def list_configurations() -> list[Configuration]:
    shards, files, vlen, flat = (
        partial(make, kind="rgb")
        for make in (pack_images, images.make_jpeg_files, images.make_vlen_hdf5, images.make_flat_hdf5)
    )
    unchecked, checked, always = (partial(iterate_ours, check_crc=check) for check in ("off", "first", "always"))
    ours, h5py = ("trainyard", "numpy"), ("h5py", "numpy")
    return [
        Configuration("read", "ours", shards, unchecked, ours, "one thread, no checksums, as the others"),
        Configuration("read", "ours_crc", shards, checked, ours, "and verifies checksums on first read"),
        Configuration("read", "ours_crc_always", shards, always, ours, "and on every read"),
        Configuration("read", "h5py_vlen", vlen, iterate_h5py_vlen, h5py),
        Configuration("read", "h5py_flat", flat, iterate_h5py_flat, h5py),
        Configuration("read", "files", files, iterate_files, ("numpy",)),
    ]
