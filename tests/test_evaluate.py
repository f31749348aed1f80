"""Evaluation reads rows from the device without making it wait."""

from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from trainyard.config.settings import AugmentSettings, ImageSettings, TrainConfig
from trainyard.data.loader import Loader
from trainyard.train.evaluate import evaluate, find_constant_outputs, gather_rows, score_rows
from trainyard.train.module import Batch, Rows, Signature, TrainModule


class Watched(Tensor):
    """A tensor that writes down when a copy to the host starts, and when the host reads it."""

    log: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "cpu" or (name == "to" and not (kwargs or {}).get("non_blocking")):
            cls.log.append("wait")
        elif name in ("to", "numpy"):
            cls.log.append({"to": "start", "numpy": "read"}[name])
        return super().__torch_function__(function, types, args, kwargs or {})


class Means(TrainModule):
    """Predicts the mean of each image."""

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        Watched.log.append("compute")
        return {
            "sample_id": batch["sample_id"],
            "value": batch["image"].mean((1, 2, 3)).as_subclass(Watched),
        }


@pytest.mark.parametrize(("values", "found"), [([5.0, 5.001, 5.002], ["value"]), ([5.0, 5.1, 5.0], []), ([5.0], [])])
def test_outputs_that_are_the_same_for_all_samples_are_said(values, found, log):
    class Described(Means):
        def describe_predict(self) -> Signature:
            return Signature({"image": ""}, {"value": "", "chosen": ""})

        def score(self, rows: Rows) -> dict[str, float]:
            return {"mean": 1}

    count = len(values)
    rows = {"sample_id": np.arange(count), "value": np.array(values), "chosen": np.arange(count), "x": np.zeros(count)}
    assert find_constant_outputs(Described(), rows) == found
    assert find_constant_outputs(Means(), rows) == [], "what the rows mean is not known"
    assert score_rows(Described(), rows, with_intervals=True) == ({"mean": 1.0}, {})
    assert log == [
        f"value: the same for all {count} samples, so the network ignores its input. Usual causes: too "
        "few steps, a learning rate that is too high, inputs that are all alike\n"
    ] * bool(found)


def test_rows_are_read_two_batches_late_and_few_wait_at_a_time(images):
    config = TrainConfig(image=ImageSettings(height_px=24, width_px=32), augment=AugmentSettings())
    loader = Loader(config, images, device=torch.device("cpu"), decode="cpu")
    Watched.log.clear()
    gathered = gather_rows(Means(), loader, np.arange(20), batch_size=4, autocast=nullcontext)
    assert gathered is not None
    rows, _ = gathered
    one, late = ["compute", "start"], ["compute", "start", "read"]
    assert Watched.log == [*one, *one, *late, *late, *late, "read", "read"]
    assert rows["sample_id"].tolist() == list(range(20)) and rows["value"].dtype == np.float32


def test_all_that_scores_a_set_runs_in_evaluation_mode_and_training_goes_on(images):
    """Some families run their network in `score`: BatchNorm must not learn there, and nothing be augmented."""
    modes: list[bool] = []

    class Scored(Means):
        def score(self, rows: Rows) -> dict[str, float]:
            modes.append(self.training)
            return {"mean": 1.0}

        def compute_intervals(self, rows: Rows) -> dict[str, float]:
            modes.append(self.training)
            return {}

        def report_figures(self, rows: Rows) -> dict[str, bytes]:
            modes.append(self.training)
            return {}

        def sample_figures(self, rows: Rows) -> dict[str, bytes]:
            modes.append(self.training)
            return {}

    config = TrainConfig(image=ImageSettings(height_px=24, width_px=32), augment=AugmentSettings())
    loader, module = Loader(config, images, device=torch.device("cpu"), decode="cpu"), Scored().train()
    evaluate(
        module,
        loader,
        np.arange(8),
        batch_size=4,
        autocast=nullcontext,
        save_figures=lambda plots, samples: None,
        with_samples=True,
        compare=lambda rows: modes.append(module.training),
    )
    assert modes == [False] * 5 and module.training
