"""What status, why, logs and cancel say of runs on a real Slurm, while and after things happen to them."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import LAB_FILE, Start, job_of, kill_rank, starter, steps_of, wait, wait_for_end
from tests.slurm.conftest import Lab
from trainyard.errors import UserError
from trainyard.launch.cancel import cancel
from trainyard.runs.logs import follow
from trainyard.runs.status import Status, statuses, table
from trainyard.runs.why import why

pytestmark = pytest.mark.slurm

ENDLESS = ("max_duration=10000ep", "eval_every=10000ep", "model.sleep_ms=100")


@pytest.fixture(autouse=True)
def asked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab, as the Slurm that this process talks to."""
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    return lab


@pytest.fixture(scope="module")
def start(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    root = tmp_path_factory.mktemp("why")
    yield starter(root / "runs", root / "cache")
    lab.run("scancel", "--name=stripes")


def status(run: Path) -> Status:
    (found,), _ = statuses([run])
    return found


def test_a_killed_rank_and_an_infinite_loss_are_told_apart(asked, start, tmp_path):
    once = tmp_path / "lab.yaml"
    once.write_text(f"{LAB_FILE.read_text()}\nattempts: {{crash: 0}}\n")
    infinite = start("infinite", "max_duration=20st", "model.poison_step=60", "--hw", "a5000")
    killed = start("killed", *ENDLESS, "--gpus", 2, "--hw", "2080ti", cluster=once)
    wait("steps", lambda: steps_of(killed) >= 3)
    running = why(killed).splitlines()
    assert running[1] == "Nothing is wrong."
    assert running[-1] == f"next: trainyard logs -f {killed}"
    kill_rank(killed, 1)
    wait_for_end(asked, killed)
    wait_for_end(asked, infinite)
    assert (status(killed).state, status(killed).cause) == ("failed", "signal 9")
    assert ": task 1: Killed\ncause: killed by signal 9\n" in why(killed)
    assert (status(infinite).state, status(infinite).cause) == ("failed", "not_finite")
    said = why(infinite)
    assert "rank 0 on " in said
    assert "NotFinite: Step " in said
    assert "cause: NaN or infinite gradients" in said
    assert said.splitlines()[-1].endswith("optimizer.lr=0.005")


def test_a_preempted_run_says_so_while_it_waits_and_its_log_is_followed_to_its_end(asked, start):
    run = start("preempted", "max_duration=60st", "eval_every=10000ep", "model.sleep_ms=300", "--hw", "a100")
    said: list[str] = []
    follower = threading.Thread(target=follow, args=(run, said.append), daemon=True)
    follower.start()
    wait("steps", lambda: steps_of(run) >= 3)
    node = status(run).attempts[0].nodes
    asked.batch("sleep 1", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", node, "--exclusive")
    wait("the queue", lambda: status(run).state == "waiting")
    assert status(run).detail.startswith("starts again after preemption: ")
    assert status(run).slurm_job_id == job_of(run)
    wait_for_end(asked, run)
    follower.join(60)
    assert not follower.is_alive()
    first, second = status(run).attempts
    assert (status(run).state, first.cause, second.cause) == ("done", "preempted", "done")
    assert any(line.startswith("-- ") and "waiting" in line for line in said)
    assert [line for line in said if " step 60/60 " in line]


def test_a_held_job_says_how_to_release_it_and_a_cancelled_one_how_to_go_on(asked, start):
    blocker = asked.batch("sleep 300", "-p", "p100", "--nodes=2", "--exclusive")
    asked.wait_for(blocker, "RUNNING")
    run = start("held", *ENDLESS, "--hw", "p100")
    wait("a reason", lambda: status(run).detail == "next in the queue; waits until enough GPUs are free")
    asked.run("scontrol", "hold", job_of(run))
    wait("hold", lambda: status(run).cause == "held")
    assert why(run).splitlines()[-1] == f"next: scontrol release {job_of(run)}"
    asked.run("scontrol", "release", job_of(run))
    asked.run("scancel", blocker)
    wait("steps", lambda: steps_of(run) >= 3)
    assert cancel([run]) == [f"stripes/held: cancelled job {job_of(run)}. Go on: trainyard resume {run}"]
    wait("the end", lambda: status(run).state == "stopped")
    assert status(run).cause == "cancelled"
    assert "cause: cancelled\n" in why(run)
    with pytest.raises(UserError, match=r"Nothing to cancel: stripes/held is stopped \(cancelled\)"):
        cancel([run])


def test_a_slurm_that_does_not_answer_is_noted_and_the_folder_answers(asked, start, tmp_path, monkeypatch):
    run = start("unseen", *ENDLESS, "--hw", "a5000")
    wait("steps", lambda: steps_of(run) >= 3)
    dead = tmp_path / "slurm.conf"
    dead.write_text(re.sub("SlurmctldPort=.*", "SlurmctldPort=9", Path(asked.environ["SLURM_CONF"]).read_text()))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    (found,), note = statuses([run])
    assert (found.state, found.slurm_job_id) == ("running", job_of(run))
    assert note.startswith("Answered from the folders of the runs. ")
    assert table([found], time.time()).splitlines()[1].split()[:2] == ["stripes/unseen", "running"]
    with pytest.raises(UserError):
        cancel([run])
    assert not (run / "slurm" / "cancelled").exists()
    monkeypatch.setenv("SLURM_CONF", asked.environ["SLURM_CONF"])
    submission = run / "slurm" / "submission.json"
    note = submission.read_text()
    submission.write_text(note.replace('"slurm_name": "lab"', '"slurm_name": "tower"'))
    belongs = f"Job {job_of(run)} belongs to the Slurm 'tower', this one is 'lab'."
    assert statuses([run])[1] == f"Answered from the folders of the runs. {belongs}"
    with pytest.raises(UserError, match=belongs):
        cancel([run])
    submission.write_text(note)
    cancel([run])
