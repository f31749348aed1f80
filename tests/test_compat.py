"""Files of an earlier version still open: runs, checkpoints, packed data, a sweep, a cluster file (tests/compat).

Commit d26cd82 wrote the set in a folder /lab, with a real Slurm: `fingerprint/stopped` and `pricing/stopped`
(SIGUSR2 after their first checkpoint), `pricing/done`, `pricing/failed` (a learning rate of 1e30), the same two
submitted on two ranks, a sweep of two seeds. Not included: code snapshots, pickles, reports, the sweep's checkpoints.
Never regenerate it with newer code: add another set next to it.
"""

import csv
import json
from pathlib import Path

import pytest

from trainyard import cli

JOBS = Path(__file__).parents[1] / "jobs"


def run_command(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Run a command; return all its output."""
    capsys.readouterr()
    exit_code = cli.main([str(word) for word in words])
    output = capsys.readouterr()
    assert exit_code == code, output.out + output.err
    return output.out + output.err


@pytest.mark.slow
def test_status_of_each_run_is_what_the_version_that_wrote_it_reported(lab, capsys):
    output = run_command(capsys, "status")
    states = {words[0]: words[1] for line in output.splitlines() if (words := line.split()) and "/" in words[0]}
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


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pricing/failed", "pricing/submitted-failed"])
def test_why_names_the_gradient_and_the_checkpoint_to_resume_from(run, lab, capsys):
    output = run_command(capsys, "why", run)
    assert "the gradient is not finite" in output and "rank " in output, output


def test_every_record_of_the_packed_data_verifies(lab, capsys):
    folders = sorted((lab / "data").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert "all records are as they were packed" in run_command(capsys, "verify", folder)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["fingerprint/stopped", "pricing/stopped"])
def test_a_stopped_run_resumes_from_its_checkpoint_and_trains_to_the_end(run, lab, capsys):
    output = run_command(capsys, "resume", run, "--jobs", JOBS)
    assert "24" in output
    events = [json.loads(line) for line in (lab / "runs" / run / "events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [5] and events[-1]["event"] == "done" and events[-1]["step"] == 24


def test_checkpoints_verify_and_export(lab, capsys):
    assert "ok" in run_command(capsys, "ckpt", "verify", "pricing/done")
    run_command(capsys, "export", "pricing/done", lab / "weights.safetensors")
    assert (lab / "weights.safetensors").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pricing/done", "pricing/submitted-done", "pricing/submitted-failed"])
def test_a_report_is_written(run, lab, capsys):
    run_command(capsys, "report", run)
    page = (lab / "runs" / run / "report.html").read_text()
    assert "smape" in page and "openmp_wait" in page


def test_predict_uses_the_best_weights(lab, capsys):
    from jobs.pricing.pack import synthesize

    synthesize(lab / "new", count=12, seed=7)
    run_command(capsys, "predict", "pricing/done", lab / "new", lab / "out.csv", "--jobs", JOBS)
    with (lab / "out.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12


def test_the_results_of_the_sweep_are_read(lab, capsys):
    output = run_command(capsys, "results", "seeds")
    assert "2 of 2" in output and "smape on val" in output


@pytest.mark.slow
def test_the_cluster_file_plans_a_job(lab, capsys):
    words = ["submit", "pricing", f"data.path={lab}/data/pricing-d9f5e792e348", "--hw", "a100", "--gpus", "2", "--dry"]
    output = run_command(capsys, *words, "--cluster", lab / "cluster.yaml", "--jobs", JOBS, "--runs", lab / "runs")
    assert "#SBATCH --partition=a100" in output
