"""What a family's code returns is checked where it is first used: one sentence with the file and line of that code."""

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainyard import cli
from trainyard.data.pack import pack
from trainyard.data.shards import Ragged, Sample
from trainyard.errors import INTERFACE, ContractError, UserError
from trainyard.runs.events import read_metrics
from trainyard.train.contract import check_losses, check_metrics, check_rows
from trainyard.train.module import Batch, TrainModule

HERE = r"test_family_returns\.py:\d+: Mistaken"


class Mistaken(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.weight.sum()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def score(self, rows: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda w: None, "returned nothing .is a `return` forgotten"),
        (lambda w: w.sum(), r"returned a tensor \(\) of float32; expected {\"loss\""),
        (lambda w: {"los": w.sum()}, "returned los; expected"),
        (lambda w: {"loss": w}, r"'loss' is a tensor \(3,\) of float32"),
        (lambda w: {"loss": w.sum(), "accuracy": 0.5}, "'accuracy' is float 0.5"),
        (lambda w: {"loss": w.sum().detach()}, "the loss has no gradient"),
    ],
)
def test_a_wrong_return_of_forward_is_one_sentence(make: Callable[[Tensor], Any], said: str):
    module = Mistaken()
    check_losses(module, module({}))
    with pytest.raises(UserError, match=rf"{HERE}.forward.*{said}"):
        check_losses(module, make(module.weight))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "returned nothing"),
        ({"score": torch.ones(4)}, 'returned score; expected {"sample_id"'),
        (
            {"sample_id": torch.arange(4), "score": torch.ones(3)},
            r"'score' is a tensor \(3,\) of float32 for a batch of 4",
        ),
        ({"sample_id": torch.arange(4), "score": torch.tensor(1.0)}, r"'score' is a tensor \(\)"),
        ({"sample_id": torch.arange(4), "score": [1.0] * 4}, "'score' is list for a batch of 4"),
    ],
)
def test_a_wrong_return_of_predict_is_one_sentence(found: Any, said: str):
    check_rows(Mistaken(), {"sample_id": torch.arange(4), "score": torch.ones(4, 2)}, 4)
    with pytest.raises(UserError, match=rf"{HERE}.predict.*{said}"):
        check_rows(Mistaken(), found, 4)


def test_metrics_are_numbers_by_name():
    assert check_metrics(Mistaken().score, {"a": np.float32(0.5), "b": torch.tensor(1)}) == {"a": 0.5, "b": 1.0}
    for found, said in (
        ([0.5], "returned list"),
        ({"a": np.ones(2)}, r"'a' is an array \(2,\)"),
        ({"a": None}, "'a' is"),
    ):
        with pytest.raises(UserError, match=rf"{HERE}.score.*{said}"):
            check_metrics(Mistaken().score, found)


def load(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (None, "returned NoneType; expected a dict"),
        ([1], "returned list"),
        ({"x": np.ones(2)}, "returned x, and of the first numbers"),
        ({"numbers": [1.0, 2.0]}, "'numbers' is list; expected an image's bytes"),
        ({"numbers": torch.ones(2)}, "'numbers' is Tensor"),
        ({"numbers": np.ones(3)}, r"has the shape \(3,\), and of the first \(2,\)\. Wrap arrays"),
    ],
)
def test_a_sample_that_cannot_be_packed_is_named_with_its_loader(second: Any, said: str, tmp_path: Path):
    samples = [Sample("first", partial(load, {"numbers": np.ones(2)})), Sample("second", partial(load, second))]
    with pytest.raises(UserError, match=rf"test_family_returns\.py:\d+: load of sample 'second'.*{said}"):
        pack(samples, tmp_path / "packed", meta={}, workers=1)


def test_ragged_arrays_may_vary(tmp_path: Path):
    samples = [Sample(str(n), partial(load, {"tokens": Ragged(np.ones(n, np.int32))})) for n in (1, 3)]
    assert pack(samples, tmp_path / "packed", meta={}, workers=1).count == 2


# Mistakes that are planted in a family of 60 lines


