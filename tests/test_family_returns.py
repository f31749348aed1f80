"""What a family's code returns is checked where it is first used: one sentence with the file and line of that code."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainyard.data.pack import pack
from trainyard.data.shards import Ragged, Sample
from trainyard.errors import UserError
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
    assert check_metrics(Mistaken(), {"a": np.float32(0.5), "b": torch.tensor(1)}) == {"a": 0.5, "b": 1.0}
    for found, said in (
        ([0.5], "returned list"),
        ({"a": np.ones(2)}, r"'a' is an array \(2,\)"),
        ({"a": None}, "'a' is"),
    ):
        with pytest.raises(UserError, match=rf"{HERE}.score.*{said}"):
            check_metrics(Mistaken(), found)


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
