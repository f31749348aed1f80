"""A rank that hangs on a real Slurm: noticed, named, and the run goes on by itself to the same bits."""

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster_runs import (
    find_rank_pids,
    read_ends,
    read_last_step,
    read_lines,
    trainyard,
    wait,
    wait_for_end,
)
from tests.training import find_differences, load_state, read_run_metrics
from trainyard.runs.history import RANKS

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("on_the_lab")]

STEPS = ("max_duration=8ep", "eval_every=4ep", "hang_minutes=0.2", "model.sleep_ms=100", "--gpus", 2)


def test_a_stopped_rank_is_named_and_the_run_ends_with_the_same_bits(lab, start, capsys):
    whole = start("whole", *STEPS, "--hw", "2080ti")
    wait_for_end(lab, whole)
    run = start("hung", *STEPS, "--hw", "a100")
    wait("a few steps", lambda: read_last_step(run) >= 6)
    (pid,) = find_rank_pids(run, 1)
    os.kill(pid, signal.SIGSTOP)
    wait("the end of the attempt", lambda: read_ends(run))
    wait("the stopped rank is dead", lambda: not Path(f"/proc/{pid}").exists())
    assert read_ends(run) == [(0, "hung", "requeue")]
    (end,) = [line for line in read_lines(run / "slurm" / "attempts.jsonl") if line["event"] == "end"]
    assert end["reason"].startswith("rank 1 on ") and "it is stopped or cut off" in end["reason"]
    assert list((run / RANKS).glob("*-0-rank0-stacks.txt"))
    assert trainyard("why", run) == 0
    explained = capsys.readouterr().out
    assert "starts again after a hang" in explained and "Hung: its process has done nothing for" in explained
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "hung", "requeue"), (1, "done", "stop")]
    assert find_differences(load_state(whole), load_state(run)) == []
    assert read_run_metrics(whole) == read_run_metrics(run)
