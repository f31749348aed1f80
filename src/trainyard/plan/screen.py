"""Renders the screen of `trainyard plan`: the cards that a job fits on, why, and the next command. Loads no torch."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainyard.config.settings import StoreSettings, TrainConfig
from trainyard.errors import UserError
from trainyard.hardware import GpuType, choose_precision
from trainyard.plan.memory import (
    CONTEXT_GIB,
    DRIVER_SHARE,
    FRAGMENTS_SHARE,
    MISFIT,
    CardFit,
    Predict,
    PredictionCache,
    StepConfig,
    StepPrediction,
    choose_fit,
    count_disk_bytes,
)
from trainyard.split import explain_micro_batch, split_batch
from trainyard.text import align_columns, format_size

CPU = GpuType("cpu", "CPU", 0, 0.0)
"""Stands for the ranks of a machine without a GPU, whose memory is checked when a run starts."""

HOST = "checked at start"
"""The verdict on the memory of such a machine."""

_WIDTH, _INDENT = 99, 12


@dataclass(frozen=True)
class PlanInputs:
    """Facts that a plan shows besides predictions of memory."""

    words: Sequence[str]  # that name the job, its options and the cluster after `trainyard submit`
    data_bytes: int | None = None  # of the packed data; None: not packed yet
    steps: int | None = None  # of the whole run; None: unknown before packing


def describe_plan(
    config: TrainConfig, cards: Mapping[str, GpuType], predictions: PredictionCache, inputs: PlanInputs, *, gpus: int
) -> Iterator[str]:
    """Yield the lines of one screen."""
    fits = {name: fit_card(config, card, gpus=gpus, predict=predictions.read) for name, card in cards.items()}
    unit = "rank" if all(card is CPU for card in cards.values()) else "GPU"
    yield (
        f"{config.job} on {gpus} {unit}{'s' * (gpus > 1)}: global batch {config.global_batch_size}, learning rate "
        f"{config.optimizer.lr:g} and seed {config.seed} on every card"
    )
    yield ""
    header = ["card", "batch = micro-batch x steps x GPUs", "computes in", "GiB", "of", ""]
    rows = [_list_cells(name, fit) for name, fit in fits.items()]
    yield from (line[:_WIDTH] for line in align_columns([header, *rows]))
    yield ""
    yield from _describe_reasons(fits)
    step = next((fit.step for fit in fits.values() if isinstance(fit, CardFit) and fit.step.parameters), None)
    if step is not None:
        yield from _describe_memory(step, fits)
    yield from _describe_data(config, predictions, inputs)
    if step is not None:
        most = format_size(count_disk_bytes(step, config, inputs.steps))
        yield from _write("checkpoints", f"{format_size(step.checkpoint_bytes)} each, at most {most} on disk")
    yield from _describe_next(config, fits, inputs, gpus)


def fit_card(config: TrainConfig, card: GpuType, *, gpus: int, predict: Predict) -> CardFit | str:
    """Return how the job fits on this card, or why the card cannot compute it."""
    try:
        if card is CPU:
            return _fit_cpu(config, gpus)
        return choose_fit(config, card, gpus=gpus, predict=predict)
    except UserError as error:
        return str(error).partition(". ")[0]


def _fit_cpu(config: TrainConfig, gpus: int) -> CardFit:
    precision = choose_precision(
        None, precision=config.precision, channels_last=config.channels_last, compile=config.compile
    )
    split = split_batch(config.global_batch_size, ranks=gpus, micro_batch=config.micro_batch_size)
    setting = StepConfig.of(split, precision, device="cpu", recompute=config.gradient_checkpointing)
    return CardFit(split, setting, StepPrediction(), HOST, precision, 0.0, explain_micro_batch(config.micro_batch_size))


def _list_cells(name: str, fit: CardFit | str) -> list[str]:
    if isinstance(fit, str):
        return [name, "", "", "", "", "cannot"]
    split = fit.split
    batch = f"{split.global_batch} = {split.micro_batch} x {split.accumulation_steps} x {split.ranks}"
    kind = f"{fit.setting.dtype}{', TF32' * fit.precision.tf32}"
    if fit.verdict == HOST:
        return [name, batch, kind, "", "", HOST]
    if fit.step.refused:
        return [name, batch, kind, "?", f"{fit.has_gib:.1f}", "not predicted"]
    size = fit.step.peak_gib
    return [name, batch, kind, f"{size:.2f}" if size < 10 else f"{size:.1f}", f"{fit.has_gib:.1f}", fit.verdict]


def _describe_reasons(fits: Mapping[str, CardFit | str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, fit in fits.items():
        by_reason.setdefault(fit if isinstance(fit, str) else fit.step.refused or fit.reason, []).append(name)
    for reason, names in by_reason.items():
        yield from _write("why", f"{', '.join(names) if len(by_reason) > 1 else 'all'}: {reason}")


def _describe_memory(step: StepPrediction, fits: Mapping[str, CardFit | str]) -> Iterator[str]:
    sizes = {"weights": step.parameters + step.buffers, "gradients": step.gradients, "optimizer": step.optimizer}
    sizes |= {"averages": step.averages} if step.averages else {}
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items())
    yield from _write("memory", f"{step.parameters // 4:,} parameters; {parts}")
    compiled = any(isinstance(fit, CardFit) and fit.precision.compile for fit in fits.values())
    yield from _write(
        "GiB",
        f"estimated from the job's code and its longest samples, never observed on these cards"
        f"{', without torch.compile' * compiled}. "
        f"To fit: {CONTEXT_GIB:g} GiB more for CUDA and {FRAGMENTS_SHARE:.0%} for fragments; "
        f"of: a card without the {DRIVER_SHARE:.0%} that driver and ECC may take",
    )


def _describe_data(config: TrainConfig, predictions: PredictionCache, inputs: PlanInputs) -> Iterator[str]:
    predicted = str(predictions.about.get("data", ""))
    origin = "; predicted with your data" if predicted and "synthetic" not in predicted else ""
    if "synthetic" in predicted:
        origin = f"; predicted with {predicted}: yours may differ in classes and length"
    if inputs.data_bytes is None:
        yield from _write("data", f"not packed yet, {_describe_packed_size(config)}{origin}")
        return
    staged = "as much again on a node's scratch disk, if it has one" if config.data.stage == "auto" else "not staged"
    yield from _write("data", f"{format_size(inputs.data_bytes)} packed, {staged}{origin}")


def _describe_packed_size(config: TrainConfig) -> str:
    """Return the disk space that packing will take; known beforehand if images are stored uncompressed."""
    packing, image = getattr(config, "packing", None), config.image
    if not isinstance(packing, StoreSettings) or packing.store != "input-raw":
        return "its disk not known"
    each = image.height_px * image.width_px * image.channels
    return f"{each / 1e3:.1f} kB a sample, {each / 1e3:.1f} GB a million (packing.store={packing.store})"


def _describe_next(
    config: TrainConfig, fits: Mapping[str, CardFit | str], inputs: PlanInputs, gpus: int
) -> Iterator[str]:
    """Yield the command that submits a row of the table, once for all cards with the same micro-batch."""
    by_changes: dict[tuple[str, ...], list[str]] = {}
    for name, fit in fits.items():
        if isinstance(fit, CardFit) and fit.verdict != MISFIT:
            by_changes.setdefault(tuple(list_changes(config, fit)), []).append(name)
    count = ["--gpus", str(gpus)] if gpus > 1 else []
    for number, (changes, names) in enumerate(by_changes.items()):
        hw = ["--hw", names[0]] if "--cluster" in inputs.words else []
        line = format_submit_command(config.job, ["submit", *inputs.words, *count, *hw], changes)
        cards = f"  # {', '.join(names)}" if len(by_changes) > 1 else ""
        yield f"{'' if number else 'next':<{_INDENT}} {line}{cards}"
    if not by_changes:
        line = shlex.join(["trainyard", "plan", *inputs.words, "--gpus", str(2 * gpus)])
        yield from _write("next", "nothing fits here: state a smaller micro_batch_size, or share the batch:")
        yield f"{'':<{_INDENT}} {line}"


def list_changes(config: TrainConfig, fit: CardFit) -> list[str]:
    """Return the options with which a job computes the same as its config, but as it fits."""
    stated = split_batch(config.global_batch_size, ranks=fit.split.ranks, micro_batch=config.micro_batch_size)
    changes = [f"micro_batch_size={fit.split.micro_batch}"] if fit.split != stated else []
    recomputes = fit.setting.recompute and not config.gradient_checkpointing
    return [*changes, *(["gradient_checkpointing=true"] if recomputes else [])]


def format_submit_command(job: str, typed: Sequence[str], changes: Sequence[str]) -> str:
    """Return the command with these options after the job, instead of those of the same names, and flags at the end."""
    names = {word.partition("=")[0] for word in changes}
    kept = [word for word in typed if word.partition("=")[0] not in names]
    flags = [word for word in changes if word.startswith("--")]
    options = [word for word in changes if word not in flags]
    place = kept.index(job) + 1 if options else 0
    return shlex.join(["trainyard", *kept[:place], *options, *kept[place:], *flags])


def _write(name: str, text: str) -> Iterator[str]:
    """Yield a name and its text, wrapped; a line to type is not broken."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT - 1, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"{'' if number else name:<{_INDENT}} {line}"
