"""A shell where a run would be, and next to one: the partition, the cards and the site's setup, on a real Slurm."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import LAB_FILE, TIMEOUT_S, Start, read_last_step, read_slurm_job_id, trainyard, wait
from tests.slurm.conftest import Lab
from tests.training import FAMILIES, new_run

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_the_lab")]


def type_into_shell(lab: Lab, folder: Path, *words: object, lines: str) -> str:
    """Open a shell with a terminal, as a person has one; type the lines, and return what it shows."""
    command = " ".join([sys.executable, "-m", "trainyard", "shell", *map(str, words), "--jobs", str(FAMILIES)])
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=folder,
        env=lab.environ,
        input=f"{lines}\nexit\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_shell_has_the_cards_and_the_setup_that_a_run_would_get(lab: Lab, tmp_path: Path):
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(yaml.safe_dump({**yaml.safe_load(LAB_FILE.read_text()), "setup": ["export GREETING=hello"]}))
    words = ["--hw", "a100", "--gpus", 2, "--cluster", cluster]
    shown = type_into_shell(
        lab, tmp_path, *words, lines="echo $GREETING from $SLURM_JOB_PARTITION with $SLURM_GPUS_ON_NODE cards"
    )
    assert "hello from a100 with 2 cards" in shown


def test_a_shell_beside_a_run_is_in_its_slurm_job(lab: Lab, start: Start, tmp_path: Path):
    run = start("beside", "max_duration=40ep", "model.sleep_ms=250", "--hw", "a5000")
    wait("a step", lambda: read_last_step(run) > 0)
    shown = type_into_shell(lab, tmp_path, run, lines="echo in job $SLURM_JOB_ID")
    assert f"in job {read_slurm_job_id(run)}" in shown
    assert trainyard("cancel", run) == 0


def test_a_run_in_a_shell_of_salloc_says_how_to_train_on_its_nodes_and_that_works(lab: Lab, tmp_path: Path):
    new_run(tmp_path)  # packs the data
    allocation = ["salloc", "--partition=a100", "--gres=gpu:a100:2", "--nodelist=a100-1"]
    words = ["run", "stripes", "max_duration=4st", "data.decode=cpu", f"data.cache={tmp_path / 'cache'}"]
    words += ["--name", "mine", "--jobs", str(FAMILIES), "--runs", str(tmp_path / "runs")]
    refused = lab.try_run(*allocation, sys.executable, "-m", "trainyard", *words, timeout_s=TIMEOUT_S)
    assert refused.returncode == 2 and not (tmp_path / "runs" / "stripes" / "mine").exists()
    said = "This shell has reserved a100-1, but is not there: the run would train here while a100-1 waits."
    assert f"{said} To train there: srun --nodes=1 --ntasks=1 trainyard {shlex.join(words)}" in refused.stderr
    command = refused.stderr.partition("To train there: ")[2].splitlines()[0]
    command = command.replace(" trainyard ", f" {sys.executable} -m trainyard ", 1)
    lab.run(*allocation, "bash", "-c", command, timeout_s=TIMEOUT_S)
    assert read_last_step(tmp_path / "runs" / "stripes" / "mine") == 4


def test_a_dry_shell_prints_its_command_and_a_run_outside_slurm_has_none(tmp_path: Path, capsys):
    assert trainyard("shell", "--hw", "p100", "--cluster", LAB_FILE, "--dry", "--mem", "3G") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("srun ") and "--partition=p100" in shown and "--mem=3G" in shown and "--time=60" in shown
    assert not list(tmp_path.iterdir())
    run = new_run(tmp_path, "max_duration=1st")
    assert trainyard("shell", run) == 2
    assert f"{run}: is not in Slurm. A shell on this machine: bash" in capsys.readouterr().err
