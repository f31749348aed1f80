"""Metrics and events of a run: their schema and their only reader. Loads no torch.

`metrics.jsonl` is the source of truth. It contains only training and evaluation lines and is truncated when a run
resumes, so that a killed and resumed run has the same file as an uninterrupted one. `events.jsonl` records what
happened (start, resume, checkpoint, stop, ...) and is never truncated. Trackers and the report use only these two.

docs/formats.md lists the kinds of lines and their fields. A number that JSON cannot represent is null; `nonfinite` maps
its name to "nan", "inf" or "-inf".
"""

import errno
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.errors import UserError
from trainyard.files import DISK_FULL, AppendedFile, open_atomically, open_untrusted, parse_json, raise_failed_disk

TIMING_KEYS = frozenset(
    {"samples_per_s", "step_ms", "data_wait_ms", "idle_ms", "compute_ms", "memory_gib", "elapsed_s", "seconds"}
)
"""Keys that differ even between two identical runs: ignore them when comparing metrics."""
NON_METRIC_KEYS = TIMING_KEYS | {"kind", "step", "epoch", "samples_seen", "split"}
"""Keys of training and evaluation lines that identify a line. All other numbers are metrics."""
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
KINDS = ("train", "eval", "event")
STARTS = ("start", "resume")
ENDS = ("done", "stop", "failed")
EXTENDED = "extended"
"""The event of a larger `max_duration`: a run that was done is not any more."""
Line = dict[str, Any]
MetricOrder = tuple[tuple[str, str], ...]
"""Metrics, each with "min" or "max", that decide which evaluation is better: each where those before are equal."""

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_BYTES = 2**32  # of a file of metrics; a hundred bytes a line, millions of lines
_TRAIN_LINE = b'{"kind": "train", '
"""Start of a training line."""


def read_metrics(run: Path) -> list[Line]:
    """Return the training and evaluation lines of a run, oldest first; none if it has not logged yet.

    Numbers stored as `nonfinite` become NaN or infinite again. An incomplete last line, which kill -9 or a power
    failure may leave, is skipped.

    Raises:
        UserError: `run` is not a run folder, or any other line is damaged.
    """
    _require_run(run)
    return read_lines(run / METRICS_FILE)


