"""The command line: parses the arguments, calls the code that does the work, and prints what to type next."""

import argparse
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from loguru import logger

from trainyard import __version__
from trainyard import config as configs
from trainyard.cli import bandwidth, cluster, export, gc, plan, submission, train, use
from trainyard.cli.verb import Parser, Verbs, add_verb, find_project_folder
from trainyard.errors import UserError
from trainyard.files import report_full_disk
from trainyard.hardware import set_openmp_wait_policy
from trainyard.runs import folder as runs
from trainyard.runs.manifest import list_checkpoints, verify
from trainyard.runs.state import ExitCode, choose_exit_code
from trainyard.text import find_nearest
from trainyard.tools import bench, gpu_check


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 2 user error, 74 disk full, 85-87 stopped and resumable.

    141, as a shell calls a process that SIGPIPE ended: whoever read the output has closed it, as `head` does.
    """
    try:
        try:
            code = _run_command(argv)
        except SystemExit:  # after --help
            print(end="", flush=True)
            raise
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        closed = [stream.fileno() for stream in filter(None, (sys.stdout, sys.stderr)) if _is_closed(stream)]
        if not closed:  # it is about another pipe
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:  # for what Python still holds, and writes when it exits
            os.dup2(null, descriptor)
        os.close(null)
        return 128 + signal.SIGPIPE


def _is_closed(stream: TextIO) -> bool:
    """Tell whether a stream is a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _run_command(argv: Sequence[str] | None) -> int:
    started = time.time()
    set_openmp_wait_policy(os.environ)
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="INFO")
    arguments = _parse_arguments(argv)
    arguments.started = started
    arguments.typed = list(sys.argv[1:] if argv is None else argv)
    try:
        with report_full_disk(Path.cwd()):
            code: int = arguments.command(arguments)
        return code
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return choose_exit_code(error)
    except KeyboardInterrupt:
        print(
            "Interrupted. No file is half-written; the same command continues where this one stopped.", file=sys.stderr
        )
        return 130


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; OPTION=VALUE may come anywhere, also after --flags, where argparse does not look for it."""
    parser, verbs = _build_parser(sys.argv[1:] if argv is None else argv)
    arguments, rest = parser.parse_known_args(argv)
    unrecognized = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unrecognized:
        _refuse_words(verbs.choices[arguments.verb], unrecognized)
    if rest:
        arguments.overrides += rest
    return arguments


def _refuse_words(verb: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Exit with one line about words that a command does not know, and the flags of it that come nearest."""
    flags = re.findall(r"(?<![\w-])--?\w[\w-]*", verb.format_usage())
    near = dict.fromkeys(flag for word in words for flag in find_nearest(word.partition("=")[0], flags))
    hint = f" Nearest: {', '.join(near)}." if near else ""
    verb.error(f"unrecognized arguments: {' '.join(words)}.{hint}")


def _build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, Verbs]:
    parser: argparse.ArgumentParser = Parser(
        prog="trainyard",
        allow_abbrev=False,
        description="Train on whatever GPUs are available, and resume exactly.",
        epilog="Options of a job are written name=value, such as optimizer.lr=1e-4. List them: trainyard options JOB",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", dest="verb")
    for add in (
        train.add_run,
        train.add_resume,
        train.add_rank,
        _add_jobs,
        _add_options,
        _add_pack,
        _add_verify,
        _add_ckpt,
        _add_report,
        use.add_commands,
        export.add_commands,
        _add_bench,
        _add_gpu_check,
        submission.add_submit,
        plan.add_commands,
        cluster.add_commands,
        bandwidth.add_commands,
        gc.add_commands,
    ):
        add(verbs)
    if not set(argv) & set(verbs.choices):
        _add_family_commands(verbs)
    return parser, verbs


def _add_family_commands(verbs: Verbs) -> None:
    """Add the families' own commands, from `jobs/<family>/commands.py`; only if none of the built-in ones was typed."""
    jobs = find_project_folder("jobs")
    for path in sorted(jobs.glob("[!._]*/commands.py")):
        configs.load_family(jobs, path.parent.name, "commands").add(verbs)


# jobs, options


def _add_jobs(verbs: Verbs) -> None:
    add_verb(verbs, "jobs", _list_jobs, "list the jobs you can run")


def _list_jobs(args: argparse.Namespace) -> int:
    for name, preset in sorted(configs.find_jobs(args.jobs).items()):
        first = preset.read_text().partition("\n")[0]
        print(f"{name:<24} {first.lstrip('# ')}")
    return 0


def _add_options(verbs: Verbs) -> None:
    verb = add_verb(verbs, "options", _list_options, "list a job's options, their values and what they do")
    verb.add_argument("job")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")


def _list_options(args: argparse.Namespace) -> int:
    for option in configs.list_options(configs.compose(args.job, args.overrides, args.jobs)):
        print(f"{option.name}={option.value!s:<{max(1, 44 - len(option.name))}} {option.doc}")
    return 0


# pack, verify


def _add_pack(verbs: Verbs) -> None:
    verb = add_verb(verbs, "pack", _pack, "write raw files into shards, or finish writing them")
    verb.add_argument("job")
    verb.add_argument("raw", type=Path, help="folder of raw files")
    verb.add_argument("out", type=Path, help="folder of shards")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    verb.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: the cores)")
    verb.add_argument("--shard-mib", type=int, default=128, metavar="MIB", help="target size of a shard")


