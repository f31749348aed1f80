"""The learning rate as a pure function of the step: nothing to save, nothing to replay."""

import bisect
import math
from collections.abc import Callable
from functools import partial

from trainyard.config.duration import Duration
from trainyard.config.settings import ScheduleSettings, TrainConfig
from trainyard.train.module import TrainModule
from trainyard.train.own_optimizer import build_own_schedule, is_own
from trainyard.train.run_context import compute_total_steps

_ONE_CYCLE_START = 1 / 25  # of the peak, as in Smith and Topin 2017 (arXiv:1708.07120) and torch's OneCycleLR
_ONE_CYCLE_WARMUP = 0.3  # share of the run, if `warmup` is empty


def build_schedule(module: TrainModule, config: TrainConfig, *, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: the family's own schedule, or else that of the options."""
    total_steps = compute_total_steps(config, steps_per_epoch)
    if is_own(module, "build_schedule"):
        factor = build_own_schedule(module, config, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    else:
        factor = partial(
            compute_lr_factor, schedule=config.schedule, total_steps=total_steps, steps_per_epoch=steps_per_epoch
        )
    return lambda step: config.optimizer.lr * factor(step)


def compute_lr_factor(step: int, schedule: ScheduleSettings, *, total_steps: int | None, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0), divided by its peak.

    Args:
        total_steps: length of the run; None if the run is limited by time, which a cosine and one cycle never are.
    """
    warmup = Duration.parse(schedule.warmup).to_steps(steps_per_epoch) if schedule.warmup else 0
    if schedule.name == "one_cycle":
        assert total_steps is not None, "checked with the options"
        rise = warmup or round(_ONE_CYCLE_WARMUP * total_steps)
        if step < rise:
            return _half_cosine(_ONE_CYCLE_START, 1.0, step / rise)
        return _half_cosine(1.0, schedule.final_ratio, (step - rise) / max(1, total_steps - rise))
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "cosine":
        assert total_steps is not None, "checked with the options"
        return _half_cosine(1.0, schedule.final_ratio, (step - warmup) / max(1, total_steps - warmup))
    if schedule.name == "step":
        drops = sorted(Duration.parse(text).to_steps(steps_per_epoch) for text in schedule.milestones)
        return float(schedule.drop ** bisect.bisect_right(drops, step))
    return 1.0


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
