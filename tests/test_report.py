"""What a run records is exact and survives kills, and its report is one self-contained page."""

import errno
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import time
import tomllib
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from loguru import logger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainyard.config.frozen import write_frozen
from trainyard.errors import UserError
from trainyard.report import run_page as report
from trainyard.report.headline import NO_BASELINE, Baseline, find_headline, judge_metric
from trainyard.report.metric_values import format_alike
from trainyard.report.run_story import RunStory
from trainyard.report.score_figures import decode_image, draw_embedding_map, draw_samples, draw_text_table
from trainyard.runs.events import TIMING_KEYS, list_metric_names, read_events, read_metrics, select_metrics
from trainyard.runs.folder import write_env
from trainyard.text import format_duration
from trainyard.train import console
from trainyard.train.recorder import Recorder, write_report_figures

STEPS, EVERY = 400, 10
CONFIG = "job: demo\nseed: 0\noptimizer:\n  lr: 0.001\n"
MONITOR = {"split": "val", "metric": "eer", "mode": "min"}
ENV = {
    "created": "2026-08-01T10:15:00+00:00",
    "versions": {"python": "3.11.2", "torch": "2.13.0", "h5py": "3.12.1"},
    "hardware": {"host": "node7", "cores": 8, "gpus": ["NVIDIA RTX A5000"]},
    "git": {"commit": "1a2b3c4", "dirty": False},
    "data": {"path": "data/demo", "samples": 2400},
    "choices": {
        "precision": {"value": "bf16", "reason": "sm_86 runs bf16 at full speed, and it needs no loss scaling"},
        "compile": {"value": "off", "reason": "its start-up cost has not been measured on this card"},
    },
}


def new_run(folder: Path, *, config: str = CONFIG, env: dict | None = None) -> Path:
    run = folder / "demo" / "20260801-101500-1a2b3c4"
    run.mkdir(parents=True)
    write_frozen(yaml.safe_load(config), run / "config.yaml")
    if env is not None:
        write_env(run, env)
    return run


def open_recorder(run: Path, *, resume_at: int | None = None, trackers: tuple[str, ...] = ()) -> Recorder:
    return Recorder(run, trackers=trackers, config={"job": "demo", "optimizer": {"lr": 1e-3}}, resume_at=resume_at)


def make_train_values(step: int) -> dict[str, Any]:
    noise = np.random.default_rng(step)
    data_ms, compute_ms = 3 + noise.exponential(2), 60 + noise.normal(0, 2)
    loss = 4 * math.exp(-step / 120) + 0.2 + 0.05 * noise.normal()
    return {
        "epoch": step / 20,
        "samples_seen": step * 120,
        "loss": loss,
        "step_losses": [loss],
        "centre_loss": 0.4 * math.exp(-step / 200) + 0.02 * noise.random(),
        "lr": 1e-3 * (1 + math.cos(math.pi * step / STEPS)) / 2,
        "grad_norm": 1 + noise.gamma(2.0, 0.3),
        "samples_per_s": 120_000 / (data_ms + compute_ms),
        "step_ms": data_ms + compute_ms,
        "data_wait_ms": data_ms,
        "idle_ms": data_ms,
        "compute_ms": compute_ms,
        "memory_gib": 11.2,
    }


def make_eval_values(step: int, split: str) -> dict[str, object]:
    eer = 0.02 + 0.3 * math.exp(-step / 90) + (0.01 if split == "test" else 0)
    return {
        "epoch": step / 20,
        "split": split,
        "eer": eer,
        "eer_low": eer * 0.85,
        "eer_high": eer * 1.2,
        "tar_at_far_1e-3": 1 - 2 * eer,
        "seconds": 1.5,
    }


def write_training(log: Recorder, first: int, last: int, *, positions: dict[int, int] | None = None) -> None:
    """Write what training steps first + 1 .. last would write, with a checkpoint every 100."""
    for step in range(first + EVERY, last + 1, EVERY):
        log.log("train", step, make_train_values(step))
        if step % 40 == 0:
            for split in ("val", "test"):
                log.log("eval", step, make_eval_values(step, split))
        if step % 100 == 0:
            position = log.sync()
            log.log("event", step, {"event": "checkpoint", "seconds": 0.4, "bytes": 52_000_000})
            if positions is not None:
                positions[step] = position


def log_start(log: Recorder, event: str, step: int) -> None:
    values = {"total_steps": STEPS, "host": "node7", "device": "A5000", "world_size": 2, "monitor": MONITOR}
    spent = {"preparing": 5.0}
    log.log("event", step, {"event": event, "attempt": f"local-{step}", "spent": spent, **values})


def make_finished_run(folder: Path, **files) -> Path:
    """Make a run that was killed at step 260 and resumed from step 200."""
    run, positions = new_run(folder, **files), {}
    first = open_recorder(run)
    log_start(first, "start", 0)
    write_training(first, 0, 260, positions=positions)
    Recorder.rewind(run, positions[200], step=200)
    with closing(open_recorder(run, resume_at=200)) as log:
        log_start(log, "resume", 200)
        write_training(log, 200, STEPS)
        spent = {"preparing": 5.0, "training": 30.0, "input": 3.0, "evaluating": 2.0}
        log.log("event", STEPS, {"event": "done", "reason": "none", "spent": spent})
    return run


