"""Sweeps on a real Slurm: one array, never more runs at once than requested, continued, and collected."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import (
    LAB_FILE,
    kill_rank,
    read_ends,
    read_last_step,
    read_lines,
    read_slurm_job_id,
    trainyard,
    wait,
)
from tests.slurm.conftest import Lab
from tests.training import FAMILIES
from trainyard.config.compose import compose, find_differences, load_config
from trainyard.data.prepare import prepare_data
from trainyard.errors import UserError
from trainyard.launch.sweep import choose_array_size
from trainyard.report import sweep_page as results
from trainyard.report.sweep_page import estimate_mean
from trainyard.runs import folder as runs
from trainyard.runs import sweep_file
from trainyard.runs.folder import read_env
from trainyard.runs.state import ACTIVE
from trainyard.runs.status import read_statuses

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def packed_stripes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of packed stripes."""
    cache = tmp_path_factory.mktemp("stripes")
    return prepare_data(compose("stripes", [f"data.cache={cache}"], FAMILIES), FAMILIES).data.path


def write_no_restart_cluster(folder: Path) -> Path:
    """Write a cluster file that does not restart crashed jobs."""
    content = yaml.safe_load(LAB_FILE.read_text())
    path = folder / "once.yaml"
    path.write_text(yaml.safe_dump({**content, "attempts": {"crash": 0}}, sort_keys=False))
    return path


def read_states(made: sweep_file.Sweep) -> dict[Path, str]:
    found, _ = read_statuses([element.run for element in made.elements])
    return {status.run: status.state for status in found}


def has_ended(now: Sequence[str]) -> bool:
    return not set(now) & set(ACTIVE)


@pytest.mark.usefixtures("on_the_lab")
def test_a_sweep_of_six_runs_two_at_a_time_and_only_what_failed_is_continued(
    lab: Lab, tmp_path: Path, packed_stripes: str, capsys: pytest.CaptureFixture[str]
):
    root, cluster = tmp_path / "runs", write_no_restart_cluster(tmp_path)
    where = ["--jobs", FAMILIES, "--runs", root, "--cluster", cluster, "--hw", "2080ti"]
    shared = [f"data.path={packed_stripes}", "max_duration=8ep", "model.sleep_ms=100"]
    words = ["--sweep", "optimizer.lr=1e-2,3e-3 seed=0,1,2", "--max-parallel", 2, "--name", "s", "--no-plan"]
    assert trainyard("sweep", "stripes", *words, *shared, *where) == 0
    made = sweep_file.load("s", root)
    first = [read_slurm_job_id(element.run) for element in made.elements]
    assert first == [f"{first[0].partition('_')[0]}_{i}" for i in range(6)]

    doomed = made.elements[:2]
    for element in doomed:
        wait(f"a step of {element.run.name}", lambda run=element.run: read_last_step(run) > 0)
        kill_rank(element.run, 0)
    most = 0
    while not has_ended(list(read_states(made).values())):
        most = max(most, lab.run("squeue", "-h", "-r", "-n", "stripes", "-t", "RUNNING", "-o", "%i").count("\n"))
        time.sleep(0.5)
    assert most == 2
    assert Counter(read_states(made).values()) == {"done": 4, "failed": 2}
    capsys.readouterr()
    assert trainyard("results", "s", "--runs", root) == 0
    output = capsys.readouterr().out
    assert "2 failed, 4 done" in output and "1 of 3" in output
    assert all(f"trainyard why {element.run}" in output for element in doomed)

    assert trainyard("sweep", "--continue", "s", "--runs", root, "--jobs", FAMILIES) == 0
    assert "2 of 6 runs were submitted again" in capsys.readouterr().out
    again = [read_slurm_job_id(element.run) for element in made.elements]
    assert again[2:] == first[2:] and not set(again[:2]) & set(first)
    while not has_ended(list(read_states(made).values())):
        time.sleep(0.5)
    assert Counter(read_states(made).values()) == {"done": 6}
    starts = [[e["event"] for e in read_lines(element.run / "events.jsonl")] for element in made.elements]
    assert all(events[0] == "start" and events[-1] == "done" for events in starts)
    assert [events.count("resume") + events.count("start") for events in starts] == [2, 2, 1, 1, 1, 1]
    found = results.collect(made, read_states(made))
    assert [row.counted for row in found.rows] == [3, 3]
    assert trainyard("sweep", "--continue", "s", "--runs", root, "--jobs", FAMILIES) == 0
    assert "Nothing is missing: 6 done" in capsys.readouterr().out
    by_hand = [outcome.metrics["test"]["accuracy"] for outcome in found.outcomes[:3]]
    assert estimate_mean(by_hand).value == pytest.approx(sum(by_hand) / 3)


