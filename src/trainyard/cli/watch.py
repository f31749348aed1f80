"""The commands for runs that exist: status, runs, logs, why and cancel. They load little, to answer quickly."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainyard.cli.verb import Verbs, add_verb
from trainyard.cluster.query import query_usage
from trainyard.errors import UserError
from trainyard.launch import cancel
from trainyard.runs import folder as runs
from trainyard.runs import logs, status, sweep_file
from trainyard.terminal import say
from trainyard.text import quote_path

_WATCH_S = 30


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "status", _print_status, "list runs that wait, run or ended recently")
    verb.add_argument("run", nargs="*", help="runs, jobs or sweeps; default: the 20 newest runs")
    verb.add_argument("--used", action="store_true", help="resources that they requested of Slurm, and used")
    verb = add_verb(verbs, "runs", _list_runs, "list all runs")
    verb.add_argument("job", nargs="?", help="only runs of this job")
    verb.set_defaults(composes=False)  # its runs may be of families that are nowhere here
    verb = add_verb(verbs, "board", _write_board, "write one page with all runs: state, metric, loss, goodput")
    verb.add_argument("--watch", action="store_true", help=f"write it again each {_WATCH_S} s while a run is active")
    verb = add_verb(verbs, "logs", _print_logs, "print a run's log")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb.add_argument("-f", "--follow", action="store_true", help="keep printing until the run ends")
    verb = add_verb(verbs, "why", _explain, "explain why a run waits, stopped or failed, and print the next command")
    verb.add_argument("run", help="its folder, or a job for that job's newest run")
    verb = add_verb(verbs, "cancel", _cancel, "stop runs; they can be resumed")
    verb.add_argument("run", nargs="+", help="runs, jobs or sweeps")


def _print_status(args: argparse.Namespace) -> int:
    folders = _resolve_names(args.run, args.runs) if args.run else runs.list_newest_runs(args.runs, 20)
    if args.used:
        known = [s for s in status.read_statuses(folders)[0] if s.slurm_job_id]
        if not known:
            raise UserError("None of these runs is in Slurm, which counts a job's usage.")
        say(status.render_usage(known, query_usage(s.slurm_job_id for s in known)))
        return 0
    return _print_runs(folders, args.runs, status.render_table if len(folders) <= 20 else status.render_overview)


def _list_runs(args: argparse.Namespace) -> int:
    if args.job:
        runs.find_latest_run(args.runs, args.job)  # raises with the jobs that have runs, if this one has none
    return _print_runs(runs.list_newest_runs(args.runs, None, job=args.job), args.runs, status.render_table)


def _print_runs(paths: Sequence[Path], root: Path, render_runs: Callable[[Sequence[status.Status], float], str]) -> int:
    if not paths:
        say(f"{root.absolute()}: no runs yet.\nnext: trainyard run JOB, or submit JOB (trainyard jobs lists them)")
        return 0
    known, note = status.read_statuses(paths)
    say(render_runs(known, time.time()))
    if note:
        say(note, file=sys.stderr)
    return 0


def _write_board(args: argparse.Namespace) -> int:
    from trainyard.report.board import write_board

    while True:
        page, active = write_board(args.runs)
        say(f"{page.absolute()}: written, {active} runs are active", flush=True)
        if not (args.watch and active):
            say(f"next: open {quote_path(page)}" if not active or args.watch else "next: trainyard board --watch")
            return 0
        time.sleep(_WATCH_S)


def _print_logs(args: argparse.Namespace) -> int:
    print_log = logs.follow if args.follow else logs.show
    print_log(runs.resolve_run(args.run, args.runs), lambda line: say(line, flush=True))
    return 0


def _explain(args: argparse.Namespace) -> int:
    from trainyard.runs.why import explain_run  # reads YAML

    say(explain_run(runs.resolve_run(args.run, args.runs)))
    return 0


def _cancel(args: argparse.Namespace) -> int:
    say("\n".join(cancel.cancel(_resolve_names(args.run, args.runs))))
    return 0


def _resolve_names(names: Sequence[str], root: Path) -> list[Path]:
    """Return the runs with these names; the name of a sweep means all of its runs."""
    folders: list[Path] = []
    for name in names:
        if sweep_file.exists(name, root.absolute()):
            folders += [element.run for element in sweep_file.load(name, root.absolute()).elements]
        else:
            folders.append(runs.resolve_run(name, root))
    return folders