class Page(HTMLParser):
    """Parses a page into tags with their attributes, and the text outside of tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


# --- Recording ----------------------------------------------------------------------------------------------


def test_what_was_logged_is_read_back_in_order_and_events_are_separate(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log_start(log, "start", 0)
        log.log("train", 10, {"loss": np.float32(0.5), "samples_seen": np.int64(1200)})
        log.log("eval", 10, {"split": "val", "eer": 0.25})
    first, second = read_metrics(run)
    assert (first["kind"], first["step"], first["loss"], first["samples_seen"]) == ("train", 10, 0.5, 1200)
    assert (second["kind"], second["split"], second["eer"]) == ("eval", "val", 0.25)
    assert 0 <= first["elapsed_s"] <= second["elapsed_s"] < 60
    assert [e["event"] for e in read_events(run)] == ["start"]


def test_a_number_that_json_cannot_hold_comes_back_and_the_file_is_valid_json(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run, trackers=("tensorboard",))) as log:
        log.log("train", 10, {"loss": math.nan, "grad_norm": math.inf, "other": np.float32(-math.inf), "lr": 0.1})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((run / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None and line["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "other": "-inf"}
    (read,) = read_metrics(run)
    assert math.isnan(read["loss"]) and read["grad_norm"] == math.inf and read["other"] == -math.inf
    assert read["lr"] == 0.1 and "nonfinite" not in read


def test_a_nested_number_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log, pytest.raises(ValueError, match="JSON compliant"):
        log.log("event", 10, {"event": "skipped_step", "scales": [1.0, math.inf]})
    assert read_events(run) == []


def test_a_killed_and_resumed_run_has_the_metrics_of_an_uninterrupted_one(tmp_path):
    whole = new_run(tmp_path / "whole")
    with closing(open_recorder(whole)) as log:
        write_training(log, 0, STEPS)
    resumed = make_finished_run(tmp_path / "resumed")

    def read_untimed(run):
        return [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in read_metrics(run)]

    assert read_untimed(resumed) == read_untimed(whole)
    assert len(read_untimed(whole)) == 60
    events = [e["event"] for e in read_events(resumed)]
    assert events == ["start", "checkpoint", "checkpoint", "resume", "checkpoint", "checkpoint", "done"]


def test_elapsed_time_continues_after_a_resume_without_the_time_that_was_lost(tmp_path):
    run = new_run(tmp_path)
    line = {"kind": "train", "step": 100, "elapsed_s": 50.0}
    lost = {"kind": "event", "event": "checkpoint", "step": 180, "elapsed_s": 90.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "events.jsonl").write_text(json.dumps(lost) + "\n")
    with closing(open_recorder(run, resume_at=100)) as log:
        log.log("train", 110, {"loss": 1.0})
    assert 50 <= read_metrics(run)[-1]["elapsed_s"] < 80


@pytest.mark.slow
def test_a_kill_in_a_rewind_leaves_the_old_file_or_the_new_one(tmp_path):
    child = """
