"""Which Pythons and which torch are supported: what says so agrees, and one lock suits each Python."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.container.conftest import ROOT
from tests.container.test_targets import TARGETS, read_pins
from trainyard.__main__ import PYTHONS, check_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed, as in container images")


def list_minors() -> list[int]:
    from machine import PYTHONS

    (_, oldest), (_, newest) = PYTHONS
    return list(range(oldest, newest + 1))


def make_setup(checkout: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `make setup` where an environment of this Python is up to date."""
    (checkout / "containers").mkdir()
    for name in ("Makefile", "pyproject.toml", "containers/dev.lock"):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (checkout / ".venv" / ".done").touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "setup", *words]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=60)


def test_every_statement_of_the_supported_pythons_is_the_same():
    minors = list_minors()
    oldest, newest = minors[0], minors[-1]
    named = [f"Programming Language :: Python :: 3.{minor}" for minor in minors]
    assert PROJECT["project"]["classifiers"] == named
    assert PROJECT["project"]["requires-python"] == f">=3.{oldest},<3.{newest + 1}"
    assert [minor for _, minor in PYTHONS] == [oldest, newest], "trainyard/__main__.py"
    assert PROJECT["tool"]["mypy"]["python_version"] == f"3.{oldest}"
    assert "target-version" not in PROJECT["tool"]["ruff"], "ruff takes it from requires-python"
    assert f"(3, {oldest}) <= sys.version_info[:2] <= (3, {newest})" in MAKEFILE
    assert f"--python-version 3.{oldest} " in MAKEFILE
    assert oldest <= sys.version_info.minor <= newest


def test_a_python_that_is_too_old_or_was_never_tried_gets_one_sentence():
    (_, oldest), (_, newest) = PYTHONS
    assert check_python((3, oldest)) == check_python((3, newest)) == ""
    supported = f"Python 3.{oldest} to 3.{newest}"
    assert check_python((3, oldest - 1)).startswith(f"trainyard needs {supported}, and this is 3.{oldest - 1} (")
    assert check_python((3, newest + 1)).startswith(f"trainyard was tested on {supported}, not on 3.{newest + 1}:")


def test_an_old_python_can_read_the_file_that_says_so():
    source = (ROOT / "src" / "trainyard" / "__main__.py").read_text()
    ast.parse(source, feature_version=(3, 7))
    imports = [line.partition("  #")[0] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "import sys"], "it imports nothing before the check"


def test_the_oldest_torch_of_the_container_images_is_the_lower_bound():
    bounds = dict(re.findall(r"^(torch|torchvision)>=(\S+)$", "\n".join(PROJECT["project"]["dependencies"]), re.M))
    for name in ("torch", "torchvision"):
        locked = [tuple(int(part) for part in read_pins(f"{target}.lock")[name].split(".")) for target in TARGETS]
        assert bounds[name] == ".".join(map(str, min(locked))), name


def test_the_dev_lock_holds_what_its_packages_need_on_each_supported_python():
    locked = read_pins("dev.lock")
    checked, missing = 0, []
    for name, version in locked.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.version != version:  # in a container image of another CUDA
            continue
        checked += 1
        for need in map(Requirement, package.requires or []):
            for minor in list_minors():
                python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0", "extra": ""}
                if canonicalize_name(need.name) not in locked and (not need.marker or need.marker.evaluate(python)):
                    missing.append(f"{name} needs {need.name} on 3.{minor}")
    assert checked > 50
    assert missing == []


@needs_make
def test_make_setup_refuses_another_python_than_the_environments(tmp_path: Path):
    other = tmp_path / "python3.99"
    other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.99.0 || echo "(3, 99)"\n')
    other.chmod(0o755)
    said = make_setup(tmp_path, f"PYTHON={other}")
    assert said.returncode != 0
    assert f".venv has Python 3.{sys.version_info.minor}." in said.stdout
    assert f"and {other} is Python 3.99.0. Type: rm -r .venv; make setup PYTHON={other}\n" in said.stdout


@needs_make
@pytest.mark.parametrize("words", [[], [f"PYTHON={sys.executable}"]])
def test_make_setup_leaves_an_environment_of_the_same_python_alone(words: list[str], tmp_path: Path):
    said = make_setup(tmp_path, *words)
    assert (said.returncode, said.stderr) == (0, "")
