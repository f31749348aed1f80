"""The SIF of the CPU image under a real Apptainer: the host's Python stays out, Slurm's variables get in."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.container.conftest import APPTAINER, ROOT, run_script
from tests.container.test_image import wait_for_step
from tests.training import FAMILIES, find_differences, load_state


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    """An environment that would load foreign modules first."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("torch", "trainyard", "submitit"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the host's {name}')\n")
    (folder / "sitecustomize.py").write_text("raise SystemExit('the host's sitecustomize')\n")
    start = {"PYTHONSTARTUP": str(folder / "torch.py"), "PYTHONOPTIMIZE": "2", "PYTHONUSERBASE": str(folder)}
    return {"PYTHONPATH": str(folder), "PYTHONHOME": str(folder), **start}


def build_exec_command(sif: Path, folder: Path, *words: str | Path) -> list[str]:
    """Return the command that runs something in the SIF with this checkout and a folder mounted."""
    binds = ["--bind", str(ROOT), "--bind", str(folder)]
    return [str(word) for word in (APPTAINER, "exec", *binds, sif, *words)]


def test_the_hosts_python_settings_change_nothing(sif: Path, hostile: dict[str, str], tmp_path: Path):
    code = "import sys, torch, trainyard, submitit; print(torch.__file__, trainyard.__file__, sys.flags.optimize)"
    done = run_script(*build_exec_command(sif, tmp_path, "python", "-c", code), environ=hostile)
    assert done.returncode == 0, done.stderr
    torch, trainyard, optimize = done.stdout.split()
    assert torch.startswith("/opt/venv/") and trainyard.startswith("/opt/trainyard/src/") and optimize == "0"


def test_a_runs_own_variables_pass_through(sif: Path, hostile: dict[str, str], tmp_path: Path):
    said = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SUBMITIT_EXECUTOR": "slurm", "TRAINYARD_ATTEMPT": "77-0"}
    own_code = {"APPTAINERENV_PYTHONPATH": str(ROOT / "src")}
    code = f"import json, os, trainyard; print(json.dumps([trainyard.__file__, *map(os.environ.get, {list(said)})]))"
    done = run_script(*build_exec_command(sif, tmp_path, "python", "-c", code), environ={**hostile, **own_code, **said})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(ROOT / "src" / "trainyard" / "__init__.py"), *said.values()]


def test_it_names_the_lock_it_was_made_from(sif: Path):
    from local_image import hash_file

    done = run_script(APPTAINER, "inspect", "--json", "--labels", sif)
    labels = json.loads(done.stdout)["data"]["attributes"]["labels"]
    assert labels["io.trainyard.target"] == "cpu"
    assert labels["io.trainyard.lock"] == hash_file(ROOT / "containers" / "cpu.lock"), "make sif HW=cpu"
    assert labels["org.label-schema.usage.singularity.deffile.from"] == "image.tar", (
        "a path of the machine that built it"
    )


def test_submitit_starts_a_function_in_it(sif: Path, tmp_path: Path):
    import operator

    from submitit import LocalExecutor

    executor = LocalExecutor(tmp_path / "jobs", python=shlex.join(build_exec_command(sif, tmp_path, "python")))
    executor.update_parameters(timeout_min=5)
    assert executor.submit(operator.mul, 6, 7).result() == 42


def test_a_run_warned_in_a_sif_saves_and_resumes_to_the_same_bits(sif: Path, hostile: dict[str, str], tmp_path: Path):
    environ = {**hostile, "APPTAINERENV_PYTHONPATH": str(ROOT / "src")}
    whole, stopped = (build_exec_command(sif, tmp_path, *training(tmp_path / name)) for name in ("whole", "stopped"))
    assert run_script(*whole, environ=environ).returncode == 0
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(stopped, cwd=ROOT, stdout=said, stderr=said, env={**os.environ, **environ})
        wait_for_step(tmp_path / "stopped", process)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(60) == 85, (tmp_path / "said").read_text()
    again = run_script(*stopped, environ=environ)
    assert again.returncode == 0, again.stdout + again.stderr
    assert find_differences(*(load_state(tmp_path / name / "stripes" / "r") for name in ("whole", "stopped"))) == []


def training(runs: Path) -> list[str | Path]:
    """Return the command that trains a small job, for seconds."""
    options = [f"data.cache={runs}/cache", "max_duration=20ep"]
    return ["trainyard", "run", "stripes", "--jobs", FAMILIES, "--runs", runs, "--name", "r", *options]