import os, signal, sys
from pathlib import Path
from trainyard.train.recorder import Recorder, write_report_figures
left = int(sys.argv[2])
def counted(call):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper
os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
Recorder.rewind(Path(sys.argv[1]), int(sys.argv[3]), step=10)
"""
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("train", 10, {"loss": 1.0})
        offset = log.sync()
        log.log("train", 20, {"loss": 1.0})
    old = (run / "metrics.jsonl").read_bytes()
    contents = set()
    for calls in range(10):
        (run / "metrics.jsonl").write_bytes(old)
        ended = subprocess.run([sys.executable, "-c", child, str(run), str(calls), str(offset)], check=False)
        content = (run / "metrics.jsonl").read_bytes()
        assert content in (old, old[:offset])
        contents.add(content)
        if ended.returncode == 0:
            break
    assert ended.returncode == 0 and calls >= 2 and content == old[:offset] and len(contents) == 2


@pytest.mark.parametrize("offset", [5, 10_000])
def test_a_rewind_to_where_no_line_ends_keeps_the_lines_up_to_its_step_and_says_what_is_missing(tmp_path, offset):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("train", 10, {"loss": 1.0})
        end = log.sync()
        log.log("train", 30, {"loss": 1.0})
    before = (run / "metrics.jsonl").read_bytes()
    missing = Recorder.rewind(run, offset, step=20)
    assert missing.startswith(f"metrics.jsonl has {end} of {offset} bytes: lines after step 10 and up to step 20 are")
    assert (run / "metrics.jsonl").read_bytes() == before[:end]


def test_a_torn_last_line_is_skipped_and_does_not_spoil_the_next(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("train", 10, {"loss": 1.0})
        log.log("event", 10, {"event": "checkpoint"})
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"kind": "train", "st')
    assert [line["step"] for line in read_metrics(run)] == [10]
    with closing(open_recorder(run, resume_at=10)) as log:
        log.log("train", 20, {"loss": 1.0})
        log.log("event", 20, {"event": "done"})
    assert [line["step"] for line in read_metrics(run)] == [10, 20]
    assert [line["step"] for line in read_events(run)] == [10, 20]


@pytest.mark.parametrize("damage", [b'{"kind": "train", "st\n', b"[1]\n", b'{"kind": "train"}\n', b"\xff\x00\n"])
def test_a_damaged_line_that_is_not_a_torn_last_one_names_file_and_line(tmp_path, damage):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("train", 10, {"loss": 1.0})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: expected a JSON object"):
        read_metrics(run)


def test_a_new_run_does_not_write_into_another_runs_metrics(tmp_path):
    run = make_finished_run(tmp_path)
    with pytest.raises(UserError, match="expected no metrics in the folder of a new run, found 60 lines"):
        open_recorder(run)


def test_a_folder_that_is_not_a_run_is_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        for read in (read_metrics, report.write_report, report.format_summary):
            with pytest.raises(UserError, match=f"{re.escape(str(path))}: expected the folder of a run"):
                read(path)


def test_the_metrics_of_a_line_are_its_numbers_without_positions_and_timings():
    metrics = {"eer": 0.1, "eer_low": 0.05, "eer_high": 0.2, "lowest_low": 3}
    line = {"kind": "eval", "step": 1, "epoch": 2, "split": "val", **metrics, "seconds": 0.5, "elapsed_s": 9.0}
    assert select_metrics(line) == metrics
    assert list_metric_names(line) == ["eer", "lowest_low"]


# --- Trackers -----------------------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once_after_a_resume_with_what_jsonl_says(tmp_path):
    run, positions = new_run(tmp_path), {}
    first = open_recorder(run, trackers=("tensorboard",))
    write_training(first, 0, 200, positions=positions)
    first.log("eval", 200, {"split": "late", "eer": 0.5})  # after the checkpoint: the resumed run does it again
    write_training(first, 200, 260)
    first.close()
    Recorder.rewind(run, positions[200], step=200)
    with closing(open_recorder(run, trackers=("tensorboard",), resume_at=200)) as log:
        log.log("eval", 200, {"split": "late", "eer": 0.5})
        write_training(log, 200, STEPS)

    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    lines = read_metrics(run)
    for tag, kind, key in (
        ("train/loss", "train", "loss"),
        ("eval/val/eer", "eval", "eer"),
        ("eval/late/eer", "eval", "eer"),
    ):
        expected = [
            (line["step"], pytest.approx(line[key], rel=1e-6))  # event files hold float32
            for line in lines
            if line["kind"] == kind and (kind == "train" or line["split"] == tag.split("/")[1])
        ]
        assert [(event.step, event.value) for event in board.Scalars(tag)] == expected
    assert "timing/samples_per_s" in board.Tags()["scalars"]


@pytest.mark.slow
def test_tensorboard_has_all_up_to_the_checkpoint_when_the_process_is_killed_after_it(tmp_path):
    run = new_run(tmp_path)
    child = """
import os, signal, sys
from pathlib import Path
from trainyard.train.recorder import Recorder, write_report_figures
log = Recorder(Path(sys.argv[1]), trackers=["tensorboard"], config={}, resume_at=None)
for step in range(10, 510, 10):
    log.log("train", step, {"loss": 1.0})
log.sync()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", child, str(run)], check=False)
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(10, 510, 10))


def test_an_attempt_that_starts_from_scratch_leaves_nothing_of_the_previous_one(tmp_path):
    run = new_run(tmp_path)
    first = open_recorder(run, trackers=("tensorboard",))
    log_start(first, "start", 0)
    write_training(first, 0, 100)
    first.close()
    Recorder.rewind(run, 0, step=0)
    with closing(open_recorder(run, trackers=("tensorboard",))) as log:
        log_start(log, "start", 0)
        write_training(log, 0, 40)
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [10, 20, 30, 40]
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "train"] == [10, 20, 30, 40]
    assert "trained  40 of 400 steps" in report.format_summary(run)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_names_what_to_install_as_this_version_needs_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=f"trackers={name}: {name} is not installed.* -m pip install '(.*)', or"
    ) as caught:
        open_recorder(new_run(tmp_path), trackers=(name,))
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"install '{project['optional-dependencies'][name][0]}'" in str(caught.value)


