"""A rank that hangs is noticed and named, and its attempt ends with a cause of its own."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training import FAMILIES, FORKSERVER, new_run
from tests.waiting import wait_until
from trainyard.runs.history import RANKS, RankError, read_errors
from trainyard.runs.state import Cause, ExitCode
from trainyard.runs.why import explain_run
from trainyard.train.heartbeat import Progress
from trainyard.train.stop import StopFlag
from trainyard.train.watchdog import Watchdog
from trainyard.train.world import World

ATTEMPT = "local-5"


def start_rank(run: Path, work: Callable[..., None], *, rank: int = 0, count: int = 1, limit_s: float, **more: Any):
    """Start a process whose main thread does `work` under a watchdog."""
    process = FORKSERVER.Process(target=_run_rank, args=(run, work, rank, count, limit_s), kwargs=more)
    process.start()
    return process


def _run_rank(run: Path, work: Callable[..., None], rank: int, count: int, limit_s: float, **more: Any) -> None:
    progress = Progress(phase="training", step=7)
    watchdog = Watchdog(
        run,
        ATTEMPT,
        World(rank, rank, count, count),
        progress,
        before_exit=(run / f"left-{rank}").touch,
        on_signal=lambda number: (run / f"signal-{rank}").write_text(number.name),
    )
    watchdog.set_limit(limit_s / 60)
    with StopFlag(), watchdog:
        try:
            work(progress, **more)
        except ValueError as error:
            watchdog.tell_others(error)
            sys.exit(ExitCode.FAILED)


def make_wait() -> Callable[[Any], None]:
    """Return a function that waits for other ranks, at a place where torch would."""

    def wait(barrier: Any) -> None:
        barrier.wait()

    wait.__code__ = wait.__code__.replace(co_filename="/torch/distributed/stand_in.py")
    return wait


def take_steps(progress: Progress, *, barrier: Any, hangs: bool = False) -> None:
    """Take steps in which ranks wait for each other; a rank that hangs takes five."""
    wait = make_wait()
    for _ in range(5 if hangs else 10**6):
        wait(barrier)
        progress.count += 1
        time.sleep(0.02)
    read_from_a_dead_disk()


def read_from_a_dead_disk() -> None:
    os.read(os.pipe()[0], 1)


def read_one_error(run: Path) -> RankError:
    (error,) = read_errors(run)
    return error


@pytest.mark.slow
def test_a_rank_alone_that_hangs_dumps_its_stacks_and_ends_with_the_cause(tmp_path):
    barrier = FORKSERVER.Barrier(1)
    rank = start_rank(tmp_path, take_steps, limit_s=1, barrier=barrier, hangs=True)
    rank.join(60)
    assert rank.exitcode == ExitCode.HUNG
    error = read_one_error(tmp_path)
    assert error.cause == Cause.HUNG and error.attempt == ATTEMPT and error.who.startswith("rank 0 on ")
    assert ", training at step 7, in " in error.summary and "in read_from_a_dead_disk" in error.summary
    stacks = (tmp_path / RANKS / f"{ATTEMPT}-rank0-stacks.txt").read_text()
    assert "in read_from_a_dead_disk" in stacks and "most recent call first" in stacks
    assert (tmp_path / "left-0").exists(), "the batch script is told"


@pytest.mark.slow
def test_of_several_ranks_the_one_that_waits_for_no_other_is_named(tmp_path):
    barrier = FORKSERVER.Barrier(3)
    ranks = [
        start_rank(tmp_path, take_steps, rank=r, count=3, limit_s=2, barrier=barrier, hangs=r == 1) for r in range(3)
    ]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [ExitCode.HUNG] * 3
    error = read_one_error(tmp_path)
    assert error.fields["rank"] == 1 and "in read_from_a_dead_disk" in error.summary
    assert len(list(tmp_path.glob(f"{RANKS}/{ATTEMPT}-rank*-stacks.txt"))) == 3


def fail_alone(progress: Progress, *, barrier: Any) -> None:
    """Take a step and fail; a rank that waits for this one, in a kernel, learns nothing of it."""
    barrier.wait()
    raise ValueError("a record is damaged")


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_failed_exit_and_name_it(tmp_path):
    barrier = FORKSERVER.Barrier(3)
    ranks = [
        start_rank(tmp_path, work, rank=r, count=3, limit_s=8, barrier=barrier)
        for r, work in enumerate([take_steps, fail_alone, take_steps])
    ]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [ExitCode.FAILED] * 3
    errors = read_errors(tmp_path)
    assert {error.fields["rank"]: error.cause for error in errors} == dict.fromkeys([0, 2], Cause.LOST_PEER)
    assert all(re.search(r"rank 1 on \S+ failed: ValueError: a record is damaged$", e.summary) for e in errors)


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_by_the_others_but_not_a_run_that_is_suspended_as_a_whole(tmp_path):
    barrier = FORKSERVER.Barrier(2)
    ranks = [start_rank(tmp_path, take_steps, rank=r, count=2, limit_s=2, barrier=barrier) for r in range(2)]
    wait_until(lambda: len(list(tmp_path.glob(f"{RANKS}/{ATTEMPT}-rank?.json"))) == 2, "the records of two ranks")
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)  # as Ctrl-Z, for longer than the limit
    time.sleep(2.5)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGCONT)
    time.sleep(1)
    assert all(rank.is_alive() for rank in ranks) and read_errors(tmp_path) == []
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(60)
    assert ranks[0].exitcode == ExitCode.HUNG
    error = read_one_error(tmp_path)
    assert error.fields["rank"] == 1 and "it is stopped or cut off; rank 0 on " in error.summary
    assert "waits for it, training at step 7" in error.summary and (tmp_path / "left-0").exists()
    assert "in wait" in (tmp_path / RANKS / f"{ATTEMPT}-rank0-stacks.txt").read_text()
    ranks[1].kill()
    ranks[1].join()


def prepare(progress: Progress, *, loading: bool, record: Path, loaded: Path) -> None:
    """Prepare until the process is killed; a rank that is loading a library lets no other thread run for 6 s."""
    progress.phase = "preparing"
    if loading:
        wait_until(lambda: '"preparing"' in record.read_text() if record.exists() else False, "a rank that prepares")
        ctypes.PyDLL(None).sleep(6)  # keeps Python's lock
        loaded.touch()
    make_wait()(threading.Barrier(2))


@pytest.mark.slow
def test_a_rank_stopped_while_it_prepares_is_noticed_like_any_other_but_not_one_that_loads_a_library(tmp_path):
    places = {"record": tmp_path / RANKS / f"{ATTEMPT}-rank1.json", "loaded": tmp_path / "loaded"}
    ranks = [start_rank(tmp_path, prepare, rank=r, count=2, limit_s=4, loading=r == 1, **places) for r in range(2)]
    wait_until(places["loaded"].exists, "the library to be loaded")
    assert ranks[0].is_alive() and read_errors(tmp_path) == []
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(36)  # 42 s if it were only silent
    code = ranks[0].exitcode
    for rank in ranks:
        rank.kill()
        rank.join()
    assert code == ExitCode.HUNG and read_one_error(tmp_path).fields["rank"] == 1


def deadlock_in_c(progress: Progress, *, ready: Path) -> None:
    """Wait where no Python signal handler runs."""
    progress.phase = "saving"
    ready.touch()
    mutex, lock = (ctypes.c_char * 64)(), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


@pytest.mark.slow
def test_a_stop_signal_during_a_hang_leaves_a_record_before_the_rank_is_killed(tmp_path):
    ready = tmp_path / "ready"
    rank = start_rank(tmp_path, deadlock_in_c, limit_s=2, ready=ready)
    wait_until(ready.exists, "the rank")
    os.kill(rank.pid, signal.SIGTERM)
    wait_until(lambda: read_errors(tmp_path), "an error")
    rank.kill()
    rank.join()
    assert read_one_error(tmp_path).cause == Cause.HUNG
    assert (tmp_path / "signal-0").read_text() == "SIGTERM"
    assert "in deadlock_in_c" in (tmp_path / RANKS / f"{ATTEMPT}-rank0-stacks.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_recovers_after_a_stop_signal_takes_its_record_back(tmp_path):
    progress = Progress(phase="saving")
    with StopFlag() as stop, Watchdog(tmp_path, ATTEMPT, World(), progress) as watchdog:
        watchdog.set_limit(2 / 60)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: read_errors(tmp_path), "an error")
        progress.count += 1
        wait_until(lambda: not read_errors(tmp_path), "the error to go")
    assert stop.reason and signal.set_wakeup_fd(-1) == -1


def test_a_phase_that_takes_long_by_nature_and_slow_steps_are_no_hang(tmp_path):
    watchdog = Watchdog(tmp_path, ATTEMPT, World(), progress := Progress())
    assert watchdog._get_patience() == 14 * 120, "preparing, by default"
    progress.phase = "waiting"
    assert watchdog._get_patience() == float("inf"), "rank 0 packs"
    progress.phase = "training"
    assert watchdog._get_patience() == 120
    watchdog._pauses.append(70.0)
    assert watchdog._get_patience() == 350, "of steps of 70 s"
    watchdog.set_limit(0)
    assert watchdog._get_patience() == float("inf"), "hang_minutes=0"


FOREVER = ("max_duration=10000ep", "eval_every=10000ep", "hang_minutes=0.1", "log_every=1st", "data.decode=cpu")


@contextlib.contextmanager
def _start_launcher(run: Path) -> Iterator[tuple[Path, "subprocess.Popen[bytes]", list[int]]]:
    """Train a run on two ranks; yield it, the launcher and the ranks' pids when they take steps."""
    command = [sys.executable, "-m", "trainyard", "resume", str(run), "--jobs", str(FAMILIES), "--cpu-ranks", "2"]
    with subprocess.Popen(command) as launcher:
        try:
            wait_until(lambda: _count_lines(run) >= 3 or launcher.poll() is not None, "three steps", limit_s=120)
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            pids = {_read_rank(int(pid)): int(pid) for pid in children}
            yield run, launcher, [pids[rank] for rank in range(2)]
        finally:
            launcher.kill()


