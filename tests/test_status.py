"""How runs stand, from folders written as a cluster writes them, and from real runs on this machine."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.run_folders import NOW, Folder, append, in_slurm, iso
from tests.training import new_run, start, train, wait_for_lines
from trainyard import cli
from trainyard.errors import UserError
from trainyard.launch.cancel import cancel
from trainyard.runs.state import describe_cause
from trainyard.runs.status import next_command, overview, pending_reason, statuses, table

LONG = ("max_duration=10000ep", "eval_every=10000ep")


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
    assert (status.state, status.step, status.last_activity_s, status.attempts) == ("new", None, None, [])
    assert next_command(status) == f"trainyard resume {status.run}"


def test_a_job_in_the_queue_says_in_words_what_it_waits_for(folder):
    status = folder.status(in_slurm("PENDING", "Resources"))
    assert (status.state, status.detail) == ("waiting", "next in the queue; waits until enough GPUs are free")
    assert (status.slurm_job_id, status.partition, status.gpus) == ("12", "a100", 8)


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
    assert next_command(status).startswith(command)


def test_a_running_job_says_where_it_is_and_how_fast(folder):
    folder.begin(NOW - 900)
    folder.event(NOW - 890, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.beat(NOW - 3)
    status = folder.status(in_slurm("RUNNING"))
    assert (status.state, status.detail) == ("running", "training on a100-0")
    assert (status.step, status.total_steps, status.samples_per_s) == (40, 100, 123.4)
    assert status.last_activity_s == pytest.approx(3)


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
    assert next_command(folder.status(in_slurm("FAILED"))).startswith("trainyard report ")
    folder.begin(NOW - 6, attempt=1)
    folder.event(NOW - 5, "resume", 100, attempt="12-1")
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
        (87, "interrupted", "stopped"),
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
    for status in (
        folder.status(),
        folder.status(slurm_unavailable_reason="silence"),
        folder.status(in_slurm("FAILED")),
    ):
        assert (status.state, status.cause) == (state, cause)
        assert describe_cause(cause) in status.detail


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
    assert folder.status(slurm_unavailable_reason="silence").state == "waiting"
    folder.begin(NOW - 9000)
    folder.beat(NOW - 8000)
    silent = folder.status(slurm_unavailable_reason="silence")
    assert silent.state == "silent"
    assert silent.detail.endswith("; Slurm could not be asked")
    folder.beat(NOW - 3)
    assert folder.status(slurm_unavailable_reason="silence").state == "running"
    folder.end(NOW - 1, 85, "preempted", "requeue")
    assert folder.status(slurm_unavailable_reason="silence").state == "waiting"


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
    folder.event(NOW - 500, "resume", 40, attempt=f"local-{int(NOW - 510)}", world_size=1, host="desk")
    folder.event(NOW - 400, "stop", 60, reason="interrupted")
    status = folder.status(in_slurm("FAILED"))
    assert (status.state, status.cause, status.slurm_job_id, status.gpus) == ("stopped", "interrupted", "", 1)
    assert [attempt.slurm_job_id for attempt in status.attempts] == ["12", ""]
    folder.submit("15", NOW - 100)
    assert folder.status(in_slurm("PENDING", job="15")).state == "waiting"


# Attempts


def test_attempts_are_put_together_from_what_the_host_and_the_training_wrote(folder):
    folder.begin(NOW - 8000)
    folder.event(NOW - 7990, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.event(NOW - 7500, "checkpoint", 40)
    folder.end(NOW - 1000, -1, "node_failure", "slurm")  # written by the attempt that now starts
    folder.begin(NOW - 1000, attempt=1)
    folder.event(NOW - 990, "resume", 40, attempt="12-1", world_size=4, host="a100-1")
    folder.event(NOW - 500, "stop", 70, reason="preempted")
    folder.end(NOW - 490, 85, "preempted", "requeue", attempt=1)
    folder.begin(NOW - 100, attempt=2)
    folder.event(NOW - 90, "resume", 70, attempt="12-2", world_size=4)
    folder.beat(NOW - 3, attempt="12-2", step=88)
    first, second, third = folder.status(in_slurm("RUNNING")).attempts
    assert (first.id, first.cause, first.action, first.code) == ("12-0", "node_failure", "slurm", -1)
    assert first.steps == (0, 40)
    assert first.end == NOW - 7500, "the last that was seen of it, not when the next began"
    assert (second.id, second.world_size, second.steps, second.end) == ("12-1", 4, (40, 70), NOW - 490)
    assert (third.end, third.cause, third.steps) == (None, "", (70, 88))


def test_an_attempt_has_the_events_that_name_it_whatever_the_clocks_say(folder):
    local = f"local-{int(NOW - 2000)}"
    folder.begin(NOW - 8000)
    folder.event(NOW - 8030, "start", 0)  # the clock of this node is half a minute behind
    folder.event(NOW - 7000, "checkpoint", 30)
    folder.event(NOW - 1990, "resume", 30, attempt=local)
    folder.event(NOW - 1900, "checkpoint", 40)
    folder.error(NOW - 1950, "user_error", attempt=f"local-{int(NOW - 1995)}")  # found the run locked
    folder.begin(NOW - 1800, attempt=1)
    folder.event(NOW - 1830, "resume", 40, attempt="12-1")
    folder.event(NOW - 1700, "checkpoint", 50)
    attempts = folder.status(in_slurm("RUNNING", restarts=1)).attempts
    steps = {attempt.id: attempt.steps for attempt in attempts}
    assert steps == {"12-0": (0, 30), local: (30, 40), f"local-{int(NOW - 1995)}": None, "12-1": (40, 50)}


def test_a_start_that_names_no_attempt_belongs_to_none_and_hides_no_other_run(tmp_path):
    torn, whole = Folder(tmp_path / "torn", job=None), Folder(tmp_path / "whole", job=None)
    append(torn.run / "events.jsonl", {"event": "start", "step": 0, "time": iso(NOW - 400)})
    torn.event(NOW - 390, "checkpoint", 10)
    torn.event(NOW - 300, "resume", 10, attempt=f"local-{int(NOW - 310)}")
    torn.event(NOW - 200, "stop", 20, reason="asked")
    whole.event(NOW - 100, "start", 0, attempt=f"local-{int(NOW - 110)}")
    whole.event(NOW - 90, "stop", 5, reason="interrupted")
    (first, second), _ = statuses([torn.run, whole.run])
    assert [attempt.steps for attempt in first.attempts] == [(10, 20)]
    assert (second.state, second.cause) == ("stopped", "interrupted")


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
    folder.event(NOW - 390, "start", 0, attempt=f"local-{int(NOW - 400)}", world_size=1, host="desk")
    folder.event(NOW - 300, "stop", 20, reason="time limit")
    first, second = folder.status().attempts
    assert (first.cause, first.steps, first.end) == ("user_error", None, NOW - 5000)
    assert (second.cause, second.steps, second.start) == ("max_runtime", (0, 20), NOW - 400)
    assert (folder.status().state, folder.status().cause) == ("stopped", "max_runtime")


def test_every_reason_slurm_gives_is_put_into_words_and_an_unknown_one_kept():
    assert pending_reason("QOSMaxGRESPerUser") == "you use as many GPUs as your QOS allows one user"
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


def test_a_sweep_too_long_for_a_screen_is_counted_and_what_is_not_done_is_shown_most_urgent_first(tmp_path):
    found = []
    for i in range(100):
        folder = Folder(tmp_path / f"{i:02d}", job=f"12_{i}")
        if i < 30:
            folder.event(NOW - 5, "done", 100)
        elif i < 32:
            folder.begin(NOW - 90, job=folder.job)
        state = "FAILED" if i == 30 else "RUNNING" if i == 31 else "PENDING"
        found.append(folder.status(in_slurm(state, "JobArrayTaskLimit", job=folder.job)))
    lines = overview(found, NOW).splitlines()
    assert lines[0] == "100 runs: 1 failed, 1 running, 68 waiting, 30 done"
    assert [line.split()[1] for line in lines[2:3] + lines[4:6]] == ["failed", "running", "waiting"]
    assert lines[3] == "    crashed: Slurm says FAILED"
    reason = "    as many runs of its sweep are running as may run at once"
    assert lines.count(reason) == 1, "what all say is said once"
    assert lines[-2:] == ["and 56 more: trainyard runs lists all", f"next: trainyard why {found[30].run}"]
    assert len(lines) == 20
    everything_done = overview(found[:30], NOW).splitlines()
    assert everything_done == ["30 runs: 30 done", f"next: trainyard report {found[0].run}"]


def test_where_there_is_no_run_one_is_told_what_to_type(tmp_path, capsys):
    for command in ("status", "runs"):
        assert cli.main([command, "--runs", str(tmp_path)]) == 0
        said = f"{tmp_path}: no runs yet.\nnext: trainyard run JOB, or submit JOB (trainyard jobs lists them)\n"
        assert capsys.readouterr().out == said
    new_run(tmp_path)
    assert cli.main(["runs", "stripe", "--runs", str(tmp_path / "runs")]) == 2
    assert "no run of job 'stripe'. There are runs of: stripes." in capsys.readouterr().err


# Several Slurms


@pytest.fixture
def slurm_named_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands as they answer where ClusterName is lab and job 12 runs; returns the file of ids asked for."""
    asked = tmp_path / "asked"
    answers = {
        "sbatch": "exit 1",
        "scontrol": 'if [ "$1" = ping ]; then echo "Slurmctld(primary) at x is UP"; else echo "ClusterName = lab"; fi',
        "squeue": f'echo "$@" >>{asked}; echo "12|RUNNING|0|a100-0|None"',
        "scancel": f'echo scancel "$@" >>{asked}',
    }
    for command, script in answers.items():
        path = tmp_path / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return asked


