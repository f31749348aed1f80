"""The watchdog of a rank: notices that it, or the next rank, makes no progress, and ends the attempt. Loads no torch.

Two threads per rank, so that one keeps counting while a file system does not answer the other:

- One counts the seconds since the main thread did something. Slow phases may take longer than a step.
- One writes every few seconds, to `ranks/<attempt>-rank<N>.json`, that this process runs and its main thread's work,
  and reads the same of the next rank. A process that is stopped, or in which no thread can run, stops writing.

A rank that fails tells the others in a file, because NCCL does not: those that still wait for it a little later exit.

When ranks wait for each other, all of them make no progress. The one at fault is one that writes nothing, or else one
that does not wait for others. Nothing is exchanged in a step.

Only time in which this process ran counts, so suspending a whole run (Ctrl-Z, a closed laptop) is harmless.
"""

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainyard.config.settings import HANG_MINUTES
from trainyard.errors import Hung, PeerFailed
from trainyard.files import make_folder_inside, open_atomically, write_atomically
from trainyard.runs.folder import record_error
from trainyard.runs.history import RANKS, read_object
from trainyard.runs.state import ExitCode
from trainyard.terminal import say
from trainyard.text import cut, format_duration, quote_path
from trainyard.train.heartbeat import Progress
from trainyard.train.stop import STOP_SIGNALS
from trainyard.train.world import World

_SLOW = 14.0  # 28 min by default: the watchdog speaks before the collectives' time is up (distributed._STEP_TIMEOUT)
_STALLED = 0.5  # of the limit: a stopped process counts only if this rank has done nothing for so long
_STOPPED = 0.75  # of the limit: another rank's process wrote nothing for so long
_FACTOR = 5.0  # between the longest of the last pauses and one that is a hang
_PAUSES = 64
_MOST_TICK_S, _MOST_INTERVAL_S = 1.0, 10.0
_NOTE_S = 20.0  # after a stop signal, of the 30 s that Slurm often leaves
_FAREWELL_S = 5.0  # after another rank has failed: gloo tells this one so, and it says more than the watchdog can
_REPORT_S = 10.0  # for writing down what happened; the disk may be what hangs
_WAITS = (
    *("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/train/distributed.py"),
    "/torch/autograd/",  # gradients are summed in backward
    "/torch/cuda/",  # a GPU also waits for other ranks
)
"""Files of which one is on the stack of a main thread that waits for other ranks."""

_wakeup = -1


class _Hang(NamedTuple):
    """Which rank hangs."""

    rank: int
    host: str
    message: str


