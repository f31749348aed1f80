"""Checks that two runs of a family, and a third that was stopped and resumed, end with equal checkpoints."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from trainyard import config as configs
from trainyard.data.prepare import prepare_data
from trainyard.launch.rank_task import execute
from trainyard.runs.create import create_run
from trainyard.runs.manifest import list_checkpoints
from trainyard.runs.state import ExitCode
from trainyard.tools.gpu_checks.check import CheckFailed, Figures, NotRun, Sizes
from trainyard.tools.gpu_checks.preset_steps import refuse_unsupported_settings
from trainyard.train import checkpoint
from trainyard.train.compare import find_differences, flatten_state

_POLL_S = 0.002
_LINES = 2  # of metrics, after which a run is stopped
_NAMES = ("first", "second", "stopped")


def compare_runs(device: torch.device, sizes: Sizes, *, family: str, overrides: Sequence[str] = ()) -> Figures:
    """Train a family's smoke preset twice without a break, and once stopped and resumed; compare all that they saved.

    Every run, and the resume, is a process of its own. This one computes nothing, so that it may fork them.

    Raises:
        CheckFailed: a run fails, or two of them differ.
        NotRun: this device does not compute as `overrides` say.
    """
    sizes = replace(sizes, scratch=Path(tempfile.mkdtemp(dir=sizes.scratch)))  # run names are those of other checks
    job, refusal = f"{family}_smoke", sizes.scratch / "refusal"
    _run(lambda: _create_runs(job, overrides, sizes, refusal))
    if refusal.exists():
        raise NotRun(refusal.read_text())
    first, second, stopped = (sizes.scratch / job / name for name in _NAMES)
    begin = time.perf_counter()
    for run in (first, second):
        _expect(ExitCode.DONE, _run(partial(_train, run, sizes)), run)
    _expect(ExitCode.PREEMPTED, _run(lambda: _train(stopped, sizes), meanwhile=lambda p: _stop(stopped, p)), stopped)
    stopped_at = max(entry.step for entry in list_checkpoints(stopped / "checkpoints"))
    _expect(ExitCode.DONE, _run(lambda: _train(stopped, sizes)), stopped)
    seconds = time.perf_counter() - begin
    states = [_load_state(run) for run in (first, second, stopped)]
    for name, state in zip(("a second run", f"a run that was stopped at step {stopped_at}"), states[1:], strict=True):
        if different := find_differences(states[0], state):
            raise CheckFailed(
                f"{name} differs from the first in {len(different)} of {len(state)} entries of the last checkpoint, "
                f"such as {different[0]}"
            )
    return {
        "preset": job,
        "family": family,
        "steps": sizes.run_steps,
        "stopped_at": stopped_at,
        "entries": len(states[0]),
        "runs_s": round(seconds, 1),
    }


def _create_runs(job: str, overrides: Sequence[str], sizes: Sizes, refusal: Path) -> int:
    """Pack the data and create the folders of three equal runs; or write why this device refuses them."""
    own = [f"max_duration={sizes.run_steps}st", "log_every=1st", "deterministic=true", "trackers=[]"]
    config = configs.compose(job, [*overrides, *own, f"data.cache={sizes.data}", "data.stage=off"], sizes.jobs)
    try:
        refuse_unsupported_settings(config)
    except NotRun as reason:
        refusal.write_text(str(reason))
        return ExitCode.DONE
    config = prepare_data(config, sizes.jobs)
    for name in _NAMES:
        create_run(sizes.scratch, config, name=name)
    return ExitCode.DONE


def _train(run: Path, sizes: Sizes) -> int:
    return execute(run, sizes.jobs, environ=sizes.environ, started=time.time())


def _run(work: Callable[[], int], *, meanwhile: Callable[[ForkProcess], None] = lambda process: None) -> int:
    """Run `work` in a process of its own; return its exit code, negative if a signal killed it."""
    process = get_context("fork").Process(target=_exit_with, args=(work,))
    process.start()
    meanwhile(process)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _exit_with(work: Callable[[], int]) -> None:
    os._exit(work())


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
        raise CheckFailed("the run that should be stopped ended first: it needs more steps")
    raise CheckFailed(f"run '{run.name}' exits with code {code}, expected {int(expected)}")


def _load_state(run: Path) -> dict[str, Any]:
    found = checkpoint.load_newest_valid(run / "checkpoints")
    if found is None:
        raise CheckFailed(f"run '{run.name}' left no checkpoint")
    return flatten_state(found[1])