@pytest.mark.long
@pytest.mark.usefixtures("on_the_lab")
def test_hydras_own_launcher_submits_a_multirun_and_waits_for_it(lab: Lab, tmp_path: Path, packed_stripes: str):
    launcher_options = ["partition=a100", "timeout_min=10", "mem_gb=4", "cpus_per_task=1", "tasks_per_node=2"]
    words = ["multirun", "stripes", "--jobs", FAMILIES, "--runs", "runs", "hydra/launcher=submitit_slurm"]
    words += [
        *(f"hydra.launcher.{word}" for word in launcher_options),
        f"data.path={packed_stripes}",
        "max_duration=2ep",
        "seed=0,1",
    ]
    done = lab.try_run(sys.executable, "-m", "trainyard", *words, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "runs/stripes").iterdir())
    assert [load_config(run / runs.CONFIG, FAMILIES).seed for run in made] == [0, 1]
    for run in made:
        events = (run / "events.jsonl").read_text()
        assert '"event": "done"' in events and '"world_size": 2' in events


@pytest.mark.usefixtures("on_the_lab")
def test_the_last_run_of_an_array_starts_again_by_itself_and_no_other_with_it(
    lab: Lab, tmp_path: Path, packed_stripes: str
):
    """Slurm gives it the id of the array, which as a question means all of its elements."""
    where = ["--jobs", FAMILIES, "--runs", tmp_path / "runs", "--cluster", LAB_FILE, "--hw", "2080ti", "--name", "l"]
    slow = ["data.decode=cpu", f"data.path={packed_stripes}", "max_duration=60st", "model.sleep_ms=500"]
    assert trainyard("sweep", "stripes", "--sweep", "seed=0,1", *slow, "--no-plan", *where) == 0
    first, last = (element.run for element in sweep_file.load("l", tmp_path / "runs").elements)
    wait("steps", lambda: min(read_last_step(first), read_last_step(last)) >= 2)
    kill_rank(last, 0)
    wait("both ends", lambda: all(read_ends(run)[-1:] and read_ends(run)[-1][2] == "stop" for run in (first, last)))
    assert read_ends(last) == [(0, "crash", "requeue"), (1, "done", "stop")]
    assert read_ends(first) == [(0, "done", "stop")]


@pytest.mark.usefixtures("on_the_lab")
def test_a_sweep_larger_than_an_array_becomes_several_one_after_the_other(
    lab: Lab, tmp_path: Path, packed_stripes: str, monkeypatch: pytest.MonkeyPatch
):
    """Slurm holds the jobs, and says that an array has at most two elements."""
    scontrol = shutil.which("scontrol")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(
        f"#!/bin/sh\n{scontrol} \"$@\" | sed 's/^MaxArraySize .*/MaxArraySize = 3/'\n"
    )
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    cluster = tmp_path / "held.yaml"
    content = yaml.safe_load(LAB_FILE.read_text())
    cluster.write_text(yaml.safe_dump({**content, "sbatch": {"hold": True}}, sort_keys=False))
    where = ["--jobs", FAMILIES, "--runs", tmp_path / "runs", "--cluster", cluster, "--hw", "2080ti", "--name", "w"]
    words = ["--sweep", "seed=range(0,5)", "--max-parallel", 1, f"data.path={packed_stripes}", "--no-plan"]
    assert trainyard("sweep", "stripes", *words, *where) == 0
    jobs = [read_slurm_job_id(element.run) for element in sweep_file.load("w", tmp_path / "runs").elements]
    arrays = list(dict.fromkeys(job.partition("_")[0] for job in jobs))
    assert jobs == [*(f"{array}_{i}" for array in arrays[:2] for i in (0, 1)), arrays[2]]
    for before, array in itertools.pairwise(arrays):
        assert f"afterany:{before}_*" in lab.run("squeue", "-h", "-j", array, "-o", "%E")
    lab.run("scancel", *arrays)