TINY = {
    "config.py": """
from dataclasses import dataclass

from trainyard.config.settings import TrainConfig


@dataclass
class Config(TrainConfig):
    pass
""",
    "pack.py": """
import json, random
from functools import partial

import numpy as np

from trainyard.data.shards import Mask, Ragged, Sample



def load(number):
    return {"x": np.full(3, number, np.float32), "y": number % 2}


def samples(raw, config):
    for number in range(12):
        yield Sample(f"key{number}", partial(load, number))


def synthesize(raw, count, seed):
    raw.mkdir()


def splits(columns, vocabulary, config):
    return {"train": np.arange(8), "val": np.arange(8, 12)}
""",
    "module.py": """
import random
import threading

import numpy as np
from torch import nn

from trainyard.train.module import Signature, TrainModule


class Tiny(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch):
        found = self.layer(batch["x"]).squeeze(1)
        return {"loss": (found - batch["y"]).square().mean()}

    def predict(self, batch):
        return {"sample_id": batch["sample_id"], "found": self.layer(batch["x"]).squeeze(1)}

    def score(self, rows):
        return {"loss": float(rows["found"].mean())}

    def describe_predict(self):
        return Signature({"x": "three numbers"}, {"found": "a number"})


def build(config, data):
    return Tiny()
""",
    "tiny.yaml": """# A family of the tests.
defaults: [schema, _self_]
data: {synthetic: 12}
global_batch_size: 4
max_duration: 2st
trackers: []
""",
}

LOSS = 'return {"loss": (found - batch["y"]).square().mean()}'
ROWS = 'return {"sample_id": batch["sample_id"], "found": self.layer(batch["x"]).squeeze(1)}'
LOADED = 'return {"x": np.full(3, number, np.float32), "y": number % 2}'
SPLIT = 'return {"train": np.arange(8), "val": np.arange(8, 12)}'
LAYER = "self.layer = nn.Linear(3, 1)"
LATE = "if number == 7:\n        "  # of one sample
FORWARD, PREDICT = r"module\.py:15: Tiny\.forward", r"module\.py:19: Tiny\.predict"
LOAD = r"pack\.py:10: load of sample 'key\d+'"

