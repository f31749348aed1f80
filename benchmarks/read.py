"""Reads 64 random records of about 70 KB at once: our shards, h5py, and a file for each; decodes nothing."""

import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
from PIL import Image

from benchmarks.results import format_results
from trainyard.data.pack import pack
from trainyard.data.shards import Sample, ShardSet
from trainyard.errors import UserError
from trainyard.files import create_folder, hash_file
from trainyard.hardware import count_cores
from trainyard.measure import Summary, find_free_path, write_results

BATCH = 64  # records
OURS = "ours"
_BUFFER_BYTES = 64 << 20
_WARM_UP = 8  # batches, which fill caches and buffers

Sizes: TypeAlias = Generator[np.ndarray, None, None]
"""(64,) int64, the bytes of each record of a batch; without end."""

Round: TypeAlias = dict[str, dict[str, float]]
"""The results of `measure` in one round, by reader."""


@dataclass(frozen=True)
class Setting:
    """Data, readers and rounds of a measurement."""

    data: Path  # folder of the generated records; absolute
    results: Path
    only: tuple[str, ...] = ()  # patterns of readers to run alongside ours; empty: all
    rounds: int = 5
    seconds: float = 2.0  # of each reader, in each round
    records: int = 4000


def run(setting: Setting, *, head: Mapping[str, Any]) -> Path:
    """Measure every reader in each round, in a new shuffled order; print the table.

    Args:
        head: header line of the results, `measure.make_header`.

    Returns:
        the result file `<results>/read-<date>.jsonl`, which is rewritten after each round, so that stopping early
        keeps the finished rounds.

    Raises:
        UserError: there is no such reader, or the data cannot be made.
    """
    readers = select_readers(setting.only)
    data = make_records(setting.data / f"records-{setting.records}", setting.records)
    for file in filter(Path.is_file, data.rglob("*")):
        hash_file(file)  # reads it into the page cache
    path = find_free_path(setting.results, f"read-{head['date'][:10]}")
    rounds: list[Round] = []
    for number in range(setting.rounds):
        rounds.append({})
        for name in shuffle_names(readers, number):
            with closing(READERS[name][0](data)) as sizes:
                rounds[-1][name] = measure(sizes, seconds=setting.seconds)
            rate = rounds[-1][name]["samples_per_s"]
            print(f"round {number + 1}/{setting.rounds}  {name:16} {rate:12,.1f}/s", flush=True)
        lines = build_result_lines(rounds)
        write_results(path, [head, *lines])
    print(format_results([head, *lines]), flush=True)
    return path


def select_readers(only: Sequence[str]) -> list[str]:
    """Return ours and the readers that were asked for; without a pattern, all."""
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in READERS):
            raise UserError(f"--only {pattern}: no such reader. There are: {', '.join(READERS)}.")
    return [name for name in READERS if name == OURS or any(fnmatch(name, pattern) for pattern in only or ("*",))]


def shuffle_names(names: Sequence[str], round_number: int) -> list[str]:
    """Return the names in a random order that depends only on the round."""
    return random.Random(round_number).sample(names, len(names))


