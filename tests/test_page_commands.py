"""The program takes each command on our pages: its verb, arguments, flags, job and options, and variables of make."""

import contextlib
import io
import re
import shlex
from functools import cache

import pytest

from tests.checkout import ROOT, list_files
from tests.test_make import TAKES
from trainyard.cli import _parse_arguments, build_whole_parser
from trainyard.config.compose import compose, list_options

JOBS = {path.stem: path.parent.name for path in sorted((ROOT / "jobs").glob("*/*.yaml"))}
PLACES = ("README.md", "CONTRIBUTING.md", "docs", "jobs", "slurm", "containers", "src")  # not records of old commands
PAGES = [page for page in list_files(*PLACES, ending=".md") if page.name != "commands.md"]  # which is generated
PAGES = [page for page in PAGES if page.parent.parent.name != "templates"]  # pages of families that `new` writes


def find_commands(text: str) -> tuple[list[str], list[str]]:
    """Return the commands in code blocks of a page, which are whole, and those in its sentences, which may not be."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^ *```\w*\n.*?^ *```|^    [^\n]*$", text, flags=re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^ *(?:\$ )?(?:\.venv/bin/)?((?:trainyard|make) .*)", "\n".join(blocks), flags=re.MULTILINE)
    shown = [part for line in shown for part in re.split(r"(?:;| &&) (?=make|trainyard)", re.split(r"  | #", line)[0])]
    for block in blocks:
        text = text.replace(block, "", 1)
    named = re.findall(r"`((?:trainyard|make) [a-z][^`]*)`", text)
    return shown, [" ".join(part.split()) for whole in named for part in whole.split(" && ")]


def split_words(command: str) -> list[str]:
    """Split a command; what a page marks as optional by brackets counts."""
    return shlex.split(re.sub(r"\[(-|[A-Z])([^\]]*)\]", r"\1\2", command).replace("...", ""))


@cache
def read_flags() -> dict[str, set[str]]:
    _, verbs = build_whole_parser()
    return {name: set(verb._option_string_actions) for name, verb in verbs.choices.items()}


@cache
def read_options(job: str) -> set[str]:
    return {option.name for option in list_options(compose(job, (), ROOT / "jobs"))}


def check_options(words: list[str], job: str) -> str:
    """Return what is wrong with the OPTION=VALUE words of a command for this job; "": for any family."""
    known = set().union(*(read_options(name) for name in ([job] if job else sorted(set(JOBS.values())))))
    names = [found[1] for word in words if (found := re.match(r"([a-z_][\w.]*)=", word))]
    return ", ".join(name for name in names if name not in known and not name.startswith("hydra"))


def check_command(command: str, *, is_whole: bool) -> str:
    """Return what is wrong with a command of make or of trainyard; "" if the program takes it."""
    program, *words = split_words(command)
    job = next((word.removeprefix("JOB=") for word in words if word.removeprefix("JOB=") in JOBS), "")
    if program == "make":
        targets = [word for word in words if "=" not in word]
        variables = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
        takes = {"PYTHON"}.union(*(TAKES.get(target, set()) for target in targets))
        wrong = [target for target in targets if target not in TAKES] + sorted(set(variables) - takes)
        if (named := variables.get("JOB", "JOB")) not in {*JOBS, "JOB", "job", ""}:
            wrong.append(named)
        options = f"{variables.get('SET', '')} {variables.get('SWEEP', '')}".split()
        return ", ".join(wrong) or check_options(options, job)
    flags = read_flags()
    if words[0] not in flags:
        return words[0]
    if is_whole:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                _parse_arguments(words)
            except SystemExit:
                return said.getvalue() or "ends"
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags[words[0]]]
    return ", ".join(wrong) or check_options(words[1:], job)


@pytest.mark.slow
def test_every_command_of_a_page_is_one_that_the_program_takes():
    found = [(page, *find_commands(page.read_text(encoding="utf-8"))) for page in PAGES]
    assert sum(len(shown) for _, shown, _ in found) > 100 and sum(len(named) for *_, named in found) > 50
    wrong = [
        f"{page.relative_to(ROOT)}: {command}: {said}"
        for page, shown, named in found
        for commands, is_whole in ((shown, True), (named, False))
        for command in commands
        if (said := check_command(command, is_whole=is_whole))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "command",
    [
        "make run JBO=fingerprint_few",
        "make train JOB=fingerprint_few",
        "make run JOB=fingerprint_fwe DATA=/data/prints",
        'make run JOB=fingerprint_few SET="optimiser.lr=1e-3"',
        "trainyard trane fingerprint_few",
        "trainyard run",
        "trainyard run fingerprint_few --nodes 2",
        "trainyard run fingerprint_few optimizer.lrr=1e-3",
        "trainyard evaluate RUN FOLDER evaluation.matched_pair=4000",
    ],
)
def test_a_planted_command_is_found(command):
    ((shown,), _) = find_commands(f"# A page\n\n    {command}  # does it\n")
    assert check_command(shown, is_whole=True)
