"""`trainyard evaluate` scores labelled folders, next to baselines. Each family: test_contract.py."""

import csv
import json
from pathlib import Path

import pytest

from tests.test_formats import read_page
from tests.training import train
from trainyard.cli import main
from trainyard.config.compose import compose
from trainyard.data.prepare import prepare_data
from trainyard.report.evaluation_table import render_evaluations
from trainyard.report.metric_values import format_metric
from trainyard.runs.create import create_run
from trainyard.runs.evaluations import RUN, read_evaluations
from trainyard.runs.events import read_metrics, select_metrics
from trainyard.runs.manifest import find_result_step, list_checkpoints

JOBS = Path(__file__).parents[1] / "jobs"
PRICING, STRIPES = "data/pricing", "data/stripes"


@pytest.fixture
def done(stored: Path) -> Path:
    """A finished run of pricing that read data/pricing; the current folder has packed data of another family, too."""
    config = prepare_data(compose("pricing_smoke", ["data.cache=data", "packing.ridge=false"], JOBS), JOBS)
    (index,) = Path("data").glob("pricing-*/index.h5")
    config.data.path, config.data.synthetic = str(index.parent.rename(PRICING)), 0
    run = create_run(stored / "runs", config, name="done")
    assert train(run, jobs=JOBS) == 0
    return run


def evaluate(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Type `trainyard evaluate`; return what it prints."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--jobs", str(JOBS)]) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    return shown.out + shown.err


def write_catalogue(path: Path, rows: int, *, column: str = "price") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sample_id", "catalog_content", column])
        writer.writerows(
            [f"n{i}", f"Item Name: Tea number {i % 7}, {i + 1} Ounce", f"{3 + i / 2}"] for i in range(rows)
        )
    return path


@pytest.mark.slow
def test_the_own_test_split_scores_as_the_run_itself_did_and_folders_are_side_by_side(done, capsys, tmp_path):
    test = next(line for line in read_metrics(done) if line.get("split") == "test")
    shown = evaluate(capsys, done, PRICING, "--split", "test")
    (found,) = read_evaluations(done)
    run, ridge = found.lines
    assert (run["system"], ridge["system"]) == (RUN, "ridge")
    assert select_metrics(run) == pytest.approx(select_metrics(test), rel=1e-5)
    assert set(select_metrics(ridge)) == set(select_metrics(run)), "with its interval"
    assert ridge["smape"] != run["smape"] and ridge["smape_constant"] == run["smape_constant"], "on the same samples"
    assert found.name == "pricing-test" and not list(found.path.parent.glob(".*"))
    assert (found.path / "figures" / "Predicted against true price.png").is_file()
    about = json.loads((found.path / "evaluation.json").read_text())
    assert about["data"]["fingerprint"] == json.loads((done / "env.json").read_text())["data"]["fingerprint"]
    assert set(about) == read_page()["Evaluation"]
    assert about["checkpoint"]["step"] == find_result_step(list_checkpoints(done / "checkpoints")), "the best one"
    assert about["seen_in_training"] == {"samples": 0, "samples_of": about["data"]["samples"]}
    assert format_metric(run, "smape") in shown and format_metric(ridge, "smape") in shown
    raw = write_catalogue(tmp_path / "new.csv", 40)
    shown = evaluate(capsys, done, raw, PRICING, "--no-baseline", "evaluation.bootstrap_draws=0")
    names = [one.name for one in read_evaluations(done)]
    assert names == [found.name, "new.csv", "pricing"]
    header = next(line.split() for line in shown.splitlines() if "new.csv" in line)
    assert header == ["new.csv", "pricing"]
    assert not any("smape_low" in line for one in read_evaluations(done)[1:] for line in one.lines)
    count = about["data"]["samples_in_folder"]
    assert (
        f"seen in training: {json.loads((done / 'env.json').read_text())['data']['splits']['train']} of {count}"
        in shown
    )
    page = render_evaluations(read_evaluations(done))
    assert all(f"{name}: run" in page for name in names) and f"{found.name}: ridge" in page


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_refused_in_a_sentence_and_leaves_nothing(done, capsys, tmp_path):
    def refuse(*words: object) -> str:
        return evaluate(capsys, done, *words, code=2)

    assert f"packed for the family 'stripes', but {done} is a run of pricing" in refuse(STRIPES)
    unpriced = write_catalogue(tmp_path / "new.csv", 4, column="cost")
    assert f"{unpriced}: no column 'price'. It has: sample_id, catalog_content, cost" in refuse(unpriced)
    assert "nowhere: no such folder. Expected labelled raw files" in refuse("nowhere")
    assert "--split tset" in (said := refuse(PRICING, "--split", "tset")) and "It has: train, val, test" in said
    assert "optimizer.lr=1: the run's weights belong to its options" in refuse(PRICING, "optimizer.lr=1")
    moved = Path(PRICING).rename("elsewhere")
    assert "was trained on is not there, and the baseline is fitted on it. Leave it out: --no-baseline" in refuse(moved)
    shown = evaluate(capsys, done, unpriced, "packing.price_column=cost", "--no-baseline")
    assert "new.csv: 4 samples" in shown and "Seen in training: unknown, because data/pricing" in shown
    assert [one.name for one in read_evaluations(done)] == ["new.csv"]
    assert not list((done / "evaluations").glob(".*"))
    (read_evaluations(done)[0].path / "evaluation.json").write_text("{")
    assert main(["report", str(done)]) == 2 and "Delete its folder, and evaluate again" in capsys.readouterr().err
