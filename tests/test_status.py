"""Run status, from folders written as on a cluster, and from real runs on this machine."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from tests.run_folders import NOW, RunFolder, append, format_time, make_slurm_job
from tests.training import new_run, start, train, wait_for_lines
from trainyard import cli
from trainyard.cluster.query import JobUsage
from trainyard.errors import UserError
from trainyard.launch.cancel import cancel
from trainyard.launch.submit import settle_end
from trainyard.runs.state import describe_cause
from trainyard.runs.status import read_statuses, render_overview, render_table, render_usage, suggest_command
from trainyard.runs.verdict import explain_pending_reason
from trainyard.runs.why import explain_status
from trainyard.train.recorder import Recorder

LONG = ("max_duration=10000ep", "eval_every=10000ep")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was submitted as job 12."""
    return RunFolder(tmp_path)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


# States


def test_attempts_are_in_their_recorded_order_whatever_their_clocks_said(tmp_path):
    folder, back = RunFolder(tmp_path, job=None), int(NOW) - 7200
    first, second, packing = f"local-{int(NOW)}", f"local-{back}", f"local-{back - 7200}"
    folder.add_event(NOW, "start", 0, attempt=first)
    folder.add_event(back, "resume", 4, attempt=second)
    folder.write_heartbeat(back + 5, attempt=second, step=11)
    folder.add_event(back + 9, "stop", 12, reason="interrupted")
    folder.write_heartbeat(back - 7200, attempt=packing, previous=second, phase="packing", step=0)
    folder.add_error(back - 7190, "user error", attempt=packing)
    status = folder.read_status()
    assert [attempt.id for attempt in status.attempts] == [first, second, packing]
    assert status.cause == "user error" and status.step == 12


def test_a_heartbeat_of_a_writer_that_was_replaced_and_woke_up_says_nothing(folder):
    folder.add_event(NOW - 90, "start", 0, attempt="12-0")
    folder.add_event(NOW - 60, "resume", 4, attempt="12-1")
    folder.write_heartbeat(NOW - 50, attempt="12-1", step=11)
    assert folder.read_status().step == 11
    folder.add_event(NOW - 40, "done", 12)
    folder.write_heartbeat(NOW - 3, attempt="12-0", step=8)
    status = folder.read_status()
    assert (status.step, status.snapshot.heartbeat) == (12, {})


def test_attempts_with_damaged_records_of_their_order_are_listed_by_time(tmp_path):
    folder = RunFolder(tmp_path, job=None)
    for at, name, before in ((2, "local-2", "local-1"), (1, "local-1", "local-2")):
        folder.add_event(at, "start", 0, attempt=name, previous={"attempt": before})
    assert [attempt.id for attempt in folder.read_status().attempts] == ["local-1", "local-2"]


def test_a_run_that_was_never_started_is_new(tmp_path):
    status = RunFolder(tmp_path, job=None).read_status()
    assert (status.state, status.step, status.last_activity_s, status.attempts) == ("new", None, None, [])
    assert suggest_command(status) == f"trainyard resume {status.run}"


def test_a_pending_job_says_what_it_waits_for(folder):
    status = folder.read_status(make_slurm_job("PENDING", "Resources"))
    assert (status.state, status.detail) == ("waiting", "next in the queue; waits until enough GPUs are free")
    assert (status.slurm_job_id, status.partition, status.gpus) == ("12", "a100", 8)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("preempted", "starts again after preemption"),
        ("time_limit", "resumes after its time limit"),
        ("node_failure", "starts again after the loss of a node"),
        ("crash", "starts again after a crash"),
        ("hung", "starts again after a hang"),
    ],
)
def test_a_requeued_job_says_why_it_starts_again(folder, cause, text):
    folder.begin(NOW - 900)
    folder.end(NOW - 60, 85, cause, "requeue")
    status = folder.read_status(make_slurm_job("PENDING", "BeginTime", restarts=1))
    assert status.state == "waiting"
    assert status.detail.startswith(f"{text}: ")


def test_a_job_that_slurm_requeued_before_it_could_record_its_end_waits_to_start_again(folder):
    folder.begin(NOW - 900)
    requeued = make_slurm_job("PENDING", "BeginTime", restarts=1)
    assert folder.read_status(requeued).detail.startswith("starts again: ")
    (folder.logs / "signal-12-0").write_text(f"SIGTERM {NOW - 70}\n")
    assert folder.read_status(requeued).detail.startswith("starts again after preemption: ")