def make_records(folder: Path, count: int) -> Path:
    """Make JPEG files of noise, and shards and HDF5 files of the same bytes, once; return the folder."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with create_folder(folder) as made:
        files = [made / "files" / f"{i:06d}.jpg" for i in range(count)]
        files[0].parent.mkdir()
        for file in files:
            height, width = rng.integers(240, 310, 2)
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, quality=90)
        samples = (Sample(file.stem, partial(_load, file), source=file) for file in files)
        pack(samples, made / "shards", meta={}, workers=count_cores()).close()
        records = [np.fromfile(file, np.uint8) for file in files]
        with h5py.File(made / "flat.h5", "w", libver="latest") as flat:
            flat["blob"], flat["offset"] = np.concatenate(records), np.cumsum([0, *map(len, records)])
        with h5py.File(made / "vlen.h5", "w", libver="latest") as vlen:
            images = vlen.create_dataset("images", (count,), dtype=h5py.vlen_dtype(np.uint8))
            for i, record in enumerate(records):
                images[i] = record
    return folder


def _load(file: Path) -> dict[str, Any]:
    return {"image": file.read_bytes()}


def measure(sizes: Iterator[np.ndarray], *, seconds: float) -> dict[str, float]:
    """Time batches after a warm-up, on one thread, until `seconds` are over.

    Returns:
        samples, seconds and core_seconds (CPU time of this process), and the rates samples_per_s, samples_per_core_s.
    """
    for _ in range(_WARM_UP):
        next(sizes)
    cpu, begin, count, wall = time.process_time(), time.perf_counter(), 0, 0.0
    while not count or wall < seconds:
        count += len(next(sizes))
        wall = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    rates = {"samples_per_s": count / wall, "samples_per_core_s": count / cpu}
    return {"samples": count, "seconds": wall, "core_seconds": cpu, **rates}


# Readers


def _draw_ids(count: int) -> Iterator[np.ndarray]:
    """Yield (64,) int64 batches of shuffled ids below `count`, each at most once per pass, without end."""
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH)


def _read_ours(data: Path, *, check_crc: str) -> Sizes:
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    with closing(ShardSet(data / "shards")) as shards:
        for ids in _draw_ids(shards.count):
            yield np.array([len(view) for view in shards.read_bytes("image", ids, check_crc=check_crc, buffer=buffer)])


def _read_h5py_vlen(data: Path) -> Sizes:
    with h5py.File(data / "vlen.h5", "r") as file:
        images = file["images"]
        yield from _gather(len(images), lambda i: images[i])


def _read_h5py_flat(data: Path) -> Sizes:
    with h5py.File(data / "flat.h5", "r") as file:
        blob, offset = file["blob"], file["offset"][:].tolist()
        yield from _gather(len(offset) - 1, lambda i: blob[offset[i] : offset[i + 1]])


def _gather(count: int, read: Callable[[int], np.ndarray]) -> Sizes:
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    for ids in _draw_ids(count):
        sizes, position = [], 0
        for i in ids.tolist():
            record = read(i)
            buffer[position : position + len(record)] = record
            position += len(record)
            sizes.append(len(record))
        yield np.array(sizes)


def _read_files(data: Path) -> Sizes:
    """Read each file in the cheapest way Python has: three system calls, directly into the buffer."""
    files = sorted(map(str, (data / "files").iterdir()))
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for ids in _draw_ids(len(files)):
        sizes, position = [], 0
        for i in ids.tolist():
            descriptor = os.open(files[i], os.O_RDONLY)
            sizes.append(os.readv(descriptor, [buffer[position : position + (1 << 20)]]))
            os.close(descriptor)
            position += sizes[-1]
        yield np.array(sizes)


READERS: Mapping[str, tuple[Callable[[Path], Sizes], str]] = {
    OURS: (partial(_read_ours, check_crc="off"), "one thread, no checksums, as the others"),
    "ours_crc": (partial(_read_ours, check_crc="first"), "and verifies checksums on first read"),
    "ours_crc_always": (partial(_read_ours, check_crc="always"), "and on every read"),
    "h5py_vlen": (_read_h5py_vlen, ""),
    "h5py_flat": (_read_h5py_flat, ""),
    "files": (_read_files, ""),
}
"""The readers to compare, each with a note for the table."""


# Results


def build_result_lines(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Build one line per reader, ours first, the others from fast to slow.

    Ratios are computed within a round, and then summarised over the rounds.
    """
    lines = [_build_result_line(name, rounds) for name in rounds[0]]
    return sorted(lines, key=lambda line: (line["name"] != OURS, -line["samples_per_s"]["median"]))


def _build_result_line(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "result", "name": name, "note": READERS[name][1]}
    for key in ("samples_per_s", "samples_per_core_s"):
        line[key] = asdict(Summary.from_values([results[name][key] for results in rounds]))
        if name != OURS:
            ratios = [results[OURS][key] / results[name][key] for results in rounds]
            line[f"ours_over_this_{key}"] = asdict(Summary.from_values(ratios))
    return line | {"rounds": [results[name] for results in rounds]}