def test_tensorboard_compares_runs_by_their_options_and_shows_their_figures(tmp_path):
    run = new_run(tmp_path)
    Image.new("RGB", (3, 2)).save(png := io.BytesIO(), "PNG")
    config = {"job": "demo", "optimizer": {"lr": 1e-3}, "trackers": ["tensorboard"], "swa": True}
    with closing(Recorder(run, trackers=("tensorboard",), config=config, resume_at=None, monitor="val/eer")) as log:
        write_training(log, 0, 10)
        write_report_figures(run, log, "test", 10, {"A/B": png.getvalue()}, {})
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    content = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    stated = HParamsPluginData.FromString(content).session_start_info.hparams
    assert stated["optimizer.lr"].number_value == 1e-3 and stated["swa"].string_value == "True"
    assert stated["job"].string_value == "demo" and stated["trackers"].string_value == "['tensorboard']"
    content = board.summary_metadata["_hparams_/experiment"].plugin_data.content
    (metric,) = HParamsPluginData.FromString(content).experiment.metric_infos
    assert metric.name.tag == "eval/val/eer"
    (image,) = board.Images("test/A/B")
    assert (image.step, image.width, image.height) == (10, 3, 2)
    assert [path.name for path in (run / "figures").iterdir()] == ["test - A_B.png"]


def test_images_of_an_earlier_attempt_are_deleted(tmp_path):
    run = new_run(tmp_path)
    write_report_figures(run, None, "val", 10, {"A": b"a"}, {})
    write_report_figures(run, None, "test", 10, {"A": b"a", "B": b"b"}, {"worst": b"c"})
    write_report_figures(run, None, "test", 20, {"A": b"d"}, {})
    found = {str(path.relative_to(run)): path.read_bytes() for path in run.glob("[fs]*/*.png")}
    assert found == {"figures/val - A.png": b"a", "figures/test - A.png": b"d"}


def test_figures_and_a_report_that_a_disk_refuses_are_a_warning_and_a_full_disk_is_an_error(tmp_path, monkeypatch, log):
    def fail(*names: Path | str, **folders: int | None) -> None:
        raise OSError(number, os.strerror(number))

    run, number = new_run(tmp_path, env=ENV), errno.EIO
    with closing(open_recorder(run)) as recorder:
        write_training(recorder, 0, 40)
    monkeypatch.setattr(os, "replace", fail)
    write_report_figures(run, None, "test", 10, {"A": b"a", "B": b"b"}, {})
    assert "2 of 2 not written, the first: [Errno 5] Input/output error" in log.pop()
    assert report.update_report(run) is None
    assert f"Write it again: trainyard report {run}" in log.pop() and not log
    number = errno.ENOSPC
    for write in (
        lambda: write_report_figures(run, None, "test", 10, {"A": b"a"}, {}),
        lambda: report.update_report(run),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    monkeypatch.undo()
    assert report.update_report(run) == run / "report.html"


def test_images_of_samples_keep_their_pixels_and_proportions():
    gray, colour = np.arange(12, dtype=np.uint8).reshape(3, 4), np.full((2, 2, 3), 7, dtype=np.uint8)
    for pixels in (gray, colour):
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        assert np.array_equal(decode_image(np.frombuffer(file.getvalue(), dtype=np.uint8)), pixels)
    assert decode_image(colour) is colour, "resized by packing"
    wide = np.zeros((10, 40), dtype=np.uint8)
    for count in (1, 5):
        with Image.open(io.BytesIO(draw_samples(" ", [((wide,), "")] * count))) as drawn:
            rows, columns = np.nonzero(np.asarray(drawn.convert("L")) < 128)
        height, width = (np.flatnonzero(np.diff(np.unique(places), append=10**6) > 1)[0] for places in (rows, columns))
        assert width / height == pytest.approx(4, rel=0.1), "of the first, whatever is below and next to it"


def test_wandb_writes_offline_runs_into_the_run_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run = new_run(tmp_path)
    tracking = {"project": "night shift", "tags": ["baseline", "a b"]}
    with closing(
        Recorder(run, trackers=("wandb",), config={"job": "demo", "tracking": tracking}, resume_at=None)
    ) as log:
        write_training(log, 0, 40)
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    words, end = {"night shift", "baseline", "a b"}, time.monotonic() + 30  # W&B's own process writes it
    while not all(word.encode() in file.read_bytes() for word in words):
        assert time.monotonic() < end, words
        time.sleep(0.1)


def test_mlflow_keeps_options_and_metrics_of_each_attempt_in_the_run_folder(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    run = new_run(tmp_path)
    with closing(open_recorder(run, trackers=("mlflow",))) as log:
        write_training(log, 0, 40)
    with closing(open_recorder(run, trackers=("mlflow",), resume_at=40)) as log:
        write_training(log, 40, 80)
    client = mlflow.MlflowClient((run / "mlflow").absolute().as_uri())
    (experiment,) = (e for e in client.search_experiments() if e.name == "demo")
    attempts = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [a.data.params["optimizer.lr"] for a in attempts] == ["0.001", "0.001"]
    tracking = {"project": "night", "tags": ["a b", "c:d"]}
    Recorder(run, trackers=("mlflow",), config={"job": "demo", "tracking": tracking}, resume_at=80).close()
    night = client.get_experiment_by_name("night")
    (marked,) = client.search_runs([night.experiment_id])
    assert {"a b", "c_d"} <= set(marked.data.tags)
    steps = [[m.step for m in client.get_metric_history(a.info.run_id, "train/loss")] for a in attempts]
    assert steps == [[10, 20, 30, 40], [40, 50, 60, 70, 80]]


# --- The report ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_needs_no_network_and_no_other_file(tmp_path):
    run = make_finished_run(tmp_path, env=ENV)
    path = report.write_report(run)
    page, text = Page(path), path.read_text()
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    plots = sorted(plot.name for plot in (run / "plots").iterdir())
    assert plots == sorted(
        f"{name}.png"
        for name in (
            *("train_loss", "train_centre_loss", "train_lr", "train_grad_norm", "train_samples_per_s", "time"),
            *("eval_eer", "eval_tar_at_far_1e-3"),
        )
    )
    assert len(images) == len(plots)
    assert all(image["src"].startswith("data:image/png;base64,iVBOR") and image["alt"] for image in images)
    links = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "href")]
    assert len(links) == len(images)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in text and "url(" not in text and "@import" not in text


