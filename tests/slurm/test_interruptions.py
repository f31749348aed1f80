"""Interruptions on a real Slurm: the run ends with the same bits as an undisturbed one."""

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


def assert_same(run: Path, whole: Path) -> None:
    assert find_differences(load_state(whole), load_state(run)) == [], run.name
    assert read_run_metrics(whole) == read_run_metrics(run), run.name


@pytest.mark.timeout(1500)
def test_every_kind_of_interruption_gives_the_same_bits_and_is_recorded_with_its_cause(lab, start):
    """All at once, each on its own nodes: most of the time is spent waiting for Slurm."""
    whole = start("whole", *LONG, *TWO_RANKS, "--hw", "2080ti")  # undisturbed; all find the data unpacked
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
        for run in (whole, *took.values()):
            wait_for_end(lab, run)
    finally:  # other tests share the lab
        if first_node["node_failure"]:
            lab.run("scontrol", "update", f"nodename={first_node['node_failure']}", "state=resume")
    assert read_ends(whole) == [(0, "done", "stop")]
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
