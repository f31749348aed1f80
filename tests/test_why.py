"""What `why` says about a run, from folders written as on a cluster."""

import json
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.run_folders import NOW, RunFolder, format_time, make_slurm_job
from trainyard.runs.why import explain_run, explain_status


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was submitted as job 12."""
    return RunFolder(tmp_path)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_why_names_the_first_ranks_own_error_and_not_its_consequences(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.add_error(NOW - 101, "lost_peer", rank=0)
    path = folder.add_error(NOW - 100, "device_oom", rank=2, message="CUDA out of memory.")
    folder.add_error(NOW - 99, "device_oom", rank=3)
    folder.end(NOW - 60, 1, "crash", "stop")
    output = explain_run(folder.run).splitlines()
    assert output[0].startswith(f"{folder.run} (job 12): failed: out of memory on the GPU, rank 2 on a100-0")
    assert output[1:5] == [
        "rank 2 on a100-0: OutOfMemoryError: CUDA out of memory.",
        "  /home/ann/runs/prints/first/code/jobs/prints/module.py:88 in forward: x = self.block(x)",
        f"  whole traceback: {path}",
        "cause: out of memory on the GPU",
    ]
    assert re.search(r"12-0 .* for 14m .*on a100-0 .*no step .*crashed, final", output[6])
    assert output[-1].startswith(f"next: trainyard resume {folder.run} ")
    assert "trainyard submit prints micro_batch_size=16" in output[-1]


def test_a_killed_rank_is_explained_by_what_srun_wrote_in_the_last_attempt(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.append_stderr("srun: error: a100-0: task 7: Killed\n")
    folder.end(NOW - 800, 137, "crash", "requeue")
    folder.begin(NOW - 700, attempt=1)
    folder.append_stderr(
        "12:00:01 step 3/100\nsrun: error: a100-0: tasks 0-1: Exited with exit code 1\n"
        "srun: error: a100-1: task 5: Segmentation fault (core dumped)\nsrun: error: a100-0: task 6: Killed\n"
        "slurmstepd-a100-0: error: *** STEP 12.0 ON a100-0 CANCELLED AT 2026-01-03T00:26:40 ***\n"
    )
    folder.add_error(NOW - 101, "lost_peer", rank=0, attempt="12-1")
    folder.end(NOW - 100, 139, "budget", "stop", attempt=1)
    output = explain_run(folder.run)
    assert "failed: killed by signal 11, rank 5 on a100-1; attempt budget used up" in output
    assert "srun: error: a100-1: task 5: Segmentation fault (core dumped)\ncause: killed by signal 11\n" in output
    assert "task 7" not in output


@pytest.mark.parametrize(
    "message",
    [
        "srun: error: a100-0: task 2: Out Of Memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd-a100-0: error: Detected 1 oom-kill event(s) in StepId=12.0.",
    ],
)
def test_a_rank_killed_for_memory_is_distinguished_from_one_that_was_just_killed(folder, no_slurm, message):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 137, "crash", "stop")
    folder.append_stderr(f"{message}\nsrun: error: a100-0: task 2: Killed\n")
    assert folder.read_status().cause == "host_oom"
    output = explain_run(folder.run)
    assert f"{message}\n" in output
    assert "data.threads=2" in output.splitlines()[-1]


def test_the_rank_that_ran_out_of_memory_is_named_and_not_one_killed_with_it(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 137, "crash", "stop")
    folder.append_stderr("srun: error: a100-0: task 1: Killed\nsrun: error: a100-1: task 9: Out Of Memory\n")
    assert folder.read_status().detail == "out of memory on the host, rank 9 on a100-1"


def test_without_a_message_from_srun_its_exit_code_tells_the_signal(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 134, "crash", "stop")
    assert folder.read_status().cause == "signal 6"


def test_an_attempt_without_rank_errors_is_explained_by_the_end_of_its_standard_error(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.append_stderr("an earlier attempt\n")
    folder.end(NOW - 800, 127, "crash", "requeue")
    folder.begin(NOW - 700, attempt=1)
    folder.append_stderr("env: 'python3.11': No such file or directory\n")
    folder.end(NOW - 600, 127, "crash", "stop", attempt=1)
    output = explain_run(folder.run)
    path = folder.logs / "12_0_log.err"
    assert f"the end of {path}:\n  env: 'python3.11': No such file or directory\ncause: crashed\n" in output
    assert "an earlier attempt" not in output


def test_of_a_large_standard_error_only_the_end_is_read(folder, no_slurm):
    folder.begin(NOW - 900)
    with (folder.logs / "12_0_log.err").open("a") as file:
        file.truncate(2**29)  # sparse
    folder.append_stderr("\nsrun: error: a100-0: task 1: Killed\n")
    folder.end(NOW - 100, 137, "crash", "stop")
    tracemalloc.start()
    assert "rank 1 on a100-0" in explain_run(folder.run)
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


def test_a_job_that_ended_before_its_first_attempt_is_not_explained_by_the_job_before_it(folder):
    folder.begin(NOW - 900)
    folder.add_error(NOW - 800, "bug")
    folder.end(NOW - 790, 1, "crash", "stop")
    folder.submit("15", NOW - 700)
    folder.append_stderr("/var/spool/slurmd/job15/slurm_script: line 21: cd: /lab: No such file\n", job="15")
    status = folder.read_status(make_slurm_job("FAILED", job="15"))
    output = explain_status(status)
    assert output.splitlines()[0].endswith("(job 15): failed: crashed: Slurm says FAILED")
    assert f"the end of {folder.logs / '15_0_log.err'}:\n  /var/spool" in output
    assert "OutOfMemoryError" not in output


def test_a_local_background_run_is_resumed_here(tmp_path, no_slurm):
    folder = RunFolder(tmp_path, job=None)
    submission = {"scheduler": "local", "job": "4711", "gpus": 2, "submitted": format_time(NOW - 100)}
    (folder.logs / "submission.json").write_text(json.dumps(submission))
    folder.add_error(NOW - 50, "bug", attempt=f"local-{int(NOW - 90)}")
    assert explain_run(folder.run).splitlines()[-1] == f"next: fix the code, then: trainyard resume {folder.run} --here"


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("not_finite", "trainyard submit prints optimizer.lr=0.002"),
        ("disk_full", "free disk space for "),
        ("disk_error", "see the system's messages about the disk of "),
        ("bug", "fix the code, then: trainyard resume "),
        ("user_error", "follow the message, then: trainyard resume "),
        ("user_error", "(for an option that a run keeps: trainyard submit prints OPTION=VALUE)"),
        ("lost_peer", "trainyard resume "),
    ],
)
def test_why_ends_with_what_to_change(folder, no_slurm, cause, advice):
    folder.begin(NOW - 900)
    folder.add_error(NOW - 101, cause)
    folder.end(NOW - 100, 1, "crash", "stop")
    *_, note, last = explain_run(folder.run).splitlines()
    assert note.startswith("Answered from the run folders only. ")
    assert last.startswith("next: ")
    assert advice in last


def test_the_lost_rank_is_named_and_not_those_that_lost_it(folder, no_slurm):
    folder.begin(NOW - 900)
    for rank in (0, 3):
        folder.add_error(NOW - 100, "lost_peer", rank=rank, message="Connection closed by peer [10.0.0.7]:4711")
    (folder.run / "ranks").mkdir()
    for rank, host in ((0, "a100-0"), (2, "a100-1"), (3, "a100-1")):  # rank 1 ended and removed its record
        record = {"time": NOW - 110 + rank, "rank": rank, "host": host, "phase": "training", "step": 40}
        (folder.run / "ranks" / f"12-0-rank{rank}.json").write_text(json.dumps(record))
    folder.end(NOW - 90, 1, "crash", "stop")
    output = explain_run(folder.run)
    assert ": failed: a rank was lost, rank 2 on a100-1" in output.splitlines()[0]
    assert "rank 2 on a100-1 ended without a word: it was killed, or its node was lost. Noticed by rank 0" in output
    assert "Connection closed" not in output


def test_a_rank_that_hung_is_named_whatever_the_others_say(folder, no_slurm):
    folder.begin(NOW - 900)
    hung = folder.add_error(NOW - 101, "hung", rank=0, message="no progress for 2 min")
    folder.add_error(NOW - 102, "lost_peer", rank=1, message="Connection closed by peer [10.0.0.7]:4711")
    hung.write_text(hung.read_text().replace('"rank": 0', '"rank": 5'))  # rank 0 noticed
    folder.end(NOW - 90, 75, "hung", "stop")
    output = explain_run(folder.run)
    assert ": failed: hung, rank 5 on a100-0" in output.splitlines()[0]
    assert f"stacks of all ranks: {folder.run}/ranks/12-0-rank*-stacks.txt" in output
    assert "see where in the stacks" in output.splitlines()[-1]


def test_a_command_that_a_node_does_not_have_is_named_with_the_node(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.append_stderr(
        "slurmstepd: error: execve(): apptainer: No such file or directory\n"
        "srun: error: a100-0: tasks 0-1: Exited with exit code 2\n"
    )
    folder.end(NOW - 800, 2, "no_progress", "stop")
    first, *lines, last = explain_run(folder.run).splitlines()
    assert ": failed: a command of the site was not found, on a100-0; no progress" in first
    assert "on a100-0: there is no apptainer" in lines and "cause: a command of the site was not found" in lines
    assert last == (
        f"next: have that node provide it, or correct setup, python or container in the cluster file, then: "
        f"trainyard resume {folder.run}"
    )


def test_why_reports_nothing_wrong_for_a_running_run(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.write_heartbeat(time.time())
    output = explain_run(folder.run).splitlines()
    assert ": running at step 40/100, 123.4 samples/s: training on a100-0" in output[0]
    assert output[1] == "Nothing is wrong."
    assert output[-1] == f"next: trainyard logs -f {folder.run}"


def test_the_advice_after_no_progress_depends_on_how_the_attempts_ended(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.end(NOW - 800, 1, "no_progress", "stop")
    assert explain_run(folder.run).endswith(f"next: read the log, then: trainyard resume {folder.run}")
    folder.submit("15", NOW - 700)
    folder.begin(NOW - 600, job="15")
    folder.end(NOW - 500, 85, "no_progress", "stop", job="15")
    assert explain_run(folder.run).endswith(
        f"next: save more often: trainyard resume {folder.run} checkpoint.every=5min, or give it more time: "
        f"trainyard resume {folder.run} --time LENGTH"
    )
