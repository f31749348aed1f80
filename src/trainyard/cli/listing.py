"""The commands that list what one can run, and with which options: jobs, options."""

import argparse
import itertools
import os
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainyard import config as configs
from trainyard.cli.verb import Verbs, add_verb
from trainyard.environment import list_gpu_memory_gib
from trainyard.errors import UserError
from trainyard.launch.choose_gpu import read_needed_gib
from trainyard.settings import NeedsSettings
from trainyard.text import cut

WIDTH = 99
AT_ONCE, WITH_DATA, BROKEN = "at once", "your data", "broken"

SHARE_LEFT = 0.9
"""Of a card's nominal memory: ECC and the driver take up to 8 %."""


def add_commands(verbs: Verbs) -> None:
    """Add the commands."""
    add_verb(verbs, "jobs", _list_jobs, "list the jobs you can run, and what runs here")
    verb = add_verb(verbs, "options", _list_options, "list a job's options, their values and what they do")
    verb.add_argument("job")
    verb.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")


def _list_jobs(args: argparse.Namespace) -> int:
    presets = configs.find_jobs(args.jobs)
    if not presets:
        raise UserError(
            f"{args.jobs}: contains no preset (<family>/<preset>.yaml). Name the folder of jobs: --jobs DIR."
        )
    gpus_gib = list_gpu_memory_gib(os.environ)
    wide, answers = max(map(len, presets)), set()
    by_family = sorted(presets.values(), key=lambda path: (path.parent.name, path.stem))
    for family, files in itertools.groupby(by_family, key=lambda path: path.parent.name):
        print(family)
        for file in files:
            answers.add(answer := _tell_what_it_needs(file, gpus_gib))
            print(cut(f"  {file.stem:<{wide}}  {answer:<{len(WITH_DATA)}}  {_read_summary(file)}", WIDTH))
    print(f"{AT_ONCE}: on generated data, without a GPU    {WITH_DATA}: make run JOB=... DATA=FOLDER")
    if BROKEN in answers:
        print(f"{BROKEN}: trainyard options JOB says what is wrong with the file")
    if answers - {AT_ONCE, WITH_DATA, BROKEN}:
        found = ", ".join(f"{gib:.0f} GB" for gib in gpus_gib) or "none"
        print(f"GB: of each GPU, and this machine has {found}. On a cluster: make submit JOB=... GPUS=n")
    return 0


def _tell_what_it_needs(preset: Path, gpus_gib: list[float]) -> str:
    """Return whether a job runs here at once or with data, or the memory that no GPU here has."""
    try:
        stated = _read_stated(preset, {})
    except (yaml.YAMLError, OSError, TypeError, AttributeError):
        return BROKEN
    needs = NeedsSettings(memory_gib=stated["needs"].get("memory_gib") or 0, card=stated["needs"].get("card") or "")
    needed_gib = read_needed_gib(needs)
    if needed_gib * SHARE_LEFT > max(gpus_gib, default=0.0):
        return f"{needed_gib:g} GB"
    return AT_ONCE if stated["data"].get("synthetic") else WITH_DATA


def _read_stated(preset: Path, known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a preset, and those it is based on, state of `data` and `needs`; Hydra would take seconds for all.

    Args:
        known: what presets that are based on this one state.
    """
    stated = yaml.safe_load(preset.read_text()) or {}
    merged = {group: {**(stated.get(group) or {}), **known.get(group, {})} for group in ("data", "needs")}
    for base in stated.get("defaults") or []:
        if base not in ("schema", "_self_"):
            merged = _read_stated(preset.with_name(f"{base}.yaml"), merged)
    return merged


def _read_summary(preset: Path) -> str:
    """Return the first sentence of the comment that a preset begins with, without the command in it."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), preset.read_text().splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"\.(?:\s|$)|[:,.]? (?:then )?(?:make|trainyard) (?:run|submit) ", text)[0].strip()


def _list_options(args: argparse.Namespace) -> int:
    for option in configs.list_options(configs.compose(args.job, args.overrides, args.jobs)):
        choices = f" [{', '.join(option.choices)}]" if option.choices else ""
        print(f"{option.name}={option.value!s:<{max(1, 44 - len(option.name))}} {option.doc}{choices}")
    return 0