def _count_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _read_rank(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return int(next(text for text in variables if text.startswith("RANK=")).removeprefix("RANK="))


@pytest.mark.long
def test_our_launcher_ends_a_run_whose_rank_was_stopped_and_why_names_it(tmp_path, capfd):
    with _start_launcher(new_run(tmp_path, *FOREVER)) as (run, launcher, pids):
        os.kill(pids[1], signal.SIGSTOP)
        assert launcher.wait(120) == ExitCode.HUNG
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "the stopped rank is dead too"
    said = capfd.readouterr().err
    assert "Hung: rank 1 on " in said and f"trainyard why {run}" in said
    explained = explain_run(run)
    assert "failed at step" in explained and ": hung, rank 1 on " in explained
    assert f"next: see where in the stacks; if that was only slow: trainyard resume {run} hang_minutes=10" in explained


@pytest.mark.long
def test_a_killed_rank_of_our_launcher_is_named_with_its_signal(tmp_path):
    with _start_launcher(new_run(tmp_path, *FOREVER)) as (run, launcher, pids):
        os.kill(pids[1], signal.SIGKILL)
        assert launcher.wait(120) == 128 + signal.SIGKILL
    explained = explain_run(run)
    assert "killed by signal 9, rank 1 on " in explained and "dmesg" in explained
    assert "Connection" not in explained, "what gloo says is no cause"
