"""`--dry` prints what would start, and starts and writes nothing; no value reaches a shell unquoted."""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.training import FAMILIES, new_run, train
from trainyard import cli
from trainyard.runs.events import read_events

ROOT = Path(__file__).resolve().parents[1]
JOBS = ["--jobs", str(FAMILIES)]
STARTS_NOTHING = {
    *(
        "jobs",
        "options",
        "completion",
        "pack",
        "verify",
        "ckpt",
        "report",
        "evaluate",
        "export",
        "predict",
        "embed",
        "compare",
        "search",
        "plan",
        "gc",
        "new",
        "check-family",
        "ablate",
        "doctor",
        "board",
    ),
    *("results", "status", "runs", "logs", "why", "cancel", "cluster-check"),
}
"""Commands that train no run and submit nothing: they read, measure, stop, or write the one thing that is named."""
INTERNAL = {"rank"}  # what run and resume start on each rank


@pytest.fixture
def cluster(tmp_path: Path) -> list[str]:
    """The arguments that name a cluster whose nodes share this test's folder."""
    file = tmp_path / "cluster.yaml"
    text = (ROOT / "tests/slurm/golden/cluster.yaml").read_text()
    file.write_text(text.replace("[/shared]", f"[{tmp_path}]").replace("setup: [module load slurm-scripts]\n", ""))
    return ["--cluster", str(file)]


def list_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main([*argv, *JOBS]) == 0
    return capsys.readouterr().out


