"""Packs raw files into shards: in parallel, resumable after a kill, the same bytes for the same input."""

import array
import errno
import hashlib
import itertools
import json
import math
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from loguru import logger

from trainyard.data.hdf5 import open_hdf5, read_texts
from trainyard.data.index import ARRAY, INDEX, VARYING_AXES, read_index, seal_index
from trainyard.data.raw import check_sources
from trainyard.data.shards import KEY, Sample, ShardSet
from trainyard.data.store import InputStore, Store, read_store
from trainyard.data.workers import WorkerEnded, write_shards
from trainyard.data.write_shard import ShardTask, WrittenShard, open_in_memory, take_image, write_texts
from trainyard.errors import UserError
from trainyard.files import (
    DISK_FULL,
    FORMATS,
    PACKED_DATA,
    check_format,
    hash_file,
    load_json,
    remove_partials,
    write_atomically,
)
from trainyard.text import format_override, join_names, quote_path

_MOST_SAMPLES = 2048  # in a shard, however small: a kill loses at most these for each worker
_LISTED_AT_ONCE = 4096  # part of the digest that names packed data: another number would pack everything again
_PROBE = 64  # samples that the mean size is estimated from
_MAX_NAMED = 5  # bad files named in an error
_CLASS_COLUMNS = ("label", "attack", "set")
_MOST_CLASSES = 20  # that are worth a line
JOURNAL = "packing.json"

Progress = Callable[[int], object]
"""Called with the number of samples done since the last call."""


_Stamp = tuple[int, int] | None
"""Size and modification time (ns) of a sample's raw file; None: it has none."""


class Listing(NamedTuple):
    """Count and digest of samples, from `read_listing`."""

    samples: int
    digest: str  # of their names, their raw files' sizes and times, and the packing's options
    stamps: "array.array[int]"  # two numbers for each sample: size and time of its raw file, or 0


class PackError(UserError):
    """Raw files cannot be packed, or cannot be packed into this folder."""


def pack(
    samples: Iterable[Sample],
    out: Path,
    *,
    meta: dict[str, Any],
    workers: int,
    listing: Listing | None = None,
    skip_bad: bool = False,
    shard_mib: float = 128,
    artifacts: Mapping[str, str] | None = None,
    progress: Progress = lambda done: None,
    on_shard: Callable[[], None] = lambda: None,
) -> ShardSet:
    """Write a data set, or finish an interrupted one.

    Each shard is written to a temporary file, flushed to disk and renamed, so a file under its final name is complete;
    a second call with the same input keeps those files and writes the rest. The index is written last: without it there
    is no data set. The files do not depend on the time, the machine or the number of workers. `packing.json` next to
    them lists the raw files that they were made from, which shows whether they are up to date.

    Args:
        samples: in their final order; read lazily, a few shards ahead of the writing.
        out: created if missing.
        meta: plain values that describe the packing; with the samples they decide whether `out` is up to date. `input`
            is how images are resized (`store.describe_store`); without it, their bytes are kept.
        workers: processes.
        listing: of these samples, just read: then their raw files are not checked a second time.
        skip_bad: leave out raw files that cannot be read, instead of failing after trying all of them.
        shard_mib: target size of a shard, which has 2,048 samples at most; a worker holds one in memory.
        artifacts: texts passed to the samples' `load`, a function of raw files and `meta`; stored in the index.
        on_shard: called after each shard that is new on disk.

    Raises:
        PackError: no samples, two with the same key, unreadable files, another data set in `out`, or a full disk.
        UserError: a raw file that `raw.check_sources` refuses.
    """
    stream = _stamp(samples) if listing is None else _join_stamps(samples, listing)
    head = list(itertools.islice(stream, _PROBE))
    if not head:
        raise PackError(
            f"Nothing to pack: the raw folder contains no sample that this job knows. {meta.get('expects', '')}"
        )
    store = read_store(meta)
    count = _choose_samples_per_shard(head, shard_mib, store)
    out.mkdir(parents=True, exist_ok=True)
    remove_partials(out)
    try:
        tasks = _plan_shards(itertools.chain(head, stream), out, count, skip_bad, meta, artifacts)
        tally = _Tally()
        written = _write_all(tasks, _Journal(out), workers, isinstance(store, InputStore), progress, on_shard, tally)
        _report_bad(written, skip_bad, tally)
        return _finish(out, written, meta, artifacts or {})
    except WorkerEnded as ended:
        raise PackError(_explain_end(ended.exit_code, workers, shard_mib)) from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = shutil.disk_usage(out).free / 2**20
        reason = "the file system is read-only" if error.errno == errno.EROFS else "no space left"
        raise PackError(
            f"{out}: {reason} ({free:.0f} MiB free). Finished shards are kept: free some space, then run the same "
            "command again to resume."
        ) from None
    finally:
        remove_partials(out)  # of workers that were stopped


