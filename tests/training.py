"""Runs real training in tests: in this process, in processes that can be killed, and on several ranks."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainyard.config import compose as configs
from trainyard.data.prepare import prepare_data
from trainyard.node.rank_task import execute
from trainyard.runs.create import create_run
from trainyard.runs.events import TIMING_KEYS, read_metrics
from trainyard.tools.exact_runs import find_differences as find_differences  # tests import it from here
from trainyard.tools.exact_runs import flatten_state
from trainyard.train import checkpoint

FAMILIES = Path(__file__).parent / "families"
FORKSERVER = multiprocessing.get_context("forkserver")
"""Starts processes without threads of other tests, in which torch is loaded already: that saves seconds in each."""
FORKSERVER.set_forkserver_preload(["trainyard.node.rank_task", "trainyard.train.trainer", "trainyard.data.decode_dali"])


def new_run(root: Path, *overrides: str, job: str = "stripes", jobs: Path = FAMILIES) -> Path:
    """Prepare the data and create a run, without training."""
    config = configs.compose(job, [f"data.cache={root / 'cache'}", *overrides], jobs)
    return create_run(root / "runs", prepare_data(config, jobs))


def train(run: Path, *, jobs: Path = FAMILIES) -> int:
    """Train a run in this process; return its exit code."""
    return execute(run, jobs, environ={}, started=time.time())


def start(run: Path, *, rank: int = 0, world_size: int = 1, rendezvous: str = "m", jobs: Path = FAMILIES) -> Any:
    """Start one rank of a run in a separate process, which a test may kill."""
    environ = {}
    if world_size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        environ = {name: str(value) for name, value in numbers.items()} | {"TRAINYARD_MEETING": rendezvous}
    process = FORKSERVER.Process(target=_run_rank, args=(run, environ, jobs, time.time()))
    process.start()
    return process


def train_on_ranks(run: Path, world_size: int, *, rendezvous: str) -> list[int]:
    """Train a run on several ranks; return their exit codes."""
    ranks = [start(run, rank=rank, world_size=world_size, rendezvous=rendezvous) for rank in range(world_size)]
    for process in ranks:
        process.join(240)
    return [process.exitcode for process in ranks]


def run_as_command(
    work: Callable[[], int], folder: Path, *, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `work` in a process of its own in `folder`; return its exit code and what it printed, as a command's."""
    folder.mkdir(exist_ok=True)
    outputs = [folder.with_name(f"{folder.name}.{name}") for name in ("stdout", "stderr")]
    process = FORKSERVER.Process(target=_run_redirected, args=(work, folder, outputs))
    process.start()
    process.join(240)
    assert process.exitcode is not None, "it has not ended"
    stdout, stderr = (path.read_text() for path in outputs)
    return subprocess.CompletedProcess([], process.exitcode, stdout, stderr)


def wait_for_lines(run: Path, count: int, process: Any) -> None:
    """Wait until a run has written `count` metric lines, or its process has ended."""
    path = run / "metrics.jsonl"
    while process.is_alive() and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


def train_whole_and_stopped(root: Path, *options: str, job: str, jobs: Path) -> tuple[Path, Path]:
    """Train a run of six steps without a break, and another that is stopped in the middle and resumed."""
    six = ("log_every=1st", "max_duration=6st", *options)
    whole, stopped = (new_run(root, *six, job=job, jobs=jobs) for _ in range(2))
    assert train(whole, jobs=jobs) == 0
    process = start(stopped, jobs=jobs)
    wait_for_lines(stopped, 2, process)
    process.terminate()
    process.join(240)
    assert process.exitcode == 85, "expected it to stop in the middle"
    assert train(stopped, jobs=jobs) == 0
    return whole, stopped


def load_state(run: Path) -> dict[str, Any]:
    """Return the newest checkpoint as a flat mapping."""
    found = checkpoint.load_newest_valid(run / "checkpoints")
    assert found is not None
    return flatten_state(found[1])


def read_run_metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metric lines without timings."""
    return [{name: v for name, v in line.items() if name not in TIMING_KEYS} for line in read_metrics(run)]


def _run_rank(run: Path, environ: dict[str, str], jobs: Path, started: float) -> None:
    for number in (signal.SIGHUP, signal.SIGQUIT):  # which tests under nohup ignore, and what they start, too
        signal.signal(number, signal.SIG_DFL)
    os._exit(execute(run, jobs, environ=environ, started=started))


def _run_redirected(work: Callable[[], int], folder: Path, outputs: Sequence[Path]) -> None:
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.exit(work())
