"""What each check finds: a table of faults, each planted on the CPU where what the check looks at is broken."""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import card, decoding, overflow, preset_steps
from tests.gpu.check import Figures, Sizes, run_in_process
from tests.training import FAMILIES
from trainyard.config.settings import OptimizerSettings
from trainyard.data.loader import Loader, MicroBatch
from trainyard.measure import Summary
from trainyard.plan.predict import Predictor
from trainyard.train import distributed, run_state, step
from trainyard.train.module import TrainModule

CPU = torch.device("cpu")
NOT_FOUND, NEEDS_CARD = "NOT FOUND", "needs a card"

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[..., Figures]


@dataclass(frozen=True)
class Fault:
    """One fault, and what the check that finds it says."""

    check: str  # its test in tests/gpu/test_gpu.py, without "test_"
    what: str
    plant: Plant | None  # None: it needs a card
    said: str  # a pattern of the error; for a fault that needs a card, why that is so
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the test
    long: bool = False  # whether `make test` leaves it to `make test-long`


def find_fault(fault: Fault, folder: Path, scratch: Path) -> str:
    """Plant a fault and run its check; return the error's first line, or `NOT_FOUND` or `NEEDS_CARD` and why.

    Args:
        folder: where `write_test_family` wrote.
    """
    from tests.gpu import test_gpu  # whose tests pytest would collect from this module

    if fault.plant is None:
        return f"{NEEDS_CARD}: {fault.said}"
    test = getattr(test_gpu, f"test_{fault.check}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            test(check=plan_check(fault.plant, folder, scratch, patch), **fault.arguments)
    except (pytest.fail.Exception, AssertionError) as error:
        line = str(error).splitlines()[0]
        return line if re.search(fault.said, line) else f"{NOT_FOUND}, but {line}"
    except pytest.skip.Exception as reason:
        return f"{NOT_FOUND}: it did not run: {reason}"
    return f"{NOT_FOUND}: it passed"


def plan_check(plant: Plant, folder: Path, scratch: Path, patch: pytest.MonkeyPatch) -> Check:
    """Return what tests of a card get as `check`: it runs checks on the CPU.

    A fault is planted where the check runs: here, or in a process of its own if that trains or has ranks.
    """
    sizes = Sizes(folder / "families", folder, scratch, {}, small=True)

    def check(work: Check, **options: Any) -> Figures:
        if not options.keys() & {"preset", "family", "collectives"}:
            plant(patch)
            return work(CPU, sizes, **options)
        planted = partial(_run_planted, plant, work, sizes, options)
        return run_in_process(planted, limit_s=120, log=scratch / "log")

    return check


def _run_planted(plant: Plant, work: Check, sizes: Sizes, options: Mapping[str, Any]) -> Figures:
    plant(pytest.MonkeyPatch())
    return work(CPU, sizes, **options)


def write_test_family(folder: Path) -> None:
    """Write the test family with a smoke preset, and a demo preset whose loss is infinite."""
    jobs = folder / "families"  # the name under which its modules import each other
    shutil.copytree(FAMILIES / "stripes", jobs / "stripes", ignore=shutil.ignore_patterns("__pycache__"))
    (jobs / "__init__.py").touch()
    base = (jobs / "stripes" / "stripes.yaml").read_text()
    # a step takes some time, so that a run can be stopped before it ends
    (jobs / "stripes" / "stripes_smoke.yaml").write_text(f"{base}model: {{sleep_ms: 20}}\n")
    (jobs / "stripes" / "stripes_demo.yaml").write_text(f"{base}model: {{poison_step: 0}}\n")


# The card


def break_nothing(patch: pytest.MonkeyPatch) -> None:
    """Plant no fault: what the arguments name is broken."""


def leave_out_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "read_capability", lambda device: 60)
    patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])


def multiply_coarsely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "DTYPES", {"fp32": torch.bfloat16, "bf16": torch.bfloat16})


def never_use_tf32(patch: pytest.MonkeyPatch) -> None:
    """Ask for TF32 where there is none."""
    patch.setattr(card, "read_capability", lambda device: 80)


def multiply_equally_fast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "read_capability", lambda device: 75)
    patch.setattr(card, "measure_product_rate", lambda *arguments: Summary.from_values([10.0] * 3))


def read_low_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "which", lambda name: name)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=""))
    patch.setattr(card, "read_clocks", lambda uuid: (345.0, 1980.0, "0x0000000000000040"))


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self)


def copy_over_few_lanes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "measure_device_rate", lambda *arguments, **options: 6.5e9)


def copy_from_unpinned_memory(patch: pytest.MonkeyPatch) -> None:
    calls = count()
    patch.setattr(card, "measure_device_rate", lambda *arguments, **options: 9e9 if next(calls) < 6 else 12e9)


def copy_after_products(patch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 0.25, 1.0, 1.95])
    patch.setattr(card, "_measure_seconds", lambda *arguments, **options: next(seconds))


