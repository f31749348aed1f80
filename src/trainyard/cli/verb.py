"""What every command has: a name, one line about it, and where jobs and runs lie."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CHECKOUT = Path(__file__).resolve().parents[3]


def add_verb(
    verbs: Verbs, name: str, command: Callable[[argparse.Namespace], int], doc: str
) -> argparse.ArgumentParser:
    """Add one command."""
    verb = verbs.add_parser(name, help=doc, description=doc)
    verb.set_defaults(command=command)
    verb.add_argument("--jobs", type=Path, default=beside_checkout("jobs"), metavar="DIR", help="folder of families")
    verb.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs")
    return verb


def beside_checkout(name: str) -> Path:
    """Return ./NAME, or the one beside the installed checkout."""
    here = Path(name)
    return here if here.is_dir() else CHECKOUT / name
