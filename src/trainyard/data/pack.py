"""Packing: raw files into shards, in parallel, resumable after a kill, the same bytes for the same input."""

import hashlib
import itertools
import json
import math
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from trainyard.data.shards import (
    ARRAY,
    INDEX,
    KEY,
    RAGGED,
    SCHEMA_VERSION,
    Sample,
    ShardSet,
    open_shard,
    read_text,
)
from trainyard.data.write_shard import (
    ShardTask,
    WrittenShard,
    open_in_memory,
    publish,
    start_worker,
    write_shard,
    write_texts,
)
from trainyard.errors import UserError
from trainyard.files import DISK_FULL, remove_partials, write_atomically

_DEFAULT_COUNT = 4096  # samples per shard where nothing tells their size
_PROBE = 64  # samples whose sizes give the mean
_SHOWN = 5  # bad files named in an error
JOURNAL = "packing.json"

Progress = Callable[[int], object]
"""Called with the number of samples done since the last call."""


class PackError(UserError):
    """Raw files cannot be packed, or not into this folder."""


def pack(
    samples: Iterable[Sample],
    out: Path,
    *,
    meta: dict[str, Any],
    workers: int,
    skip_bad: bool = False,
    shard_mib: float = 256,
    artifacts: Mapping[str, str] | None = None,
    progress: Progress = lambda done: None,
) -> ShardSet:
    """Write a data set, or finish one that was interrupted.

    A shard is written aside, flushed to disk and renamed, so each file under its final name is whole; a second call
    with the same input keeps those and writes the rest. The index comes last: without it there is no data set.
    Nothing of the time, machine or number of workers enters the files; what raw files they were made of, which tells
    whether they are up to date, stands beside them in `packing.json`.

    Args:
        samples: in their final order; read lazily, a few shards ahead of the writing.
        out: created if missing.
        meta: plain values that describe the packing and decide, with the samples, whether `out` is up to date.
        workers: processes.
        skip_bad: leave out raw files that cannot be read, instead of failing after all were tried.
        shard_mib: size a shard aims at.
        artifacts: texts that the samples' `load` is called with, a function of raw files and `meta`; kept in the index.

    Raises:
        PackError: no samples, two with one key, files that cannot be read, another data set in `out`, or no space.
    """
    stream = iter(samples)
    head = list(itertools.islice(stream, _PROBE))
    if not head:
        raise PackError(f"Nothing to pack: the raw folder holds no sample this job knows. {meta.get('expects', '')}")
    count = _samples_per_shard(head, shard_mib)
    out.mkdir(parents=True, exist_ok=True)
    remove_partials(out)
    try:
        tasks = _tasks(itertools.chain(head, stream), out, count, skip_bad, meta, artifacts)
        written = _write_all(tasks, _Journal(out), workers, progress)
        _refuse_bad(written, skip_bad)
        return _finish(out, written, meta, artifacts or {})
    except BrokenProcessPool:
        raise PackError(
            f"A packing process was killed, most likely because memory ran out ({workers} processes, each holding a "
            f"shard of about {shard_mib} MiB three times). Finished shards are kept; go on with --workers 1."
        ) from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = shutil.disk_usage(out).free / 2**20
        raise PackError(
            f"{out}: no space left ({free:.0f} MiB free). Finished shards are kept: make room, then type the same "
            "command again, and it goes on from there."
        ) from None


def read_listing(samples: Iterable[Sample], meta: dict[str, Any]) -> tuple[int, str]:
    """Return how many samples there are, and a digest of their names, raw files' sizes and times, and `meta`."""
    count, digest = 0, hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    stream = iter(samples)
    while chunk := list(itertools.islice(stream, _DEFAULT_COUNT)):
        count += len(chunk)
        digest.update(_listing(chunk, meta).encode())
    return count, digest.hexdigest()


def _samples_per_shard(head: Sequence[Sample], shard_mib: float) -> int:
    sources = [sample.source for sample in head if sample.source]
    if not sources:
        return _DEFAULT_COUNT
    mean = max(1.0, sum(source.stat().st_size for source in set(sources)) / len(sources))  # several may share a file
    return max(1, math.ceil(shard_mib * 2**20 / mean))


