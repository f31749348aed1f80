"""Everything a cluster does to a job, on a real Slurm: the run ends with the same bits as an undisturbed one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import (
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
from tests.slurm.conftest import Lab
from tests.training import find_differences, load_state, read_run_metrics

pytestmark = pytest.mark.slurm

# 60 steps in 15 seconds: time to interrupt them; and a checkpoint every 4 epochs, so that steps can be lost.
LONG = ("max_duration=12ep", "eval_every=4ep", "model.sleep_ms=250")
TWO_RANKS = ("--gpus", 2, "--time", "20m")


@pytest.fixture(scope="module", autouse=True)
def on_the_lab(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    root = tmp_path_factory.mktemp("cluster")
    return make_starter(root / "runs", root / "cache")


@pytest.fixture(scope="module")
def whole(lab: Lab, start: Start) -> Path:
    """An undisturbed run of two ranks. It packs the data that the other runs read."""
    run = start("whole", *LONG, *TWO_RANKS, "--hw", "2080ti")
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]
    return run


def assert_same(run: Path, whole: Path) -> None:
    assert find_differences(load_state(whole), load_state(run)) == [], run.name
    assert read_run_metrics(whole) == read_run_metrics(run), run.name


@pytest.mark.timeout(1500)
def test_every_kind_of_interruption_gives_the_same_bits_and_is_recorded_with_its_cause(lab, start, whole):
    """All at once, each on its own nodes: most of the time is spent waiting for Slurm."""
    took = {
        "time_limit": start("limited", *LONG[:2], "model.sleep_ms=1600", "--gpus", 2, "--time", "2m", "--hw", "p100"),
        "preempted": start("preempted", *LONG, *TWO_RANKS, "--hw", "a100"),
        "node_failure": start("node-lost", *LONG, *TWO_RANKS, "--hw", "a5000"),
        "crash": start("killed", *LONG, *TWO_RANKS, "--hw", "2080ti"),
        "signalled": start("signalled", *LONG, *TWO_RANKS, "--hw", "2080ti"),
        "cancelled": start("cancelled", *LONG, *TWO_RANKS, "--hw", "p100"),
    }
    first_node = dict.fromkeys(took, "")
    blows = {
        "preempted": lambda node: lab.submit(
            "true", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", node, "--exclusive"
        ),
        "node_failure": lambda node: lab.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test"),
        "crash": lambda node: kill_rank(took["crash"], 1),
        "signalled": lambda node: lab.run("scancel", "--signal=USR2", read_slurm_job_id(took["signalled"])),
        "cancelled": lambda node: lab.run("scancel", read_slurm_job_id(took["cancelled"])),
        "time_limit": lambda node: None,  # happens by itself
    }

    def all_hit() -> bool:
        for name, run in took.items():
            if not first_node[name] and read_last_step(run) >= 6:
                first_node[name] = read_lines(run / "slurm" / "attempts.jsonl")[0]["nodes"]
                blows[name](first_node[name])
        return all(first_node.values())

    try:
        wait("each is at step 6 and is hit", all_hit)
        lab.wait_for(read_slurm_job_id(took["cancelled"]), "CANCELLED")
        wait("all is written", lambda: read_last_step(took["cancelled"]) and not (took["cancelled"] / "lock").exists())
        assert trainyard("resume", took["cancelled"], "--jobs", "tests/families") == 0
        for run in took.values():
            wait_for_end(lab, run)
    finally:  # other tests share the lab
        if first_node["node_failure"]:
            lab.run("scontrol", "update", f"nodename={first_node['node_failure']}", "state=resume")
    assert read_ends(took["preempted"]) == [(0, "preempted", "slurm"), (1, "done", "stop")]
    assert read_ends(took["node_failure"]) == [(0, "node_failure", "slurm"), (1, "done", "stop")]
    assert read_ends(took["crash"]) == [(0, "crash", "requeue"), (1, "done", "stop")]
    assert read_ends(took["signalled"]) == [(0, "preempted", "requeue"), (1, "done", "stop")]
    assert read_ends(took["cancelled"]) == [(0, "done", "stop")], "the cancelled attempt could not write its end"
    limited = read_ends(took["time_limit"])
    assert len(limited) > 1 and limited[-1] == (len(limited) - 1, "done", "stop")
    assert {end[1:] for end in limited[:-1]} == {("time_limit", "requeue")}
    moved = read_lines(took["node_failure"] / "slurm" / "attempts.jsonl")
    assert moved[0]["nodes"] != moved[2]["nodes"], "the lost node was used again"
    for run in took.values():
        assert_same(run, whole)


def test_a_run_that_crashes_twice_before_its_first_checkpoint_stops_and_says_so(lab, start, whole, capsys):
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


def test_a_run_with_infinite_gradients_is_not_requeued(lab, start, whole, capsys):
    run = start("infinite", "model.poison_step=60", "--hw", "a5000", "--gpus", 2)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "user_error", "stop")]
    assert trainyard("why", run) == 0
    output = capsys.readouterr().out
    assert "the gradient is not finite" in output and "optimizer.lr" in output


@pytest.mark.parametrize(("gpus", "nodes"), [(4, 1), (4, 2)])
def test_four_ranks_train_on_one_node_and_on_two(gpus, nodes, lab, start, whole):
    run = start(f"on-{nodes}", "--hw", "a100", "--gpus", gpus, "--nodes", nodes)
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "done", "stop")]
    begun = read_lines(run / "events.jsonl")[0]
    assert begun["world_size"] == 4
    assert read_lines(run / "slurm" / "attempts.jsonl")[0]["nodes"] == ("a100-0" if nodes == 1 else "a100-[0-1]")
    assert (run / "report.html").is_file()


def test_a_resume_on_half_the_gpus_of_another_type_reads_each_sample_once_per_epoch(lab, start, whole, tmp_path):
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
    assert trainyard("resume", run, "--hw", "p100", "--gpus", 2, "--jobs", "tests/families") == 0
    wait_for_end(lab, run)
    steps: dict[int, set[int]] = {}  # by samples_seen; a step after the last checkpoint runs twice
    for line in diary.read_text().splitlines():
        at, *ids = map(int, line.split())
        steps.setdefault(at, set()).update(ids)
    assert sorted(steps) == list(range(0, 180, 4)) and all(len(ids) == 4 for ids in steps.values())
    train_ids = [i for i in range(100) if i % 5 > 1]
    for epoch in range(3):
        assert sorted(i for at, ids in steps.items() if at // 60 == epoch for i in ids) == train_ids
    worlds = [line["world_size"] for line in read_lines(run / "events.jsonl") if "world_size" in line]
    assert worlds == [4, 2]
