"""A shell where a run would be, and next to one: the partition, the cards and the site's setup, on a real Slurm."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster_runs import LAB_FILE, Start, read_last_step, read_slurm_job_id, trainyard, wait
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


def test_a_dry_shell_prints_its_command_and_a_run_outside_slurm_has_none(tmp_path: Path, capsys):
    assert trainyard("shell", "--hw", "p100", "--cluster", LAB_FILE, "--dry", "--mem", "3G") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("srun ") and "--partition=p100" in shown and "--mem=3G" in shown and "--time=60" in shown
    assert not list(tmp_path.iterdir())
    run = new_run(tmp_path, "max_duration=1st")
    assert trainyard("shell", run) == 2
    assert f"{run}: is not in Slurm. A shell on this machine: bash" in capsys.readouterr().err
