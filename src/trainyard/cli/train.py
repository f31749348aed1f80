"""Commands that train on this machine: run, resume, and rank, which these two start."""

import argparse
import os
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from trainyard.cli import dry, submission
from trainyard.cli.choices import add_synthetic_option, find_start, list_sections
from trainyard.cli.extension import LENGTH, Extension, plan_extension, record_extension
from trainyard.cli.request import add_plan_option, add_resource_args, recall_families, require_idle, require_trust
from trainyard.cli.verb import Verbs, add_dry_option, add_trust_option, add_verb
from trainyard.config import compose as configs
from trainyard.config.families import Root, format_families
from trainyard.config.settings import TrainConfig
from trainyard.errors import UserError
from trainyard.files import restrict_umask
from trainyard.hardware import choose_sync_batchnorm, show_own_mig_slice
from trainyard.launch import submit
from trainyard.plan.choose_data import DataChoice, choose_data, require_chosen_data
from trainyard.runs import changes
from trainyard.runs import folder as runs
from trainyard.runs.create import Origin, create_run
from trainyard.runs.history import read_run
from trainyard.runs.lock import RunLock
from trainyard.runs.state import Cause, ExitCode
from trainyard.runs.submission import read_submission
from trainyard.terminal import say
from trainyard.text import quote_path
from trainyard.train.trackers import require_trackers
from trainyard.train.world import find_idle_nodes, read_world


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "run", _run, "train a job here: on one GPU, several, or the CPU")
    verb.add_argument("job", help="preset, such as fingerprint_demo: trainyard jobs")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="trainyard options JOB lists them")
    verb.add_argument("--name", help="name of the run's folder; the same name again resumes that run")
    add_synthetic_option(verb)
    verb.add_argument("--gpus", type=int, default=0, metavar="N", help="processes, one per GPU")
    verb.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="processes that share the cores")
    verb.add_argument("--break-lock", action="store_true", help="take over a run whose host is known to be dead")
    add_trust_option(verb)
    add_dry_option(verb)
    verb = add_verb(verbs, "resume", _resume, "resume a run from its newest valid checkpoint")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    mutable = "options that do not change the mathematics, and a larger max_duration, which extends the run"
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help=mutable)
    inexact = "extend it even if it then differs from a run that was planned so"
    verb.add_argument("--inexact", action="store_true", help=inexact)
    verb.add_argument("--here", action="store_true", help="on this machine, even if it was submitted to a cluster")
    verb.add_argument("--update-code", action="store_true", help="submitted run: use today's code, not its own copy")
    verb.add_argument("--cpu-ranks", type=int, default=0, metavar="N", help="here: processes that share the cores")
    verb.add_argument("--break-lock", action="store_true", help="take over a run whose host is known to be dead")
    add_trust_option(verb)
    changed = "files that changed since the run wrote them: restore or accept"
    verb.add_argument("--changed-files", choices=("restore", "accept"), help=changed)
    add_resource_args(verb, gpus=0)
    add_plan_option(verb)
    verb = add_verb(verbs, "rank", _run_rank, "train as one rank of a run (started by run and resume)")
    verb.add_argument("run", type=Path)
    verb.add_argument("--break-lock", action="store_true")
    verb.add_argument("--since", type=float, required=True)


def _run(args: argparse.Namespace) -> int:
    from trainyard.data.prepare import prepare_data

    runs.check_name(args.name, of="run")
    run = args.runs / args.job / args.name if args.name else None
    if run is not None and (run / runs.CONFIG).is_file():
        require_trust([run], args, here=True)
    is_new = run is None or not (run / runs.CONFIG).is_file()
    config = find_start(configs.compose(args.job, args.overrides, args.jobs), args.runs, needed=is_new)
    count = _count_ranks(args)
    _refuse_impossible(config, count)
    if args.dry:
        return _print_run(run or args.runs / args.job / dry.NEW, _choose_data(config, args).config, args, count)
    if run is None and (_is_launched() or not _is_main()):
        raise UserError("Under torchrun or srun a new run needs --name NAME, so that all ranks use the same folder.")
    if run is not None and not _is_main():  # started by torchrun or srun: rank 0 packs and creates the folder
        while not (run / runs.CONFIG).is_file():
            time.sleep(0.2)
        return _train(run, args, count)
    data = _choose_data(config, args)
    config = prepare_data(data.config, args.jobs)
    if run is not None and (run / runs.CONFIG).is_file():
        with restrict_umask(), RunLock(run, break_other_host=args.break_lock):
            changes.check_unchanged(run)
            _apply_changes(run, configs.load_config(run / runs.CONFIG, args.jobs), config)
    else:
        sections = list_sections(data, Root(args.jobs, args.why_jobs))
        run = create_run(args.runs, config, name=args.name, origin=Origin.collect(os.environ), chosen=sections)
        try:
            return _train(run, args, count)
        finally:
            if not _is_launched():
                _discard_refused_run(run)
    return _train(run, args, count)