MISTAKES = {
    "forward forgets to return": (LOSS, LOSS[7:], rf"{FORWARD} returned nothing"),
    "forward returns the loss alone": (LOSS, f"{LOSS}['loss']", rf"{FORWARD} returned a tensor \(\)"),
    "forward returns no loss": (LOSS, LOSS.replace('"loss"', '"los"'), rf"{FORWARD} returned los;"),
    "the loss is a vector": (LOSS, LOSS.replace(".mean()", ""), rf"{FORWARD}: 'loss' is a tensor \(4,\)"),
    "the loss is detached": (
        LOSS,
        LOSS.replace(".mean()", ".mean().detach()"),
        rf"{FORWARD}: the loss has no gradient",
    ),
    "a further loss is a float": (LOSS, f"{LOSS[:-1]}, 'more': 0.5}}", rf"{FORWARD}: 'more' is float 0\.5"),
    "a further loss is a vector": (LOSS, f"{LOSS[:-1]}, 'more': found}}", rf"{FORWARD}: 'more' is a tensor \(4,\)"),
    "predict forgets to return": (ROWS, ROWS[7:], rf"{PREDICT} returned nothing"),
    "predict returns a tensor": (ROWS, "return batch['x']", rf"{PREDICT} returned a tensor \(2, 3\)"),
    "predict leaves out sample_id": (ROWS, "return {'found': batch['x']}", rf"{PREDICT} returned found; expected"),
    "predict returns a row too few": (ROWS, ROWS.replace("(1)", "(1)[1:]"), rf"{PREDICT}: 'found' is a tensor \(1,\)"),
    "predict returns a mean": (ROWS, ROWS.replace("(1)", "(1).mean()"), rf"{PREDICT}: 'found' is a tensor \(\)"),
    "predict returns an array": (ROWS, ROWS.replace("(1)", "(1).numpy()"), rf"{PREDICT}: 'found' is an array \(2,\)"),
    "describe_predict names another row": (
        '{"found": "a',
        '{"fond": "a',
        r"module\.py:25: Tiny\.describe_predict names fond, but predict returns sample_id, found",
    ),
    "describe_predict reads another entry": (
        '{"x": "three',
        '{"z": "three',
        r"module\.py:25: Tiny\.describe_predict names z, but a batch has",
    ),
    "describe_predict forgets to return": (
        "return Signature(",
        "Signature(",
        r"module\.py:25: Tiny\.describe_predict returned nothing",
    ),
    "forward draws from Python's state": (LOSS, f"random.random()\n        {LOSS}", rf"{FORWARD} .*Python's random"),
    "forward draws from NumPy's state": (LOSS, f"np.random.rand()\n        {LOSS}", rf"{FORWARD} .*numpy\.random"),
    "nothing can train": (LAYER, f"{LAYER}.requires_grad_(False)", r"module\.py: Tiny.* no parameter .* train"),
    "a part cannot be copied": (
        LAYER,
        f"{LAYER}\n        self.guard = threading.Lock()",
        r"module\.py: Tiny: 'guard' .*cannot be copied",
    ),
    "build forgets to return": ("return Tiny()", "Tiny()", r"module\.py:\d+: build returned nothing"),
    "build returns another module": (
        "return Tiny()",
        "return nn.Linear(3, 1)",
        r"module\.py:\d+: build returned Linear",
    ),
    "a name is wrong": (
        LOSS,
        LOSS.replace('"y"', '"label"'),
        r'module\.py", line 17, in forward\n(.*\n)+KeyError: .label',
    ),
    "load forgets to return": (LOADED, LOADED[7:], f"{LOAD} returned NoneType"),
    "load returns a list": (LOADED, "return [number]", f"{LOAD} returned list"),
    "load returns a tensor": (LOADED, "import torch; return torch.ones(3)", f"{LOAD} returned Tensor"),
    "a record is a tensor": (
        LOADED,
        f"import torch; {LOADED}".replace("np.full(3, number, np.float32)", "torch.ones(3)"),
        f"{LOAD}: 'x' is",
    ),
    "a record is None": (LOADED, LOADED.replace("number % 2", "None"), f"{LOAD}: 'y' is NoneType"),
    "arrays have other shapes": (
        LOADED,
        LOADED.replace("full(3", "full(3 + number // 7"),
        f"{LOAD}: 'x' has the shape",
    ),
    "an array once is ragged": (
        LOADED,
        f"{LATE}return {{'x': Ragged(np.ones(3, np.float32)), 'y': 1}}\n    {LOADED}",
        f"{LOAD}: 'x' is Ragged",
    ),
    "ragged arrays have other columns": (
        LOADED,
        "return {'x': Ragged(np.ones((2, 1 + number // 7)))}",
        f"{LOAD}: 'x' is Ragged",
    ),
    "ragged arrays vary beyond two axes": (
        LOADED,
        "return {'x': Ragged(np.ones((2, 3, 1 + number // 7)), varying_axes=2)}",
        f"{LOAD}: 'x' is Ragged",
    ),
    "three axes vary": (LOADED, "return {'x': Ragged(np.ones((2, 3, 4)), varying_axes=3)}", f"{LOAD}: 'x' is Ragged"),
    "an array has objects": (LOADED, LOADED.replace("np.float32", "object"), f"{LOAD}: 'x' is .*object"),
    "a second image has no first one to follow": (
        LOADED,
        LOADED.replace("number % 2", "b'PNG'"),
        f"{LOAD}: 'y' is bytes of an image",
    ),
    "a mask has no image to follow": (
        LOADED,
        LOADED.replace("number % 2", "Mask(np.ones((2, 2), np.uint8))"),
        f"{LOAD}: 'y' is a mask",
    ),
    "a mask is no array of uint8": (
        LOADED,
        f"{LOADED.replace('number % 2', 'Mask(np.ones((2, 2)))')} | {{'image': b'PNG'}}",
        f"{LOAD}: 'y' is Mask; expected .*Mask of \\(H, W\\) uint8",
    ),
    "a sample lacks a record": (LOADED, f"{LATE}return {{'y': 1}}\n    {LOADED}", f"{LOAD} returned y"),
    "a record has a reserved name": (LOADED, LOADED.replace('"y"', '"sample_id"'), f"{LOAD}.*'sample_id' .*reserved"),
    "load draws from Python's state": (LOADED, f"random.random()\n    {LOADED}", f"{LOAD} .*Python's random"),
    "load draws from NumPy's state": (LOADED, f"np.random.rand()\n    {LOADED}", rf"{LOAD} .*numpy\.random"),
    "load fails": (LOADED, f"{LATE}int('x')\n    {LOADED}", r"key7: ValueError: .*pack\.py:12"),
    "load fails in a library": (LOADED, f"{LATE}json.loads('x')\n    {LOADED}", r"key7: .*pack\.py:12"),
    "load is a lambda": (
        "partial(load, number)",
        "lambda: load(1)",
        r"pack\.py:16: .*sample 'key0' .*cannot .*process",
    ),
    "load holds what cannot be sent": (
        "partial(load, number)",
        "partial(load, open('/dev/null'))",
        r"pack\.py:10: .*sample 'key0' .*cannot .*process",
    ),
    "samples forgets to yield": ("yield Sample", "Sample", r"pack\.py:14: samples returned nothing"),
    "samples yields a key": (
        'yield Sample(f"key{number}", partial(load, number))',
        "yield 'key'",
        r"pack\.py:14: samples yielded str 'key'; expected a Sample",
    ),
    "splits forgets to return": (SPLIT, SPLIT[7:], r"pack\.py:23: splits returned nothing"),
    "splits returns a list": (SPLIT, "return [1, 2]", r"pack\.py:23: splits returned list"),
    "splits shares a sample": (SPLIT, SPLIT.replace("(8, 12", "(7, 12"), r"pack\.py: splits: 1 of the 5 ids in 'val'"),
    "an artifact is a number": (
        "def splits(",
        "def fit_artifacts(raw, config):\n    return {'mean': 1.5}\n\n\ndef splits(",
        r"pack\.py:\d+: fit_artifacts: 'mean' is float 1\.5",
    ),
    "a parameter is in no group": (
        "    def describe_predict",
        "    def parameter_groups(self, weight_decay):\n        return [{'params': [self.layer.bias]}]\n\n"
        "    def describe_predict",
        r"module\.py: Tiny\.parameter_groups: layer\.weight is in no group",
    ),
    "build_optimizer forgets to return": (
        "    def describe_predict",
        "    def build_optimizer(self, groups, config):\n        pass\n\n    def describe_predict",
        r"module\.py:\d+: Tiny\.build_optimizer returned nothing",
    ),
}
"""What is written instead of what, and what is said of it."""

