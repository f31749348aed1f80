"""A sweep creates all its runs or none, its results are what the runs recorded, and Hydra's own multirun works."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback

from tests.training import FAMILIES, run_as_command, train
from trainyard.config.compose import load_config
from trainyard.data.prepare import prepare_data
from trainyard.errors import UserError
from trainyard.launch import multirun, sweep
from trainyard.report import sweep_page as results
from trainyard.runs import folder as runs
from trainyard.runs import sweep_file
from trainyard.runs.events import read_metrics
from trainyard.tables import read_table
from trainyard.train.recorder import Recorder

MONITOR = {"split": "val", "metric": "accuracy", "mode": "max"}


def make_sweep(
    root: Path, words: str, *overrides: str, name: str | None = "s", job: str = "stripes"
) -> sweep_file.Sweep:
    axes, combinations = sweep.combine(job, [words], overrides, FAMILIES)
    new = [sweep.NewRun(*combination) for combination in combinations]
    return sweep.create(job, axes, overrides, new, root=root / "runs", name=name, environ={})


def list_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def make_states(made: sweep_file.Sweep, **others: str) -> dict[Path, str]:
    """Return the state "done" for every run, except for those named by their index: e4="failed"."""
    return {e.run: others.get(f"e{e.index}", "done") for e in made.elements}


def record_run(
    run: Path, val: Sequence[float], test: float | None = None, *, monitor: dict[str, str] = MONITOR
) -> None:
    """Write what a training writes that evaluates after each step, and on the test set at its end."""
    fields = {"event": "start", "total_steps": len(val), "world_size": 1, "device": "cpu", "host": "here"}
    with closing(Recorder(run, trackers=(), config={}, resume_at=None)) as log:
        log.log("event", 0, {**fields, "monitor": monitor})
        for step, value in enumerate(val, start=1):
            numbers = {"accuracy": value, "loss": 1 - value, "accuracy_low": value - 0.1, "seconds": 0.5}
            log.log("eval", step, {"epoch": step, "split": "val", **numbers})
        if test is not None:
            log.log("eval", len(val), {"epoch": len(val), "split": "test", "accuracy": test, "loss": 1 - test})
            log.log("event", len(val), {"event": "done"})


class ImageSources(HTMLParser):
    """The sources of a page's images, and everything else that it would fetch."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


# What varies


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        (["seed=0,1 optimizer.lr=1e-4,3e-4"], {"seed": ["0", "1"], "optimizer.lr": ["0.0001", "0.0003"]}),
        (["seed=0,1", "compile=on,off"], {"seed": ["0", "1"], "compile": ["on", "off"]}),
        (["seed=range(1,4)"], {"seed": ["1", "2", "3"]}),
        (["augment.zoom=range(0,1,0.25)"], {"augment.zoom": ["0.0", "0.25", "0.5", "0.75"]}),
        (["optimizer.name=choice(adamw, sgd)"], {"optimizer.name": ["adamw", "sgd"]}),
        (["trackers=[wandb, mlflow],[]"], {"trackers": ["[wandb,mlflow]", "[]"]}),
        (["data.path='/a,b',/c"], {"data.path": ["'/a,b'", "/c"]}),
        (["data.path='/a b, c' seed=0,1"], {"data.path": ["'/a b, c'"], "seed": ["0", "1"]}),
        (["deterministic=True,false"], {"deterministic": ["true", "false"]}),
    ],
)
def test_values_are_read_as_hydra_reads_them_in_the_order_typed(words, axes):
    found = sweep.expand(words)
    assert found == axes and list(found) == list(axes)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["needs an option", "--sweep"]),
        (["seed"], ["'seed'", "option=value,value"]),
        (["+seed=0,1"], ["'+seed=0,1'", "without a prefix"]),
        (["seed = 0,1"], ["without spaces"]),
        (["seed=0,1,0"], ["seed=0,1,0", "0 appears twice"]),
        (["seed=0,1 compile=on,off seed=2"], ["'seed' varies twice"]),
        (["optimizer.name=glob(*)"], ["glob()"]),
        (["optimizer.lr=interval(0,1)"], ["interval()"]),
        (["seed=range(3,0)"], ["no value", "range(0,3) is 0,1,2"]),
        (["seed=range(0,1,0)"], ["seed=range(0,1,0)", "cannot be read"]),
        (["seed=(1"], ["seed=(1", "cannot be read"]),
        (["seed=range(0,1000000000)"], ["more than 10000 runs"]),
        (["seed=range(0,101) data.threads=range(0,100)"], ["more than 10000 runs"]),
    ],
)
def test_an_invalid_sweep_is_refused_in_one_line(words, expected):
    with pytest.raises(UserError) as refused:
        sweep.expand(words)
    assert "\n" not in str(refused.value)
    for part in expected:
        assert part in str(refused.value)