def _tasks(
    samples: Iterable[Sample],
    out: Path,
    count: int,
    skip_bad: bool,
    meta: dict[str, Any],
    artifacts: Mapping[str, str] | None,
) -> Iterator[ShardTask]:
    stream = iter(samples)
    for number in itertools.count():
        chunk = list(itertools.islice(stream, count))
        if not chunk:
            return
        yield ShardTask(out / f"shard-{number:05d}.h5", chunk, _listing(chunk, meta), skip_bad, artifacts)


def _listing(chunk: Sequence[Sample], meta: dict[str, Any]) -> str:
    """Digest what a shard is made of: names, columns, and size and time of the raw files.

    Not of `skip_bad`: whoever is told to skip bad files keeps the shards that have none.
    """
    digest = hashlib.sha256(json.dumps([SCHEMA_VERSION, meta], sort_keys=True).encode())
    for sample in chunk:
        stat = sample.source.stat() if sample.source else None
        stamp = [stat.st_size, stat.st_mtime_ns] if stat else None
        digest.update(json.dumps([sample.key, sorted(sample.columns.items()), stamp]).encode())
    return digest.hexdigest()


class _Journal:
    """What the shards of a folder were made of: `packing.json`, kept by the one process that packs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._packed_elsewhere = (folder / INDEX).exists() and not self._path.exists()
        self._shards: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def finished(self, task: ShardTask) -> WrittenShard | None:
        """Return what an earlier, interrupted call wrote, if it is made of the same raw files."""
        if not task.path.exists():
            return None
        if self._packed_elsewhere:
            raise PackError(
                f"{task.path.parent}: holds packed data without the {JOURNAL} that says what they were made of. "
                "Use them as they are, or choose an empty folder for the output."
            )
        entry = self._shards.get(task.path.name)
        if entry is None:
            return None  # killed before it was noted: written again, to the same bytes
        if entry["listing"] != task.listing:
            raise PackError(
                f"{task.path}: made of other raw files, or packed with other options. "
                "Choose an empty folder for the output, or delete this one."
            )
        bad = [(str(key), str(reason)) for key, reason in entry["bad"]]
        return WrittenShard(task.path, entry["sha256"], int(entry["count"]), bad)

    def note(self, task: ShardTask, written: WrittenShard) -> None:
        """Add a shard that is whole and on disk."""
        entry = {"listing": task.listing, "sha256": written.sha256, "count": written.count, "bad": written.bad}
        self._shards[task.path.name] = entry
        write_atomically(self._path, json.dumps(dict(sorted(self._shards.items())), indent=1))


def _write_all(tasks: Iterator[ShardTask], journal: _Journal, workers: int, progress: Progress) -> list[WrittenShard]:
    """Write the shards that are missing, a bounded number at a time; return all, in order."""
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks
    done = context.Value("q", 0)
    written: list[WrittenShard] = []
    running: dict[Future[WrittenShard], ShardTask] = {}
    reported = 0
    with ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(sys.path, done)) as pool:
        try:
            for task in itertools.chain(tasks, [None]):
                if task is not None:
                    kept = journal.finished(task)
                    if kept is None:
                        running[pool.submit(write_shard, task)] = task
                    else:
                        written.append(kept)
                        progress(len(task.samples))
                while running and (task is None or len(running) >= 2 * workers):
                    for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                        written.append(future.result())
                        finished = running.pop(future)
                        if written[-1].sha256:
                            journal.note(finished, written[-1])
                    progress(done.value - reported)
                    reported = done.value
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(written, key=lambda shard: shard.path)


def _refuse_bad(written: Sequence[WrittenShard], skip_bad: bool) -> None:
    bad = [entry for shard in written for entry in shard.bad]
    if bad and not skip_bad:
        shown = "".join(f"\n  {key}: {reason}" for key, reason in bad[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise PackError(
            f"{len(bad)} of {sum(s.count + len(s.bad) for s in written)} raw samples cannot be read:{shown}{more}\n"
            "Mend or remove them, or leave them out: data.on_error=skip"
        )
    if not any(shard.count for shard in written):
        raise PackError(f"None of the {len(bad)} raw files can be read; the first: {bad[0][0]}: {bad[0][1]}")


def _finish(out: Path, written: Sequence[WrittenShard], meta: dict[str, Any], artifacts: Mapping[str, str]) -> ShardSet:
    """Write the index, unless the one there says the same; remove what is left of a longer, earlier packing."""
    content = hashlib.sha256("".join(shard.sha256 for shard in written).encode()).hexdigest()
    index = out / INDEX
    if index.exists():
        with open_shard(index) as file:
            if file.attrs["content"] == content:
                return ShardSet(out)
    extra = sorted(set(out.glob("shard-*.h5")) - {shard.path for shard in written})
    if extra:
        raise PackError(f"{extra[0]}: left over from another data set. Choose an empty folder, or delete this one.")
    with open_in_memory() as file:
        file.attrs.update(schema_version=SCHEMA_VERSION, content=content, meta=json.dumps(meta, sort_keys=True))
        file.attrs["skipped"] = sum(len(shard.bad) for shard in written)
        _write_index(file, [shard for shard in written if shard.count])
        kept = file.create_group("learned")
        for name, text in artifacts.items():
            kept[name] = np.frombuffer(text.encode(), dtype=np.uint8)
        publish(file, index)
    return ShardSet(out)


def _write_index(file: h5py.File, written: Sequence[WrittenShard]) -> None:
    """Join the shards' columns and record places; code text columns by a vocabulary over all shards."""
    file.attrs["count"] = sum(shard.count for shard in written)
    shards = file.create_group("shards")
    write_texts(shards.create_group("name"), [shard.path.name for shard in written])
    write_texts(shards.create_group("sha256"), [shard.sha256 for shard in written])
    shards["count"] = np.array([shard.count for shard in written])
    shards["size_bytes"] = np.array([shard.path.stat().st_size for shard in written])
    parts = [open_shard(shard.path) for shard in written]
    try:
        keys = [key for part in parts for key in read_text(part[f"columns/{KEY}"])]
        _refuse_doubles(keys)
        write_texts(file.create_group(KEY), keys)
        for group in ("columns", "vocabulary", "records"):
            file.create_group(group)
        for name in sorted(set(parts[0]["columns"]) - {KEY}):
            _join_column(file, name, parts)
        for name in parts[0]["records"]:
            group = file.create_group(f"records/{name}")
            kinds = {_kind(part[f"records/{name}"]) for part in parts}
            assert len(kinds) == 1, f"{name} is not the same in all shards: {sorted(kinds)}"
            group.attrs.update(parts[0][f"records/{name}"].attrs)
            for array in ("start", "size", "crc", "shape"):
                group[array] = np.concatenate([part[f"records/{name}/{array}"][:] for part in parts])
    finally:
        for part in parts:
            part.close()


def _kind(group: h5py.Group) -> tuple[str, str, tuple[int, ...]]:
    """Return what all shards must agree on: the kind, the element type, and an array's shape as far as it is fixed."""
    kind, shape = str(group.attrs["kind"]), tuple(group["shape"][0].tolist())
    return kind, str(group.attrs["dtype"]), {ARRAY: shape, RAGGED: shape[1:]}.get(kind, ())


def _join_column(file: h5py.File, name: str, parts: Sequence[h5py.File]) -> None:
    if isinstance(parts[0][f"columns/{name}"], h5py.Dataset):
        file[f"columns/{name}"] = np.concatenate([part[f"columns/{name}"][:] for part in parts])
        return
    texts = [text for part in parts for text in read_text(part[f"columns/{name}"])]
    vocabulary = sorted(set(texts))
    code = {text: i for i, text in enumerate(vocabulary)}
    file[f"columns/{name}"] = np.array([code[text] for text in texts], dtype=np.int64)
    write_texts(file.create_group(f"vocabulary/{name}"), vocabulary)


def _refuse_doubles(keys: list[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise PackError(f"Two samples have the key '{key}'; a key must name one sample.")
        seen.add(key)