def _discard_refused_run(run: Path) -> None:
    """Delete a new run that was refused before it began, for its options or its data: nothing of it can be resumed."""
    snapshot = read_run(run)
    if not snapshot.events and any(error.cause == Cause.USER_ERROR for error in snapshot.errors):
        shutil.rmtree(run)


def _choose_data(config: TrainConfig, args: argparse.Namespace) -> DataChoice:
    data = choose_data(
        config,
        overrides=args.overrides,
        wants_synthetic=args.synthetic,
        cluster=None,
        jobs_dir=args.jobs,
        environ=os.environ,
    )
    require_chosen_data(data, jobs_dir=args.jobs, typed=args.typed)
    return data


def _print_run(run: Path, config: TrainConfig, args: argparse.Namespace, count: int) -> int:
    if (run / runs.CONFIG).is_file():
        changes.check_unchanged(run)
        old = configs.load_config(run / runs.CONFIG, args.jobs)
        config = replace(config, data=replace(config.data, path=old.data.path))  # packing would name the folder
        _apply_changes(run, old, config, write=False)
    return dry.print_run(run, config, args.jobs, ranks=count)


def _resume(args: argparse.Namespace) -> int:
    run = runs.resolve_run(args.run, args.runs)
    require_trust([run], args, here=args.here)
    submitted = (run / runs.SUBMISSION).is_file() and not args.here
    if submitted:
        read_submission(run)  # raises if it is damaged
        ended = require_idle(run)
    count = 1 if submitted else _count_ranks(args)
    if args.dry:
        if not args.changed_files:
            changes.check_unchanged(run)
        recall_families(run, args)
        config = configs.load_config(run / runs.CONFIG, args.jobs)
        new = configs.apply_overrides(config, args.overrides)
        extension = plan_extension(run, config, new, args.jobs, allow_inexact=args.inexact)
        _apply_changes(run, config, new, extension, write=False)
        return (
            submission.resubmit(run.absolute(), args) if submitted else dry.print_run(run, new, args.jobs, ranks=count)
        )
    if submitted:
        submit.settle_end(ended)
    if _is_main():
        with restrict_umask(), RunLock(run, break_other_host=args.break_lock):
            _settle_changed_files(run, args.changed_files)
            recall_families(run, args)
            config = configs.load_config(run / runs.CONFIG, args.jobs)
            changed = configs.apply_overrides(config, args.overrides)
            _refuse_impossible(changed, count)
            extension = plan_extension(run, config, changed, args.jobs, allow_inexact=args.inexact)
            _apply_changes(run, config, changed, extension)
    return submission.resubmit(run.absolute(), args) if submitted else _train(run, args, count)


def _settle_changed_files(run: Path, wanted: str | None) -> None:
    if wanted:
        for change in (each for each in changes.find_changes(run) if not each.can_resume):
            logger.warning("{}: {} {}ed", change.path, change.problem, wanted.removesuffix("e"))
    if wanted == "restore":
        changes.restore_files(run)
    elif wanted == "accept":
        changes.accept_changes(run)
    changes.check_unchanged(run)


def _run_rank(args: argparse.Namespace) -> int:
    from trainyard.node.rank_task import execute

    return execute(args.run, args.jobs, environ=os.environ, started=args.since, break_lock=args.break_lock)


def _train(run: Path, args: argparse.Namespace, count: int) -> int:
    """Train in this process, or in several child processes; then print the outcome and the next command."""
    from trainyard.report.board import update_board

    try:
        code = _run_ranks(run, args, count)
        if _is_main():
            _print_outcome(run, code, args)
    except Exception as error:
        if not isinstance(error, UserError):
            error.add_note(_name_why(run))
        raise
    finally:
        if _is_main():
            update_board(run)
    return code


