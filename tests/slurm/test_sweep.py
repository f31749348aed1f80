"""Sweeps on a real Slurm: one array, never more at once than asked for, gone on with, and collected."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.conftest import LAB, Lab
from tests.training import FAMILIES
from trainyard.launch import results, runs, sweep
from trainyard.launch.cluster import Cluster, load_cluster
from trainyard.launch.config import compose, thaw
from trainyard.launch.status import ACTIVE, cancel, statuses
from trainyard.launch.submit import Code, Plan, Wish, plan, snapshot_code, submit
from trainyard.launch.task import ready_data

PATIENCE_S = 300


@pytest.fixture
def asks_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab, which the Slurm commands of this process talk to."""
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    return lab


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Packed stripes."""
    cache = tmp_path_factory.mktemp("stripes")
    return ready_data(compose("stripes", [f"data.cache={cache}"], FAMILIES), FAMILIES).data.path


def make(root: Path, words: str, data: str) -> tuple[sweep.Sweep, Plan, Code]:
    """A sweep of short runs on one pretended GPU each, and what is needed to submit it. Nothing crashes twice."""
    shared = [f"data.path={data}", "max_duration=2ep"]
    made = sweep.create("stripes", [words], shared, jobs_dir=FAMILIES, root=root / "runs", name="s", environ={})
    planned = plan(thaw(made.elements[0].run / runs.CONFIG, FAMILIES), patient(), Wish(hw="2080ti", time="10m"))
    return made, planned, snapshot_code(FAMILIES, made.folder / "code")


def patient() -> Cluster:
    cluster = load_cluster(LAB.parents[1] / "lab.yaml")
    return replace(cluster, attempts=replace(cluster.attempts, crash=0))


def states(made: sweep.Sweep) -> dict[Path, str]:
    found, _ = statuses([element.run for element in made.elements])
    return {status.run: status.state for status in found}


def wait_until(made: sweep.Sweep, is_reached: Callable[[Sequence[str]], bool]) -> Sequence[Sequence[str]]:
    """Return the states of all runs each time they were looked at, the last ones as wished."""
    seen = [list(states(made).values())]
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached(seen[-1]):
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s: {seen[-1]}"
        time.sleep(0.5)
        seen.append(list(states(made).values()))
    return seen


def has_ended(now: Sequence[str]) -> bool:
    return not set(now) & set(ACTIVE)


def test_a_sweep_is_one_array_of_which_no_more_than_asked_for_run_at_once(asks_lab: Lab, tmp_path: Path, packed: str):
    made, planned, code = make(tmp_path, "model.poison_step=-1,12 seed=0,1", packed)
    began = time.monotonic()
    jobs = submit(planned, [e.run for e in made.elements], folder=made.folder / "slurm", code=code, parallel=2)
    assert time.monotonic() - began < 15, "submitting waits for nothing"
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_{i}" for i in range(4)]
    running = [0]

    def all_ended(now: Sequence[str]) -> bool:
        running.append(asks_lab.run("squeue", "-h", "-r", "-j", array, "-t", "RUNNING", "-o", "%i").count("\n"))
        return has_ended(now)

    seen = wait_until(made, all_ended)
    assert max(running) == 2
    assert Counter(seen[-1]) == {"done": 2, "failed": 2}
    found = results.collect(made, states(made))
    assert [row.counted for row in found.rows] == [2, 0]
    assert {name for outcome in found.outcomes[:2] for name in outcome.metrics} == {"val", "test"}
    said = results.text(found)
    assert "2 done, 2 failed" in said and "CPU rank-hours" in said
    assert all(f"trainyard why {element.run}" in said for element in made.elements[2:])


def test_what_was_cancelled_is_gone_on_with_and_what_is_done_is_left_alone(asks_lab: Lab, tmp_path: Path, packed: str):
    made, planned, code = make(tmp_path, "seed=0,1", packed)
    folder = made.folder / "slurm"
    submit(planned, [e.run for e in made.elements], folder=folder, code=code, parallel=1)
    assert sweep.unfinished(made, states(made)) == []
    cancel([made.elements[1].run])
    wait_until(made, has_ended)
    assert states(made)[made.elements[0].run] == "done"
    left = sweep.unfinished(made, states(made))
    assert left == made.elements[1:]
    submit(planned, [element.run for element in left], folder=folder, code=code)
    wait_until(made, has_ended)
    assert [row.counted for row in results.collect(made, states(made)).rows] == [2]


def test_hydras_own_launcher_submits_a_multirun_and_waits_for_it(lab: Lab, tmp_path: Path, packed: str):
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom trainyard.launch.multirun import multirun\n"
        f"sys.exit(multirun('stripes', sys.argv[1:], jobs_dir=Path({str(FAMILIES)!r}), runs_dir=Path('runs'), "
        "environ=os.environ))"
    )
    asked = ["partition=a100", "timeout_min=10", "mem_gb=4", "cpus_per_task=1", "tasks_per_node=2"]
    done = subprocess.run(
        [sys.executable, "-c", program, "hydra/launcher=submitit_slurm", *(f"hydra.launcher.{word}" for word in asked)]
        + [f"data.path={packed}", "max_duration=2ep", "seed=0,1"],
        cwd=tmp_path,
        env=lab.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "runs/stripes").iterdir())
    assert [thaw(run / runs.CONFIG, FAMILIES).seed for run in made] == [0, 1]
    for run in made:
        events = (run / "events.jsonl").read_text()
        assert '"event": "done"' in events and '"world_size": 2' in events