@pytest.mark.slow
def test_the_report_says_what_was_trained_chosen_and_found(tmp_path):
    text = Page(report.write_report(make_finished_run(tmp_path, env=ENV))).text
    for expected in (
        *("demo", "400 of 400", "48,000", "1,8", "11.2 GiB", "20260801-101500-1a2b3c4"),
        *("Best by eer on val.", "best val, step 400", "0.02352\n[0.01999, 0.02823]"),
        *("sm_86 runs bf16 at full speed", "h5py", "3.12.1", "NVIDIA RTX A5000", "lr: 0.001", "bytes 52,000,000"),
        *("input wait", "evaluation", "checkpoint", "node7", "useful steps30.0"),
    ):
        assert expected in text, expected
    assert "not recorded" not in text.split("Attempts and events")[0]


def test_text_from_a_run_cannot_become_markup(tmp_path):
    evil = 'x"><script>alert(1)</script>'
    run = new_run(tmp_path, config=f"job: {evil}\nnote: '{evil}'\n", env={evil: {evil: evil}, "choices": {evil: evil}})
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "host": evil, "reason": evil, "monitor": {"metric": evil}})
        log.log("train", 10, {"loss": 1.0, evil: 1.0})
        log.log("eval", 10, {"split": evil, evil: 1.0})
        log.log("event", 10, {"event": "stop", "reason": evil, evil: evil})
    page = Page(report.write_report(run))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(evil) >= 12


@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_that_has_just_begun_gets_a_report_that_says_what_is_missing(tmp_path, lines):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start"})
        for step in range(1, lines + 1):
            log.log("train", step, {"loss": 2.0})
    text = Page(report.write_report(run)).text
    assert ("No training line yet." in text) == (lines == 0)
    assert text.count("No evaluation yet") == 1
    for expected in ("still running, or it was killed", "env.json is absent"):
        assert expected in text
    assert "verdict  No evaluation yet." in report.format_summary(run)


def test_a_report_is_drawn_from_losses_that_are_not_finite(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        for step in range(1, 101):
            loss = math.nan if step > 50 else 1 / step
            losses = [None if step > 50 else loss]
            log.log("train", step, {"loss": loss, "step_losses": losses, "grad_norm": math.inf})
        log.log("eval", 100, {"split": "val", "eer": math.nan})
    report.write_report(run)
    assert (run / "plots" / "train_loss.png").stat().st_size > 5_000
    assert "further  eer nan" in report.format_summary(run)


def test_the_page_says_what_each_second_of_a_run_went_to(tmp_path):
    run, begin = new_run(tmp_path, env=ENV), "2026-08-01T10:15:10.000+00:00"
    events = [
        {"kind": "event", "step": 0, "event": "start", "time": begin, "attempt": "a", "spent": {"preparing": 4.0}},
        {"kind": "event", "step": 100, "event": "done", "time": begin, "attempt": "a"},
    ]
    events[1]["spent"] = {"preparing": 4.0, "training": 30.0, "input": 10.0, "evaluating": 5.0, "saving": 5.0}
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    page = Page(report.write_report(run)).text
    expected = "useful steps 50 % input wait 17 % queued or stopped 10 % evaluation 8 % saving 8 % start-up 7 %"
    assert expected in " ".join(report.format_summary(run).split())
    for part in ("useful steps30.050.0", "input wait10.016.7", "start-up4.06.7", "queued or stopped6.010.0"):
        assert part in page, part
    assert "Goodput: 50 % of 1m00s were steps whose result counts; most of the rest: input wait, 17 %." in page


def test_the_verdict_is_about_the_best_method_without_a_network(tmp_path):
    run = new_run(tmp_path)
    monitor = {**MONITOR, "baseline": ["chance", 0.5]}
    scores = {"pixels": {"eer": 0.3}, "logistic": {"eer": 0.1, "eer_low": 0.05, "eer_high": 0.2}, "other": {"auc": 1.0}}
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": monitor})
        log.log("eval", 9, {"split": "test", "eer": 0.2, "eer_low": 0.15, "eer_high": 0.25})
        log.log("event", 9, {"event": "baselines", "split": "val", "scores": {"val": {"eer": 0.0}}, "seconds": 1.0})
        log.log("event", 9, {"event": "baselines", "split": "test", "scores": scores, "seconds": 3.2})
    headline = find_headline(RunStory.read(run))
    assert headline.verdict == "Worse than logistic (0.1000): so is its whole 95 % interval."
    assert headline.place.endswith("lower is better; logistic 0.1000 [0.05000, 0.2000], in 3s; chance 0.5000")


def test_a_figure_of_the_set_that_chose_the_checkpoint_says_so_on_screen_and_page(tmp_path):
    run = new_run(tmp_path)
    said = "val also chose among 3 checkpoints, so new data may score worse"
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "total_steps": 9, "monitor": MONITOR})
        log.log("eval", 3, {"split": "val", "eer": 0.2})
        assert "also chose" not in find_headline(RunStory.read(run)).place
        for step in (6, 9, 9):
            log.log("eval", step, {"split": "val", "eer": 0.1})
    assert find_headline(RunStory.read(run)).place == f"on val, step 6; {said}; lower is better"
    assert said in report.format_summary(run) and said in Page(report.write_report(run)).text
    with closing(open_recorder(run, resume_at=9)) as log:
        log.log("eval", 9, {"split": "test", "eer": 0.3})
    assert find_headline(RunStory.read(run)).place == "on test, step 9; lower is better"
    assert said in report.format_summary(run), "next to the best validation"