def _explain_end(exit_code: int, workers: int, shard_mib: float) -> str:
    """Explain the end of a worker, with the remedy. A negative exit code is the signal that ended it."""
    if exit_code == -signal.SIGKILL:
        return (
            f"A packing process was killed, most likely because memory ran out ({workers} processes, each with a shard "
            f"of about {shard_mib} MiB). Finished shards are kept; resume with --workers 1."
        )
    how = f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return (
        f"A packing process {how}, without a shard. If it wrote why, that is above. Mend it, and run the same command "
        "again: finished shards are kept."
    )


def read_listing(samples: Iterable[Sample], meta: dict[str, Any]) -> Listing:
    """List samples, and check their raw files: one `stat` for each."""
    count, digest, stamps = 0, hashlib.sha256(json.dumps(meta, sort_keys=True).encode()), array.array("q")
    stream = _stamp(samples)
    while chunk := list(itertools.islice(stream, _LISTED_AT_ONCE)):
        count += len(chunk)
        digest.update(_hash_listing(chunk, meta).encode())
        stamps.extend(number for _, stamp in chunk for number in stamp or (0, 0))
    return Listing(count, digest.hexdigest(), stamps)


def _stamp(samples: Iterable[Sample]) -> Iterator[tuple[Sample, _Stamp]]:
    """Yield samples with the size and time of their raw files, which are checked."""
    return (
        (sample, None if info is None else (info.st_size, info.st_mtime_ns)) for sample, info in check_sources(samples)
    )


def _join_stamps(samples: Iterable[Sample], listing: Listing) -> Iterator[tuple[Sample, _Stamp]]:
    """Yield samples with what `listing` says of their raw files; refuse more or fewer samples than listed."""
    stamps = iter(listing.stamps)
    for sample in samples:
        stamp = tuple(itertools.islice(stamps, 2))
        if len(stamp) < 2:
            break
        yield sample, None if sample.source is None else (stamp[0], stamp[1])
    else:
        if next(stamps, None) is None:
            return
    raise PackError("Raw files were added or removed while they were listed. Run the same command again.")


def _choose_samples_per_shard(head: Sequence[tuple[Sample, _Stamp]], shard_mib: float, store: Store | None) -> int:
    sizes = [(sample.source, stamp[0]) for sample, stamp in head if stamp is not None]
    if not sizes:
        return _MOST_SAMPLES
    mean = max(1.0, sum(dict(sizes).values()) / len(sizes))  # several may share a file
    if isinstance(store, InputStore):
        mean = store.pixel_bytes  # whatever the files take, as PNG about half of it
    return min(_MOST_SAMPLES, max(1, math.ceil(shard_mib * 2**20 / mean)))


