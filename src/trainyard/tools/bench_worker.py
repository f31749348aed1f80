"""Runs one measurement of a benchmark in a process of its own."""

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.launch.ranks import end_with_parent


class WorkerError(UserError):
    """A worker ended without a result; the text ends with what it wrote to stderr."""


def require_scripts(scripts: Path) -> None:
    """Refuse a folder without the scripts of the benchmarks.

    Raises:
        UserError: there are none.
    """
    if not (scripts / "worker.py").is_file():
        raise UserError(
            f"{scripts}: no worker.py in it. The benchmarks are in a checkout of Trainyard: go there first, "
            "cd CHECKOUT, then type the command again."
        )


def run_worker(arguments: Sequence[str], *, timeout_s: float, show: bool = False) -> list[dict[str, Any]]:
    """Run a worker in its own process group and return the JSON lines it printed.

    Loaders leave processes behind; all that are still alive in the group afterwards are killed, so that they cannot
    slow down the next measurement.

    Args:
        show: print its stderr to the terminal as it comes (progress), instead of only in an error message.

    Raises:
        WorkerError: it failed, or took longer than `timeout_s`.
    """
    # Files, not pipes: a leftover process would keep a pipe open, and we would wait for it to end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments,
            stdout=output,
            stderr=None if show else errors,
            text=True,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),  # this process has no other threads
        )
        try:
            ended = f"exit code {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            ended = f"no result after {timeout_s:.0f} s"
        finally:
            _kill_group(process)
        output.seek(0)
        errors.seek(0)
        if ended != "exit code 0":
            raise WorkerError(f"{shlex.join(arguments)}: {ended}.\n{errors.read()[-2000:]}")
        return [json.loads(line) for line in output]


def _kill_group(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: no process is left
    finally:
        process.wait()