def test_a_missing_interval_is_explained(tmp_path):
    run = new_run(tmp_path)
    for lost, is_explained in (({}, False), ({"draws_lost_twin": 0.52}, True)):
        evaluation = {"kind": "eval", "step": 9, "split": "val", "eer_twin": 0.25, **lost, "elapsed_s": 5.0}
        (run / "metrics.jsonl").write_text(json.dumps(evaluation) + "\n")
        page = Page(report.write_report(run)).text
        assert ("No 95 % interval where bootstrap draws were of no use (draws_lost_twin)" in page) == is_explained


# --- Text ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_summary_fits_a_screen_and_ends_with_what_to_type_next(tmp_path):
    run = make_finished_run(tmp_path, env=ENV)
    path = report.write_report(run)
    text = report.format_summary(run, next_commands=["trainyard export demo", "trainyard why demo"])
    lines = text.splitlines()
    assert lines[0] == "demo  done"
    assert "trained  400 of 400 steps  20 epochs  48,000 samples" in lines
    assert lines[1] == "eer      0.03352 [0.02849, 0.04023]  on test, step 400; lower is better"
    assert lines[2] == f"verdict  {NO_BASELINE}: eval_on_start=true records one."
    assert lines[3] == "further  tar_at_far_1e-3 0.9330"
    assert "best     eer 0.02352 [0.01999, 0.02823] on val at step 400" in lines
    assert f"report   {path}" in lines
    assert lines[-2:] == ["next:    trainyard export demo", "         trainyard why demo"]
    assert len(lines) <= 24


def test_the_summary_counts_what_was_trained_after_the_last_logged_step_too(tmp_path):
    run = new_run(tmp_path)
    recorder = open_recorder(run)
    recorder.log("event", 0, {"event": "start", "total_steps": 54, "monitor": MONITOR})
    recorder.log("train", 40, {"epoch": 1, "samples_seen": 2512, "loss": 1.0})
    recorder.log("eval", 54, {"epoch": 2, "split": "val", "eer": 1.0, "trials": 435.0})
    recorder.log("event", 54, {"event": "done", "reason": "none", "epoch": 2, "samples_seen": 3360})
    recorder.close()
    lines = report.format_summary(run).splitlines()
    assert "trained  54 of 54 steps  2 epochs  3,360 samples" in lines
    assert "eer      1.000  on val, step 54; lower is better" in lines
    assert "trials435" in Page(report.write_report(run)).text, "a count has no decimals"


@pytest.mark.parametrize(
    ("mode", "values", "step"),
    [("min", [0.3, 0.1, 0.2], 20), ("max", [0.3, 0.1, 0.2], 10), ("min", [math.nan, 0.3, math.nan], 20)],
)
def test_the_best_evaluation_is_chosen_by_the_monitor(tmp_path, mode, values, step):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": {"split": "val", "metric": "ap", "mode": mode}})
        for i, value in enumerate(values, start=1):
            log.log("eval", 10 * i, {"split": "val", "ap": value})
            log.log("eval", 10 * i, {"split": "test", "ap": 0.9 if mode == "max" else 0.0})
    story = RunStory.read(run)
    assert story.find_best_evaluation()[1]["step"] == step
    assert f"on val at step {step}" in report.format_summary(run)
    assert find_headline(story).place.startswith("on test, step 30; "), "the set that did not choose"


CHANCE = Baseline("chance", 0.5)