# Creating a sweep


@pytest.mark.slow
def test_each_combination_is_a_separate_run_and_the_last_axis_varies_fastest(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,3e-3 seed=0,1,2", "max_duration=1ep")
    assert [e.index for e in made.elements] == list(range(6))
    assert [e.run for e in made.elements] == [tmp_path / f"runs/stripes/s-00{i}" for i in range(6)]
    configs = [load_config(e.run / runs.CONFIG, FAMILIES) for e in made.elements]
    assert [(c.optimizer.lr, c.seed) for c in configs] == [(lr, s) for lr in (1e-2, 3e-3) for s in (0, 1, 2)]
    assert {c.max_duration for c in configs} == {"1ep"}
    assert made.elements[4].overrides == ("optimizer.lr=0.003", "seed=1")
    assert runs.resolve_run("s-004", tmp_path / "runs") == made.elements[4].run


def test_a_free_text_option_takes_a_quoted_value_without_its_quotes(tmp_path: Path):
    made = make_sweep(tmp_path, "data.path='/a,b',/c:d")
    assert [load_config(e.run / runs.CONFIG, FAMILIES).data.path for e in made.elements] == ["/a,b", "/c:d"]


@pytest.mark.parametrize(
    ("words", "overrides", "expected"),
    [
        ("optimizer.lt=1,2", [], ["optimizer.lt", "Nearest: optimizer.lr"]),
        ("seed=0,1 optimizer.lr=0.1,-1", [], ["optimizer.lr=-1", "expected 0"]),
        ("seed=0,1 precision=fp32,fp8", [], ["precision=fp8", "auto, fp32, fp16, bf16"]),
        ("optimizer.lr=1,1.0", [], ["optimizer.lr=1", "optimizer.lr=1.0", "the same run"]),
        ("seed=0,1", ["seed=3"], ["seed=3", "also varies"]),
        ("seed=0,1", ["optimizer.lt=3"], ["optimizer.lt", "Nearest: optimizer.lr"]),
    ],
)
def test_one_wrong_combination_leaves_nothing_behind(words, overrides, expected, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        make_sweep(tmp_path, words, *overrides)
    for part in expected:
        assert part in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_if_one_run_cannot_be_created_none_is(tmp_path: Path):
    taken = tmp_path / "runs/stripes/s-002"
    taken.mkdir(parents=True)
    (taken / "config.yaml").write_text("of another run\n")
    with pytest.raises(UserError, match="there is a run of this name"):
        make_sweep(tmp_path, "seed=0,1,2,3")
    assert list_files(tmp_path) == [taken / "config.yaml"]
    assert not (tmp_path / "runs/sweeps/s").exists()


def test_a_name_is_used_once_and_sweeps_of_the_same_second_get_different_names(tmp_path: Path):
    make_sweep(tmp_path, "seed=0,1")
    with pytest.raises(UserError, match="trainyard sweep --continue s"):
        make_sweep(tmp_path, "seed=0,1")
    with pytest.raises(UserError, match="cannot name a sweep"):
        make_sweep(tmp_path, "seed=0,1", name="../s")
    first, second = (make_sweep(tmp_path, "seed=0", name=None) for _ in range(2))
    assert first.folder != second.folder and first.elements[0].run != second.elements[0].run


def test_a_sweep_is_found_by_name_prefix_or_path_and_loads_as_it_was_created(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,3e-3 seed=0,1", "max_duration=1ep", name="first-try")
    make_sweep(tmp_path, "seed=0,1", name="fine")
    for text in ("first-try", "fir", str(made.folder)):
        assert sweep_file.load(text, tmp_path / "runs") == made
    with pytest.raises(UserError, match="2 sweeps begin with 'fi'"):
        sweep_file.load("fi", tmp_path / "runs")
    with pytest.raises(UserError, match="Nearest: first-try"):
        sweep_file.load("frist-try", tmp_path / "runs")
    with pytest.raises(UserError, match="There are none"):
        sweep_file.load("x", tmp_path / "elsewhere")


def test_a_sweep_can_be_moved_with_its_folder_of_runs(tmp_path: Path):
    make_sweep(tmp_path, "seed=0,1")
    (tmp_path / "runs").rename(tmp_path / "archive")
    assert [e.run.is_dir() for e in sweep_file.load("s", tmp_path / "archive").elements] == [True, True]


def test_a_damaged_sweep_file_is_named(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=0,1")
    (made.folder / "sweep.json").write_text('{"job": "stripes"}')
    with pytest.raises(UserError, match=r"sweep\.json: expected the record of a sweep"):
        sweep_file.load("s", tmp_path / "runs")


def test_runs_that_a_killed_sweep_did_not_create_are_missing(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=0,1,2")
    shutil.rmtree(made.elements[1].run)
    assert sweep_file.list_missing(sweep_file.load("s", tmp_path / "runs")) == [made.elements[1]]


@pytest.mark.slow
def test_runs_that_are_neither_done_nor_active_are_submitted_again(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=range(0,8)")
    names = ["done", "waiting", "running", "silent", "failed", "lost", "stopped", "new"]
    unfinished = sweep_file.list_unfinished(made, {e.run: s for e, s in zip(made.elements, names, strict=True)})
    assert [e.index for e in unfinished] == [4, 5, 6, 7]


# Results


def test_a_mean_has_a_student_interval_and_a_single_value_has_none():
    mean = results.estimate_mean([1.0, 2.0, 4.0])
    assert (mean.n, mean.value) == (3, pytest.approx(7 / 3))
    assert mean.half_width == pytest.approx(4.302653 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-6)
    assert results.estimate_mean([5.0]) == results.Mean(1, 5.0, None)


def test_the_best_is_chosen_on_validation_and_its_test_value_is_shown_alongside(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,1e-4 seed=0,1")
    for element, (val, test) in zip(
        made.elements, [([0.6, 0.9], 0.5), ([0.7, 0.3], 0.6), ([0.5], 0.9), ([0.6], 0.8)], strict=True
    ):
        record_run(element.run, val, test)
    found = results.collect(made, make_states(made))
    assert (found.metric, found.mode, list(found.splits)) == ("accuracy", "max", ["val", "test"])
    high, low = found.rows
    assert high.means["val"].value == pytest.approx(0.8)  # the best of each run, not the last
    assert high.means["test"].value == pytest.approx(0.55)
    assert low.means["test"].value == pytest.approx(0.85)
    assert found.best is high
    text = results.format_results(found)
    assert "* highest on val" in text and "val: at the best validation by accuracy" in text
    marked = [line for line in text.splitlines() if line.startswith("* ")]
    assert len(marked) == 1 and "0.01" in marked[0] and "2 of 2" in marked[0]
    assert f"trainyard export {made.elements[0].run} stripes.safetensors" in text


def test_a_metric_to_minimize_is_best_where_it_is_lowest(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,1e-4")
    for element, val in zip(made.elements, (0.3, 0.6), strict=True):
        record_run(element.run, [val], monitor={"split": "val", "metric": "loss", "mode": "min"})
    found = results.collect(made, make_states(made))
    assert found.best is found.rows[1] and found.best.means["val"].value == pytest.approx(0.4)
    assert "+-" not in results.format_results(found).split("seeds (Student's t)")[1]  # one seed: no interval


def test_a_failed_run_is_listed_with_its_why_command_and_is_in_no_mean(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,1e-4 seed=0,1,2")
    for element in made.elements[:4]:
        record_run(element.run, [0.5 + element.index / 10])
    record_run(made.elements[4].run, [0.99])  # half-way, and better than all
    found = results.collect(made, make_states(made, e4="failed", e5="waiting"))
    assert [row.counted for row in found.rows] == [3, 1]
    assert found.rows[1].means["val"] == results.Mean(1, pytest.approx(0.8), None)
    text = results.format_results(found)
    assert "4 done, 1 failed, 1 waiting" in text and "1 of 3" in text
    assert f"trainyard why {made.elements[4].run}" in text and f"trainyard status {made.elements[5].run}" in text
    assert "trainyard sweep --continue s" in text


def test_a_finished_run_with_a_nan_metric_is_reported_and_is_in_no_mean(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=0,1")
    record_run(made.elements[0].run, [0.5], 0.5)
    record_run(made.elements[1].run, [0.5], math.nan)
    found = results.collect(made, make_states(made))
    assert found.rows[0].counted == 1
    text = results.format_results(found)
    assert "accuracy on test is not a finite number" in text and f"trainyard report {made.elements[1].run}" in text


def test_another_metric_can_be_requested_and_a_wrong_one_names_the_nearest(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-2,1e-4")
    for element in made.elements:
        record_run(element.run, [0.2, 0.9, 0.4], 0.5)
    found = results.collect(made, make_states(made), metric="loss")
    assert found.rows[0].means["val"].value == pytest.approx(0.1)  # where accuracy was best
    assert found.best is None and "No best is marked" in results.format_results(found)
    with pytest.raises(UserError, match="Nearest: accuracy"):
        results.collect(made, make_states(made), metric="acuracy")


def test_a_sweep_that_has_not_begun_says_so(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=0,1")
    found = results.collect(made, make_states(made, e0="waiting", e1="new"))
    assert "No run has begun to train" in results.format_results(found)
    assert results.write(found).is_file()


def test_hours_count_every_rank_of_every_attempt_including_repeated_steps(tmp_path: Path):
    made = make_sweep(tmp_path, "seed=0,1")
    run, other = (element.run for element in made.elements)

    def make_event(name: str, step: int, elapsed_s: float, **fields: object) -> str:
        return json.dumps({"kind": "event", "event": name, "step": step, "elapsed_s": elapsed_s, **fields}) + "\n"

    begin = {"monitor": MONITOR, "device": "cuda"}
    (run / "events.jsonl").write_text(
        make_event("start", 0, 0.0, world_size=8, **begin)
        + make_event("checkpoint", 10, 3600.0)
        + make_event("stop", 20, 7200.0)  # the resume goes back to step 10
        + make_event("resume", 10, 3600.0, world_size=4, **begin)
        + make_event("checkpoint", 20, 5400.0)
    )
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 30, "elapsed_s": 7200.0}\n')
    (other / "events.jsonl").write_text(
        make_event("start", 0, 0.0, world_size=2, monitor=MONITOR, device="cpu") + make_event("stop", 5, 1800.0)
    )
    found = results.collect(made, make_states(made, e0="running", e1="stopped"))
    assert found.outcomes[0].gpu_hours == pytest.approx(8 * 2 + 4 * 1) and found.outcomes[0].cpu_rank_hours == 0
    assert (found.outcomes[1].gpu_hours, found.outcomes[1].cpu_rank_hours) == (0, pytest.approx(1))
    assert "GPU-hours" in results.format_results(found) and "CPU rank-hours" in results.format_results(found)


@pytest.mark.slow
def test_the_csv_has_every_run_and_the_page_needs_no_other_file(tmp_path: Path):
    made = make_sweep(tmp_path, "optimizer.lr=1e-4,1e-3,1e-2 augment.zoom=0,0.1 compile=on,off seed=0,1")
    for element in made.elements[:-1]:
        record_run(element.run, [0.5 + element.index / 100], 0.6)
    page = results.write(results.collect(made, make_states(made, e23="lost")))
    with (made.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == list(range(24))
    assert rows[3] | {"state": "done", "optimizer.lr": "0.0001", "compile": "off", "seed": "1"} == rows[3]
    assert float(rows[3]["val/accuracy"]) == pytest.approx(0.53) and float(rows[3]["test/loss"]) == pytest.approx(0.4)
    assert rows[23]["state"] == "lost" and rows[23]["val/accuracy"] == ""
    assert sorted(path.name for path in (made.folder / "plots").iterdir()) == ["augment.zoom.png", "optimizer.lr.png"]
    sources = ImageSources(page).sources
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert f"trainyard why {made.elements[23].run}" in page.read_text()


def test_a_swept_text_that_is_a_formula_is_text_in_the_csv(tmp_path: Path):
    made = make_sweep(tmp_path, "augment.crop_keeps=-a1,plain")
    (row, _) = results.write(results.collect(made, make_states(made))).with_name("results.csv").read_text().split()[1:]
    assert ",'-a1," in row
    assert [row["augment.crop_keeps"] for row in read_table(made.folder / "results.csv")] == ["-a1", "plain"]


def test_an_axis_is_logarithmic_where_its_values_span_more_than_a_decade():
    from matplotlib.figure import Figure

    for values, scale in ((["0.001", "0.02"], "log"), (["1", "10"], "linear"), (["0", "100"], "linear")):
        axes = Figure().add_subplot()
        results._set_ticks(axes, values)
        assert axes.get_xscale() == scale
        assert [label.get_text() for label in axes.get_xticklabels()] == values


@pytest.mark.slow
def test_runs_of_a_sweep_train_like_any_other_and_their_results_are_collected(tmp_path: Path):
    from trainyard.config.compose import compose

    data = prepare_data(compose("stripes", [f"data.cache={tmp_path / 'cache'}"], FAMILIES), FAMILIES).data.path
    made = make_sweep(
        tmp_path, "optimizer.lr=1e-2,1e-5 seed=0,1", f"data.path={data}", "max_duration=3ep", "eval_every=1ep"
    )
    assert [train(element.run) for element in made.elements] == [0, 0, 0, 0]
    found = results.collect(made, make_states(made))
    assert found.best is found.rows[0]  # at 1e-5 the network has not moved
    assert [row.counted for row in found.rows] == [2, 2]
    assert all(outcome.cpu_rank_hours > 0 for outcome in found.outcomes)
    assert "open" in results.format_results(found) and results.write(found).is_file()


# Hydra's own multirun


def run_multirun(
    folder: Path, *words: str, jobs: Path = FAMILIES, dry: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Hydra's multirun in a separate process, as the command line does: Hydra sets up logging and exits itself."""
    work = partial(_run_multirun_in_this_process, jobs, ("max_duration=1ep", *words), dry)
    return run_as_command(work, folder)


def _run_multirun_in_this_process(jobs: Path, words: Sequence[str], dry: bool) -> int:
    os.environ.pop("PYTHONPATH", None)
    return multirun.run_multirun("stripes", words, jobs_dir=jobs, runs_dir=Path("runs"), environ=os.environ, dry=dry)


class PrintReturnValue(Callback):
    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        print("returned", job_return.return_value)


def read_events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_hydras_own_multirun_trains_each_combination_as_a_run(tmp_path: Path):
    keep = "+hydra.callbacks.keep._target_=tests.test_sweep.PrintReturnValue"
    done = run_multirun(tmp_path, "optimizer.lr=1e-2,1e-3", keep)
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "runs/stripes").iterdir())
    assert [run.name[-4:] for run in made] == ["-000", "-001"]
    assert [load_config(run / runs.CONFIG, FAMILIES).optimizer.lr for run in made] == [1e-2, 1e-3]
    assert [read_events(run)[-1] for run in made] == ["done", "done"]
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "data"}
    best = [max(line["accuracy"] for line in read_metrics(run) if line.get("split") == "val") for run in made]
    assert re.findall("returned (.*)", done.stdout) == [str(value) for value in best], "for sweepers that search"


@pytest.mark.slow
def test_the_submitit_plugin_trains_in_separate_processes_and_a_failure_sets_the_exit_code(tmp_path: Path):
    done = run_multirun(tmp_path, "hydra/launcher=submitit_local", "model.poison_step=-1,12")
    assert done.returncode == 1
    assert "NotFinite" in done.stderr and "trainyard why" in done.stderr
    good, bad = sorted((tmp_path / "runs/stripes").iterdir())
    assert read_events(good)[-1] == "done" and read_events(bad)[-1] != "done"


@pytest.mark.slow
def test_what_hydra_refuses_is_reported_and_nothing_is_trained(tmp_path: Path):
    done = run_multirun(tmp_path, "optimizer.lrr=1,2")
    assert done.returncode == 1 and "optimizer.lrr" in done.stderr
    assert not (tmp_path / "runs/stripes").exists()


@pytest.mark.slow
def test_a_training_that_stopped_half_way_is_not_a_success_for_hydra(tmp_path: Path):
    done = run_multirun(tmp_path, "max_runtime=0min")
    assert done.returncode == 1 and "ended with code 86" in done.stderr
    (run,) = (tmp_path / "runs/stripes").iterdir()
    assert f"trainyard resume {run}" in done.stderr


@pytest.mark.slow
def test_a_dry_multirun_prints_each_combination_and_starts_and_writes_nothing(tmp_path: Path):
    done = run_multirun(tmp_path / "here", "seed=0,1", "hydra/launcher=submitit_local", dry=True)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert printed == [f"stripes max_duration=1ep seed={seed}" for seed in (0, 1)]
    assert list((tmp_path / "here").iterdir()) == []
