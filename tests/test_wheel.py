"""A wheel built from the checkout brings the families along, and works from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_families import copy_families

ROOT = Path(__file__).parents[1]
NEEDED = ("src", "jobs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def build(what: str, checkout: Path, into: Path) -> Path:
    """Build a wheel or a source distribution; return the file."""
    into.mkdir()
    code = f"import setuptools.build_meta as build; print(build.build_{what}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel; building it in the checkout itself would leave files there."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "checkout" / name, **({"ignore": unwanted} if copy is shutil.copytree else {}))
    with zipfile.ZipFile(build("wheel", folder / "checkout", folder / "wheels")) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run_installed(site: Path, here: Path, *words: object, code: int = 0) -> str:
    """Run `trainyard` of the wheel in a folder; return all its output."""
    environ = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "trainyard", *map(str, words)]
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def list_files(folder: Path, patterns: Sequence[str] = ("**/*",)) -> set[str]:
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)) for path in files if "__pycache__" not in path.parts}


def test_no_page_or_hint_installs_from_pypi_where_the_name_is_somebody_elses():
    """A wheel's file name, or a checkout, is fine."""
    named = re.compile(r"pip install (?:-{1,2}\S+ )*['\"]?trainyard(?![\w.-]*\.whl)")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("Makefile"), *ROOT.glob("docs/*"), *ROOT.glob("containers/*")]
    pages += [
        path for folder in ("src", "jobs") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")
    ]
    assert len(pages) > 200
    assert [str(path) for path in pages if path.is_file() and named.search(path.read_text(errors="replace"))] == []


@pytest.mark.slow
def test_a_wheel_has_the_families_and_the_code_and_no_tests(installed):
    families = {name for name in list_files(ROOT / "jobs") if not Path(name).name.startswith(("test_", "conftest"))}
    assert list_files(installed / "trainyard" / "jobs") == families and len(families) > 100
    code = {name for name in list_files(installed / "trainyard") if not name.startswith("jobs/")}
    assert code == list_files(ROOT / "src" / "trainyard")
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"trainyard"}


IMPORT_ALL = """
import importlib, pkgutil, sys

class Hidden:  # a finder that does not find what only tests need
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hidden, sys.meta_path)
import trainyard

failed = []
modules = [one.name for one in pkgutil.walk_packages(trainyard.__path__, "trainyard.", failed.append)]
for name in modules:
    if not name.endswith(".__main__"):
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {error!r}")
print(trainyard.__path__[0], len(modules), failed, sep="\\n")
"""
ONLY_FOR_TESTS = ("pytest", "_pytest", "hypothesis", "xdist", "pytest_timeout", "timm", "sentencepiece")


@pytest.mark.slow
def test_every_module_of_a_wheel_is_imported_without_what_only_tests_need(installed, tmp_path):
    environ = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    code = IMPORT_ALL.replace("HIDDEN", repr(ONLY_FOR_TESTS))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, count, failed = done.stdout.splitlines()[-3:]
    assert folder == str(installed / "trainyard") and int(count) > 200
    assert failed == "[]"


@pytest.mark.long
def test_an_installed_wheel_has_its_jobs_next_to_a_persons_own(installed, tmp_path):
    copy_families(tmp_path)
    said = run_installed(installed, tmp_path, "jobs")
    assert said.index("  stripes ") < said.index("  fingerprint_demo ") and said.count("\nfingerprint\n") == 1
    assert "global_batch_size=" in run_installed(installed, tmp_path, "options", "fingerprint_demo")
    said = run_installed(installed, tmp_path, "run", "pricing", code=2)
    assert f"{installed}/trainyard/jobs/pricing/README.md" in said


@pytest.mark.long
def test_a_snapshot_of_an_installed_wheel_is_that_of_a_checkout(installed, tmp_path):
    code = f"""
from pathlib import Path
from trainyard.config.families import find_own_families
from trainyard.launch.submit import snapshot_code
print(snapshot_code(find_own_families(), Path({str(tmp_path / "code")!r})).jobs)"""
    environ = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "code" / "jobs"), done.stderr
    assert not (tmp_path / "code" / "trainyard" / "jobs").exists()
    assert list_files(tmp_path / "code" / "jobs") == list_files(installed / "trainyard" / "jobs")


@pytest.mark.long
def test_a_wheel_of_a_source_distribution_is_the_same(installed, tmp_path):
    archive = build("sdist", installed.parent / "checkout", tmp_path / "dist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("trainyard-*")
    with zipfile.ZipFile(build("wheel", folder, tmp_path / "wheels")) as wheel:
        wheel.extractall(tmp_path / "site")
    assert list_files(tmp_path / "site", ["trainyard/**/*"]) == list_files(installed, ["trainyard/**/*"])


@pytest.mark.long
def test_an_installed_wheel_trains_resumes_and_reports_in_an_empty_folder(installed, tmp_path):
    short = ("max_duration=2st", "eval_every=2st")
    run_installed(installed, tmp_path, "run", "fingerprint_smoke", *short, "--name", "r")
    said = run_installed(installed, tmp_path, "resume", "fingerprint_smoke", "max_duration=3st", "--inexact")
    assert "trained 3 of 3 steps" in " ".join(said.split())
    run_installed(installed, tmp_path, "report", "fingerprint_smoke")
    choices = (tmp_path / "runs" / "fingerprint_smoke" / "r" / "env.json").read_text()
    assert '"Trainyard\'s own"' in choices and str(installed) not in choices
