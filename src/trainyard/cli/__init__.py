"""The command line: parses the arguments, calls the code that does the work, and prints the next command."""

import argparse
import importlib
import itertools
import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from loguru import logger

from trainyard import __version__
from trainyard.cli.verb import Parser, Verbs, choose_families
from trainyard.config.families import list_roots
from trainyard.errors import UserError, explain_address_limit, format_failure, list_family_frames
from trainyard.files import report_full_disk
from trainyard.hardware import set_openmp_wait_policy
from trainyard.runs.state import ExitCode, choose_exit_code
from trainyard.terminal import make_log_printable, say
from trainyard.text import find_nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 2 user error, 72 disk failed, 74 full, 85-87 stopped, resumable.

    141, as a shell calls a process that SIGPIPE ended: whoever read the output has closed it, as `head` does.
    """
    try:
        try:
            code = _run_command(argv)
        except SystemExit:  # after --help
            say(end="", flush=True)
            raise
        say(end="", flush=True)
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
    """Return whether a stream is a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _run_command(argv: Sequence[str] | None) -> int:
    started = time.time()
    set_openmp_wait_policy(os.environ)
    make_log_printable()
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="INFO")  # a command's messages are nothing but their text
    typed = _join_lists(sys.argv[1:] if argv is None else argv)
    arguments = _parse_arguments(typed)
    arguments.started = started
    arguments.typed = typed
    try:
        with report_full_disk(Path.cwd()):
            if hasattr(arguments, "jobs"):  # the families' own commands have no such flag
                choose_families(arguments)
            code: int = arguments.command(arguments)
        return code
    except UserError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return choose_exit_code(error)
    except Exception as error:
        if isinstance(error, BrokenPipeError) or not (list_family_frames(error) or explain_address_limit(error)):
            raise
        say(format_failure(error), file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        say("Interrupted. No file is half-written; the same command continues where this one stopped.", file=sys.stderr)
        return 130


_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")


def _join_lists(words: Sequence[str]) -> list[str]:
    """Join the words of each list: a=[1, 2] are two to a shell, and in SET of make; not of one without an end."""
    joined: list[str] = []
    rest = list(words)
    while rest:
        count = 1
        if re.match(r"[\w.]+=\[", rest[0]):
            texts = itertools.accumulate(rest, "{} {}".format)
            unquoted = (_QUOTED.sub("", text) for text in texts)
            count = next((n for n, text in enumerate(unquoted, 1) if text.count("[") <= text.count("]")), 1)
        joined.append(" ".join(rest[:count]))
        del rest[:count]
    return joined


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; OPTION=VALUE may come anywhere, also after --flags, where argparse does not look for it."""
    parser, verbs = _build_parser(argv)
    arguments, rest = parser.parse_known_args(argv)
    unrecognized = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unrecognized:
        _exit_with_unknown_words(verbs.choices[arguments.verb], unrecognized)
    if rest:
        arguments.overrides += rest
    return arguments


def _exit_with_unknown_words(verb: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Exit with one line about words that a command does not know, and the flags of it that come nearest."""
    flags = re.findall(r"(?<![\w-])--?\w[\w-]*", verb.format_usage())
    near = dict.fromkeys(flag for word in words for flag in find_nearest(word.partition("=")[0], flags))
    hint = f" Nearest: {', '.join(near)}." if near else ""
    verb.error(f"unrecognized arguments: {' '.join(words)}.{hint}")


COMMANDS = (
    ("train", "run resume rank"),
    ("listing", "jobs options completion"),
    ("local", "pack verify ckpt report"),
    ("use", "evaluate predict embed compare search"),
    ("export", "export"),
    ("submission", "submit"),
    ("shell", "shell"),
    ("plan", "plan"),
    ("sweep", "sweep results multirun"),
    ("measure", "doctor ablate"),
    ("watch", "status runs board logs why cancel"),
    ("site", "cluster-check gc"),
    ("family", "new check-family"),
)
"""Modules and the names of their commands, in the order of --help. Modules of other commands are not
imported: all modules together take longer than a status."""


def build_whole_parser() -> tuple[argparse.ArgumentParser, Verbs]:
    """Return the parser with all commands, and the commands by name."""
    return _build_parser([])


def _build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, Verbs]:
    parser: argparse.ArgumentParser = Parser(
        prog="trainyard",
        allow_abbrev=False,
        description="Train on whatever GPUs are available, and resume exactly.",
        epilog="Options of a job are written name=value, such as optimizer.lr=1e-4. List them: trainyard options JOB",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", dest="verb")
    typed = [entry for entry in COMMANDS if argv[:1] and argv[0] in entry[1].split()]
    for module, _ in typed or COMMANDS:
        importlib.import_module(f"trainyard.cli.{module}").add_commands(verbs)
    if not set(argv) & set(verbs.choices):
        _add_family_commands(verbs)
    return parser, verbs


def _add_family_commands(verbs: Verbs) -> None:
    """Add the families' own commands, from `jobs/<family>/commands.py`; only if none of the built-in ones was typed."""
    from trainyard.config.families import load_family

    families: dict[str, Path] = {}
    for root in list_roots():
        for path in sorted(root.glob("[!._]*/commands.py")):
            families.setdefault(path.parent.name, root)
    for family, root in families.items():
        try:
            load_family(root, family, "commands").add(verbs)
        except Exception as error:  # somebody's code: whatever is wrong with it, the other commands work
            what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            say(f"{root / family / 'commands.py'}: its commands are left out: {what}", file=sys.stderr)