class Watchdog:
    """Watches the main thread of this rank and the process of the next, inside its `with` block.

    If one of them hangs, the process dumps its stacks, records who hangs and exits with `ExitCode.HUNG`. Enter it in
    the main thread, inside the block of the `StopFlag`.
    """

    def __init__(
        self,
        run: Path,
        attempt: str,
        world: World,
        progress: Progress,
        *,
        before_exit: Callable[[], object] = lambda: None,
        on_signal: Callable[[signal.Signals], object] = lambda number: None,
    ) -> None:
        """Create the watchdog.

        Args:
            before_exit: called in a thread before the process exits, after what happened has been recorded.
            on_signal: called in a thread at each signal that stops a run: the main thread may not be able to.
        """
        self._run, self._attempt, self._world, self._progress = run, attempt, world, progress
        self._before_exit, self._on_signal = before_exit, on_signal
        self._leaving, self._has_news = threading.Event(), threading.Event()
        self.set_limit(HANG_MINUTES)
        self._idle_s = 0.0
        self._pauses: deque[float] = deque(maxlen=_PAUSES)
        self._next: dict[str, Any] = {}  # the next rank's last note, and the seconds since
        self._next_silent_s = self._next_halted_s = 0.0  # halted: by a signal, as seen on this host
        self._was_signalled = self._has_noted = self._is_over = False
        self._failed, self._failed_s = "", 0.0  # what another rank said when it failed, and how long ago
        self._main_thread = threading.get_ident()
        self._process = [os.getpid(), _read_process(os.getpid())[1]]

    def set_limit(self, minutes: float) -> None:
        """Set after how long a rank hangs; 0: never."""
        self._limit_s = 60 * minutes or math.inf
        self._tick_s = min(_MOST_TICK_S, self._limit_s / 20)
        self._interval_s = min(_MOST_INTERVAL_S, self._limit_s / 8)
        self._has_news.set()

    def __enter__(self) -> Self:
        global _wakeup
        self._reader, _wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
        works = [self._count] + [self._exchange] * (self._world.world_size > 1)
        self._threads = [threading.Thread(target=work, name="watchdog", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _wakeup
        signal.set_wakeup_fd(self._previous_wakeup)
        self._leaving.set()
        self._has_news.set()
        os.write(_wakeup, b"\0")
        for thread in self._threads:
            thread.join(_REPORT_S)
        os.close(self._reader)
        os.close(_wakeup)
        _wakeup = -1
        with contextlib.suppress(OSError):  # a disk that does not answer must not hide how the run ended
            self._name_record(self._world.rank).unlink(missing_ok=True)

    def tell_others(self, error: BaseException) -> None:
        """Have the other ranks learn that this one has failed; the first of several is the one that they name."""
        own = f"rank {self._world.rank} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # a full disk is more than a second error about this file
            _create_file(self._name_failure(), f"{own} failed: {type(error).__name__}: {cut(str(error), 300)}\n")

    # The thread that counts

    def _count(self) -> None:
        seen, before = -1, time.monotonic()
        while not self._leaving.is_set():
            select.select([self._reader], [], [], self._tick_s)
            now = time.monotonic()
            passed, before = min(now - before, 2 * self._tick_s), now  # more: this process was suspended
            self._read_signals()
            if self._progress.count == seen:
                self._idle_s += passed
            else:
                seen = self._progress.count
                self._pauses.append(self._idle_s)
                self._idle_s = 0.0
                if self._has_noted:
                    self._withdraw_note()
            self._failed_s += passed if self._failed else 0.0
            if self._failed_s >= _FAREWELL_S:
                self._follow()
            if self._is_over or self._is_next_stopped() or self._idle_s >= self._get_patience():
                self._finish()
            elif self._was_signalled and not self._has_noted and self._idle_s >= min(_NOTE_S, self._limit_s / 2):
                self._has_noted = True
                _run_aside(self._write_note)

    def _read_signals(self) -> None:
        """Pass on signals from the interpreter's own handler, which runs whatever the main thread does."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._reader, 64):
                if number in STOP_SIGNALS:
                    self._was_signalled = True
                    _run_aside(self._on_signal, signal.Signals(number))

    def _get_patience(self) -> float:
        """Return how long the main thread may be without progress, in seconds."""
        if self._progress.phase == "training":
            return max(self._limit_s, _FACTOR * max(self._pauses, default=0.0))
        return math.inf if self._progress.phase == "waiting" else _SLOW * self._limit_s

    def _is_next_stopped(self) -> bool:
        if self._idle_s < _STALLED * self._limit_s or self._next_silent_s < _STOPPED * self._limit_s:
            return False
        is_slow = self._next.get("phase") == "preparing"  # loading a library may block all threads
        return not is_slow or max(self._next_halted_s, self._next_silent_s / _SLOW) >= _STOPPED * self._limit_s

    def _follow(self) -> None:
        """Record that another rank has failed, and exit: this one waits for it in a collective."""
        error = PeerFailed(self._failed)
        _run_aside(partial(record_error, self._run, error, attempt=self._attempt, rank=self._world.rank)).join(
            _REPORT_S
        )
        os._exit(ExitCode.FAILED)

    def _finish(self) -> None:
        """Record what happened and exit, even if the disk does not answer."""
        report = _run_aside(self._report)
        report.join(_REPORT_S + 2 * self._interval_s)
        os._exit(ExitCode.HUNG)

    def _report(self) -> None:
        hang = None if self._is_over else self._find_hang()
        self._dump_stacks()
        if hang is not None and _create_file(
            self._name_verdict(), f"rank {hang.rank} on {hang.host}: {hang.message}\n"
        ):
            self._record(hang)
            more = f"More, and the next command: trainyard why {quote_path(self._run)}"
            say(f"Hung: rank {hang.rank} on {hang.host}: {hang.message}. {more}", file=sys.stderr, flush=True)
        self._before_exit()
        if self._world.world_size > 1:
            time.sleep(1.25 * self._interval_s)  # until the others have noticed this file and dumped their stacks

    def _write_note(self) -> None:
        """Record this rank's knowledge while it may still recover: the sender of the signal may kill it soon."""
        hang = self._find_hang()
        self._dump_stacks()
        self._record(hang)

    def _withdraw_note(self) -> None:
        self._has_noted = False
        _run_aside((self._run / "errors" / f"{self._attempt}-rank{self._world.rank}.json").unlink)

    def _record(self, hang: _Hang) -> None:
        record_error(
            self._run, Hung(hang.message), attempt=self._attempt, rank=hang.rank, host=hang.host, by=self._world.rank
        )

    def _dump_stacks(self) -> None:
        """Write the Python stacks of all threads."""
        path = self._run / RANKS / f"{self._attempt}-rank{self._world.rank}-stacks.txt"
        with open_atomically(path, durable=False, inside=True) as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _find_hang(self) -> _Hang:
        """Return who hangs: a rank that writes nothing any more, else one that does not wait for others."""
        own = self._describe()
        if self._world.world_size > 1:
            self._write_record(own)
        records = [own, *self._read_others()]
        noticer = f"rank {own['rank']} on {own['host']}"
        stopped = max(records, key=lambda record: float(record["silent_s"]))
        if _is_halted(stopped) or stopped["silent_s"] > max(0.8 * self._idle_s, 1.5 * self._interval_s):
            done = f"its process has done nothing for {format_duration(stopped['silent_s'])}: it is stopped or cut off"
            waiting = f"{noticer} waits for it, {own['phase']} at step {own['step']}"
            return _Hang(stopped["rank"], stopped["host"], f"{done}; {waiting}")
        stuck = max(records, key=lambda record: (not record["waits"], float(record["idle_s"])))
        done = f"no progress for {format_duration(stuck['idle_s'])}, {stuck['phase']} at step {stuck['step']}"
        everybody = "; all ranks wait for each other" if stuck["waits"] else ""
        return _Hang(stuck["rank"], stuck["host"], f"{done}, in {stuck['where']}{everybody}; noticed by {noticer}")

    def _describe(self) -> dict[str, Any]:
        """Return what other ranks are told about this one."""
        frame = innermost = sys._current_frames()[self._main_thread]
        files = {innermost.f_code.co_filename}
        while frame.f_back is not None:
            frame = frame.f_back
            files.add(frame.f_code.co_filename)
        return {
            "time": time.time(),
            "rank": self._world.rank,
            "host": socket.gethostname(),
            "process": self._process,
            "phase": self._progress.phase,
            "step": self._progress.step,
            "idle_s": round(self._idle_s, 1),
            "waits": self._world.world_size > 1 and any(part in file for file in files for part in _WAITS),
            "where": f"{innermost.f_code.co_filename}:{innermost.f_lineno} in {innermost.f_code.co_name}",
            "silent_s": 0.0,
        }

    def _read_others(self) -> list[dict[str, Any]]:
        """Return the records of the other ranks, each with how much older than this rank's it is."""
        records = []
        for rank in set(range(self._world.world_size)) - {self._world.rank}:
            path = self._name_record(rank)
            with contextlib.suppress(FileNotFoundError):  # a rank that has ended has none
                newest = self._name_record(self._world.rank).stat().st_mtime  # on the clock of the same file system
                records.append({**read_object(path), "silent_s": newest - path.stat().st_mtime})
        return records

    # The thread that talks to other ranks

    def _exchange(self) -> None:
        make_folder_inside(self._run / RANKS)
        if self._world.is_main:
            _remove_records(self._run / RANKS, except_of=self._attempt)
        neighbour = self._name_record((self._world.rank + 1) % self._world.world_size)
        before = time.monotonic()
        while not self._leaving.is_set():
            now = time.monotonic()
            passed, before = min(now - before, 2 * self._interval_s), now
            with contextlib.suppress(OSError):  # a full disk is for the main thread to report, in its own words
                self._write_record(self._describe())
            record = read_object(neighbour)
            if record == self._next:
                self._next_silent_s += passed if record else 0.0
                self._next_halted_s = self._next_halted_s + passed if _is_halted(record) else 0.0
            else:
                self._next, self._next_silent_s, self._next_halted_s = record, 0.0, 0.0
            self._is_over = self._name_verdict().exists()
            with contextlib.suppress(OSError):
                self._failed = self._name_failure().read_text().strip()
            self._has_news.wait(self._interval_s)
            self._has_news.clear()

    def _write_record(self, record: dict[str, Any]) -> None:
        write_atomically(self._name_record(self._world.rank), json.dumps(record), durable=False, inside=True)

    def _name_verdict(self) -> Path:
        return self._run / RANKS / f"{self._attempt}-hung.txt"

    def _name_failure(self) -> Path:
        """Return the file for the rank that fails first, of this start: out of memory, all start again."""
        return self._run / RANKS / f"{self._attempt}-failed{self._world.rendezvous}.txt"

    def _name_record(self, rank: int) -> Path:
        return self._run / RANKS / f"{self._attempt}-rank{rank}.json"


def _remove_records(folder: Path, *, except_of: str) -> None:
    """Remove files of the killed ranks of earlier attempts."""
    for path in folder.glob("*-rank*.json"):
        if path.name.rpartition("-rank")[0] != except_of:
            path.unlink(missing_ok=True)


def _is_halted(record: dict[str, Any]) -> bool:
    """Return whether a rank's process is on this host, and is stopped by a signal."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it has ended
        pid, started = record["process"]
        return record["host"] == socket.gethostname() and _read_process(int(pid)) == ("T", started)
    return False


def _read_process(pid: int) -> tuple[str, int]:
    """Return a process's state and when it started, in ticks since the boot: a pid is used again."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return values[0], int(values[19])


def _create_file(path: Path, text: str) -> bool:
    """Create the file, or return False if it exists."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _run_aside(work: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start work that may never end, because it touches the disk."""
    thread = threading.Thread(target=work, args=arguments, name="watchdog", daemon=True)
    thread.start()
    return thread


def _forget_wakeup() -> None:
    """Keep the signals of a forked child out of its parent's pipe."""
    if _wakeup >= 0:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)
