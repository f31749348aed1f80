"""Set-up that precedes every test module: threads, folders, and how `pytest -n auto` shares out the tests."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from trainyard.hardware import count_cores, set_openmp_wait_policy

set_openmp_wait_policy(os.environ)
gc.disable()  # while modules are imported: that makes a million objects and drops hardly any

CLUSTER_GROUPS = (
    (
        "slurm/test_interruptions",
        "slurm/test_submit",
        "slurm/test_lab",
        "slurm/test_slurm_answers",
    ),
    ("slurm/test_attempts", "slurm/test_sweep", "slurm/test_why", "slurm/test_accounting", "container/test_slurm"),
)
"""Files that mostly wait for a Slurm, in groups that take about equally long: each group starts one Slurm."""

WITHOUT_CLUSTER = ("slurm/test_dry", "slurm/test_disk_full", "container/test_targets")
"""Files there that start neither a Slurm nor a container."""

LONGEST = ("test_resume", "test_contract", "test_ranks", "test_image", "test_sweep", "test_checkpoint", "test_finish")
"""Files that start first, so that none of them is left alone at the end."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one process per core, and one per group that waits for a Slurm; fewer if memory is short (2 GiB each)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    by_memory = int(lines["MemAvailable"].split()[0]) // 2**21
    waits = "not cluster" not in config.getoption("markexpr") and shutil.which("slurmctld")
    waiting = len(CLUSTER_GROUPS) if waits else 0
    return max(1, min(count_cores() + waiting, by_memory))


ROOT = Path(__file__).resolve().parent
FOLDERS = ("src", "jobs", "containers", "slurm", "benchmarks", "docs", "tests")
HOME = Path(os.environ.get("HOME") or "/nonexistent")  # Path.home() raises where a user has neither a name nor a HOME
BEFORE = pytest.StashKey[set[Path]]()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the settings and caches of whoever runs the tests out of them, and what they write out of that home."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TMPDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        patch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        yield
    # It switches off a hook of setuptools, and torch.compile then fails in this process.
    assert "pip" not in sys.modules, "a test imported pip: call what needs it in a process of its own"


def list_files_outside(home: Path) -> set[Path]:
    """Return what exists where a test must leave nothing: in the checkout, and of ours in a home."""
    found = {path for path in ROOT.glob("[!.]*") if path.name != "data"}  # which `image.py run` makes and mounts
    for folder in (*map(ROOT.joinpath, FOLDERS), home / ".cache" / "trainyard", home / ".config" / "trainyard"):
        found |= {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember what exists before the tests."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = list_files_outside(HOME)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if tests left something outside of their temporary folders."""
    if BEFORE in session.config.stash:
        left = sorted(list_files_outside(HOME) - session.config.stash[BEFORE])
        if left:
            print(f"\nTests left files outside of their folders: {', '.join(map(str, left))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never visit what the imports made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start a Slurm or a container; start those that wait first, then the longest files."""
    for item in items:
        name = _name_file(item.nodeid)
        if name.startswith(("slurm/", "container/")) and name not in WITHOUT_CLUSTER:
            item.add_marker(pytest.mark.cluster)
    items.sort(key=_rank)


class FileScheduling(LoadScopeScheduling):
    """Gives the tests of a file, or of a group of files, to one process, which shares their fixtures.

    The marker `xdist_group` does not: xdist 3.8 appends it to a name that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return find_group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Share the tests out file by file, whatever --dist says."""
    return FileScheduling(config, log)


def find_group(nodeid: str) -> str:
    """Return what is shared out together with a test: its cluster group, or its file."""
    name = _name_file(nodeid)
    return next((f"cluster-{i}" for i, files in enumerate(CLUSTER_GROUPS) if name in files), name)


def _name_file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def _rank(item: pytest.Item) -> int:
    group = find_group(item.nodeid)
    if group.startswith("cluster-"):
        return 0
    return 1 + (LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
