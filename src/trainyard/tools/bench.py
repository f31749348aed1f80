"""Measure loaders, readers and training steps side by side, and write down what came out.

A suite is a set of configurations that do the same work. `benchmarks/worker.py` lists, prepares and measures them,
each in a process of its own; this file decides the order, collects the rounds, forms ratios and writes the results.
It needs nothing but the standard library, so that a worker can use `measure` in an environment of its own.
"""

import argparse
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.environment import environment_record
from trainyard.errors import UserError
from trainyard.hardware import available_cores
from trainyard.measure import QUOTABLE_ROUNDS, QUOTABLE_SPREAD, Summary, new_file, write_results
from trainyard.text import align_columns

SUITES = ("rgb", "gray", "raw", "read", "step")
OURS = "ours"
WORKER_TIMEOUT_S = 600
STEP_TARGET = (0.01, 0.3)
"""A training step of the engine may cost this share, or this many ms, more than a plain loop: the larger one."""


@dataclass(frozen=True)
class Options:
    """How a suite is run. A configuration is timed until it has seen both `samples` and `seconds`."""

    scripts: Path = Path("benchmarks")  # folder of worker.py
    results: Path = Path("benchmarks")
    data: Path = Path("data/bench")
    peers: Path | None = None  # folder of the peers' environment; None: leave them out
    only: tuple[str, ...] = ()  # patterns of configurations, beside ours; empty: all
    rounds: int = 5
    rgb: int = 4000  # images generated
    gray: int = 6000
    warmup: int = 512  # samples
    samples: int = 2048
    seconds: float = 2.0
    threads: int = field(default_factory=available_cores)  # or worker processes, of every configuration

    def quick(self) -> "Options":
        """Return the same with little data and one round: shows that it runs, measures nothing."""
        return replace(self, rounds=1, rgb=128, gray=128, warmup=64, samples=128, seconds=0.0)


@dataclass(frozen=True)
class Configuration:
    """One thing that is measured, as `worker.py list` describes it."""

    suite: str
    name: str
    environment: str  # "dev": this interpreter's; "peers": Options.peers
    note: str  # where its output or its work differs from ours

    @property
    def full_name(self) -> str:
        return f"{self.suite}/{self.name}"


Round = dict[str, dict[str, Any]]
"""What the workers of one round printed, by configuration: the fields of `measure`, or `error`."""


def run_suite(suite: str, options: Options, *, command: str, environment: Mapping[str, Any]) -> Path:
    """Run every configuration of a suite `options.rounds` times, in an order shuffled in each round.

    Args:
        command: what the user typed.
        environment: machine, versions and commit. Taken once before the first suite, whose results, new files in the
            checkout, would make it look changed to the second.

    Returns:
        the result file `<results>/<suite>-<date>.jsonl`: a header line, then one line per configuration. It is
        written anew after each round, so that stopping early keeps the rounds that are done.

    Raises:
        UserError: unknown suite, no peers' environment, data that cannot be prepared, or a configuration that failed
            (the other ones are in the file all the same).
    """
    configurations = _select(_list(options), suite, options)
    _prepare(configurations, options)
    head = header(suite, options, command=command, environment=environment)
    path = new_file(options.results, f"{suite}-{head['date'][:10]}")
    rounds: list[Round] = []
    for number in range(options.rounds):
        rounds.append(_run_round(configurations, number, options))
        write_results(path, [head, *result_lines(configurations, rounds)])
    print(table(read_results(path)), flush=True)
    _refuse_failures(read_results(path), path)
    return path


def measure(batches: Iterator[Sized], *, warmup: int, samples: int, seconds: float) -> dict[str, float]:
    """Time an endless iterator of batches, whose `len` is their number of samples.

    Args:
        warmup: samples taken before the clock starts; filling caches, rings and worker processes belongs here.
        samples, seconds: both must have passed before the clock stops.

    Returns:
        samples, seconds and core_seconds (CPU time of this process, its threads and its child processes), and the
        rates samples_per_s and samples_per_core_s.
    """
    _take(batches, samples=warmup, seconds=0.0)
    cpu_before, begin = _cpu_s(), time.perf_counter()
    seen = _take(batches, samples=samples, seconds=seconds)
    wall, cpu = time.perf_counter() - begin, _cpu_s() - cpu_before
    return {
        "samples": seen,
        "seconds": wall,
        "core_seconds": cpu,
        "samples_per_s": seen / wall,
        "samples_per_core_s": seen / cpu,
    }


def _take(batches: Iterator[Sized], *, samples: int, seconds: float) -> int:
    begin, seen = time.perf_counter(), 0
    while seen < samples or time.perf_counter() - begin < seconds:
        seen += len(next(batches))
    return seen


