"""The metrics and events of a run: their schema, and the one reader of them. Loads no torch.

`metrics.jsonl` is the truth. It holds training and evaluation lines only and is cut back when a run resumes, so
that a killed run ends with the file of an uninterrupted one. `events.jsonl` tells what happened (start, resume,
checkpoint, stop, ...) and is never cut. Trackers and the report are made from what these two hold.

One JSON object a line, each with `kind`, `step` (optimizer steps done) and `elapsed_s`:

    train   epoch, samples_seen, loss and other losses, lr, grad_norm, and the timings in TIMING_KEYS
    eval    epoch, split, metrics; `x_low` and `x_high` are the 95 % interval of metric `x`; seconds
    event   event, time (UTC) and free fields. The report and `status` understand: `start` and `resume` with attempt
            ("<Slurm job>-<restarts>" or "local-<seconds>"), total_steps, host, world_size, device and monitor
            {"split", "metric", "mode": "min" or "max"}; `checkpoint` with seconds; `stop` and `failed` with reason;
            `done`

A number that JSON cannot hold is null, and its name stands with "nan", "inf" or "-inf" under `nonfinite`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainyard.errors import UserError

TIMING_KEYS = frozenset(
    {"samples_per_s", "step_ms", "data_wait_ms", "compute_ms", "memory_gib", "elapsed_s", "seconds"}
)
"""What differs between two runs that compute the same: leave these out to compare their metrics."""
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
KINDS = ("train", "eval", "event")
STARTS = ("start", "resume")
ENDS = ("done", "stop", "failed")
Line = dict[str, Any]


def read_metrics(run: Path) -> list[Line]:
    """Return the training and evaluation lines of a run, oldest first; none if it has not logged yet.

    Numbers that JSON could not hold are NaN or infinite again. A last line without its end, as kill -9 or a
    power cut may leave, is passed over.

    Raises:
        UserError: `run` is not a run folder, or any other line is damaged.
    """
    _require_run(run)
    return read_lines(run / METRICS_FILE)


def read_events(run: Path) -> list[Line]:
    """Return the events of a run over all its attempts, oldest first, by the rules of `read_metrics`."""
    _require_run(run)
    return read_lines(run / EVENTS_FILE)


def _require_run(run: Path) -> None:
    if not any((run / name).is_file() for name in ("config.yaml", METRICS_FILE, EVENTS_FILE)):
        found = "a folder without them" if run.is_dir() else "no folder"
        raise UserError(
            f"{run}: expected the folder of a run, with config.yaml and {METRICS_FILE}; found {found}. "
            f"Runs lie in runs/<job>/<time>-<commit>."
        )


def read_lines(path: Path) -> list[Line]:
    data = path.read_bytes() if path.exists() else b""
    complete = data.split(b"\n")[:-1]
    return [_decode(raw, path, number) for number, raw in enumerate(complete, start=1)]


def _decode(raw: bytes, path: Path, number: int) -> Line:
    try:
        line = json.loads(raw)
    except ValueError:
        line = None
    if not isinstance(line, dict) or line.get("kind") not in KINDS or not isinstance(line.get("step"), int):
        raise UserError(
            f"{path}:{number}: expected a JSON object with kind and step, found {raw[:60]!r}. The file was "
            f"damaged or edited: restore it from a copy, or remove this line to read the rest."
        )
    line.update({name: float(text) for name, text in line.pop("nonfinite", {}).items()})
    return line


def elapsed_s(lines: Iterable[Line]) -> float:
    """Return the running time that these lines cover, in seconds."""
    return max((line.get("elapsed_s", 0.0) for line in lines), default=0.0)


def flatten(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield ("a.b.c", value) for a nested mapping."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
