"""The end of a run: averaged weights, the job's figures, and a table of predictions."""

import base64
import csv
import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.training import (
    FAMILIES,
    find_differences,
    load_state,
    new_run,
    read_run_metrics,
    start,
    train,
    train_on_ranks,
)
from trainyard.cli import main
from trainyard.config import compose as configs
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.report.headline import find_headline
from trainyard.report.run_page import write_report
from trainyard.report.run_story import RunStory
from trainyard.runs.events import read_events
from trainyard.tables import read_table
from trainyard.train import checkpoint
from trainyard.train.meters import Interval
from trainyard.train.module import DataInfo
from trainyard.train.swa import WeightAverage

JOBS = Path(__file__).parents[1] / "jobs"
SWA = [
    "swa=true",
    "ema_decay=0",
    "eval_every=1ep",
    "max_duration=4ep",
    "checkpoint.keep_last=99",
    "checkpoint.every=1st",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    run = new_run(tmp_path_factory.mktemp("done"), "max_duration=6ep")
    assert train(run) == 0
    return run


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    run = new_run(tmp_path_factory.mktemp("swa"), *SWA)
    assert train(run) == 0
    return run


def build_module(run: Path) -> tuple[torch.nn.Module, ShardSet, TrainConfig]:
    config = configs.load_config(run / "config.yaml", FAMILIES)
    data = ShardSet(Path(config.data.path))
    info = DataInfo.from_shards(data, np.arange(data.count))
    return load_family(FAMILIES, "stripes", "module").build(config, info), data, config


def list_best_steps(run: Path) -> list[int]:
    """Return the steps at which validation was better than before."""
    found, best = [], -1.0
    for line in read_run_metrics(run):
        if line["kind"] == "eval" and line["split"] == "val" and line["accuracy"] > best:
            best = line["accuracy"]
            found.append(line["step"])
    return found


@pytest.mark.slow
def test_the_average_is_the_mean_of_the_weights_at_each_new_best(averaged):
    steps = list_best_steps(averaged)
    assert len(steps) > 1
    saved = {e.step: checkpoint.load(e.path) for e in checkpoint.list_checkpoints(averaged / "checkpoints")}
    last = saved[max(saved)]
    assert last["swa"]["count"] == len(steps) and last["swa"]["refreshed"]
    for name in ("head.weight", "layers.0.0.weight"):
        mean = torch.stack([saved[step]["model"][name].double() for step in steps]).mean(0)
        torch.testing.assert_close(last["swa"]["module"][name].double(), mean, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_batch_statistics_of_the_average_are_those_of_its_weights_over_the_training_samples(averaged):
    module, data, config = build_module(averaged)
    swa = load_state(averaged)
    module.load_state_dict(
        checkpoint.load(checkpoint.list_checkpoints(averaged / "checkpoints")[0].path)["swa"]["module"]
    )
    ids = np.arange(data.count)
    ids = ids[ids % 5 > 1]
    loader = Loader(config, data, device=torch.device("cpu"), decode="cpu")
    (micro,) = loader.evaluate(ids, batch_size=64)
    first = module.layers[0]
    features = first[0](micro.batch["image"])
    torch.testing.assert_close(swa["swa/module/layers.0.1.running_mean"], features.mean((0, 2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(swa["swa/module/layers.0.1.running_var"], features.var((0, 2, 3)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(swa["model/layers.0.1.running_mean"], features.mean((0, 2, 3)), atol=1e-3)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_average(averaged, tmp_path):
    run = new_run(tmp_path, *SWA)
    for lines in (9, 17):
        process = start(run)
        while process.is_alive() and len(read_metric_lines(run)) < lines:
            process.join(0.002)
        process.kill()
        process.join()
    assert train(run) == 0
    assert find_differences(load_state(averaged), load_state(run)) == []
    assert read_run_metrics(averaged) == read_run_metrics(run)


def read_metric_lines(run: Path) -> list[bytes]:
    path = run / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.slow
def test_ranks_agree_on_the_average(tmp_path):
    run = new_run(tmp_path, *SWA)
    assert train_on_ranks(run, 2, rendezvous="swa") == [0, 0]
    assert load_state(run)["swa/refreshed"]
    assert torch.isfinite(load_state(run)["swa/module/layers.1.1.running_var"]).all()


@pytest.mark.slow
def test_the_average_is_what_is_exported_and_tested(averaged, tmp_path):
    assert main(["export", str(averaged), str(tmp_path / "w.safetensors"), "--jobs", str(FAMILIES)]) == 0
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata()["weights"] == "swa" and "d0 d1 d2 d3" in file.metadata()["artifacts"]
        assert torch.equal(file.get_tensor("head.weight"), load_state(averaged)["swa/module/head.weight"])


@pytest.mark.slow
def test_a_network_without_batch_statistics_is_averaged_too(tmp_path):
    run = new_run(tmp_path, *SWA, "model.batch_norm=false")
    assert train(run) == 0 and load_state(run)["swa/refreshed"]


def test_the_average_gives_all_snapshots_equal_weight():
    one = torch.nn.Linear(2, 2)
    average = WeightAverage(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    values = [3.0, 5.0, 13.0]
    for value in values:
        torch.nn.init.constant_(one.weight, value)
        average.add(one)  # type: ignore[arg-type]
    assert average.module.weight.tolist() == [[7.0, 7.0]] * 2 and not average.refreshed


@pytest.mark.slow
def test_the_jobs_figures_of_its_test_set_are_in_the_report(done):
    (image,) = (done / "figures").iterdir()
    assert image.name == "test - Confusion, true_chosen.png" and image.read_bytes().startswith(b"\x89PNG")
    assert 'alt="test - Confusion, true_chosen"' in write_report(done).read_text()


@pytest.mark.slow
def test_samples_are_shown_only_if_asked_for_and_change_nothing_that_is_trained_or_scored(done, tmp_path):
    """By default no page has an image, a name or a path of a sample: families declare that theirs may be seen."""
    shown = new_run(tmp_path, "max_duration=6ep", "report.samples=on")
    assert train(shown) == 0
    assert find_differences(load_state(done), load_state(shown)) == []
    assert read_run_metrics(done) == read_run_metrics(shown)
    names = [[path.name for path in (run / "figures").iterdir()] for run in (done, shown)]
    assert names[0] == names[1] == ["test - Confusion, true_chosen.png"] and not (done / "samples").exists()
    _, data, _ = build_module(done)
    (png,) = (shown / "samples").iterdir()
    assert png.name.startswith("test - sample ")
    pages = [write_report(run).read_text() for run in (done, shown)]
    hidden = [*data.read_keys(np.arange(data.count)), png.stem, base64.b64encode(png.read_bytes()).decode()]
    assert len(hidden) > 20 and not [text for text in hidden if text in pages[0]]
    assert png.stem in pages[1] and hidden[-1] in pages[1]
    shutil.rmtree(shown / "samples")
    assert f"rm -r {shown / 'samples'} &amp;&amp; trainyard report {shown}" in pages[1]
    page = write_report(shown).read_text()
    assert png.stem not in page and hidden[-1] not in page


@pytest.mark.slow
def test_a_score_before_training_changes_nothing_that_is_trained(done, tmp_path):
    scored = new_run(tmp_path, "max_duration=6ep", "eval_on_start=true")
    assert train(scored) == 0
    assert find_differences(load_state(done), load_state(scored)) == []
    lines = [line for line in read_run_metrics(scored) if line["step"] > 0]
    first = [(line["kind"], line["split"]) for line in read_run_metrics(scored) if line["step"] == 0]
    assert lines == read_run_metrics(done) and first == [("eval", "val"), ("eval", "test")]
    assert "the model before training" in write_report(scored).read_text()


@pytest.mark.slow
def test_without_a_test_set_the_figures_are_of_validation(tmp_path, monkeypatch):
    pack = load_family(FAMILIES, "stripes", "pack")
    splits = pack.splits
    monkeypatch.setattr(pack, "splits", lambda *a: {k: v for k, v in splits(*a).items() if k != "test"})
    run = new_run(tmp_path, "max_duration=1ep")
    assert train(run) == 0
    assert [path.name for path in (run / "figures").iterdir()] == ["val - Confusion, true_chosen.png"]


@pytest.fixture
def unlabelled_images(done, tmp_path) -> Path:
    """Images without a label in their names, and in another order."""
    raw = tmp_path / "unknown"
    raw.mkdir()
    (synthetic,) = (done.parents[2] / "cache").glob("stripes-synthetic-*")
    for i, path in enumerate(sorted(synthetic.iterdir(), reverse=True)):
        (raw / f"{i:04d}.png").write_bytes(path.read_bytes())
    return raw


@pytest.mark.slow
def test_predictions_name_every_image_once_without_the_packed_data(done, unlabelled_images, tmp_path, capsys):
    config = configs.load_config(done / "config.yaml", FAMILIES)
    hidden = Path(config.data.path).rename(tmp_path / "hidden")
    try:
        assert (
            main(["predict", str(done), str(unlabelled_images), str(tmp_path / "out.csv"), "--jobs", str(FAMILIES)])
            == 0
        )
    finally:
        hidden.rename(config.data.path)
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["image"] for line in lines] == [f"{i:04d}.png" for i in range(100)]
    truth = sorted((f"d{i % 4}-{i:04d}" for i in range(100)), reverse=True)
    assert np.mean([line["direction"] == t[:2] for line, t in zip(lines, truth, strict=True)]) > 0.6, "chance: 0.25"
    assert "100 predictions are in" in capsys.readouterr().out
    assert not list(tmp_path.glob(".predict-*"))


@pytest.mark.slow
def test_a_file_name_that_is_a_formula_is_text_in_the_table(done, unlabelled_images, tmp_path):
    (unlabelled_images / "0000.png").rename(unlabelled_images / "=1+1.png")
    out = tmp_path / "out.csv"
    assert main(["predict", str(done), str(unlabelled_images), str(out), "--jobs", str(FAMILIES)]) == 0
    with out.open(newline="") as file:
        assert "'=1+1.png" in [line["image"] for line in csv.DictReader(file)]
    assert "=1+1.png" in [row["image"] for row in read_table(out)]


@pytest.mark.slow
def test_one_file_is_predicted_and_files_that_are_not_read_are_counted_by_ending(
    done, unlabelled_images, tmp_path, capsys
):
    out, typed = tmp_path / "out.json", ["predict", str(done)]
    assert main([*typed, str(unlabelled_images / "0003.png"), str(out), "--jobs", str(FAMILIES)]) == 0
    assert [row["image"] for row in json.loads(out.read_text())] == ["0003.png"]
    (unlabelled_images / "a.heic").touch()
    (unlabelled_images / "notes.txt").touch()
    assert main([*typed, str(unlabelled_images), str(tmp_path / "all.csv"), "--jobs", str(FAMILIES)]) == 0
    said = capsys.readouterr().err
    assert f"{unlabelled_images}: not read: 1 .heic (a.heic)\n" in said
    assert "not read, because they hold no samples: 1 .txt (notes.txt)\n" in said


@pytest.mark.slow
def test_a_folder_without_a_file_to_predict_and_another_ending_are_one_sentence(done, tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.heic").touch()
    typed = ["predict", str(done), str(tmp_path / "raw")]
    assert main([*typed, str(tmp_path / "out.csv"), "--jobs", str(FAMILIES)]) == 2
    assert "raw: contains no sample that stripes knows. " in (said := capsys.readouterr().err)
    assert "Found: 1 .heic (a.heic)." in said
    assert main([*typed, str(tmp_path / "out.xlsx"), "--jobs", str(FAMILIES)]) == 2
    assert "out.xlsx: its ending names no kind of table. Expected .csv" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", ["exists", "no raw", "no checkpoint", "no such family part", "other code"])
def test_predictions_that_cannot_be_made_say_why(done, unlabelled_images, tmp_path, capsys, case, monkeypatch):
    run, out, message = done, tmp_path / "out.csv", ""
    if case == "exists":
        out.write_text("mine")
        message = "out.csv: exists already"
    elif case == "no raw":
        unlabelled_images, message = tmp_path / "nothing", "nothing: no such file or folder"
    elif case == "no checkpoint":
        run, message = new_run(tmp_path), "is a run without checkpoints"
    elif case == "other code":
        module = load_family(FAMILIES, "stripes", "module")
        monkeypatch.setattr(module, "build", lambda config, data: module.StripesModule(config, ["d0", "d1"]))
        message = "do not fit the model that the code at hand builds. Use the code it was trained"
    else:
        monkeypatch.delattr(load_family(FAMILIES, "stripes", "pack"), "unlabelled")
        message = "stripes has no predictions for a table"
    assert main(["predict", str(run), str(unlabelled_images), str(out), "--jobs", str(FAMILIES)]) == 2
    assert message in capsys.readouterr().err
    assert case == "exists" or not out.exists()


@pytest.mark.slow
def test_an_image_that_cannot_be_read_leaves_no_table(done, unlabelled_images, tmp_path, capsys):
    (unlabelled_images / "0003.png").write_bytes(b"no image")
    assert main(["predict", str(done), str(unlabelled_images), str(tmp_path / "out.csv"), "--jobs", str(FAMILIES)]) == 2
    assert "0003.png" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv*")) and not list(tmp_path.glob(".predict-*"))


def test_learning_rates_follow_the_schedule_times_each_groups_factor():
    from trainyard.train.module import TrainModule
    from trainyard.train.step import TrainState, train_step

    class Scale(torch.nn.Linear, TrainModule):
        """A layer as a module of its own."""

    module = Scale(1, 1)
    groups = [{"params": [module.weight], "lr_scale": 0.1}, {"params": [module.bias]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, fused=True)
    state = TrainState(module, lambda batch: {"loss": module(batch["x"]).sum()}, optimizer,
                       torch.amp.GradScaler("cpu", enabled=False), None, 0.0)  # type: ignore[arg-type]  # fmt: skip
    from trainyard.data.loader import MicroBatch

    before = [p.item() for p in module.parameters()]
    micro = MicroBatch({"x": torch.ones(1, 1)}, 1.0, True, 0.0)
    train_step(state, [micro], lr=0.5, world_size=1, seed=0, clip_grad_norm=0, autocast=nullcontext)
    moved = [b - p.item() for b, p in zip(before, module.parameters(), strict=True)]
    assert moved == pytest.approx([0.05, 0.5])


def test_an_interval_of_time_is_reported_once_until_it_restarts():
    """The ranks act a step late: if it were also reported at the step between, it would be done twice."""
    interval = Interval("0.0005min", steps_per_epoch=10)
    for _ in range(2):
        assert not interval.has_elapsed()
        time.sleep(0.04)
        assert interval.has_elapsed() and not interval.has_elapsed()
        interval.restart()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options"),
    [("antispoof_smoke", ["swa=false"]), ("pricing_smoke", []), ("twins_smoke", [])],
)
def test_methods_without_a_network_are_scored_on_the_first_test_set(preset, options, tmp_path):
    """Of samples that are not augmented: antispoof reads numbers for its augmentation that evaluation has not."""
    options = [*options, "score_baselines=true", "max_duration=2st", "eval_every=2st"]
    run = new_run(tmp_path, *options, job=preset, jobs=JOBS)
    assert train(run, jobs=JOBS) == 0
    (event,) = (event for event in read_events(run) if event["event"] == "baselines")
    monitor = next(event["monitor"] for event in read_events(run) if event["event"] == "start")
    assert event["split"] == "test" and event["seconds"] > 0
    assert all(metrics[monitor["metric"]] >= 0 for metrics in event["scores"].values()) and event["scores"]
    assert any(name in find_headline(RunStory.read(run)).place for name in event["scores"])