def test_a_job_of_another_slurm_is_not_mixed_up_with_one_of_the_same_number_here(tmp_path, slurm_named_lab):
    here, other = Folder(tmp_path / "here"), Folder(tmp_path / "other", slurm_name="tower")
    (mine, theirs), note = statuses([here.run, other.run])
    assert (mine.state, mine.slurm_unavailable_reason) == ("running", "")
    assert (theirs.state, theirs.detail.endswith("; Slurm could not be asked")) == ("waiting", True)
    sentence = "Job 12 belongs to the Slurm 'tower', this one is 'lab'."
    assert note == f"Answered from the folders of the runs. {sentence}"
    with pytest.raises(UserError, match=sentence):
        cancel([here.run, other.run])
    assert "scancel" not in slurm_named_lab.read_text(), "one out of reach: none is ended"
    assert not (here.logs / "cancelled").exists()
    statuses([other.run])
    assert len(slurm_named_lab.read_text().splitlines()) == 2, "of jobs elsewhere alone, squeue is not asked"


# Real runs on this machine


def test_a_run_here_is_running_then_stopped_when_asked_then_done(tmp_path):
    run = new_run(tmp_path, *LONG)
    process = start(run)
    wait_for_lines(run, 3, process)
    (status,), note = statuses([run])
    assert (status.state, status.slurm_job_id, note) == ("running", "", "")
    assert f"process {process.pid} on " in status.detail
    (said,) = cancel([run])
    assert said.endswith(f"asked its process to save and leave. Go on: trainyard resume {run}")
    process.join(60)
    assert process.exitcode == 87
    (status,), _ = statuses([run])
    assert (status.state, status.cause) == ("stopped", "interrupted")
    assert status.attempts[0].steps == (0, status.step)
    with pytest.raises(UserError, match=r"Nothing to cancel: stripes/\S+ is stopped \(interrupted by a person\)"):
        cancel([run])


