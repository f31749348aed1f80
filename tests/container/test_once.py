"""Apptainer and environments are made once, by one process at a time, and survive that process's death."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.container.conftest import APPTAINER, ROOT, run_script
from tests.container.test_targets import IMAGE
from tests.waiting import wait_until

MACHINE = (sys.executable, ROOT / "containers" / "machine.py")
MAKE_VENV = (sys.executable, ROOT / "containers" / "make_venv.py")

STAND_IN = """\
#!{python}
import os, sys, time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("sid") + 1])
with open({calls!r}, "a") as calls:
    calls.write(f"{{os.getpid()}}\\n")
(folder / "etc").mkdir()
for number in range(20):
    (folder / "etc" / str(number)).write_text("half")
    time.sleep(0.05)
while Path({hold!r}).exists():
    time.sleep(0.05)
"""
"""Stands in for mmdebstrap: records its calls and takes a second to fill a folder, or waits while a file holds it."""


class Archive:
    """An empty cache folder and a stand-in for Debian's archive."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.calls, self.hold = folder / "cache", folder / "calls", folder / "hold"
        programs = folder / "bin"
        programs.mkdir()
        program = programs / "mmdebstrap"
        program.write_text(STAND_IN.format(python=sys.executable, calls=str(self.calls), hold=str(self.hold)))
        program.chmod(0o755)
        self.environ = {**os.environ, "XDG_CACHE_HOME": str(self.cache), "PATH": str(programs)}
        self.root = self.cache / "trainyard" / "apptainer"

    def query(self) -> "subprocess.Popen[str]":
        """Start a process that requests Apptainer, in its own process group."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*IMAGE, "apptainer"], env=self.environ, text=True, start_new_session=True, **pipes)

    def read_calls(self) -> list[int]:
        """Return the process ids of all that unpacked."""
        return [int(line) for line in self.calls.read_text().split()] if self.calls.exists() else []

    def wait_for_call(self, count: int) -> None:
        begun = self.root.parent
        wait_until(
            lambda: len(self.read_calls()) >= count and list(begun.glob("apptainer.new-*/etc/3")),
            f"{count} that unpack",
        )

    def list_cache(self) -> list[str]:
        return sorted(path.name for path in self.root.parent.iterdir() if path != self.root)


def find_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    if os.getuid():
        pytest.skip("only root can unpack an Apptainer")
    return Archive(tmp_path)


def test_of_eight_concurrent_callers_one_unpacks_apptainer_and_all_get_it(archive: Archive):
    archive.hold.touch()
    asked = [archive.query() for _ in range(8)]
    archive.wait_for_call(1)
    waiting = [process for process in asked if process.pid != find_parent(archive.read_calls()[0])]
    waited = f"Another process is unpacking Apptainer: waiting until it is done ({archive.root}.lock).\n"
    assert [process.stderr.readline() for process in waiting] == [waited] * 7
    archive.hold.unlink()
    said = [process.communicate(timeout=120) for process in asked]
    assert [process.returncode for process in asked] == [0] * 8, said
    assert [out for out, _ in said] == [f"{archive.root}: run it as containers/apptainer\n"] * 8
    assert len(archive.read_calls()) == 1
    assert (archive.root / "etc" / "subuid").read_text() == "root:0:65536\n" and (archive.root / "etc" / "19").exists()
    assert archive.list_cache() == ["apptainer.lock"]


def test_after_a_killed_unpacking_the_next_caller_starts_from_scratch(archive: Archive):
    archive.hold.touch()
    first = archive.query()
    archive.wait_for_call(1)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(120) == -signal.SIGKILL and not archive.root.exists()
    archive.hold.unlink()
    second = archive.query()
    assert second.wait(120) == 0
    assert len(archive.read_calls()) == 2 and archive.list_cache() == ["apptainer.lock"]


def test_children_of_a_killed_process_keep_the_lock_until_they_end(archive: Archive):
    archive.hold.touch()
    first = archive.query()
    archive.wait_for_call(1)
    first.kill()
    assert first.wait(120) == -signal.SIGKILL
    second = archive.query()
    assert second.stderr.readline().startswith("Another process is unpacking Apptainer")
    assert len(archive.read_calls()) == 1, "two unpack at once"
    archive.hold.unlink()
    assert second.wait(120) == 0
    assert len(archive.read_calls()) == 2 and archive.list_cache() == ["apptainer.lock"]


@pytest.mark.skipif(os.environ.get("REQUIRE_CONTAINERS", "") == "", reason="REQUIRE_CONTAINERS is not set: fetches")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can unpack an Apptainer")
@pytest.mark.long
def test_eight_concurrent_callers_can_run_the_real_apptainer(tmp_path: Path):
    if installed := shutil.which("apptainer"):
        pytest.skip(f"{installed} is installed: nothing is unpacked")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    line = f"{sys.executable} {IMAGE[1]} apptainer && {APPTAINER} --version"
    asked = [subprocess.Popen(["sh", "-c", line], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    said = [process.communicate(timeout=120)[0].splitlines() for process in asked]
    assert [process.returncode for process in asked] == [0] * 8, said
    assert len({tuple(lines) for lines in said}) == 1 and said[0][1].startswith("apptainer version 1.")
    shutil.rmtree(tmp_path / "trainyard")  # hundreds of MB, which pytest would keep for three sessions


def test_looking_for_apptainer_downloads_nothing(tmp_path: Path):
    if installed := shutil.which("apptainer"):
        pytest.skip(f"{installed} is installed")
    said = run_script(APPTAINER, "--version", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert said.returncode == 3 and "python3 containers/image.py apptainer" in said.stderr
    assert list(tmp_path.iterdir()) == []


# Environments


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock of one local package."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    about = {"METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n", "WHEEL": "Wheel-Version: 1.0\n"}
    about["WHEEL"] += "Generator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "VALUE = 1\n")
        for name, content in {**about, "RECORD": ""}.items():
            file.writestr(f"tiny-1.dist-info/{name}", content)
    lock = tmp_path / "tiny.lock"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"tiny @ {wheel.as_uri()} --hash=sha256:{digest}\n")
    return lock


def start_venv(folder: Path, lock: Path) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*MAKE_VENV, folder, lock]
    return subprocess.Popen([str(word) for word in command], text=True, start_new_session=True, **pipes)


def read_value(folder: Path) -> str:
    command = [str(folder / "bin" / "python"), "-c", "import tiny; print(tiny.VALUE)"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_concurrent_set_ups_take_turns_and_work_once(tmp_path: Path, lock: Path):
    from once import hold_lock

    folder = tmp_path / "venv"
    with hold_lock(tmp_path / "venv.lock", doing="nothing"):
        asked = [start_venv(folder, lock) for _ in range(2)]
        said = [process.stderr.readline() for process in asked]
        assert all(line.startswith(f"Another process is setting up {folder}: waiting") for line in said), said
        assert not folder.exists()
    said = [process.communicate(timeout=120)[1] for process in asked]
    assert [process.returncode for process in asked] == [0, 0], said
    assert read_value(folder) == "1\n"
    made = (folder / "pyvenv.cfg").stat()
    again = start_venv(folder, lock)
    assert again.communicate(timeout=120)[1] == "" and again.returncode == 0
    assert (folder / "pyvenv.cfg").stat().st_ino == made.st_ino


def test_a_killed_set_up_is_repeated_from_scratch(tmp_path: Path, lock: Path):
    folder = tmp_path / "venv"
    first = start_venv(folder, lock)
    wait_until((folder / "bin" / "python").exists, "an environment that has no pip yet", process=first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=120)
    assert not (folder / ".done").exists()
    again = start_venv(folder, lock)
    assert again.wait(120) == 0, again.stderr.read()
    assert read_value(folder) == "1\n"


@pytest.mark.parametrize(
    ("constant", "value", "said"),
    [
        ("PYTHONS", ((3, 8), (3, 9)), "Python 3.8 to 3.9 is needed, 3.1"),
        ("GLIBC", (9, 99), "glibc 9.99 or newer, and this is Linux x86_64 with glibc 2."),
    ],
)
def test_an_unsuitable_machine_is_refused_with_the_reason(constant, value, said, tmp_path, monkeypatch):
    import machine

    assert machine.why_no_environment(tmp_path / "venv", disk_gib=0.001) is None
    monkeypatch.setattr(machine, constant, value)
    lack = machine.why_no_environment(tmp_path / "venv", disk_gib=0.001)
    assert said in lack and "\n" not in lack


def test_too_little_disk_or_memory_is_reported_with_what_is_available(tmp_path):
    import machine

    lack = machine.why_no_environment(tmp_path / "venv", disk_gib=10**6)
    assert lack.startswith("setting up takes 1000000 GiB of disk, and ") and f"are free in {tmp_path}." in lack
    said = run_script(*MACHINE, "--memory-gib", "1000000", "--purpose", "the tests")
    assert said.returncode == 2 and said.stderr.startswith("the tests: 1e+06 GiB of memory are needed, and ")
    assert run_script(*MACHINE, "--memory-gib", "0.001", "--purpose", "the tests").returncode == 0


def test_a_containers_memory_limit_counts(tmp_path: Path):
    import machine

    (tmp_path / "meminfo").write_text("MemTotal:  25165824 kB\nMemAvailable:  16777216 kB\n")
    query = (tmp_path / "meminfo", tmp_path)
    assert machine.available_memory_gib(*query) == 16
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory_gib(*query) == 16
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    assert machine.available_memory_gib(*query) == 2
