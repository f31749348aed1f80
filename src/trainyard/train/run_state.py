"""Builds the state of a run, encodes it for a checkpoint and restores it from one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainyard.errors import UserError
from trainyard.train import checkpoint, distributed
from trainyard.train.module import TrainModule
from trainyard.train.run_context import RunContext
from trainyard.train.step import (
    Progress,
    TrainState,
    copy_for_average,
    enable_activation_checkpointing,
    make_optimizer,
)
from trainyard.train.swa import WeightAverage


def prepare_state(context: RunContext) -> tuple[TrainState, int | None]:
    """Build the state, and restore it from the newest valid checkpoint if there is one.

    Returns:
        The state, and the length of the metrics file at that checkpoint (None for a new run).
    """
    layout: Any = torch.channels_last if context.precision.channels_last else torch.contiguous_format
    module = context.module.to(context.device).train()
    module.to(memory_format=layout)  # type: ignore[call-overload]
    config = context.config
    state = TrainState(
        module=module,
        model=module,
        optimizer=make_optimizer(module, config.optimizer),
        scaler=torch.amp.GradScaler(context.device.type, enabled=context.precision.loss_scaling),
        ema=copy_for_average(module) if config.ema_decay else None,
        ema_decay=config.ema_decay,
        swa=WeightAverage(copy_for_average(module)) if config.swa else None,
    )
    saved = _load_newest_checkpoint(context)
    if saved is not None:
        restore_state(state, saved, fingerprint=context.data.fingerprint)
    if config.gradient_checkpointing and not enable_activation_checkpointing(module):
        raise UserError(
            f"gradient_checkpointing=true, but the model of {config.family} names no repeated layers to recompute."
        )
    state.model = _wrap_ddp(context, module)
    return state, None if saved is None else saved["metrics_position"]


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
        "data": fingerprint,
        "learned": dict(artifacts),  # so that the weights can be used without the packed data
        "metrics_position": metrics_position,
    }


def restore_state(state: TrainState, saved: Mapping[str, Any], *, fingerprint: str) -> None:
    """Restore a state from what `encode_state` returned.

    Raises:
        UserError: it belongs to other data.
    """
    if saved["data"] != fingerprint:
        raise UserError(
            "This run was trained on other data than those found now (the packed index differs). "
            "Put the packed data back, or start a new run."
        )
    state.module.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"])
    state.scaler.load_state_dict(saved["scaler"])
    if state.ema is not None:
        state.ema.load_state_dict(saved["ema"])
    if state.swa is not None:
        state.swa.load_state_dict(saved["swa"])
    state.progress = Progress(**saved["progress"])
    state.best = saved["best"]


def _load_newest_checkpoint(context: RunContext) -> dict[str, Any] | None:
    """Load the newest valid checkpoint on every rank; rank 0 chooses, so that all load the same one."""
    found = checkpoint.load_newest_valid(context.run / "checkpoints") if context.world.is_main else None
    path = distributed.broadcast_from_rank0(None if found is None else found[0].path)
    if path is None:
        return None
    saved = found[1] if found is not None else checkpoint.load(path)
    logger.info("resuming from {}", path.name)
    return saved


def _wrap_ddp(context: RunContext, module: TrainModule) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    model: Any = module
    if context.world.world_size > 1:
        ids = [context.device.index] if context.device.type == "cuda" else None
        model = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    return torch.compile(model) if context.precision.compile else model