@pytest.mark.parametrize(
    ("reason", "cause", "command"),
    [
        ("JobHeldUser", "held", "scontrol release 12"),
        ("launch failed requeued held", "held", "scontrol release 12"),
        ("PartitionTimeLimit", "never_starts", "trainyard cancel "),
    ],
)
def test_a_job_that_cannot_start_by_itself_says_what_to_type(folder, reason, cause, command):
    status = folder.read_status(make_slurm_job("PENDING", reason))
    assert (status.state, status.cause) == ("waiting", cause)
    assert suggest_command(status).startswith(command)


def test_a_running_job_shows_its_node_and_its_speed(folder):
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.write_heartbeat(NOW - 3)
    status = folder.read_status(make_slurm_job("RUNNING"))
    assert (status.state, status.detail) == ("running", "training on a100-0")
    assert (status.step, status.total_steps, status.samples_per_s) == (40, 100, 123.4)
    assert status.last_activity_s == pytest.approx(3)


def test_a_running_job_without_a_sign_of_life_is_silent_and_says_since_when(folder):
    folder.begin(NOW - 9000)
    folder.add_event(NOW - 8990, "start", 0)
    folder.write_heartbeat(NOW - 3600, phase="evaluating")
    status = folder.read_status(make_slurm_job("RUNNING"))
    assert status.state == "silent"
    since = f"{datetime.fromtimestamp(NOW - 3600):%Y-%m-%d %H:%M}"
    assert status.detail == f"no sign of life for 1h00m, since {since}, evaluating on a100-0"
    assert folder.read_status(make_slurm_job("SUSPENDED")).state == "running"


def test_a_job_that_slurm_has_just_restarted_is_not_silent(folder):
    folder.begin(NOW - 9000)
    folder.end(NOW - 8000, 85, "preempted", "requeue")
    assert folder.read_status(make_slurm_job("RUNNING")).state == "running"
    assert folder.read_status(make_slurm_job("RUNNING")).detail == "starting on a100-0"
    folder.begin(NOW - 5, attempt=1)
    assert folder.read_status(make_slurm_job("RUNNING")).state == "running"


def test_a_run_that_prepares_to_resume_shows_the_step_of_its_checkpoint(folder):
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0, total_steps=100)
    folder.add_event(NOW - 800, "checkpoint", 40)
    folder.end(NOW - 700, 85, "preempted", "requeue")
    folder.begin(NOW - 10, attempt=1)
    folder.write_heartbeat(NOW - 5, attempt="12-1", step=0, phase="preparing")
    status = folder.read_status(make_slurm_job("RUNNING"))
    assert (status.step, status.detail, status.samples_per_s) == (40, "preparing on a100-0", 123.4)


def test_a_completing_job_is_judged_by_what_its_last_attempt_recorded(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 2, 85, "preempted", "requeue")
    assert folder.read_status(make_slurm_job("COMPLETING")).state == "waiting"
    folder.begin(NOW - 1, attempt=1)
    folder.end(NOW - 1, 86, "max_runtime", "stop", attempt=1)
    assert folder.read_status(make_slurm_job("COMPLETING")).state == "stopped"


def test_done_overrides_slurm_unless_the_run_was_started_later(folder):
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0, total_steps=100)
    folder.add_event(NOW - 10, "done", 100)
    assert folder.read_status(make_slurm_job("RUNNING")).state == "done"
    assert suggest_command(folder.read_status(make_slurm_job("FAILED"))).startswith("trainyard report ")
    folder.begin(NOW - 6, attempt=1)
    folder.add_event(NOW - 5, "resume", 100, attempt="12-1")
    assert folder.read_status(make_slurm_job("RUNNING")).state == "running"


@pytest.mark.parametrize(
    ("slurm_state", "state", "cause"),
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
def test_a_job_that_recorded_no_end_is_judged_by_its_slurm_state(folder, slurm_state, state, cause):
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0)
    status = folder.read_status(make_slurm_job(slurm_state))
    assert (status.state, status.cause) == (state, cause)


