"""`make` passes each value on as it was typed, and refuses a variable that it would ignore."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINE_OF_HELP = re.compile(r"^([a-z-]+):.*## (.*)", re.MULTILINE)
TAKES = {
    target: set(re.findall(r"[A-Z][A-Z_]*(?==)", text))
    for target, text in LINE_OF_HELP.findall((ROOT / "Makefile").read_text())
}
KNOWN = sorted(set().union(*TAKES.values(), {"PYTHON"}))

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed, as in container images")


def run_make(*words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run make in this checkout; it takes the environment for current, so that it never makes one in a test."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("MAKE") and name not in KNOWN}
    return subprocess.run(
        ["make", "--no-print-directory", "--old-file=.venv/.done", *words],
        cwd=ROOT,
        env={**inherited, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def write_python(folder: Path, name: str, *, supported: bool, version: str = "", error: str = "") -> Path:
    """Write a program that answers as an interpreter does; a shim of pyenv may print no version, and may fail."""
    path = folder / name
    says = f"echo '{error}' >&2; exit 127" if error else f"echo {version}; exit 0" if version else "exit 0"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ {says}; }}\n[ "$1" = -c ] && exit {0 if supported else 1}\n'
        'echo "$(basename "$0") $*"; touch .venv/.done\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("error", "said"),
    [("", "says no version"), ("pyenv: python3.13: command not found", "does not start: pyenv: python3.13: command")],
)
def test_a_python_that_says_no_version_is_named_with_what_it_says(error, said, tmp_path):
    """A shim of pyenv for a version that is not installed is there, and prints no version."""
    shim = write_python(tmp_path, "python3.13", supported=False, error=error)
    done = run_make("setup", f"PYTHON={shim}")
    assert done.returncode == 2
    assert done.stdout.startswith(f"Python 3.11 to 3.13 is needed, and is not here. {shim} {said}")
    assert done.stdout.endswith(" make setup PYTHON=/path/to/python3.12\n")


def copy_setup(folder: Path) -> tuple[Path, dict[str, str]]:
    """Copy what `make setup` reads, without an environment; return a folder of programs, and variables to find it."""
    (folder / "containers").mkdir()
    (folder / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", "containers/dev.lock"):
        shutil.copy(ROOT / name, folder / name)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "sh", "make", "awk", "basename", "touch"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return programs, {"PATH": str(programs)}


def set_up(folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "setup"]
    return subprocess.run(command, cwd=folder, env={**environ}, capture_output=True, text=True, timeout=60)


def test_setup_takes_whichever_supported_python_there_is(tmp_path):
    programs, environ = copy_setup(tmp_path)
    write_python(programs, "python3", supported=False, version="Python 3.9.18")
    write_python(programs, "python3.13", supported=False, error="pyenv: python3.13: command not found")
    write_python(programs, "python3.12", supported=True, version="Python 3.12.1")
    write_python(programs, "python3.11", supported=True, version="Python 3.11.7")
    done = set_up(tmp_path, environ)
    made = "containers/make_venv.py .venv containers/dev.lock --editable .\n"
    assert (done.returncode, done.stdout) == (0, f"python3.12 {made}"), done.stderr
    (tmp_path / ".venv" / ".done").unlink()
    done = set_up(tmp_path, {**environ, "PYTHON": "python3.11"})
    assert done.stdout == f"python3.11 {made}", "what is named comes first"


def test_setup_without_a_supported_python_says_what_each_is(tmp_path):
    programs, environ = copy_setup(tmp_path)
    write_python(programs, "python3", supported=False, version="Python 3.14.0")
    done = set_up(tmp_path, environ)
    assert done.returncode == 2
    assert (
        "is not here. python3 Python 3.14.0; python3.13 does not start: " in done.stdout and "not found" in done.stdout
    )
    assert done.stdout.count("\n") == 1


def list_hostile_values(flag: Path) -> list[str]:
    """Return values that would create the file `flag`, or change, if make or a shell evaluated them."""
    touch = f"touch {flag}"
    return [
        f"$(shell {touch})",
        f"a$$(shell {touch})",
        f"$(eval X := $(shell {touch}))$(X)",
        f"/tmp/$({touch})",
        f"`{touch}`",
        f"; {touch} #",
        f"'; {touch}; '",
        f'"; {touch}; "',
        f"x && {touch} || {touch} | {touch} &",
        f"a\n{touch}\n\tb",
        f"${{X:-$({touch})}}",
        "$(HOME) ${HOME} $HOME $$HOME $@ $* $",
        "* ? [a-z] ~ {a,b} !x",
        "--help",
        "back\\slash\\ \\$x \\",
        "a=b, c:=d #e %f (g",
        "$(error stopped)",
    ]


def test_every_value_reaches_a_command_as_it_was_typed(tmp_path: Path):
    flag = tmp_path / "ran"
    for value in list_hostile_values(flag):
        for words, environ in (([f"{name}={value}" for name in KNOWN], {}), ([], dict.fromkeys(KNOWN, value))):
            done = run_make("--eval=print-values: ; @env -0", "print-values", *words, environ=environ)
            assert done.returncode == 0, done.stderr
            found = dict(line.partition("=")[::2] for line in done.stdout.split("\0"))
            expected = {name: value for name in KNOWN if words or name in environ}
            assert {name: found[name] for name in expected} == expected
    assert not flag.exists()
    assert len(KNOWN) > 20 and len(TAKES) > 25, "has the form of the Makefile changed?"


def test_a_python_that_is_a_command_line_is_not_run_as_one(tmp_path: Path):
    flag = tmp_path / "ran"
    for value in (f"x; touch {flag}", f"$(shell touch {flag})", f"sh -c 'touch {flag}'"):
        for words, environ in (([f"PYTHON={value}"], {}), ([], {"PYTHON": value})):
            done = run_make("slurm-lab-down", *words, environ=environ)
            assert done.returncode == 2 and value in done.stderr, done
    assert not flag.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "JBO=pricing_demo"], "make run does not take JBO. Nearest: JOB. It takes JOB DATA SYNTHETIC GPUS SET"),
        (["submit", "GPU=8"], "make submit does not take GPU. Nearest: GPUS. It takes JOB"),
        (["sweep", "MAXPARALLEL=2"], "make sweep does not take MAXPARALLEL. Nearest: MAX_PARALLEL."),
        (["cancel", "RUNS=x"], "make cancel does not take RUNS. Nearest: RUN. It takes RUN."),
        (["lint", "DRY=1"], "make lint does not take DRY. It takes no variables."),
        (["image", "GPUS=8"], "make image does not take GPUS. It takes HW WHEELS BASE_IMAGE."),
        (["JOB=pricing_demo"], "make help does not take JOB. It takes no variables."),
        (["lint", "cancel", "RUNS=x"], "make lint cancel does not take RUNS. Nearest: RUN."),
        (["run", "arguments=:"], "make run does not take arguments."),
        (["run", "typed=", "JBO=x"], "make run does not take"),
        (["run", "SHELL=/bin/echo"], "make run does not take SHELL."),
        (["run", "VENV=/elsewhere"], "make run does not take VENV."),
    ],
)
def test_a_variable_that_a_target_does_not_take_is_refused_with_the_nearest(words, expected):
    done = run_make(*words)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_the_value_of_a_refused_variable_is_not_evaluated_either(tmp_path: Path):
    flag = tmp_path / "ran"
    for value in list_hostile_values(flag)[:9:2]:
        assert "does not take JBO" in run_make("run", f"JBO={value}").stderr
    assert not flag.exists()


def test_dry_is_refused_where_it_would_not_hold():
    assert {target for target, names in TAKES.items() if "DRY" in names} == {
        "run",
        "resume",
        "submit",
        "sweep",
        "run-image",
    }
    for words, environ in ((["plan", "DRY=1"], {}), (["plan"], {"DRY": "1"}), (["submit", "status", "DRY=1"], {})):
        done = run_make(*words, environ=environ)
        assert done.returncode == 2 and "does not take DRY." in done.stderr and done.stdout == ""


def test_completing_a_line_in_bash_lists_the_targets():
    done = run_make("-npq", "__BASH_MAKE_COMPLETION__=1", ".DEFAULT")
    assert re.search(r"^submit: setup", done.stdout, re.MULTILINE)


def test_several_targets_take_what_one_of_them_takes():
    assert run_make("--dry-run", "lint", "cancel", "RUN=x").returncode == 0


@pytest.mark.slow
def test_five_hostile_values_through_make_and_the_command_line_are_printed_as_typed(tmp_path: Path):
    flag = tmp_path / "ran"
    text = "/".join(list_hostile_values(flag)[:9:2])
    raw, cache = Path(f"{tmp_path}/{text}"), f"{tmp_path}/{text.replace(' ', '_')}"
    raw.mkdir(parents=True)
    done = run_make("run", "JOB=pricing_demo", f"DATA={raw}", f"SET=data.cache={cache} seed=3", "DRY=1")
    assert done.returncode == 0, done.stderr
    assert f"{raw}: raw files, packed into {cache} unless" in done.stdout and "seed=3" in done.stdout
    assert not flag.exists()


@pytest.mark.slow
def test_five_hostile_values_of_a_sweep_reach_its_runs_as_typed(tmp_path: Path):
    values = list_hostile_values(tmp_path / "ran")[:9:2]
    axis = ",".join(f'"{value}"' for value in values)
    words = ["JOB=pricing_demo", f"SWEEP=packing.text_column={axis}", f"RUNS={tmp_path}/runs", "CLUSTER=slurm/lab.yaml"]
    done = run_make("sweep", *words, "SYNTHETIC=1", "DRY=1")
    assert done.returncode == 0, done.stderr
    for number, value in enumerate(values):
        assert f'NEW-{number:03d}  packing.text_column="{value}"' in done.stdout
    assert list(tmp_path.iterdir()) == []
