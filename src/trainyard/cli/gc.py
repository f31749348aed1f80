"""`trainyard gc`: what takes disk space, and deleting what a person names."""

import argparse
import os
from pathlib import Path

from trainyard.cli.verb import Verbs, add_verb


def add_commands(verbs: Verbs) -> None:
    """Add the one command."""
    verb = add_verb(verbs, "gc", _gc, "show what takes disk space and who needs it; delete what is named")
    mine = "folder of packed data that is yours alone (default: data); repeatable"
    verb.add_argument("--data", type=Path, action="append", default=[], metavar="DIR", help=mine)
    named = "delete this item of the list; repeatable; 'unneeded': all that nobody needs"
    verb.add_argument("--delete", action="append", default=[], metavar="NAME", help=named)
    verb.add_argument("--force", action="store_true", help="also what a run still needs")


def _gc(args: argparse.Namespace) -> int:
    from trainyard.tools import gc

    usages = gc.list_usage(args.runs, data_dirs=args.data or [Path("data")], environ=os.environ)
    if not args.delete:
        print(gc.format_usage(usages))
        return 0
    freed = gc.delete_usage(gc.select_usage(usages, args.delete, force=args.force), print)
    print(f"{gc.format_bytes(freed)} freed")
    return 0
