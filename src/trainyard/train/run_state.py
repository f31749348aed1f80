"""Builds the state of a run, encodes it for a checkpoint and restores it from one."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from trainyard.choice import Choice
from trainyard.config.settings import TrainConfig
from trainyard.data.loader import MicroBatch
from trainyard.errors import UserError
from trainyard.runs.folder import record_choices, update_env
from trainyard.runs.manifest import MOST, CheckpointError
from trainyard.text import quote_path
from trainyard.train import checkpoint, distributed
from trainyard.train.best import Plateau
from trainyard.train.compiled_layers import begin_step_of_graphs, compile_layers
from trainyard.train.data_parallel import choose_unused_search, wrap_in_ddp
from trainyard.train.module import TrainModule
from trainyard.train.own_optimizer import is_own
from trainyard.train.run_context import RunContext
from trainyard.train.step import (
    Progress,
    StepLosses,
    TrainState,
    build_optimizer,
    check_running_statistics,
    copy_for_average,
    enable_activation_checkpointing,
)
from trainyard.train.swa import WeightAverage
from trainyard.train.warm_start import start_from_weights


def prepare_state(context: RunContext) -> tuple[TrainState, int | None]:
    """Build the state: of the newest valid checkpoint if there is one, else of the weights that the run starts from.

    Returns:
        The state, and the length of the metrics file at that checkpoint (None for a new run).
    """
    found = load_newest_checkpoint(context.run, is_main=context.world.is_main)
    if found is None:
        start_from_weights(context)
    layout: Any = torch.channels_last if context.precision.channels_last else torch.contiguous_format
    module, config = context.module.to(context.device), context.config
    module.to(memory_format=layout)  # type: ignore[call-overload]
    scaler = torch.amp.GradScaler(context.device.type, enabled=context.precision.loss_scaling)
    state = build_state(module, config, scaler=scaler)
    if found is not None:
        restore_state(state, found[1], fingerprint=context.data.fingerprint, path=found[0])
    if context.precision.loss_scaling and context.world.is_main:
        saved = found is not None and bool(found[1]["scaler"])
        reason = "of the checkpoint" if saved else "torch's first value: no step with loss scaling is behind it"
        update_env(context.run, "choices", {"loss_scale": {"value": state.scaler.get_scale(), "reason": reason}})
    if config.gradient_checkpointing:
        recompute_layers(module, config)
    if config.gradient_checkpointing and context.precision.compile:
        check_running_statistics(module, torch.__version__)
    if context.precision.compile:
        _compile_layers(context, module)
    if context.precision.cuda_graphs:
        state.begin_step = begin_step_of_graphs
    return state, None if found is None else found[1]["metrics_position"]


def load_newest_checkpoint(run: Path, *, is_main: bool) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest valid checkpoint on every rank; None without one.

    Rank 0 alone hashes it, and then all read it at the same time, so that a node reads it once from its file system.
    """
    entry = checkpoint.find_newest_valid(run / "checkpoints") if is_main else None
    path = distributed.broadcast_from_rank0(None if entry is None else entry.path)
    if path is None:
        return None
    logger.info("resuming from {}", path.name)
    return path, checkpoint.read_verified(path)


def build_state(module: TrainModule, config: TrainConfig, *, scaler: torch.amp.GradScaler) -> TrainState:
    """Return the state in which training starts from scratch, of a module that is on its device."""
    module.train()
    return TrainState(
        module=module,
        model=module,
        optimizer=build_optimizer(module, config),
        scaler=scaler,
        ema=copy_for_average(module) if config.ema_decay else None,
        ema_decay=config.ema_decay,
        swa=WeightAverage(copy_for_average(module)) if config.swa else None,
    )


def recompute_layers(module: TrainModule, config: TrainConfig) -> None:
    """Enable activation checkpointing.

    Raises:
        UserError: the module names no layers to recompute.
    """
    if not enable_activation_checkpointing(module):
        raise UserError(
            f"gradient_checkpointing=true, but the model of {config.family} names no repeated layers to recompute."
        )


def encode_state(
    state: TrainState, *, fingerprint: str, metrics_position: int, artifacts: Mapping[str, str]
) -> dict[str, Any]:
    """Return everything a resume needs, as tensors, numbers, strings and None."""
    return {
        "model": state.module.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "ema": None if state.ema is None else state.ema.state_dict(),
        "swa": None if state.swa is None else state.swa.state_dict(),
        "progress": asdict(state.progress),
        "best": state.best,
        "plateau": asdict(state.plateau),
        "step_losses": state.step_losses.summed,
        "data": fingerprint,
        "artifacts": dict(artifacts),  # so that the weights can be used without the packed data
        "metrics_position": metrics_position,
    }


def restore_state(state: TrainState, saved: Mapping[str, Any], *, fingerprint: str, path: Path) -> None:
    """Restore a state from what `encode_state` returned.

    Args:
        path: the file that it was loaded from.

    Raises:
        CheckpointError: something is missing in it, or does not fit this run's model.
        UserError: it belongs to other data.
    """
    with explain_misfit(path):
        _check_fields(saved)
    if saved["data"] != fingerprint:
        raise UserError(
            "This run was trained on other data than those found now (the packed index differs). "
            "Put the packed data back, or start a new run."
        )
    with explain_misfit(path):
        state.module.load_state_dict(saved["model"])
        state.optimizer.load_state_dict(saved["optimizer"])
        if not is_own(state.module, "build_optimizer"):
            _check_moments(state.optimizer)
        _restore_moments(state.optimizer, saved["optimizer"])
        if saved["scaler"]:  # empty if it was saved with a precision that needs no loss scaling
            state.scaler.load_state_dict(saved["scaler"])
        if state.ema is not None:
            state.ema.load_state_dict(saved["ema"])
        if state.swa is not None:
            state.swa.load_state_dict(saved["swa"])
        state.progress = Progress(**saved["progress"])
        state.best = saved["best"]
        state.plateau = Plateau(**saved["plateau"])
        state.step_losses = StepLosses(saved["step_losses"])


