"""Measures loaders and readers side by side, and writes the results.

A suite is a set of configurations that do the same work. Each is measured by `worker.py` in its own process; this file
chooses the order, collects the rounds, and computes ratios within a round, where both sides saw the same machine load.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contract import OURS, SUITES, Configuration, Setting
from benchmarks.results import format_results
from benchmarks.worker import list_configurations
from trainyard.errors import UserError
from trainyard.measure import Summary, find_free_path, write_results
from trainyard.node.ranks import end_with_parent

CHECKOUT = Path(__file__).resolve().parents[1]
WORKER = ("-m", "benchmarks.worker")
WORKER_TIMEOUT_S = 600

Round = dict[str, dict[str, Any]]
"""The output of one round's workers, by configuration: the fields of `measure`, or `error`."""


class WorkerError(UserError):
    """A worker ended without a result; the text ends with what it wrote to stderr."""


def run_suite(suite: str, setting: Setting, *, head: Mapping[str, Any], worker: Sequence[str] = WORKER) -> Path:
    """Run every configuration of a suite `setting.rounds` times, in a new shuffled order each round.

    Args:
        head: header line of the results, `measure.make_header`.
        worker: arguments of Python that start a worker.

    Returns:
        the result file `<results>/<suite>-<date>.jsonl`: a header line, then one line per configuration. It is
        rewritten after each round, so that stopping early keeps the finished rounds.

    Raises:
        UserError: unknown suite, data that cannot be prepared, or a configuration that failed (the results of the
            others are still in the file).
    """
    configurations = select_configurations(suite, setting)
    start = partial(run_worker, setting=setting, worker=worker)
    start("prepare", [c.full_name for c in configurations], timeout_s=3600, show=True)
    path = find_free_path(setting.results, f"{suite}-{head['date'][:10]}")
    rounds: list[Round] = []
    for number in range(setting.rounds):
        rounds.append({})
        for configuration in shuffle_configurations(configurations, number):
            begin, names = time.perf_counter(), [configuration.full_name]
            try:
                lines = start("measure", names, timeout_s=WORKER_TIMEOUT_S)
            except WorkerError as error:
                lines = [{"name": configuration.name, "error": str(error)}]
            for line in lines:
                rounds[-1][line["name"]] = line
                rate = f"{line['samples_per_s']:12,.1f}/s" if "error" not in line else "      failed"
                took = time.perf_counter() - begin
                print(f"round {number + 1}/{setting.rounds}  {line['name']:32} {rate}  {took:5.0f} s", flush=True)
        results = build_result_lines(configurations, rounds)
        write_results(path, [head, *results])
    print(format_results([head, *results]), flush=True)
    failed = [line for line in results if line["errors"]]
    if failed:
        names = [line["name"] for line in failed]
        last = failed[-1]["errors"][-1]
        raise UserError(f"{path}: {', '.join(names)} failed; the other results are valid. The last error:\n{last}")
    return path


def select_configurations(suite: str, setting: Setting) -> list[Configuration]:
    """Return ours and the configurations of a suite that were asked for."""
    if suite not in SUITES:
        raise UserError(f"'{suite}' is not a benchmark suite. Choose from: {', '.join(SUITES)}.")
    found = [c for c in list_configurations() if c.suite == suite]
    for pattern in setting.only:
        if not any(fnmatch(c.name, pattern) for c in found):
            names = ", ".join(c.name for c in found)
            raise UserError(f"--only {pattern}: no such configuration in suite {suite}. It has: {names}.")
    return [c for c in found if c.name == OURS or any(fnmatch(c.name, pattern) for pattern in setting.only or ("*",))]


def shuffle_configurations(configurations: Sequence[Configuration], round_number: int) -> list[Configuration]:
    """Return the configurations in a random order that depends only on the round."""
    return random.Random(round_number).sample(configurations, len(configurations))


def run_worker(
    command: str,
    names: Sequence[str],
    *,
    setting: Setting,
    worker: Sequence[str],
    timeout_s: float,
    show: bool = False,
) -> list[dict[str, Any]]:
    """Run a worker in its own process group and return the JSON lines it printed.

    Loaders leave processes behind; all that are still alive in the group afterwards are killed, so that they cannot
    slow down the next measurement.

    Args:
        show: print its stderr to the terminal as it comes (progress), instead of only in an error message.

    Raises:
        WorkerError: it failed, or took longer than `timeout_s`.
    """
    arguments = [sys.executable, *worker, command, json.dumps(asdict(setting), default=str), *names]
    # Files, not pipes: a leftover process would keep a pipe open, and we would wait for it to end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments,
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONSAFEPATH": ""},  # our images set it, which hides this folder
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


def build_result_lines(configurations: Sequence[Configuration], rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Build one line per configuration, ours first, the others from fast to slow.

    Ratios are computed within a round, and then summarised over the rounds.
    """
    notes = {c.name: c.note for c in configurations}
    names = dict.fromkeys(name for results in rounds for name in results)
    lines = [_build_result_line(name, notes.get(name, ""), rounds) for name in names]
    return sorted(lines, key=lambda line: (line["name"] != OURS, -line.get("samples_per_s", {"median": 0})["median"]))


def _build_result_line(name: str, note: str, rounds: Sequence[Round]) -> dict[str, Any]:
    measured = [results[name] for results in rounds if "samples_per_s" in results.get(name, {})]
    errors = [results[name]["error"] for results in rounds if "error" in results.get(name, {})]
    line: dict[str, Any] = {"kind": "result", "name": name, "note": note}
    if errors:
        line["failed"] = len(errors)
    for key in ("samples_per_s", "samples_per_core_s"):
        pairs = [(r[OURS][key], r[name][key]) for r in rounds if all(key in r.get(side, {}) for side in (OURS, name))]
        if measured:
            line[key] = asdict(Summary.from_values([result[key] for result in measured]))
        if pairs and name != OURS:
            line[f"ours_over_this_{key}"] = asdict(Summary.from_values([ours / this for ours, this in pairs]))
    line |= {key: measured[-1][key] for key in ("output", "versions") if measured and key in measured[-1]}
    return line | {"errors": errors, "rounds": measured}
