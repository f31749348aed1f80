"""Checks that train a preset on small synthetic data: first steps, rates of full-size steps, loader against compute.

Everything that a run decides is decided by the same code (`rank_choices.build_context`). What differs is said in the
figures: a step has one micro-batch, and a head has as many classes as the synthetic data.
"""

import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainyard import config as configs
from trainyard.data.loader import MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.data.stage import stage
from trainyard.errors import UserError
from trainyard.hardware import choose_precision
from trainyard.launch.compile_choice import CACHE_VARIABLES
from trainyard.launch.rank_choices import build_context
from trainyard.measure import Candidate, Summary, measure_candidates
from trainyard.runs.create import create_run
from trainyard.settings import TrainConfig
from trainyard.tools.gpu_checks.card import (
    measure_device_rate,
    measure_product_rate,
    read_capability,
    wait_for_device,
)
from trainyard.tools.gpu_checks.check import SMALL, CheckFailed, Figures, NotRun, Sizes
from trainyard.train.determinism import choose_determinism
from trainyard.train.heartbeat import Heartbeat
from trainyard.train.meters import read_peak_memory_gib
from trainyard.train.precision import allow_nondeterministic_operators, make_autocast
from trainyard.train.run_context import TRAIN, RunContext, compute_total_steps, make_loader
from trainyard.train.run_state import prepare_state
from trainyard.train.schedule import compute_lr_factor
from trainyard.train.step import StepResult, TrainState, train_step
from trainyard.train.world import World

Stream = Generator[MicroBatch, None, None]

_WARM_UP = 3  # steps before the clock starts
_COMPARED_STEPS = 6  # with and without CUDA graphs: one that warms up, one that records, and some that replay
_ACCUMULATED = 2  # micro-batches of such a step
_LOSS_TOLERANCE = 1e-2  # relative: with deterministic=false, a kernel may sum in another order at each call
_MICRO_BATCHES = 4  # of synthetic data, at least: validation and test parts leave fewer to train on


@dataclass
class PresetSteps:
    """A preset's state, ready to take optimizer steps of one micro-batch each."""

    context: RunContext
    state: TrainState
    total_steps: int | None
    steps_per_epoch: int

    def open_stream(self) -> Stream:
        """Return the loader's stream of micro-batches, from the first on; close it."""
        return make_loader(self.context).train(
            self.context.orders,
            epoch=0,
            start=0,
            micro_batch_size=self.context.config.micro_batch_size,
        )

    def read_micro_batch(self) -> MicroBatch:
        """Return the first micro-batch, on the device."""
        with closing(self.open_stream()) as stream:
            return self._complete(next(stream))

    def choose_determinism(self) -> None:
        """Make the choice that a run makes before its first step, if the preset asks for determinism."""
        context = self.context
        if context.config.deterministic:
            choose_determinism(
                self.state.module,
                self.read_micro_batch,
                run=context.run,
                device=context.device,
                is_main=True,
                autocast=make_autocast(context.precision, context.device),
            )

    def take_step(self, micro_batch: MicroBatch, *, times: int = 1) -> StepResult:
        """Take the next optimizer step, with the learning rate that a run would have.

        Args:
            times: how often the micro-batch counts in it, as if these were the micro-batches of a step.
        """
        context, progress = self.context, self.state.progress
        factor = compute_lr_factor(
            progress.step,
            context.config.schedule,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
        )
        result = train_step(
            self.state,
            [self._complete(micro_batch, part=part, parts=times) for part in range(times)],
            lr=context.config.optimizer.lr * factor,
            world_size=1,
            seed=context.config.seed,
            clip_grad_norm=context.config.clip_grad_norm,
            autocast=make_autocast(context.precision, context.device),
        )
        progress.step += 1
        progress.samples_seen += count_samples(micro_batch)
        return result

    def _complete(self, micro_batch: MicroBatch, *, part: int = 0, parts: int = 1) -> MicroBatch:
        """Return a micro-batch as one of equal parts of a step, which begins after the samples seen so far."""
        samples_seen = torch.tensor(self.state.progress.samples_seen).to(self.context.device, non_blocking=True)
        batch = {**micro_batch.batch, "samples_seen": samples_seen}
        return MicroBatch(batch, weight=1 / parts, last=part == parts - 1, wait_s=micro_batch.wait_s)

    def describe(self) -> Figures:
        """Return what the figures of a step depend on."""
        config, precision = self.context.config, self.context.precision
        return {
            "preset": config.job,
            "family": config.family,
            "precision": precision.dtype,
            "tf32": precision.tf32,
            "channels_last": precision.channels_last,
            "compile": precision.compile,
            "cuda_graphs": precision.cuda_graphs,
            "deterministic": config.deterministic,
            "gradient_checkpointing": config.gradient_checkpointing,
            "micro_batch_size": config.global_batch_size,
            "micro_batches_per_step": 1,
            "parameters": sum(p.numel() for p in self.state.module.parameters()),
        }


