"""Showing a run's log, and following it while it is written."""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.run_folders import NOW, RunFolder
from tests.training import new_run, train
from tests.waiting import wait_until
from trainyard.runs import logs
from trainyard.runs.logs import follow, show


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was submitted as job 12."""
    return RunFolder(tmp_path)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_a_log_the_output_files_of_the_job_are_shown(folder, no_slurm):
    lines: list[str] = []
    show(folder.run, lines.append)
    assert "no output yet" in lines.pop()
    (folder.logs / "12_0_log.out").write_text("loading modules\n")
    folder.append_stderr("No module named torch\nhalf a li")
    show(folder.run, lines.append)
    assert lines == ["loading modules", "No module named torch"]


def test_the_log_is_shown_with_messages_of_srun_and_errors_of_the_last_attempt(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.add_error(NOW - 800, "bug", rank=1)
    folder.end(NOW - 700, 1, "crash", "requeue")
    folder.begin(NOW - 600, attempt=1)
    path = folder.add_error(NOW - 500, "bug", rank=3, attempt="12-1", message="here")
    (folder.run / "log").write_text("step 1\n")
    folder.append_stderr("12:00 step 1\nsrun: error: a100-0: task 3: Exited with exit code 1\n")
    lines: list[str] = []
    show(folder.run, lines.append)
    assert lines == [
        "step 1",
        "srun: error: a100-0: task 3: Exited with exit code 1",
        f"rank 3 on a100-0: OutOfMemoryError: here (whole traceback: {path})",
    ]


def test_what_packed_the_data_of_a_sweep_comes_before_the_log_of_its_run(folder, no_slurm, tmp_path):
    path = folder.logs / "submission.json"
    packed = tmp_path / "packing"
    (packed / "slurm").mkdir(parents=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"packing": "11", "packing_run": str(packed)}))
    (packed / "log").write_text("packed 64 samples\n")
    (folder.logs / "11_0_log.out").write_text("packed 64 samples, too\n")
    lines: list[str] = []
    show(folder.run, lines.append)
    assert lines == ["packed 64 samples"], "rank 0 repeats its log"
    folder.begin(NOW - 600)
    folder.append_stderr("No module named torch\n")
    lines.clear()
    show(folder.run, lines.append)
    assert lines[0] == "packed 64 samples" and lines[-1] == "No module named torch", "before the run's own log"
    (folder.run / "log").write_text("step 1\n")
    lines.clear()
    show(folder.run, lines.append)
    assert lines == ["packed 64 samples", "step 1"]


@pytest.mark.slow
def test_following_a_log_continues_through_attempts_and_ends_with_the_run(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.write_heartbeat(time.time())
    lines: list[str] = []
    follower = threading.Thread(target=follow, args=(folder.run, lines.append))
    follower.start()
    log = folder.run / "log"
    log.write_text("attempt 0\n")
    wait_until(lambda: "attempt 0" in lines, "the first attempt's line")
    folder.end(time.time(), 85, "preempted", "requeue")
    wait_until(lambda: any("-- " in line and "waiting" in line for line in lines), "the line that says that it waits")
    folder.begin(time.time(), attempt=1)
    with log.open("a") as file:
        file.write("attempt 1\n")
    folder.add_event(time.time(), "done", 100)
    follower.join(30)
    assert not follower.is_alive()
    assert [line for line in lines if line.startswith("attempt")] == ["attempt 0", "attempt 1"]


def test_a_follower_asks_slurm_once_a_minute_while_the_run_waits_and_never_while_its_heart_beats(
    folder, tmp_path, monkeypatch
):
    answers = {"sbatch": "", "scontrol": "Slurmctld(primary) at x is UP\nClusterName = lab"}
    answers["squeue"] = "ID|STATE|RESTARTS|NODES|REASON\n12|PENDING|0||Resources"
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/calls\n/bin/cat <<'END'\n{answer}\nEND\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(logs, "_READ_INTERVAL_S", 0.05)
    monkeypatch.setattr(logs, "_LOOK_INTERVAL_S", 0.0)  # at each reading: as after 5 s
    lines: list[str] = []
    follower = threading.Thread(target=logs.follow, args=(folder.run, lines.append), daemon=True)
    follower.start()
    wait_until(lambda: any("waiting" in line for line in lines), "the line that says that it waits")
    for number in range(6):
        if number == 3:
            folder.begin(time.time())
            folder.write_heartbeat(time.time())
            wait_until(lambda: any("running" in line for line in lines), "the line that says that it runs")
        with (folder.run / "log").open("a") as file:
            file.write(f"step {number}\n")
        wait_until(lambda: f"step {number}" in lines, "the next reading")  # noqa: B023
    folder.add_event(time.time(), "done", 100)
    follower.join(30)
    assert not follower.is_alive()
    assert (tmp_path / "calls").read_text().split() == ["scontrol", "scontrol", "squeue"]


@pytest.mark.slow
def test_following_a_finished_run_prints_its_log_and_nothing_else(tmp_path):
    run = new_run(tmp_path, "max_duration=4st")
    assert train(run) == 0
    lines: list[str] = []
    follow(run, lines.append)
    assert lines == (run / "log").read_text().splitlines()