def test_a_completed_job_without_the_event_done_is_not_done(folder):
    folder.begin(NOW - 900)
    assert folder.read_status(make_slurm_job("COMPLETED")).state == "stopped"
    folder.end(NOW - 10, 0, "done", "stop")
    assert folder.read_status(make_slurm_job("COMPLETED")).state == "stopped"
    assert folder.read_status().state == "stopped"


def test_a_job_that_slurm_did_not_requeue_as_requested_says_so(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 60, 85, "preempted", "requeue")
    status = folder.read_status(make_slurm_job("FAILED"))
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
        folder.read_status(),
        folder.read_status(slurm_unavailable_reason="silence"),
        folder.read_status(make_slurm_job("FAILED")),
    ):
        assert (status.state, status.cause) == (state, cause)
        assert describe_cause(cause) in status.detail


def test_a_forgotten_job_without_a_recorded_end_is_lost_unless_we_cancelled_it(folder):
    folder.begin(NOW - 9000)
    folder.write_heartbeat(NOW - 8000)
    assert folder.read_status().state == "lost"
    (folder.logs / "cancelled").write_text(format_time(NOW - 7000))
    assert (folder.read_status().state, folder.read_status().cause) == ("stopped", "cancelled")


def test_a_job_that_we_cancelled_says_so_until_slurm_has_ended_it(folder):
    folder.begin(NOW - 900)
    folder.write_heartbeat(NOW - 3)
    (folder.logs / "cancelled").write_text(format_time(NOW - 2))
    assert folder.read_status(make_slurm_job("COMPLETING")).detail == "being cancelled on a100-0"
    assert folder.read_status(make_slurm_job("COMPLETING")).is_ending
    assert folder.read_status(make_slurm_job("CANCELLED")).detail == "cancelled"


def test_a_job_that_slurm_is_just_ending_says_so_until_its_attempt_has_recorded_an_end(folder):
    folder.begin(NOW - 900)
    folder.write_heartbeat(NOW - 3)
    ending = folder.read_status(make_slurm_job("COMPLETING"))
    assert (ending.state, ending.detail, ending.is_ending) == ("running", "being ended by Slurm on a100-0", True)
    assert not folder.read_status(make_slurm_job("RUNNING")).is_ending
    folder.end(NOW - 1, 85, "preempted", "requeue")
    assert not folder.read_status(make_slurm_job("COMPLETING")).is_ending


def test_who_cancelled_a_job_is_said_unless_it_was_its_owner(folder):
    folder.begin(NOW - 900)
    details = {by: folder.read_status(make_slurm_job("CANCELLED", by=by)).detail for by in (None, 54321, os.getuid())}
    assert list(details.values()) == ["cancelled outside Trainyard", "cancelled by uid 54321", "cancelled"]
    (folder.logs / "cancelled").write_text(format_time(NOW - 2))
    assert folder.read_status(make_slurm_job("CANCELLED")).detail == "cancelled"


def test_an_attempt_that_was_cancelled_keeps_that_and_by_whom_after_the_run_was_submitted_again(folder):
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0)
    with (folder.logs / "attempts.jsonl").open("a") as file:
        file.write('{"event":"en')  # the disk was full
    cancelled = folder.read_status(make_slurm_job("CANCELLED", by=54321))
    settle_end(cancelled)
    settle_end(folder.read_status())  # which has recorded an end by now
    folder.submit("15", NOW - 10)
    waiting = folder.read_status(make_slurm_job("PENDING", "Priority", job="15"))
    (attempt,) = waiting.attempts
    assert (attempt.cause, attempt.action, attempt.code, attempt.end) == ("cancelled", "stop", -1, NOW - 890)
    assert "cancelled by uid 54321, final" in explain_status(waiting)
    assert (folder.logs / "attempts.jsonl").read_text().count('"end"') == 1


def test_a_whole_id_of_the_largest_array_is_listed(tmp_path):
    job = "67108863_9999"
    folder = RunFolder(tmp_path, job=job)
    assert f" {job} " in render_table([folder.read_status(make_slurm_job("PENDING", job=job))], NOW)


def test_a_process_that_outlived_its_job_is_running(folder):
    folder.begin(NOW - 9000)
    folder.write_heartbeat(NOW - 3)
    assert folder.read_status().state == "running"


def test_nothing_is_lost_while_slurm_does_not_answer(folder):
    assert folder.read_status(slurm_unavailable_reason="silence").state == "waiting"
    folder.begin(NOW - 9000)
    folder.write_heartbeat(NOW - 8000)
    silent = folder.read_status(slurm_unavailable_reason="silence")
    assert silent.state == "silent"
    assert silent.detail.endswith("; Slurm could not be queried")
    folder.write_heartbeat(NOW - 3)
    assert folder.read_status(slurm_unavailable_reason="silence").state == "running"
    folder.end(NOW - 1, 85, "preempted", "requeue")
    assert folder.read_status(slurm_unavailable_reason="silence").state == "waiting"


def test_an_attempt_that_asks_slurm_in_vain_to_requeue_it_says_so(folder):
    folder.begin(NOW - 9000)
    folder.end(NOW - 100, 1, "crash", "requeue")
    (folder.logs / "requeue-12-0").write_text("2026-01-03T00:26:00Z Unable to contact slurm controller\n")
    said = "its attempt keeps asking Slurm to requeue it (2026-01-03T00:26:00Z Unable to contact slurm controller)"
    unseen = folder.read_status(slurm_unavailable_reason="silence")
    assert unseen.state == "waiting"
    assert unseen.detail == f"starts again after a crash: {said}; Slurm could not be queried"
    seen = folder.read_status(make_slurm_job("RUNNING"))
    assert (seen.state, seen.detail) == ("waiting", f"starts again after a crash: {said}")
    requeued = folder.read_status(make_slurm_job("PENDING", "Resources", restarts=1))  # Slurm killed it as it asked
    assert requeued.detail == "starts again after a crash: next in the queue; waits until enough GPUs are free"
    folder.begin(NOW - 10, attempt=1)
    assert folder.read_status(make_slurm_job("RUNNING", restarts=1)).state == "running"


def test_a_code_of_sruns_own_is_no_signal(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 255, "user_error", "stop")
    failed = folder.read_status(make_slurm_job("FAILED"))
    assert (failed.state, failed.cause) == ("failed", "user_error")


def test_a_successor_is_the_same_run(folder):
    folder.begin(NOW - 900)
    folder.end(NOW - 100, 1, "crash", "requeue")
    line = {"event": "successor", "job": "12", "attempt": 0, "time": format_time(NOW - 99), "successor": "13"}
    append(folder.logs / "attempts.jsonl", line)
    waiting = folder.read_status(make_slurm_job("PENDING", "Dependency", job="13"))
    assert (waiting.state, waiting.slurm_job_id) == ("waiting", "13")
    assert waiting.detail == "starts again after a crash: waits for another job to end"
    assert "crashed, continued as Slurm job 13" in explain_status(waiting)
    folder.begin(NOW - 50, job="13")
    folder.append_stderr("srun: error: a100-0: task 3: Killed\n", job="13")
    folder.end(NOW - 20, 137, "no_progress", "stop", job="13")
    failed = folder.read_status(make_slurm_job("FAILED", job="13"))
    assert [attempt.id for attempt in failed.attempts] == ["12-0", "13-0"]
    assert (failed.state, failed.cause) == ("failed", "signal 9")
    folder.submit("15", NOW - 10)
    assert folder.read_status(make_slurm_job("PENDING", "Priority", job="15")).detail == explain_pending_reason(
        "Priority"
    )


@pytest.mark.parametrize("successor", ["-u", "12", 13, "13; rm"])
def test_a_damaged_successor_names_no_job(folder, successor):
    folder.begin(NOW - 900)
    line = {"event": "successor", "job": "12", "attempt": 0, "time": format_time(NOW - 99), "successor": successor}
    append(folder.logs / "attempts.jsonl", line)
    assert folder.read_status().slurm_job_id == "12"


def test_an_array_element_is_judged_like_any_other_job(tmp_path):
    folder = RunFolder(tmp_path, job="12_3")
    folder.begin(NOW - 900, job="12_3")
    folder.add_error(NOW - 100, "bug", attempt="12_3-0")
    folder.end(NOW - 60, 1, "crash", "stop", job="12_3")
    status = folder.read_status(make_slurm_job("FAILED", job="12_3"))
    assert (status.state, status.cause, status.attempts[0].id) == ("failed", "bug", "12_3-0")


def test_only_attempts_of_the_current_job_determine_the_status(folder):
    folder.begin(NOW - 9000)
    folder.end(NOW - 8000, 1, "crash", "stop")
    folder.submit("15", NOW - 100)
    assert folder.read_status(make_slurm_job("PENDING", "Priority", job="15")).detail == explain_pending_reason(
        "Priority"
    )
    assert folder.read_status().state == "lost"


def test_a_submitted_run_that_was_resumed_outside_slurm_is_judged_by_its_local_attempt(folder):
    folder.begin(NOW - 8000)
    folder.add_event(NOW - 7990, "start", 0, world_size=8, host="a100-0")
    folder.end(NOW - 7000, 1, "crash", "stop")
    folder.add_event(NOW - 500, "resume", 40, attempt=f"local-{int(NOW - 510)}", world_size=1, host="desk")
    folder.add_event(NOW - 400, "stop", 60, reason="interrupted")
    status = folder.read_status(make_slurm_job("FAILED"))
    assert (status.state, status.cause, status.slurm_job_id, status.gpus) == ("stopped", "interrupted", "", 1)
    assert [attempt.slurm_job_id for attempt in status.attempts] == ["12", ""]
    folder.submit("15", NOW - 100)
    assert folder.read_status(make_slurm_job("PENDING", job="15")).state == "waiting"


# Attempts


def test_attempts_combine_the_records_of_the_batch_script_and_of_the_training(folder):
    folder.begin(NOW - 8000)
    folder.add_event(NOW - 7990, "start", 0, world_size=8, host="a100-0", total_steps=100)
    folder.add_event(NOW - 7500, "checkpoint", 40)
    folder.end(NOW - 1000, -1, "node_failure", "slurm")  # recorded by the attempt that starts now
    folder.begin(NOW - 1000, attempt=1)
    folder.add_event(NOW - 990, "resume", 40, attempt="12-1", world_size=4, host="a100-1")
    folder.add_event(NOW - 500, "stop", 70, reason="preempted")
    folder.end(NOW - 490, 85, "preempted", "requeue", attempt=1)
    folder.begin(NOW - 100, attempt=2)
    folder.add_event(NOW - 90, "resume", 70, attempt="12-2", world_size=4)
    folder.write_heartbeat(NOW - 3, attempt="12-2", step=88)
    first, second, third = folder.read_status(make_slurm_job("RUNNING")).attempts
    assert (first.id, first.cause, first.action, first.code) == ("12-0", "node_failure", "slurm", -1)
    assert first.steps == (0, 40)
    assert first.end == NOW - 7500, "its last activity, not the start of the next attempt"
    assert (second.id, second.world_size, second.steps, second.end) == ("12-1", 4, (40, 70), NOW - 490)
    assert (third.end, third.cause, third.steps) == (None, "", (70, 88))


def test_an_attempt_has_the_events_that_name_it_whatever_the_clocks_say(folder):
    local = f"local-{int(NOW - 2000)}"
    folder.begin(NOW - 8000)
    folder.add_event(NOW - 8030, "start", 0)  # the clock of this node is half a minute behind
    folder.add_event(NOW - 7000, "checkpoint", 30)
    folder.add_event(NOW - 1990, "resume", 30, attempt=local)
    folder.add_event(NOW - 1900, "checkpoint", 40)
    folder.add_error(NOW - 1950, "user_error", attempt=f"local-{int(NOW - 1995)}")  # found the run locked
    folder.begin(NOW - 1800, attempt=1)
    folder.add_event(NOW - 1830, "resume", 40, attempt="12-1")
    folder.add_event(NOW - 1700, "checkpoint", 50)
    attempts = folder.read_status(make_slurm_job("RUNNING", restarts=1)).attempts
    steps = {attempt.id: attempt.steps for attempt in attempts}
    assert steps == {"12-0": (0, 30), local: (30, 40), f"local-{int(NOW - 1995)}": None, "12-1": (40, 50)}