def count_samples(micro_batch: MicroBatch) -> int:
    return len(micro_batch.batch["sample_id"])


def prepare_preset(preset: str, overrides: Sequence[str], sizes: Sizes) -> TrainConfig:
    """Return a preset's config with small synthetic data, packed now if needed, and one micro-batch per step.

    Raises:
        NotRun: this device does not compute as the config says.
    """
    config = configs.compose(preset, overrides, sizes.jobs)
    refuse_unsupported_settings(config)
    micro_batch_size = config.micro_batch_size or config.global_batch_size
    smoke = configs.compose(f"{config.family}_smoke", [], sizes.jobs)
    count = max(smoke.data.synthetic, 0 if sizes.small else _MICRO_BATCHES * micro_batch_size)
    own = [f"global_batch_size={micro_batch_size}", f"data.synthetic={count}", f"data.cache={sizes.data}"]
    config = configs.apply_overrides(config, [*own, "data.path=", "data.stage=off", "trackers=[]"])
    return prepare_data(config, sizes.jobs)


def refuse_unsupported_settings(config: TrainConfig) -> None:
    sm = read_capability(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    try:
        choose_precision(
            sm,
            precision=config.precision,
            channels_last=config.channels_last,
            compile=config.compile,
            varying_shapes=config.explain_varying_shapes(),
        )
    except UserError as error:
        raise NotRun(str(error)) from error


@contextmanager
def open_preset(preset: str, overrides: Sequence[str], sizes: Sizes) -> Iterator[PresetSteps]:
    """Prepare a preset's steps on this machine's device, as a run would; its run folder is deleted at the end.

    Raises:
        NotRun: this device does not compute as the preset says, or the preset needs more than synthetic data, such as
            a file of weights; says why.
        UserError: a smoke or demo preset, which needs nothing else, cannot be prepared.
    """
    with ExitStack() as closed:
        with _explain_missing_files(preset):
            config = prepare_preset(preset, overrides, sizes)
            run = create_run(sizes.scratch, config, name=uuid4().hex)
            closed.callback(shutil.rmtree, run)
            context = _build_context(run, config, sizes)
            closed.enter_context(closing(context.data))
        state, _ = prepare_state(context)
        count = len(context.orders(0))
        steps = PresetSteps(context, state, compute_total_steps(config, count), count)
        steps.choose_determinism()
        yield steps


@contextmanager
def _explain_missing_files(preset: str) -> Iterator[None]:
    """Turn the error of a preset that may need files which are not here into the reason why it does not run."""
    try:
        yield
    except UserError as error:
        if preset.endswith(SMALL):
            raise
        raise NotRun(str(error)) from error


def _build_context(run: Path, config: TrainConfig, sizes: Sizes) -> RunContext:
    staged = stage(Path(config.data.path), wanted="off", environ=sizes.environ)
    heartbeat = Heartbeat(run, "gpu-check")
    context = build_context(run, config, staged, sizes.jobs, World(), heartbeat, None, sizes.environ)
    context.orders(0)  # or say that the synthetic data leaves nothing to train on
    return context


# First contact


def take_first_steps(device: torch.device, sizes: Sizes, *, preset: str, overrides: Sequence[str]) -> Figures:
    """Take the first optimizer steps of a preset and predict once; check that losses, weights and rows are finite.

    Raises:
        CheckFailed: they are not, or every step was skipped.
    """
    with open_preset(preset, overrides, sizes) as steps, closing(steps.open_stream()) as stream:
        module = steps.state.module
        unset = _find_nonfinite(module.state_dict())  # such as a threshold that the first evaluation sets
        begin = time.perf_counter()
        results = [steps.take_step(next(stream))]
        wait_for_device(device)
        first_step_s = time.perf_counter() - begin
        begin, samples = time.perf_counter(), 0
        for _ in range(sizes.steps - 1):
            micro_batch = next(stream)
            samples += count_samples(micro_batch)
            results.append(steps.take_step(micro_batch))
        wait_for_device(device)
        elapsed_s = time.perf_counter() - begin
        losses = torch.stack([result.losses["loss"] for result in results]).tolist()
        skipped = int(torch.stack([result.skipped for result in results]).sum())
        _check_losses(losses, skipped, loss_scaling=steps.context.precision.loss_scaling)
        if spoilt := sorted(_find_nonfinite(module.state_dict()) - unset):
            raise CheckFailed(f"{len(spoilt)} tensors of the model are no longer finite; the first is {spoilt[0]}")
        if spoilt := sorted(_find_nonfinite(_predict(steps))):
            raise CheckFailed(f"what the model predicts is not finite: {spoilt[0]}")
        return {
            **steps.describe(),
            "steps": sizes.steps,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "skipped_steps": skipped,
            "first_step_s": round(first_step_s, 3),
            "samples_per_s": round(samples / elapsed_s, 2),
            "peak_memory_gib": round(read_peak_memory_gib(device), 3),
        }


def _check_losses(losses: Sequence[float], skipped: int, *, loss_scaling: bool) -> None:
    wrong = [number for number, loss in enumerate(losses) if not torch.isfinite(torch.tensor(loss))]
    if wrong:
        raise CheckFailed(f"the loss of step {wrong[0]} is {losses[wrong[0]]}")
    if skipped and (not loss_scaling or skipped == len(losses)):
        raise CheckFailed(f"{skipped} of {len(losses)} steps were skipped: their gradients are not finite")


def _find_nonfinite(values: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors with a value that is NaN or infinite."""
    return {name for name, v in values.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())}


def _predict(steps: PresetSteps) -> dict[str, Tensor]:
    context = steps.context
    ids = context.splits[TRAIN][: context.config.eval_batch_size]
    module = steps.state.module.eval()
    autocast = make_autocast(context.precision, context.device)
    with closing(make_loader(context).evaluate(ids, batch_size=len(ids))) as stream:
        with torch.inference_mode(), allow_nondeterministic_operators(), autocast():
            return module.predict(next(stream).batch)


# Rates of steps


def measure_eager_steps(device: torch.device, sizes: Sizes, *, preset: str, overrides: Sequence[str]) -> Figures:
    """Time steps on one micro-batch that stays on the device, and compare them with the card's measured peak."""
    with open_preset(preset, overrides, sizes) as steps:
        micro_batch = steps.read_micro_batch()
        rates = _measure_steps(steps, micro_batch, device, sizes)
        flops = _count_flops(steps, micro_batch)
        figures = {
            **steps.describe(),
            **_name_card(device),
            "samples_per_s": round(rates.median, 2),
            "spread": round(rates.spread, 3),
            "quotable": rates.quotable,
            "peak_memory_gib": round(read_peak_memory_gib(device), 3),
            "gflop_per_sample": round(flops / 1e9, 3),
        }
        precision = steps.context.precision
        kind = "tf32" if precision.dtype == "fp32" and precision.tf32 else precision.dtype
    peak = measure_product_rate(kind, device, sizes)
    return figures | {
        "peak_tflop_s": round(peak.median, 2),
        "mfu": round(rates.median * flops / (peak.median * 1e12), 4),
    }


def measure_compiled_steps(device: torch.device, sizes: Sizes, *, preset: str, overrides: Sequence[str]) -> Figures:
    """Time the same steps eager and compiled, one after the other in one process, and what compiling costs at first."""
    eager = _measure_uncompiled(preset, overrides, device, sizes)  # freed before the compiled ones are built
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    empty = sizes.scratch / f"compiled-{uuid4().hex}"
    sizes = replace(sizes, environ={**sizes.environ, CACHE_VARIABLES[0]: str(empty), CACHE_VARIABLES[1]: ""})
    with open_preset(preset, [*overrides, "compile=on"], sizes) as steps:
        micro_batch = steps.read_micro_batch()
        wait_for_device(device)
        begin = time.perf_counter()
        steps.take_step(micro_batch)
        wait_for_device(device)
        first_s = time.perf_counter() - begin
        compiled = _measure_steps(steps, micro_batch, device, sizes)
        return {
            **steps.describe(),
            **_name_card(device),
            "samples_per_s_eager": round(eager.median, 2),
            "spread_eager": round(eager.spread, 3),
            "samples_per_s_compiled": round(compiled.median, 2),
            "spread_compiled": round(compiled.spread, 3),
            "quotable": eager.quotable and compiled.quotable,
            "compile_startup_s": round(max(0.0, first_s - count_samples(micro_batch) / compiled.median), 2),
            "peak_memory_gib": round(read_peak_memory_gib(device), 3),
        }


def compare_graphs(
    device: torch.device,
    sizes: Sizes,
    *,
    preset: str,
    overrides: Sequence[str],
    modes: tuple[str, str] = ("on", "graphs"),
) -> Figures:
    """Time compiled steps with and without CUDA graphs, after checking that their losses agree.

    The kernels are the same, so losses differ only if a graph reads or writes memory that something else uses, or draws
    other random numbers. Each step that is compared accumulates the gradients of several micro-batches.

    Args:
        modes: the two values of `compile`.

    Raises:
        CheckFailed: losses differ.
    """
    refuse_unsupported_settings(configs.compose(preset, [*overrides, f"compile={modes[1]}"], sizes.jobs))
    names = ("without_graphs", "graphs")
    first, second = (
        _take_and_time_steps(preset, [*overrides, f"compile={mode}"], device, sizes, name=name)
        for mode, name in zip(modes, names, strict=True)
    )
    check_equal_losses(first[0], second[0])
    both = {"compared_steps": _COMPARED_STEPS, "accumulated": _ACCUMULATED}
    return {**first[1], **second[1], **both, "quotable": first[1]["quotable"] and second[1]["quotable"]}


def _take_and_time_steps(
    preset: str, overrides: Sequence[str], device: torch.device, sizes: Sizes, *, name: str
) -> tuple[list[float], Figures]:
    """Return the losses of the first steps, and the rate of later ones; frees all that they took."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with open_preset(preset, overrides, sizes) as steps:
        micro_batch = steps.read_micro_batch()
        losses = [steps.take_step(micro_batch, times=_ACCUMULATED).losses["loss"] for _ in range(_COMPARED_STEPS)]
        rates = _measure_steps(steps, micro_batch, device, sizes)
        return torch.stack(losses).tolist(), {
            **steps.describe(),
            **_name_card(device),
            f"samples_per_s_{name}": round(rates.median, 2),
            f"spread_{name}": round(rates.spread, 3),
            f"peak_memory_gib_{name}": round(read_peak_memory_gib(device), 3),
            "quotable": rates.quotable,
        }


def check_equal_losses(without: Sequence[float], graphs: Sequence[float]) -> None:
    """Check that the losses of the same steps agree to `_LOSS_TOLERANCE`.

    Raises:
        CheckFailed: they do not, or one is not finite.
    """
    for number, (a, b) in enumerate(zip(without, graphs, strict=True)):
        if not abs(a - b) <= _LOSS_TOLERANCE * abs(a):
            raise CheckFailed(f"with CUDA graphs the loss of step {number} is {b:.6g}, without them {a:.6g}")


def _measure_uncompiled(preset: str, overrides: Sequence[str], device: torch.device, sizes: Sizes) -> Summary:
    with open_preset(preset, [*overrides, "compile=off"], sizes) as steps:
        return _measure_steps(steps, steps.read_micro_batch(), device, sizes)


def _measure_steps(steps: PresetSteps, micro_batch: MicroBatch, device: torch.device, sizes: Sizes) -> Summary:
    def work() -> int:
        steps.take_step(micro_batch)
        return count_samples(micro_batch)

    for _ in range(_WARM_UP):
        work()
    rates = [measure_device_rate(work, device, seconds=sizes.seconds) for _ in range(sizes.rounds)]
    return Summary.from_values(rates)


def _count_flops(steps: PresetSteps, micro_batch: MicroBatch) -> float:
    """Count the operations of a step's products and convolutions, per sample; recomputed activations count again."""
    with FlopCounterMode(display=False) as counter:
        steps.take_step(micro_batch)
    total: int = counter.get_total_flops()
    return total / count_samples(micro_batch)


def _name_card(device: torch.device) -> Figures:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"card": name, "sm": read_capability(device), "torch": torch.__version__}


# Loader and compute


def measure_overlap(device: torch.device, sizes: Sizes, *, preset: str, overrides: Sequence[str]) -> Figures:
    """Time the loader alone, steps alone, and both together, in rounds of shuffled order."""
    with open_preset(preset, overrides, sizes) as steps:
        kept = steps.read_micro_batch()

        def load(stream: Stream) -> int:
            return count_samples(next(stream))

        def compute() -> int:
            steps.take_step(kept)
            return count_samples(kept)

        def load_and_compute(stream: Stream) -> int:
            micro_batch = next(stream)
            steps.take_step(micro_batch)
            return count_samples(micro_batch)

        def measure_with_stream(work: Any) -> float:
            with closing(steps.open_stream()) as stream:
                work(stream)  # fills the queue
                return measure_device_rate(partial(work, stream), device, seconds=sizes.seconds)

        candidates = [
            Candidate("loader", partial(measure_with_stream, load), "samples/s"),
            Candidate("compute", partial(measure_device_rate, compute, device, seconds=sizes.seconds), "samples/s"),
            Candidate("both", partial(measure_with_stream, load_and_compute), "samples/s"),
        ]
        lines = measure_candidates(candidates, rounds=sizes.rounds, warm_up=True)
        rates = {line["name"]: Summary(**line["summary"]) for line in lines}
        figures: Figures = {**steps.describe(), "decode": steps.context.decode, "threads": steps.context.threads}
        for name, rate in rates.items():
            figures |= {f"{name}_samples_per_s": round(rate.median, 2), f"{name}_spread": round(rate.spread, 3)}
        slower = min(rates["loader"].median, rates["compute"].median)
        return figures | {"both_over_slower": round(rates["both"].median / slower, 3)}
