"""Checks that two runs of a preset, and a third that was stopped and resumed, end with equal checkpoints."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.node.rank_task import execute
from trainyard.runs.create import create_run
from trainyard.runs.folder import read_env
from trainyard.runs.history import read_errors
from trainyard.runs.manifest import list_checkpoints
from trainyard.runs.state import ExitCode
from trainyard.train import checkpoint
from trainyard.train.determinism import SECTION

_STEPS = 24  # of each run
_POLL_S = 0.002
_LINES = 2  # of metrics, after which a run is stopped
_NAMES = ("first", "second", "stopped")


class RunsDiffer(Exception):
    """Runs that must end equal do not, or one of them fails; the message has the difference."""


def compare_runs(
    preset: str,
    overrides: Sequence[str],
    jobs_dir: Path,
    scratch: Path,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Train a preset twice without a break, and once stopped and resumed; compare all that they saved.

    Every run, and the resume, is a separate process. Call this in a process that has computed nothing: it forks them,
    and torch's threads of computing do not survive a fork, so that a run would wait for them forever.

    Args:
        scratch: a folder without runs of this preset.

    Returns:
        "stopped_at", a step, and the entries of `compare_checkpoints`.

    Raises:
        RunsDiffer: a run fails, or two of them differ.
    """
    _expect(ExitCode.DONE, _run(lambda: _create_runs(preset, overrides, jobs_dir, scratch)), scratch / preset)
    first, second, stopped = (scratch / preset / name for name in _NAMES)

    def train(run: Path) -> int:
        return execute(run, jobs_dir, environ=environ, started=time.time())

    for run in (first, second):
        _expect(ExitCode.DONE, _run(partial(train, run)), run)
    _expect(ExitCode.PREEMPTED, _run(partial(train, stopped), meanwhile=partial(_stop, stopped)), stopped)
    stopped_at = max(entry.step for entry in list_checkpoints(stopped / "checkpoints"))
    _expect(ExitCode.DONE, _run(partial(train, stopped)), stopped)
    others = {"a second run": second, f"a run that was stopped at step {stopped_at}": stopped}
    return {"stopped_at": stopped_at, **compare_checkpoints(first, others)}


def compare_checkpoints(first: Path, others: Mapping[str, Path]) -> dict[str, Any]:
    """Compare the last checkpoint of a run with those of others, given by their descriptions.

    Returns:
        "entries" of a checkpoint, and which operators are "deterministic": if not all are, others may differ next time.

    Raises:
        RunsDiffer: two differ; the message names the operators that may be the cause.
    """
    runs = [first, *others.values()]
    states = []
    for run in runs:
        if (loaded := checkpoint.load_newest_valid(run / "checkpoints")) is None:
            raise RunsDiffer(f"run '{run.name}' left no checkpoint")
        states.append(flatten_state(loaded[1]))
    findings = [finding for run in runs for finding in read_env(run).get(SECTION, {}).values()]
    allowed = ", ".join(sorted({operator for finding in findings for operator in finding["operators"]}))
    cause = f". The likely cause: {allowed}, for which torch has no deterministic kernel here" if allowed else ""
    for name, state in zip(others, states[1:], strict=True):
        if different := find_differences(states[0], state):
            raise RunsDiffer(
                f"{name} differs from the first in {len(different)} of {len(state)} entries of the last checkpoint, "
                f"such as {different[0]}{cause}"
            )
    return {"entries": len(states[0]), "deterministic": f"all operators but {allowed}" if allowed else "all operators"}


def _create_runs(preset: str, overrides: Sequence[str], jobs_dir: Path, scratch: Path) -> int:
    own = [f"max_duration={_STEPS}st", "log_every=1st", "deterministic=true", "trackers=[]", "data.stage=off"]
    config = prepare_data(configs.compose(preset, [*overrides, *own], jobs_dir), jobs_dir)
    for name in _NAMES:
        create_run(scratch, config, name=name)
    return ExitCode.DONE


def _run(work: Callable[[], int], *, meanwhile: Callable[[ForkProcess], None] = lambda process: None) -> int:
    """Run `work` in a separate process; return its exit code, negative if a signal killed it."""
    process = get_context("fork").Process(target=lambda: os._exit(work()))
    process.start()
    meanwhile(process)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _stop(run: Path, process: ForkProcess) -> None:
    """Ask a run to stop as soon as it has written some metrics."""
    metrics = run / "metrics.jsonl"
    while process.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") < _LINES):
        time.sleep(_POLL_S)
    if process.is_alive():
        process.terminate()


def _expect(expected: ExitCode, code: int, run: Path) -> None:
    if code == expected:
        return
    if expected == ExitCode.PREEMPTED and code == ExitCode.DONE:
        raise RunsDiffer("the run that should be stopped ended first: it needs more steps")
    reason = "".join(f": {error.summary}" for error in read_errors(run)[:1])
    raise RunsDiffer(f"run '{run.name}' exits with code {code}, expected {int(expected)}{reason}")


VARYING = ("progress/train_s", "metrics_position")
"""Entries that may differ between two runs that compute the same: time spent, and the bytes that recording it takes."""


def flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state, such as a checkpoint, as a flat mapping: "optimizer/state/0/exp_avg" -> value."""
    return dict(_walk(state))


def find_differences(a: Mapping[str, Any], b: Mapping[str, Any], *, ignore: Sequence[str] = VARYING) -> list[str]:
    """Return the names of the entries that two flat states do not share, or that differ in a bit."""
    missing = sorted(a.keys() ^ b.keys())
    return missing + [name for name in a if name in b and name not in ignore and not _is_equal(a[name], b[name])]


def _walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(inner, f"{prefix}/{name}" if prefix else str(name))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _walk(inner, f"{prefix}/{i}")
    else:
        yield prefix, value


def _is_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
