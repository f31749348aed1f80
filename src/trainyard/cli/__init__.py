"""The command line: parses the arguments, calls the code that does the work, and prints what to type next."""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from loguru import logger

from trainyard import __version__
from trainyard import config as configs
from trainyard.cli import cluster, dry, gc
from trainyard.cli.verb import Verbs, add_dry_option, add_trust_option, add_verb, find_project_folder
from trainyard.errors import UserError
from trainyard.files import limit_writers, report_full_disk
from trainyard.hardware import set_openmp_wait_policy
from trainyard.runs import changes
from trainyard.runs import folder as runs
from trainyard.runs.lock import RunLock, release
from trainyard.runs.manifest import Entry, list_checkpoints, verify
from trainyard.runs.state import ExitCode, choose_exit_code
from trainyard.runs.submission import read_submission
from trainyard.settings import TrainConfig
from trainyard.text import find_nearest
from trainyard.tools import bench, gpu_check
from trainyard.train.world import read_world


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 2 user error, 74 disk full, 85-87 stopped and resumable."""
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
    verb.exit(2, f"{verb.prog}: unrecognized arguments: {' '.join(words)}.{hint} All of them: {verb.prog} --help\n")


def _build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, Verbs]:
    parser = argparse.ArgumentParser(
        prog="trainyard",
        allow_abbrev=False,
        description="Train on whatever GPUs are available, and resume exactly.",
        epilog="Options of a job are written name=value, such as optimizer.lr=1e-4. List them: trainyard options JOB",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", dest="verb")
    for add in (
        _add_run,
        _add_resume,
        _add_rank,
        _add_jobs,
        _add_options,
        _add_pack,
        _add_verify,
        _add_ckpt,
        _add_report,
        _add_predict,
        _add_bench,
        _add_gpu_check,
        cluster.add_commands,
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


# run, resume, rank


def _add_run(verbs: Verbs) -> None:
    verb = add_verb(verbs, "run", _run, "train a job here: on one GPU, several, or the CPU")
    verb.add_argument("job", help="preset, such as fingerprint_demo: trainyard jobs")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="trainyard options JOB lists them")
    verb.add_argument("--name", help="name of the run's folder; the same name again resumes that run")
    _add_ranks(verb)
    add_dry_option(verb)


def _add_ranks(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--gpus", type=int, default=0, metavar="N", help="processes, one per GPU")
    verb.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="processes that share the cores")
    verb.add_argument("--break-lock", action="store_true", help="take over a run whose host is known to be dead")
    add_trust_option(verb)


def _run(args: argparse.Namespace) -> int:
    from trainyard.data.prepare import prepare_data

    runs.check_name(args.name, of="run")
    run = args.runs / args.job / args.name if args.name else None
    if run is not None and (run / runs.CONFIG).is_file():
        cluster.require_trust([run], args, here=True)
    config = configs.compose(args.job, args.overrides, args.jobs)
    count = _count_ranks(args)
    _refuse_impossible(config, count)
    if args.dry:
        return _print_run(run or args.runs / args.job / dry.NEW, config, args, count)
    if not _is_main():  # started by torchrun or srun: rank 0 creates the folder
        return _train(_wait_for_run(args.runs / args.job / _require_name(args)), args, count)
    if _is_launched():
        _require_name(args)
    config = prepare_data(config, args.jobs)
    if run is not None and (run / runs.CONFIG).is_file():
        with limit_writers(), RunLock(run, break_other_host=args.break_lock):
            changes.refuse_changes(run)
            _apply_changes(run, configs.thaw(run / runs.CONFIG, args.jobs), config)
    else:
        run = runs.create_run(args.runs, config, name=args.name, environ=os.environ)
    return _train(run, args, count)


def _print_run(run: Path, config: TrainConfig, args: argparse.Namespace, count: int) -> int:
    if (run / runs.CONFIG).is_file():
        changes.refuse_changes(run)
        old = configs.thaw(run / runs.CONFIG, args.jobs)
        config = replace(config, data=replace(config.data, path=old.data.path))  # packing would name the folder
        _apply_changes(run, old, config, write=False)
    return dry.print_run(run, config, args.jobs, ranks=count)


def _add_resume(verbs: Verbs) -> None:
    verb = add_verb(verbs, "resume", _resume, "resume a run from its newest valid checkpoint")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that do not change the mathematics")
    verb.add_argument("--here", action="store_true", help="on this machine, even if it was submitted to a cluster")
    verb.add_argument("--update-code", action="store_true", help="submitted run: use today's code, not its own copy")
    verb.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="here: processes that share the cores")
    verb.add_argument("--break-lock", action="store_true", help="take over a run whose host is known to be dead")
    add_trust_option(verb)
    verb.add_argument(
        "--changed-files", choices=("restore", "accept"), help="what to do with files it did not write so"
    )
    cluster.add_resource_args(verb, gpus=0)


def _resume(args: argparse.Namespace) -> int:
    run = runs.resolve_run(args.run, args.runs)
    cluster.require_trust([run], args, here=args.here)
    submitted = (run / runs.SUBMISSION).is_file() and not args.here
    if submitted:
        read_submission(run)  # or say what is wrong with it
        cluster.refuse_if_busy([run])
    count = 1 if submitted else _count_ranks(args)
    if args.dry:
        if not args.changed_files:
            changes.refuse_changes(run)
        config = configs.thaw(run / runs.CONFIG, args.jobs)
        new = configs.apply_overrides(config, args.overrides)
        _apply_changes(run, config, new, write=False)
        return cluster.resubmit(run.absolute(), args) if submitted else dry.print_run(run, new, args.jobs, ranks=count)
    if submitted:
        release(run)
    if _is_main():
        with limit_writers(), RunLock(run, break_other_host=args.break_lock):
            _settle_changed_files(run, args.changed_files)
            config = configs.thaw(run / runs.CONFIG, args.jobs)
            changed = configs.apply_overrides(config, args.overrides)
            _refuse_impossible(changed, count)
            _apply_changes(run, config, changed)
    return cluster.resubmit(run.absolute(), args) if submitted else _train(run, args, count)


def _settle_changed_files(run: Path, wanted: str | None) -> None:
    """Restore or accept the run's changed files as the user asks.

    Raises:
        UserError: some are changed, and the user did not say what to do, or it cannot be done.
    """
    if wanted:
        for change in changes.find_changes(run):
            logger.warning("{}: {} {}ed", change.path, change.problem, wanted.removesuffix("e"))
    if wanted == "restore":
        changes.restore_files(run)
    elif wanted == "accept":
        changes.accept_changes(run)
    changes.refuse_changes(run)


def _add_rank(verbs: Verbs) -> None:
    verb = add_verb(verbs, "rank", _run_rank, "train as one rank of a run (started by run and resume)")
    verb.add_argument("run", type=Path)
    verb.add_argument("--break-lock", action="store_true")
    verb.add_argument("--since", type=float, required=True)


def _run_rank(args: argparse.Namespace) -> int:
    from trainyard.launch.rank_task import execute

    return execute(args.run, args.jobs, environ=os.environ, started=args.since, break_lock=args.break_lock)


def _train(run: Path, args: argparse.Namespace, count: int) -> int:
    """Train in this process, or in several child processes; then print the outcome and what to type next."""
    from trainyard.launch.rank_task import execute
    from trainyard.launch.ranks import run_ranks

    if count > 1:
        command = ["rank", str(run), "--jobs", str(args.jobs), "--since", str(args.started)]
        code = run_ranks(command + ["--break-lock"] * args.break_lock, count, environ=os.environ)
    else:
        code = execute(run, args.jobs, environ=os.environ, started=args.started, break_lock=args.break_lock)
    if _is_main():
        _print_outcome(run, code)
    return code


def _print_outcome(run: Path, code: int) -> None:
    from trainyard.report.run_page import format_summary, write_report
    from trainyard.train.stop import EXIT_CODES

    if code == ExitCode.DONE:
        job = run.parent.name
        report = write_report(run)
        next_commands = [f"open {report}", f"trainyard ckpt export {run} {job}.safetensors", f"trainyard options {job}"]
        print(format_summary(run, next_commands=next_commands))
    elif code in EXIT_CODES.values():
        print(f"Stopped and saved. Resume: trainyard resume {run}", file=sys.stderr)
    else:
        print(f"Failed with code {code}; the log is {run}/log. Resume: trainyard resume {run}", file=sys.stderr)


def _apply_changes(run: Path, old: TrainConfig, new: TrainConfig, *, write: bool = True) -> None:
    """Name changed options and write them to the run's config, if a run in progress may change them.

    Raises:
        UserError: other options differ; names them.
    """
    changed = configs.find_differences(old, new)
    fixed = [d for d in changed if not d.mutable]
    if fixed:
        lines = "".join(f"\n  {d.name}: {d.old} -> {d.new}" for d in fixed)
        raise UserError(
            f"{run}: a run in progress keeps these options, but they differ:{lines}\n"
            f"Resume it unchanged (trainyard resume {run}), or start a new run under another name."
        )
    for d in changed:
        logger.info("{}: {} -> {}", d.name, d.old, d.new)
    if changed and write:
        configs.freeze(new, run / runs.CONFIG)


def _count_ranks(args: argparse.Namespace) -> int:
    """Return how many ranks to start.

    Raises:
        UserError: more GPUs are requested than there are, or --gpus is used inside a launcher that starts the ranks.
    """
    if not args.gpus:
        return 1 if args.cpu_ranks < 1 else int(args.cpu_ranks)
    if _is_launched():
        raise UserError("--gpus inside torchrun or srun, which start the ranks themselves. Leave it out.")
    import torch

    wanted: int = args.gpus
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted > found:
        raise UserError(
            f"{wanted} GPUs requested, but this machine has {found}. "
            + (f"Use --gpus {found}." if found else "Leave --gpus (GPUS=) out to train on the CPU.")
        )
    return wanted


def _refuse_impossible(config: TrainConfig, count: int) -> None:
    """Refuse what the ranks would refuse, each on its own, after the data were packed and the run was created."""
    world_size = read_world(os.environ).world_size if _is_launched() else count
    if config.sync_batchnorm and world_size > 1:
        import torch

        from trainyard.train.data_parallel import choose_sync_batchnorm

        choose_sync_batchnorm(True, device_type="cuda" if torch.cuda.is_available() else "cpu", world_size=world_size)


def _is_launched() -> bool:
    in_step = "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "RANK" in os.environ or in_step


def _is_main() -> bool:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def _require_name(args: argparse.Namespace) -> str:
    if not args.name:
        raise UserError("Under torchrun or srun a new run needs --name NAME, so that all ranks use the same folder.")
    return str(args.name)


def _wait_for_run(run: Path) -> Path:
    """Wait until rank 0 has packed the data and created the run's folder."""
    while not (run / runs.CONFIG).is_file():
        time.sleep(0.2)
    return run


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
    verb.add_argument("--shard-mib", type=int, default=256, metavar="MIB", help="target size of a shard")


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
    verb = add_verb(verbs, "ckpt", _run_ckpt, "list, verify or export the checkpoints of a run")
    verb.add_argument("what", choices=("list", "verify", "export"))
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb.add_argument("out", type=Path, nargs="?", help="export: weights file to write, .safetensors")
    verb.add_argument("--step", type=int, help="export: checkpoint of this step (default: the best, else the newest)")


