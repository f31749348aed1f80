"""`trainyard gpu-check`: finds out in minutes what a card does with this project, and writes down each answer at once.

The result is `<results>/gpu-<card>-<date>.jsonl`: a header (machine, versions, commit, command), then one flat line per
check: `step`, `check`, `status` ("ok", "failed", "not run"), `seconds`, and its figures; a failed one has `error` and
`log`, one that did not run `reason`. benchmarks/README.md says what each step shows.

Lines of step "speed" whose `check` contains "/compiled/" have what a choice between eager and compiled steps needs:
`card`, `sm`, `torch`, `family`, `preset`, `precision`, `channels_last`, `deterministic`, `micro_batch_size`,
`samples_per_s_eager`, `samples_per_s_compiled` (medians), `quotable`, and `compile_startup_s`, the extra time of the
first compiled step. compile=auto reads them: launch/compile_choice.py.

Every check runs in a process of its own, forked from this one, which loads torch once and never starts CUDA. A check
may fail, crash or hang: its process group is killed at the end of its time, and the next one starts.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trainyard.config import find_jobs, load_family
from trainyard.errors import NotFinite, UserError, is_out_of_memory
from trainyard.files import require_writable
from trainyard.launch.ranks import end_with_parent
from trainyard.measure import find_free_path, make_header, write_results
from trainyard.runs.state import ExitCode
from trainyard.text import SCREEN_WIDTH, align_columns, cut, format_duration, join_names
from trainyard.tools.gpu_checks.check import ONE_FAMILY, STEPS, Check, Figures, NotRun, Sizes

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
INTERRUPTED = "interrupted"  # a reason
SUITE = "gpu-check"

_DESCRIBE_S = 120.0  # for the first start of CUDA on a cold machine
_SHOWN = 12  # failures and reasons in the table
_DATA, _RESULTS = Path("data/gpu-check"), Path("benchmarks")


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    status: str
    seconds: float
    figures: Figures = field(default_factory=dict)
    error: str = ""  # first sentence, if it failed
    reason: str = ""  # if it did not run

    def to_line(self, check: Check, log: Path | None) -> dict[str, Any]:
        """Return the line of the result file."""
        line: dict[str, Any] = {"kind": "result", "step": check.step, "check": check.name, "status": self.status}
        line["seconds"] = round(self.seconds, 2)
        line |= {"error": self.error, "log": str(log)} if self.status == FAILED else {}
        line |= {"reason": self.reason} if self.status == NOT_RUN else {}
        return line | self.figures


@dataclass(frozen=True)
class Budget:
    """How long the checks may take."""

    seconds: float  # all of them
    check_s: float  # one of them, as long as so much is left of the whole time

    @classmethod
    def from_minutes(cls, minutes: float) -> "Budget":
        """Return the budget of a command: a check may take a fifth of it, and no less than a minute."""
        return cls(60 * minutes, max(60.0, 60 * minutes / 5))

    def plan_step_ends(self, steps: Iterable[str]) -> dict[str, float]:
        """Return when each step should end, in seconds from the start: time that one leaves goes to the next."""
        shares = {step: STEPS[step][1] for step in steps}
        total, ends, used = sum(shares.values()) or 1.0, {}, 0.0
        for step, share in shares.items():
            used += share
            ends[step] = self.seconds * used / total
        return ends

    def limit_check(self, *, elapsed_s: float, step_end_s: float) -> float:
        """Return how long the next check may take; 0 if its step or the whole time is over."""
        return 0.0 if elapsed_s >= step_end_s else min(self.check_s, self.seconds - elapsed_s)


# One check


def run_in_process(work: Callable[[], Figures], *, limit_s: float, log: Path) -> Outcome:
    """Run `work` in a process of its own and return how it ended.

    Args:
        limit_s: then it is killed, with every process that it started.
        log: file for all that it prints, and for the traceback of an error.
    """
    answer = log.with_suffix(".answer")
    begin = time.monotonic()
    process = get_context("fork").Process(target=_answer, args=(work, answer, log, os.getpid()))
    process.start()
    try:
        process.join(limit_s)
        ended = not process.is_alive()
    finally:
        _kill_group(process.pid)
        process.kill()
        process.join()
    seconds = time.monotonic() - begin
    if answer.exists():
        fields = json.loads(answer.read_text())
        answer.unlink()
        return Outcome(seconds=seconds, **fields)
    if not ended:
        return Outcome(FAILED, seconds, error=f"It did not end within {limit_s:.0f} s and was killed.")
    code = process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    hint = " Out of memory is the usual cause." if code == -signal.SIGKILL else ""
    return Outcome(FAILED, seconds, error=f"Its process ended by {how} without an answer.{hint}")


def _answer(work: Callable[[], Figures], answer: Path, log: Path, parent: int) -> None:
    """Do the work of a forked process, and write its answer to a file."""
    os.setsid()  # a group of its own, to be killed as a whole
    end_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    fields = _try(work)
    sys.stdout.flush()
    answer.with_suffix(".partial").write_text(json.dumps(fields))
    answer.with_suffix(".partial").rename(answer)
    os._exit(0)


def _try(work: Callable[[], Figures]) -> dict[str, Any]:
    try:
        return {"status": OK, "figures": work()}
    except NotRun as reason:
        return {"status": NOT_RUN, "reason": take_first_sentence(str(reason))}
    except Exception as error:
        traceback.print_exc()
        name = "" if isinstance(error, UserError) and not isinstance(error, NotFinite) else f"{type(error).__name__}: "
        return {"status": FAILED, "error": f"{name}{take_first_sentence(str(error))}"}


def take_first_sentence(text: str) -> str:
    """Return the first sentence of an error, on one line."""
    return cut(re.split(r"(?<=[\w)\]][.!?])\s(?=[A-Z])", " ".join(text.split()), maxsplit=1)[0], 300)


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing is left


# All checks


def run_checks(
    checks: Sequence[Check],
    *,
    device: str,
    sizes: Sizes,
    budget: Budget,
    header: Mapping[str, Any],
    path: Path,
    tell: Callable[[str], object] = partial(print, end="", flush=True),
) -> list[dict[str, Any]]:
    """Run checks one after another; write the result file again after each; return its lines, one for each check.

    Ctrl-C ends the check that runs, and the lines of the unfinished ones say so.

    Args:
        device: "cuda" or "cpu".
        path: the result file. The logs of failed checks go to a folder next to it, of the same name.
        tell: called with the text of the progress line, in two parts: when a check starts and when it has ended.
    """
    lines: list[dict[str, Any]] = [dict(header)]
    write_results(path, lines)
    begin = time.monotonic()
    planned = [check for check in checks if not check.explain_absence(device)]
    ends = budget.plan_step_ends(dict.fromkeys(check.step for check in planned))
    try:
        for check in checks:
            if absence := check.explain_absence(device):
                lines.append(Outcome(NOT_RUN, 0.0, reason=absence).to_line(check, None))
                continue
            elapsed_s = time.monotonic() - begin
            limit_s = budget.limit_check(elapsed_s=elapsed_s, step_end_s=ends[check.step])
            clock = f"{planned.index(check) + 1}/{len(planned)}, {format_duration(elapsed_s)}"
            tell(f"[{clock} of {format_duration(budget.seconds)}]  {check.full_name}, at most {limit_s:.0f} s: ")
            log = sizes.scratch / f"{check.file_name}.log"
            outcome = _run_check(check, device, sizes, budget, limit_s=limit_s, log=log)
            kept = _keep_log(log, path) if outcome.status == FAILED else None
            lines.append(outcome.to_line(check, kept))
            write_results(path, lines)
            tell(f"{_describe(outcome)}, {outcome.seconds:.1f} s\n")
    except KeyboardInterrupt:
        tell(f"{INTERRUPTED}\n")
        for check in checks[len(lines) - 1 :]:
            reason = check.explain_absence(device) or INTERRUPTED
            lines.append(Outcome(NOT_RUN, 0.0, reason=reason).to_line(check, None))
    write_results(path, lines)
    return lines


def _run_check(check: Check, device: str, sizes: Sizes, budget: Budget, *, limit_s: float, log: Path) -> Outcome:
    if not limit_s:
        return Outcome(NOT_RUN, 0.0, reason="the time of its step was over")
    outcome = run_in_process(partial(_work_on, check, device, sizes), limit_s=limit_s, log=log)
    if outcome.status == FAILED and outcome.seconds >= limit_s < budget.check_s:
        return Outcome(NOT_RUN, outcome.seconds, reason="the time of the whole command was over")
    return outcome


def _work_on(check: Check, device: str, sizes: Sizes) -> Figures:
    import torch

    chosen = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    try:
        return check.work(chosen, sizes)
    except RuntimeError as error:
        if sizes.small or not is_out_of_memory(error):
            raise
        gib = torch.cuda.get_device_properties(chosen).total_memory / 2**30
        raise NotRun(f"its micro-batch does not fit into the {gib:.1f} GiB of this card; a smaller one may") from error


def _keep_log(log: Path, path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    kept = folder / log.name
    kept.write_bytes(log.read_bytes() if log.exists() else b"")
    return kept


def _describe(outcome: Outcome) -> str:
    return cut(": ".join(part for part in (outcome.status, outcome.error or outcome.reason) if part), SCREEN_WIDTH)


# Reading and showing


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a result file.

    Raises:
        UserError: there is none, or it is something else.
    """
    try:
        lines: list[dict[str, Any]] = [json.loads(text) for text in path.read_text().splitlines()]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Write one: trainyard gpu-check") from None
    except ValueError as error:
        raise UserError(f"{path}: expected one JSON object per line, found: {error}.") from None
    if not lines or lines[0].get("suite") != SUITE:
        raise UserError(f"{path}: not a result of trainyard gpu-check. Write one: trainyard gpu-check")
    return lines