def change_copies_between_cards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(card, "list_gpus", lambda: [CPU, CPU])
    patch.setattr(torch.Tensor, "to", lambda self, device, copy: self + 1)


# Steps


def keep_buffers(patch: pytest.MonkeyPatch) -> None:
    """Leave NaN in batch statistics."""
    patch.setattr(step, "_put_back_buffers", lambda copied, skipped: None)


def move_ema(patch: pytest.MonkeyPatch) -> None:
    """Move averaged weights although the step was skipped."""

    def move(ema: TrainModule, module: TrainModule, decay: float, skipped: torch.Tensor) -> None:
        next(ema.parameters()).add_(1.0)

    patch.setattr(step, "_update_ema", move)


def use_torch_sgd(patch: pytest.MonkeyPatch) -> None:
    def make(module: TrainModule, settings: OptimizerSettings) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=settings.lr, momentum=settings.beta1, fused=True)

    patch.setattr(overflow, "make_optimizer", make)


def predict_half(patch: pytest.MonkeyPatch) -> None:
    original = Predictor.predict_batch

    def predict(self: Predictor, *arguments: Any) -> Any:
        found = original(self, *arguments)
        return replace(found, activations=found.activations // 2)

    patch.setattr(Predictor, "predict_batch", predict)


def lose_gradients_in_graphs(patch: pytest.MonkeyPatch) -> None:
    """Lose 0.7 % of the first gradient where CUDA graphs compute: here in the third run, which is eager, too."""
    runs, opened, clip = count(1), preset_steps.open_preset, step.clip_grad_norm_

    def open_preset(*arguments: Any, **options: Any) -> Any:
        if next(runs) == len(preset_steps.GRAPH_MODES):
            patch.setattr(step, "clip_grad_norm_", lose_and_clip)
        return opened(*arguments, **options)

    def lose_and_clip(parameters: Any, most: float) -> torch.Tensor:
        first, *others = parameters
        first.grad.mul_(1 - preset_steps.LEAST_LOST)
        return clip([first, *others], most)

    patch.setattr(preset_steps, "GRAPH_MODES", ("off", "off", "off"))
    patch.setattr(preset_steps, "open_preset", open_preset)


def repeat_first_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """Give each step the inputs of the first one where CUDA graphs compute, as a graph that keeps them does."""
    runs, opened, read = count(1), preset_steps.open_preset, preset_steps.PresetSteps.read_step
    kept: list[MicroBatch] = []

    def open_preset(*arguments: Any, **options: Any) -> Any:
        if next(runs) == len(preset_steps.GRAPH_MODES):
            patch.setattr(preset_steps.PresetSteps, "read_step", read_first)
        return opened(*arguments, **options)

    def read_first(*arguments: Any) -> list[MicroBatch]:
        found = read(*arguments)
        if len(found) > 1 and not kept:  # of a step, not of the look at its determinism
            kept.extend(found)
        return kept or found

    patch.setattr(preset_steps, "GRAPH_MODES", ("off", "off", "off"))
    patch.setattr(preset_steps, "open_preset", open_preset)


# Images


def swap_images(patch: pytest.MonkeyPatch) -> None:
    """Give a batch of training another order of images than of labels."""
    original = Loader._make_batch

    def make_batch(self: Loader, item: Any) -> Any:
        batch = original(self, item)
        return batch if item.epoch is None else batch | {"image": batch["image"].flip(0)}

    patch.setattr(Loader, "_make_batch", make_batch)


def brighten(patch: pytest.MonkeyPatch) -> None:
    """Decode other images than the reference decoder."""
    original = decoding.make_loader

    def make_loader(context: Any) -> Loader:
        loader = original(context)
        make_batch = loader._make_batch

        def make_brighter(item: Any) -> Any:
            batch = make_batch(item)
            return batch | {"image": batch["image"] + 0.1}

        loader._make_batch = make_brighter  # type: ignore[method-assign]
        return loader

    patch.setattr(decoding, "make_loader", make_loader)


def name_decoder_of_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoding, "_record_decoders", lambda: nullcontext({"mixed"}))


# Runs and ranks


def draw_seeds(patch: pytest.MonkeyPatch) -> None:
    """Start each run from another seed than its own."""
    original = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda seed: original(int.from_bytes(os.urandom(4), "big")))


def forget_moments(patch: pytest.MonkeyPatch) -> None:
    """Resume without the optimizer's statistics."""
    original = run_state.restore_state

    def restore(state: Any, *arguments: Any, **options: Any) -> None:
        original(state, *arguments, **options)
        state.optimizer.state.clear()

    patch.setattr(run_state, "restore_state", restore)


def lose_sums(patch: pytest.MonkeyPatch) -> None:
    """Return from a sum over ranks with what this rank had."""
    patch.setattr(distributed, "sum_over_ranks", lambda values: values)


def sum_no_gradients(patch: pytest.MonkeyPatch) -> None:
    """Let each rank step with its own gradients."""
    patch.setattr(step, "_sync_gradients_if", lambda model, last: getattr(model, "no_sync", nullcontext)())


