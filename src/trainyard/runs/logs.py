"""A run's log, line by line, with what srun and ranks other than 0 have to say."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainyard.runs.folder import SUBMISSION
from trainyard.runs.history import is_complaint, output_files, read_errors, read_object, read_run
from trainyard.runs.state import ACTIVE, State
from trainyard.runs.status import headline, statuses

_LOOK_S, _ASK_S = 0.5, 5.0  # how often the files are read, and how often Slurm is asked

Out = Callable[[str], object]


def show(run: Path, out: Out) -> None:
    """Hand what there is of a run's log to `out`, which takes a line without its end."""
    if not _Output(run).say(out):
        (status,), _ = statuses([run])
        out(f"{run}: no output yet. {headline(status)}")


def follow(run: Path, out: Out) -> None:
    """Do the same, and go on until the run ends, over as many attempts as it takes."""
    output = _Output(run)
    said = output.say(out)
    state, ended, asked = "", 0, -_ASK_S
    while ended < 2:  # between a preemption and the requeue Slurm calls a job ended: believe it the second time
        if time.monotonic() - asked >= _ASK_S:
            (status,), _ = statuses([run])
            asked = time.monotonic()
            ended = 0 if status.state in ACTIVE else 2 if status.state == State.DONE else ended + 1
            if state not in ("", status.state) or (not said and status.state != state):
                out(f"-- {headline(status)}")
            state = status.state
        said |= output.say(out)
        if ended < 2:
            time.sleep(_LOOK_S)


class _Output:
    """What a run and its ranks say, from several files, each line once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[Path, _Tail] = {}
        folder = read_run(run)
        newest = folder.newest.id if folder.newest else ""
        self._told = {error.path for error in folder.errors if error.attempt != newest}

    def say(self, out: Out) -> bool:
        """Hand over what is new; tell whether anything was."""
        lines = list(self._new())
        for line in lines:
            out(line)
        return bool(lines)

    def _new(self) -> Iterator[str]:
        log = self._run / "log"
        has_log = log.is_file()
        yield from self._tail(log)
        standard_out, standard_error = output_files(self._run, read_object(self._run / SUBMISSION))
        if not has_log:
            yield from self._tail(standard_out)
        # Rank 0 says there what it also writes to its log; srun says there what nobody else does.
        yield from (line for line in self._tail(standard_error) if not has_log or is_complaint(line))
        for error in read_errors(self._run):
            if error.path not in self._told:
                self._told.add(error.path)
                yield f"{error.who}: {error.what} (whole traceback: {error.path})"

    def _tail(self, path: Path) -> Iterator[str]:
        return self._tails.setdefault(path, _Tail(path)).lines()


class _Tail:
    """The lines that a file has got since one looked last. A line is handed out when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def lines(self) -> Iterator[str]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            if self._position > os.fstat(file.fileno()).st_size:  # written anew
                self._position = 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode(errors="replace").rstrip()
