"""What is said of a run, from folders written as a cluster writes them, and from real runs on this machine."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from training import new_run, start, train, wait_for_lines

from trainyard.errors import UserError
from trainyard.launch.slurm import SlurmJob
from trainyard.launch.status import (
    CAUSES,
    Status,
    cancel,
    follow,
    pending_reason,
    status_of,
    statuses,
    table,
    why,
)

NOW = 1_767_400_000.0
LONG = ("max_duration=10000ep", "eval_every=10000ep")

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ann/runs/prints/first/code/trainyard/train/engine.py", line 190, in _step
    losses = self.state.model(batch)
  File "/home/ann/runs/prints/first/code/jobs/prints/module.py", line 88, in forward
    x = self.block(x)
        ^^^^^^^^^^^^^
  File "/home/ann/.venv/lib/python3.11/site-packages/torch/nn/modules/conv.py", line 554, in forward
    return self._conv_forward(input, self.weight, self.bias)
torch.OutOfMemoryError: CUDA out of memory.
"""


class Folder:
    """The folder of a run, written as the launcher, the batch script and the ranks write it."""

    def __init__(self, root: Path, *, job: str | None = "12", submitted: float = NOW - 9000) -> None:
        self.run = root / "runs" / "prints" / "20260102-030405-abcdef0"
        self.logs = self.run / "slurm"
        self.logs.mkdir(parents=True)
        (self.run / "config.yaml").write_text("job: prints\noptimizer: {name: adamw, lr: 0.004}\n")
        choices = {"micro_batch_size": {"value": 32, "reason": "as asked"}}
        (self.run / "env.json").write_text(json.dumps({"choices": choices}))
        if job is not None:
            self.submit(job, submitted)

    def submit(self, job: str, at: float) -> None:
        submission = {"scheduler": "slurm", "job": job, "cluster": "lab", "hw": "a100", "gpus": 8, "nodes": 1}
        submission |= {"partition": "a100", "submitted": iso(at, "+00:00"), "folder": str(self.logs)}
        (self.logs / "submission.json").write_text(json.dumps(submission))

    def begin(self, at: float, *, job: str = "12", attempt: int = 0) -> None:
        line = {"event": "start", "job": job, "attempt": attempt, "time": iso(at), "nodes": "a100-0"}
        append(self.logs / "attempts.jsonl", line | {"partition": "a100", "checkpoint": ""})

    def end(self, at: float, code: int, cause: str, action: str, *, job: str = "12", attempt: int = 0) -> None:
        line = {"event": "end", "job": job, "attempt": attempt, "time": iso(at), "code": code, "cause": cause}
        append(self.logs / "attempts.jsonl", line | {"action": action, "reason": ""})

    def event(self, at: float, name: str, step: int, **more: Any) -> None:
        append(
            self.run / "events.jsonl",
            {"kind": "event", "step": step, "event": name, **more, "elapsed_s": 1.0, "time": iso(at, "+00:00")},
        )

    def beat(self, at: float, *, attempt: str = "12-0", step: int = 40, phase: str = "training") -> None:
        beat = {"time": at, "phase": phase, "step": step, "total_steps": 100, "samples_per_s": 123.4}
        (self.run / "heartbeat.json").write_text(json.dumps(beat | {"host": "a100-0", "attempt": attempt}))

    def error(self, at: float, cause: str, *, rank: int = 0, attempt: str = "12-0", message: str = "no") -> Path:
        path = self.run / "errors" / f"{attempt}-rank{rank}.json"
        path.parent.mkdir(exist_ok=True)
        error = {"time": at, "rank": rank, "host": "a100-0", "type": "OutOfMemoryError", "message": message}
        path.write_text(json.dumps(error | {"traceback": TRACEBACK, "cause": cause}))
        return path

    def status(self, *jobs: SlurmJob, asked: bool = True) -> Status:
        return status_of(self.run, {job.id: job for job in jobs}, now=NOW, asked=asked)