@pytest.mark.parametrize(
    ("values", "mode", "baseline", "verdict"),
    [
        ((0.1, 0.05, 0.2), "min", CHANCE, "Better than chance (0.5000): so is its whole 95 % interval."),
        ((0.9, 0.8, 1.0), "max", CHANCE, "Better than chance (0.5000): so is its whole 95 % interval."),
        ((0.4, 0.2, 0.55), "min", CHANCE, "Too few trials to tell whether this is better than chance (0.5000): the"),
        ((0.5, 0.4, 0.6), "min", CHANCE, "No better than chance (0.5000)."),
        ((0.7, 0.6, 0.8), "min", CHANCE, "Worse than chance (0.5000): so is its whole 95 % interval."),
        ((0.3, 0.2, 0.4), "max", CHANCE, "Worse than chance (0.5000): so is its whole 95 % interval."),
        (
            (0.0, 0.0, 0.0),
            "min",
            CHANCE,
            "Better than chance (0.5000); its 95 % interval has no width, as with too few",
        ),
        ((0.1,), "min", CHANCE, "Better than chance (0.5000); without a 95 % interval, so it may be chance."),
        ((0.6,), "min", CHANCE, "No better than chance (0.5000)."),
        ((math.nan,), "min", CHANCE, "eer is not a finite number."),
        (
            (0.1, 0.05, 0.2),
            "min",
            None,
            f"{NO_BASELINE}: eval_on_start=true records one.",
        ),
    ],
)
def test_the_verdict_says_no_more_than_the_interval_shows(values, mode, baseline, verdict):
    line = dict(zip(("eer", "eer_low", "eer_high"), values, strict=False))
    assert judge_metric(line, "eer", mode=mode, baseline=baseline).startswith(verdict)
    if baseline and len(values) == 1 and values[0] < 0.5:
        lost = judge_metric({**line, "draws_lost": 0.5}, "eer", mode=mode, baseline=baseline)
        assert lost == (
            "Too few trials to tell whether this is better than chance (0.5000): no 95 % interval can be drawn."
        )


def test_a_count_of_one_has_no_decimals_next_to_other_counts():
    lines = [{"pairs": 1.0, "eer": 1.0}, {"pairs": 1200.0, "eer": 0.0}, {}]
    assert format_alike(lines, "pairs") == ["1", "1,200", "-"]
    assert format_alike(lines, "eer") == ["1.000", "0.000", "-"]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (["chance", 0.5], "chance 0.5000; the model before training 0.4900"),
        (["the median", "eer_constant"], "the median 0.4000; the model before training 0.4900"),
        (["the median", "absent"], "the model before training 0.4900"),
        (None, "the model before training 0.4900"),
    ],
)
def test_the_baseline_is_what_the_run_recorded_or_the_model_before_training(tmp_path, recorded, said):
    run = new_run(tmp_path)
    monitor = {**MONITOR, **({"baseline": recorded} if recorded else {})}
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": monitor})
        for step, eer in ((0, 0.49), (9, 0.1)):
            log.log("eval", step, {"split": "val", "eer": eer, "eer_constant": 0.4})
    headline = find_headline(RunStory.read(run))
    assert headline.place == f"on val, step 9; lower is better; {said}"
    assert headline.verdict.startswith("Better than ")