def _run_ranks(run: Path, args: argparse.Namespace, count: int) -> int:
    from trainyard.node.rank_task import execute
    from trainyard.node.ranks import train_on_ranks

    how: dict[str, Any] = {"environ": os.environ, "started": args.started, "break_lock": args.break_lock}
    if count > 1:
        return train_on_ranks(run, args.jobs, count, **how)
    show_own_mig_slice(os.environ, read_world(os.environ).local_rank)
    return execute(run, args.jobs, **how)


def _print_outcome(run: Path, code: int, args: argparse.Namespace) -> None:
    from trainyard.report.run_page import format_summary, update_report
    from trainyard.train.stop import EXIT_CODES

    if code == ExitCode.DONE:
        job = run.parent.name
        report, options = update_report(run), f"trainyard options {job}{format_families(job, args.jobs)}"
        next_commands = [f"open {quote_path(report)}"] if report is not None else []
        next_commands += [f"trainyard export {quote_path(run)} {job}.safetensors", options]
        say(format_summary(run, next_commands=next_commands))
    elif code in EXIT_CODES.values():
        say(f"Stopped and saved. Resume: trainyard resume {quote_path(run)}", file=sys.stderr)
    else:
        say(f"Failed with code {code}. {_name_why(run)}", file=sys.stderr)


def _name_why(run: Path) -> str:
    return f"Why: trainyard why {quote_path(run)}. Resume: trainyard resume {quote_path(run)}"


def _apply_changes(
    run: Path, old: TrainConfig, new: TrainConfig, extension: Extension | None = None, *, write: bool = True
) -> None:
    """Name changed options and write them to the run's config, if a run in progress may change them."""
    changed = configs.find_differences(old, new)
    fixed = [d for d in changed if not d.mutable and not (extension is not None and d.name == LENGTH)]
    if [d.name for d in fixed] == [LENGTH]:
        raise UserError(
            f"{run}: exists, with max_duration={old.max_duration}. To extend it: trainyard resume {quote_path(run)} "
            f"max_duration={new.max_duration}; or start a new run under another name."
        )
    if fixed:
        lines = "".join(f"\n  {d.name}: {d.old} -> {d.new}" for d in fixed)
        raise UserError(
            f"{run}: a run in progress keeps these options, but they differ:{lines}\n"
            f"Resume it unchanged (trainyard resume {quote_path(run)}), or start a new run under another name."
        )
    for d in changed:
        logger.info("{}: {} -> {}", d.name, d.old, d.new)
    if changed and write:
        if extension is not None:
            record_extension(run, extension, new)
        configs.save_config(new, run / runs.CONFIG)


def _count_ranks(args: argparse.Namespace) -> int:
    _refuse_idle_nodes(args)
    if not args.gpus:
        return 1 if args.cpu_ranks < 1 else int(args.cpu_ranks)
    if _is_launched():
        raise UserError("--gpus inside torchrun or srun, which start the ranks themselves. Leave it out.")
    import torch

    wanted: int = args.gpus
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted > visible:
        raise UserError(
            f"{wanted} GPUs requested, but this machine has {visible}. "
            + (f"Use --gpus {visible}." if visible else "Leave --gpus (GPUS=) out to train on the CPU.")
        )
    return wanted


def _refuse_idle_nodes(args: argparse.Namespace) -> None:
    """Refuse to train in a shell of salloc, which is not on its nodes; print the command that trains there."""
    if nodes := find_idle_nodes(os.environ):
        has_tasks = "SLURM_NTASKS" in os.environ  # salloc -n 4: a rank each
        start = ["srun"] if has_tasks else ["srun", "--nodes=1", "--ntasks=1"]
        name = ["--name", "NAME"] if has_tasks and getattr(args, "name", "") is None else []
        raise UserError(
            f"This shell has reserved {nodes}, but is not there: the run would train here while {nodes} waits. To "
            f"train there: {shlex.join([*start, 'trainyard', *args.typed, *name])}"
        )


def _refuse_impossible(config: TrainConfig, count: int) -> None:
    """Refuse early: each rank would refuse this only after the data were packed and the run was created."""
    require_trackers(config.trackers)
    world_size = read_world(os.environ).world_size if _is_launched() else count
    if config.sync_batchnorm and world_size > 1:
        import torch

        choose_sync_batchnorm(True, device_type="cuda" if torch.cuda.is_available() else "cpu", world_size=world_size)


def _is_launched() -> bool:
    return "RANK" in os.environ or read_world(os.environ).world_size > 1


def _is_main() -> bool:
    return read_world(os.environ).is_main
