"""Checks that a step which overflows in fp16 changes nothing on this device, and that the next one is sound."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from tests.gpu.check import Figures, Sizes
from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import MicroBatch
from trainyard.train.module import Batch, TrainModule
from trainyard.train.step import StepResult, TrainState, copy_for_average, make_optimizer, train_step

_SAMPLES, _FEATURES = 16, 8
_LARGE = 3e4  # finite in fp16, where a sum of eight such numbers is not: its largest number is 65504


class _Normalized(TrainModule):
    """BatchNorm of sums, which overflow in fp16 if the input is large."""

    def __init__(self) -> None:
        super().__init__()
        summed = nn.Linear(_FEATURES, _FEATURES)
        nn.init.ones_(summed.weight)
        self.layers = nn.Sequential(summed, nn.BatchNorm1d(_FEATURES), nn.Linear(_FEATURES, _FEATURES))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.layers(batch["x"]).float().square().mean()}


def check_overflow(device: torch.device, sizes: Sizes, *, optimizer: str) -> Figures:
    """Take a first step that overflows in its forward pass, and then a sound one, in fp16 with loss scaling.

    On the CPU, too: fp16 is too slow there to train with, but a step skips and puts back in the same way.

    Raises:
        AssertionError: the first step was taken, or changed a weight, a batch statistic or the averaged weights; or
            the second was skipped, or left something that is not finite.
    """
    with _fill_new_memory_with_nan():
        state = _make_state(device, optimizer)
        before = _copy_values(state)
        x = torch.randn(_SAMPLES, _FEATURES, device=device)
        result = _take_step(state, torch.full_like(x, _LARGE), device)
        loss = result.losses["loss"]
        assert not loss.isfinite() and result.skipped, f"a step whose sums overflow was taken, with a loss of {loss:g}"
        changed = [name for name, value in _copy_values(state).items() if not torch.equal(value, before[name])]
        assert not changed, f"a step that was skipped changed {', '.join(changed)}"
        result = _take_step(state, x, device)
        values = {**_copy_values(state), **_copy_moments(state)}
        wrong = [name for name, value in values.items() if not value.isfinite().all()]
        assert not wrong, f"after a skipped first step, the next one leaves {', '.join(wrong)} not finite"
        assert not result.skipped, "after a skipped first step, a sound one was skipped, too"
    return {"optimizer": optimizer, "loss_scale": float(state.scaler.get_scale()), "values": len(values)}


@contextmanager
def _fill_new_memory_with_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that memory which nobody has written to shows; as torch documents for tests."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a property
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _make_state(device: torch.device, optimizer: str) -> TrainState:
    torch.manual_seed(0)
    module = _Normalized().to(device).train()
    return TrainState(
        module=module,
        model=module,
        optimizer=make_optimizer(module, OptimizerSettings(name=optimizer)),
        scaler=torch.amp.GradScaler(device.type, enabled=True),
        ema=copy_for_average(module),
        ema_decay=0.5,
    )


def _take_step(state: TrainState, x: Tensor, device: torch.device) -> StepResult:
    result = train_step(
        state,
        [MicroBatch({"x": x}, weight=1.0, last=True, wait_s=0.0)],
        lr=1e-2,
        world_size=1,
        seed=0,
        clip_grad_norm=1.0,
        autocast=partial(torch.autocast, device.type, dtype=torch.float16),
    )
    state.progress.step += 1
    return result


def _copy_values(state: TrainState) -> Mapping[str, Tensor]:
    """Return copies of weights, batch statistics and averaged weights by name."""
    assert state.ema is not None
    averaged = {f"ema.{name}": value for name, value in state.ema.state_dict().items()}
    return copy.deepcopy({**state.module.state_dict(), **averaged})


def _copy_moments(state: TrainState) -> Mapping[str, Tensor]:
    """Return what the optimizer keeps of each parameter, by name."""
    parameters = {id(parameter): name for name, parameter in state.module.named_parameters()}
    return {
        f"{parameters[id(parameter)]}.{name}": value
        for parameter, kept in state.optimizer.state.items()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }
