"""What status, why, logs and cancel say about runs on a real Slurm, during and after failures."""

import re
import threading
import time
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import (
    LAB_FILE,
    kill_rank,
    read_ends,
    read_last_step,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.training import FAMILIES
from trainyard.errors import UserError
from trainyard.launch.cancel import cancel
from trainyard.runs.logs import follow
from trainyard.runs.status import Status, read_statuses, render_table
from trainyard.runs.why import explain_run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]

ENDLESS = ("max_duration=10000ep", "eval_every=10000ep", "model.sleep_ms=100")


def read_one_status(run: Path) -> Status:
    (found,), _ = read_statuses([run])
    return found


def test_a_killed_rank_and_an_infinite_loss_are_distinguished(lab, start, tmp_path):
    once = tmp_path / "lab.yaml"
    once.write_text(f"{LAB_FILE.read_text()}\nattempts: {{crash: 0}}\n")
    infinite = start("infinite", "max_duration=20st", "model.poison_step=60", "--hw", "a5000", "--gpus", 2)
    killed = start("killed", *ENDLESS, "--gpus", 2, "--hw", "2080ti", cluster=once)
    wait("steps", lambda: read_last_step(killed) >= 3)
    running = explain_run(killed).splitlines()
    assert running[1] == "Nothing is wrong."
    assert running[-1] == f"next: trainyard logs -f {killed}"
    kill_rank(killed, 1)
    wait_for_end(lab, killed)
    wait_for_end(lab, infinite)
    assert (read_one_status(killed).state, read_one_status(killed).cause) == ("failed", "signal 9")
    assert ": task 1: Killed\ncause: killed by signal 9\n" in explain_run(killed)
    assert (read_one_status(infinite).state, read_one_status(infinite).cause) == ("failed", "not_finite")
    assert read_ends(infinite) == [(0, "user_error", "stop")], "it would happen again, so it is not requeued"
    output = explain_run(infinite)
    assert re.search("rank [01] on ", output), "the rank that failed first is not named"
    assert "NotFinite: Step " in output and "the gradient is not finite" in output
    assert "cause: NaN or infinite gradients" in output
    assert output.splitlines()[-1].endswith("optimizer.lr=0.005")


def test_a_preempted_run_says_so_while_it_waits_and_its_log_is_followed_to_its_end(lab, start):
    run = start("preempted", "max_duration=60st", "eval_every=10000ep", "model.sleep_ms=300", "--hw", "a100")
    output: list[str] = []
    follower = threading.Thread(target=follow, args=(run, output.append), daemon=True)
    follower.start()
    wait("steps", lambda: read_last_step(run) >= 3)
    # all nodes, or the run starts on another one before the follower has seen it wait
    urgent = lab.submit("sleep 300", "-p", "a100-urgent", "--gres=gpu:a100:8", "--nodes=2", "--exclusive")
    wait("the queue", lambda: read_one_status(run).state == "waiting")
    assert read_one_status(run).detail.startswith("starts again after preemption: ")
    assert read_one_status(run).slurm_job_id == read_slurm_job_id(run)
    wait("the follower", lambda: any(line.startswith("-- ") and "waiting" in line for line in output))
    lab.run("scancel", urgent)
    wait_for_end(lab, run)
    follower.join(60)
    assert not follower.is_alive()
    first, second = read_one_status(run).attempts
    assert (read_one_status(run).state, first.cause, second.cause) == ("done", "preempted", "done")
    assert [line for line in output if " step 60/60 " in line]


def test_a_held_job_says_how_to_release_it_and_a_cancelled_one_how_to_resume_it(lab, start):
    blocker = lab.submit("sleep 300", "-p", "p100", "--nodes=2", "--exclusive")
    lab.wait_for(blocker, "RUNNING")
    run = start("held", *ENDLESS, "--hw", "p100")
    wait("a reason", lambda: read_one_status(run).detail == "next in the queue; waits until enough GPUs are free")
    lab.run("scontrol", "hold", read_slurm_job_id(run))
    wait("hold", lambda: read_one_status(run).cause == "held")
    assert explain_run(run).splitlines()[-1] == f"next: scontrol release {read_slurm_job_id(run)}"
    lab.run("scontrol", "release", read_slurm_job_id(run))
    lab.run("scancel", blocker)
    wait("steps", lambda: read_last_step(run) >= 3)
    job = read_slurm_job_id(run)
    assert cancel([run]) == [f"stripes/held: cancelled Slurm job {job}. Resume: trainyard resume {run}"]
    wait("the end", lambda: read_one_status(run).state == "stopped")
    assert read_one_status(run).cause == "cancelled"
    assert "cause: cancelled\n" in explain_run(run)
    with pytest.raises(UserError, match=r"Nothing to cancel: stripes/held is stopped \(cancelled\)"):
        cancel([run])


def test_a_run_is_resumed_right_after_it_was_cancelled_and_keeps_why_it_ended(lab, start):
    run = start("again", "max_duration=1000st", "model.sleep_ms=1000", "--hw", "a5000")
    wait("steps", lambda: read_last_step(run) >= 1)
    first = read_slurm_job_id(run)
    cancel([run])
    assert lab.read_state(first) == "COMPLETING", "its ranks finish their step, and save"
    assert trainyard("resume", run, "--jobs", FAMILIES) == 0
    assert read_slurm_job_id(run) != first and lab.read_state(first) == "CANCELLED"
    assert re.search(rf"{first}-0 .* cancelled, final\n", explain_run(run))
    cancel([run])


def test_a_slurm_that_does_not_answer_is_noted_and_the_folder_answers(lab, start, tmp_path, monkeypatch):
    run = start("unseen", *ENDLESS, "--hw", "a5000")
    wait("steps", lambda: read_last_step(run) >= 3)
    dead = tmp_path / "slurm.conf"
    dead.write_text(re.sub("SlurmctldPort=.*", "SlurmctldPort=9", Path(lab.environ["SLURM_CONF"]).read_text()))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    (found,), note = read_statuses([run])
    assert (found.state, found.slurm_job_id) == ("running", read_slurm_job_id(run))
    assert note.startswith("Answered from the run folders only. ")
    assert render_table([found], time.time()).splitlines()[1].split()[:2] == ["stripes/unseen", "running"]
    with pytest.raises(UserError):
        cancel([run])
    assert not (run / "slurm" / "cancelled").exists()
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    submission = run / "slurm" / "submission.json"
    original = submission.read_text()
    submission.write_text(original.replace('"slurm_name": "lab"', '"slurm_name": "tower"'))
    belongs = f"Job {read_slurm_job_id(run)} belongs to the Slurm 'tower', this one is 'lab'."
    assert read_statuses([run])[1] == f"Answered from the run folders only. {belongs}"
    with pytest.raises(UserError, match=belongs):
        cancel([run])
    submission.write_text(original)
    cancel([run])