def test_a_run_that_finished_here_is_done(tmp_path):
    run = new_run(tmp_path, "max_duration=4st")
    assert train(run) == 0
    (status,), _ = statuses([run])
    assert (status.state, status.step, status.total_steps, status.cause) == ("done", 4, 4, "")


def test_a_run_handed_to_the_background_waits_until_it_has_begun(tmp_path):
    folder = Folder(tmp_path, job=None)
    note = {"scheduler": "local", "job": "4711", "gpus": 2, "submitted": iso(NOW - 5)}
    (folder.logs / "submission.json").write_text(json.dumps(note))
    assert folder.status().state == "waiting"
    (folder.logs / "submission.json").write_text(json.dumps(note | {"submitted": iso(NOW - 100)}))
    assert folder.status().state == "new"
    folder.error(NOW - 50, "bug", attempt=f"local-{int(NOW - 90)}")
    assert (folder.status().state, folder.status().slurm_job_id) == ("failed", "")


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


# Cancelling


def test_a_cancellation_that_slurm_refuses_leaves_no_mark(folder, slurm_named_lab):
    refusal = "Kill job error on job id 12: Access/permission denied"
    (slurm_named_lab.parent / "bin" / "scancel").write_text(
        f"#!/bin/sh\necho 'scancel: error: {refusal}' >&2; exit 1\n"
    )
    with pytest.raises(UserError, match=f"^scancel: {refusal}"):
        cancel([folder.run])
    assert not (folder.logs / "cancelled").exists()


def test_without_slurm_nothing_is_cancelled_and_the_reason_is_said(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.beat(time.time())
    with pytest.raises(UserError, match=r"^Nothing was cancelled: There is no Slurm here: sbatch is not on PATH\."):
        cancel([folder.run])
    assert not (folder.logs / "cancelled").exists()


def test_asking_how_runs_stand_loads_no_torch():
    code = "import sys, trainyard.runs.status; print([m for m in ('torch', 'h5py', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
