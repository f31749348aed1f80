"""Prints a run's log, with messages from srun and errors from all ranks."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainyard.runs.folder import SUBMISSION
from trainyard.runs.history import (
    find_current_folder,
    is_slurm_message,
    list_folders,
    locate_output_files,
    read_errors,
    read_object,
    read_run,
)
from trainyard.runs.state import ACTIVE, State
from trainyard.runs.status import Status, format_headline, read_status, read_statuses

_READ_INTERVAL_S, _LOOK_INTERVAL_S, _QUERY_INTERVAL_S = 0.5, 5.0, 60.0  # of the output; the state in the run; Slurm
_FRESH_S = 30.0
"""A run with a heartbeat this young runs, whatever Slurm would say."""

Out = Callable[[str], object]


def show(run: Path, out: Out) -> None:
    """Pass the current log of a run to `out`, which takes one line without its line end."""
    if not _Output(run).write_new_lines(out):
        (status,), _ = read_statuses([run])
        out(f"{run}: no output yet. {format_headline(status)}")


def follow(run: Path, out: Out) -> None:
    """Like `show`, but continue until the run ends, through all its attempts."""
    output = _Output(run)
    has_output = output.write_new_lines(out)
    state, ended, look_at, query_at = "", 0, 0.0, 0.0
    while ended < 2:  # Slurm reports a job as ended between preemption and requeue: believe only the second report
        now = time.monotonic()
        if now >= look_at:
            look_at, status = now + _LOOK_INTERVAL_S, _read_clear_status(run)
            if status is not None:
                query_at = now
            elif now >= query_at:
                (status,), _ = read_statuses([run])
                query_at = now + (_QUERY_INTERVAL_S if status.state == State.WAITING else _LOOK_INTERVAL_S)
            if status is not None:
                ended = 0 if status.state in ACTIVE else 2 if status.state == State.DONE else ended + 1
                if state not in ("", status.state) or (not has_output and status.state != state):
                    out(f"-- {format_headline(status)}")
                state = status.state
        has_output |= output.write_new_lines(out)
        if ended < 2:
            time.sleep(_READ_INTERVAL_S)


def _read_clear_status(run: Path) -> Status | None:
    """Return the status of a run that is done, or has a fresh heartbeat; None of others: only Slurm knows theirs."""
    snapshot, now = read_run(run), time.time()
    age_s = now - float(snapshot.heartbeat.get("time", 0.0))
    if not snapshot.is_done and age_s > _FRESH_S:
        return None
    status = read_status(snapshot, None, now=now, slurm_unavailable_reason="its heartbeat is fresh")
    return status if status.state in (State.DONE, State.RUNNING) else None


class _Output:
    """The output of a run and its ranks, from several files; each line is returned once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[Path, _Tail] = {}
        snapshot = read_run(run)
        newest_id = snapshot.newest_attempt.id if snapshot.newest_attempt else ""
        self._reported = {error.path for error in snapshot.errors if error.attempt != newest_id}

    def write_new_lines(self, out: Out) -> bool:
        """Pass all new lines to `out`; return whether there were any."""
        lines = list(self._read_new())
        for line in lines:
            out(line)
        return bool(lines)

    def _read_new(self) -> Iterator[str]:
        submission = read_object(self._run / SUBMISSION)
        has_log = (find_current_folder(self._run, submission) / "log").is_file()
        folders = list_folders(self._run, submission)
        for folder in folders:  # what packed the data of this run comes first
            yield from self._read_tail(folder / "log")
        standard_out, standard_error = locate_output_files(self._run, submission)
        if not has_log:
            yield from self._read_tail(standard_out)
        # Rank 0 repeats its log on standard error; only the messages of srun are new there.
        yield from (line for line in self._read_tail(standard_error) if not has_log or is_slurm_message(line))
        for error in (error for folder in folders for error in read_errors(folder)):
            if error.path not in self._reported:
                self._reported.add(error.path)
                yield f"{error.who}: {error.summary} (whole traceback: {error.path})"

    def _read_tail(self, path: Path) -> Iterator[str]:
        return self._tails.setdefault(path, _Tail(path)).read_new_lines()


class _Tail:
    """Reads the lines appended to a file since the last read. Leaves an incomplete line for the next read."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def read_new_lines(self) -> Iterator[str]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            if self._position > os.fstat(file.fileno()).st_size:  # rewritten
                self._position = 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode(errors="replace").rstrip()
