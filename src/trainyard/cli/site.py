"""The commands for a site: cluster-check, and gc, which lists disk usage and deletes the named items."""

import argparse
import os
import shlex
from pathlib import Path

from trainyard.cli.verb import Verbs, add_verb, find_project_folder
from trainyard.cluster import query as slurm
from trainyard.cluster.check import check_cluster, render_findings
from trainyard.cluster.description import find_cluster
from trainyard.errors import UserError
from trainyard.terminal import say


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "cluster-check", _check_cluster, "compare a cluster file with the Slurm it describes")
    verb.add_argument("cluster", nargs="?", default="", help="slurm/NAME.yaml, or a path; default: by Slurm's name")
    verb = add_verb(verbs, "gc", _gc, "list disk usage and the runs that need it; delete the named items")
    mine = "cache of packed data, as data.cache of your runs names it (default: data); repeatable"
    verb.add_argument("--data", type=Path, action="append", default=[], metavar="DIR", help=mine)
    named = "delete this item of the list; repeatable; 'unneeded': all that nobody needs and a run can make again"
    verb.add_argument("--delete", action="append", default=[], metavar="NAME", help=named)
    verb.add_argument("--force", action="store_true", help="also items that a run still needs")


def _check_cluster(args: argparse.Namespace) -> int:
    absent = slurm.explain_absence()
    if absent:
        raise UserError(f"{absent} Check the file on a machine that can submit to that Slurm.")
    cluster = find_cluster(args.cluster, find_project_folder("slurm"), slurm.query_cluster_name())
    findings = check_cluster(cluster)
    say(render_findings(findings))
    return 1 if any(finding.level == "wrong" for finding in findings) else 0


def _gc(args: argparse.Namespace) -> int:
    from trainyard.tools import gc

    if missing := next((folder for folder in args.data if not folder.is_dir()), None):
        raise UserError(f"--data {missing}: no such folder. Name a cache, as data.cache of your runs does.")
    usages = gc.list_usage(args.runs, data_dirs=args.data or [Path("data")], environ=os.environ)
    typed = [] if args.runs == Path("runs") else ["--runs", str(args.runs)]
    command = shlex.join(["trainyard", "gc", *typed, *(f"--data={folder}" for folder in args.data)])
    if not args.delete:
        say(gc.format_usage(usages, command))
        return 0
    chosen = gc.select_usage(usages, args.delete, force=args.force, command=command)
    say(f"{gc.format_bytes(gc.delete_usage(chosen, say))} freed")
    return 0