def format_table(lines: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Format a result as one screen: how many checks of each step passed, what failed, and what to do next."""
    header, *results = lines
    rows: list[tuple[str, ...]] = [("step", OK, FAILED, NOT_RUN, "")]
    for step, (what, _) in STEPS.items():
        of_step = [line for line in results if line["step"] == step]
        if of_step:
            counts = [str(_count(of_step, status) or "-") for status in (OK, FAILED, NOT_RUN)]
            rows.append((step, *counts, what))
    parts = [f"{header['card']}, torch {header['environment']['versions'].get('torch')}"]
    parts += align_columns(rows, width=SCREEN_WIDTH)
    parts += [*_list_failures(results), *_list_reasons(results), "", f"results: {path}"]
    return "\n".join([*parts, f"next: {_say_next(header, results, path)}"])


def _count(lines: Iterable[Mapping[str, Any]], status: str) -> int:
    return sum(line["status"] == status for line in lines)


def _list_failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    failed = [line for line in results if line["status"] == FAILED]
    shown = [(f"{line['step']}/{line['check']}", line["error"]) for line in failed[:_SHOWN]]
    more = [f"  and {len(failed) - _SHOWN} more"] if len(failed) > _SHOWN else []
    return ["", "failed:", *align_columns(shown, indent="  ", width=SCREEN_WIDTH), *more] if failed else []


def _list_reasons(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """List why checks did not run, the most frequent reason first."""
    names: dict[str, list[str]] = {}
    for line in results:
        if line["status"] == NOT_RUN:
            names.setdefault(line["reason"], []).append(f"{line['step']}/{line['check']}")
    ordered = sorted(names, key=lambda reason: -len(names[reason]))
    lines = [cut(f"  {reason}: {join_names(names[reason], most=2)}", SCREEN_WIDTH) for reason in ordered[:_SHOWN]]
    more = [f"  and {len(ordered) - _SHOWN} more reasons"] if len(ordered) > _SHOWN else []
    return ["", "not run:", *lines, *more] if lines else []


def _say_next(header: Mapping[str, Any], results: Sequence[Mapping[str, Any]], path: Path) -> str:
    if left := [line for line in results if line.get("reason") == INTERRUPTED]:
        names = map(_quote, left) if header["options"].get("only") else dict.fromkeys(line["step"] for line in left)
        only = " ".join(f"--only {name}" for name in names)
        return f"a new call checks from the start, into a new file; only what is left: {header['repeat']} {only}"
    failed = [line for line in results if line["status"] == FAILED]
    if failed:
        return f"read {failed[0]['log']}, then repeat it alone: {header['repeat']} --only {_quote(failed[0])}"
    if header["device"] == "cpu":
        return "the same on a machine with a GPU: trainyard gpu-check"
    if any(line.get("reason", "").startswith("the time of") for line in results):
        return f"give it more time: {header['repeat']} --minutes {2 * float(header['options']['minutes']):g}"
    return f"commit {path}: what this card does is measured only there"


def _quote(line: Mapping[str, Any]) -> str:
    return f"'{line['step']}/{line['check']}'"


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trainyard gpu-check`."""
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything together: %(default)s")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps, one timing of each; leaves out all presets but each family's demo and base preset (with --cpu "
        "but the demo), all settings but one, and with --cpu all families but the first in the steps "
        f"{join_names(ONE_FAMILY)}; what is left out is listed as not run",
    )
    parser.add_argument("--cpu", action="store_true", help="the same steps without a GPU, at small sizes")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a step or a preset; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and stop")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a result file and stop")
    parser.add_argument("--data", type=Path, default=_DATA, help="synthetic data: %(default)s")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of results: %(default)s")


