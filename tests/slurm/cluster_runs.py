"""Helpers for tests with runs on the lab: submitted through the command line, watched through their folders."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.training import FAMILIES
from trainyard.cli import main
from trainyard.runs.folder import resolve_run

if TYPE_CHECKING:
    from tests.slurm.conftest import Lab

LAB_FILE = Path(__file__).parents[2] / "slurm" / "lab.yaml"

Start = Callable[..., Path]


def trainyard(*words: object) -> int:
    """Run a `trainyard` command in this process; return its exit code."""
    return main([str(word) for word in words])


def make_starter(root: Path, cache: Path) -> Start:
    """Return a function that submits a run of the stripes family and returns its folder."""

    def start(name: str, *words: object, cluster: Path = LAB_FILE) -> Path:
        fixed = [f"data.cache={cache}", "--jobs", FAMILIES, "--runs", root, "--cluster", cluster, "--name", name]
        # DALI takes a second to load in each rank; a test that needs it states data.decode.
        decode = () if any(str(word).startswith("data.decode=") for word in words) else ("data.decode=cpu",)
        # A prediction of memory loads torch; a test of it states what it needs.
        assert trainyard("submit", "stripes", *words, *decode, *fixed, "--no-plan") == 0
        return resolve_run(f"stripes/{name}", root)

    return start


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a missing file has none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_ends(run: Path) -> list[tuple[int, str, str]]:
    """Return attempt, cause and action of each end that the batch scripts recorded."""
    found = read_lines(run / "slurm" / "attempts.jsonl")
    return [(line["attempt"], line["cause"], line["action"]) for line in found if line["event"] == "end"]


@contextmanager
def count_listings(root: Path) -> Iterator[list[str]]:
    """Yield the list of folders below `root`, itself included, that this process lists, which grows within the block.

    Python cannot take away an audit hook again: this one notes nothing afterwards.
    """
    found, is_on = list[str](), True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event in ("os.listdir", "os.scandir") and Path(str(arguments[0])).is_relative_to(root):
            found.append(str(arguments[0]))

    sys.addaudithook(note)
    try:
        yield found
    finally:
        is_on = False


TIMEOUT_S = 500  # below pytest's timeout; a busy machine has needed 150 to start six runs at once


def wait(what: str, condition: Callable[[], object], *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.2)


def read_last_step(run: Path) -> int:
    """Return the last step with written metrics."""
    return max((line["step"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"), default=0)


def wait_for_end(lab: "Lab", run: Path, *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the batch script has recorded the final end and the Slurm job is over."""
    job_id = read_slurm_job_id(run)

    def has_ended() -> bool:
        last = [line for line in read_lines(run / "slurm" / "attempts.jsonl") if line["job"] == job_id][-1:]
        return bool(last) and last[0]["event"] == "end" and last[0]["action"] == "stop"

    wait(f"the end of {run.name}", has_ended, timeout_s=timeout_s)
    lab.wait_for(job_id, ("COMPLETED", "FAILED"))


def read_slurm_job_id(run: Path) -> str:
    """Return the Slurm job id of a run's last submission."""
    return str(json.loads((run / "slurm" / "submission.json").read_text())["job"])


def find_rank_pids(run: Path, rank: int) -> list[int]:
    """Return the pids of one rank of a run."""
    wanted = {f"TRAINYARD_RUN={run}".encode(), f"SLURM_PROCID={rank}".encode()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has exited in the meantime
        if wanted <= set(environ.split(b"\0")) and b"start_rank" in command and b"srun" not in command.split(b"\0")[0]:
            found.append(int(folder.name))
    return found


def kill_rank(run: Path, rank: int) -> None:
    """Kill one rank with SIGKILL, as the kernel would."""
    (pid,) = find_rank_pids(run, rank)
    os.kill(pid, signal.SIGKILL)
