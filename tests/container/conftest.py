"""The image and the SIF that tests of this folder run, made beforehand: `make image HW=cpu`, `make sif HW=cpu`.

Where something is missing, tests skip and say what; with REQUIRE_CONTAINERS=1 they fail instead, with
REQUIRE_CONTAINERS=image only those of the image.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine import Engine

ROOT = Path(__file__).resolve().parents[2]
APPTAINER = ROOT / "containers" / "apptainer"
SIF = ROOT / "images" / "trainyard-cpu.sif"


@dataclass(frozen=True)
class Image:
    """An image that is here, and the engine that runs it."""

    engine: "Engine"
    name: str

    def query(self, *words: str) -> str:
        """Return what a command of the engine prints."""
        done = self.engine.query(*words, timeout_s=300)
        assert done.returncode == 0, f"{words}: code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def python(self, code: str, *options: str) -> str:
        """Return what Python prints in a sealed container: no network, nothing writable but /tmp, not root."""
        words = ["run", "--rm", "--pull", "never", *sealed(), *options, "--entrypoint", "python", self.name, "-c", code]
        return self.query(*words)


def sealed() -> tuple[str, ...]:
    """Return the engine's arguments for that."""
    from local_image import SEALED, USER

    return (*SEALED, "--user", USER)


USERS_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/")) / ".cache")
"""As it is outside of the tests: a test has one of its own."""


@pytest.fixture(scope="session", autouse=True)
def unpacked_apptainer(own_folders):
    """Let the tests find an Apptainer that `containers/image.py apptainer` has unpacked."""
    unpacked = USERS_CACHE / "trainyard" / "apptainer"
    if unpacked.is_dir():
        link = Path(os.environ["XDG_CACHE_HOME"]) / "trainyard" / "apptainer"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(unpacked)


@pytest.fixture(scope="session", autouse=True)
def scripts_are_importable():
    """Put the scripts of containers/ where they find each other."""
    sys.path.insert(0, str(ROOT / "containers"))
    yield
    sys.path.remove(str(ROOT / "containers"))


@pytest.fixture(scope="session")
def engine(scripts_are_importable):
    """The container engine of this machine."""
    from engine import Absent, find_engine

    try:
        return find_engine(os.environ)
    except Absent as absent:
        skip_or_fail(str(absent))


@pytest.fixture(scope="session")
def image(engine) -> Image:
    """The CPU image, as new as its lock."""
    return find_built(engine, "cpu")


def find_built(engine, target: str) -> Image:
    """Return an image of a target, or skip."""
    from engine import Mistake
    from local_image import check_image, format_tag
    from targets import find_target

    try:
        check_image(engine, find_target(target), target)
    except Mistake as mistake:
        skip_or_fail(str(mistake), needed="image" if target == "cpu" else "all")
    return Image(engine, format_tag(find_target(target)))


@pytest.fixture(scope="session")
def sif() -> Path:
    """The SIF of the CPU image."""
    found = run_script(APPTAINER, "--version")
    if found.returncode == 3:
        skip_or_fail(found.stderr.strip(), needed="sif")
    assert found.returncode == 0, found.stderr
    if not SIF.exists():
        skip_or_fail(f"{SIF}: is not there. Type: make sif HW=cpu", needed="sif")
    return SIF


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what images are made from, to change."""
    shutil.copytree(ROOT / "containers", tmp_path / "checkout" / "containers")
    shutil.copy(ROOT / "Dockerfile", tmp_path / "checkout")
    return tmp_path / "checkout"


def skip_or_fail(reason: str, *, needed: str = "image") -> None:
    """Say why a test cannot run here. Images of GPUs are many gigabytes: tests of these skip in any case."""
    required = os.environ.get("REQUIRE_CONTAINERS", "")
    if needed in {"1": ("image", "sif"), "image": ("image",)}.get(required, ()):
        pytest.fail(f"REQUIRE_CONTAINERS={required}, but: {reason}", pytrace=False)
    pytest.skip(reason)


def run_script(
    *command: str | Path, environ: dict[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a command as a person does, with these changes to the environment."""
    words: Sequence[str] = [str(word) for word in command]
    # Our container images set this, which keeps scripts from importing their neighbours.
    changed = {**os.environ, "PYTHONSAFEPATH": "", **(environ or {})}
    return subprocess.run(words, cwd=cwd, env=changed, capture_output=True, text=True, timeout=timeout_s)
