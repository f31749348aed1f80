"""What a run was predicted to take and what it took, and plans that use what was observed."""

import re
from pathlib import Path

import pytest

from tests.training import new_run, train
from trainyard.report.run_page import format_summary, write_report
from trainyard.runs.folder import format_run_name, read_env
from trainyard.runs.observations import read_amounts


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Return two runs of the same configuration, one after the other."""
    root = tmp_path_factory.mktemp("observed")
    made = []
    for _ in range(2):
        made.append(new_run(root, "max_duration=4st", "micro_batch_size=8", "data.synthetic=60"))
        assert train(made[-1]) == 0
    return made


def test_a_run_records_what_it_took_and_the_next_one_predicts_that(runs):
    predicted, observed = read_amounts(read_env(runs[0])) or ()
    assert (predicted.samples_per_s, predicted.hours, predicted.disk_bytes) == (None, None, None)
    assert predicted.reasons["hours"] == "no plan stored, no run before"
    assert observed.samples_per_s > 0 and observed.hours > 0 and observed.micro_batch_size == 8
    files = list((runs[0] / "checkpoints").iterdir())
    assert observed.disk_bytes == sum(path.stat().st_size for path in files)
    assert observed.memory_gib is None and "only a GPU's allocator" in observed.reasons["memory_gib"]
    again, _ = read_amounts(read_env(runs[1])) or ()
    assert (again.samples_per_s, again.hours) == (observed.samples_per_s, pytest.approx(observed.hours))
    assert again.reasons["hours"] == f"measured by {format_run_name(runs[0])}"
    assert again.disk_bytes >= observed.disk_bytes, "at most"


def test_the_report_and_the_summary_show_predicted_next_to_observed(runs):
    text = format_summary(runs[1])
    assert re.search(r"^plan +GPU memory, peak +predicted not predicted +observed not observed$", text, re.MULTILINE)
    assert re.search(r"samples/s +predicted [\d.e+]+ +observed [\d.e+]+$", text, re.MULTILINE)
    page = write_report(runs[1]).read_text()
    assert "Predicted and observed" in page and f"measured by {format_run_name(runs[0])}" in page
