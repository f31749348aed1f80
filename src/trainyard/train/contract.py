"""Checks what a family's module returns the first time that it is called, and names the family's file and line."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from loguru import logger
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.text import join_names

_FORWARD = 'expected {"loss": () of the graph, ...}, each a scalar tensor'
_PREDICT = 'expected {"sample_id": (B,), ...}, each a tensor with a row for each of the B samples'


def find_method(module: nn.Module, name: str) -> str:
    """Return where a method of a module is written: 'jobs/mine/module.py:12: Model.forward'."""
    kind = type(module)
    method = inspect.unwrap(getattr(kind, name))
    return f"{inspect.getsourcefile(method)}:{method.__code__.co_firstlineno}: {kind.__name__}.{name}"


def check_losses(module: nn.Module, found: Any) -> None:
    """Raise a UserError unless `forward` returned scalar tensors with a loss that has a gradient."""
    where = find_method(module, "forward")
    if not isinstance(found, Mapping):
        raise UserError(f"{where} returned {_describe(found)}; {_FORWARD}.")
    if "loss" not in found:
        raise UserError(f"{where} returned {join_names(list(map(str, found))) or 'nothing'}; {_FORWARD}.")
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.ndim:
            raise UserError(f"{where}: '{name}' is {_describe(value)}; {_FORWARD}.")
    if not found["loss"].requires_grad:
        raise UserError(
            f"{where}: the loss has no gradient. Do not detach it, compute it from tensors, and leave some parameter "
            "that can learn."
        )


def check_gradients(module: nn.Module, *, world_size: int) -> None:
    """Say which parameters the first step gave no gradient, so that they do not train.

    Raises:
        UserError: there are several ranks, which wait for each other's gradients.
    """
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return
    said = (
        f"{find_method(module, 'forward')}: its loss gives {join_names(unused)} no gradient, so "
        f"{'it does' if len(unused) == 1 else 'they do'} not train. Use, remove or freeze what is not needed: "
        "parameter.requires_grad_(False)"
    )
    if world_size > 1:
        raise UserError(said)
    logger.warning(said)


def check_rows(module: nn.Module, found: Any, samples: int) -> None:
    """Raise a UserError unless `predict` returned a row for each of the batch's samples."""
    where = find_method(module, "predict")
    if not isinstance(found, Mapping):
        raise UserError(f"{where} returned {_describe(found)}; {_PREDICT}.")
    if "sample_id" not in found:
        raise UserError(f"{where} returned {join_names(list(map(str, found))) or 'nothing'}; {_PREDICT}.")
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
            raise UserError(f"{where}: '{name}' is {_describe(value)} for a batch of {samples}; {_PREDICT}.")


def check_metrics(module: nn.Module, found: Any) -> dict[str, float]:
    """Return the metrics that `score` returned.

    Raises:
        UserError: they are no numbers by name.
    """
    where = find_method(module, "score")
    if not isinstance(found, Mapping):
        raise UserError(f"{where} returned {_describe(found)}; expected a number for each metric, by its name.")
    metrics = {}
    for name, value in found.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{where}: '{name}' is {_describe(value)}; expected a number.") from None
    return metrics


def _describe(value: Any) -> str:
    if value is None:
        return "nothing (is a `return` forgotten?)"
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {value!r:.40}" if isinstance(value, int | float | str) else type(value).__name__
