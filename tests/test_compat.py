"""What earlier code wrote still opens: runs, checkpoints, packed data, a sweep, a cluster file (tests/compat).

The set was written by commit d26cd82 in a folder /lab, with a real Slurm: `fingerprint/stopped` and `pricing/stopped`
(SIGUSR2 after their first checkpoint), `pricing/done`, `pricing/failed` (a learning rate of 1e30), the same two
submitted on two ranks, a sweep of two seeds. Left out of it: code snapshots, pickles, reports, the sweep's checkpoints.
Never write it again with newer code: add another beside it.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest

from trainyard import cli

SET = Path(__file__).parent / "compat"
JOBS = Path(__file__).parents[1] / "jobs"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the set, in which the folder it was written in is this one; we stand there, without a Slurm."""
    folder = Path(shutil.copytree(SET, tmp_path / "lab"))
    moved = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".ckpt", ".h5") and "/lab" in (text := path.read_text()):
            path.write_text(text.replace("/lab", str(folder)))
            moved += 1
    assert moved > 10, "the set no longer names its folder"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SLURM_CONF", str(folder / "none"))
    return folder


def say(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Type a command; return all that it prints."""
    capsys.readouterr()
    found = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    assert found == code, said.out + said.err
    return said.out + said.err


def test_status_says_of_each_run_what_the_code_that_wrote_it_said(lab, capsys):
    said = say(capsys, "status")
    states = {words[0]: words[1] for line in said.splitlines() if (words := line.split()) and "/" in words[0]}
    assert states == {
        "fingerprint/stopped": "stopped",
        "pricing/stopped": "stopped",
        "pricing/done": "done",
        "pricing/failed": "failed",
        "pricing/submitted-done": "done",
        "pricing/submitted-failed": "failed",
        "pricing/seeds-000": "done",
        "pricing/seeds-001": "done",
    }


@pytest.mark.parametrize("run", ["pricing/failed", "pricing/submitted-failed"])
def test_why_names_the_gradient_and_the_checkpoint_to_resume_from(run, lab, capsys):
    said = say(capsys, "why", run)
    assert "the gradient is not finite" in said and "rank " in said, said


def test_every_record_of_the_packed_data_verifies(lab, capsys):
    folders = sorted((lab / "data").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert "all records are as they were packed" in say(capsys, "verify", folder)


@pytest.mark.parametrize("run", ["fingerprint/stopped", "pricing/stopped"])
def test_a_stopped_run_resumes_from_its_checkpoint_and_trains_to_the_end(run, lab, capsys):
    said = say(capsys, "resume", run, "--jobs", JOBS)
    assert "24" in said
    events = [json.loads(line) for line in (lab / "runs" / run / "events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [5] and events[-1]["event"] == "done" and events[-1]["step"] == 24


def test_checkpoints_verify_and_export(lab, capsys):
    assert "ok" in say(capsys, "ckpt", "verify", "pricing/done")
    say(capsys, "ckpt", "export", "pricing/done", lab / "weights.safetensors")
    assert (lab / "weights.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("run", ["pricing/done", "pricing/submitted-done", "pricing/submitted-failed"])
def test_a_report_is_written(run, lab, capsys):
    say(capsys, "report", run)
    page = (lab / "runs" / run / "report.html").read_text()
    assert "smape" in page and "openmp_wait" in page


def test_predictions_are_made_with_the_best_weights(lab, capsys):
    from jobs.pricing.pack import synthesize

    synthesize(lab / "new", count=12, seed=7)
    say(capsys, "predict", "pricing/done", lab / "new", lab / "out.csv", "--jobs", JOBS)
    with (lab / "out.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12


def test_the_results_of_the_sweep_are_read(lab, capsys):
    said = say(capsys, "results", "seeds")
    assert "2 of 2" in said and "smape on val" in said


def test_the_cluster_file_plans_a_job(lab, capsys):
    words = ["submit", "pricing", f"data.path={lab}/data/pricing-d9f5e792e348", "--hw", "a100", "--gpus", "2", "--dry"]
    said = say(capsys, *words, "--cluster", lab / "cluster.yaml", "--jobs", JOBS, "--runs", lab / "runs")
    assert "#SBATCH --partition=a100" in said