def test_a_start_without_an_attempt_belongs_to_none_and_hides_no_other_run(tmp_path):
    torn, whole = RunFolder(tmp_path / "torn", job=None), RunFolder(tmp_path / "whole", job=None)
    append(torn.run / "events.jsonl", {"event": "start", "step": 0, "time": format_time(NOW - 400)})
    torn.add_event(NOW - 390, "checkpoint", 10)
    torn.add_event(NOW - 300, "resume", 10, attempt=f"local-{int(NOW - 310)}")
    torn.add_event(NOW - 200, "stop", 20, reason="interrupted")
    whole.add_event(NOW - 100, "start", 0, attempt=f"local-{int(NOW - 110)}")
    whole.add_event(NOW - 90, "stop", 5, reason="interrupted")
    (first, second), _ = read_statuses([torn.run, whole.run])
    assert [attempt.steps for attempt in first.attempts] == [(10, 20)]
    assert (second.state, second.cause) == ("stopped", "interrupted")


def test_a_line_torn_by_a_crash_is_skipped_wherever_it_is(folder):
    for name in ("events.jsonl", "slurm/attempts.jsonl"):
        (folder.run / name).write_text('{"event": "start", "jo\n')
    folder.begin(NOW - 900)
    folder.add_event(NOW - 890, "start", 0)
    folder.add_event(NOW - 800, "checkpoint", 30)
    for name in ("events.jsonl", "slurm/attempts.jsonl", "heartbeat.json"):
        with (folder.run / name).open("a") as file:
            file.write('{"kind": "ev')
    status = folder.read_status(make_slurm_job("RUNNING"))
    assert (status.step, status.attempts[0].steps) == (30, (0, 30))


def test_the_failure_of_a_local_attempt_before_training_does_not_count_for_another_attempt(tmp_path):
    folder = RunFolder(tmp_path, job=None)
    folder.add_error(NOW - 5000, "user_error", attempt=f"local-{int(NOW - 5010)}")
    folder.add_event(NOW - 390, "start", 0, attempt=f"local-{int(NOW - 400)}", world_size=1, host="desk")
    folder.add_event(NOW - 300, "stop", 20, reason="max_runtime")
    first, second = folder.read_status().attempts
    assert (first.cause, first.steps, first.end) == ("user_error", None, NOW - 5000)
    assert (second.cause, second.steps, second.start) == ("max_runtime", (0, 20), NOW - 400)
    assert (folder.read_status().state, folder.read_status().cause) == ("stopped", "max_runtime")


def test_known_pending_reasons_are_explained_and_an_unknown_one_is_quoted():
    assert explain_pending_reason("QOSMaxGRESPerUser") == "you already use as many GPUs as your QOS allows per user"
    assert explain_pending_reason("QOSMaxCpuPerUserLimit") == "a limit of its QOS is reached"
    assert explain_pending_reason("AssocGrpGRES") == "all GPUs of your account are in use"
    assert explain_pending_reason("AssocGrpCPUMinutesLimit") == "your account is at its limit"
    assert (
        explain_pending_reason("ReqNodeNotAvail, UnavailableNodes:a100-0") == "its nodes are down, drained or reserved"
    )
    assert explain_pending_reason("DependencyNeverSatisfied").endswith("so it will never start")
    assert explain_pending_reason("Dependency") == "waits for another job to end"
    assert explain_pending_reason("burst_buffer: x") == "Slurm says: burst_buffer: x"
    assert explain_pending_reason("None") == "Slurm has not considered it yet"


# The table


def test_the_table_is_aligned_and_fits_a_screen_and_ends_with_what_to_type(tmp_path):
    folders = [RunFolder(tmp_path / str(i), job=f"123456{i}_17") for i in range(3)]
    folders[0].begin(NOW - 7200, job="1234560_17")
    folders[0].write_heartbeat(NOW - 3, attempt="1234560_17-0", step=1_000_000)
    folders[1].begin(NOW - 7200, job="1234561_17")
    folders[1].add_error(NOW - 100, "bug", attempt="1234561_17-0", message="long " * 90)
    folders[1].end(NOW - 99, 1, "crash", "stop", job="1234561_17")
    folders[2].add_event(NOW - 5, "done", 100)
    found = [
        folders[0].read_status(make_slurm_job("RUNNING", job="1234560_17")),
        *(f.read_status() for f in folders[1:]),
    ]
    lines = render_table(found, NOW).splitlines()
    assert all(len(line) <= 120 for line in lines[:-1])
    assert lines[0].split() == ["RUN", "STATE", "STEP", "SAMPLES/S", "FOR", "IDLE", "JOB", "ON"]
    columns = [lines[0].index(name) for name in ("STATE", "JOB", "ON")]
    assert [lines[1][c:].split()[0] for c in columns] == ["running", "1234560_17", "a100"]
    assert "2h00m" in lines[1]
    assert lines[3] == "    an error in the code, rank 0 on a100-0"
    assert lines[-1] == f"next: trainyard why {folders[1].run}"


