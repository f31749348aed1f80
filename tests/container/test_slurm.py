"""Ranks in a container on a real Slurm: warned inside, requeued from outside, where scontrol is."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import APPTAINER, ROOT, run_script
from tests.slurm.cluster_runs import (
    LAB_FILE,
    make_starter,
    read_ends,
    read_last_step,
    read_slurm_job_id,
    wait,
    wait_for_end,
)
from tests.slurm.conftest import Lab, lab, on_the_lab  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("on_the_lab")]


@pytest.fixture(scope="module")
def unpacked(sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The unpacked SIF.

    The lab has no cgroups to keep track of processes, so Slurm sends a warning to all descendants, and that ends the
    one by which Apptainer reads a SIF. Clusters that track by cgroup signal the ranks alone.
    """
    folder = tmp_path_factory.mktemp("image") / "unpacked"
    done = run_script(APPTAINER, "build", "--sandbox", folder, sif, timeout_s=900)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)  # gigabytes, which pytest would keep for three sessions


@pytest.fixture
def in_the_image(unpacked: Path, tmp_path: Path) -> Path:
    """The lab's cluster file, with a container image."""
    content = yaml.safe_load(LAB_FILE.read_text())
    content["shared"] = [str(ROOT), str(tmp_path)]
    content["setup"] = [f"export PATH={ROOT / 'containers'}:$PATH"]
    content["container"] = {"kind": "apptainer", "image": str(unpacked)}
    path = tmp_path / "lab.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_a_warned_run_in_a_container_saves_and_is_requeued_by_the_host(
    lab: Lab,  # noqa: F811
    in_the_image: Path,
    tmp_path: Path,
):
    start = make_starter(tmp_path / "runs", tmp_path / "cache")
    run = start("sealed", "max_duration=60ep", "--hw", "a100", "--gpus", "2", cluster=in_the_image)
    wait("some steps", lambda: read_last_step(run) > 5)
    lab.run("scancel", "--signal=USR2", read_slurm_job_id(run))
    wait_for_end(lab, run)
    assert read_ends(run) == [(0, "preempted", "requeue"), (1, "done", "stop")]