def iso(at: float, zone: str = "Z") -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", zone)


def local(at: float) -> str:
    """Write a time as slurmstepd does."""
    return datetime.fromtimestamp(at).isoformat(timespec="seconds")


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def in_slurm(state: str, reason: str = "None", *, job: str = "12", restarts: int | None = 0) -> SlurmJob:
    return SlurmJob(id=job, state=state, reason=reason, nodes="a100-0", restarts=restarts, source="squeue")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A run that was submitted as job 12."""
    return Folder(tmp_path)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


# States


def test_a_run_that_nobody_started_is_new(tmp_path):
    status = Folder(tmp_path, job=None).status()
    assert (status.state, status.step, status.last_sign_s, status.attempts) == ("new", None, None, [])
    assert status.next_command == f"trainyard resume {status.run}"


def test_a_job_in_the_queue_says_in_words_what_it_waits_for(folder):
    status = folder.status(in_slurm("PENDING", "Resources"))
    assert (status.state, status.detail) == ("waiting", "next in the queue; waits until enough GPUs are free")
    assert (status.job, status.partition, status.gpus) == ("12", "a100", 8)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("preempted", "starts again after preemption"),
        ("time_limit", "goes on after its time limit"),
        ("node_failure", "starts again after the loss of a node"),
        ("crash", "starts again after a crash"),
    ],
)
def test_a_requeued_job_says_after_what_it_starts_again(folder, cause, words):
    folder.begin(NOW - 900)
    folder.end(NOW - 60, 85, cause, "requeue")
    status = folder.status(in_slurm("PENDING", "BeginTime", restarts=1))
    assert status.state == "waiting"
    assert status.detail.startswith(f"{words}: ")


def test_a_job_restarted_by_slurm_before_it_could_write_waits_to_start_again(folder):
    folder.begin(NOW - 900)
    requeued = in_slurm("PENDING", "BeginTime", restarts=1)
    assert folder.status(requeued).detail.startswith("starts again: ")
    (folder.logs / "signal-12-0").write_text(f"SIGTERM {NOW - 70}\n")
    assert folder.status(requeued).detail.startswith("starts again after preemption: ")


@pytest.mark.parametrize(
    ("reason", "cause", "command"),
    [
        ("JobHeldUser", "held", "scontrol release 12"),
        ("launch failed requeued held", "held", "scontrol release 12"),
        ("PartitionTimeLimit", "never_starts", "trainyard cancel "),
    ],
)
def test_a_job_that_will_not_start_by_itself_says_what_to_do(folder, reason, cause, command):
    status = folder.status(in_slurm("PENDING", reason))
    assert (status.state, status.cause) == ("waiting", cause)
    assert status.next_command.startswith(command)


def test_a_running_job_says_where_it_is_and_how_fast(folder):
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.beat(NOW - 3)
    status = folder.status(in_slurm("RUNNING"))
    assert (status.state, status.detail) == ("running", "training on a100-0")
    assert (status.step, status.total_steps, status.samples_per_s) == (40, 100, 123.4)
    assert status.last_sign_s == pytest.approx(3)


def test_a_running_job_without_a_sign_of_life_is_silent_and_says_since_when(folder):
    folder.begin(NOW - 9000)
    folder.event(NOW - 8990, "start", 0)
    folder.beat(NOW - 3600, phase="evaluating")
    status = folder.status(in_slurm("RUNNING"))
    assert status.state == "silent"
    since = f"{datetime.fromtimestamp(NOW - 3600):%Y-%m-%d %H:%M}"
    assert status.detail == f"no sign of life for 1h00m, since {since}, evaluating on a100-0"
    assert folder.status(in_slurm("SUSPENDED")).state == "running"


def test_a_job_that_slurm_has_just_started_again_is_not_silent(folder):
    folder.begin(NOW - 9000)
    folder.end(NOW - 8000, 85, "preempted", "requeue")
    assert folder.status(in_slurm("RUNNING")).state == "running"
    assert folder.status(in_slurm("RUNNING")).detail == "starting on a100-0"
    folder.begin(NOW - 5, attempt=1)
    assert folder.status(in_slurm("RUNNING")).state == "running"


def test_a_run_that_prepares_to_go_on_is_where_its_checkpoint_was(folder):
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0, total_steps=100)
    folder.event(NOW - 800, "checkpoint", 40)
    folder.end(NOW - 700, 85, "preempted", "requeue")
    folder.begin(NOW - 10, attempt=1)
    folder.beat(NOW - 5, attempt="12-1", step=0, phase="preparing")
    status = folder.status(in_slurm("RUNNING"))
    assert (status.step, status.detail, status.samples_per_s) == (40, "preparing on a100-0", 123.4)


def test_a_job_that_is_ending_is_judged_by_what_its_last_attempt_said(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 2, 85, "preempted", "requeue")
    assert folder.status(in_slurm("COMPLETING")).state == "waiting"
    folder.begin(NOW - 1, attempt=1)
    folder.end(NOW - 1, 86, "max_runtime", "stop", attempt=1)
    assert folder.status(in_slurm("COMPLETING")).state == "stopped"


def test_done_is_believed_before_slurm_unless_the_run_was_started_later(folder):
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0, total_steps=100)
    folder.event(NOW - 10, "done", 100)
    assert folder.status(in_slurm("RUNNING")).state == "done"
    assert folder.status(in_slurm("FAILED")).next_command.startswith("trainyard report ")
    folder.event(NOW - 5, "resume", 100)
    assert folder.status(in_slurm("RUNNING")).state == "running"


@pytest.mark.parametrize(
    ("word", "state", "cause"),
    [
        ("CANCELLED", "stopped", "cancelled"),
        ("TIMEOUT", "stopped", "time_limit"),
        ("DEADLINE", "stopped", "time_limit"),
        ("PREEMPTED", "stopped", "preempted"),
        ("NODE_FAIL", "failed", "node_failure"),
        ("OUT_OF_MEMORY", "failed", "host_oom"),
        ("FAILED", "failed", "crash"),
    ],
)
def test_a_job_that_could_not_say_how_it_ended_is_judged_by_slurms_word(folder, word, state, cause):
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0)
    status = folder.status(in_slurm(word))
    assert (status.state, status.cause) == (state, cause)


def test_a_completed_job_without_the_event_done_is_not_called_done(folder):
    folder.begin(NOW - 900)
    assert folder.status(in_slurm("COMPLETED")).state == "stopped"
    folder.end(NOW - 10, 0, "done", "stop")
    assert folder.status(in_slurm("COMPLETED")).state == "stopped"
    assert folder.status().state == "stopped"


def test_a_job_that_slurm_did_not_start_again_as_it_was_asked_says_so(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 60, 85, "preempted", "requeue")
    status = folder.status(in_slurm("FAILED"))
    assert (status.state, status.detail) == ("stopped", "preempted; Slurm did not start it again (FAILED)")


@pytest.mark.parametrize(
    ("code", "cause", "state"),
    [
        (85, "preempted", "stopped"),
        (85, "time_limit", "stopped"),
        (87, "asked", "stopped"),
        (86, "max_runtime", "stopped"),
        (2, "user_error", "failed"),
        (1, "crash", "failed"),
        (85, "no_progress", "failed"),
        (1, "budget", "failed"),
    ],
)
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_last_attempt(folder, code, cause, state):
    folder.begin(NOW - 900)
    folder.end(NOW - 60, code, cause, "stop")
    for status in (folder.status(), folder.status(asked=False), folder.status(in_slurm("FAILED"))):
        assert (status.state, status.cause) == (state, cause)
        assert CAUSES[cause] in status.detail


def test_a_forgotten_job_without_an_end_is_lost_unless_we_cancelled_it(folder):
    folder.begin(NOW - 9000)
    folder.beat(NOW - 8000)
    assert folder.status().state == "lost"
    (folder.logs / "cancelled").write_text(iso(NOW - 7000))
    assert (folder.status().state, folder.status().cause) == ("stopped", "cancelled")


def test_a_job_that_we_cancelled_says_so_until_slurm_has_ended_it(folder):
    folder.begin(NOW - 900)
    folder.beat(NOW - 3)
    (folder.logs / "cancelled").write_text(iso(NOW - 2))
    assert folder.status(in_slurm("COMPLETING")).detail == "being cancelled on a100-0"
    assert folder.status(in_slurm("CANCELLED")).cause == "cancelled"


def test_a_process_that_outlived_its_job_is_running(folder):
    folder.begin(NOW - 9000)
    folder.beat(NOW - 3)
    assert folder.status().state == "running"


def test_nothing_is_lost_while_slurm_does_not_answer(folder):
    assert folder.status(asked=False).state == "waiting"
    folder.begin(NOW - 9000)
    folder.beat(NOW - 8000)
    silent = folder.status(asked=False)
    assert silent.state == "silent"
    assert silent.detail.endswith("; Slurm does not answer")
    folder.beat(NOW - 3)
    assert folder.status(asked=False).state == "running"
    folder.end(NOW - 1, 85, "preempted", "requeue")
    assert folder.status(asked=False).state == "waiting"


def test_an_element_of_an_array_is_a_job_like_others(tmp_path):
    folder = Folder(tmp_path, job="12_3")
    folder.begin(NOW - 900, job="12_3")
    folder.error(NOW - 100, "bug", attempt="12_3-0")
    folder.end(NOW - 60, 1, "crash", "stop", job="12_3")
    status = folder.status(in_slurm("FAILED", job="12_3"))
    assert (status.state, status.cause, status.attempts[0].id) == ("failed", "bug", "12_3-0")


def test_only_attempts_of_the_present_job_tell_how_it_stands(folder):
    folder.begin(NOW - 9000)
    folder.end(NOW - 8000, 1, "crash", "stop")
    folder.submit("15", NOW - 100)
    assert folder.status(in_slurm("PENDING", "Priority", job="15")).detail == pending_reason("Priority")
    assert folder.status().state == "lost"


def test_a_submitted_run_that_was_resumed_outside_slurm_is_judged_by_that(folder):
    folder.begin(NOW - 8000)
    folder.event(NOW - 7990, "start", 0, world_size=8, host="a100-0")
    folder.end(NOW - 7000, 1, "crash", "stop")
    folder.event(NOW - 500, "resume", 40, world_size=1, host="desk")
    folder.event(NOW - 400, "stop", 60, reason="asked")
    status = folder.status(in_slurm("FAILED"))
    assert (status.state, status.cause, status.job, status.gpus) == ("stopped", "asked", "", 1)
    assert [attempt.job for attempt in status.attempts] == ["12", ""]
    folder.submit("15", NOW - 100)
    assert folder.status(in_slurm("PENDING", job="15")).state == "waiting"


# Attempts


def test_attempts_are_put_together_from_what_the_host_and_the_training_wrote(folder):
    folder.begin(NOW - 8000)
    folder.event(NOW - 7990, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.event(NOW - 7500, "checkpoint", 40)
    folder.end(NOW - 1000, -1, "node_failure", "slurm")  # written by the attempt that now starts
    folder.begin(NOW - 1000, attempt=1)
    folder.event(NOW - 990, "resume", 40, world_size=4, host="a100-1")
    folder.event(NOW - 500, "stop", 70, reason="preempted")
    folder.end(NOW - 490, 85, "preempted", "requeue", attempt=1)
    folder.begin(NOW - 100, attempt=2)
    folder.event(NOW - 90, "resume", 70, world_size=4)
    folder.beat(NOW - 3, attempt="12-2", step=88)
    first, second, third = folder.status(in_slurm("RUNNING")).attempts
    assert (first.id, first.cause, first.action, first.code, first.steps) == (
        "12-0",
        "node_failure",
        "slurm",
        -1,
        (0, 40),
    )
    assert first.end == NOW - 7500, "the last that was seen of it, not when the next began"
    assert (second.number, second.world_size, second.steps, second.end) == (1, 4, (40, 70), NOW - 490)
    assert (third.end, third.cause, third.steps) == (None, "", (70, 88))


def test_a_line_torn_by_a_crash_is_passed_over_wherever_it_stands(folder):
    for name in ("events.jsonl", "slurm/attempts.jsonl"):
        (folder.run / name).write_text('{"event": "start", "jo\n')
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0)
    folder.event(NOW - 800, "checkpoint", 30)
    for name in ("events.jsonl", "slurm/attempts.jsonl", "heartbeat.json"):
        with (folder.run / name).open("a") as file:
            file.write('{"kind": "ev')
    status = folder.status(in_slurm("RUNNING"))
    assert (status.step, status.attempts[0].steps) == (30, (0, 30))


def test_a_local_attempt_that_failed_before_it_trained_is_no_other_attempts_failure(tmp_path):
    folder = Folder(tmp_path, job=None)
    folder.error(NOW - 5000, "user_error", attempt=f"local-{int(NOW - 5010)}")
    folder.event(NOW - 400, "start", 0, world_size=1, host="desk")
    folder.event(NOW - 300, "stop", 20, reason="time limit")
    first, second = folder.status().attempts
    assert (first.cause, first.steps, first.end) == ("user_error", None, NOW - 5000)
    assert (second.cause, second.steps, second.start) == ("max_runtime", (0, 20), NOW - 400)
    assert (folder.status().state, folder.status().cause) == ("stopped", "max_runtime")


# Why


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
    folder.end(NOW - 800, 137, "crash", "requeue")
    folder.begin(NOW - 700, attempt=1)
    folder.error(NOW - 101, "lost_peer", rank=0, attempt="12-1")
    folder.end(NOW - 100, 139, "budget", "stop", attempt=1)
    (folder.logs / "12_0_log.err").write_text(
        "srun: error: a100-0: task 7: Killed\n"
        f"slurmstepd-a100-0: error: *** JOB 12 ON a100-0 CANCELLED AT {local(NOW - 790)} DUE TO JOB REQUEUE ***\n"
        "Terminated\n12:00:01 step 3/100\nsrun: error: a100-0: tasks 0-1: Exited with exit code 1\n"
        "srun: error: a100-1: task 5: Segmentation fault (core dumped)\nsrun: error: a100-0: task 6: Killed\n"
        f"slurmstepd-a100-0: error: *** STEP 12.0 ON a100-0 CANCELLED AT {local(NOW - 100)} ***\n"
    )
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
    (folder.logs / "12_0_log.err").write_text(f"{complaint}\nsrun: error: a100-0: task 2: Killed\n")
    assert folder.status().cause == "host_oom"
    said = why(folder.run)
    assert f"{complaint}\n" in said
    assert "data.threads=2" in said.splitlines()[-1]


def test_the_rank_that_ran_out_of_memory_is_named_and_not_one_killed_with_it(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 137, "crash", "stop")
    (folder.logs / "12_0_log.err").write_text(
        "srun: error: a100-0: task 1: Killed\nsrun: error: a100-1: task 9: Out Of Memory\n"
    )
    assert folder.status().detail == "out of memory on the host, rank 9 on a100-1"


def test_a_rank_of_which_srun_says_nothing_was_killed_by_the_signal_in_its_code(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 134, "crash", "stop")
    assert folder.status().cause == "signal 6"


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


def test_every_reason_slurm_gives_is_put_into_words_and_an_unknown_one_kept():
    assert pending_reason("(QOSMaxGRESPerUser)") == "you use as many GPUs as your QOS allows one user"
    assert pending_reason("QOSMaxCpuPerUserLimit") == "a limit of its QOS is reached"
    assert pending_reason("AssocGrpGRES") == "all GPUs of your account are in use"
    assert pending_reason("AssocGrpCPUMinutesLimit") == "your account is at its limit"
    assert pending_reason("ReqNodeNotAvail, UnavailableNodes:a100-0") == "its nodes are down, drained or reserved"
    assert pending_reason("DependencyNeverSatisfied").endswith("so it will never start")
    assert pending_reason("Dependency") == "waits for another job to end"
    assert pending_reason("burst_buffer: x") == "Slurm says: burst_buffer: x"
    assert pending_reason("None") == "Slurm has not looked at it yet"


# The table


def test_the_table_is_aligned_and_fits_a_screen_and_ends_with_what_to_type(tmp_path):
    folders = [Folder(tmp_path / str(i), job=f"123456{i}_17") for i in range(3)]
    folders[0].begin(NOW - 7200, job="1234560_17")
    folders[0].beat(NOW - 3, attempt="1234560_17-0", step=1_000_000)
    folders[1].begin(NOW - 7200, job="1234561_17")
    folders[1].error(NOW - 100, "bug", attempt="1234561_17-0", message="long " * 90)
    folders[1].end(NOW - 99, 1, "crash", "stop", job="1234561_17")
    folders[2].event(NOW - 5, "done", 100)
    found = [folders[0].status(in_slurm("RUNNING", job="1234560_17")), *(f.status() for f in folders[1:])]
    lines = table(found, NOW).splitlines()
    assert all(len(line) <= 120 for line in lines[:-1])
    assert lines[0].split() == ["RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "SIGN", "JOB", "ON"]
    columns = [lines[0].index(name) for name in ("STATE", "JOB", "ON")]
    assert [lines[1][c:].split()[0] for c in columns] == ["running", "1234560_17", "a100"]
    assert "2h00m" in lines[1]
    assert lines[3] == "    an error in the code, rank 0 on a100-0"
    assert lines[-1] == f"next: trainyard why {folders[1].run}"


# Real runs on this machine


def test_a_run_here_is_running_then_stopped_when_asked_then_done(tmp_path):
    run = new_run(tmp_path, *LONG)
    process = start(run)
    wait_for_lines(run, 3, process)
    (status,), note = statuses([run])
    assert (status.state, status.job, note) == ("running", "", "")
    assert f"process {process.pid} on " in status.detail
    (said,) = cancel([run])
    assert said.endswith(f"asked its process to save and leave. Go on: trainyard resume {run}")
    process.join(60)
    assert process.exitcode == 87
    (status,), _ = statuses([run])
    assert (status.state, status.cause) == ("stopped", "asked")
    assert status.attempts[0].steps == (0, status.step)
    with pytest.raises(UserError, match=r"Nothing to cancel: stripes/\S+ is stopped \(asked to stop\)"):
        cancel([run])


def test_a_run_that_finished_here_is_done_and_its_log_is_read(tmp_path):
    run = new_run(tmp_path, "max_duration=4st")
    assert train(run) == 0
    (status,), _ = statuses([run])
    assert (status.state, status.step, status.total_steps, status.cause) == ("done", 4, 4, "")
    said: list[str] = []
    follow(run, follow=True, out=said.append)
    assert said == (run / "log").read_text().splitlines()
    assert "Nothing is wrong." in why(run)


def test_a_run_handed_to_the_background_waits_until_it_has_begun(tmp_path):
    folder = Folder(tmp_path, job=None)
    note = {"scheduler": "local", "job": "4711", "gpus": 2, "submitted": iso(NOW - 5)}
    (folder.logs / "submission.json").write_text(json.dumps(note))
    assert folder.status().state == "waiting"
    (folder.logs / "submission.json").write_text(json.dumps(note | {"submitted": iso(NOW - 100)}))
    assert folder.status().state == "new"
    folder.error(NOW - 50, "bug", attempt=f"local-{int(NOW - 90)}")
    assert (folder.status().state, folder.status().job) == ("failed", "")
    assert "--here" in why(folder.run).splitlines()[-1]


def test_a_run_killed_here_is_lost_and_a_run_elsewhere_is_out_of_reach(tmp_path):
    run = new_run(tmp_path, *LONG)
    process = start(run)
    wait_for_lines(run, 3, process)
    process.kill()
    process.join()
    (status,), _ = statuses([run])
    assert status.state == "lost"
    assert f"process {process.pid}" in status.detail
    lock = json.loads((run / "lock").read_text())
    (run / "lock").write_text(json.dumps(lock | {"host": "elsewhere"}))
    (status,), _ = statuses([run])
    assert (status.state, status.detail.endswith(" on elsewhere")) == ("running", True)
    with pytest.raises(UserError, match=f"Type there: kill -INT {process.pid}"):
        cancel([run])


# Logs


def test_before_there_is_a_log_the_files_of_the_job_are_read(folder, no_slurm):
    said: list[str] = []
    follow(folder.run, follow=False, out=said.append)
    assert "no output yet" in said.pop()
    (folder.logs / "12_0_log.out").write_text("loading modules\n")
    (folder.logs / "12_0_log.err").write_text("No module named torch\nhalf a li")
    follow(folder.run, follow=False, out=said.append)
    assert said == ["loading modules", "No module named torch"]


def test_beside_the_log_stand_sruns_complaints_and_the_errors_of_the_last_attempt(folder, no_slurm):
    folder.begin(NOW - 900)
    folder.error(NOW - 800, "bug", rank=1)
    folder.end(NOW - 700, 1, "crash", "requeue")
    folder.begin(NOW - 600, attempt=1)
    path = folder.error(NOW - 500, "bug", rank=3, attempt="12-1", message="here")
    (folder.run / "log").write_text("step 1\n")
    (folder.logs / "12_0_log.err").write_text("12:00 step 1\nsrun: error: a100-0: task 3: Exited with exit code 1\n")
    said: list[str] = []
    follow(folder.run, follow=False, out=said.append)
    assert said == [
        "step 1",
        "srun: error: a100-0: task 3: Exited with exit code 1",
        f"rank 3 on a100-0: OutOfMemoryError: here (whole traceback: {path})",
    ]


def test_following_a_log_goes_on_over_attempts_and_ends_with_the_run(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.beat(time.time())
    said: list[str] = []
    follower = threading.Thread(target=follow, args=(folder.run,), kwargs={"follow": True, "out": said.append})
    follower.start()
    log = folder.run / "log"
    log.write_text("attempt 0\n")
    wait_until(lambda: "attempt 0" in said)
    folder.end(time.time(), 85, "preempted", "requeue")
    wait_until(lambda: any("-- " in line and "waiting" in line for line in said))
    folder.begin(time.time(), attempt=1)
    with log.open("a") as file:
        file.write("attempt 1\n")
    folder.event(time.time(), "done", 100)
    follower.join(30)
    assert not follower.is_alive()
    assert [line for line in said if line.startswith("attempt")] == ["attempt 0", "attempt 1"]


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Cancelling


def test_a_cancellation_that_slurm_refuses_leaves_no_mark(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.beat(time.time())
    with pytest.raises(UserError):
        cancel([folder.run])
    assert not (folder.logs / "cancelled").exists()


def test_asking_how_runs_stand_loads_no_torch():
    code = "import sys, trainyard.launch.status; print([m for m in ('torch', 'h5py', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
