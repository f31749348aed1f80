"""Reads a run folder's record of its training, for the report."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import UserError
from trainyard.files import RUN, check_format, parse_json, read_file
from trainyard.runs.changes import find_changes
from trainyard.runs.events import (
    ENDS,
    STARTS,
    Line,
    find_best_evaluation,
    find_elapsed_s,
    list_metric_names,
    read_events,
    read_thinned_metrics,
)
from trainyard.runs.folder import ENV_DIGEST
from trainyard.runs.goodput import label_seconds

_MOST_TRAIN_LINES = 2_000  # in memory and in a plot, which has fewer pixels


@dataclass(frozen=True)
class RunStory:
    """The record of a run, read once, and the facts that follow from it."""

    run: Path
    config: str  # the text of config.yaml; empty if there is none
    env: Mapping[str, Any]
    train: list[Line]
    untrained: list[Line]  # evaluations before the first step: a baseline, and no result
    evals: list[Line]
    events: list[Line]
    every: int  # how many training lines of the run one of `train` stands for; it also has the last one
    changes: list[str]  # a sentence for each file that is not as the run wrote it
    seconds: Mapping[str, float]  # of the run by activity; empty if not recorded

    @classmethod
    def read(cls, run: Path) -> "RunStory":
        metrics, every = read_thinned_metrics(run, most=_MOST_TRAIN_LINES)
        events = read_events(run)
        return cls(
            run=run,
            config=_read_text(run / "config.yaml"),
            env=_read_environment(run / "env.json"),
            train=[line for line in metrics if line["kind"] == "train"],
            untrained=[line for line in metrics if line["kind"] == "eval" and line["step"] == 0],
            evals=[line for line in metrics if line["kind"] == "eval" and line["step"] > 0],
            events=events,
            every=every,
            changes=[str(change) for change in find_changes(run)],
            seconds=label_seconds(run, events),
        )

    @property
    def job(self) -> str:
        match = re.search(r"^job: *(\S+)", self.config, re.MULTILINE)
        return match[1].strip("'\"") if match else self.run.absolute().parent.name

    @property
    def status(self) -> str:
        known = [e for e in self.events if e.get("event") in STARTS + ENDS]
        if not known:
            return "not recorded"
        last = known[-1]
        if last["event"] in STARTS:
            return "no end recorded: still running, or killed"
        return describe_ending(last)

    @property
    def step(self) -> int:
        return max((line["step"] for line in [*self.train, *self.evals, *self.list_current_events()]), default=0)

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(str(line["split"]) for line in self.evals))

    @property
    def samples_per_s(self) -> float | None:
        """Median over the lines; if there are several, without the first, which may include compilation."""
        rates = [line["samples_per_s"] for line in self.train if "samples_per_s" in line]
        return float(np.median(rates[1:] or rates)) if rates else None

    @property
    def elapsed_s(self) -> float:
        return find_elapsed_s([*self.train, *self.untrained, *self.evals, *self.list_current_events()])

    def list_current_events(self) -> list[Line]:
        """Return the events without those of steps that a later attempt repeated."""
        current: list[Line] = []
        for event in self.events:
            if event.get("event") in STARTS:
                current = [e for e in current if e["step"] <= event["step"]]
            current.append(event)
        return current

    def find_start_field(self, key: str) -> Any:
        """Return a field of the latest start or resume; None if it was not recorded."""
        values = (e.get(key) for e in reversed(self.events) if e.get("event") in STARTS)
        return next((value for value in values if value is not None), None)

    def find_progress(self) -> Line:
        """Return the newest line with the number of epochs and samples trained: an end, or a training line."""
        known = [line for line in [*self.train, *self.list_current_events()] if "samples_seen" in line]
        return max(known, key=lambda line: line["step"], default={})

    def find_last_evaluation(self, split: str) -> Line:
        return next(line for line in reversed(self.evals) if str(line["split"]) == split)

    def list_evaluations(self, split: str) -> list[Line]:
        """Return the evaluations of a split with the one before training, for curves."""
        return [line for line in [*self.untrained, *self.evals] if str(line["split"]) == split]

    def find_best_evaluation(self) -> tuple[str, Line] | None:
        """The metric that decides and its best evaluation; None if it is not named or never finite."""
        monitor = self.find_start_field("monitor") or {}
        split, metric, mode = (str(monitor.get(key)) for key in ("split", "metric", "mode"))
        best = find_best_evaluation(self.evals, split=split, metric=metric, mode=mode, ties=monitor.get("ties", ()))
        return None if best is None else (metric, best)

    def list_step_losses(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the steps and their losses, NaN where one was not finite."""
        steps: list[int] = []
        losses: list[float | None] = []
        for line in self.train:
            listed = line.get("step_losses", [])
            steps += range(line["step"] - len(listed) + 1, line["step"] + 1)
            losses += listed
        return np.array(steps, np.float64), np.array(losses, np.float64)

    def list_metrics(self, *, constant: bool) -> list[str]:
        """Return the names of the metrics that were the same in all evaluations of each split, or those of the others.

        Such constants are counts of pairs, say, and scores of a constant prediction. One evaluation tells nothing.
        """
        values: dict[str, dict[str, list[Any]]] = {name: {} for name in list_all_metric_names(self.evals)}
        for line in self.evals:
            for name in list_metric_names(line):
                values[name].setdefault(line["split"], []).append(line[name])

        def is_constant(name: str) -> bool:
            lists = values[name].values()
            return any(len(series) > 1 for series in lists) and all(len(set(series)) == 1 for series in lists)

        return [name for name in values if is_constant(name) == constant]

    def list_missing(self) -> list[str]:
        """Return the missing parts of the record, as sentences."""
        absent = {
            "No training line yet.": not self.train,
            "The end of the run is not recorded: it is still running, or it was killed.": not any(
                e.get("event") in ENDS for e in self.events
            ),
            "env.json is absent: the environment and the automatic choices are not recorded.": not self.env,
            "config.yaml is absent: the options are not recorded.": not self.config,
            "No time by activity is recorded.": bool(self.train) and not self.seconds,
        }
        thinned = f"Curves and rates are those of every {self.every}th training line: the run has very many."
        absent[thinned] = self.every > 1
        lost = [str(event["missing"]) for event in self.list_current_events() if "missing" in event]
        return [*self.changes, *lost, *(text for text, is_absent in absent.items() if is_absent)]


def describe_ending(event: Line) -> str:
    reason = event.get("reason") if event["event"] != "done" else None
    return f"{event['event']} ({reason})" if reason else str(event["event"])


def _read_text(path: Path) -> str:
    try:
        return read_file(path, most_bytes=_MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Restore it, or delete it to do without.") from None


def _read_environment(path: Path) -> Mapping[str, Any]:
    try:
        env = parse_json(_read_text(path).encode() or b"{}")
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found {error}. Restore it, or delete it to do without.") from error
    if not isinstance(env, dict):
        raise UserError(f"{path}: expected a JSON object. Restore it, or delete it to do without.")
    if env:
        check_format(path, env.get("format"), kind=RUN)
    return {name: value for name, value in env.items() if name not in ("format", ENV_DIGEST)}


_MOST_BYTES = 16 * 2**20  # of config.yaml and env.json


def list_all_metric_names(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in list_metric_names(line)))