def main(arguments: argparse.Namespace, *, environ: MutableMapping[str, str]) -> int:
    """Run `trainyard gpu-check` with the parsed arguments; return 0 only if nothing failed.

    Raises:
        UserError: there is no GPU and --cpu is missing, or an argument means nothing.
    """
    if arguments.show:
        print(format_table(read_lines(arguments.show), arguments.show))
        return ExitCode.DONE
    if not 0 < arguments.minutes < 1e4:
        raise UserError(f"--minutes {arguments.minutes:g}: expected a number above 0, such as --minutes 10")
    find_jobs(arguments.jobs)  # or say at once that there are none
    if not arguments.list:
        for name in ("data", "results"):
            require_writable(getattr(arguments, name), flag=f"--{name}")
    _load_torch(environ, arguments.jobs, cpu=arguments.cpu)
    from trainyard.tools.gpu_checks.plan import list_checks, select_checks

    checks = select_checks(list_checks(arguments.jobs, small=arguments.cpu, quick=arguments.quick), arguments.only)
    if arguments.list:
        print("\n".join(check.full_name for check in checks))
        return ExitCode.DONE
    arguments.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="runs-", dir=arguments.data) as scratch, _interrupt_on(signal.SIGTERM):
        sizes = choose_sizes(arguments, scratch=Path(scratch), environ=environ)
        card = _describe_card(sizes)
        path = find_free_path(arguments.results, f"gpu-{_name_file(card)}-{datetime.now(UTC):%Y-%m-%d}")
        header = {**make_header(SUITE, _read_options(arguments)), **card, "repeat": _build_repeat(arguments)}
        lines = run_checks(
            checks,
            device=card["device"],
            sizes=sizes,
            budget=Budget.from_minutes(arguments.minutes),
            header=header,
            path=path,
        )
    print(f"\n{format_table(lines, path)}")
    if any(line.get("reason") == INTERRUPTED for line in lines):
        return 128 + signal.SIGINT
    return ExitCode.FAILED if _count(lines[1:], FAILED) else ExitCode.DONE