def _cpu_s() -> float:
    """CPU seconds of this process, of its children that ended, and of its living descendants (in ticks of 10 ms)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(_ticks(pid) for pid in _descendants(os.getpid()))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def _ticks(pid: int) -> int:
    """User and system time of a process and of the children it has waited for: proc(5), stat, fields 14 to 17."""
    fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields_after_name[11:15])


def _list(options: Options) -> list[Configuration]:
    if not (options.scripts / "worker.py").is_file():
        raise UserError(
            f"{options.scripts}: no worker.py in it. The benchmarks lie in a checkout of Trainyard: go there first, "
            "cd CHECKOUT, then type it again."
        )
    listed = _worker(Path(sys.executable), ["list"], options, timeout_s=60)
    return [Configuration(**line) for line in listed]


def _select(configurations: Iterable[Configuration], suite: str, options: Options) -> list[Configuration]:
    if suite not in SUITES:
        raise UserError(f"'{suite}' is no benchmark suite. Choose from: {', '.join(SUITES)}.")
    here = {"dev"} if options.peers is None else {"dev", "peers"}
    found = [c for c in configurations if c.suite == suite and c.environment in here]
    wanted = options.only or ("*",)
    chosen = [c for c in found if c.name == OURS or any(fnmatch(c.name, pattern) for pattern in wanted)]
    idle = [p for p in options.only if not any(fnmatch(c.name, p) for c in found)]
    if idle:
        names = ", ".join(c.name for c in found)
        raise UserError(f"--only {idle[0]}: no such configuration in suite {suite}. It has: {names}.")
    return chosen


def _prepare(configurations: Sequence[Configuration], options: Options) -> None:
    for environment in ("dev", "peers"):
        names = [c.full_name for c in configurations if c.environment == environment]
        if names:
            _worker(_python(environment, options), ["prepare", *names], options, timeout_s=3600, show=True)


def _python(environment: str, options: Options) -> Path:
    if environment == "dev":
        return Path(sys.executable)
    assert options.peers is not None
    python = options.peers / "bin" / "python"
    if not python.exists():
        raise UserError(
            f"{python}: no interpreter there, but the peers run in an environment of their own. "
            f"Make it as {options.scripts}/README.md says, or leave out --peers."
        )
    return python


def _run_round(configurations: Sequence[Configuration], number: int, options: Options) -> Round:
    results: Round = {}
    for configuration in shuffle_once(configurations, number):
        begin = time.perf_counter()
        for name, line in _measure_one(configuration, options).items():
            results[name] = line
            rate = f"{line['samples_per_s']:12,.1f}/s" if "error" not in line else "      failed"
            took = time.perf_counter() - begin
            print(f"round {number + 1}/{options.rounds}  {name:32} {rate}  {took:5.0f} s", flush=True)
    return results


def shuffle_once(configurations: Sequence[Configuration], round_number: int) -> list[Configuration]:
    """Return the order of one round: another one in each, the same in each run."""
    return random.Random(round_number).sample(configurations, len(configurations))


def _measure_one(configuration: Configuration, options: Options) -> Round:
    try:
        lines = _worker(
            _python(configuration.environment, options),
            ["measure", configuration.full_name],
            options,
            timeout_s=WORKER_TIMEOUT_S,
        )
    except WorkerError as error:
        return {configuration.name: {"error": str(error)}}
    return {line["name"]: line for line in lines}


class WorkerError(UserError):
    """A worker ended without a result."""


def _worker(
    python: Path, command: Sequence[str], options: Options, *, timeout_s: float, show: bool = False
) -> list[dict[str, Any]]:
    """Run worker.py in a process group of its own and return the JSON lines it printed.

    Loaders leave threads and processes behind; whatever is still alive in the group afterwards is killed, so that it
    cannot slow down the next configuration.

    Args:
        show: whether what it writes to stderr goes to the terminal at once (progress), or only into an error.
    """
    arguments = [str(python), str(options.scripts / "worker.py"), *command, *_worker_options(options)]
    # Files, not pipes: a process left behind would hold a pipe open, and we would wait for its end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=None if show else errors, text=True, start_new_session=True
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


def _worker_options(options: Options) -> list[str]:
    passed = ("data", "rgb", "gray", "warmup", "samples", "seconds", "threads")
    return [part for name in passed for part in (f"--{name}", str(getattr(options, name)))]


def _kill_group(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing was left
    finally:
        process.wait()


def header(suite: str, options: Options, *, command: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one must know to judge the numbers below it."""
    return {
        "kind": "header",
        "suite": suite,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()},
        "environment": environment,
    }


