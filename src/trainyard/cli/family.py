"""The commands for writing a family: new and check-family."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from loguru import logger

from trainyard.cli.verb import Verbs, add_verb
from trainyard.config.families import format_families, list_roots
from trainyard.errors import INTERFACE
from trainyard.terminal import say
from trainyard.tools.new_family import create_family, list_templates


def add_commands(verbs: Verbs) -> None:
    verb = add_verb(verbs, "new", _create, "write a family, which trains on a folder at once")
    verb.add_argument("family", help="its name, such as birds")
    verb.add_argument("--like", choices=list_templates(), default="images", help="kind of its samples; default: images")
    verb.set_defaults(jobs=Path("jobs"))
    verb = add_verb(
        verbs, "check-family", _check, "check that a family does what training relies on, in a minute or two"
    )
    verb.add_argument("family", help="its name or its folder, such as jobs/birds")


def _create(args: argparse.Namespace) -> int:
    folder = create_family(args.jobs, args.family, args.like)
    jobs = "" if args.jobs == Path("jobs") else f" --jobs {shlex.quote(str(args.jobs))}"
    say(f"{folder}: {list_templates()[args.like]}")
    say(f"next: trainyard check-family {args.family}{jobs}")
    say(f"      trainyard run {args.family} data.path=FOLDER{jobs}")
    say(f"the interface of a family, required and optional: {INTERFACE}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from trainyard.tools.check_family import check_family

    logger.remove()
    logger.add(sys.stderr, format="{message}", level="WARNING")
    path = Path(args.family)
    usual = [args.jobs] if args.typed_jobs else [root for root in list_roots() if (root / args.family).is_dir()]
    jobs, name = (path.parent, path.name) if len(path.parts) > 1 else ((usual or [args.jobs])[0], args.family)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for result in check_family(jobs, name, Path(scratch)):
            say(f"{'ok    ' if result.passed else 'FAILED'}  {result.name}", flush=True)
            if not result.passed:
                failed += 1
                say(f"        {result.failure}", flush=True)
    if failed:
        say(f"{name}: {failed} failed. The contract of a family: {INTERFACE}")
        return 1
    say(f"{name} meets the contract.\nnext: trainyard run {name} data.path=FOLDER{format_families(name, jobs)}")
    return 0
