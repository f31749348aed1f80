"""How a check of a card runs: in a process of its own, which may crash, hang or fill the card's memory."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.training import FORKSERVER
from trainyard.errors import UserError, is_out_of_memory

Figures = dict[str, Any]
"""What a check found: numbers and words by name, flat, so that one line of JSON holds them."""

SMALL = ("_smoke", "_demo")
"""How presets end that train on generated data on every machine."""


@dataclass(frozen=True)
class Sizes:
    """How much work a check does, and where."""

    jobs: Path  # folder of families
    data: Path  # synthetic data, shared by the checks
    scratch: Path  # runs
    environ: Mapping[str, str] = field(default_factory=dict)
    small: bool = False  # as on a CPU, with smoke and demo presets

    @property
    def steps(self) -> int:
        """Optimizer steps of a first contact."""
        return 3 if self.small else 20

    @property
    def seconds(self) -> float:
        """Shortest time of one round of a timing."""
        return 0.05 if self.small else 1.0

    @property
    def matrix(self) -> int:
        """Rows and columns of the matrices whose product is timed."""
        return 256 if self.small else 8192

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy that is timed."""
        return (4 if self.small else 256) << 20


def run_in_time(work: Callable[[], Figures], *, left_s: float, longest_s: float, over: str, log: Path) -> Figures:
    """Run `work` in a process of its own; skip the test if the time of all checks is over.

    Args:
        left_s: of the time of all checks.
        longest_s: for this one; it fails if it takes longer.
        over: the reason to skip.
    """
    if left_s <= 0:
        pytest.skip(over)
    try:
        return run_in_process(work, limit_s=min(left_s, longest_s), log=log)
    except TimeoutError as error:
        if left_s < longest_s:
            pytest.skip(over)
        pytest.fail(str(error), pytrace=False)


def run_in_process(work: Callable[[], Figures], *, limit_s: float, log: Path) -> Figures:
    """Run `work` in a process that has not started CUDA; return its figures.

    It fails or skips the test as `work` does, and fails it if the process dies.

    Args:
        limit_s: then the process is killed, with every process that it started.
        log: file for all that it prints, and for the traceback of an error.

    Raises:
        TimeoutError: it did not end in time.
    """
    answer = log.with_suffix(".answer")
    process = FORKSERVER.Process(target=_answer, args=(work, answer, log))
    process.start()
    try:
        process.join(limit_s)
        ended = not process.is_alive()
    finally:
        _kill_group(process.pid)
        process.kill()
        process.join()
    printed = log.read_text() if log.exists() else ""
    if answer.exists():
        found = json.loads(answer.read_text())
        answer.unlink()
        if "reason" in found:
            pytest.skip(found["reason"])
        if "error" in found:
            pytest.fail(f"{found['error']}\n{printed}", pytrace=False)
        figures: Figures = found["figures"]
        return figures
    if not ended:
        raise TimeoutError(f"It did not end within {limit_s:.0f} s and was killed.\n{printed}")
    how = f"signal {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else f"code {process.exitcode}"
    pytest.fail(f"Its process ended by {how} without an answer.\n{printed}", pytrace=False)


def _answer(work: Callable[[], Figures], answer: Path, log: Path) -> None:
    """Do the work of a new process, and write its answer to a file."""
    os.setsid()  # a group of its own, to be killed as a whole
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    found = _try(work)
    sys.stdout.flush()
    answer.with_suffix(".partial").write_text(json.dumps(found))
    answer.with_suffix(".partial").rename(answer)
    os._exit(0)


def _try(work: Callable[[], Figures]) -> dict[str, Any]:
    try:
        return {"figures": work()}
    except pytest.skip.Exception as reason:
        return {"reason": str(reason)}
    except (AssertionError, UserError) as error:
        traceback.print_exc()
        return {"error": str(error) or type(error).__name__}
    except Exception as error:
        traceback.print_exc()
        if is_out_of_memory(error):
            return {"reason": "its micro-batch does not fit into this card; a smaller one may"}
        return {"error": f"{type(error).__name__}: {error}"}


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing is left