def test_every_command_that_starts_something_has_a_dry_run():
    parser, _ = cli._build_parser(["-", "run"])  # all of them, without the families' own commands
    (verbs,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    dry = {name for name, verb in verbs.items() if any("--dry" in action.option_strings for action in verb._actions)}
    assert dry == set(verbs) - STARTS_NOTHING - INTERNAL == {"run", "resume", "submit", "shell", "sweep", "multirun"}


@pytest.mark.slow
def test_a_dry_run_says_which_data_and_how_many_steps_and_writes_nothing(tmp_path: Path, capsys):
    run = new_run(tmp_path, "max_duration=1ep")
    data = next((tmp_path / "cache").glob("*/index.h5")).parent
    where, before = ["--runs", str(tmp_path / "runs")], list_files(tmp_path)
    words = ["stripes", f"data.path={data}", "max_duration=1ep", "--name", "first", *where]
    shown = run_cli(capsys, "run", *words, "--dry")
    assert f"data       {data}: " in shown and "begins     at step 0\n" in shown
    assert f"options    data.path={data} max_duration=1ep\n" in shown
    steps = re.search(r"^length     1ep: (\d+) steps, ", shown, re.MULTILINE)
    assert steps and steps[0] in run_cli(capsys, "submit", *words, "--local", "--dry")
    assert "begins     at step 0\n" in run_cli(capsys, "resume", str(run), "--dry")
    assert list_files(tmp_path) == before
    assert train(run) == 0
    assert int(steps[1]) == read_events(run)[0]["total_steps"]
    before = list_files(tmp_path)
    assert f"begins     at step {steps[1]}, from step-" in run_cli(capsys, "resume", str(run), "--dry")
    assert cli.main(["resume", str(run), "seed=7", "--dry", *JOBS]) == 2
    run_cli(capsys, "resume", str(run), "eval_batch_size=7", "--dry")
    assert list_files(tmp_path) == before


def test_a_dry_run_of_synthetic_or_raw_data_packs_nothing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "samples to synthesize, packed into data unless" in run_cli(capsys, "run", "stripes", "--dry")
    (tmp_path / "raw").mkdir()
    shown = run_cli(capsys, "run", "stripes", "data.path=raw", "max_duration=9st", "--dry")
    assert "raw: raw files" in shown and "length     9st\n" in shown
    assert cli.main(["run", "stripes", "data.path=nowhere", "--dry", *JOBS]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "raw"]


@pytest.mark.slow
def test_a_dry_sweep_prints_every_run_and_the_array_and_writes_nothing(tmp_path: Path, cluster, capsys):
    words = ["--sweep", "optimizer.lr=1e-2,3e-3 seed=0,1", "--max-parallel", "3", "--name", "s", "--gpus", "2"]
    before = list_files(tmp_path)
    shown = run_cli(capsys, "sweep", "stripes", *words, "--dry", *cluster, "--runs", str(tmp_path / "runs"))
    assert "run         s-002  optimizer.lr=0.003 seed=0\n" in shown
    assert "#SBATCH --array=0-3%3\n" in shown and "#SBATCH --job-name=stripes\n" in shown
    assert list_files(tmp_path) == before
    for wrong, expected in (
        (["--sweep", "optimizer.lt=1,2"], "Nearest: optimizer.lr"),
        (["--sweep", "precision=fp32,bf16", "--hw", "p100"], "precision=bf16 requested"),
        (["--sweep", "seed=0,1", "--name", "../s"], "cannot name a sweep"),
    ):
        assert cli.main(["sweep", "stripes", *wrong, "--dry", *cluster, *JOBS]) == 2
        assert expected in capsys.readouterr().err


HOSTILE_FOLDERS = ("$(touch ran)", "`touch ran`", "'; touch ran; '", '"; touch ran #', "-a *  ? $HOME && touch ran |x")


@pytest.mark.parametrize("name", HOSTILE_FOLDERS)
def test_a_batch_script_runs_nothing_that_a_path_says(name: str, tmp_path: Path, cluster, capsys):
    """The script is run by bash, with a program that writes down its arguments in the place of srun."""
    programs, here, runs = tmp_path / "bin", tmp_path / "here", tmp_path / name
    for folder in (programs, here):
        folder.mkdir()
    (programs / "srun").write_text(f'#!/bin/sh\nprintf "%s\\0" "$TRAINYARD_RUN" "$@" >{tmp_path}/srun-arguments\n')
    (programs / "srun").chmod(0o755)
    single = ["submit", "stripes", "--name", "r"]
    array = ["sweep", "stripes", "--name", "s", "--sweep", "seed=0,1"]
    for words, folder, run in (
        (single, runs / "stripes/r/slurm", runs / "stripes/r"),
        (array, runs / "sweeps/s/slurm", runs / "stripes/s-001"),
    ):
        script = run_cli(capsys, *words, "--dry", *cluster, f"--runs={runs}")
        script = script[script.index("#!/bin/bash") :]
        folder.mkdir(parents=True)
        (run / "slurm").mkdir(parents=True, exist_ok=True)  # as attempt.sh does
        (folder / "attempt.sh").write_text(":\n")
        for array_list in re.findall(r"runs-[0-9a-f]{12}\.txt", script):
            (folder / array_list).write_text("".join(f"{runs}/stripes/s-00{i}\n" for i in range(2)))
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}
        done = subprocess.run(["bash", "-c", script], cwd=here, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        found = (tmp_path / "srun-arguments").read_text().split("\0")[:-1]
        assert found[0] == str(run) and found[-1] == str(folder)
        assert list(here.iterdir()) == []
        options = [line for line in script.splitlines() if line.startswith("#SBATCH --output")]
        assert len(options) == 1 and shlex.split(options[0][len("#SBATCH ") :])[0].startswith(f"--output={folder}/%")


@pytest.mark.parametrize("name", ["../r", "$(touch ran)", "; touch ran", "a b", "-x", ".r", "a\nb"])
def test_a_dry_run_refuses_the_names_that_the_real_one_does(name: str, tmp_path: Path, cluster, capsys):
    for words in (
        ["run", "stripes"],
        ["submit", "stripes", *cluster],
        ["sweep", "stripes", "--sweep=seed=0,1", *cluster],
    ):
        assert cli.main([*words, "--dry", f"--name={name}", "--runs", str(tmp_path / "runs"), *JOBS]) == 2
        assert "cannot name a" in capsys.readouterr().err


def test_a_value_of_a_sweep_is_text(tmp_path: Path, cluster, capsys):
    values = ["$(touch ran)", "`touch ran`", "; touch ran", "a b, c", "-x | * ?"]
    axis = "augment.crop_keeps=" + ",".join(f"'{value}'" for value in values)
    shown = run_cli(capsys, "sweep", "stripes", "--sweep", axis, "--dry", *cluster, "--runs", str(tmp_path / "runs"))
    for number, value in enumerate(values):
        assert f"NEW-{number:03d}  augment.crop_keeps='{value}'\n" in shown
    script = shown[shown.index("#!/bin/bash") :]
    assert "touch" not in script