def test_a_sweep_too_long_for_a_screen_is_counted_and_unfinished_runs_are_sorted_by_urgency(tmp_path):
    found = []
    for i in range(100):
        folder = RunFolder(tmp_path / f"{i:02d}", job=f"12_{i}")
        if i < 30:
            folder.add_event(NOW - 5, "done", 100)
        elif i < 32:
            folder.begin(NOW - 90, job=folder.job)
        state = "FAILED" if i == 30 else "RUNNING" if i == 31 else "PENDING"
        found.append(folder.read_status(make_slurm_job(state, "JobArrayTaskLimit", job=folder.job)))
    lines = render_overview(found, NOW).splitlines()
    assert lines[0] == "100 runs: 1 failed, 1 running, 68 waiting, 30 done"
    assert [line.split()[1] for line in lines[2:3] + lines[4:6]] == ["failed", "running", "waiting"]
    assert lines[3] == "    crashed: Slurm says FAILED"
    reason = "    its sweep already runs as many jobs as it may at once"
    assert lines.count(reason) == 1, "a repeated detail is shown once"
    assert lines[-2:] == ["and 56 more: trainyard runs lists all", f"next: trainyard why {found[30].run}"]
    assert len(lines) == 20
    everything_done = render_overview(found[:30], NOW).splitlines()
    assert everything_done == ["30 runs: 30 done", f"next: trainyard report {found[0].run}"]


def test_without_runs_the_user_is_told_what_to_type(tmp_path, capsys):
    for command in ("status", "runs"):
        assert cli.main([command, "--runs", str(tmp_path)]) == 0
        expected = f"{tmp_path}: no runs yet.\nnext: trainyard run JOB, or submit JOB (trainyard jobs lists them)\n"
        assert capsys.readouterr().out == expected
    new_run(tmp_path)
    assert cli.main(["runs", "stripe", "--runs", str(tmp_path / "runs")]) == 2
    assert "no run of job 'stripe'. There are runs of: stripes." in capsys.readouterr().err


# Several Slurms


