"""What notebooks use: `trainyard.run` and `trainyard.Run`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trainyard
from tests.training import FAMILIES
from trainyard import api
from trainyard.errors import NotFinite
from trainyard.runs.folder import record_error

HIDDEN = ("torch", "numpy", "IPython", "omegaconf", "trainyard.api")


def test_importing_it_loads_nothing_and_a_wrong_name_says_which_there_are():
    code = f"import sys, trainyard; print([name for name in {HIDDEN!r} if name in sys.modules]); trainyard.Run; "
    code += f"print([name for name in {HIDDEN[:-1]!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr
    with pytest.raises(
        AttributeError, match=r"no attribute 'fit'\. It has: Run, UserError, __version__, load_model, run"
    ):
        trainyard.fit  # noqa: B018
    assert trainyard.UserError.__module__ == "trainyard.errors"


def test_options_become_what_one_types():
    options = {"optimizer": {"lr": 1e-4, "name": "sgd"}, "ema_decay": 0, "trackers": ["wandb", "mlflow"], "swa": True}
    assert api._format_options({**options, "data": Path("prints"), "schedule.warmup": "5st"}) == [
        *("optimizer.lr=0.0001", "optimizer.name=sgd", "ema_decay=0", "trackers=[wandb,mlflow]", "swa=true"),
        *("data.path=prints", "schedule.warmup=5st"),
    ]
    assert api._format_options({"data": {"synthetic": 20}}) == ["data.synthetic=20"]


def test_a_run_says_its_status_and_its_metrics_as_arrays(stored):
    run = trainyard.Run("stripes/done")
    assert run.status.state == "done" and run.status.step == run.status.total_steps == 4
    assert repr(run) == "Run('runs/stripes/done')" and str(run.status).startswith("runs/stripes/done: done at step 4/4")
    lines = [json.loads(line) for line in (stored / "runs/stripes/done/metrics.jsonl").read_text().splitlines()]
    accuracy = [line["accuracy"] for line in lines if line.get("split") == "val"]
    assert accuracy and run.metrics["val"]["accuracy"].tolist() == accuracy
    assert run.metrics["val"]["step"].dtype == np.int64
    assert "split" not in run.metrics["val"]
    failed = shutil.copytree(run.path, run.path.with_name("failed"))
    (failed / "events.jsonl").write_text("")
    record_error(failed, NotFinite("the gradient is NaN"), attempt="local-1", rank=0)
    assert "NaN or infinite" in trainyard.Run("stripes/failed").why()
    with pytest.raises(trainyard.UserError, match="no run is 'nothing'"):
        trainyard.Run("nothing")


def test_a_run_gives_its_module_in_evaluation_mode(stored):
    for run in ("stripes/done", trainyard.Run("stripes/done")):
        module = trainyard.load_model(run, jobs=FAMILIES)
        assert not any(layer.training for layer in module.modules())
        rows = module.predict({"image": torch.zeros(3, 1, 16, 16), "sample_id": torch.arange(3)})
        assert rows["chosen"].shape == (3,)


def test_a_mistake_is_the_message_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trainyard.UserError) as caught:
        trainyard.run("fingerprint_demoo")
    assert str(caught.value).startswith("There is no job 'fingerprint_demoo'. Nearest: fingerprint_demo, ")
    with pytest.raises(trainyard.UserError, match="'a/b' cannot name a run"):
        trainyard.run("fingerprint_demo", name="a/b")
    assert list(tmp_path.iterdir()) == []


def test_a_column_of_numbers_is_an_array_of_numbers():
    assert api._make_column(["1", "-2.5", "nan"]).dtype == np.float64
    assert api._make_column(["1", "", "x"]).tolist() == ["1", "", "x"]


def test_figures_are_images_in_the_page_and_can_be_selected():
    figures = api.Figures({"train_loss": b"\x89PNG1", "time": b"\x89PNG2"})
    assert list(figures.select("time", "train_loss")) == ["time", "train_loss"]
    assert figures.select("time")._repr_html_().count('src="data:image/png;base64,iVBORzI="') == 1
    with pytest.raises(trainyard.UserError, match=r"'train_los': there is no such figure\. Nearest: train_loss\. All"):
        figures.select("train_los")


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        (2, "12:00:01 device CPU\nConfigError: lr=x: expected a number.\n  more\n", "lr=x: expected a number.\n  more"),
        (2, "packed data\nShardError: train-0.h5: cut off\n", "train-0.h5: cut off"),
        (2, "trainyard run: unrecognized arguments: --x. All\n", "trainyard run: unrecognized arguments: --x. All"),
        (1, "Traceback (most recent call last):\n  File\nKeyError: 'x'\n", "'x'"),
        (1, "", "the command ended with code 1 and said nothing"),
    ],
)  # fmt: skip
def test_of_what_a_command_says_the_error_is_kept(code, said, message):
    assert api._explain(code, said, None).startswith(message)


def test_in_a_notebook_one_line_changes(monkeypatch):
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    monkeypatch.setattr(api, "_is_notebook", lambda: True)
    monkeypatch.setattr(api, "_open_display", lambda line: shown.append(line) or handle)
    with api._Progress() as progress:
        for line in ("step 1", "step 1", "step 2", "x" * 200):
            progress.show(line)
    assert shown[:2] == ["step 1", "step 2"] and len(shown) == 3 and len(shown[2]) <= 110


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = {"data": {"synthetic": 60}, "global_batch_size": 6, "eval_every": "2st", "jobs": FAMILIES}


@pytest.mark.long
def test_a_run_is_trained_shown_extended_and_used_without_torch_in_this_process(here):
    """In a process without torch, as a kernel is."""
    code = f"""
import sys
from pathlib import Path
import trainyard
run = trainyard.run("stripes", name="r", max_duration="2st", **{SMALL | {"jobs": str(FAMILIES)}!r})
assert run.status.state == "done", run.status
run.resume(max_duration="4st", inexact=True)
assert run.metrics["train"]["step"].tolist() == [1, 2, 3, 4]
figures, shown = run.figures, run._repr_html_()
assert figures["train_loss"].startswith(b"\\x89PNG")
assert shown.count("<img") == len(figures) and "stripes/r</b>: done, step 4 of 4" in shown
raw = next(Path("data").glob("stripes-synthetic*"))
rows = run.predict(raw)
assert rows["image"].shape == rows["direction"].shape == (60,) and rows["image"].dtype.kind == "U", rows
try:
    run.embed(raw)
except trainyard.UserError as error:
    assert "embedding" in str(error), error
else:
    raise AssertionError
assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_interrupted_cell_saves_and_the_run_resumes(here):
    path = here / "runs" / "stripes" / "r"

    def interrupt() -> None:
        while not (path / "metrics.jsonl").exists() or (path / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        trainyard.run("stripes", name="r", max_duration="1000ep", **SMALL)
    run = trainyard.Run("stripes")
    assert run.status.state == "stopped" and 0 < run.status.step < run.status.total_steps
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(trainyard.UserError, match="without checkpoints"):
        run.predict("data")