@pytest.mark.usefixtures("on_the_lab")
def test_a_sweep_that_was_killed_while_its_runs_were_created_is_continued(
    lab: Lab, tmp_path: Path, packed_stripes: str, capsys: pytest.CaptureFixture[str]
):
    root, cluster = tmp_path / "runs", tmp_path / "held.yaml"
    cluster.write_text(yaml.safe_dump({**yaml.safe_load(LAB_FILE.read_text()), "sbatch": {"hold": True}}))
    where = ["--jobs", FAMILIES, "--runs", root, "--cluster", cluster, "--no-plan"]
    words = ["sweep", "stripes", "--sweep", "seed=range(0,80)", f"data.path={packed_stripes}", "--hw", "2080ti"]
    command = [sys.executable, "-m", "trainyard", *map(str, [*words, "--name", "k", *where])]
    with subprocess.Popen(command, env=lab.environ, stdout=subprocess.DEVNULL) as process:
        wait("the first runs", lambda: len(list(root.glob("stripes/k-*"))) > 3 or process.poll() is not None)
        process.kill()
    made = sweep_file.load("k", root)
    missing = sweep_file.list_missing(made)
    assert 0 < len(missing) < 80
    assert trainyard("results", "k", "--runs", root) == 0
    assert "80 new" in capsys.readouterr().out
    assert trainyard("sweep", "--continue", "k", *where) == 0
    assert f"{len(missing)} runs, which an interruption had left out" in capsys.readouterr().err
    configs = [load_config(element.run / runs.CONFIG, FAMILIES) for element in made.elements]
    assert [config.seed for config in configs] == list(range(80))
    assert not find_differences(configs[0], replace(configs[-1], seed=0))
    jobs = {read_slurm_job_id(element.run) for element in made.elements}
    assert len(jobs) == 80 and len({job.partition("_")[0] for job in jobs}) == 1
    assert len({read_env(element.run)["choices"]["families"]["value"] for element in made.elements}) == 1
    lab.run("scancel", *{job.partition("_")[0] for job in jobs})


def test_more_runs_than_slurm_lets_one_submit_are_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = {
        "scontrol": "MaxArraySize            = 1001\nAccountingStorageEnforce = associations,limits",
        "sacctmgr": "",
        "squeue": "JOBID|STATE\n1|RUNNING\n2_0|PENDING\n2_1|PENDING",
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{answer}\nEND\n")
        (tmp_path / name).chmod(0o755)
    own = (
        "Def Acct|Partition|QOS|Def QOS|Account|MaxWall|MaxTRES|GrpTRES|MaxJobs|MaxSubmit\nroot||normal||vision|||||10"
    )
    shared = "Account|MaxWall|MaxTRES|GrpTRES|MaxJobs|MaxSubmit\nvision|||||"
    qos = "Name|Flags|MaxWall|MaxTRES|MaxTRESPU|GrpTRES|MaxJobsPU|MaxSubmitPU\nnormal|||||||"
    cases = f"*user=*) echo '{shared}' ;; *user*) echo '{own}' ;; *) echo '{qos}' ;;"
    (tmp_path / "sacctmgr").write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_array_size(7, user="ann", account="vision", qos="") == 1000
    said = (
        r"8 runs requested, but account vision allows 10 of your jobs in the queue \(MaxSubmitJobs\), and 3 are there"
    )
    with pytest.raises(UserError, match=said):
        choose_array_size(8, user="ann", account="vision", qos="")
    said = "7 runs and the job that packs their data requested, .* Sweep over at most 6 now"
    with pytest.raises(UserError, match=said):
        choose_array_size(7, packs=True, user="ann", account="vision", qos="")