@pytest.fixture
def slurm_named_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake Slurm commands: ClusterName is lab, and job 12 runs. Returns the file that logs queries."""
    log = tmp_path / "queries"
    answers = {
        "sbatch": "exit 1",
        "scontrol": 'if [ "$1" = ping ]; then echo "Slurmctld(primary) at x is UP"; else echo "ClusterName = lab"; fi',
        "squeue": f'echo "$@" >>{log}; printf "ID|STATE|RESTARTS|NODES|REASON\\n12|RUNNING|0|a100-0|None\\n"',
        "scancel": f'echo scancel "$@" >>{log}',
    }
    for command, script in answers.items():
        path = tmp_path / "bin" / command
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return log


def test_a_job_of_another_slurm_is_not_confused_with_a_job_of_the_same_id_here(tmp_path, slurm_named_lab):
    here, other = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "other", slurm_name="tower")
    (mine, theirs), note = read_statuses([here.run, other.run])
    assert (mine.state, mine.slurm_unavailable_reason) == ("running", "")
    assert (theirs.state, theirs.detail.endswith("; Slurm could not be queried")) == ("waiting", True)
    sentence = "Job 12 belongs to the Slurm 'tower', this one is 'lab'."
    assert note == f"Answered from the run folders only. {sentence}"
    with pytest.raises(UserError, match=sentence):
        cancel([here.run, other.run])
    assert "scancel" not in slurm_named_lab.read_text(), "if one run is out of reach, none is cancelled"
    assert not (here.logs / "cancelled").exists()
    read_statuses([other.run])
    assert len(slurm_named_lab.read_text().splitlines()) == 2, "squeue is not queried if all jobs are elsewhere"


# Real runs on this machine


@pytest.mark.slow
def test_a_local_run_is_running_and_after_cancel_stopped(tmp_path):
    run = new_run(tmp_path, *LONG)
    process = start(run)
    wait_for_lines(run, 3, process)
    (status,), note = read_statuses([run])
    assert (status.state, status.slurm_job_id, note) == ("running", "", "")
    assert f"process {process.pid} on " in status.detail
    (message,) = cancel([run])
    assert message.endswith(f"told its process to save and exit. Resume: trainyard resume {run}")
    process.join(60)
    assert process.exitcode == 87
    (status,), _ = read_statuses([run])
    assert (status.state, status.cause) == ("stopped", "interrupted")
    assert status.attempts[0].steps == (0, status.step)
    with pytest.raises(UserError, match=r"Nothing to cancel: stripes/\S+ is stopped \(interrupted by a person\)"):
        cancel([run])


@pytest.mark.slow
def test_a_run_that_finished_here_is_done(tmp_path):
    run = new_run(tmp_path, "max_duration=4st")
    assert train(run) == 0
    (status,), _ = read_statuses([run])
    assert (status.state, status.step, status.total_steps, status.cause) == ("done", 4, 4, "")


def test_a_run_in_the_background_waits_until_it_has_started(tmp_path):
    folder = RunFolder(tmp_path, job=None)
    submission = {"scheduler": "local", "job": "4711", "gpus": 2, "submitted": format_time(NOW - 5)}
    (folder.logs / "submission.json").write_text(json.dumps(submission))
    assert folder.read_status().state == "waiting"
    (folder.logs / "submission.json").write_text(json.dumps(submission | {"submitted": format_time(NOW - 100)}))
    assert folder.read_status().state == "new"
    folder.add_error(NOW - 50, "bug", attempt=f"local-{int(NOW - 90)}")
    assert (folder.read_status().state, folder.read_status().slurm_job_id) == ("failed", "")


@pytest.mark.slow
def test_a_run_killed_here_is_lost_and_a_run_elsewhere_is_out_of_reach(tmp_path):
    run = new_run(tmp_path, *LONG)
    process = start(run)
    wait_for_lines(run, 3, process)
    process.kill()
    process.join()
    (status,), _ = read_statuses([run])
    assert status.state == "lost"
    assert f"process {process.pid}" in status.detail
    lock = json.loads((run / "lock").read_text())
    (run / "lock").write_text(json.dumps(lock | {"host": "elsewhere"}))
    (status,), _ = read_statuses([run])
    assert (status.state, status.detail.endswith(" on elsewhere")) == ("running", True)
    with pytest.raises(UserError, match=f"On that host, type: kill -INT {process.pid}"):
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


def test_without_slurm_nothing_is_cancelled_and_the_error_says_why(folder, no_slurm):
    folder.begin(time.time() - 100)
    folder.write_heartbeat(time.time())
    with pytest.raises(UserError, match=r"^Nothing was cancelled: There is no Slurm here: sbatch is not on PATH\."):
        cancel([folder.run])
    assert not (folder.logs / "cancelled").exists()


def test_reading_run_status_loads_no_torch():
    code = "import sys, trainyard.runs.status; print([m for m in ('torch', 'h5py', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_the_usage_of_a_device_is_that_of_its_last_training_line(folder):
    folder.begin(NOW - 900)
    status = folder.read_status(make_slurm_job("RUNNING"))
    usage = {"12": JobUsage("12", elapsed_s=60, cores=4, busy_s=180.0, memory_gib=8.0, largest_gib=2.5)}
    assert render_usage([status], usage).splitlines()[1].split()[-6:] == ["75%", "8", "GiB", "2.5", "GiB", "8"]
    with closing(Recorder(folder.run, trackers=[], config={}, resume_at=None)) as recorder:
        recorder.log("train", 1, {"loss": 1.0, "step_ms": 50.0, "compute_ms": 10.0, "memory_gib": 1.0})
        recorder.log("train", 2, {"loss": 1.0, "step_ms": 50.0, "compute_ms": 45.0, "memory_gib": 7.25})
        recorder.log("eval", 2, {"split": "val", "loss": 1.0})
    assert render_usage([status], usage).splitlines()[1].endswith("7.25 GiB, 90%")
