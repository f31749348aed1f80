"""Checks the values that a family's module returns the first time that it is called, and names its file and line."""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from trainyard.config.families import describe_value, forbid_own_randomness, load_family, locate_code, require_mapping
from trainyard.config.settings import TrainConfig
from trainyard.errors import ContractError
from trainyard.text import join_names
from trainyard.train.module import Batch, DataInfo, Histogram, Signature, TrainModule
from trainyard.train.out_of_memory import name_phase

_FORWARD = '{"loss": () of the graph, ...}, each a scalar tensor'
_PREDICT = '{"sample_id": (B,), ...}, each a tensor with a row for each of the B samples'
_SEEDED = "torch's, which is seeded for each step, or the batch's `noise`"
_TRAINING_ONLY = ("noise", "epoch", "samples_seen")


def build_module(jobs_dir: Path, config: TrainConfig, info: DataInfo) -> TrainModule:
    """Build the module of a family.

    Raises:
        UserError: `build` returns something else.
    """
    build = load_family(jobs_dir, config.family, "module").build
    module = build(config, info)
    if not isinstance(module, TrainModule):
        raise ContractError(f"{locate_code(build)} returned {describe_value(module)}; expected a TrainModule.")
    return module


def copy_module(module: TrainModule) -> TrainModule:
    """Copy a module.

    Raises:
        UserError: a part of it cannot be copied, such as a lock or an open file.
    """
    try:
        return copy.deepcopy(module)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        for layer in module.modules():
            for name, value in vars(layer).items():
                if not name.startswith("_"):
                    _require_copy(type(layer), name, value)
        raise


def _require_copy(kind: type, name: str, value: Any) -> None:
    try:
        copy.deepcopy(value)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ContractError(
            f"{inspect.getfile(kind)}: {kind.__name__}: '{name}' is {type(value).__name__}, which cannot be copied, as "
            f"averaging weights and trying a batch need: {error}. Make it where it is used"
        ) from None


def compute_first_losses(
    module: TrainModule, model: Callable[[Batch], dict[str, Tensor]], batch: Batch
) -> dict[str, Tensor]:
    """Return what `forward` returns for the first batch, of `model`: the module, or what wraps it.

    Raises:
        UserError: it is not scalar tensors with a loss that has a gradient, or is random in a way that no run repeats.
    """
    with forbid_own_randomness(locate_code(module.forward), _SEEDED):
        losses = model(batch)
    check_losses(module, losses)
    return losses


def check_losses(module: nn.Module, returned: Any) -> None:
    """Raise a UserError unless `forward` returned scalar tensors with a loss that has a gradient."""
    where = locate_code(module.forward)
    for name, value in require_mapping(module.forward, returned, _FORWARD, key="loss").items():
        if not isinstance(value, Tensor) or value.ndim:
            raise ContractError(f"{where}: '{name}' is {describe_value(value)}; expected {_FORWARD}.")
    if not returned["loss"].requires_grad:
        raise ContractError(
            f"{where}: the loss has no gradient. Do not detach it, compute it from tensors, and leave some parameter "
            "that can learn."
        )


def try_gradients(
    module: TrainModule, batch: Batch, autocast: Callable[[], AbstractContextManager[None]]
) -> TrainModule:
    """Return a copy of the module with the gradients of a batch; neither the module nor the batch changes.

    Raises:
        UserError: as `compute_first_losses` and `copy_module`.
    """
    given = {name: values.clone() for name, values in batch.items()}
    with name_phase("trial of the first micro-batch"):
        tried = copy_module(module)
        with autocast():
            loss = compute_first_losses(tried, tried, given)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
    return tried


