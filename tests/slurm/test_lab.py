"""The lab: a real Slurm that starts anywhere, listens only on this machine, and leaves nothing behind."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import LAB, Lab, make_lab_environ, run_lab_command, skip_without
from tests.waiting import wait_until

StartBystander = Callable[[dict[str, str]], subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for a test's own lab; afterwards none of its processes is left."""
    skip_without("slurmctld", "slurmd", "sinfo", packages="slurmctld slurmd slurm-client")
    folder = tmp_path_factory.mktemp("own") / "lab"  # not tmp_path, which contains the test's long name
    yield folder
    run_lab_command("down", folder)
    assert find_processes(folder) == {}


@pytest.fixture(autouse=True)
def _no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a failed test left, before the next one starts."""
    yield
    if "lab" in request.fixturenames:
        lab = request.getfixturevalue("lab")
        lab.run("scancel", "--user", str(os.getuid()))


@pytest.fixture
def start_bystander() -> Iterator[StartBystander]:
    """Return a function that starts a process unrelated to the lab, with a given environment."""
    started = []

    def start(environ: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], env=environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_up_gives_a_fresh_cluster_each_time_and_down_leaves_only_logs(folder: Path) -> None:
    first = run_lab_command("up", folder)
    assert first.returncode == 0, first.stderr
    assert all(name in first.stdout for name in ("p100-[0-1]", "a100-urgent", f"export SLURM_CONF={folder}/etc/"))
    lab = Lab(folder, make_lab_environ(folder))
    old_job = lab.submit("sleep 600", "-p", "a100")
    lab.wait_for(old_job, "RUNNING")
    old = find_processes(folder)

    assert run_lab_command("up", folder, "--nodes", "1").returncode == 0
    assert not old.keys() & find_processes(folder).keys()
    assert lab.run("squeue", "-h", "-t", "all") == ""
    assert int(lab.submit("true", "-p", "a100")) > int(old_job), "a job of the fresh cluster has an old job's id"
    assert len(lab.run("sinfo", "-h", "-N", "-o", "%N", "-p", "p100,rtx2080ti,a5000,a100").split()) == 4
    assert run_lab_command("status", folder).returncode == 0

    for _ in range(2):
        down = run_lab_command("down", folder)
        assert down.returncode == 0, down.stderr
        assert find_processes(folder) == {}
        assert {path.name for path in folder.iterdir()} == {"lab.lock", "log"}
    assert run_lab_command("status", folder).returncode == 1


def test_everything_listens_only_on_the_loopback_address(lab: Lab) -> None:
    job = lab.submit("srun sleep 600", "-p", "a100", "-N2", "--ntasks-per-node=1")
    lab.wait_for(job, "RUNNING")
    assert_only_loopback(lab.folder, {"slurmctld", "slurmd", "srun"})


def test_down_cleans_up_after_an_up_that_was_killed_at_any_moment(folder: Path) -> None:
    for recorded in (0, 1, 2, 5, 9):
        starting = subprocess.Popen([sys.executable, str(LAB), "up", "--dir", str(folder)], stdout=subprocess.DEVNULL)
        wait_until(lambda: (folder / "lab.lock").exists() and len(read_daemons(folder)) >= recorded, "daemons")  # noqa: B023
        starting.kill()
        starting.wait()
        assert recorded == 0 or find_processes(folder)
        ended = run_lab_command("down", folder)
        assert ended.returncode == 0, ended.stderr
        assert find_processes(folder) == {}
    again = run_lab_command("up", folder)
    assert again.returncode == 0, again.stderr


def test_down_ends_the_jobs_of_daemons_that_were_killed(folder: Path) -> None:
    assert run_lab_command("up", folder).returncode == 0
    lab = Lab(folder, make_lab_environ(folder))
    marker = folder.parent / "pids"
    # One rank, and one hidden process: a child without any environment.
    job = lab.submit(f"srun sleep 601 & env -i sleep 602 & echo $! > {marker}; wait", "-p", "a100")
    wait_until(
        lambda: marker.exists() and marker.read_text().strip() and "slurmstepd" in find_processes(folder).values(),
        "the job",
    )
    lab.wait_for(job, "RUNNING")
    hidden = int(marker.read_text())
    wait_until(lambda: Path(f"/proc/{hidden}/environ").read_bytes() == b"", "the process without environment")
    for daemon in read_daemons(folder):
        os.kill(daemon["pid"], signal.SIGKILL)
    wait_until(lambda: "slurmctld" not in find_processes(folder).values(), "slurmctld to end")
    assert "slurmstepd" in find_processes(folder).values()

    ended = run_lab_command("down", folder)
    assert ended.returncode == 0, ended.stderr
    assert find_processes(folder) == {}
    assert not is_running(hidden)


def test_a_process_that_has_a_recorded_pid_by_chance_is_not_touched(
    folder: Path, start_bystander: StartBystander
) -> None:
    assert run_lab_command("up", folder, "--nodes", "1").returncode == 0
    bystander = start_bystander({})
    recorded = read_daemons(folder)
    (folder / "lab.json").write_text(json.dumps([*recorded, {**recorded[0], "pid": bystander.pid}]))
    assert run_lab_command("down", folder).returncode == 0
    assert bystander.poll() is None


def test_a_second_lab_and_a_shell_with_its_slurm_conf_outlive_the_first(
    lab: Lab, folder: Path, start_bystander: StartBystander
) -> None:
    job = lab.submit("sleep 600", "-p", "a5000")
    lab.wait_for(job, "RUNNING")
    wait_until(lambda: "sleep" in find_processes(lab.folder).values(), "the job")
    # A slurmstepd forks children that end or become other programs; the job does not stay RUNNING without its own.
    before = {pid: program for pid, program in find_processes(lab.folder).items() if program != "slurmstepd"}
    assert {"slurmctld", "slurmd", "sleep"} <= set(before.values())
    assert run_lab_command("up", folder).returncode == 0
    shell = start_bystander(make_lab_environ(folder))
    assert run_lab_command("down", folder).returncode == 0
    assert shell.poll() is None
    assert before.items() <= find_processes(lab.folder).items()
    assert lab.read_state(job) == "RUNNING"


def test_a_folder_that_is_not_a_lab_is_refused_and_left_as_it_is(folder: Path) -> None:
    folder.mkdir()
    (folder / "etc").mkdir()
    (folder / "etc" / "precious").write_text("mine")
    for command in ("up", "down"):
        refused = run_lab_command(command, folder)
        assert refused.returncode == 2
        assert (
            refused.stderr == f"slurm lab: {folder}: not empty and not a lab (no lab.lock in it): use an empty --dir\n"
        )
    assert [path.name for path in folder.rglob("*")] == ["etc", "precious"]


def test_a_path_too_long_for_unix_sockets_is_refused_before_the_start(folder: Path) -> None:
    refused = run_lab_command("up", folder / ("x" * 80))
    assert refused.returncode == 2
    assert "Unix sockets below it allow" in refused.stderr
    assert not folder.exists()


def test_missing_packages_are_named_with_what_to_type(tmp_path: Path) -> None:
    # The daemons' folders are always searched, so only Slurm's client can be missing here.
    (tmp_path / "bin").mkdir()
    refused = subprocess.run(
        [sys.executable, str(LAB), "up", "--dir", str(tmp_path / "lab")],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert refused.returncode == 2
    assert "sinfo" in refused.stderr
    assert "apt-get install slurmctld slurmd slurm-client" in refused.stderr
    assert not (tmp_path / "lab").exists()


def test_a_daemon_that_dies_is_reported_with_the_end_of_its_log(folder: Path) -> None:
    broken = folder.parent / "bin" / "slurmctld"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho fatal: nothing works here >&2\nexit 1\n")
    broken.chmod(0o755)
    refused = subprocess.run(
        [sys.executable, str(LAB), "up", "--dir", str(folder)],
        env={"PATH": f"{broken.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2
    assert refused.stderr == "slurm lab: slurmctld died. Its log:\n  fatal: nothing works here\n"
    assert find_processes(folder) == {}


def test_a_typed_gres_gives_a_job_that_many_devices(lab: Lab) -> None:
    devices = lab.run("srun", "-p", "a100", "--gres=gpu:a100:2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert devices == "0,1\n"
    wrong_type = lab.try_run("srun", "-p", "a100", "--gres=gpu:p100:2", "true")
    assert wrong_type.returncode != 0
    assert "Requested node configuration is not available" in wrong_type.stderr


def test_an_urgent_job_preempts_another_which_is_requeued(lab: Lab) -> None:
    whole = ("--exclusive", "-N2")
    victim = lab.submit("sleep 600", "-p", "a100", *whole)
    lab.wait_for(victim, "RUNNING")
    urgent = lab.submit("sleep 1", "-p", "a100-urgent", *whole)
    lab.wait_for(urgent, "COMPLETED")
    lab.wait_for(victim, "RUNNING")
    assert "Restarts=1" in lab.run("scontrol", "show", "job", victim)


def test_the_short_partition_refuses_more_than_a_minute(lab: Lab) -> None:
    refused = lab.try_run("sbatch", "-p", "short", "--time=5", "--output=/dev/null", "--wrap=true")
    assert refused.returncode != 0
    assert "time limit" in refused.stderr.lower()


def test_without_accounting_sacct_does_not_answer(lab: Lab) -> None:
    refused = lab.try_run("sacct")
    assert refused.returncode != 0
    assert "accounting storage is disabled" in refused.stderr


def test_with_accounting_sacct_answers_and_the_database_listens_on_loopback_too(lab_accounting: Lab) -> None:
    lab_accounting.run("srun", "-p", "a100", "--gres=gpu:a100:2", "true")
    query = ("sacct", "-n", "-X", "-P", "-o", "State,AllocTRES")
    wait_until(lambda: "COMPLETED" in lab_accounting.run(*query), "the job in the database", limit_s=30)
    assert "gres/gpu=2" in lab_accounting.run(*query)
    assert_only_loopback(lab_accounting.folder, {"slurmctld", "slurmd", "slurmdbd", "mariadbd"})


def test_a_port_that_is_taken_at_the_last_moment_only_costs_another_try(folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(LAB.parent)
    import lab as script

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = iter([taken.getsockname()[1]])
        choose = script._find_free_ports
        monkeypatch.setattr(script, "_find_free_ports", lambda count: next(first, None) or choose(count))
        script.up(folder, script.Options(nodes=1), environ=dict(os.environ))
        assert next(first, "tried") == "tried" and script.is_up(folder)


def read_daemons(folder: Path) -> list[dict[str, Any]]:
    """Return what the lab recorded about the daemons it started."""
    record = folder / "lab.json"
    return json.loads(record.read_text()) if record.exists() else []


def find_processes(folder: Path) -> dict[int, str]:
    """Return pid and program of every process with a path below a lab's folder in its environment or arguments."""
    found = {}
    for process in (entry for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            known = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            program = (process / "exe").readlink().name
        except OSError:  # it has exited, or belongs to another user
            continue
        if f"{folder}/".encode() in known:
            found[int(process.name)] = program.partition("-")[0]  # Debian calls it slurmctld-wlm
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_only_loopback(folder: Path, expected: set[str]) -> None:
    """Wait until the expected programs listen, and check every address on which the lab's processes listen."""
    wait_until(lambda: {name for name, _ in find_listeners(folder)} == expected, f"{expected} to listen")
    assert {address for _, address in find_listeners(folder)} == {"127.0.0.1"}


def find_listeners(folder: Path) -> list[tuple[str, str]]:
    """Return program and address for each socket on which one of a lab's processes listens."""
    sockets = read_listening_sockets()
    return [
        (name, sockets[inode])
        for pid, name in find_processes(folder).items()
        for inode in read_socket_inodes(pid) & sockets.keys()
    ]


def read_listening_sockets() -> dict[str, str]:
    """Return inode and address of each listening TCP socket of this machine (proc(5), /proc/net/tcp)."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, is_listening = fields[1].partition(":")[0], fields[3] == "0A"
            if is_listening:
                short = table == "tcp"
                found[fields[9]] = socket.inet_ntoa(struct.pack("=I", int(address, 16))) if short else address
    return found


def read_socket_inodes(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none if it has exited."""
    try:
        links = [link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return set()
    return {name[8:-1] for name in links if name.startswith("socket:[")}
