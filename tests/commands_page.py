"""Writes two pages from the program, which a test compares.

docs/commands.md, from the parsers: `python -m tests.commands_page > docs/commands.md`; and docs/options.txt, the list
of options that are frozen at 1.0: `python -m tests.commands_page options > docs/options.txt`.
"""

import argparse
import sys

from tests.checkout import ROOT
from trainyard.cli import build_whole_parser
from trainyard.config.compose import compose, list_options

COMMON = ("-h", "--jobs", "--runs")

HEAD = """\
# Commands

Written from the program by `python -m tests.commands_page > docs/commands.md`. A run is named by its folder, by a job
(for that job's newest run), or by the beginning of a run's name. Every command takes `--help`, `--jobs DIR` (folder of
families) and `--runs DIR` (folder of runs). The common ones are also targets of make: `make help`."""


def build_page() -> str:
    """Return the page: a table of the commands, then each with its arguments."""
    _, verbs = build_whole_parser()
    helps = {action.dest: action.help or "" for action in verbs._choices_actions}
    table = [f"| [`{name}`](#{name}) | {helps[name]} |" for name in verbs.choices]
    parts = [HEAD, "\n".join(["| command | does |", "|---|---|", *table])]
    for name, verb in verbs.choices.items():
        arguments = [action for action in verb._actions if not set(action.option_strings) & set(COMMON)]
        required = [_format_name(action) for action in arguments if not action.option_strings]
        lines = [f"| `{_format_name(action)}` | {_format_help(action)} |" for action in arguments]
        table = ["| argument | meaning |", "|---|---|", *lines] if lines else []
        parts += [f"## {name}", f"{helps[name]}:", "    " + " ".join(["trainyard", name, *required])]
        parts += ["\n".join(table)] if table else []
    return "\n\n".join(parts) + "\n"


def _format_name(action: argparse.Action) -> str:
    values = " or ".join(map(str, action.choices)) if action.choices else action.metavar or action.dest.upper()
    value = "" if action.nargs == 0 else str(values)
    if not action.option_strings:
        return {"*": f"[{value} ...]", "+": f"{value} ...", "?": f"[{value}]"}.get(str(action.nargs), value)
    return " ".join(filter(None, [action.option_strings[-1], value, "..." if action.nargs in ("+", "*") else ""]))


def _format_help(action: argparse.Action) -> str:
    return ((action.help or "") % {**vars(action)}).replace("|", "\\|")


def build_options() -> str:
    """Return the options with their defaults and choices: those that all families share, then each family's."""
    families = sorted(path.parent.name for path in (ROOT / "jobs").glob("*/config.py"))
    listed = {
        family: [
            f"{option.name}={option.value} {' | '.join(option.choices)}".rstrip()
            for option in list_options(compose(family, (), ROOT / "jobs"))
            if option.name not in ("job", "family")
        ]
        for family in families
    }
    shared = [line for line in listed[families[0]] if all(line in lines for lines in listed.values())]
    sections = {"all": shared} | {name: [line for line in listed[name] if line not in shared] for name in families}
    return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"


if __name__ == "__main__":
    print(build_options() if sys.argv[1:] == ["options"] else build_page(), end="")
