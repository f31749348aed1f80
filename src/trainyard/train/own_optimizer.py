"""Builds the optimizer and the learning-rate schedule that a family brings, and checks them before the first step."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainyard.choice import Choice
from trainyard.config.families import describe_value, locate_code
from trainyard.config.settings import TrainConfig
from trainyard.errors import ContractError
from trainyard.text import join_names
from trainyard.train.module import TrainModule

_FACTOR = "a function of the step that returns the learning rate divided by its peak, a number from 0"


def is_own(module: TrainModule, method: str) -> bool:
    """Return whether a family brings this optional method of `TrainModule`."""
    return getattr(type(module), method) is not getattr(TrainModule, method)


def describe_own(module: TrainModule, optimizer: torch.optim.Optimizer) -> dict[str, Choice[str]]:
    """Describe the family's replacements of `optimizer.name` and `schedule.name`, to be recorded."""
    methods = {"optimizer": type(optimizer).__name__, "schedule": "the family's own"}
    return {
        name: Choice(value, f"{type(module).__name__}.build_{name}")
        for name, value in methods.items()
        if is_own(module, f"build_{name}")
    }


def build_own_optimizer(
    module: TrainModule, groups: list[dict[str, Any]], config: TrainConfig
) -> torch.optim.Optimizer:
    """Return what `build_optimizer` returns.

    Raises:
        UserError: it is no optimizer of these groups whose learning rate each step can set, or an option has no effect.
    """
    where, (settings, read) = locate_code(module.build_optimizer), _note_reads(config.optimizer)
    optimizer = module.build_optimizer([{**group} for group in groups], replace(config, optimizer=settings))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ContractError(f"{where} returned {describe_value(optimizer)}; expected a torch.optim.Optimizer.")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise ContractError(
            f"{where}: {type(optimizer).__name__}.step is called without arguments, when the gradients are there: "
            f"{error}. Use another optimizer."
        ) from None
    _check_groups(module, groups, optimizer, lr=config.optimizer.lr)
    read |= {"lr"} | ({"weight_decay"} & optimizer.defaults.keys())  # which a step sets, and groups state
    _check_read(where, "optimizer", config.optimizer, read)
    return optimizer


def build_own_schedule(
    module: TrainModule, config: TrainConfig, *, total_steps: int | None, steps_per_epoch: int
) -> Callable[[int], float]:
    """Return what `build_schedule` returns, with a check of each number that it gives.

    Raises:
        UserError: it is no function of the step that returns numbers, or an option has no effect.
    """
    where, (settings, read) = locate_code(module.build_schedule), _note_reads(config.schedule)
    factor = module.build_schedule(
        replace(config, schedule=settings), total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    if not callable(factor):
        raise ContractError(f"{where} returned {describe_value(factor)}; expected {_FACTOR}.")
    last = math.inf if total_steps is None else max(1, total_steps) - 1
    schedule = partial(_compute_factor, factor, where, last)
    for step in (0, 0 if total_steps is None else total_steps):
        schedule(step)
    # A length in minutes needs schedule.name=constant, because the other shapes need the number of steps.
    _check_read(where, "schedule", config.schedule, read if total_steps is not None else read | {"name"})
    return schedule


def copy_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the tensors and numbers that an optimizer has outside of its state and groups, for `check_kept_state`."""
    attributes = vars(optimizer).items()
    plain = {name: value for name, value in attributes if isinstance(value, Tensor) or type(value) in (int, float)}
    plain.pop("found_inf", None)  # which a step sets
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in plain.items()}


def check_kept_state(module: TrainModule, optimizer: torch.optim.Optimizer, before: Mapping[str, Any]) -> None:
    """Check, after the first step, that a checkpoint keeps all that the step of a family's own optimizer changes.

    Args:
        before: what `copy_attributes` returned before the step.

    Raises:
        UserError: the state has something else than tensors, numbers and text, or an attribute changed.
    """
    where = locate_code(module.build_optimizer)
    for name, value in copy_attributes(optimizer).items():
        if name not in before or not torch.equal(torch.as_tensor(value), torch.as_tensor(before[name])):
            raise ContractError(
                f"{where}: a step of {type(optimizer).__name__} changes self.{name}, which no checkpoint keeps. "
                "Keep it in self.state[parameter] or in a group."
            )
    entries = [entry for values in optimizer.state.values() for entry in values.items()]
    options = [(name, leaf) for group in optimizer.param_groups for name in group for leaf in tree_leaves(group[name])]
    for name, value in [*entries, *options]:
        if not isinstance(value, Tensor) and type(value) not in (int, float, bool, str, type(None)):
            raise ContractError(
                f"{where}: '{name}' in the state of {type(optimizer).__name__} is "
                f"{describe_value(value)}; expected a tensor, a number or text, which a checkpoint can keep."
            )


def _check_groups(
    module: TrainModule, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, lr: float
) -> None:
    where = locate_code(module.build_optimizer)
    given, held = (
        {id(parameter): group for group in listed for parameter in group["params"]}
        for listed in (groups, optimizer.param_groups)
    )
    trained = {name: id(parameter) for name, parameter in module.named_parameters() if id(parameter) in given}
    if forgotten := [name for name, key in trained.items() if key not in held]:
        raise ContractError(
            f"{where} leaves out {join_names(forgotten)}, which would never train. Pass the optimizer all of `groups`."
        )
    for name, key in trained.items():
        own_lr, scales = held[key].get("lr"), [group.get("lr_scale", 1.0) for group in (given[key], held[key])]
        if own_lr != lr:
            raise ContractError(
                f"{where}: the optimizer's group with {name} has lr={own_lr}, but each step sets optimizer.lr={lr:g} "
                'times the schedule. Pass lr=config.optimizer.lr; other rates are "lr_scale" in parameter_groups.'
            )
        if scales[0] != scales[1]:
            raise ContractError(
                f"{where}: {name} has lr_scale={scales[0]} in its group, but lr_scale={scales[1]} in the optimizer's. "
                "Pass the optimizer `groups`, not their parameters."
            )


def _compute_factor(factor: Callable[[int], Any], where: str, last: float, step: int) -> float:
    step = int(min(step, last))  # `doctor` takes more steps than a short run has
    value = factor(step)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ContractError(f"{where}: its result gives {describe_value(value)} for step {step}; expected {_FACTOR}.")
    return number


def _note_reads(settings: Any) -> tuple[Any, set[str]]:
    """Return a copy of a group of options, and a set to which the name of each that is read will be added."""
    read: set[str] = set()

    class Noted(type(settings)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    return Noted(**vars(settings)), read


def _check_read(where: str, group: str, settings: Any, read: set[str]) -> None:
    """Raise a UserError if an option has another value than its default, and nothing read it."""
    default = type(settings)()
    names = [f.name for f in fields(settings) if f.name not in read]
    if unread := [name for name in names if getattr(settings, name) != getattr(default, name)]:
        listed = join_names([f"{group}.{name}={getattr(settings, name)}" for name in unread])
        raise ContractError(
            f"{where} does not use {listed}. Leave {'it' if len(unread) == 1 else 'them'} out of the preset and the "
            f"command, or read config.{group}.{unread[0]} there."
        )
