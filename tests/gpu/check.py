"""How a check of a card runs: in a process of its own, which may crash, hang or fill the card's memory."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.training import FORKSERVER
from trainyard.errors import UserError, is_out_of_memory

Figures = dict[str, Any]
"""What a check found: numbers and words by name, flat, so that one line of JSON holds them."""

SMALL = ("_smoke", "_demo")
"""How presets end that train on generated data on every machine."""

IMPOSSIBLE = "cannot be answered here"
"""How the reason begins of a check that was skipped because no time, memory or library would let it run here."""


def cannot_answer(why: str) -> NoReturn:
    """Skip a check that this machine cannot answer."""
    pytest.skip(f"{IMPOSSIBLE}: {why}")


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
        return 3 if self.small else 10

    @property
    def seconds(self) -> float:
        """Shortest time of one round of a timing."""
        return 0.05 if self.small else 0.5

    @property
    def matrix(self) -> int:
        """Rows and columns of the matrices whose product is timed."""
        return 256 if self.small else 8192

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy that is timed."""
        return (4 if self.small else 256) << 20


class Running:
    """A check in a process that has not started CUDA."""

    def __init__(self, work: Callable[[], Figures], log: Path) -> None:
        """Start it.

        Args:
            log: file for all that it prints, and for the traceback of an error.
        """
        self._log, self._answer, self._began = log, log.with_suffix(".answer"), time.monotonic()
        self._process = FORKSERVER.Process(target=_answer, args=(work, self._answer, log))
        self._process.start()

    def wait(self, limit_s: float) -> Figures:
        """Return its figures; fail or skip the test as the work does, and fail it if the process dies.

        Args:
            limit_s: from now; then the process is killed, with every process that it started.

        Raises:
            TimeoutError: it did not end in time.
        """
        try:
            self._process.join(limit_s)
            ended = not self._process.is_alive()
        finally:
            self.kill()
        printed = self._log.read_text() if self._log.exists() else ""
        if self._answer.exists():
            found = json.loads(self._answer.read_text())
            self._answer.unlink()
            if "reason" in found:
                pytest.skip(found["reason"])
            if "error" in found:
                pytest.fail(f"{found['error']}\n{printed}", pytrace=False)
            figures: Figures = found["figures"]
            return figures
        if not ended:
            took_s = time.monotonic() - self._began
            raise TimeoutError(f"It did not end within {took_s:.0f} s and was killed.\n{printed}")
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        pytest.fail(f"Its process ended by {how} without an answer.\n{printed}", pytrace=False)

    def kill(self) -> None:
        """Kill it with every process that it started, if it still runs."""
        _kill_group(self._process.pid)
        self._process.kill()
        self._process.join()


def run_in_process(work: Callable[[], Figures], *, limit_s: float, log: Path) -> Figures:
    """Run `work` in a process of its own; return its figures, or end as `Running.wait` does."""
    return Running(work, log).wait(limit_s)


def run_in_time(start: Callable[[], Running], *, left_s: float, longest_s: float, over: str) -> Figures:
    """Return the figures of a check; skip the test if the time of all checks is over.

    Args:
        left_s: of the time of all checks.
        longest_s: for this one; it fails if it takes longer.
        over: the reason to skip.
    """
    if left_s <= 0:
        pytest.skip(over)
    try:
        return start().wait(min(left_s, longest_s))
    except TimeoutError as error:
        if left_s < longest_s:
            pytest.skip(over)
        pytest.fail(str(error), pytrace=False)


def _answer(work: Callable[[], Figures], answer: Path, log: Path) -> None:
    """Do the work of a new process, and write its answer to a file."""
    os.setsid()  # a group of its own, to be killed as a whole
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    found = try_work(work)
    sys.stdout.flush()
    answer.with_suffix(".partial").write_text(json.dumps(found))
    answer.with_suffix(".partial").rename(answer)
    os._exit(0)


def try_work(work: Callable[[], Figures]) -> dict[str, Any]:
    """Return how `work` ends: its "figures", the "reason" why it was skipped, or its "error"."""
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
            return {"reason": "memory was short: its micro-batch does not fit into this card"}
        return {"error": f"{type(error).__name__}: {error}"}


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing is left
