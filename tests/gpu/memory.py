"""Compares the memory that is predicted for a step with what the device's allocator gives out during the same step."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.gpu.card import wait_for_device
from tests.gpu.check import Figures, Sizes, cannot_answer
from tests.gpu.preset_steps import PresetSteps, count_samples, open_preset
from trainyard.plan.memory import CONTEXT_GIB, FRAGMENTS_SHARE, StepConfig
from trainyard.plan.predict import Predictor

RATIOS = (0.9, 1.1)
"""Predicted / observed memory of a step, see benchmarks/plan.md: below, a plan's reserve for fragments is too small."""

_GIB = 2**30


def compare_memory(device: torch.device, sizes: Sizes, *, preset: str) -> Figures:
    """Compare the memory of a preset's second step beyond what stays: weights, optimizer, averages."""
    with open_preset(preset, ["compile=off"], sizes) as steps:
        micro_batch = steps.read_micro_batch()
        steps.take_step([micro_batch])  # creates the optimizer's statistics
        steps.state.optimizer.zero_grad(set_to_none=True)
        observed = measure_peak(device, lambda: steps.take_step([micro_batch]))
        predictor = Predictor(steps.context.config, sizes.jobs)
        setting = _describe_setting(steps, device, samples=count_samples(micro_batch))
        predicted = predictor.predict_batch(setting, _copy_to_host(micro_batch.batch), get_lengths(micro_batch.batch))
        if predicted.refused:
            cannot_answer(predicted.refused)
        figures = {
            **steps.describe(),
            "predicted_gib": round(predicted.activations / _GIB, 4),
            "observed_gib": round(observed / _GIB, 4),
            "predicted_over_observed": round(predicted.activations / observed, 3),
        }
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            reserved = torch.cuda.memory_reserved(device)
            most = torch.cuda.max_memory_allocated(device)
            figures |= {
                "fragments_gib": round((reserved - most) / _GIB, 4),
                "context_gib": round((total - free - reserved) / _GIB, 4),
                "reserve_gib": round(CONTEXT_GIB + FRAGMENTS_SHARE * most / _GIB, 4),
            }
        return figures


def judge_memory(figures: Figures) -> None:
    """Check that a plan predicts tensors well enough, and reserves enough for what a process takes besides them."""
    ratio = figures["predicted_over_observed"]
    assert RATIOS[0] <= ratio <= RATIOS[1], f"predicted / observed memory is {ratio}, not within {RATIOS}"
    if "reserve_gib" in figures:
        # fragments do not count: short of memory, torch gives them back
        assert figures["context_gib"] <= figures["reserve_gib"], (
            f"CUDA and DALI take {figures['context_gib']:.2f} GiB besides tensors, and a plan reserves "
            f"{figures['reserve_gib']:.2f} GiB; if another process uses this card, run the check without it"
        )


def measure_peak(device: torch.device, work: Callable[[], object]) -> int:
    """Return the most bytes that `work` has allocated at once, beyond what was allocated before.

    On the CPU the profiler reports each block that the allocator gives out and takes back, also oneDNN's.
    """
    if device.type == "cuda":
        wait_for_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        wait_for_device(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        work()
    assert measured.profiler is not None and measured.profiler.kineto_results is not None
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def get_lengths(batch: Mapping[str, Tensor]) -> dict[str, dict[int, int]]:
    """Return the lengths of the axes of a batch by name and axis."""
    return {name: dict(enumerate(values.shape)) for name, values in batch.items() if values.ndim > 1}


def _describe_setting(steps: PresetSteps, device: torch.device, *, samples: int) -> StepConfig:
    precision, config = steps.context.precision, steps.context.config
    return StepConfig(
        device.type, precision.dtype, precision.channels_last, config.gradient_checkpointing, samples, accumulates=False
    )


def _copy_to_host(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.detach().cpu() for name, values in batch.items()}
