"""On the CPU a run keeps its number of threads, on which its bits depend."""

import json
import time
from pathlib import Path

import pytest
import torch

from tests.training import FAMILIES, find_differences, load_state, new_run
from trainyard.choice import Choice
from trainyard.hardware import reuse_compute_threads
from trainyard.node import choices
from trainyard.node.rank_task import execute
from trainyard.runs.state import ExitCode
from trainyard.train.world import World


def read_env(run: Path) -> dict:
    return json.loads((run / "env.json").read_text())


@pytest.mark.slow
def test_a_run_resumes_with_as_many_threads_as_it_began_with(tmp_path):
    options = ["max_duration=3ep", "max_runtime=1m", "eval_every=9ep", "data.decode=cpu"]
    whole, run = new_run(tmp_path, *options), new_run(tmp_path, *options)
    now = time.time()
    assert execute(whole, FAMILIES, environ={"OMP_NUM_THREADS": "3"}, started=now) == 0
    assert execute(run, FAMILIES, environ={"OMP_NUM_THREADS": "3"}, started=now - 60) == ExitCode.MAX_RUNTIME
    assert execute(run, FAMILIES, environ={"OMP_NUM_THREADS": "2"}, started=now) == 0
    assert torch.get_num_threads() == 3 and read_env(run)["exactness"]["compute_threads_by_rank"] == [3]
    assert find_differences(load_state(whole), load_state(run)) == []
    choice = read_env(run)["choices"]["compute_threads"]
    assert choice["value"] == 3
    assert "as this run began" in choice["reason"] and "a new run would take 2: OMP_NUM_THREADS=2" in choice["reason"]
    assert choice["reason"] in (run / "log").read_text()

    assert choices._read_compute_threads(run, World()) == 3
    assert choices._read_compute_threads(run, World(world_size=2)) is None


def test_threads_are_chosen_for_the_machine_where_nothing_is_recorded():
    cores = Choice(4, "cores")
    assert reuse_compute_threads(None, cores) == cores
    assert reuse_compute_threads(4, cores) == cores
    assert reuse_compute_threads(8, cores).value == 8


def test_sums_depend_on_the_number_of_threads():
    """Why the number is kept: if this fails on a machine, it does no harm there."""
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), set()
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.add(values.sum().item())
    torch.set_num_threads(before)
    assert len(found) > 1