def choose_sizes(arguments: argparse.Namespace, *, scratch: Path, environ: Mapping[str, str]) -> Sizes:
    """Choose how much work the checks do, from --cpu and --quick."""
    sizes = Sizes(arguments.jobs, arguments.data, scratch, environ, small=arguments.cpu)
    if arguments.cpu:
        sizes = replace(sizes, run_steps=8, seconds=0.5, matrix=512)
    if arguments.quick:
        sizes = replace(sizes, steps=3 if arguments.cpu else 5, rounds=1, seconds=sizes.seconds / 5)
    return sizes


def _load_torch(environ: MutableMapping[str, str], jobs: Path, *, cpu: bool) -> None:
    """Load what the checks' processes share, without starting CUDA: a process that did could not fork others."""
    environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch._dynamo

    import trainyard.train.trainer

    if cpu:  # whether loading DALI or a family starts CUDA is their own affair, so only here
        environ["CUDA_VISIBLE_DEVICES"] = ""
        with suppress(ImportError):
            import trainyard.data.decode_dali  # noqa: F401
        for family in sorted({path.parent.name for path in find_jobs(jobs).values()}):
            with suppress(Exception):  # its checks load it again, and say what is wrong
                load_family(jobs, family, "module")

    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _describe_card(sizes: Sizes) -> Figures:
    """Return what the card is.

    Raises:
        UserError: there is none, and --cpu was not typed; or CUDA does not start.
    """
    from trainyard.tools.gpu_checks.card import describe_device

    log = sizes.scratch / "device.log"
    outcome = run_in_process(partial(describe_device, sizes.environ), limit_s=_DESCRIBE_S, log=log)
    if outcome.status != OK:
        raise UserError(f"The GPU does not start: {outcome.error} Ask the driver: nvidia-smi")
    if outcome.figures["device"] == "cpu" and not sizes.small:
        raise UserError(
            f"There is no GPU to check: {outcome.figures['missing']} The same steps on the CPU, at small sizes: "
            "trainyard gpu-check --cpu"
        )
    return outcome.figures


def _name_file(card: Mapping[str, Any]) -> str:
    """Return the card's key in the table of GPUs, or its name in letters that suit a file."""
    return str(card["key"]) or re.sub(r"[^a-z0-9]+", "-", str(card["card"]).lower().removeprefix("nvidia ")).strip("-")


def _read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("minutes", "quick", "cpu", "only", "jobs", "data")
    return {name: getattr(arguments, name) for name in names}


def _build_repeat(arguments: argparse.Namespace) -> str:
    """Return the command without --only and --minutes, for what to type next."""
    words = [f"--{name}" for name in ("cpu", "quick") if getattr(arguments, name)]
    for name, usual in {"jobs": Path("jobs"), "data": _DATA, "results": _RESULTS}.items():
        chosen = getattr(arguments, name)
        words += [] if chosen == usual else [f"--{name}", str(chosen)]
    return shlex.join(["trainyard", "gpu-check", *words])


@contextmanager
def _interrupt_on(*numbers: signal.Signals) -> Iterator[None]:
    """Make signals raise KeyboardInterrupt, so that what is being done is ended and cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