def read_sampled_metrics(run: Path, *, most: int) -> list[Line]:
    """Return lines from all over a run's metrics, oldest first: evenly spaced training lines, and evaluations.

    Costs at most 0.25 MiB of reading whatever the file's size, and parses no more than it returns: for overviews of
    many runs. Of a long file, the evaluations are those near its end. Empty if there is no file.

    Args:
        most: of the training lines that are read.

    Raises:
        UserError: the file cannot be read, or one of these lines is damaged.
    """
    path = run / METRICS_FILE
    try:
        with open_untrusted(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _SAMPLES * _SAMPLE_BYTES:
                chunks = [file.read().split(b"\n")[:-1]]
            else:
                tail = size - _TAIL_BYTES
                chunks = [_read_whole_lines(file, i * tail // _SAMPLES, _SAMPLE_BYTES)[:1] for i in range(_SAMPLES)]
                # The tail is one more sample of the training, and has the newest evaluations.
                newest = _read_whole_lines(file, tail, _TAIL_BYTES)
                train = [raw for raw in newest if raw.startswith(_TRAIN_LINE)]
                chunks.append([raw for raw in newest if not raw.startswith(_TRAIN_LINE) or raw is train[-1]])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise_failed_disk(error, path)
        raise UserError(f"{path}: cannot be read: {error.strerror}. Put the file itself there.") from None
    lines = [raw for chunk in chunks for raw in chunk if not _is_lost(raw)]
    places = [place for place, raw in enumerate(lines) if raw.startswith(_TRAIN_LINE)]
    kept = {places[i * (len(places) - 1) // (most - 1)] for i in range(most)} if len(places) > most else set(places)
    is_whole = len(chunks) == 1
    return [
        _parse_line(raw, path, place + 1 if is_whole else 0)
        for place, raw in enumerate(lines)
        if place in kept or not raw.startswith(_TRAIN_LINE)
    ]


def _read_whole_lines(file: BinaryIO, begin: int, count: int) -> list[bytes]:
    """Return the lines that begin after `begin` and end within `count` bytes of it."""
    file.seek(begin)
    return file.read(count).split(b"\n")[1:-1]


_SAMPLES, _SAMPLE_BYTES, _TAIL_BYTES = 48, 2**12, 2**16


def read_events(run: Path) -> list[Line]:
    """Return the events of all attempts of a run, oldest first; reads like `read_metrics`."""
    _require_run(run)
    return read_lines(run / EVENTS_FILE)


def _require_run(run: Path) -> None:
    if not any((run / name).is_file() for name in ("config.yaml", METRICS_FILE, EVENTS_FILE)):
        place = "a folder without them" if run.is_dir() else "no folder"
        raise UserError(
            f"{run}: expected the folder of a run, with config.yaml and {METRICS_FILE}; found {place}. "
            f"Runs are in runs/<job>/<time>-<commit>."
        )


def read_thinned_metrics(run: Path, *, most: int) -> tuple[list[Line], int]:
    """Return the lines of `read_metrics`, but of more than `most` training lines evenly spaced ones, first and last.

    Costs the memory of the returned lines. Lines that are left out are not parsed.

    Returns:
        The lines, and how many training lines one of them stands for: 1 if none is left out.

    Raises:
        UserError: as for `read_metrics`.
    """
    _require_run(run)
    path = run / METRICS_FILE
    others: list[tuple[int, Line]] = []  # each with its number in the file
    train: list[tuple[int, Line]] = []
    every, count, last = 1, 0, (0, b"")
    with _open_lines(path) as file:
        for number, raw in _number_lines(file):
            if raw.startswith(_TRAIN_LINE) and raw.endswith(b"}"):
                if count % every == 0 and len(train) >= most:
                    train, every = train[::2], 2 * every
                if count % every == 0:
                    train.append((number, _parse_line(raw, path, number)))
                count, last = count + 1, (number, raw)
            else:
                others.append((number, _parse_line(raw, path, number)))
    if train and train[-1][0] != last[0]:
        train.append((last[0], _parse_line(last[1], path, last[0])))
    return [line for _, line in sorted([*others, *train], key=lambda entry: entry[0])], every


def read_lines(path: Path) -> list[Line]:
    """Return the whole lines of a file of metrics or events; none if it does not exist.

    Raises:
        UserError: it cannot be read, or a line is damaged.
    """
    with _open_lines(path) as file:
        return [_parse_line(raw, path, number) for number, raw in _number_lines(file)]


def read_last_lines(path: Path, most: int) -> list[Line]:
    """Return the last lines of `read_lines`, at most so many; parses no others.

    Raises:
        UserError: it cannot be read, or one of these lines is damaged.
    """
    with _open_lines(path) as file:
        last = deque(_number_lines(file), maxlen=most)
    return [_parse_line(raw, path, number) for number, raw in last]


def find_end_of_step(path: Path, step: int) -> tuple[int, int]:
    """Return where the lines up to a step end in a file of metrics, in bytes, and the step of the last of them.

    Raises:
        UserError: it cannot be read, or one of these lines is damaged.
    """
    end = last = 0
    with _open_lines(path) as file:
        for number, raw in enumerate(_split_lines(file), start=1):
            if (step_of_line := _parse_line(raw, path, number)["step"]) > step:
                break
            end, last = end + len(raw) + 1, step_of_line
    return end, last


@contextmanager
def _open_lines(path: Path) -> Iterator[BinaryIO]:
    """Open a file of metrics or events; one that does not exist is empty."""
    try:
        try:
            file: BinaryIO = open_untrusted(path)
        except FileNotFoundError:
            file = BytesIO()
        with file:
            if file.seek(0, os.SEEK_END) > _MOST_BYTES:
                raise OSError(errno.EFBIG, f"it is larger than {_MOST_BYTES} bytes, the most that is expected")
            file.seek(0)
            yield file
    except OSError as error:
        if error.errno in DISK_FULL:  # from a write of the block: reading needs no space
            raise
        raise_failed_disk(error, path)
        raise UserError(f"{path}: cannot be read: {error.strerror}. Put the file itself there.") from None


def _number_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file with their numbers, but for what `_is_lost` tells of."""
    return ((number, raw) for number, raw in enumerate(_split_lines(file), start=1) if not _is_lost(raw))


def _is_lost(line: bytes) -> bool:
    """Return whether a power cut took a part of a line: zeros stay where a file grew and its data were not flushed.

    The rest of the line is ASCII, as we write it: other bytes are damage of another kind, which is refused. Nothing
    of a run that resumes is lost so: metrics are flushed before each checkpoint, and the others written again.
    """
    return b"\0" in line and line.isascii()


def _split_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines of a file, without their ends."""
    return (line[:-1] for line in file if line.endswith(b"\n"))


def _parse_line(raw: bytes, path: Path, number: int) -> Line:
    try:
        line = parse_json(raw)
        problem = _find_problem(line)
    except ValueError:
        problem = "a JSON object with kind and step"
    if problem:
        raise UserError(
            f"{path}:{number}: expected {problem}, found {raw[:60]!r}. The file is "
            f"damaged or was edited: restore it from a copy, or delete this line to read the rest."
        )
    nonfinite = line.pop("nonfinite", {})
    return {**line, **{name: _NONFINITE[str(text)] for name, text in nonfinite.items()}}


def _find_problem(line: Any) -> str:
    """Describe the form that a parsed line should have; "" if it is a recorder's."""
    if not isinstance(line, dict) or line.get("kind") not in KINDS or type(line.get("step")) is not int:
        return "a JSON object with kind and step"
    nonfinite = line.get("nonfinite", {})
    if not isinstance(nonfinite, dict) or any(str(text) not in _NONFINITE for text in nonfinite.values()):
        return "nan, inf or -inf for each name in 'nonfinite'"
    numbers = {name: value for name, value in line.items() if name in _NUMBERS and value is not None}
    if not all(type(value) in (int, float) and -(2**63) < value < 2**63 for value in numbers.values()):
        return f"a number below 2**63 for each of {', '.join(numbers)}"
    if line["step"] < 0 or any(type(value) is int and abs(value) >= 2**1000 for value in line.values()):
        return "a step from 0, and no number of hundreds of digits"
    losses = line.get("step_losses", [])
    if not isinstance(losses, list) or len(losses) > line["step"] or not all(map(_is_loss, losses)):
        return "at most one number or null for each step in 'step_losses'"
    if not all(map(_is_shown, shown.values() if isinstance(shown := line.get("shown", {}), dict) else [None])):
        return "text, or edges and counts of a histogram, for each name in 'shown'"
    texts = {"eval": ("split",), "event": ("event", "time")}.get(line["kind"], ())
    if any(not isinstance(line.get(name, "" if line["kind"] == "event" else None), str) for name in texts):
        return f"text for {' and '.join(texts)}"
    return "" if isinstance(line.get("monitor", {}), dict) else "split, metric and mode in 'monitor'"


def _is_loss(value: Any) -> bool:
    return value is None or type(value) is float


def _is_shown(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"edges", "counts"}:
        return isinstance(value, str)
    edges, counts = value["edges"], value["counts"]
    if not isinstance(edges, list) or not isinstance(counts, list) or not 1 <= len(counts) == len(edges) - 1:
        return False
    return all(type(edge) is float for edge in edges) and all(type(n) is int and 0 <= n < 2**63 for n in counts)


_NUMBERS = TIMING_KEYS | {"step", "epoch", "samples_seen", "total_steps", "world_size", "loss", "lr", "grad_norm"}


def append_event(run: Path, fields: Mapping[str, Any]) -> None:
    """Append one event to a run that does not train. For the run's owner only."""
    path = run / EVENTS_FILE
    drop_torn_tail(path)
    last = next(iter(read_last_lines(path, 1)), {})
    line = {"kind": "event", "step": last.get("step", 0), **fields, "elapsed_s": last.get("elapsed_s", 0.0)}
    with closing(AppendedFile(path)) as file:
        file.write(json.dumps(line | {"time": datetime.now(UTC).isoformat(timespec="seconds")}).encode() + b"\n")


def start_new_file(path: Path) -> None:
    """Copy the whole lines of a file, which may not exist, to a new one of its name. For the run's owner only.

    A line that a power cut tore is left out. An owner that was replaced while the file system did not answer still
    writes a line when it wakes up: to the old file. So does one that was killed within a line, whose rest would precede
    the next line.
    """
    with _open_lines(path) as old, open_atomically(path) as new:
        new.writelines(line for line in old if line.endswith(b"\n") and not _is_lost(line))


def drop_torn_tail(path: Path) -> None:
    """Cut a killed writer's rest after the last whole line, so that the next line starts on its own."""
    if not path.exists():
        return
    with path.open("rb") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def find_elapsed_s(lines: Iterable[Line]) -> float:
    """Return the running time, in seconds, up to the last of these lines."""
    return max((line.get("elapsed_s", 0.0) for line in lines), default=0.0)


def select_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line by name, in its order, including the ends of their intervals."""
    return {key: value for key, value in line.items() if key not in NON_METRIC_KEYS and isinstance(value, int | float)}


def list_metric_names(line: Mapping[str, Any]) -> list[str]:
    """Return the names of a line's metrics, in its order, without the ends of their intervals."""
    names = list(select_metrics(line))
    ends = {end for name in names for end in name_interval_ends(name) if has_interval(line, name)}
    return [name for name in names if name not in ends]


def name_interval_ends(metric: str) -> tuple[str, str]:
    """Return the names of the lower and the upper end of a metric's 95 % interval."""
    return f"{metric}_low", f"{metric}_high"


def has_interval(line: Mapping[str, Any], metric: str) -> bool:
    return all(isinstance(line.get(end), int | float) for end in name_interval_ends(metric))


def rank_metrics(metrics: Mapping[str, float], order: MetricOrder) -> tuple[float, ...]:
    """Return a key that is higher for better metrics: the first decides, the next where that is equal, and so on.

    NaN and missing metrics rank below every number.
    """
    values = ((metrics.get(name, math.nan), 1 if mode == "max" else -1) for name, mode in order)
    return tuple(-math.inf if math.isnan(value) else sign * value for value, sign in values)


def find_best_evaluation(
    evaluations: Iterable[Line], *, split: str, metric: str, mode: str, ties: Iterable[Iterable[str]] = ()
) -> Line | None:
    """Return the evaluation of a split with the best finite value of a metric; None without one.

    One before the first step is a baseline (eval_on_start), and no result of training.

    Args:
        mode: "max" if higher is better, "min" if lower is.
        ties: further metrics with their modes that decide between equal values; after them the first evaluation wins.
    """
    order = ((metric, mode), *((str(name), str(which)) for name, which in ties))
    of_split = [line for line in evaluations if str(line["split"]) == split and line["step"] > 0]
    finite = [line for line in of_split if math.isfinite(line.get(metric, math.nan))]
    return max(finite, key=lambda line: rank_metrics(line, order), default=None)


def flatten(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ("a.b.c", value) for a nested mapping."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
