"""Starts and supervises several ranks on this machine: one process per GPU, or per share of the cores."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from loguru import logger

from trainyard.errors import Killed, Vanished
from trainyard.runs.folder import find_error_file, record_error
from trainyard.runs.state import ExitCode
from trainyard.train.stop import EXIT_CODES, FORWARDED_SIGNALS, STOP_SIGNALS, leave_closed_terminal
from trainyard.train.world import read_attempt_id

_GRACE_S = 15.0  # after one rank has failed, until the others are killed
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def train_on_ranks(
    run: Path, jobs_dir: Path, count: int, *, environ: Mapping[str, str], started: float, break_lock: bool = False
) -> int:
    """Train a run on `count` ranks; return the exit code of the first that failed, or 0.

    Out of memory on a GPU, all ranks start again, with the smaller micro-batch that the run has recorded.

    Args:
        started: when the attempt began, in seconds since the epoch.
    """
    command = ["rank", str(run), "--jobs", str(jobs_dir), "--since", str(started), *["--break-lock"] * break_lock]
    attempt = read_attempt_id(environ, started=started)
    start_ranks = partial(
        run_ranks,
        command,
        count,
        environ=environ,
        on_failure=lambda rank, code: _record_end(run, rank, code, attempt=attempt),
    )
    while (code := start_ranks()) == ExitCode.DEVICE_OOM:
        logger.info("a GPU was out of memory: all ranks start again, with half the micro-batch")
    return code


def _record_end(run: Path, rank: int, code: int, *, attempt: str) -> None:
    """Record how a rank ended if it could not: it was killed, or exited without an error and without a checkpoint."""
    if code >= 0:
        if code not in EXIT_CODES.values() and not find_error_file(run, attempt=attempt, rank=rank).is_file():
            error = Vanished(f"exited with code {code} and recorded no error; its own words are on the terminal")
            record_error(run, error, attempt=attempt, rank=rank)
        return
    name = signal.Signals(-code).name
    hint = "; if nobody sent it, the kernel did, for want of memory: dmesg | tail" if -code == signal.SIGKILL else ""
    record_error(run, Killed(-code, f"{name}{hint}"), attempt=attempt, rank=rank)


def run_ranks(
    arguments: Sequence[str],
    count: int,
    *,
    environ: Mapping[str, str],
    on_failure: Callable[[int, int], object] = lambda rank, code: None,
) -> int:
    """Run `trainyard ARGUMENTS` as `count` ranks; return the exit code of the first that failed, or 0.

    Signals that stop a run reach the ranks, which agree when to save and exit. If one rank dies the others cannot
    continue and are killed. If this process is killed, so are they.

    Args:
        on_failure: called with the rank that failed first and its exit code; negative: the signal that killed it.
    """
    rendezvous = secrets.token_hex(8)
    # Blocked here and, by inheritance, in the ranks until they listen: a signal while they start is late, not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    ranks = [_start_rank(arguments, rank, count, rendezvous, environ) for rank in range(count)]

    def forward_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    # A terminal sends Ctrl-C to the whole process group, so the ranks already get it: ignore it here.
    listened = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward_signal) for number in listened}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        return _wait_for_ranks(ranks, on_failure)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in ranks:
            process.kill()
            process.wait()


def _start_rank(
    arguments: Sequence[str], rank: int, count: int, rendezvous: str, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    own = {name: str(value) for name, value in numbers.items()} | {"TRAINYARD_MEETING": rendezvous}
    command = [sys.executable, "-P", "-m", "trainyard", *arguments]
    return subprocess.Popen(command, env={**environ, **own}, preexec_fn=partial(end_with_parent, os.getpid()))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends: kill -9 of a launcher must leave no rank behind.

    Args:
        parent: process id of the parent: 1 in a container whose first process is the launcher.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def _wait_for_ranks(ranks: "list[subprocess.Popen[bytes]]", on_failure: Callable[[int, int], object]) -> int:
    deadline: float | None = None
    first = 0
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed and deadline is None:
            (rank, first), deadline = failed[0], time.monotonic() + _GRACE_S
            on_failure(rank, first)
        if None not in codes:
            break
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(_POLL_S)
    if ExitCode.DEVICE_OOM in codes:  # the others failed because they lost this rank
        return ExitCode.DEVICE_OOM
    code = first or next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code
