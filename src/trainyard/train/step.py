"""One optimizer step, and the state it changes."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from trainyard.config.settings import OptimizerSettings, TrainConfig
from trainyard.data.loader import MicroBatch
from trainyard.errors import ContractError, UserError
from trainyard.text import join_names
from trainyard.train import distributed
from trainyard.train.best import Plateau
from trainyard.train.contract import check_gradients, compute_first_losses, copy_module
from trainyard.train.data_parallel import BatchNorm, explain_unused, leave_out_of_statistics
from trainyard.train.distributed import average_rows
from trainyard.train.module import TrainModule, has_values
from trainyard.train.out_of_memory import name_phase
from trainyard.train.own_optimizer import build_own_optimizer, check_kept_state, copy_attributes, is_own
from trainyard.train.swa import WeightAverage

_LISTED_DIGITS = 6  # of a listed loss: float32 has seven, and a curve shows three


class StepLosses:
    """The losses of steps that no line lists yet.

    Adding one neither waits for the device nor communicates. The sum over ranks takes part in the all-reduce of a
    training line. A checkpoint stores the losses, so that the line after a resume also lists those before it.
    """

    def __init__(self, summed: Sequence[float] = ()) -> None:
        """Begin with those of a checkpoint, which are sums over ranks."""
        self.summed = list(summed)
        self._parts: list[Tensor] = []  # () float32 on the device: this rank's parts of the losses of the steps since

    def __len__(self) -> int:
        return len(self.summed) + len(self._parts)

    def add(self, part: Tensor) -> None:
        """Keep this rank's part of the loss of one more step, () float32."""
        self._parts.append(part)

    def sum_over_ranks(self, latest: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Sum the added losses, and return the sums of all losses of the latest step. Every rank takes part."""
        latest = latest or {}
        if not latest and not self._parts:
            return {}
        values = distributed.sum_over_ranks(torch.stack([*latest.values(), *self._parts])).tolist()
        self.summed += values[len(latest) :]
        self._parts.clear()
        return dict(zip(latest, values, strict=False))

    def pop(self) -> list[float | None]:
        """Return the sums, oldest first, and forget them; None for a loss that was not finite."""
        listed = [float(f"{value:.{_LISTED_DIGITS}g}") if math.isfinite(value) else None for value in self.summed]
        self.summed = []
        return listed


@dataclass
class Progress:
    """Training progress; with model and optimizer, everything that a resume needs."""

    epoch: int = 0
    batches_done: int = 0  # global batches of this epoch that the whole job has finished
    step: int = 0  # optimizer steps taken
    samples_seen: int = 0
    train_s: float = 0.0  # time spent in steps, over all attempts


@dataclass
class TrainState:
    """Everything that changes while training."""

    module: TrainModule  # not wrapped: its state is saved
    model: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # the same module, under DDP and compiled
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: TrainModule | None
    ema_decay: float
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Any] | None = None  # step and value of the best evaluation
    plateau: Plateau = field(default_factory=Plateau)
    swa: WeightAverage | None = None
    step_losses: StepLosses = field(default_factory=StepLosses)
    begin_step: Callable[[], None] = lambda: None  # called when nothing of the step before is needed any more


@dataclass(frozen=True)
class StepResult:
    """The results of a step, still on the device. Reading waits for the GPU, so the caller reads rarely or late."""

    losses: dict[str, Tensor]  # () float32 each: this rank's part of the global batch's mean; sum over ranks
    grad_norm: Tensor  # () float32, before clipping, of the whole global batch
    skipped: Tensor  # () float32: 1 if the gradient was not finite, so the step was skipped
    wait_s: float  # time spent waiting for data


def read_one_step(stream: Iterable[MicroBatch], progress: Progress, device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one optimizer step, each with the epoch and the samples that the run used before."""
    epoch, samples_seen = torch.tensor([progress.epoch, progress.samples_seen]).to(device, non_blocking=True)
    for micro_batch in stream:
        micro_batch.batch.update(epoch=epoch, samples_seen=samples_seen)
        yield micro_batch
        if micro_batch.last:
            return


def train_step(
    state: TrainState,
    micro_batches: Iterable[MicroBatch],
    *,
    lr: float,
    world_size: int,
    seed: int,
    clip_grad_norm: float,
    autocast: Callable[[], AbstractContextManager[None]],
) -> StepResult:
    """Take one optimizer step over this rank's micro-batches of one global batch.

    Each micro-batch's mean loss is weighted by its share of the global batch's samples. So the gradient equals that of
    the mean over the global batch, however it is split, and also for a partial last batch. DDP, which averages over
    ranks, all-reduces once per step, with the last micro-batch; sparse gradients follow.

    Whether the gradient is finite is decided on the device: the fused optimizers skip their update if `found_inf` is
    1. Nothing here waits for the device, unless a family's own optimizer cannot do that. A skipped step changes
    nothing: buffers are also put back, because a forward pass that overflows leaves NaN in batch statistics. Only loss
    scaling continues after a skipped step, so only it pays for that.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    buffers = _copy_buffers(state.module) if state.scaler.is_enabled() else []
    losses, wait_s = compute_gradients(state, micro_batches, world_size=world_size, seed=seed, autocast=autocast)
    if state.progress.step == 0:
        # DDP that does not look for unused parameters waits for the gradients of all
        check_gradients(state.module, needs_all=not getattr(state.model, "find_unused_parameters", True))
    for name, most in state.module.sparse_gradients().items():
        average_rows(cast(Tensor, state.module.get_parameter(name).grad), most=most)
    is_tried = state.progress.step == 0 and is_own(state.module, "build_optimizer")
    attributes = copy_attributes(state.optimizer) if is_tried else {}
    norm, skipped = update_weights(state, clip_grad_norm=clip_grad_norm, buffers=buffers)
    if is_tried:
        check_kept_state(state.module, state.optimizer, attributes)
    return StepResult(losses, norm, skipped, wait_s)


def compute_gradients(
    state: TrainState,
    micro_batches: Iterable[MicroBatch],
    *,
    world_size: int,
    seed: int,
    autocast: Callable[[], AbstractContextManager[None]],
) -> tuple[dict[str, Tensor], float]:
    """Sum up the scaled gradients of a step's micro-batches; return the losses, and the time spent waiting for data."""
    torch.manual_seed(_derive_step_seed(seed, state.progress.step))
    state.optimizer.zero_grad(set_to_none=True)
    state.begin_step()
    losses: dict[str, Tensor] = {}
    wait_s = 0.0
    is_first = state.progress.step == 0
    compute_losses = partial(compute_first_losses, state.module, state.model) if is_first else state.model
    for micro_batch in micro_batches:
        wait_s += micro_batch.wait_s
        counted = nullcontext() if micro_batch.weight else leave_out_of_statistics(state.module)
        with _sync_gradients_if(state.model, micro_batch.last), counted:
            with name_phase("forward pass"), explain_unused(state.module), autocast():
                parts = compute_losses(micro_batch.batch)
            with name_phase("backward pass"):
                state.scaler.scale(parts["loss"] * (micro_batch.weight * world_size)).backward()  # type: ignore[no-untyped-call]
        for name, value in parts.items():
            losses[name] = losses.get(name, 0.0) + value.detach().float() * micro_batch.weight
    return losses, wait_s


def update_weights(
    state: TrainState, *, clip_grad_norm: float, buffers: Sequence[tuple[list[Tensor], Tensor]] = ()
) -> tuple[Tensor, Tensor]:
    """Update the weights with the gradients that they have; return the gradients' norm, and 1 if the step was skipped.

    Args:
        buffers: to put back after a skipped step (`_copy_buffers`).
    """
    with name_phase("optimizer step"):
        state.scaler.unscale_(state.optimizer)  # clip true gradients, not scaled ones
        norm = clip_grad_norm_(state.module.parameters(), clip_grad_norm or float("inf"))
        skipped = torch.isfinite(norm).logical_not().float()
        # Not through the scaler, which looks at each number alone: their norm may also overflow.
        if _can_skip(state.optimizer):
            state.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            state.optimizer.step()
        elif not has_values(skipped) or not skipped.item():
            state.optimizer.step()
        state.scaler.update()
        _put_back_buffers(buffers, skipped)
        if state.ema is not None:
            _update_ema(state.ema, state.module, state.ema_decay, skipped)
    return norm, skipped


def build_optimizer(module: TrainModule, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the family's own optimizer, or else that of the options."""
    if not is_own(module, "build_optimizer"):
        return make_optimizer(module, config.optimizer)
    return _fill_momentum(build_own_optimizer(module, list_groups(module, config.optimizer.weight_decay), config))


def make_optimizer(module: TrainModule, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimizer, always fused: only fused kernels can skip a step by a value on the device."""
    groups: Any = list_groups(module, settings.weight_decay)
    if settings.name == "sgd":
        return _fill_momentum(torch.optim.SGD(groups, lr=settings.lr, momentum=settings.beta1, fused=True))
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)


def _fill_momentum(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make the momentum of fused SGD begin at 0.

    torch would take uninitialised memory and fill it in the first step, which may be skipped.
    """
    if isinstance(optimizer, torch.optim.SGD) and _can_skip(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernels skip their update if `found_inf` is 1.

    Not SGD with dampening: torch leaves it out in the first step, so its momentum cannot begin at 0.
    """
    return all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)


def list_groups(module: TrainModule, weight_decay: float) -> list[dict[str, Any]]:
    """Return the module's parameter groups that have parameters.

    Raises:
        UserError: a parameter that needs a gradient is in none of them, or one is in two.
    """
    groups: list[dict[str, Any]] = [{**group} for group in module.parameter_groups(weight_decay)]
    for group in groups:
        group["params"] = list(group["params"])
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    where = f"{inspect.getfile(type(module))}: {type(module).__name__}.parameter_groups"
    if forgotten := [n for n, p in module.named_parameters() if p.requires_grad and not counts[id(p)]]:
        raise ContractError(
            f"{where}: {join_names(forgotten)} {'is' if len(forgotten) == 1 else 'are'} in no group, and would never "
            "train. Put each parameter into one group, or freeze it: parameter.requires_grad_(False)"
        )
    if repeated := [name for name, parameter in module.named_parameters() if counts[id(parameter)] > 1]:
        raise ContractError(f"{where}: {join_names(repeated)}: in two groups. Put each parameter into one.")
    if not any(group["params"] for group in groups):
        kind = type(module)
        raise ContractError(f"{inspect.getfile(kind)}: {kind.__name__} has no parameter that can train. Unfreeze some.")
    return [group for group in groups if group["params"]]


def copy_for_average(module: TrainModule) -> TrainModule:
    """Copy a module to hold averaged weights: without gradients, in evaluation mode."""
    return copy_module(module).requires_grad_(False).eval()


def enable_activation_checkpointing(module: TrainModule) -> int:
    """Make the module's repeated layers recompute their activations in the backward pass; return their number.

    Non-reentrant, which works under DDP. Batch statistics are frozen while recomputing: they were updated by the
    forward pass, and a second update would make the result depend on an option that only saves memory.
    """
    layers = list(module.repeated_layers())
    for layer in layers:
        layer.forward = partial(_run_checkpointed, layer, layer.forward)
    return len(layers)


def check_running_statistics(module: TrainModule, version: str) -> None:
    """Refuse to compile recomputed layers whose running statistics this torch would update twice.

    In torch 2.7.1 the compiled backward pass recomputes a layer together with its update of statistics; 2.13.0 keeps
    such updates in the forward pass (torch/_functorch/partitioners.py). Versions between were not tried.

    Raises:
        UserError: it would.
    """
    norms = (part for layer in module.repeated_layers() for part in layer.modules() if isinstance(part, BatchNorm))
    if [int(part) for part in version.split(".")[:2]] < [2, 13] and any(norm.track_running_stats for norm in norms):
        raise UserError(
            f"gradient_checkpointing=true in a compiled model with BatchNorm, but torch {version} would update the "
            "running statistics once more in the backward pass. Use compile=off, gradient_checkpointing=false, or "
            "torch 2.13.0 or newer."
        )


def _run_checkpointed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a layer's output, and again in the backward pass.

    Under torch.compile the contexts are not needed: the compiler recomputes operators that the gradient needs, and an
    update of statistics is none of them. Nor would it accept them.
    """
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _freeze_batch_statistics(layer)),
        **kwargs,
    )


@contextmanager
def _freeze_batch_statistics(layer: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged by a forward pass: momentum 0, and the count of batches restored."""
    norms = [m for m in layer.modules() if isinstance(m, BatchNorm) and m.training and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.sub_(1)


def _sync_gradients_if(model: Any, last: bool) -> AbstractContextManager[None]:
    """Return the context in which DDP all-reduces gradients only for the step's last micro-batch."""
    if last or not hasattr(model, "no_sync"):  # torch.compile hands on the attributes of its module
        return nullcontext()
    return model.no_sync()  # type: ignore[no-any-return]


def _derive_step_seed(seed: int, step: int) -> int:
    """Return the seed of dropout and other device randomness in a step; `seed` differs between ranks already."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


def _copy_buffers(module: nn.Module) -> list[tuple[list[Tensor], Tensor]]:
    """Return the module's buffers by data type, each with a copy of their values in one tensor: few, large kernels."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    return [(buffers, _join(buffers)) for buffers in by_dtype.values()]


@torch.no_grad()
def _put_back_buffers(copied: Sequence[tuple[list[Tensor], Tensor]], skipped: Tensor) -> None:
    """Give buffers the values of `_copy_buffers` if `skipped` is 1, without waiting for the device."""
    for buffers, before in copied:
        values = torch.where(skipped.bool(), before, _join(buffers))
        parts = values.split_with_sizes([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@torch.no_grad()
def _update_ema(ema: TrainModule, module: TrainModule, decay: float, skipped: Tensor) -> None:
    """Move averaged weights towards the current ones: ema += (1 - decay) * (w - ema); copy the buffers.

    If `skipped` is 1, nothing moves.
    """
    share = (1 - decay) * (1 - skipped)
    for average, weight in zip(ema.parameters(), module.parameters(), strict=True):
        average.add_((weight - average) * share)
    for target, source in zip(ema.buffers(), module.buffers(), strict=True):
        target.copy_(source)
