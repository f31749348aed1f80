"""Sweeps on a real Slurm: one array, never more at once than asked for, gone on with, and collected."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import LAB_FILE, job_of, kill_rank, lines, steps_of, trainyard, wait
from tests.slurm.conftest import Lab
from tests.training import FAMILIES
from trainyard.config import compose, thaw
from trainyard.data.prepare import prepare_data
from trainyard.report import sweep_page as results
from trainyard.report.sweep_page import estimate_mean
from trainyard.runs import folder as runs
from trainyard.runs import sweep_file
from trainyard.runs.state import ACTIVE
from trainyard.runs.status import read_statuses

pytestmark = pytest.mark.slurm


@pytest.fixture
def asks_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab, which the Slurm commands of this process talk to."""
    monkeypatch.setenv("SLURM_CONF", lab.environ["SLURM_CONF"])
    return lab


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Packed stripes."""
    cache = tmp_path_factory.mktemp("stripes")
    return prepare_data(compose("stripes", [f"data.cache={cache}"], FAMILIES), FAMILIES).data.path


def once(folder: Path) -> Path:
    """A cluster file by which nothing that crashed starts again."""
    content = yaml.safe_load(LAB_FILE.read_text())
    path = folder / "once.yaml"
    path.write_text(yaml.safe_dump({**content, "attempts": {"crash": 0}}, sort_keys=False))
    return path


def states(made: sweep_file.Sweep) -> dict[Path, str]:
    found, _ = read_statuses([element.run for element in made.elements])
    return {status.run: status.state for status in found}


def has_ended(now: Sequence[str]) -> bool:
    return not set(now) & set(ACTIVE)


def test_a_sweep_of_eight_runs_two_at_a_time_and_what_failed_is_gone_on_with_alone(
    asks_lab: Lab, tmp_path: Path, packed: str, capsys: pytest.CaptureFixture[str]
):
    root, cluster = tmp_path / "runs", once(tmp_path)
    where = ["--jobs", FAMILIES, "--runs", root, "--cluster", cluster, "--hw", "2080ti"]
    shared = [f"data.path={packed}", "max_duration=8ep", "model.sleep_ms=100"]
    words = ["--sweep", "optimizer.lr=1e-2,3e-3 seed=0,1,2,3", "--max-parallel", 2, "--name", "s"]
    assert trainyard("sweep", "stripes", *words, *shared, *where) == 0
    made = sweep_file.load("s", root)
    first = [job_of(element.run) for element in made.elements]
    assert first == [f"{first[0].partition('_')[0]}_{i}" for i in range(8)]

    doomed = made.elements[:2]
    for element in doomed:
        wait(f"a step of {element.run.name}", lambda run=element.run: steps_of(run) > 0)
        kill_rank(element.run, 0)
    most = 0
    while not has_ended(list(states(made).values())):
        most = max(most, asks_lab.run("squeue", "-h", "-r", "-n", "stripes", "-t", "RUNNING", "-o", "%i").count("\n"))
        time.sleep(0.5)
    assert most == 2
    assert Counter(states(made).values()) == {"done": 6, "failed": 2}
    capsys.readouterr()
    assert trainyard("results", "s", "--runs", root) == 0
    said = capsys.readouterr().out
    assert "2 failed, 6 done" in said and "2 of 4" in said
    assert all(f"trainyard why {element.run}" in said for element in doomed)

    assert trainyard("sweep", "--continue", "s", "--runs", root, "--jobs", FAMILIES) == 0
    assert "2 of 8 runs go on" in capsys.readouterr().out
    again = [job_of(element.run) for element in made.elements]
    assert again[2:] == first[2:] and not set(again[:2]) & set(first)
    while not has_ended(list(states(made).values())):
        time.sleep(0.5)
    assert Counter(states(made).values()) == {"done": 8}
    starts = [[e["event"] for e in lines(element.run / "events.jsonl")] for element in made.elements]
    assert all(events[0] == "start" and events[-1] == "done" for events in starts)
    assert [events.count("resume") + events.count("start") for events in starts] == [2, 2, 1, 1, 1, 1, 1, 1]
    found = results.collect(made, states(made))
    assert [row.counted for row in found.rows] == [4, 4]
    assert trainyard("sweep", "--continue", "s", "--runs", root, "--jobs", FAMILIES) == 0
    assert "Nothing is missing: 8 done" in capsys.readouterr().out
    by_hand = [outcome.metrics["test"]["accuracy"] for outcome in found.outcomes[:4]]
    assert estimate_mean(by_hand).value == pytest.approx(sum(by_hand) / 4)


def test_hydras_own_launcher_submits_a_multirun_and_waits_for_it(lab: Lab, tmp_path: Path, packed: str):
    asked = ["partition=a100", "timeout_min=10", "mem_gb=4", "cpus_per_task=1", "tasks_per_node=2"]
    words = ["multirun", "stripes", "--jobs", FAMILIES, "--runs", "runs", "hydra/launcher=submitit_slurm"]
    words += [*(f"hydra.launcher.{word}" for word in asked), f"data.path={packed}", "max_duration=2ep", "seed=0,1"]
    done = lab.try_run(sys.executable, "-m", "trainyard", *words, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "runs/stripes").iterdir())
    assert [thaw(run / runs.CONFIG, FAMILIES).seed for run in made] == [0, 1]
    for run in made:
        events = (run / "events.jsonl").read_text()
        assert '"event": "done"' in events and '"world_size": 2' in events