def _run_ckpt(args: argparse.Namespace) -> int:
    run = runs.resolve_run(args.run, args.runs)
    entries = list_checkpoints(run / "checkpoints")
    if not entries:
        raise UserError(f"{run}: no checkpoints yet.")
    if args.what == "export":
        return _export(run, entries, args)
    damaged = 0
    for entry in entries:
        problem = verify(entry) if args.what == "verify" else entry.problem
        damaged += problem is not None
        best = " best" if (entry.meta.get("best") or {}).get("step") == entry.step else ""
        print(f"{entry.path.name}  {entry.bytes / 2**20:9.1f} MiB  {problem or 'ok'}{best}")
    return ExitCode.FAILED if damaged else 0


def _export(run: Path, entries: Sequence[Entry], args: argparse.Namespace) -> int:
    from trainyard.train import checkpoint

    if args.out is None:
        raise UserError(f"Name the file to write: trainyard ckpt export {args.run} model.safetensors")
    if args.step is None:
        chosen, problem = checkpoint.choose_undamaged(run / "checkpoints")
        if problem:
            logger.warning("{}: {}.", run, problem)
    elif args.step in (steps := [entry.step for entry in entries]):
        chosen = entries[steps.index(args.step)]
    else:
        raise UserError(f"{run}: no checkpoint of step {args.step}. There are: {', '.join(map(str, steps))}.")
    print(f"step {chosen.step} -> {checkpoint.export(chosen.path, args.out)}")
    return 0


def _add_report(verbs: Verbs) -> None:
    verb = add_verb(verbs, "report", _write_report, "write a run's report: one HTML page and its plots")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")


def _write_report(args: argparse.Namespace) -> int:
    from trainyard.report.run_page import format_summary, write_report

    run = runs.resolve_run(args.run, args.runs)
    report = write_report(run)
    print(format_summary(run, next_commands=[f"open {report}"]))
    return 0


def _add_predict(verbs: Verbs) -> None:
    verb = add_verb(verbs, "predict", _predict, "write a run's predictions for new raw files to a CSV file")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb.add_argument("raw", type=Path, help="new raw files of the job, unlabelled")
    verb.add_argument("out", type=Path, help="CSV file to write")
    add_trust_option(verb)


def _predict(args: argparse.Namespace) -> int:
    from trainyard.tools.predict import predict

    run = runs.resolve_run(args.run, args.runs)
    if args.jobs.resolve().is_relative_to(run.resolve()):  # typed there: ./jobs is the run's
        cluster.require_trust([run], args, here=True)
    count = predict(run, args.raw, args.out, args.jobs)
    print(f"{count:,} predictions are in {args.out}")
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
