"""What a cluster does to a job, on a real Slurm: the run ends with the bits of one that nothing happened to."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import (
    Start,
    ends,
    job_of,
    kill_rank,
    lines,
    starter,
    steps_of,
    trainyard,
    wait,
    wait_for_end,
)
from tests.slurm.conftest import Lab
from tests.training import find_differences, load_state, read_run_metrics

pytestmark = pytest.mark.slurm

# 60 steps in 15 seconds, so that there is time to be hit, and a checkpoint every 4, so that something can be lost.
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
    return starter(root / "runs", root / "cache")


@pytest.fixture(scope="module")
def whole(lab: Lab, start: Start) -> Path:
    """A run of two ranks that nothing happens to. It packs the data that the others read."""
    run = start("whole", *LONG, *TWO_RANKS, "--hw", "2080ti")
    wait_for_end(lab, run)
    assert ends(run) == [(0, "done", "stop")]
    return run


def assert_same(run: Path, whole: Path) -> None:
    assert find_differences(load_state(whole), load_state(run)) == [], run.name
    assert read_run_metrics(whole) == read_run_metrics(run), run.name


@pytest.mark.timeout(1500)
def test_bad_days_end_in_the_same_bits_and_each_is_recorded_for_what_it_was(lab, start, whole):
    """All at once, each on nodes of its own: most of the time goes into waiting for Slurm."""
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
        "signalled": lambda node: lab.run("scancel", "--signal=USR2", job_of(took["signalled"])),
        "cancelled": lambda node: lab.run("scancel", job_of(took["cancelled"])),
        "time_limit": lambda node: None,  # comes by itself
    }

    def all_hit() -> bool:
        for name, run in took.items():
            if not first_node[name] and steps_of(run) >= 6:
                first_node[name] = lines(run / "slurm" / "attempts.jsonl")[0]["nodes"]
                blows[name](first_node[name])
        return all(first_node.values())

    try:
        wait("each is at step 6 and is hit", all_hit)
        lab.wait_for(job_of(took["cancelled"]), "CANCELLED")
        wait("all is written", lambda: steps_of(took["cancelled"]) and not (took["cancelled"] / "lock").exists())
        assert trainyard("resume", took["cancelled"], "--jobs", "tests/families") == 0
        for run in took.values():
            wait_for_end(lab, run)
    finally:  # the lab is every test's
        if first_node["node_failure"]:
            lab.run("scontrol", "update", f"nodename={first_node['node_failure']}", "state=resume")
    assert ends(took["preempted"]) == [(0, "preempted", "slurm"), (1, "done", "stop")]
    assert ends(took["node_failure"]) == [(0, "node_failure", "slurm"), (1, "done", "stop")]
    assert ends(took["crash"]) == [(0, "crash", "requeue"), (1, "done", "stop")]
    assert ends(took["signalled"]) == [(0, "preempted", "requeue"), (1, "done", "stop")]
    assert ends(took["cancelled"]) == [(0, "done", "stop")], "the cancelled attempt could not write its end"
    limited = ends(took["time_limit"])
    assert len(limited) > 1 and limited[-1] == (len(limited) - 1, "done", "stop")
    assert {end[1:] for end in limited[:-1]} == {("time_limit", "requeue")}
    moved = lines(took["node_failure"] / "slurm" / "attempts.jsonl")
    assert moved[0]["nodes"] != moved[2]["nodes"], "the lost node was used again"
    for run in took.values():
        assert_same(run, whole)


def test_a_job_that_dies_again_before_its_first_checkpoint_stops_and_says_so(lab, start, whole, capsys):
    run = start("stuck", *LONG, "checkpoint.every=1000st", "--hw", "a5000")
    for attempt in range(2):
        wait("a first step", lambda a=attempt: (run / "slurm" / f"left-{job_of(run)}-{a}").exists() or is_at(run, a))
        kill_rank(run, 0)
        wait("the script's word", lambda a=attempt: len(ends(run)) == a + 1)
    assert ends(run) == [(0, "crash", "requeue"), (1, "no_progress", "stop")]
    lab.wait_for(job_of(run), "FAILED")
    assert trainyard("why", run) == 0
    assert "no progress" in capsys.readouterr().out


def is_at(run: Path, attempt: int) -> bool:
    """Whether this attempt has begun to train."""
    path = run / "heartbeat.json"
    if not path.exists():
        return False
    beat = json.loads(path.read_text())
    return beat["attempt"].endswith(f"-{attempt}") and beat["phase"] == "training"


def test_a_run_with_infinite_gradients_is_not_started_again(lab, start, whole, capsys):
    run = start("infinite", "model.poison_step=60", "--hw", "a5000", "--gpus", 2)
    wait_for_end(lab, run)
    assert ends(run) == [(0, "user_error", "stop")]
    assert trainyard("why", run) == 0
    told = capsys.readouterr().out
    assert "the gradient is not finite" in told and "optimizer.lr" in told


@pytest.mark.parametrize(("gpus", "nodes"), [(4, 1), (4, 2)])
def test_four_ranks_on_one_node_and_on_two_train_and_end(gpus, nodes, lab, start, whole):
    run = start(f"on-{nodes}", "--hw", "a100", "--gpus", gpus, "--nodes", nodes)
    wait_for_end(lab, run)
    assert ends(run) == [(0, "done", "stop")]
    begun = lines(run / "events.jsonl")[0]
    assert begun["world_size"] == 4
    assert lines(run / "slurm" / "attempts.jsonl")[0]["nodes"] == ("a100-0" if nodes == 1 else "a100-[0-1]")
    assert (run / "report.html").is_file()


def test_on_half_the_gpus_of_another_kind_each_sample_is_read_once_an_epoch(lab, start, whole, tmp_path):
    diary = tmp_path / "diary"
    asked = (f"model.diary={diary}", "max_duration=3ep", "eval_every=3ep", "global_batch_size=4", "model.sleep_ms=150")
    run = start("elastic", *asked, "--hw", "a100", "--gpus", 4)
    wait("step 5", lambda: steps_of(run) >= 5)
    assert trainyard("cancel", run) == 0
    lab.wait_for(job_of(run), "CANCELLED")
    wait("the lock is gone", lambda: not (run / "lock").exists())
    middle = steps_of(run)
    assert 5 <= middle < 15, "the stop was to fall into the first epoch"
    assert trainyard("resume", run, "--hw", "p100", "--gpus", 2, "--jobs", "tests/families") == 0
    wait_for_end(lab, run)
    steps: dict[int, set[int]] = {}  # by samples seen before; a step after the last checkpoint is taken twice, alike
    for line in diary.read_text().splitlines():
        at, *ids = map(int, line.split())
        steps.setdefault(at, set()).update(ids)
    assert sorted(steps) == list(range(0, 180, 4)) and all(len(ids) == 4 for ids in steps.values())
    train_ids = [i for i in range(100) if i % 5 > 1]
    for epoch in range(3):
        assert sorted(i for at, ids in steps.items() if at // 60 == epoch for i in ids) == train_ids
    worlds = [line["world_size"] for line in lines(run / "events.jsonl") if "world_size" in line]
    assert worlds == [4, 2]