@contextmanager
def explain_misfit(path: Path) -> Iterator[None]:
    """Turn what torch raises for a state that does not fit into one sentence about the checkpoint `path`.

    Raises:
        CheckpointError: instead of it.
    """
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        reason = f"it lacks {reason}" if isinstance(error, KeyError) else reason
        raise CheckpointError(
            f"{path}: undamaged, but it does not fit this run: {reason}. Resume with the code that wrote it (its "
            "commit is in env.json), or from the checkpoint before it: "
            f"mv {quote_path(path)} {quote_path(path)}.refused"
        ) from error


def _check_fields(saved: Mapping[str, Any]) -> None:
    """Raise an error that names the first field that is missing or of another kind."""
    for name, kinds in _FIELDS.items():
        if type(saved[name]) not in kinds:
            raise TypeError(f"'{name}' is {saved[name]!r:.60}, expected {kinds[0].__name__}")
    evaluations, value = saved["plateau"]["evaluations"], saved["plateau"]["value"]
    if type(value) not in (float, int, type(None)):
        raise TypeError(f"'plateau' has the value {value!r:.60}, expected a number")
    counts = {"metrics_position": saved["metrics_position"], "evaluations": evaluations, **saved["progress"]}
    for name, count in counts.items():
        is_number = type(count) is int or (name == "train_s" and type(count) is float and math.isfinite(count))
        if not is_number or not 0 <= count < MOST:
            raise ValueError(f"'{name}' is {count!r:.60}, expected a number from 0 to 2**63")
    losses = saved["step_losses"]
    if any(type(loss) is not float for loss in losses):
        raise TypeError(f"'step_losses' is {losses!r:.60}, expected a list of numbers")
    best = saved["best"]
    if best is not None and [type(best[name]) for name in ("step", "metric", "value")] != [int, str, float]:
        raise TypeError(f"'best' is {best!r:.60}, expected a step, a metric and its value")


_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (OrderedDict, dict),
    "optimizer": (dict,),
    "scaler": (dict,),
    "progress": (dict,),
    "best": (dict, type(None)),
    "plateau": (dict,),
    "step_losses": (list,),
    "data": (str,),
    "metrics_position": (int,),
}


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if the statistics of a parameter have another shape: torch does not look until it uses them."""
    for parameter, statistics in optimizer.state.items():
        for name, value in statistics.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(f"'{name}' has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def _restore_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the statistics of each parameter its strides, and their own data types, which torch does not keep.

    Fused kernels go through memory, not through indices, and the strides come from the hardware that saved them, where
    convolution weights may have been NHWC.
    """
    held, numbers = (
        itertools.chain.from_iterable(group["params"] for group in groups)
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    for parameter, number in zip(held, numbers, strict=True):
        statistics = optimizer.state.get(parameter, {})
        for name, value in statistics.items():
            source = saved["state"][number][name]
            if not isinstance(value, Tensor):
                continue
            if source.shape == parameter.shape and source.stride() != parameter.stride():
                statistics[name] = torch.empty_like(parameter, dtype=source.dtype).copy_(source)
            elif value.dtype != source.dtype:
                statistics[name] = source.to(parameter.device)


def _compile_layers(context: RunContext, module: TrainModule) -> None:
    """Compile the module's repeated layers as this run chose, and record it.

    Raises:
        UserError: it asks for CUDA graphs, and the module names no layers.
    """
    graphs = context.precision.cuda_graphs
    layers = compile_layers(module, cuda_graphs=graphs)
    if graphs and not layers:
        raise UserError(
            f"compile=graphs, but the model of {context.config.family} names no repeated layers. Use compile=on."
        )
    chosen = Choice("the whole model", "it names no repeated layers")
    if layers:
        how = ", as CUDA graphs" if graphs else ""
        chosen = Choice(f"{layers} repeated layers{how}", "each by itself: layers of one kind share the generated code")
    if context.world.is_main:
        record_choices(context.run, {"compiled": chosen})


def wrap_model(
    context: RunContext,
    state: TrainState,
    peek: Callable[[], Sequence[MicroBatch]],
    *,
    autocast: Callable[[], AbstractContextManager[None]],
) -> dict[str, Choice[bool]]:
    """Put what a step calls under DDP, on several ranks, and compile a model without repeated layers, if asked to.

    Args:
        peek: as of `choose_unused_search`.

    Returns:
        The choices for DDP, for the run's record.
    """
    choices: dict[str, Choice[bool]] = {}
    if context.world.world_size > 1:
        wanted = context.config.find_unused_parameters
        search = choose_unused_search(state.module, peek, run=context.run, wanted=wanted, autocast=autocast)
        choices["find_unused_parameters"] = search
        state.model = wrap_in_ddp(
            state.module,
            device=context.device,
            sync_batchnorm=context.config.sync_batchnorm,
            find_unused_parameters=search.value,
        )
    if context.precision.compile and not list(state.module.repeated_layers()):
        state.model = torch.compile(state.model)
    return choices