def normalise_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", lambda module: module)


CARD = {"needs_card": None}
SGD, GLOO = {"optimizer": "sgd"}, {"collectives": "gloo"}
FAMILY, PRESET = {"family": "stripes"}, {"base_preset": "stripes_smoke"}
IMAGES = {**PRESET, "device": CPU}
DECODING = "decoding_in_the_background_gives_the_images_of_a_decoder_that_waits"
OVERFLOW = "a_step_that_overflows_changes_nothing"
PRODUCTS, COPIES = "products_agree_with_float64", "copies_to_and_from_the_card_arrive_fast"
GRAPHS = "gradients_with_cuda_graphs_are_those_without"

FAULTS = [
    Fault("torch_has_kernels_for_this_card", "torch for another card", leave_out_kernels, "sm_60"),
    Fault(PRODUCTS, "fp32 products in bf16", multiply_coarsely, "a fp32 product of .* differs by"),
    Fault(PRODUCTS, "TF32 does not switch on", never_use_tf32, "TF32 does not switch on"),
    Fault(PRODUCTS, "half types as fast as fp32", multiply_equally_fast, "fp16 products are 1.00 x as fast"),
    Fault(OVERFLOW, "NaN stays in batch statistics", keep_buffers, "changed layers.1.running_mean", SGD),
    Fault(OVERFLOW, "averaged weights move", move_ema, "skipped changed ema.layers.0.weight", SGD),
    Fault(OVERFLOW, "momentum in new memory", use_torch_sgd, "leaves layers.0.weight, .*momentum_buffer.* not", SGD),
    Fault("a_stopped_run_ends_bitwise_equal", "seeds by chance", draw_seeds, "a second run differs", FAMILY, long=True),
    Fault("what_two_ranks_exchange_arrives", "sums of one rank", lose_sums, "rank .: a sum of float32 .* wrong", GLOO),
    Fault(
        "synchronised_statistics_are_those_of_the_whole_batch",
        "each rank normalises alone",
        normalise_alone,
        r"synchronised BatchNorm, layers\..* differs",
        GLOO,
    ),
    Fault(
        "gradients_of_two_ranks_are_summed",
        "gradients are not summed",
        sum_no_gradients,
        "rank .: the gradient of .* of a step on two ranks differs",
        FAMILY,
        long=True,
    ),
    Fault(
        "a_stopped_run_on_two_ranks_ends_bitwise_equal",
        "resumed without moments",
        forget_moments,
        "differs from one that was not in .* entries",
        FAMILY,
        long=True,
    ),
    Fault(DECODING, "images of other labels", swap_images, "images change when the device is busy", IMAGES),
    Fault(DECODING, "brighter images", brighten, "differ from the reference decoder's by", IMAGES, long=True),
    Fault(
        DECODING,
        "the host decodes",
        break_nothing,
        "image decoder has the device 'cpu', not 'mixed'",
        {**PRESET, "device": torch.device("cuda")},
        long=True,
    ),
    Fault(
        DECODING,
        "images stay on the host",
        name_decoder_of_gpu,
        "images lie on the cpu, not on the cuda",
        {**PRESET, "device": torch.device("cuda")},
        long=True,
    ),
    Fault(
        "first_steps_are_finite",
        "an infinite loss",
        break_nothing,
        "the loss of step 0 is inf",
        {"base_preset": "stripes_demo"},
    ),
    Fault(COPIES, "copies change nothing", copy_nothing, "from pinned memory, arrives changed", CARD),
    Fault(COPIES, "8 lanes of PCIe", copy_over_few_lanes, "to_card have 6.5 GB/s", CARD),
    Fault(COPIES, "memory is not pinned", copy_from_unpinned_memory, "memory is not pinned", CARD),
    Fault("copies_overlap_with_products", "copies wait", copy_after_products, "they do not overlap", CARD),
    Fault("the_clock_is_high_under_load", "held at 345 MHz", read_low_clock, "the clock is 345 of 1980 MHz", CARD),
    Fault("copies_between_cards_arrive", "copies change", change_copies_between_cards, "arrive changed.*0-1", CARD),
    Fault("a_step_takes_the_predicted_memory", "half is predicted", predict_half, "memory is 0.5", PRESET),
    Fault(
        "first_steps_in_fp16_are_finite",
        "an infinite loss",
        None,
        "the CPU trains in no fp16; the same check finds it in fp32",
    ),
    Fault(
        GRAPHS, "0.7 % of one gradient is lost", lose_gradients_in_graphs, "gradient of .* differs by", CARD | FAMILY
    ),
    Fault(GRAPHS, "old inputs", repeat_first_micro_batches, "of step 1 differs by", CARD | FAMILY, long=True),
    Fault(
        "a_stopped_run_with_cuda_graphs_ends_bitwise_equal",
        "seeds by chance",
        None,
        "there are no CUDA graphs without one; the same check finds it without them",
    ),
]
"""What is planted for each check of tests/gpu/test_gpu.py; a test counts that none is missing."""
