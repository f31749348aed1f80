"""Compares, in a run, what was predicted with what it takes; and corrects later plans by what runs took.

Loads torch only in a rank, which has loaded it already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from trainyard.duration import Duration
from trainyard.hardware import GpuType, find_gpu_by_name, make_gpu_key
from trainyard.launch.memory_prediction import Predict, Setting, StepPrediction, read_store
from trainyard.runs.folder import format_run_name, read_env
from trainyard.runs.observations import (
    SECTION,
    Amounts,
    Observation,
    Place,
    find_observation,
    find_observations,
    keep_observation,
    keep_prediction,
)
from trainyard.settings import TrainConfig

if TYPE_CHECKING:
    import torch

    from trainyard.train.run_context import RunContext


@dataclass(frozen=True)
class ObservedStep(StepPrediction):
    """The prediction of a step whose memory a run has shown on this card."""

    observed_gib: float = 0.0
    run: str = ""

    @property
    def peak_gib(self) -> float:
        """Return the most that torch's allocator gave out in that run, evaluation included."""
        return self.observed_gib


def correct(predict: Predict, observations: Sequence[Observation], card: GpuType, *, gpus: int) -> Predict:
    """Return `predict` with what runs took on this card, and with as many GPUs, wherever they did."""

    def correct_step(setting: Setting) -> StepPrediction:
        step = predict(setting)
        found = find_observation(observations, make_place(card.key, gpus, setting))
        if found is None or found.amounts.memory_gib is None or step.refused:
            return step
        known = {field.name: getattr(step, field.name) for field in fields(StepPrediction)}
        return ObservedStep(**known, observed_gib=found.amounts.memory_gib, run=found.run)

    return correct_step


def describe_origin(step: StepPrediction) -> str:
    """Say how the memory of a step is known."""
    if isinstance(step, ObservedStep):
        return f"measured on this card by {step.run}"
    return "estimated, never observed on this card"


def make_place(card: str, gpus: int, setting: Setting) -> Place:
    """Return where a step of this setting is taken."""
    return Place(card, gpus, asdict(setting))


# In a rank


def record_prediction(context: "RunContext", environ: Mapping[str, str]) -> None:
    """Record what this run is predicted to take: by an earlier run at the same place, or else by a stored plan."""
    if not context.world.is_main:
        return
    import torch

    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)  # an earlier start in this process may have taken more
    setting = _describe_setting(context)
    place = make_place(_name_card(context.device), context.world.world_size, setting)
    key = read_env(context.run)[SECTION]["key"]
    others = (found for found in find_observations(context.run.parent.parent, job=context.config.job, key=key))
    earlier = find_observation([found for found in others if found.run != format_run_name(context.run)], place)
    step = read_store(context.config.job, key, environ).steps.get(setting)
    keep_prediction(context.run, place, _predict(context, earlier, step))


def _predict(context: "RunContext", earlier: Observation | None, step: StepPrediction | None) -> Amounts:
    from trainyard.train.run_context import compute_total_steps

    reasons: dict[str, str] = {}
    memory = rate = hours = disk = None
    if earlier is not None:
        measured = f"measured by {earlier.run}"
        steps = compute_total_steps(context.config, len(context.orders(0)))
        memory, rate = earlier.amounts.memory_gib, earlier.amounts.samples_per_s
        hours = None if steps is None or earlier.step_s is None else steps * earlier.step_s / 3600
        disk = count_disk_bytes(earlier.checkpoint_bytes, context.config, steps)
        known = {"memory_gib": memory, "samples_per_s": rate, "hours": hours, "disk_bytes": disk}
        reasons |= {name: measured for name, value in known.items() if value is not None}
    if memory is None and step is not None and not step.refused:
        memory, reasons["memory_gib"] = step.peak_gib, "estimated by trainyard plan"
    if disk is None and step is not None and not step.refused:
        disk, reasons["disk_bytes"] = (
            count_disk_bytes(estimate_checkpoint_bytes(step), context.config, None),
            "derived from the weights and the optimizer",
        )
    missing = {"memory_gib": memory, "samples_per_s": rate, "hours": hours, "disk_bytes": disk}
    reasons |= {name: "no plan stored, no run before" for name, value in missing.items() if value is None}
    return Amounts(memory, context.micro_batch_size, rate, hours, disk, reasons)


def record_observation(context: "RunContext") -> None:
    """Record what this run took, however it ended."""
    if not context.world.is_main:
        return
    from trainyard.train.meters import read_peak_memory_gib

    on_gpu = context.device.type == "cuda"
    keep_observation(
        context.run,
        memory_gib=read_peak_memory_gib(context.device) if on_gpu else None,
        steps_per_epoch=len(context.orders(0)),
    )


def estimate_checkpoint_bytes(step: StepPrediction) -> int:
    """Return the bytes of a checkpoint: everything that stays from step to step."""
    return step.parameters + step.buffers + step.optimizer + step.averages


def count_disk_bytes(checkpoint_bytes: int, config: TrainConfig, steps: int | None) -> int:
    """Return the most that a run's checkpoints take: the newest ones, the best, and those that are kept for ever.

    Args:
        steps: of the run, if those that are kept for ever are one in a number of steps; None: they are not counted.
    """
    settings = config.checkpoint
    length = Duration.parse(settings.keep_every) if settings.keep_every else None
    for_ever = steps // int(length.value) if length is not None and length.unit == "st" and steps is not None else 0
    return checkpoint_bytes * (settings.keep_last + 1 + for_ever)


def _describe_setting(context: "RunContext") -> Setting:
    config, world_size = context.config, context.world.world_size
    share = -(-config.global_batch_size // world_size)
    return Setting(
        device=context.device.type,
        dtype=context.precision.dtype,
        channels_last=context.precision.channels_last,
        recompute=config.gradient_checkpointing,
        micro_batch=context.micro_batch_size,
        accumulates=context.micro_batch_size < share or world_size > 1,
    )


def _name_card(device: "torch.device") -> str:
    """Return the key of the GPU type of a device, or "cpu"."""
    import torch

    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    memory_gib = properties.total_memory / 2**30
    known = find_gpu_by_name(torch.cuda.get_device_name(device), memory_gib)
    return known.key if known else make_gpu_key(10 * properties.major + properties.minor, round(memory_gib))
