"""Attempts of jobs on a real Slurm: when a run is started again, when not, and on which nodes and GPUs."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import (
    LAB_FILE,
    TIMEOUT_S,
    Start,
    kill_rank,
    make_starter,
    read_ends,
    read_last_step,
    read_lines,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.training import new_run
from trainyard.runs.history import read_run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]

LONG = ("max_duration=12ep", "eval_every=4ep", "model.sleep_ms=250")  # 60 steps in 15 seconds: time to interrupt them


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    root = tmp_path_factory.mktemp("cluster")
    new_run(root)  # packs the data: an attempt that does has made progress
    return make_starter(root / "runs", root / "cache")


def test_a_run_that_crashes_twice_before_its_first_checkpoint_stops_and_says_so(lab, start, capsys):
    run = start("stuck", *LONG, "checkpoint.every=1000st", "--hw", "a5000")
    for attempt in range(2):
        wait(
            "a first step",
            lambda a=attempt: (run / "slurm" / f"left-{read_slurm_job_id(run)}-{a}").exists() or is_at(run, a),
        )
        kill_rank(run, 0)
        wait("the end is recorded", lambda a=attempt: len(read_ends(run)) == a + 1)
    assert read_ends(run) == [(0, "crash", "requeue"), (1, "no_progress", "stop")]
    lab.wait_for(read_slurm_job_id(run), "FAILED")
    assert trainyard("why", run) == 0
    assert "no progress" in capsys.readouterr().out


def is_at(run: Path, attempt: int) -> bool:
    """Return whether this attempt is training."""
    path = run / "heartbeat.json"
    if not path.exists():
        return False
    beat = json.loads(path.read_text())
    return beat["attempt"].endswith(f"-{attempt}") and beat["phase"] == "training"


def test_four_ranks_on_two_nodes_train_to_the_end(lab, start):
    run = start("two-nodes", "data.decode=dali", "--hw", "a100", "--gpus", 4, "--nodes", 2)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]
    assert read_lines(run / "events.jsonl")[0]["world_size"] == 4
    assert read_lines(run / "slurm" / "attempts.jsonl")[0]["nodes"] == "a100-[0-1]"
    assert (run / "report.html").is_file()


@pytest.mark.long
def test_a_resume_on_half_the_gpus_of_another_type_reads_each_sample_once_per_epoch(lab, start, tmp_path):
    diary = tmp_path / "diary"
    options = (
        f"model.diary={diary}",
        "max_duration=3ep",
        "eval_every=3ep",
        "global_batch_size=4",
        "model.sleep_ms=150",
    )
    run = start("elastic", *options, "--hw", "a100", "--gpus", 4)
    wait("step 5", lambda: read_last_step(run) >= 5)
    assert trainyard("cancel", run) == 0
    lab.wait_for(read_slurm_job_id(run), "CANCELLED")
    wait("the lock is gone", lambda: not (run / "lock").exists())
    middle = read_last_step(run)
    assert 5 <= middle < 15, "the stop must be in the first epoch"
    assert trainyard("resume", run, "--hw", "p100", "--gpus", 2, "--no-plan", "--jobs", "tests/families") == 0
    wait_for_end(lab, run)
    steps: dict[int, set[int]] = {}  # by samples_seen; a step after the last checkpoint runs twice
    for line in diary.read_text().splitlines():
        at, *ids = map(int, line.split())
        steps.setdefault(at, set()).update(ids)
    assert sorted(steps) == list(range(0, 180, 4)) and all(len(ids) == 4 for ids in steps.values())
    train_ids = [i for i in range(100) if i % 5 > 1]
    for epoch in range(3):
        assert sorted(i for at, ids in steps.items() if at // 60 == epoch for i in ids) == train_ids
    assert read_lines(run / "slurm" / "attempts.jsonl")[0]["nodes"] == "a100-0", "four ranks on one node"
    worlds = [line["world_size"] for line in read_lines(run / "events.jsonl") if "world_size" in line]
    assert worlds == [4, 2]


def test_a_node_that_failed_is_left_out_unless_the_job_needs_it_and_the_sites_command_learns_the_end(
    lab, start, tmp_path, capsys
):
    told, cluster = tmp_path / "told", tmp_path / "told.yaml"
    on_end = f'echo "$TRAINYARD_CAUSE $TRAINYARD_RUN $SLURM_JOB_ID" >>{told}'
    cluster.write_text(yaml.safe_dump({**yaml.safe_load(LAB_FILE.read_text()), "on_end": on_end}))
    moved = start("moved", *LONG, "--hw", "a5000", cluster=cluster)
    needy = start("needy", *LONG, "--hw", "2080ti", "--gpus", 2, "--nodes", 2, cluster=cluster)
    wait("steps", lambda: min(read_last_step(moved), read_last_step(needy)) >= 2)
    kill_rank(moved, 0)
    kill_rank(needy, 1)
    wait_for_end(lab, moved)
    wait_for_end(lab, needy)
    assert [end[1:] for end in read_ends(moved)] == [end[1:] for end in read_ends(needy)]
    assert [end[1:] for end in read_ends(moved)] == [("crash", "requeue"), ("done", "stop")]
    first, second = list_nodes(moved)
    assert first != second
    assert [line["excluded"] for line in read_lines(moved / "slurm/attempts.jsonl") if "excluded" in line] == [first]
    assert f"ExcNodeList={first}\n" in lab.run("scontrol", "show", "job", read_slurm_job_id(moved))
    assert list_nodes(needy) == ["rtx2080ti-[0-1]"] * 2
    assert trainyard("why", moved) == 0
    assert f"crashed, requeued, without {first}, where it failed\n" in capsys.readouterr().out
    assert sorted(told.read_text().splitlines()) == [f"done {run} {read_slurm_job_id(run)}" for run in (moved, needy)]


def list_nodes(run: Path) -> list[str]:
    """Return the nodes of each attempt."""
    return [line["nodes"] for line in read_lines(run / "slurm" / "attempts.jsonl") if line["event"] == "start"]


def test_where_the_site_forbids_requeues_a_successor_trains_on(lab, start, capsys):
    run = start("forbidden", *LONG, "--hw", "a5000")
    first = read_slurm_job_id(run)
    wait("a first checkpoint", lambda: list(run.glob("checkpoints/step-*.ckpt")))
    follower = read_slurm_job_id(start("follower", "--hw", "a5000", "--after", run))
    lab.run("scontrol", "hold", follower)
    lab.run("scontrol", "update", f"JobId={first}", "Requeue=0")
    kill_rank(run, 0)
    wait("a successor", lambda: read_run(run).slurm_job_id != first)
    second = read_run(run).slurm_job_id
    wait("the follower", lambda: f"afterok:{second}(unfulfilled)" in lab.run("scontrol", "show", "job", follower))
    lab.run("scancel", follower)
    lab.wait_for(second, "COMPLETED", timeout_s=TIMEOUT_S)
    lines = [line for line in read_lines(run / "slurm" / "attempts.jsonl") if line["event"] != "start"]
    in_first = [(event, first) for event in ("end", "successor", "exclude")]
    assert [(line["event"], line["job"]) for line in lines] == [*in_first, ("end", second)]
    assert [line.get("cause") for line in lines] == ["crash", None, None, "done"]
    assert len(set(list_nodes(run))) == 2 and lines[2]["excluded"] == list_nodes(run)[0]
    assert trainyard("why", run) == 0
    printed = capsys.readouterr().out
    assert f"(job {second}): done" in printed and f"continued as Slurm job {second}" in printed
    resumed = [line for line in read_lines(run / "events.jsonl") if line["event"] == "resume"]
    assert resumed[0]["step"] > 0


@pytest.mark.long
def test_nothing_is_lost_while_the_controller_is_away(lab, start, capsys):
    """It stops answering before a rank is killed, and comes back when the attempt has asked in vain."""
    run = start("away", *LONG, "--hw", "2080ti")
    wait("a first checkpoint", lambda: list(run.glob("checkpoints/step-*.ckpt")))
    daemons = json.loads((lab.folder / "lab.json").read_text())
    (controller,) = [daemon["pid"] for daemon in daemons if daemon["program"] == "slurmctld"]
    os.kill(controller, signal.SIGSTOP)
    try:
        kill_rank(run, 0)
        wait("it asks", lambda: list((run / "slurm").glob("requeue-*")))
        assert trainyard("status", run) == 0
        assert "its attempt keeps asking Slurm to requeue it" in capsys.readouterr().out
    finally:
        os.kill(controller, signal.SIGCONT)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "crash", "requeue"), (1, "done", "stop")]