def list_without_gradient(module: nn.Module) -> list[str]:
    """Return the names of the parameters that train, but have no gradient."""
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def check_gradients(module: nn.Module, *, needs_all: bool) -> None:
    """Find parameters that the first step gave no gradient, so that they do not train.

    Raises:
        UserError: `needs_all`: ranks wait for each other's gradients of all parameters.
    """
    unused = list_without_gradient(module)
    if not unused:
        return
    message = (
        f"{locate_code(module.forward)}: its loss gives {join_names(unused)} no gradient, so "
        f"{'it does' if len(unused) == 1 else 'they do'} not train. Use them, or remove or freeze them: "
        "parameter.requires_grad_(False)"
    )
    if needs_all:
        raise ContractError(f"{message}. If other batches use them: find_unused_parameters=on")
    logger.warning(message)


@torch.inference_mode()
def try_predict(module: TrainModule, batch: Batch, autocast: Callable[[], AbstractContextManager[None]]) -> None:
    """Check what `predict` returns for two samples, on a copy of the module, without what only training batches have.

    Raises:
        UserError: it is not a row for each sample, or is not what `describe_predict` says.
    """
    tried = copy_module(module).eval()
    given = {name: values[:2].clone() for name, values in batch.items() if name not in _TRAINING_ONLY}
    with autocast():
        rows = tried.predict(dict(given))
    check_rows(tried, rows, len(given["sample_id"]))
    if type(tried).describe_predict is TrainModule.describe_predict:
        return
    described, where = tried.describe_predict(), locate_code(tried.describe_predict)
    if not isinstance(described, Signature):
        raise ContractError(f"{where} returned {describe_value(described)}; expected a Signature.")
    for named, known, what in (
        (described.outputs, rows, "predict returns"),
        (described.inputs, given, "a batch has"),
    ):
        if unknown := [name for name in named if name not in known]:
            raise ContractError(f"{where} names {join_names(unknown)}, but {what} {join_names(list(known), most=20)}.")


def check_rows(module: nn.Module, returned: Any, samples: int) -> None:
    """Raise a UserError unless `predict` returned a row for each of the batch's samples."""
    for name, value in require_mapping(module.predict, returned, _PREDICT, key="sample_id").items():
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
            where = locate_code(module.predict)
            raise ContractError(
                f"{where}: '{name}' is {describe_value(value)} for a batch of {samples}; expected {_PREDICT}."
            )


def check_scores(score: Callable[..., Any], returned: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of `score`, and what it returned to be shown, as a line of metrics stores it: text by name,
    and of a histogram the `edges` of its bins and the `counts` in them, without values that are not finite.

    Raises:
        UserError: anything else is among them.
    """
    named = require_mapping(score, returned, "a number, a text or a Histogram for each metric, by its name")
    shown: dict[str, Any] = {name: value for name, value in named.items() if isinstance(value, str)}
    for name, value in named.items():
        if isinstance(value, Histogram):
            values = np.asarray(value.values, np.float64)
            counts, edges = np.histogram(values[np.isfinite(values)], bins=_BINS)
            shown[name] = {"edges": edges.tolist(), "counts": counts.tolist()}
    return check_metrics(score, {name: value for name, value in named.items() if name not in shown}), shown


_BINS = 50


def check_metrics(score: Callable[..., Any], returned: Any) -> dict[str, float]:
    """Return the metrics that a method such as `score` returned.

    Raises:
        UserError: they are no numbers by name.
    """
    metrics = {}
    for name, value in require_mapping(score, returned, "a number for each metric, by its name").items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ContractError(
                f"{locate_code(score)}: '{name}' is {describe_value(value)}; expected a number."
            ) from None
    return metrics


def check_figures(draw: Callable[..., Any], returned: Any) -> dict[str, bytes]:
    """Return the images that `report_figures` or `sample_figures` returned.

    Raises:
        UserError: they are no PNG files by title.
    """
    for title, png in require_mapping(draw, returned, "the bytes of a PNG for each title").items():
        if not isinstance(png, bytes) or not png.startswith(b"\x89PNG"):
            raise ContractError(
                f"{locate_code(draw)}: '{title}' is {describe_value(png)}; expected the bytes of a PNG."
            )
    return dict(returned)