def _plan_shards(
    samples: Iterable[tuple[Sample, _Stamp]],
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
        path, own = out / f"shard-{number:05d}.h5", [sample for sample, _ in chunk]
        yield ShardTask(path, own, _hash_listing(chunk, meta), skip_bad, artifacts, read_store(meta))


def _hash_listing(chunk: Sequence[tuple[Sample, _Stamp]], meta: dict[str, Any]) -> str:
    """Return a digest of a shard's sources: names, columns, and the raw files' sizes and times.

    Not of `skip_bad`: a second call with `skip_bad` keeps the shards without bad files.
    """
    digest = hashlib.sha256(json.dumps([FORMATS[PACKED_DATA], meta], sort_keys=True).encode())
    for sample, stamp in chunk:
        digest.update(json.dumps([sample.key, sorted(sample.columns.items()), stamp]).encode())
    return digest.hexdigest()


class _Journal:
    """`packing.json`: the sources of a folder's shards. Written by the packing process only."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._packed_elsewhere = (folder / INDEX).exists() and not self._path.exists()
        self._shards = _read_journal(self._path) if self._path.exists() else {}

    def find_finished(self, task: ShardTask) -> WrittenShard | None:
        """Return the shard that an earlier, interrupted call wrote, if it was made from the same raw files."""
        if not task.path.exists():
            return None
        if self._packed_elsewhere:
            raise PackError(
                f"{task.path.parent}: contains packed data, but no {JOURNAL} that lists its sources. "
                "Use the data as it is, or choose an empty folder for the output."
            )
        entry = self._shards.get(task.path.name)
        if entry is None:
            return None  # the process was killed before adding the entry; writing again gives the same bytes
        if entry["listing"] != task.listing:
            raise PackError(
                f"{task.path}: made from other raw files, or packed with other options. "
                "Choose an empty folder for the output, or delete this one."
            )
        bad = [(key, reason) for key, reason in entry["bad"]]
        return WrittenShard(task.path, entry["sha256"], entry["count"], bad, resumed=True)

    def add(self, task: ShardTask, written: WrittenShard) -> None:
        """Add a shard that is complete and on disk."""
        entry = {"listing": task.listing, "sha256": written.sha256, "count": written.count, "bad": written.bad}
        self._shards[task.path.name] = entry
        shards = dict(sorted(self._shards.items()))
        content = {"format": FORMATS[PACKED_DATA], "sha256": _hash_journal(shards), "shards": shards}
        write_atomically(self._path, json.dumps(content, indent=1))


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Read a journal: its entry for each shard.

    Raises:
        FormatError: it is of another format.
        PackError: it was changed since it was written.
    """
    try:
        content = load_json(path, most_bytes=2**30)
        shards: dict[str, dict[str, Any]] = content["shards"]
        is_intact, number = content["sha256"] == _hash_journal(shards), content["format"]
        for entry in shards.values():
            types = {name: type(value) for name, value in entry.items()}
            is_intact &= types == {"listing": str, "sha256": str, "count": int, "bad": list}
            is_intact &= all(len(pair) == 2 and {*map(type, pair)} == {str} for pair in entry["bad"])
    except (AttributeError, KeyError, OSError, TypeError, ValueError):  # not JSON, or other JSON
        is_intact = False
    if is_intact:
        check_format(path, number, kind=PACKED_DATA)
    else:
        follow_up = (
            f"Check the packed data: trainyard verify {quote_path(path.parent)}. If it is whole, train with "
            f"{format_override('data.path', str(path.parent))}"
            if (path.parent / INDEX).exists()
            else "Delete it and run the same command again, which writes every shard again."
        )
        raise PackError(f"{path}: damaged: it is not the list of packed shards that packing wrote. {follow_up}")
    return shards


def _hash_journal(shards: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()


class _Tally:
    """Counts samples, and bad ones among them, by the classes that their listing states.

    A model learns a fault that the samples of one class alone have.
    """

    def __init__(self) -> None:
        self._all: dict[str, Counter[str]] = {name: Counter() for name in _CLASS_COLUMNS}
        self._bad: dict[str, Counter[str]] = {name: Counter() for name in _CLASS_COLUMNS}

    def add(self, task: ShardTask, written: WrittenShard) -> None:
        """Count the samples of a shard."""
        bad = {key for key, _ in written.bad}
        for sample in task.samples:
            for name in _CLASS_COLUMNS:
                if name in sample.columns:
                    value = str(sample.columns[name])
                    self._all[name][value] += 1
                    self._bad[name][value] += sample.key in bad

    def __str__(self) -> str:
        """Return such as "Of label 0: 8 of 16, of label 1: 0 of 16."; "" without classes, or with a great many."""
        lines = [
            ", ".join(f"of {name} {value or '-'}: {self._bad[name][value]} of {total}" for value, total in counts)
            for name, counter in self._all.items()
            if 1 < len(counts := sorted(counter.items())) <= _MOST_CLASSES
        ]
        return "\n".join(f"O{line[1:]}." for line in lines)


def _write_all(
    tasks: Iterator[ShardTask],
    journal: _Journal,
    workers: int,
    resizes: bool,
    progress: Progress,
    on_shard: Callable[[], None],
    tally: _Tally,
) -> list[WrittenShard]:
    """Write the missing shards; return all shards in order."""
    written: list[WrittenShard] = []

    def find_missing() -> Iterator[ShardTask]:
        for task in tasks:
            finished = journal.find_finished(task)
            if finished is None:
                yield task
            else:
                written.append(finished)
                tally.add(task, finished)
                progress(len(task.samples))

    with closing(write_shards(find_missing(), workers=workers, resizes=resizes, progress=progress)) as results:
        for task, shard in results:
            written.append(shard)
            tally.add(task, shard)
            if shard.sha256:
                journal.add(task, shard)
                on_shard()
    return sorted(written, key=lambda shard: shard.path)


def _report_bad(written: Sequence[WrittenShard], skip_bad: bool, tally: _Tally) -> None:
    """Refuse bad samples, or log those that are left out: which, why, and how many of each class."""
    bad = [entry for shard in written for entry in shard.bad]
    some_left = any(shard.count for shard in written)
    if not bad:
        return
    if skip_bad and not some_left:
        raise PackError(f"None of the {len(bad)} raw files can be read. The first: {bad[0][0]}: {bad[0][1]}")
    named = "".join(f"\n  {key}: {reason}" for key, reason in bad[:_MAX_NAMED])
    named += f"\n  and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
    count = f"{len(bad)} of {sum(shard.count + len(shard.bad) for shard in written)} raw samples"
    classes = f"\n{tally}" if str(tally) else ""
    if not skip_bad:
        way_out = "Repair or remove them, or leave them out: data.on_error=skip" if some_left else "Repair them."
        raise PackError(f"{count} cannot be read:{named}{classes}\n{way_out}")
    logger.warning("{} are left out:{}{}", count, named, classes)


def _finish(out: Path, written: Sequence[WrittenShard], meta: dict[str, Any], artifacts: Mapping[str, str]) -> ShardSet:
    """Write the index, unless the existing one has the same content; refuse shards of another data set."""
    content = hashlib.sha256("".join(shard.sha256 for shard in written).encode()).hexdigest()
    index = out / INDEX
    if index.exists() and read_index(out).content == content:
        return ShardSet(out)
    extra = sorted(set(out.glob("shard-*.h5")) - {shard.path for shard in written})
    if extra:
        raise PackError(f"{extra[0]}: left over from another data set. Choose an empty folder, or delete this one.")
    with open_in_memory() as file:
        file.attrs.update(format=FORMATS[PACKED_DATA], content=content, meta=json.dumps(meta, sort_keys=True))
        file.attrs["skipped"] = sum(len(shard.bad) for shard in written)
        _write_index(file, [shard for shard in written if shard.count])
        group = file.create_group("artifacts")
        for name, text in artifacts.items():
            group[name] = np.frombuffer(text.encode(), dtype=np.uint8)
        write_atomically(index, seal_index(take_image(file)))
    return ShardSet(out)


def _write_index(file: h5py.File, written: Sequence[WrittenShard]) -> None:
    """Concatenate the shards' columns and record positions; encode text columns by one vocabulary for all shards."""
    file.attrs["count"] = sum(shard.count for shard in written)
    shards = file.create_group("shards")
    write_texts(shards.create_group("name"), [shard.path.name for shard in written])
    write_texts(shards.create_group("sha256"), [shard.sha256 for shard in written])
    shards["count"] = np.array([shard.count for shard in written])
    shards["size_bytes"] = np.array([shard.path.stat().st_size for shard in written])
    for shard in written:
        if shard.resumed and hash_file(shard.path) != shard.sha256:  # the index would take its labels from it
            raise PackError(
                f"{shard.path}: damaged: its SHA-256 differs from {JOURNAL}. "
                "Delete it and run the same command again: the other shards are kept."
            )
    parts = [_read_part(shard.path) for shard in written]  # one after the other: a system allows few open files
    for part in parts:
        _check_same_records(parts[0], part)
    keys = [key for part in parts for key in part.columns[KEY]]
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        raise PackError(f"Two samples have the key '{twice}'; keys must be unique.")
    write_texts(file.create_group(KEY), keys)
    for group in ("columns", "vocabulary", "records"):
        file.create_group(group)
    for name in sorted(set(parts[0].columns) - {KEY}):
        _join_column(file, name, [part.columns[name] for part in parts])
    for name in parts[0].records:
        group, records = file.create_group(f"records/{name}"), [part.records[name] for part in parts]
        group.attrs.update(kind=records[0]["kind"], dtype=records[0]["dtype"])
        for place in _PLACES:
            group[place] = np.concatenate([record[place] for record in records])


_PLACES = ("start", "size", "crc", "shape")


def _check_same_records(first: "_Part", part: "_Part") -> None:
    """Refuse a shard whose samples have other records or columns than those of the first."""
    forms = [
        {name: " (numbers)" if isinstance(column, np.ndarray) else " (texts)" for name, column in side.columns.items()}
        | {name: f" ({r['kind']} {_get_fixed_shape(r)} of {r['dtype']})" for name, r in side.records.items()}
        for side in (first, part)
    ]
    if forms[0] != forms[1]:
        fields, expected = (
            join_names([f"{name}{form}" for name, form in side.items() if other.get(name) != form], most=3) or "fewer"
            for side, other in (forms[::-1], forms)
        )
        raise PackError(
            f"Sample '{part.columns[KEY][0]}' and those after it have {fields}, and '{first.columns[KEY][0]}' has "
            f"{expected}. All samples need the same records and columns."
        )


def _get_fixed_shape(records: dict[str, Any]) -> tuple[int, ...]:
    """Return the part of an array's shape that must be equal in all shards."""
    shape = tuple(records["shape"][0].tolist())
    return shape[{ARRAY: 0, **VARYING_AXES}.get(records["kind"], len(shape)) :]


class _Part(NamedTuple):
    """Everything of a shard that goes into the index: all but the records themselves."""

    columns: dict[str, np.ndarray | list[str]]
    records: dict[str, dict[str, Any]]  # name -> kind, dtype and `_PLACES`


def _read_part(path: Path) -> _Part:
    with open_hdf5(path) as file:
        columns = {
            name: column[:] if isinstance(column, h5py.Dataset) else read_texts(column)
            for name, column in file["columns"].items()
        }
        records = {
            name: {"kind": str(group.attrs["kind"]), "dtype": str(group.attrs["dtype"])}
            | {place: group[place][:] for place in _PLACES}
            for name, group in file["records"].items()
        }
    return _Part(columns, records)


def _join_column(file: h5py.File, name: str, parts: Sequence[np.ndarray | list[str]]) -> None:
    if isinstance(parts[0], np.ndarray):
        file[f"columns/{name}"] = np.concatenate(parts)
        return
    texts = [text for part in parts for text in part]
    vocabulary = sorted(set(texts))
    code = {text: i for i, text in enumerate(vocabulary)}
    file[f"columns/{name}"] = np.array([code[text] for text in texts], dtype=np.int64)
    write_texts(file.create_group(f"vocabulary/{name}"), vocabulary)
