"""Checks that train a preset on small synthetic data: its first steps, and its steps with CUDA graphs.

Everything that a run decides is decided by the same code (`rank_choices.build_context`). What differs is said in the
figures: a step has one micro-batch, and a head has as many classes as the synthetic data.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from tests.gpu.card import wait_for_device
from tests.gpu.check import SMALL, Figures, Sizes, cannot_answer
from trainyard.config import compose as configs
from trainyard.config.settings import TrainConfig
from trainyard.data.loader import MicroBatch
from trainyard.data.prepare import prepare_data
from trainyard.data.stage import stage
from trainyard.errors import UserError
from trainyard.hardware import choose_precision, explain_missing_compiler
from trainyard.node.choices import build_context
from trainyard.runs.create import create_run
from trainyard.train.determinism import choose_determinism
from trainyard.train.heartbeat import Heartbeat
from trainyard.train.meters import read_peak_memory_gib
from trainyard.train.precision import allow_nondeterministic_operators, make_autocast, read_capability
from trainyard.train.run_context import TRAIN, RunContext, make_loader
from trainyard.train.run_state import prepare_state, wrap_model
from trainyard.train.schedule import build_schedule
from trainyard.train.step import StepResult, TrainState, read_one_step, train_step
from trainyard.train.world import World

Stream = Generator[MicroBatch, None, None]

GRADIENT = "gradient of "

GRAPH_MODES = ("on", "on", "graphs")
"""Values of `compile`: twice without CUDA graphs, for the spread that steps have of themselves, and once with them."""

LEAST_LOST = 7e-3
"""Relative: the smallest change of a gradient that must not pass as rounding."""

ROUNDING = 2**-9
"""Relative: of one value in bf16. Kernels are the same with and without graphs, so whole gradients differ by less."""

_COMPARED_STEPS = 6  # with and without CUDA graphs: one that warms up, one that records, and some that replay
_ACCUMULATED = 2  # micro-batches of such a step
_SPREADS = 3  # times the spread of two runs without graphs, which is one draw of it, contains that of a third
_SMALL_SHARE = 0.01  # of all gradients: how much more than its own size that of one parameter may differ by
_MICRO_BATCHES = 4  # of synthetic data, at least: validation and test parts leave fewer to train on


@dataclass
class PresetSteps:
    """A preset's state, ready to take optimizer steps of one micro-batch each."""

    context: RunContext
    state: TrainState
    schedule: Callable[[int], float]

    def open_stream(self, *, parts: int = 1) -> Stream:
        """Return the loader's stream of micro-batches, from the first on; close it.

        Args:
            parts: micro-batches of a step.
        """
        config = self.context.config
        return make_loader(self.context).train(
            self.context.orders,
            epoch=0,
            start=0,
            micro_batch_size=-(-config.global_batch_size // parts) if parts > 1 else config.micro_batch_size,
        )

    def read_step(self, stream: Stream) -> list[MicroBatch]:
        """Return the micro-batches of the next step of a stream, on the device."""
        return list(read_one_step(stream, self.state.progress, self.context.device))

    def read_micro_batch(self) -> MicroBatch:
        """Return the first micro-batch, on the device."""
        with closing(self.open_stream()) as stream:
            return self.read_step(stream)[0]

    def choose_determinism(self) -> None:
        """Make the choice that a run makes before its first step, if the preset asks for determinism."""
        context = self.context
        if context.config.deterministic:
            choose_determinism(
                self.state.module,
                self.read_micro_batch,
                run=context.run,
                device=context.device,
                is_main=context.world.is_main,
                autocast=make_autocast(context.precision, context.device),
            )

    def take_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Take the next optimizer step, with the learning rate that a run would have."""
        context, progress = self.context, self.state.progress
        result = train_step(
            self.state,
            micro_batches,
            lr=self.schedule(progress.step),
            world_size=1,
            seed=context.config.seed,
            clip_grad_norm=context.config.clip_grad_norm,
            autocast=make_autocast(context.precision, context.device),
        )
        progress.step += 1
        progress.samples_seen += sum(map(count_samples, micro_batches))
        return result

    def copy_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step, "gradient of NAME", in float32 on the host."""
        named = self.state.module.named_parameters()
        return {f"{GRADIENT}{name}": p.grad.float().cpu().clone() for name, p in named if p.grad is not None}

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

    Skips if this device does not compute as the config says.
    """
    config = configs.compose(preset, overrides, sizes.jobs)
    refuse_unsupported_settings(config)
    micro_batch_size = config.micro_batch_size or config.global_batch_size
    smoke = configs.compose(f"{config.family}_smoke", [], sizes.jobs)
    count = max(smoke.data.synthetic, 0 if sizes.small else _MICRO_BATCHES * micro_batch_size)
    own = [f"global_batch_size={micro_batch_size}", f"data.synthetic={count}", f"data.cache={sizes.data}"]
    config = configs.apply_overrides(config, [*own, "data.path=", "data.stage=off", "trackers=[]"])
    return prepare_data(config, sizes.jobs)


def check_settings(device: torch.device, sizes: Sizes, *, family: str, overrides: Sequence[str]) -> Figures:
    """Skip if this machine does not compute a family's smoke preset as the overrides say."""
    refuse_unsupported_settings(configs.compose(f"{family}_smoke", overrides, sizes.jobs))
    return {}


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
        cannot_answer(str(error))
    if config.compile in ("on", "graphs") and (missing := explain_missing_compiler(sm, os.environ)):
        pytest.skip(missing)


@contextmanager
def open_preset(
    preset: str, overrides: Sequence[str], sizes: Sizes, *, world: World | None = None
) -> Iterator[PresetSteps]:
    """Prepare a preset's steps on this machine's device, as a run would; its run folder is deleted at the end.

    Skips if this device does not compute as the preset says, or if the preset needs more than synthetic data, such as a
    file of weights.

    Raises:
        UserError: a smoke or demo preset, which needs nothing else, cannot be prepared.
    """
    with ExitStack() as closed:
        with _explain_missing_files(preset):
            config = prepare_preset(preset, overrides, sizes)
            run = create_run(sizes.scratch, config, name=uuid4().hex)
            closed.callback(shutil.rmtree, run)
            context = _build_context(run, config, sizes, world or World())
            closed.enter_context(closing(context.data))
        state, _ = prepare_state(context)
        schedule = build_schedule(state.module, config, steps_per_epoch=len(context.orders(0)))
        steps = PresetSteps(context, state, schedule)
        autocast = make_autocast(context.precision, context.device)
        wrap_model(context, state, lambda: [steps.read_micro_batch()], autocast=autocast)
        steps.choose_determinism()
        yield steps


@contextmanager
def _explain_missing_files(preset: str) -> Iterator[None]:
    """Skip a preset that may need files which are not here, and says so in an error."""
    try:
        yield
    except UserError as error:
        if preset.endswith(SMALL):
            raise
        cannot_answer(str(error))


def _build_context(run: Path, config: TrainConfig, sizes: Sizes, world: World) -> RunContext:
    staged = stage(Path(config.data.path), wanted="off", environ=sizes.environ)
    heartbeat = Heartbeat(run, "gpu-check")
    context = build_context(run, config, staged, sizes.jobs, world, heartbeat, None, sizes.environ)
    context.orders(0)  # or say that the synthetic data leaves nothing to train on
    return context


# First contact


def take_first_steps(device: torch.device, sizes: Sizes, *, preset: str, overrides: Sequence[str]) -> Figures:
    """Take the first optimizer steps of a preset and predict once; check that losses, weights and rows are finite.

    Raises:
        AssertionError: they are not, or every step was skipped.
    """
    with open_preset(preset, overrides, sizes) as steps, closing(steps.open_stream()) as stream:
        module = steps.state.module
        unset = _find_nonfinite(module.state_dict())  # such as a threshold that the first evaluation sets
        begin = time.perf_counter()
        results = [steps.take_step(steps.read_step(stream))]
        wait_for_device(device)
        first_step_s = time.perf_counter() - begin
        begin, samples = time.perf_counter(), 0
        for _ in range(sizes.steps - 1):
            micro_batches = steps.read_step(stream)
            samples += sum(map(count_samples, micro_batches))
            results.append(steps.take_step(micro_batches))
        wait_for_device(device)
        elapsed_s = time.perf_counter() - begin
        losses = torch.stack([result.losses["loss"] for result in results]).tolist()
        skipped = int(torch.stack([result.skipped for result in results]).sum())
        _check_losses(losses, skipped, loss_scaling=steps.context.precision.loss_scaling)
        spoilt = sorted(_find_nonfinite(module.state_dict()) - unset)
        assert not spoilt, f"{len(spoilt)} tensors of the model are no longer finite; the first is {spoilt[0]}"
        spoilt = sorted(_find_nonfinite(_predict(steps)))
        assert not spoilt, f"what the model predicts is not finite: {spoilt[0]}"
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
    assert not wrong, f"the loss of step {wrong[0]} is {losses[wrong[0]]}"
    assert not skipped or (loss_scaling and skipped < len(losses)), (
        f"{skipped} of {len(losses)} steps were skipped: their gradients are not finite"
    )


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


# CUDA graphs


def compare_graphs(device: torch.device, sizes: Sizes, *, family: str) -> Figures:
    """Check that losses and gradients of compiled steps with and without CUDA graphs agree.

    The kernels are the same, so they differ only if a graph reads or writes memory that something else uses, keeps what
    an earlier step had, or draws other random numbers. Each step accumulates other micro-batches than the one before.

    Raises:
        AssertionError: they differ, or are not finite.
    """
    preset = f"{family}_smoke"
    refuse_unsupported_settings(configs.compose(preset, [f"compile={GRAPH_MODES[-1]}"], sizes.jobs))
    first, second, graphs = (_take_accumulated_steps(preset, f"compile={m}", device, sizes) for m in GRAPH_MODES)
    spread = max(difference for difference, _ in map(find_largest_difference, first, second))
    if _SPREADS * spread >= LEAST_LOST:
        pytest.skip(f"two runs without CUDA graphs differ by {spread:.1e}: a gradient could be lost unnoticed")
    allowed = max(ROUNDING, _SPREADS * spread)
    found = list(map(find_largest_difference, first, graphs))
    for number, (difference, name) in enumerate(found):
        assert difference <= allowed, (
            f"with CUDA graphs the {name} of step {number} differs by {difference:.1e} from that without, "
            f"allowed is {allowed:.1e}"
        )
    return {
        "preset": preset,
        "compared_steps": len(found),
        "accumulated": _ACCUMULATED,
        "largest_difference": max(difference for difference, _ in found),
        "spread_without": spread,
    }


def _take_accumulated_steps(preset: str, override: str, device: torch.device, sizes: Sizes) -> list[dict[str, Tensor]]:
    """Return the loss and the gradients of each of the first steps; frees all that they took on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = []
    with open_preset(preset, [override, "deterministic=true"], sizes) as steps:
        with closing(steps.open_stream(parts=_ACCUMULATED)) as stream:
            for _ in range(_COMPARED_STEPS):
                micro_batches = steps.read_step(stream)
                assert len(micro_batches) == _ACCUMULATED
                result = steps.take_step(micro_batches)
                norm = result.grad_norm.cpu()  # clipping hides it in the gradients
                found.append({"loss": result.losses["loss"].cpu(), "norm": norm, **steps.copy_gradients()})
    return found


def find_largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return by how much a loss, norm or gradient differs most, relative to its size in `a`, and its name.

    A hundredth of all gradients is added to the size of each: those that are 0 but for rounding, such as of a bias
    before BatchNorm, may differ as much as they like. Infinite if a value is not finite, or a name is missing.
    """
    norms = {name: values.double().norm() for name, values in a.items()}
    whole = torch.stack([norm for name, norm in norms.items() if name.startswith(GRADIENT)]).norm()
    found = dict.fromkeys(sorted(a.keys() | b.keys()), math.inf)
    for name in a.keys() & b.keys():
        size = norms[name] + (_SMALL_SHARE * whole if name.startswith(GRADIENT) else 0)
        difference = float((a[name].double() - b[name].double()).norm() / size)
        found[name] = difference if math.isfinite(difference) else math.inf
    where = max(found, key=found.__getitem__)
    return found[where], where
