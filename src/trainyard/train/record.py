"""What a run writes down while it trains: numbers and events for machines, and for the trackers people use.

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
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from trainyard.errors import UserError

if TYPE_CHECKING:
    pass

TIMING_KEYS = frozenset(
    {"samples_per_s", "step_ms", "data_wait_ms", "compute_ms", "memory_gib", "elapsed_s", "seconds"}
)
"""What differs between two runs that compute the same: leave these out to compare their metrics."""

HEARTBEAT_FILE = "heartbeat.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
KINDS = ("train", "eval", "event")
STARTS = ("start", "resume")
ENDS = ("done", "stop", "failed")

Line = dict[str, Any]


class Recorder:
    """The only writer of a run's metrics and events. One per run folder, on rank 0."""

    def __init__(
        self,
        run: Path,
        *,
        trackers: Sequence[str],
        config: Mapping[str, object],
        resume_at: int | None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        """Open both files for appending, and the trackers.

        Args:
            run: the run folder; it exists.
            trackers: any of "tensorboard", "wandb" (offline) and "mlflow" (local files); all write inside `run`.
            config: what the trackers show as the run's options; may be nested.
            resume_at: step of the checkpoint that training goes on from, after `rewind`; None for a new run, and
                for one that left no checkpoint and starts over, after `rewind(run, 0)`.
            check_owner: called before each write; raises if another process has taken over the run.

        Raises:
            UserError: a tracker is unknown or not installed, or a new run finds another one's metrics.
        """
        for path in (run / METRICS_FILE, run / EVENTS_FILE):
            _drop_torn_tail(path)
        kept = _read_lines(run / METRICS_FILE)
        if resume_at is None and kept:
            raise UserError(
                f"{run / METRICS_FILE}: expected no metrics in the folder of a new run, found {len(kept)} "
                f"lines. Resume that run, or start in another folder."
            )
        assert all(line["step"] <= (resume_at or 0) for line in kept), "rewind before recording"
        self._exporters = [_exporter(name, run, config, resume_at) for name in trackers]
        for line in kept:
            if line["step"] == resume_at:  # they drop this step too: it may be recorded partly before the checkpoint
                self._export(line["kind"], line["step"], line)
        before = [*kept, *(e for e in _read_lines(run / EVENTS_FILE) if e["step"] <= (resume_at or 0))]
        self._elapsed_before_s = elapsed_s(before) if resume_at is not None else 0.0
        self._started_s = time.monotonic()
        self._check_owner = check_owner
        self._metrics = (run / METRICS_FILE).open("ab")
        self._events = (run / EVENTS_FILE).open("ab")

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Write one line to disk and to the trackers.

        Args:
            kind: "train", "eval" (with `split` among the values) or "event" (with `event` among them).
            step: optimizer steps done.
            values: numbers, text, or lists and mappings of text and finite numbers. Not `elapsed_s`: it is
                stamped here, seconds of running over all attempts, without what a resume threw away.

        Raises:
            ValueError: a number inside a list or mapping is not finite; nothing was written.
        """
        assert kind in KINDS, kind
        assert not {"kind", "step", "elapsed_s"} & values.keys(), "these are stamped by the recorder"
        line: Line = {"kind": kind, "step": step, **values, "elapsed_s": self._elapsed_now_s()}
        if kind == "event":
            line["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        self._check_owner()
        file = self._events if kind == "event" else self._metrics
        file.write(_encode(line))
        file.flush()
        self._export(kind, step, values)

    def position(self) -> int:
        """Return the length of `metrics.jsonl` in bytes, all on disk. A checkpoint keeps it for `rewind`."""
        self._check_owner()
        for exporter in self._exporters:
            exporter.flush()
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return self._metrics.tell()

    @staticmethod
    def rewind(run: Path, offset: int) -> None:
        """Drop the metrics written after the checkpoint that stored `offset`.

        A kill at any point leaves the old file or the new one.

        Raises:
            UserError: the file is shorter than `offset`, or no line ends there.
        """
        path = run / METRICS_FILE
        data = path.read_bytes() if path.exists() else b""
        kept = data[:offset]
        if len(kept) < offset or (kept and not kept.endswith(b"\n")):
            raise UserError(
                f"{path}: expected a line to end at byte {offset}, where the checkpoint says it did; the file "
                f"has {len(data)} bytes and was changed since. Put the original back, or start a new run."
            )
        if kept != data:
            replace_file(path, kept)

    def close(self) -> None:
        """Close the files and finish the trackers."""
        self._metrics.close()
        self._events.close()
        for exporter in self._exporters:
            exporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _elapsed_now_s(self) -> float:
        return round(self._elapsed_before_s + time.monotonic() - self._started_s, 3)

    def _export(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for exporter in self._exporters:
            exporter.log(kind, step, values)


# --- Trackers ---------------------------------------------------------------------------------------------


class _Exporter(Protocol):
    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    """Event files in `<run>/tensorboard`. Each attempt purges the step it starts from and all after."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=resume_at or 0)
        if not resume_at:
            text = json.dumps(config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", global_step=0)

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _scalars(kind, values):
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Offline runs in `<run>/wandb`, one for each attempt: W&B cannot take steps back. `wandb sync` uploads them."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            mode="offline",
            dir=run,
            project=str(config.get("job") or "trainyard"),
            group=run.name,
            name=_attempt_name(run, resume_at),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        if scalars := dict(_scalars(kind, values)):
            self._run.log(scalars, step=step)

    def flush(self) -> None:
        """Nothing to do: its own process writes what it was given."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A local file store in `<run>/mlflow`, with one MLflow run for each attempt."""

    def __init__(self, run: Path, config: Mapping[str, object], resume_at: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        # MLflow prefers SQLite by now, whose locks network file systems do not keep; plain files need this switch.
        MLFLOW_ALLOW_FILE_STORE.set(True)
        self._client: Any = MlflowClient((run / "mlflow").absolute().as_uri())
        name = str(config.get("job") or "trainyard")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=_attempt_name(run, resume_at)).info.run_id
        for key, value in flatten(config):
            self._client.log_param(self._id, _mlflow_name(key), str(value))

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tag, value in _scalars(kind, values):
            self._client.log_metric(self._id, _mlflow_name(tag), value, step=step)

    def flush(self) -> None:
        """Nothing to do: every call writes its file."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _exporter(name: str, run: Path, config: Mapping[str, object], resume_at: int | None) -> _Exporter:
    kinds: dict[str, Callable[[Path, Mapping[str, object], int | None], _Exporter]] = {
        "tensorboard": _TensorBoard,
        "wandb": _WandB,
        "mlflow": _MLflow,
    }
    if name not in kinds:
        raise UserError(f"trackers={name}: expected any of {', '.join(kinds)}.")
    try:
        return kinds[name](run, config, resume_at)
    except ModuleNotFoundError as error:
        if name == "tensorboard":  # a dependency of ours: its absence is a broken installation
            raise
        raise UserError(
            f"trackers={name}: {error.name} is not installed here. "
            f"Run: pip install 'trainyard[{name}]', or leave {name} out of trackers."
        ) from error


def _scalars(kind: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line under the names trackers show; events have none."""
    if kind == "event":
        return
    prefix = f"eval/{values['split']}" if kind == "eval" else "train"
    for key, value in values.items():
        if isinstance(value, int | float | np.number) and key not in ("step", "elapsed_s"):
            yield f"{'timing' if kind == 'train' and key in TIMING_KEYS else prefix}/{key}", float(value)


def _attempt_name(run: Path, resume_at: int | None) -> str:
    return run.name if resume_at is None else f"{run.name} from step {resume_at}"


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)


# --- Heartbeat --------------------------------------------------------------------------------------------


class Heartbeat:
    """Says in `heartbeat.json`, every few seconds, that rank 0 lives, what it does and how far it is.

    Written between steps and not by a thread of its own, so a run that hangs falls silent.
    """

    def __init__(self, run: Path, attempt: str, *, every_s: float = 5.0) -> None:
        self.samples_per_s: float | None = None
        self.attempt, self._path, self._every_s = attempt, run / HEARTBEAT_FILE, every_s
        self._last_s = -math.inf

    def beat(self, phase: str, *, step: int = 0, total_steps: int | None = None, now: bool = False) -> None:
        """Write a sign of life, unless the last one is younger than `every_s`.

        Args:
            phase: "preparing", "training", "evaluating" or "saving".
            now: write in any case, because what begins may take long.
        """
        if not now and time.monotonic() - self._last_s < self._every_s:
            return
        self._last_s = time.monotonic()
        content = {"time": time.time(), "phase": phase, "step": step, "total_steps": total_steps}
        content |= {"samples_per_s": self.samples_per_s, "host": socket.gethostname(), "attempt": self.attempt}
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        aside.write_text(json.dumps(content))
        aside.replace(self._path)


# --- Files ------------------------------------------------------------------------------------------------


def read_metrics(run: Path) -> list[Line]:
    """Return the training and evaluation lines of a run, oldest first; none if it has not logged yet.

    Numbers that JSON could not hold are NaN or infinite again. A last line without its end, as kill -9 or a
    power cut may leave, is passed over.

    Raises:
        UserError: `run` is not a run folder, or any other line is damaged.
    """
    _require_run(run)
    return _read_lines(run / METRICS_FILE)


def read_events(run: Path) -> list[Line]:
    """Return the events of a run over all its attempts, oldest first, by the rules of `read_metrics`."""
    _require_run(run)
    return _read_lines(run / EVENTS_FILE)


def _require_run(run: Path) -> None:
    if not any((run / name).is_file() for name in ("config.yaml", METRICS_FILE, EVENTS_FILE)):
        found = "a folder without them" if run.is_dir() else "no folder"
        raise UserError(
            f"{run}: expected the folder of a run, with config.yaml and {METRICS_FILE}; found {found}. "
            f"Runs lie in runs/<job>/<time>-<commit>."
        )


def _read_lines(path: Path) -> list[Line]:
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


def _encode(line: Line) -> bytes:
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in line.items()}
    nonfinite = {k: str(v) for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        plain |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _drop_torn_tail(path: Path) -> None:
    """Cut what a killed writer left after the last whole line, so that the next line begins on its own."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)


def write_exhibits(run: Path, split: str, exhibits: Mapping[str, bytes]) -> None:
    """Keep plots and pictures of one scored set, title -> PNG, for the report: `exhibits/SPLIT - TITLE.png`."""
    folder = run / "exhibits"
    folder.mkdir(exist_ok=True)
    for title, png in exhibits.items():
        replace_file(folder / f"{split} - {title.replace('/', '_')}.png", png)


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` so that a kill at any point leaves its old or its new content."""
    aside = path.with_name(path.name + ".partial")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
