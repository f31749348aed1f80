"""`trainyard gc`: what takes disk space, and deleting what a person names."""

import argparse
import os
from pathlib import Path

from trainyard.cli.verb import CHECKOUT, Verbs, add_verb


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

    data = args.data or [Path("data")]
    items = gc.find_items(args.runs, data_dirs=data, images=CHECKOUT / "images", environ=os.environ, tell=print)
    if not args.delete:
        print(gc.format_items(items))
        return 0
    freed = gc.delete_items(gc.select_items(items, args.delete, force=args.force), print)
    print(f"{gc.format_bytes(freed)} freed")
    return 0