def result_lines(configurations: Sequence[Configuration], rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return one line per thing measured, ours first, the others from fast to slow.

    A ratio is formed within a round and then summarised over the rounds: both sides of it met the same state of the
    machine. A number is quotable if its spread is at most 0.1 over at least 3 rounds.
    """
    about = {c.name: c for c in configurations}
    names = dict.fromkeys(name for results in rounds for name in results)
    lines = [_result_line(name, about.get(name), rounds) for name in names]
    return sorted(lines, key=lambda line: (line["name"] != OURS, -_median(line, "samples_per_s")))


def _result_line(name: str, about: Configuration | None, rounds: Sequence[Round]) -> dict[str, Any]:
    measured = [results[name] for results in rounds if "samples_per_s" in results.get(name, {})]
    errors = [results[name]["error"] for results in rounds if "error" in results.get(name, {})]
    line: dict[str, Any] = {"kind": "result", "name": name, "note": about.note if about else ""}
    for key in ("samples_per_s", "samples_per_core_s"):
        values = [result[key] for result in measured]
        if values:
            line[key] = _summary(values)
        pairs = _pairs(rounds, OURS, name, key)
        if pairs:
            line[f"ours_over_this_{key}"] = _summary([ours / other for ours, other in pairs])
    line |= {key: measured[-1][key] for key in ("output", "versions") if measured and key in measured[-1]}
    return line | {"errors": errors, "rounds": measured}


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return asdict(Summary.of(values))


def _pairs(rounds: Sequence[Round], first: str, second: str, key: str) -> list[tuple[float, float]]:
    both = [r for r in rounds if key in r.get(first, {}) and key in r.get(second, {})]
    return [(r[first][key], r[second][key]) for r in both]


def _median(line: Mapping[str, Any], key: str) -> float:
    return float(line[key]["median"]) if key in line else 0.0


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read a result file.

    Raises:
        UserError: it is not there, or it is none.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such result file. `trainyard bench` writes them to benchmarks/.")
    try:
        lines: list[dict[str, Any]] = [json.loads(text) for text in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: expected one JSON object per line, found: {error}.") from None
    if not lines or lines[0].get("kind") != "header":
        raise UserError(f"{path}: expected a header line that `trainyard bench` has written; found none.")
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the results for reading: rates with spread, how many times as fast ours is, and what differs."""
    head, *results = lines
    unit = "record" if head["suite"] == "read" else "img"
    titles = ("configuration", f"{unit}/s", f"{unit}/core-s", "ours/this, wall", "ours/this, core-s", "note")
    rows = [titles, *(_row(line) for line in results)]
    text = align_columns(rows)
    legend = (
        f"median over {head['options']['rounds']} rounds, +- (largest - smallest) / median; "
        f"? not quotable: spread above {QUOTABLE_SPREAD} or fewer than {QUOTABLE_ROUNDS} rounds"
    )
    parts = [f"{head['suite']}  {head['date']}  {head['command']}", *text, legend]
    return "\n".join(parts + ([step_verdict(results)] if head["suite"] == "step" else []))


def _row(line: Mapping[str, Any]) -> tuple[str, ...]:
    rates = (_cell(line.get(key), ",.1f") for key in ("samples_per_s", "samples_per_core_s"))
    keys = ("ours_over_this_samples_per_s", "ours_over_this_samples_per_core_s")
    ratios = ("" if line["name"] == OURS else _cell(line.get(key), ".2f") for key in keys)
    failed = f"failed in {len(line['errors'])} rounds  " if line["errors"] else ""
    return (line["name"], *rates, *ratios, failed + line["note"])


def _cell(summary: Mapping[str, Any] | None, form: str) -> str:
    if summary is None:
        return "-"
    return Summary(**summary).text(form)


def step_verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """Return what a step of the engine costs beyond a plain loop, in ms, paired by round, against the target."""
    times = {line["name"]: [r["ms_per_step"] for r in line["rounds"]] for line in results}
    extra = [ours - plain for ours, plain in zip(times[OURS], times["plain_loop"], strict=True)]
    share, least_ms = STEP_TARGET
    target_ms = max(share * median(times["plain_loop"]), least_ms)
    word = "met" if median(extra) <= target_ms else "MISSED"
    return (
        f"engine {median(times[OURS]):.3f} ms/step, plain loop {median(times['plain_loop']):.3f} ms/step: "
        f"{median(extra):+.3f} ms (rounds {min(extra):+.3f} .. {max(extra):+.3f}); target {target_ms:.3f} ms {word}"
    )


def _refuse_failures(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    failed = [line for line in lines[1:] if line["errors"]]
    if failed:
        names = ", ".join(line["name"] for line in failed)
        raise UserError(f"{path}: {names} failed; the other results stand. The last error:\n{failed[-1]['errors'][-1]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `trainyard bench`."""
    default = Options()
    parser.add_argument("suites", nargs="*", help=f"suites to run, from {', '.join(SUITES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="little data, one round: does it run at all")
    parser.add_argument("--peers", type=Path, metavar="VENV", help="also measure the peers, in this environment")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="these beside ours; repeatable")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a result file and stop")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="least time of each: %(default)s")
    parser.add_argument("--threads", type=int, default=default.threads, help="for each, default: cores, %(default)s")
    parser.add_argument("--data", type=Path, default=default.data, help="cache of generated data: %(default)s")
    parser.add_argument("--results", type=Path, default=default.results, help="folder of results: %(default)s")


def main(arguments: argparse.Namespace, *, command: str) -> None:
    """Run what `add_arguments` has read.

    Args:
        command: what the user typed, for the header.

    Raises:
        UserError: see `run_suite`.
    """
    if arguments.show:
        print(table(read_results(arguments.show)))
        return
    environment = environment_record()
    options = Options(
        peers=arguments.peers,
        only=tuple(arguments.only),
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        threads=arguments.threads,
        data=arguments.data,
        results=arguments.results,
    )
    for suite in arguments.suites or SUITES:
        chosen = options.quick() if arguments.quick else options
        run_suite(suite, chosen, command=command, environment=environment)
