"""A real Slurm for the tests in this folder, started by slurm/lab/lab.py and stopped at the end of the session."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import Start, make_starter

LAB = Path(__file__).resolve().parents[2] / "slurm" / "lab" / "lab.py"
CLIENT_VARIABLES = ("SLURM_", "SLURMD_", "SBATCH_", "SUBMITIT_")


@dataclass(frozen=True)
class Lab:
    """A running cluster, shared by tests: cancel the jobs you leave in the queue."""

    folder: Path
    environ: dict[str, str]  # in which Slurm's commands talk to this cluster

    def run(self, *command: str | Path, cwd: Path | None = None, timeout_s: float = 60) -> str:
        """Return what a command prints; if it fails, fail the test with its output."""
        done = self.try_run(*command, cwd=cwd, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def try_run(
        self, *command: str | Path, cwd: Path | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that may fail."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(self, script: str, *options: str) -> str:
        """Submit a bash script without a log; return its Slurm job id."""
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
        return self.run(*command).strip()

    def read_state(self, job_id: str) -> str:
        """Return Slurm's state of a job or array element, which is available for ten minutes after its end."""
        return self.run("squeue", "-h", "-r", "-t", "all", "-j", job_id, "-o", "%T").strip()

    def wait_for(self, job_id: str, states: str | Collection[str], timeout_s: float = 180) -> str:
        """Wait until a job is in one of these states, such as "RUNNING"; return the state."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout_s
        while (state := self.read_state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                details = self.run("scontrol", "show", "job", job_id)
                pytest.fail(f"job {job_id} is {state}, not {sorted(wanted)}, after {timeout_s} s:\n{details}")
            time.sleep(0.1)
        return state


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster without accounting, like most small ones: sacct does not answer."""
    skip_without("slurmctld", "slurmd", "sinfo", packages="slurmctld slurmd slurm-client")
    yield from run_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def lab_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster with slurmdbd and MariaDB: sacct answers."""
    skip_without("slurmctld", "slurmd", "sinfo", packages="slurmctld slurmd slurm-client")
    skip_without(
        "slurmdbd", "mariadbd", "mariadb-install-db", packages="slurmdbd mariadb-server-core mariadb-client-core"
    )
    yield from run_lab(tmp_path_factory.mktemp("lab"), "--accounting")


@pytest.fixture(scope="module")
def lab_limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster that enforces limits: QOS tiny allows 30 minutes, 2 GPUs a user, and one job in the queue."""
    skip_without("slurmctld", "slurmd", "sinfo", packages="slurmctld slurmd slurm-client")
    skip_without(
        "slurmdbd", "mariadbd", "mariadb-install-db", packages="slurmdbd mariadb-server-core mariadb-client-core"
    )
    for lab in run_lab(tmp_path_factory.mktemp("lab"), "--limits", "--nodes=1"):
        user = lab.run("id", "-un").strip()
        tiny = ("MaxWall=00:30:00", "MaxTRESPerUser=gres/gpu=2", "MaxSubmitJobsPerUser=1")
        for words in (("add", "qos", "tiny", "set", *tiny), ("modify", "user", user, "set", "qos+=tiny")):
            lab.run("sacctmgr", "--immediate", *words)
        yield lab


@pytest.fixture(scope="module")
def on_the_lab(lab: Lab) -> Iterator[None]:
    """Point the Slurm commands of this process at the lab."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
        yield


@pytest.fixture(scope="module")
def start(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that submits a run of the stripes family; the runs of a file share folder and data."""
    root = tmp_path_factory.mktemp("cluster")
    yield make_starter(root / "runs", root / "cache")
    lab.run("scancel", "--name=stripes")


def run_lab(folder: Path, *options: str) -> Iterator[Lab]:
    """Start a lab in a folder, and stop it afterwards."""
    started = run_lab_command("up", folder, *options)
    assert started.returncode == 0, started.stderr
    yield Lab(folder, make_lab_environ(folder))
    ended = run_lab_command("down", folder)
    assert ended.returncode == 0, ended.stderr


def run_lab_command(command: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run lab.py as users do."""
    arguments: Sequence[str] = [sys.executable, str(LAB), command, "--dir", str(folder), *options]
    return subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def make_lab_environ(folder: Path) -> dict[str, str]:
    """Return this process's environment with Slurm's commands pointed at the lab in `folder`."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(CLIENT_VARIABLES)}
    return {**others, "SLURM_CONF": str(folder / "etc" / "slurm.conf")}


def skip_without(*programs: str, packages: str) -> None:
    """Skip the test if Slurm is not installed; its daemons are not on most users' PATH."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not found on this machine. Type: apt-get install {packages}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of slurmctld's log below a failed test."""
    report = yield
    if report.failed:
        labs = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Lab)]
        for log in (lab.folder / "log" / "slurmctld.log" for lab in labs):
            if log.exists():
                end = log.read_text(errors="replace").splitlines()[-30:]
                report.sections.append((f"end of {log}", "\n".join(end)))
    return report
