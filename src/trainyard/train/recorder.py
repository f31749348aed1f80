"""Writes a run's metrics and events, to disk and to trackers. Their schema is in runs/events.py."""

import copy
import hashlib
import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from trainyard.errors import UserError
from trainyard.files import AppendedFile, forgive_failed_write, make_folder_inside, open_atomically, write_atomically
from trainyard.runs.events import (
    EVENTS_FILE,
    KINDS,
    METRICS_FILE,
    Line,
    find_elapsed_s,
    find_end_of_step,
    read_last_lines,
    read_lines,
    start_new_file,
)
from trainyard.train.run_context import VALIDATION, RunContext, compute_total_steps, describe_monitor
from trainyard.train.step import Progress
from trainyard.train.trackers import open_tracker


class Recorder:
    """The only writer of a run's metrics and events. One per run folder, on rank 0."""

    def __init__(
        self,
        run: Path,
        *,
        trackers: Sequence[str],
        config: Mapping[str, object],
        resume_at: int | None,
        monitor: str = "",
        check_owner: Callable[[], None] = lambda: None,
        on_metrics: Callable[[str, int, Mapping[str, object]], object] = lambda kind, step, values: None,
    ) -> None:
        """Open both files for appending, as new ones (`start_new_file`), and the trackers.

        Args:
            run: the run folder; it exists.
            trackers: any of "tensorboard", "wandb" (offline) and "mlflow" (local files); all write inside `run`.
            config: the run's options, as the trackers show them; may be nested.
            resume_at: step of the checkpoint that training resumes from, after `rewind`; None for a new run, and
                for one without a checkpoint that starts from scratch, after `rewind(run, 0)`.
            monitor: the metric that decides, with its split, such as val/eer, for the trackers.
            check_owner: called before each write; raises if another process has taken over the run.
            on_metrics: called with a copy of each line of metrics after it was written: `TrainModule.on_metrics`.

        Raises:
            UserError: a tracker is not installed, or the folder of a new run already has metrics.
        """
        for path in (run / METRICS_FILE, run / EVENTS_FILE):
            start_new_file(path)
        newest = _read_newest(run, resume_at)
        self._trackers = [open_tracker(name, run, config, resume_at, monitor=monitor) for name in trackers]
        for line in newest:
            if line["step"] == resume_at:  # trackers drop this step too, but part of it may precede the checkpoint
                self._log_to_trackers(line["kind"], line["step"], line)
        before = [*newest, *(e for e in read_lines(run / EVENTS_FILE) if e["step"] <= (resume_at or 0))]
        self._elapsed_before_s = find_elapsed_s(before) if resume_at is not None else 0.0
        self._started_s = time.monotonic()
        self._check_owner, self._on_metrics = check_owner, on_metrics
        self._metrics = AppendedFile(run / METRICS_FILE)
        with (run / METRICS_FILE).open("rb") as file:
            self._digest = hashlib.file_digest(file, "sha256")  # of all lines, those of earlier attempts too
        self._events = AppendedFile(run / EVENTS_FILE)

    def log(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Write one line to disk and to the trackers.

        Args:
            kind: "train", "eval" (with `split` among the values) or "event" (with `event` among them).
            step: optimizer steps done.
            values: numbers, text, or lists and mappings of text and finite numbers. Not `elapsed_s`, which is
                added here: seconds of running over all attempts, without those that a resume discarded.

        Raises:
            ValueError: a number inside a list or mapping is not finite; nothing was written.
        """
        assert kind in KINDS, kind
        assert not {"kind", "step", "elapsed_s"} & values.keys(), "the recorder adds these"
        elapsed_s = round(self._elapsed_before_s + time.monotonic() - self._started_s, 3)
        line: Line = {"kind": kind, "step": step, **values, "elapsed_s": elapsed_s}
        if kind == "event":
            line["time"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._check_owner()
        file = self._events if kind == "event" else self._metrics
        data = encode_line(line)
        file.write(data)
        if file is self._metrics:
            self._digest.update(data)
        self._log_to_trackers(kind, step, values)
        if file is self._metrics:
            self._on_metrics(kind, step, copy.deepcopy(dict(values)))

    def log_figure(self, split: str, step: int, title: str, png: bytes) -> None:
        """Show a figure of a scored split in the trackers that show images."""
        for tracker in self._trackers:
            tracker.log_image(f"{split}/{title}", step, png)

    def sync(self) -> int:
        """Flush to disk; return the length of `metrics.jsonl` in bytes, which a checkpoint stores for `rewind`."""
        self._check_owner()
        for tracker in self._trackers:
            tracker.flush()
        return self._metrics.sync()

    def describe_metrics(self) -> dict[str, Any]:
        """Flush to disk; return length in bytes and SHA-256 of `metrics.jsonl` as it was written."""
        return {"bytes": self.sync(), "sha256": self._digest.hexdigest()}

    @staticmethod
    def rewind(run: Path, offset: int, *, step: int) -> str:
        """Drop the metrics written after the checkpoint of `step`, which stored `offset`.

        If no line ends there, because the file was cut short or is gone, the remaining lines up to `step` stay.
        A kill at any point leaves the old file or the new one.

        Returns:
            Which lines are missing, as a sentence; "" if none are.
        """
        path, missing = run / METRICS_FILE, ""
        size = path.stat().st_size if path.exists() else 0
        if offset and not _has_line_end(path, offset):
            end, last = find_end_of_step(path, step)
            missing = (
                f"{METRICS_FILE} has {end} of {offset} bytes: lines after step {last} and up to step {step} are "
                "missing. Weights and further steps are as without this."
            )
            offset = end
        if size > offset:
            with path.open("rb") as file, open_atomically(path, size_bytes=offset) as head:
                for left in range(offset, 0, -_BLOCK_BYTES):
                    head.write(file.read(min(left, _BLOCK_BYTES)))
        return missing

    def close(self) -> None:
        """Close the files and finish the trackers."""
        self._metrics.close()
        self._events.close()
        for tracker in self._trackers:
            tracker.close()

    def _log_to_trackers(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        for tracker in self._trackers:
            tracker.log(kind, step, values)


_BLOCK_BYTES = 2**20  # of metrics copied at once
_MOST_OF_A_STEP = 64  # lines: one of training, and one for each evaluated split


def _has_line_end(path: Path, offset: int) -> bool:
    """Return whether a line ends right before this byte, which is after the first."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def _read_newest(run: Path, resume_at: int | None) -> list[Line]:
    """Return the last line of the metrics before the step that training resumes from, and all of that step, in order.

    Raises:
        UserError: there are lines after that step, or in the folder of a new run.
    """
    path = run / METRICS_FILE
    lines = read_last_lines(path, _MOST_OF_A_STEP + 1)
    if not lines:
        return []
    if resume_at is None:
        raise UserError(
            f"{path}: expected no metrics in the folder of a new run, found {len(read_lines(path))} lines. Resume that "
            "run, or start in another folder."
        )
    if lines[-1]["step"] > resume_at:
        raise UserError(
            f"{path}: expected no line after step {resume_at}, where the checkpoint is. The file was changed since: "
            "restore it from a copy, or start a new run."
        )
    return lines[-1 - sum(line["step"] == resume_at for line in lines) :]


def encode_line(line: Line) -> bytes:
    """Encode one line of metrics or events: JSON without NaN and infinity, which `nonfinite` names."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in line.items()}
    nonfinite = {k: str(v) for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        plain |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def open_recorder(context: RunContext, progress: Progress, metrics_position: int | None) -> Recorder:
    """Open the recorder of an attempt that begins at `progress`, and log its start.

    Args:
        metrics_position: length of the metrics file at the checkpoint that it resumes from; None without one.
    """
    monitor = describe_monitor(context)
    # Without a checkpoint, a killed run starts from scratch.
    missing = Recorder.rewind(context.run, metrics_position or 0, step=progress.step)
    recorder = Recorder(
        context.run,
        trackers=context.config.trackers,
        config=asdict(context.config),
        resume_at=None if metrics_position is None else progress.step,
        monitor=f"{VALIDATION}/{monitor['metric']}" if VALIDATION in context.splits else "",
        check_owner=context.check_owner,
        on_metrics=type(context.module).on_metrics,
    )
    fields = {
        "event": "start" if metrics_position is None else "resume",
        "attempt": context.heartbeat.attempt,
        "total_steps": compute_total_steps(context.config, len(context.orders(progress.epoch))),
        "world_size": context.world.world_size,
        "device": context.device.type,
        "host": socket.gethostname(),
        "monitor": monitor,
        "spent": context.heartbeat.read_spent(),
    }
    if context.heartbeat.previous:
        fields["previous"] = context.heartbeat.previous
    if missing:
        logger.warning("{}: {}", context.run, missing)
        fields |= {"missing": missing, "metrics": recorder.describe_metrics()}
    recorder.log("event", progress.step, fields)
    return recorder


def write_report_figures(
    run: Path,
    recorder: Recorder | None,
    split: str,
    step: int,
    figures: Mapping[str, bytes],
    samples: Mapping[str, bytes],
) -> None:
    """Write plots and images of one scored split, title -> PNG, for the report and for trackers that show images.

    In the run they are `figures/SPLIT - TITLE.png`, and of samples `samples/SPLIT - TITLE.png`, so that one may delete
    these before others see the page. Those of an earlier attempt are deleted.
    """
    for name, images in (("figures", figures), ("samples", samples)):
        folder = run / name
        if not images and not folder.is_dir():
            continue
        make_folder_inside(folder)
        written = {folder / f"{split} - {title.replace('/', '_')}.png": png for title, png in images.items()}
        for stale in {path for path in folder.iterdir() if path.name.startswith(f"{split} - ")} - set(written):
            stale.unlink()
        failed: list[OSError] = []
        for path, png in written.items():
            with forgive_failed_write(failed.append):
                write_atomically(path, png, inside=True)
        if failed:
            logger.warning("{}: {} of {} not written, the first: {}", folder, len(failed), len(written), failed[0])
        if recorder is not None:
            for title, png in images.items():
                recorder.log_figure(split, step, title, png)