OWN_EXCEPTIONS = ("a name is wrong", "load fails", "load fails in a library")
"""Mistakes that are no matter of the contract: the family's code raises by itself."""


def test_a_broken_contract_names_the_page_about_it_once_also_from_another_process():
    error = pickle.loads(pickle.dumps(ContractError("pack.py: wrong.")))  # noqa: S301
    assert str(error) == f"pack.py: wrong. {INTERFACE} describes a family's interface." and INTERFACE.is_file()


def plant(jobs: Path, old: str, new: str) -> None:
    folder = jobs / "tiny"
    folder.mkdir(parents=True)
    for name, text in TINY.items():
        (folder / name).write_text(text.lstrip().replace(old, new))
    assert sum(text.count(old) for text in TINY.values()) == 1 or old == new


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run_tiny(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    return cli.main(
        ["run", "tiny", "--synthetic", "--name", "r", "--jobs", str(folder / "jobs"), f"data.cache={cache}"]
    )


def test_the_family_without_a_mistake_trains(tmp_path, cache, monkeypatch, capsys):
    plant(tmp_path / "jobs", "", "")
    assert run_tiny(tmp_path, cache, monkeypatch) == 0


def test_a_family_whose_arrays_vary_in_two_axes_trains(tmp_path, cache, monkeypatch, capsys):
    plant(tmp_path / "jobs", LOADED, LOADED.replace("np.full(3, number, np.float32)", GRID))
    module = tmp_path / "jobs" / "tiny" / "module.py"
    module.write_text(module.read_text().replace('batch["x"]', 'batch["x"].sum(2)'))
    assert run_tiny(tmp_path, cache, monkeypatch) == 0


GRID = "Ragged(np.full((3, 1 + number), number, np.float32), varying_axes=2)"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_family_is_said_before_the_first_step_with_its_file(name, tmp_path, cache, monkeypatch, capsys):
    old, new, said = MISTAKES[name]
    plant(tmp_path / "jobs", old, new)
    assert run_tiny(tmp_path, cache, monkeypatch) != 0
    shown = capsys.readouterr().err
    last = re.sub(r"(?s)^.*\n(?=[A-Z]\w+Error: |In the family)", "", f"\n{shown}")
    assert re.search(said, shown), shown
    if name not in OWN_EXCEPTIONS:
        assert last.splitlines()[0].endswith(f" {INTERFACE} describes a family's interface."), last
    assert len(last.splitlines()) < 12 and "Traceback" not in shown, shown
    run = tmp_path / "runs/tiny/r"
    assert not run.exists() or not list(read_metrics(run))
    assert ("In the family's code:" in shown) == (f"Why: trainyard why {run.relative_to(tmp_path)}. " in shown)
