"""What the stored plan predicted of a run, and what the run took, next to each other."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import FAMILIES, new_run, train
from trainyard.cli import main
from trainyard.cli.choices import compose_job
from trainyard.config import compose as configs
from trainyard.config.families import Root
from trainyard.errors import UserError
from trainyard.plan.memory import StepConfig, StepPrediction, compute_key, open_cache
from trainyard.plan.resources import ResourceRequest, RunRequest
from trainyard.report.run_page import format_summary, write_report
from trainyard.runs.folder import CONFIG, read_env, update_env
from trainyard.runs.observations import Usage, describe_plan, read_usage

MIB = 2**20
OPTIONS = ("max_duration=4st", "micro_batch_size=8", "data.synthetic=60")


def store_plan(run: Path) -> None:
    """PredictionCache a plan for this run, as `trainyard plan` would for a GPU, and record its key, as submit does."""
    config = configs.load_config(run / CONFIG, FAMILIES)
    store = open_cache(config, FAMILIES, os.environ)
    step = StepPrediction(parameters=MIB, optimizer=2 * MIB, activations=5 * MIB)
    store.steps[StepConfig("cpu", "fp32", True, False, 8, accumulates=True)] = step
    store.steps[StepConfig("cpu", "fp32", True, False, 4, accumulates=True)] = replace(step, activations=MIB)
    store.save()
    update_env(run, "plan", describe_plan(compute_key(config, FAMILIES))["plan"])


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return new_run(tmp_path, *OPTIONS)


@pytest.mark.slow
def test_a_run_records_what_its_stored_plan_predicted_and_what_it_took(run):
    store_plan(run)
    assert train(run) == 0
    predicted, observed = read_usage(read_env(run)) or ()
    kept = 1 + configs.load_config(run / CONFIG, FAMILIES).checkpoint.keep_last
    assert predicted == Usage(8 / 1024, 3 * MIB * kept), "of micro-batches of 8"
    on_disk = sum(path.stat().st_size for path in (run / "checkpoints").iterdir())
    assert observed == Usage(None, on_disk) and on_disk > 0, "the CPU's allocator does not say what it gave out"
    text = format_summary(run)
    assert re.search(r"^plan +GPU memory, peak +predicted 0\.01 GiB +observed not recorded$", text, re.MULTILINE), text
    assert re.search(r"^ +disk, checkpoints +predicted [\d.]+ GiB +observed [\d.]+ KiB$", text, re.MULTILINE), text
    page = write_report(run).read_text()
    assert "Predicted and observed" in page and "predicted by the stored plan" in page


@pytest.mark.slow
def test_a_run_without_a_stored_plan_compares_nothing_and_no_earlier_run_counts(run, tmp_path):
    for each in (run, new_run(tmp_path, *OPTIONS)):
        assert train(each) == 0
        assert read_usage(read_env(each)) is None and read_env(each)["plan"]["observed"]["disk_bytes"] > 0
        assert not re.search("^plan", format_summary(each), re.MULTILINE)
        assert "Predicted and observed" not in write_report(each).read_text()


@pytest.mark.slow
def test_the_command_that_a_plan_names_runs_and_keeps_the_plans_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    words = ["stripes", "max_duration=3st", "--hw", "cpu", "--jobs", str(FAMILIES)]
    assert main(["plan", *words]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next "))
    assert shlex.split(line)[1:] == ["trainyard", "submit", "stripes", "max_duration=3st"]
    assert main(["run", *words[:2], "--name", "one", "--jobs", str(FAMILIES)]) == 0
    run = tmp_path / "runs" / "stripes" / "one"

    request = RunRequest(
        "stripes", (words[1],), Root(FAMILIES, ""), Path("runs"), typed=(), resources=ResourceRequest()
    )
    key = compute_key(compose_job(request, None).config, FAMILIES)
    assert read_env(run)["plan"]["key"] == key, "of the config before packing, which the plan has"


def test_a_damaged_record_of_a_plan_is_named():

    with pytest.raises(UserError, match="its section 'plan' is damaged"):
        read_usage({"plan": {"predicted": {"memory": 1}, "observed": {"memory_gib": 1}}})