def _pack(args: argparse.Namespace) -> int:
    from trainyard.data.prepare import pack_raw

    config = configs.compose(args.job, args.overrides, args.jobs)
    pack_raw(config, args.raw, args.out, args.jobs, workers=args.workers, shard_mib=args.shard_mib)
    print(f"next: trainyard run {args.job} data.path={args.out}")
    return 0


def _add_verify(verbs: Verbs) -> None:
    verb = add_verb(verbs, "verify", _verify, "read all packed data and name every damaged record")
    verb.add_argument("data", type=Path, help="folder of shards")


def _verify(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from trainyard.data.index import read_index
    from trainyard.data.shards import verify

    index = read_index(args.data)
    if not index.has_digest:
        print(index.explain_no_digest())
    damaged = 0
    with tqdm(unit="B", unit_scale=True, desc=f"reading {args.data}", disable=None, leave=False) as bar:
        for damage in verify(args.data, bar.update):
            damaged += 1
            print(f"{damage.shard}: {damage.what}: {damage.reason}")
    print(f"{args.data}: {'all records are as they were packed' if not damaged else f'{damaged} damaged'}")
    return ExitCode.FAILED if damaged else 0


# ckpt, report


def _add_ckpt(verbs: Verbs) -> None:
    verb = add_verb(verbs, "ckpt", _run_ckpt, "list or verify the checkpoints of a run")
    verb.add_argument("what", choices=("list", "verify"))
    verb.add_argument("run", help="its folder, or a job for that job's newest run")


def _run_ckpt(args: argparse.Namespace) -> int:
    run = runs.resolve_run(args.run, args.runs)
    entries = list_checkpoints(run / "checkpoints")
    if not entries:
        raise UserError(f"{run}: no checkpoints yet.")
    damaged = 0
    for entry in entries:
        problem = verify(entry) if args.what == "verify" else entry.problem
        damaged += problem is not None
        best = " best" if (entry.meta.get("best") or {}).get("step") == entry.step else ""
        print(f"{entry.path.name}  {entry.bytes / 2**20:9.1f} MiB  {problem or 'ok'}{best}")
    return ExitCode.FAILED if damaged else 0


def _add_report(verbs: Verbs) -> None:
    verb = add_verb(verbs, "report", _write_report, "write a run's report: one HTML page and its plots")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")


def _write_report(args: argparse.Namespace) -> int:
    from trainyard.report.run_page import format_summary, write_report

    run = runs.resolve_run(args.run, args.runs)
    report = write_report(run)
    print(format_summary(run, next_commands=[f"open {report}"]))
    return 0


# bench, gpu-check


def _add_bench(verbs: Verbs) -> None:
    verb = add_verb(verbs, "bench", _run_bench, "compare reading, decoding and training steps with the usual loaders")
    bench.add_arguments(verb)


def _run_bench(args: argparse.Namespace) -> int:
    bench.main(args, command=shlex.join(["trainyard", *args.typed]))
    return 0


def _add_gpu_check(verbs: Verbs) -> None:
    doc = "check in ten minutes that this card trains every job right, and how fast; write down what it finds"
    gpu_check.add_arguments(add_verb(verbs, "gpu-check", _run_gpu_check, doc))


def _run_gpu_check(args: argparse.Namespace) -> int:
    return gpu_check.main(args, environ=os.environ)
