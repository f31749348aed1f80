"""Compares the predicted memory of a step with what the CPU allocator gives out during the same step."""

import json
import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.memory import get_lengths, measure_peak
from trainyard.config import compose as configs
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.hardware import Precision
from trainyard.plan.memory import FRAGMENTS_SHARE, StepConfig, StepPrediction
from trainyard.plan.predict import Predictor
from trainyard.train.module import DataInfo
from trainyard.train.precision import make_autocast
from trainyard.train.run_state import build_state, recompute_layers
from trainyard.train.step import TrainState, train_step

JOBS = Path(__file__).resolve().parents[1] / "jobs"
TEST_FAMILIES = Path(__file__).parent / "families"
FAMILIES = ("antispoof", "fingerprint", "pricing", "tinydet", "twins")
MOST_ERROR = 0.1
CPU = torch.device("cpu")
ROWS = os.environ.get("TRAINYARD_MEMORY_ROWS", "")
"""A file to which each comparison is added, for a table."""


def prepare(job: str, root: Path, *overrides: str) -> TrainConfig:
    """Return a preset with as few synthetic samples as the family's smallest preset, packed."""
    count = configs.compose(f"{job.split('_')[0]}_smoke", [], JOBS).data.synthetic
    return prepare_data(configs.compose(job, [f"data.synthetic={count}", f"data.cache={root}", *overrides], JOBS), JOBS)


def take_measured_step(predictor: Predictor, setting: StepConfig) -> tuple[int, dict[str, torch.Tensor]]:
    """Take a real step, the second of a new run; return the most that it had allocated at once, and its micro-batch."""
    config = predictor.config
    precision = Precision(setting.dtype, setting.dtype == "fp16", False, setting.channels_last, False, {})
    torch.manual_seed(0)
    info = DataInfo.from_shards(predictor.data, predictor.train_ids)
    module = load_family(JOBS, config.family, "module").build(config, info)
    module.to(memory_format=torch.channels_last if setting.channels_last else torch.contiguous_format)
    state = build_state(module, config, scaler=torch.amp.GradScaler("cpu", enabled=precision.loss_scaling))
    if setting.recompute:
        recompute_layers(module, config)
    loader = Loader(config, predictor.data, device=CPU, decode="cpu", channels_last=setting.channels_last)
    with closing(loader.evaluate(predictor.train_ids[: setting.micro_batch], batch_size=setting.micro_batch)) as stream:
        batch = dict(next(stream).batch)
    batch |= {"noise": torch.rand(setting.micro_batch, 32), "samples_seen": torch.zeros((), dtype=torch.int64)}
    count = 2 if setting.accumulates else 1
    parts = [MicroBatch(batch, weight=1 / count, last=number == count, wait_s=0.0) for number in range(1, count + 1)]
    take_step(state, parts, config, precision)
    state.optimizer.zero_grad(set_to_none=True)
    return measure_peak(CPU, lambda: take_step(state, parts, config, precision)), batch


def take_step(state: TrainState, parts: list[MicroBatch], config: TrainConfig, precision: Precision) -> None:
    train_step(
        state,
        parts,
        lr=1e-3,
        world_size=1,
        seed=0,
        clip_grad_norm=config.clip_grad_norm,
        autocast=make_autocast(precision, CPU),
    )


def compare(predictor: Predictor, setting: StepConfig) -> tuple[float, StepPrediction]:
    """Return the predicted over the observed memory that a step takes beyond what stays."""
    observed, batch = take_measured_step(predictor, setting)
    predicted = predictor.predict_batch(setting, batch, get_lengths(batch))
    ratio = predicted.activations / observed
    if ROWS:
        row = {
            "job": predictor.config.job, **vars(setting), "predicted": predicted.activations, "observed": observed,
            "fixed": predicted.parameters + predicted.optimizer + predicted.buffers + predicted.averages,
            "ratio": ratio,
        }  # fmt: skip
        with Path(ROWS).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return ratio, predicted


def make_setting(micro_batch: int, **changes: Any) -> StepConfig:
    return StepConfig(
        **{
            "device": "cpu",
            "dtype": "fp32",
            "channels_last": True,
            "recompute": False,
            "micro_batch": micro_batch,
            "accumulates": False,
            **changes,
        }
    )


def is_close(ratio: float) -> bool:
    """Return whether a prediction is near the truth, and optimistic by no more than the reserve for fragments."""
    return math.isclose(ratio, 1, abs_tol=MOST_ERROR) and ratio > 1 - FRAGMENTS_SHARE


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fingerprint", "pricing"])
def test_a_predicted_step_takes_as_much_as_the_allocator_gives_out(family, cache):
    predictor = Predictor(prepare(f"{family}_smoke", cache), JOBS)
    ratio, _ = compare(predictor, make_setting(8))
    assert is_close(ratio), ratio


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_of_the_demos_hold_at_three_micro_batches(family, cache):
    predictor = Predictor(prepare(f"{family}_demo", cache), JOBS)
    ratios = {size: compare(predictor, make_setting(size))[0] for size in (4, 8, 16)}
    assert all(map(is_close, ratios.values())), ratios


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"recompute": True}, {"accumulates": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_hold_in_half_precision_with_recomputation_and_over_two_micro_batches(family, changes, cache):
    predictor = Predictor(prepare(f"{family}_demo", cache), JOBS)
    setting = make_setting(8, **changes)
    if "recompute" in changes and predictor.predict(setting).refused:
        pytest.skip(f"{family}: no layers to recompute")
    ratio, _ = compare(predictor, setting)
    assert is_close(ratio), ratio


@pytest.mark.slow
def test_a_step_that_reads_values_is_not_predicted_and_says_so(tmp_path):
    reads_values = ("model.full_above=100", f"data.cache={tmp_path}")
    config = prepare_data(configs.compose("stripes", [*reads_values], TEST_FAMILIES), TEST_FAMILIES)
    setting = StepConfig("cpu", "fp32", False, False, 4, accumulates=False)
    refused = Predictor(config, TEST_FAMILIES).predict(setting).refused
    assert "a step of family stripes reads values" in refused


@pytest.mark.slow
def test_layers_are_recomputed_with_the_types_of_their_forward_pass_on_a_gpu(cache):
    # Its layers normalise what a product has returned: in float32 on a GPU, and in half precision on the CPU.
    predictor = Predictor(prepare("tinydet_smoke", cache, "model.variant=vanilla", "model.strides=[8]"), JOBS)
    kept, recomputed = (
        predictor.predict(StepConfig("cuda", "fp16", False, recompute, 8, accumulates=False))
        for recompute in (False, True)
    )
    assert recomputed.refused == "" and recomputed.activations <= kept.activations
