"""Predicts the memory of a job's steps on given cards, and writes it for `plan.memory`, which stores it.

Loads torch, so `plan.memory` starts it as a process.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from trainyard.config.compose import apply_overrides, compose, load_config
from trainyard.config.families import load_family
from trainyard.config.settings import StoreSettings, TrainConfig
from trainyard.data.loader import Loader
from trainyard.data.prepare import is_packed, prepare_data
from trainyard.data.shards import ShardSet
from trainyard.data.splits import find_splits
from trainyard.errors import UserError
from trainyard.hardware import Precision, get_gpu
from trainyard.plan.memory import StepConfig, StepPrediction, choose_fit, find_cache, open_cache
from trainyard.terminal import say
from trainyard.train.contract import build_module
from trainyard.train.module import DataInfo, TrainModule
from trainyard.train.precision import make_autocast
from trainyard.train.run_context import TRAIN
from trainyard.train.run_state import build_state, recompute_layers
from trainyard.train.step import TrainState
from trainyard.train.step_memory import (
    VALUES_ARE_READ,
    cast_layers_as_on_gpu,
    compute_without_values,
    list_axes,
    predict_step,
    read_template,
    resize_batch,
)


class Predictor:
    """Predicts steps of one job. Parts that no micro-batch changes are built once for settings in a row."""

    def __init__(self, config: TrainConfig, jobs_dir: Path) -> None:
        self.config, self.jobs_dir = config, jobs_dir
        self.data = ShardSet(Path(config.data.path))
        pack = load_family(jobs_dir, config.family, "pack")
        self.train_ids = find_splits(pack, self.data, config)[TRAIN]
        self._modules: dict[bool, TrainModule] = {}  # by whether activations are recomputed
        loader = Loader(config, self.data, device=torch.device("cpu"), decode="cpu")
        self._template = read_template(loader, self.train_ids)
        self._axes = list_axes(self.data, self.train_ids, config.image)

    def predict(self, setting: StepConfig) -> StepPrediction:
        """Return the prediction of a setting, for the longest samples of the data and the largest images."""
        return self.predict_batch(setting, self._template, self._axes)

    def predict_batch(
        self, setting: StepConfig, batch: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, int]]
    ) -> StepPrediction:
        """Return the prediction of a setting for micro-batches like this one.

        Args:
            batch: of any number of samples.
            axes: lengths of other axes than the first, by name and axis.
        """
        precision = Precision(setting.dtype, setting.dtype == "fp16", False, setting.channels_last, False, {})
        try:
            module = self._build_module(setting)
            with compute_without_values(module) as copied:
                step = predict_step(
                    self._build_state(copied, setting, precision),
                    resize_batch(batch, samples=setting.micro_batch, axes=axes, channels_last=setting.channels_last),
                    micro_batches=2 if setting.accumulates else 1,
                    clip_grad_norm=self.config.clip_grad_norm,
                    autocast=make_autocast(precision, torch.device("cpu")),
                    on_gpu=setting.device == "cuda",
                )
        except UserError as error:
            return StepPrediction(refused=str(error))
        except VALUES_ARE_READ as error:
            return StepPrediction(
                refused=f"a step of family {self.config.family} reads values, as tensor.item() does, or makes tensors "
                f"whose size depends on them, so its memory cannot be predicted without taking it: {error.func}"
            )
        return StepPrediction(**asdict(step))

    def _build_module(self, setting: StepConfig) -> TrainModule:
        recompute = setting.recompute
        if recompute not in self._modules:
            config = replace(self.config, gradient_checkpointing=recompute)
            info = DataInfo.from_shards(self.data, self.train_ids)
            self._modules[recompute] = build_module(self.jobs_dir, config, info)
        layout: Any = torch.channels_last if setting.channels_last else torch.contiguous_format
        return self._modules[recompute].to(memory_format=layout)  # type: ignore[call-overload, no-any-return]

    def _build_state(self, module: TrainModule, setting: StepConfig, precision: Precision) -> TrainState:
        scaler = torch.amp.GradScaler("cpu", enabled=precision.loss_scaling)
        state = build_state(module, self.config, scaler=scaler)
        if setting.recompute:
            if setting.device == "cuda":
                cast_layers_as_on_gpu(module)
            recompute_layers(module, self.config)
        return state


def main(config: str, jobs: str, out: str, gpus: str, *cards: str) -> int:
    """Predict the steps that splitting a job's global batch on some cards needs, and write them; return the exit code.

    Args:
        config: file with all options of the job, as in a run folder.
        jobs: folder of families.
        out: file for the predictions.
    """
    logger.remove()  # what models log while they are built is about training
    try:
        _predict_splits(load_config(Path(config), Path(jobs)), Path(jobs), Path(out), cards, gpus=int(gpus))
    except UserError as error:
        say(error, file=sys.stderr)
        return 2
    return 0


def _predict_splits(config: TrainConfig, jobs_dir: Path, out: Path, cards: Sequence[str], *, gpus: int) -> None:
    predictions = replace(open_cache(config, jobs_dir, os.environ), path=out)
    packed = config if is_packed(config) else _prepare_synthetic_data(config, jobs_dir)
    predictor = Predictor(packed, jobs_dir)
    synthetic = f"{predictor.data.count} synthetic samples"
    predictions.about["data"] = str(packed.data.path) if is_packed(config) else synthetic

    def predict(setting: StepConfig) -> StepPrediction:
        # A step in bf16 takes as much as one in fp16, less the copies of buffers for a step that loss scaling skips.
        as_fp16 = replace(setting, dtype="fp16") if setting.dtype == "bf16" else setting
        for step in (as_fp16, setting):
            if step not in predictions.steps:
                predictions.steps[step] = predictions.steps.get(as_fp16) or predictor.predict(step)
        return predictions.steps[setting]

    for key in cards:
        card = get_gpu(key)
        assert card is not None, key
        with suppress(UserError):  # this card cannot compute as the config says: whoever asks will be told
            choose_fit(config, card, gpus=gpus, predict=predict)
    predictions.save()


def _prepare_synthetic_data(config: TrainConfig, jobs_dir: Path) -> TrainConfig:
    """Return the config with a few samples as its family synthesizes them: the content of their batches is known."""
    count = compose(f"{config.family}_smoke", [], jobs_dir).data.synthetic
    overrides = ["data.path=", f"data.synthetic={count}", f"data.cache={find_cache(os.environ) / 'data'}"]
    if isinstance(getattr(config, "packing", None), StoreSettings):
        overrides.append("packing.store=keep")  # batches are the same, and packing is quicker
    return prepare_data(apply_overrides(config, overrides), jobs_dir)
