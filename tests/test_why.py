"""What `why` says of a run, from folders written as a cluster writes them."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.run_folders import NOW, Folder, in_slurm, iso
from trainyard.runs.why import explain, why


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A run that was submitted as job 12."""
    return Folder(tmp_path)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_why_names_the_first_ranks_own_error_and_not_its_consequences(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.error(NOW - 101, "lost_peer", rank=0)
    path = folder.error(NOW - 100, "device_oom", rank=2, message="CUDA out of memory.")
    folder.error(NOW - 99, "device_oom", rank=3)
    folder.end(NOW - 60, 1, "crash", "stop")
    said = why(folder.run).splitlines()
    assert said[0].startswith(f"{folder.run} (job 12): failed: out of memory on the GPU, rank 2 on a100-0")
    assert said[1:5] == [
        "rank 2 on a100-0: OutOfMemoryError: CUDA out of memory.",
        "  /home/ann/runs/prints/first/code/jobs/prints/module.py:88 in forward: x = self.block(x)",
        f"  whole traceback: {path}",
        "cause: out of memory on the GPU",
    ]
    assert re.search(r"12-0 .* for 14m .*on a100-0 .*no step .*crashed, final", said[6])
    assert said[-1].startswith(f"next: trainyard resume {folder.run} ")
    assert "trainyard submit prints micro_batch_size=16" in said[-1]


def test_why_of_a_killed_rank_is_what_srun_said_of_the_last_attempt(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.stderr("srun: error: a100-0: task 7: Killed\n")
    folder.end(NOW - 800, 137, "crash", "requeue")
    folder.begin(NOW - 700, attempt=1)
    folder.stderr(
        "12:00:01 step 3/100\nsrun: error: a100-0: tasks 0-1: Exited with exit code 1\n"
        "srun: error: a100-1: task 5: Segmentation fault (core dumped)\nsrun: error: a100-0: task 6: Killed\n"
        "slurmstepd-a100-0: error: *** STEP 12.0 ON a100-0 CANCELLED AT 2026-01-03T00:26:40 ***\n"
    )
    folder.error(NOW - 101, "lost_peer", rank=0, attempt="12-1")
    folder.end(NOW - 100, 139, "budget", "stop", attempt=1)
    said = why(folder.run)
    assert "failed: killed by signal 11, rank 5 on a100-1; budget of attempts used up" in said
    assert "srun: error: a100-1: task 5: Segmentation fault (core dumped)\ncause: killed by signal 11\n" in said
    assert "task 7" not in said


@pytest.mark.parametrize(
    "complaint",
    [
        "srun: error: a100-0: task 2: Out Of Memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd-a100-0: error: Detected 1 oom-kill event(s) in StepId=12.0.",
    ],
)
def test_a_rank_killed_for_memory_is_told_from_one_that_was_killed(folder, no_slurm, complaint):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 137, "crash", "stop")
    folder.stderr(f"{complaint}\nsrun: error: a100-0: task 2: Killed\n")
    assert folder.status().cause == "host_oom"
    said = why(folder.run)
    assert f"{complaint}\n" in said
    assert "data.threads=2" in said.splitlines()[-1]


def test_the_rank_that_ran_out_of_memory_is_named_and_not_one_killed_with_it(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 137, "crash", "stop")
    folder.stderr("srun: error: a100-0: task 1: Killed\nsrun: error: a100-1: task 9: Out Of Memory\n")
    assert folder.status().detail == "out of memory on the host, rank 9 on a100-1"


def test_a_rank_of_which_srun_says_nothing_was_killed_by_the_signal_in_its_code(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 134, "crash", "stop")
    assert folder.status().cause == "signal 6"


def test_of_an_attempt_whose_ranks_said_nothing_the_end_of_its_standard_error_is_shown(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.stderr("an attempt before\n")
    folder.end(NOW - 800, 127, "crash", "requeue")
    folder.begin(NOW - 700, attempt=1)
    folder.stderr("env: 'python3.11': No such file or directory\n")
    folder.end(NOW - 600, 127, "crash", "stop", attempt=1)
    said = why(folder.run)
    path = folder.logs / "12_0_log.err"
    assert f"the end of {path}:\n  env: 'python3.11': No such file or directory\ncause: crashed\n" in said
    assert "an attempt before" not in said


def test_a_job_that_ended_before_its_first_attempt_is_not_explained_by_the_job_before_it(folder):
    folder.begin(NOW - 900)
    folder.error(NOW - 800, "bug")
    folder.end(NOW - 790, 1, "crash", "stop")
    folder.submit("15", NOW - 700)
    folder.stderr("/var/spool/slurmd/job15/slurm_script: line 21: cd: /lab: No such file\n", job="15")
    status = folder.status(in_slurm("FAILED", job="15"))
    said = explain(status)
    assert said.splitlines()[0].endswith("(job 15): failed: crashed: Slurm says FAILED")
    assert f"the end of {folder.logs / '15_0_log.err'}:\n  /var/spool" in said
    assert "OutOfMemoryError" not in said


def test_a_run_in_this_machines_background_is_resumed_here(tmp_path, no_slurm):
    folder = Folder(tmp_path, job=None)
    note = {"scheduler": "local", "job": "4711", "gpus": 2, "submitted": iso(NOW - 100)}
    (folder.logs / "submission.json").write_text(json.dumps(note))
    folder.error(NOW - 50, "bug", attempt=f"local-{int(NOW - 90)}")
    assert why(folder.run).splitlines()[-1] == f"next: mend the code, then: trainyard resume {folder.run} --here"


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("not_finite", "trainyard submit prints optimizer.lr=0.002"),
        ("disk_full", "make room where"),
        ("bug", "mend the code, then: trainyard resume "),
        ("user_error", "do what the message says, then: trainyard resume "),
        ("lost_peer", "trainyard resume "),
    ],
)
def test_why_ends_with_what_to_change(folder, no_slurm, cause, advice):
    folder.begin(NOW - 900)
    folder.error(NOW - 101, cause)
    folder.end(NOW - 100, 1, "crash", "stop")
    *_, note, last = why(folder.run).splitlines()
    assert note.startswith("Answered from the folders of the runs. ")
    assert last.startswith("next: ")
    assert advice in last


def test_why_of_a_run_that_goes_on_says_that_nothing_is_wrong(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.beat(time.time())
    said = why(folder.run).splitlines()
    assert ": running at step 40/100, 123.4 samples/s: training on a100-0" in said[0]
    assert said[1] == "Nothing is wrong."
    assert said[-1] == f"next: trainyard logs -f {folder.run}"