def test_a_score_before_training_is_no_result(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": MONITOR})
        log.log("eval", 0, {"split": "val", "eer": 0.2})
        log.log("eval", 0, {"split": "test", "eer": 0.2})
        assert find_headline(RunStory.read(run)).verdict.startswith("No evaluation yet")
        log.log("eval", 9, {"split": "val", "eer": 0.3})
    story = RunStory.read(run)
    assert find_headline(story).value == "0.3000" and story.find_best_evaluation()[1]["step"] == 9


def test_the_loss_of_each_step_is_drawn_and_the_step_of_a_number_is_known(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("train", 1, {"loss": 5.0, "step_losses": [5.0]})
        log.log("train", 4, {"loss": 2.0, "step_losses": [4.0, None, 2.0]})
        log.log("train", 6, {"loss": 1.0, "step_losses": [3.0, 1.0]})
    steps, losses = RunStory.read(run).list_step_losses()
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert losses[[0, 1, 3, 4, 5]].tolist() == [5, 4, 2, 3, 1] and math.isnan(losses[2])


@pytest.mark.parametrize("listed", ["[1.0, 2.0]", "[true]", "3", '["x"]'])
def test_losses_that_are_not_a_number_for_each_step_are_refused(tmp_path, listed):
    run = new_run(tmp_path)
    (run / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 1, "step_losses": {listed}}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: expected at most one number or null for each step"):
        read_metrics(run)


def test_no_plot_shows_what_another_shows_and_constants_are_in_a_table(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log.log("event", 0, {"event": "start", "monitor": MONITOR})
        for step in (1, 2):
            log.log(
                "train", step, {"loss": 1 / step, "arcface": 1 / step, "centre": 2.0 / step, "step_losses": [1 / step]}
            )
            log.log("eval", step, {"split": "val", "auc": step / 4, "eer": 0.5 / step, "trials": 435.0})
        log.log("eval", 2, {"split": "test", "eer": 0.5, "trials": 17.0})
    page = Page(report.write_report(run))
    plots = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert [title for title in plots if title != "Where the time went"] == [
        *("Training loss", "eer", "auc", "Training: centre")
    ]
    assert "The same in every evaluation" in page.text and "trials43517" in page.text.replace("\n", "")
    order = ["Curves", "Results", "Time", "Next steps", "Automatic choices", "Environment"]
    assert sorted(order, key=page.text.index) == order
    assert page.text.index("No baseline") < page.text.index("Curves")


def test_a_failed_run_of_one_step_has_its_reason_in_a_note_and_no_curve_of_one_point(tmp_path):
    run = new_run(tmp_path)
    with closing(open_recorder(run)) as log:
        log_start(log, "start", 0)
        log.log("train", 1, {"loss": 2.0, "step_losses": [2.0], "lr": 1e9, "zero": 0.0, "samples_per_s": 9.0})
        log.log("event", 2, {"event": "failed", "reason": "the gradient is not finite"})
    page = report.write_report(run).read_text()
    assert '<span class="pill failed">failed</span><div class="note">the gradient is not finite</div>' in page
    assert "further curve" not in page and not list((run / "plots").glob("train_*"))


def test_a_map_of_embeddings_is_deterministic_names_nobody_and_needs_no_variance():
    rng = np.random.default_rng(0)
    embeddings, identities = rng.normal(size=(40, 8)).astype(np.float32), np.arange(40) // 2
    first = draw_embedding_map(embeddings, identities)
    assert first == draw_embedding_map(embeddings, identities) and first.startswith(b"\x89PNG")
    assert first != draw_embedding_map(embeddings[:, ::-1] * [[1, 2] * 4], identities)
    assert draw_embedding_map(np.zeros((3, 2), np.float32), np.arange(3)).startswith(b"\x89PNG")


def test_a_table_of_texts_shows_them_as_they_are():
    png = draw_text_table("Best", ["price", "text"], [["1", "$x_{$ 2 $"], ["2", "t" * 500]])
    with Image.open(io.BytesIO(png)) as image:
        assert image.width < 1000, "a long text is cut, and does not widen the figure"


def test_a_training_line_has_its_documented_format():
    values = {"step": 400, "total_steps": 10_000, "loss": 0.2134, "samples_per_s": 1840.2, "step_ms": 75.0}
    values |= {"data_wait_ms": 9.3, "idle_ms": 3.1, "compute_ms": 66.4, "memory_gib": 31.21}
    assert console.format_line(values) == (
        "step 400/10000  loss 0.213  1840 samples/s  idle 3 ms (4 %)  compute 66 ms  mem 31.2 GiB  eta 12m"
    )
    short = {name: value for name, value in values.items() if name != "total_steps"} | {"step": 3, "loss": math.nan}
    assert (
        console.format_line(short) == "step 3  loss nan  1840 samples/s  idle 3 ms (4 %)  compute 66 ms  mem 31.2 GiB"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (192, "3m12s"), (599.6, "10m"), (720, "12m")),
        *((3599, "1h00m"), (3900, "1h05m"), (86_399, "1d00h"), (183_600, "2d03h")),
    ],
)
def test_a_duration_reads_at_a_glance(seconds, text):
    assert format_duration(seconds) == text


def open_terminal() -> tuple[int, int]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    return master, slave


def read_all(terminal: int) -> str:
    """Read what was written to a terminal that is no longer open."""
    parts = []
    while True:
        try:
            parts.append(os.read(terminal, 4096))
        except OSError:  # EIO: on Linux, all was read
            os.close(terminal)
            return b"".join(parts).decode()


def test_log_lines_do_not_tear_the_progress_bar_on_a_terminal(monkeypatch):
    master, slave = open_terminal()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        sink = logger.add(console.log_sink, format="{message}")
        with closing(console.ProgressBar(10, step=4)) as bar:
            bar.update(5)
            logger.info("a line from the log")
            bar.update(6)
        logger.remove(sink)
    shown = read_all(master)
    before, after = shown.split("a line from the log\r\n")
    assert re.search(r"\d+/10 ", before) and before.endswith("\r")  # the bar was removed first
    assert re.search(r"\d+/10 ", after)  # and drawn again below


def test_the_progress_bar_is_silent_without_a_terminal(capsys):
    with closing(console.ProgressBar(10)) as bar:
        bar.update(5)
    assert capsys.readouterr().err == ""


def test_the_progress_bar_of_a_rank_that_may_not_draw_is_silent_on_a_terminal(monkeypatch):
    master, slave = open_terminal()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with closing(console.ProgressBar(10, show=False)) as bar:
            bar.update(5)
    assert read_all(master) == ""


def test_reading_and_reporting_load_no_torch_and_plot_nothing_at_import():
    code = "import sys, trainyard.report.run_page; print(sorted({'torch', 'matplotlib', 'tqdm'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
