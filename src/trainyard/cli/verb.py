"""Arguments that all commands share: a name, a one-line help text, and the folders of jobs and runs."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from trainyard.config.families import list_roots
from trainyard.text import suggest_nearest

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CHECKOUT = Path(__file__).resolve().parents[3]


OTHER_WORDS = {  # what other tools call our commands
    "train": "run",
    "start": "run",
    "test": "evaluate",
    "eval": "evaluate",
    "infer": "predict",
    "list": "jobs",
    "ls": "runs",
    "stop": "cancel",
    "kill": "cancel",
    "log": "logs",
}


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with the nearest valid value and where the rest is; argparse prints usage first."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"(argument .*: invalid choice: '(.*?)') \(choose from (.*)\)$", message)
        if wrong:
            choices = re.findall(r"[\w-]+", wrong[3])
            meant = OTHER_WORDS.get(wrong[2], "")
            hint = f" Nearest: {meant}." if meant in choices else suggest_nearest(wrong[2], choices)
            message = f"{wrong[1]}.{hint}"
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. All of them: {self.prog} --help\n")


def add_verb(
    verbs: Verbs, name: str, command: Callable[[argparse.Namespace], int], doc: str
) -> argparse.ArgumentParser:
    """Add one command."""
    verb = verbs.add_parser(name, help=doc, description=doc, allow_abbrev=False)
    verb.set_defaults(command=command)
    verb.add_argument(
        "--jobs",
        type=Path,
        metavar="DIR",
        help="folder of families; default: ./jobs and Trainyard's own, and for a run the one it was started with",
    )
    verb.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs")
    return verb


def choose_families(args: argparse.Namespace) -> None:
    """Settle the folder of families that a command uses, and why: the typed one, or the first that has the job.

    A command about a run asks `recall_families` as well.
    """
    args.typed_jobs = args.jobs is not None
    if args.typed_jobs:
        args.why_jobs = "--jobs"
    elif getattr(args, "job", "") and getattr(args, "composes", True):  # `plan --all` and `sweep --continue` have none
        from trainyard.config.families import choose_root

        args.jobs, args.why_jobs = choose_root(args.job)
    else:
        args.jobs, args.why_jobs = list_roots()[0], ""


def add_trust_option(verb: argparse.ArgumentParser) -> None:
    """Add the flag for run folders that others own or can change: `runs.trust`."""
    verb.add_argument(
        "--trust", action="store_true", help="use a folder that others own or can change: its code runs as you"
    )


def add_dry_option(verb: argparse.ArgumentParser) -> None:
    """Add the flag of every command that starts training or a Slurm job."""
    verb.add_argument("--dry", action="store_true", help="print what would start, and start nothing")


def find_project_folder(name: str) -> Path:
    """Return ./NAME if it exists, else that folder of the installed checkout; an installed wheel has none: ./NAME."""
    local, installed = Path(name), CHECKOUT / name
    return installed if installed.is_dir() and not local.is_dir() else local
