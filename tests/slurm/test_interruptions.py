"""Interruptions on a real Slurm: the run ends with the same bits as an undisturbed one."""

from pathlib import Path

import pytest

from tests.slurm.cluster_runs import (
    kill_rank,
    read_ends,
    read_last_step,
    read_lines,
    read_slurm_job_id,
    trainyard,
    wait,
    wait_for_end,
)
from tests.training import find_differences, load_state, read_run_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]

# 60 steps in 15 seconds: time to interrupt them; and a checkpoint every 4 epochs, so that steps can be lost.
LONG = ("max_duration=12ep", "eval_every=4ep", "model.sleep_ms=250")
TWO_RANKS = ("--gpus", 2, "--time", "20m")


def assert_same(run: Path, whole: Path) -> None:
    assert find_differences(load_state(whole), load_state(run)) == [], run.name
    assert read_run_metrics(whole) == read_run_metrics(run), run.name


@pytest.mark.timeout(1500)
def test_every_kind_of_interruption_gives_the_same_bits_and_is_recorded_with_its_cause(lab, start):
    """All runs at once, each on its own nodes, because most of the time is spent waiting for Slurm."""
    whole = start("whole", *LONG, *TWO_RANKS, "--hw", "2080ti")  # undisturbed; all find the data unpacked
    limited = start("limited", *LONG[:2], "model.sleep_ms=1600", "--gpus", 2, "--time", "2m", "--hw", "p100")
    evicted = start("evicted", *LONG, *TWO_RANKS, "--hw", "a100")
    stopped = start("stopped", *LONG, *TWO_RANKS, "--hw", "2080ti")
    lost = ""
    try:
        wait("the first steps", lambda: min(count_steps(evicted, 0), count_steps(stopped, 0)) >= 6)
        lab.submit("true", "-p", "a100-urgent", "--gres=gpu:a100:8", "-w", read_node(evicted), "--exclusive")
        kill_rank(stopped, 1)

        wait("steps after the kill", lambda: count_steps(stopped, 1) >= 3)
        lab.run("scancel", "--signal=USR2", read_slurm_job_id(stopped))
        wait("steps after the preemption", lambda: count_steps(evicted, 1) >= 3)
        lost = read_node(evicted)
        lab.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")

        wait("steps after the signal", lambda: count_steps(stopped, 2) >= 3)
        lab.run("scancel", read_slurm_job_id(stopped))
        lab.wait_for(read_slurm_job_id(stopped), "CANCELLED")
        wait("all is written", lambda: not (stopped / "lock").exists())
        assert trainyard("resume", stopped, "--jobs", "tests/families") == 0
        for run in (whole, limited, evicted, stopped):
            wait_for_end(lab, run)
    finally:  # other tests share the lab
        if lost:
            lab.run("scontrol", "update", f"nodename={lost}", "state=resume")
    assert read_ends(whole) == [(0, "done", "stop")]
    assert read_ends(evicted) == [(0, "preempted", "slurm"), (1, "node_failure", "slurm"), (2, "done", "stop")]
    # The third attempt was cancelled and could not write its end: `resume` did. The fourth is of a new Slurm job.
    assert read_ends(stopped) == [
        *((0, "crash", "requeue"), (1, "preempted", "requeue"), (2, "cancelled", "stop")),
        (0, "done", "stop"),
    ]
    ends = read_ends(limited)
    assert len(ends) > 1 and ends[-1] == (len(ends) - 1, "done", "stop")
    assert {end[1:] for end in ends[:-1]} == {("time_limit", "requeue")}
    assert read_node(evicted) != lost, "the lost node was used again"
    for run in (limited, evicted, stopped):
        assert_same(run, whole)


def read_node(run: Path) -> str:
    """Return the node of a run's newest attempt."""
    return [line["nodes"] for line in read_lines(run / "slurm" / "attempts.jsonl") if line["event"] == "start"][-1]


def count_steps(run: Path, attempt: int) -> int:
    """Return how many steps an attempt of a run's Slurm job has done, 0 before it trains."""
    events = [line for line in read_lines(run / "events.jsonl") if line["event"] in ("start", "resume")]
    began = [line["step"] for line in events if line["attempt"] == f"{read_slurm_job_id(run)}-{attempt}"]
    return read_last_step(run) - began[0] if began else 0
