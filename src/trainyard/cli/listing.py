"""The commands that list jobs and options, and print shell completion: jobs, options, completion."""

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.cli.verb import Verbs, add_verb
from trainyard.config import compose as configs
from trainyard.config.compose import SCHEMA
from trainyard.config.families import find_jobs, find_own_families, list_roots
from trainyard.config.settings import NeedsSettings
from trainyard.config.yaml_text import load_yaml
from trainyard.environment import count_visible_gpus, list_gpus
from trainyard.errors import UserError
from trainyard.plan.choose_gpu import read_needed_gib
from trainyard.terminal import say
from trainyard.text import cut

WIDTH = 99
AT_ONCE, WITH_DATA, BROKEN = "at once", "your data", "broken"

COMPLETION_FILES = {
    "bash": "~/.local/share/bash-completion/completions/trainyard",
    "zsh": "a folder of $fpath, under the name _trainyard",
}
"""Where a shell looks for the completion of a command."""

_PREAMBLES = {
    "bash": """
_trainyard_jobs() {
  local file
  compgen -W "$(for file in jobs/[!._]*/*.yaml @OWN@/[!._]*/*.yaml; do
    [ ! -e "$file" ] || { file=${file##*/}; echo "${file%.yaml}"; }; done | sort -u)" -- "$1"
}
_trainyard_runs() { compgen -d -- "$1"; _trainyard_jobs "$1"; }
""",
    "zsh": """
_trainyard_jobs() { compadd -- {jobs,@OWN@}/[^._]*/*.yaml(N:t:r) }
_trainyard_runs() { _files -/; _trainyard_jobs }
""",
}
"""Functions that complete the names of jobs, from ./jobs and from Trainyard's own families (@OWN@, quoted), and of
runs: a folder, or a job for its newest run."""

SHARE_LEFT = 0.9
"""Of a card's nominal memory: ECC and the driver take up to 8 %."""


def add_commands(verbs: Verbs) -> None:
    add_verb(verbs, "jobs", _list_jobs, "list the jobs you can run, and what runs here")
    verb = add_verb(verbs, "options", _list_options, "list a job's options, with values and meaning")
    verb.add_argument("job")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    doc = "print what makes a shell complete commands, flags, jobs and runs; how to use it is its first line"
    verb = add_verb(verbs, "completion", _print_completion, doc)
    verb.add_argument("shell", choices=tuple(COMPLETION_FILES))


def _list_jobs(args: argparse.Namespace) -> int:
    roots = [args.jobs] if args.typed_jobs else list_roots()
    by_root = {root: find_jobs(root) for root in roots}
    if not any(by_root.values()):
        raise UserError(
            f"{args.jobs}: contains no preset (<family>/<preset>.yaml). Name the folder of jobs: --jobs DIR."
        )
    gpus = list_gpus()
    gpus_gib = [gpu.memory_gib for gpu in gpus[: count_visible_gpus(gpus, os.environ)]]
    answers: set[str] = set()
    listed: set[str] = set()
    for root, presets in by_root.items():
        if not presets:
            say(f"{root}: contains no preset (<family>/<preset>.yaml)", file=sys.stderr)
        answers |= _print_families([file for name, file in presets.items() if name not in listed], gpus_gib)
        listed |= presets.keys()
    say(f"{AT_ONCE}: on generated data, without a GPU    {WITH_DATA}: make run JOB=... DATA=FOLDER")
    if BROKEN in answers:
        say(f"{BROKEN}: trainyard options JOB names the error in the file")
    if answers - {AT_ONCE, WITH_DATA, BROKEN}:
        memory = ", ".join(f"{gib:.0f} GB" for gib in gpus_gib) or "none"
        say(f"GB: of each GPU, and this machine has {memory}. On a cluster: make submit JOB=... GPUS=n")
    return 0


def _print_families(presets: Sequence[Path], gpus_gib: list[float]) -> set[str]:
    """Print the jobs of one folder by family; return the printed requirements."""
    wide, answers = max((len(file.stem) for file in presets), default=0), set()
    by_family = sorted(presets, key=lambda path: (path.parent.name, path.stem))
    for family, files in itertools.groupby(by_family, key=lambda path: path.parent.name):
        say(family)
        for file in files:
            answers.add(answer := _tell_what_it_needs(file, gpus_gib))
            say(cut(f"  {file.stem:<{wide}}  {answer:<{len(WITH_DATA)}}  {_read_summary(file)}", WIDTH))
    return answers


def _tell_what_it_needs(preset: Path, gpus_gib: list[float]) -> str:
    """Return whether a job runs here at once or with data, or the memory that no GPU here has."""
    try:
        needs, synthetic = _read_needs(preset)
        needed_gib = read_needed_gib(NeedsSettings(**needs))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return BROKEN
    if needed_gib * SHARE_LEFT > max(gpus_gib, default=0.0):
        return f"{needed_gib:g} GB"
    return AT_ONCE if synthetic else WITH_DATA


def _read_needs(preset: Path) -> tuple[dict[str, Any], int]:
    """Return the group `needs` and `data.synthetic` of a preset. To compose all presets for a list takes seconds."""
    values = load_yaml(preset.read_bytes(), preset, error=UserError)
    base = values["defaults"][0]
    needs, synthetic = ({}, 0) if base == SCHEMA else _read_needs(preset.with_name(f"{base}.yaml"))
    return {**needs, **values.get("needs", {})}, values.get("data", {}).get("synthetic", synthetic)


def _read_summary(preset: Path) -> str:
    """Return the first sentence of the comment that a preset begins with, without the command in it."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), preset.read_text().splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"\.(?:\s|$)|[:,.]? (?:then )?(?:make|trainyard) (?:run|submit) ", text)[0].strip()


def _list_options(args: argparse.Namespace) -> int:
    for option in configs.list_options(configs.compose(args.job, args.overrides, args.jobs)):
        choices = f" [{', '.join(option.choices)}]" if option.choices else ""
        say(f"{option.name}={option.value!s:<{max(1, 44 - len(option.name))}} {option.doc}{choices}")
    return 0


def _print_completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        raise UserError(
            f"shtab, which writes completion scripts, is not installed here. Type: {shlex.quote(sys.executable)} -m "
            "pip install 'shtab>=1.7'"
        ) from None
    from trainyard.cli import build_whole_parser

    parser, verbs = build_whole_parser()
    for verb in verbs.choices.values():
        for action in verb._actions:  # argparse has no other list of them
            known = {"job": "_trainyard_jobs", "run": "_trainyard_runs"}.get(action.dest)
            if known and not action.option_strings:
                action.complete = dict.fromkeys(COMPLETION_FILES, known)  # type: ignore[attr-defined]
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    own = shlex.quote(str(find_own_families().resolve()))
    preambles = {shell: text.replace("@OWN@", own) for shell, text in _PREAMBLES.items()}
    script = shtab.complete(parser, shell=args.shell, preamble=preambles)
    first, _, rest = script.partition("\n")
    say(f"{first}\n# To use it: trainyard completion {args.shell} > {COMPLETION_FILES[args.shell]}\n{rest}")
    return 0
