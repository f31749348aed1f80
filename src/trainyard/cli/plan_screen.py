"""The screen of `trainyard plan`: each number is marked as measured, derived, estimated or assumed. Loads no torch."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.duration import Duration
from trainyard.errors import UserError
from trainyard.hardware import Gpu, GpuType, choose_precision
from trainyard.launch.decoding_need import find_cores_needed
from trainyard.launch.memory_prediction import (
    CONTEXT_GIB,
    DRIVER_SHARE,
    FRAGMENTS_SHARE,
    MISFIT,
    Setting,
    Split,
    StepPrediction,
    Store,
    choose_split,
)
from trainyard.launch.observed import ObservedStep, correct, count_disk_bytes, estimate_checkpoint_bytes, make_place
from trainyard.runs.observations import Observation, find_observation
from trainyard.settings import StoreSettings, TrainConfig
from trainyard.text import align_columns, format_size
from trainyard.train.save_interval import compute_interval_s

CPU = GpuType("cpu", "CPU", 0, 0.0)
"""Stands for the ranks of a machine without a GPU, whose memory is checked when a run starts."""

HOST = "checked at start"
"""The verdict on the memory of such a machine."""

_WIDTH, _INDENT = 99, 12


@dataclass(frozen=True)
class Known:
    """What is known of a job besides the predictions of its memory."""

    observations: Sequence[Observation]  # of this configuration, data and code, newest first
    steps_per_epoch: int | None  # None: the data is not packed yet
    data_bytes: int | None  # of the packed data
    results: Path  # folder of gpu-check's files
    words: Sequence[str]  # what names this job, its options and its GPUs after `trainyard submit`


def describe_plan(
    config: TrainConfig, cards: Mapping[str, GpuType], store: Store, known: Known, *, gpus: int
) -> Iterator[str]:
    """Yield the lines of one screen."""
    splits = {name: _split(config, card, store, known, gpus) for name, card in cards.items()}
    found = {name: _find(known, cards[name], split, gpus) for name, split in splits.items()}
    steps = _count_steps(config, known)
    possible = [split for split in splits.values() if isinstance(split, Split) and not split.step.refused]
    yield f"{config.job} on {gpus} {'rank' if all(card is CPU for card in cards.values()) else 'GPU'}{'s' * (gpus > 1)}"
    yield from _write(
        "every card",
        f"global batch {config.global_batch_size}, peak learning rate {config.optimizer.lr:g}, seed {config.seed}, "
        "and so the order",
    )
    step = next((split.step for split in possible if split.step.parameters), None)
    if step is not None:
        plain = [split for split in possible if split.step.flops and not split.setting.recompute]
        flops = f"; {_count_flops(plain[0]) / 1e9:.3g} GFLOP a sample" if plain else ""
        yield from _write("derived", _describe_sizes(step) + flops)
    yield ""
    header = ["card", "batch = micro-batch x steps x GPUs", "computes in", "GiB", "of", "", "a step", "hours"]
    rows = [_list_cells(name, split, cards[name], config, gpus, found[name], steps) for name, split in splits.items()]
    header[1] = "batch = micro x steps x GPUs" if any(len(row[1]) < 29 for row in rows) else header[1]
    yield from (line[:_WIDTH] for line in align_columns([header, *rows]))
    yield ""
    yield from _describe_refusals(splits)
    yield from _describe_reasons(splits)
    yield from _describe_compile(splits, config)
    yield from _describe_checkpointing(splits, store, config)
    yield from _describe_marks(splits, found)
    yield from _describe_data(config, store, known)
    yield from _describe_decoding(config, cards, known)
    yield from _describe_checkpoints(config, step, [run for run in found.values() if run is not None], steps)
    yield from _describe_next(config, splits, [row[-1] for row in rows], known)


def _split(config: TrainConfig, card: GpuType, store: Store, known: Known, gpus: int) -> Split | str:
    """Return how the job is split on this card, by what was observed there and else by what is predicted."""
    try:
        if card is CPU:
            return _split_on_cpu(config, gpus)
        return choose_split(config, card, gpus=gpus, predict=correct(store.read, known.observations, card, gpus=gpus))
    except UserError as error:
        return str(error).partition(". ")[0]


def _split_on_cpu(config: TrainConfig, gpus: int) -> Split:
    precision = choose_precision(
        None, precision=config.precision, channels_last=config.channels_last, compile=config.compile
    )
    share = -(-config.global_batch_size // gpus)
    micro_batch = min(config.micro_batch_size or share, share)
    setting = Setting(
        device="cpu",
        dtype=precision.dtype,
        channels_last=precision.channels_last,
        recompute=config.gradient_checkpointing,
        micro_batch=micro_batch,
        accumulates=micro_batch < share or gpus > 1,
    )
    why = "as stated" if config.micro_batch_size else "the whole share of a rank"
    return Split(setting, StepPrediction(), HOST, -(-share // micro_batch), precision, 0.0, why)


def _find(known: Known, card: GpuType, split: Split | str, gpus: int) -> Observation | None:
    """Return what a run took on this card in this setting."""
    if isinstance(split, str):
        return None
    return find_observation(known.observations, make_place(card.key, gpus, split.setting))


def _describe_sizes(step: StepPrediction) -> str:
    sizes = {"weights": step.parameters + step.buffers, "gradients": step.gradients, "optimizer": step.optimizer}
    sizes |= {"averages": step.averages} if step.averages else {}
    return f"{step.parameters // 4:,} parameters; " + ", ".join(f"{n} {format_size(size)}" for n, size in sizes.items())


def _list_cells(
    name: str,
    split: Split | str,
    card: GpuType,
    config: TrainConfig,
    gpus: int,
    found: Observation | None,
    steps: int | None,
) -> list[str]:
    if isinstance(split, str):
        return [name, "cannot", "", "", "", "", "", ""]
    batch = f"{config.global_batch_size} = {split.setting.micro_batch} x {split.accumulation_steps} x {gpus}"
    kind = f"{split.setting.dtype}{', TF32' * split.precision.tf32}"
    if card is CPU:
        return [name, batch, kind, "?", "?", split.verdict, "?", _format_hours(config, found)]
    if split.step.refused:
        return [name, batch, kind, "?", f"{split.has_gib:.1f}", MISFIT, "?", _format_hours(config, found)]
    size = f"{_format_gib(split.step.peak_gib)} {'m' if isinstance(split.step, ObservedStep) else 'e'}"
    floor_s = compute_floor_s(card, split, samples=config.global_batch_size // gpus)
    floor = "?" if floor_s is None else f">= {_format_ms(1e3 * floor_s)}"
    least_s = None if floor_s is None or steps is None else steps * floor_s
    hours = _format_hours(config, found, least_s=least_s)
    return [name, batch, kind, size, f"{split.has_gib:.1f}", split.verdict, floor, hours]


def compute_floor_s(card: GpuType, split: Split, *, samples: int) -> float | None:
    """Return the least seconds of a step: its operations at the card's peak, or its weights at the peak bandwidth.

    A roofline (Williams, Waterman, Patterson 2009, CACM 52(4), 65-76) from the datasheet figures in hardware.GPUS, of
    the precision that this card computes in. Of the memory traffic only what no step can avoid counts: weights and
    the optimizer's state are read and written, gradients are written and read.

    Args:
        samples: of a GPU, in a step.

    Returns:
        None for a card without datasheet figures.
    """
    if not isinstance(card, Gpu):
        return None
    dtype = "tf32" if split.setting.dtype == "fp32" and split.precision.tf32 else split.setting.dtype
    peak: float | None = getattr(card, f"{dtype}_tflop_s")
    assert peak is not None, f"{card.key} does not compute in {dtype}"
    step = split.step
    computing_s = _count_flops(split) * samples / (peak * 1e12)
    moved = 2 * (step.parameters + step.optimizer + step.gradients)
    return max(computing_s, moved / (card.bandwidth_gb_s * 1e9))


def compute_hours(config: TrainConfig, found: Observation | None) -> float | None:
    """Return how long the whole run takes: as stated, or by the time of a step of a run at the same place."""
    length = Duration.parse(config.max_duration)
    if found is None or found.step_s is None:
        return None
    if length.unit == "min":
        return length.to_minutes() / 60
    return length.to_steps(found.steps_per_epoch) * found.step_s / 3600


def _format_hours(config: TrainConfig, found: Observation | None, *, least_s: float | None = None) -> str:
    """Return the hours of the whole run as stated, as measured, or at least; "?" if nothing is known of them."""
    length = Duration.parse(config.max_duration)
    if length.unit == "min":
        return f"{length.to_minutes() / 60:.3g}"
    if (hours := compute_hours(config, found)) is not None:
        return f"{hours:.3g} m"
    return "?" if least_s is None else f">= {least_s / 3600:.2g}"


def _count_steps(config: TrainConfig, known: Known) -> int | None:
    """Return the steps of the whole run, if neither its minutes nor its data decide about them."""
    length = Duration.parse(config.max_duration)
    if length.unit == "st" or (length.unit == "ep" and known.steps_per_epoch is not None):
        return length.to_steps(known.steps_per_epoch or 0)
    return None


def _describe_refusals(splits: Mapping[str, Split | str]) -> Iterator[str]:
    for name, split in splits.items():
        if isinstance(split, str):
            yield from _write("cannot", f"{name}: {split}")


def _describe_reasons(splits: Mapping[str, Split | str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, split in splits.items():
        if isinstance(split, Split):
            by_reason.setdefault(split.reason, []).append(name)
    for reason, names in by_reason.items():
        yield from _write("micro-batch", f"{', '.join(names) if len(by_reason) > 1 else 'all'}: {reason}")


def _describe_compile(splits: Mapping[str, Split | str], config: TrainConfig) -> Iterator[str]:
    """Say on which cards the model is compiled, and why."""
    by_choice: dict[str, list[str]] = {}
    for name, split in splits.items():
        if isinstance(split, Split):
            on, why = split.precision.compile, split.precision.reasons["compile"]
            choice = why if config.compile == "auto" else f"{'on' if on else 'off'}, requested"
            by_choice.setdefault(f"{choice}{'; the GiB are of steps without it' * on}", []).append(name)
    texts = [f"{', '.join(names) if len(by_choice) > 1 else 'all'}: {choice}" for choice, names in by_choice.items()]
    yield from _write("compile", "; ".join(texts))


def _describe_checkpointing(splits: Mapping[str, Split | str], store: Store, config: TrainConfig) -> Iterator[str]:
    """Say what activation checkpointing costs where it was chosen because memory binds."""
    chosen = {
        name: split
        for name, split in splits.items()
        if isinstance(split, Split) and split.setting.recompute and not config.gradient_checkpointing
    }
    for name, split in chosen.items():
        plain = [
            step.flops / setting.micro_batch
            for setting, step in store.steps.items()
            if replace(setting, micro_batch=0, recompute=True, accumulates=False)
            == replace(split.setting, micro_batch=0, accumulates=False)
            and not setting.recompute
            and step.flops
        ]
        price = f"{_count_flops(split) / plain[0]:.2f} x the FLOPs (derived)" if plain else "FLOPs: not predicted"
        yield from _write("", f"{name}: activation checkpointing, because memory binds; its price: {price}")


def _describe_marks(splits: Mapping[str, Split | str], found: Mapping[str, Observation | None]) -> Iterator[str]:
    """Say what stands behind each number of the table, and which cards nobody has observed."""
    by_run = {name: run.run for name, run in found.items() if run is not None}
    unseen = [
        name
        for name, split in splits.items()
        if isinstance(split, Split) and not isinstance(split.step, ObservedStep) and split.verdict != HOST
    ]
    if by_run:
        yield from _write("m measured", "; ".join(f"{name}: {run}" for name, run in by_run.items()))
    if unseen:
        where = "any of these cards" if 1 < len(unseen) == len(splits) else f"this card: {', '.join(unseen)}"
        yield from _write(
            "e estimated",
            f"its real code on tensors without values, longest samples. Never observed on {where}",
        )
        yield from _write(
            "assumed",
            f"{DRIVER_SHARE:.0%} of a card for driver and ECC; in reserve {CONTEXT_GIB:g} GiB for CUDA, "
            f"{FRAGMENTS_SHARE:.0%} of a step for fragments",
        )
        yield from _write("a step >=", "derived: its FLOPs at the datasheet's peak of that precision (roofline)")


def _describe_data(config: TrainConfig, store: Store, known: Known) -> Iterator[str]:
    predicted = str(store.about.get("data", ""))
    of = "; predicted with your data" if predicted and "synthetic" not in predicted else ""
    if "synthetic" in predicted:
        of = f"; predicted with {predicted}: yours may differ in classes and length"
    if known.data_bytes is None:
        yield from _write("data", f"not packed yet, {_describe_packed_size(config)}{of}")
        return
    staged = "as much again on a node's scratch disk, if it has one" if config.data.stage == "auto" else "not staged"
    yield from _write("data", f"{format_size(known.data_bytes)} packed (measured), {staged}{of}")


def _describe_packed_size(config: TrainConfig) -> str:
    """Say what packing will take on disk, which is known beforehand if images are stored uncompressed."""
    packing, image = getattr(config, "packing", None), config.image
    if not isinstance(packing, StoreSettings) or packing.store != "input-raw":
        return "its disk not known"
    each = image.height_px * image.width_px * image.channels
    return f"{each / 1e3:.1f} kB a sample, {each / 1e3:.1f} GB a million (derived: packing.store={packing.store})"


def _describe_decoding(config: TrainConfig, cards: Mapping[str, GpuType], known: Known) -> Iterator[str]:
    needed = {n: find_cores_needed(config.job, card=card.key, results=known.results) for n, card in cards.items()}
    measured = [f"{name} {cores[0]} cores (measured: {cores[1]})" for name, cores in needed.items() if cores]
    threads = f"{config.data.threads} threads a rank" if config.data.threads else "a thread for each core of a rank"
    text = "; ".join(measured) or "cores needed: not measured (trainyard gpu-check does)"
    yield from _write("decoding", f"{threads}, none in /dev/shm (derived); {text}")


def _describe_checkpoints(
    config: TrainConfig, step: StepPrediction | None, runs: Sequence[Observation], steps: int | None
) -> Iterator[str]:
    saved = next((run for run in runs if run.checkpoint_bytes), None)
    size = saved.checkpoint_bytes if saved else estimate_checkpoint_bytes(step) if step else None
    if size is not None:
        mark = "measured" if saved else "derived"
        most = count_disk_bytes(size, config, steps)
        text = f"{format_size(size)} each ({mark}), at most {format_size(most)} on disk (derived)"
    else:
        text = "bytes: not known until measured"
    yield from _write("checkpoints", f"{text}; {_describe_interval(config, saved, steps)}")


def _describe_interval(config: TrainConfig, saved: Observation | None, steps: int | None) -> str:
    settings = config.checkpoint
    if settings.every:
        every = Duration.parse(settings.every)
        count = f", {steps // int(every.value)} of them (derived)" if every.unit == "st" and steps is not None else ""
        return f"one every {settings.every}{count}"
    if saved is None:
        return (
            f"interval from the cost of a save, at most {settings.max_minutes:g} min; count: not known until measured"
        )
    interval_s = compute_interval_s(
        max(saved.checkpoint_s, 1e-3), mtbf_hours=settings.mtbf_hours, max_minutes=settings.max_minutes
    )
    hours = compute_hours(config, saved)
    count = "" if hours is None else f", about {int(hours * 3600 // interval_s) + 1} of them"
    return f"one every {interval_s / 60:.3g} min{count} (derived from {saved.checkpoint_s:.2g} s a save, measured)"


def _describe_next(
    config: TrainConfig, splits: Mapping[str, Split | str], hours: Sequence[str], known: Known
) -> Iterator[str]:
    """Say what to type next.

    Args:
        hours: as in the table, in the order of `splits`.
    """
    command = shlex.join(["trainyard", "submit", *known.words])
    missing = {
        name: split
        for (name, split), cell in zip(splits.items(), hours, strict=True)
        if isinstance(split, Split) and cell.startswith(("?", ">="))
    }
    if missing:
        which = ", ".join(missing) if len(missing) < len(splits) else "all"
        name, derived = (
            ("hours >=", "derived: as many steps; ") if any(">=" in cell for cell in hours) else ("hours ?", "")
        )
        line = shlex.join(_list_words_to_measure(config, list(missing.values()), known))
        yield from _write(name, f"{derived}{which}: not known until measured; on the card, type:")
        yield f"{'':<{_INDENT}} {line}"
    yield f"{'script':<{_INDENT}} {command} --dry"
    yield f"{'next':<{_INDENT}} {command}"


def _list_words_to_measure(config: TrainConfig, splits: Sequence[Split], known: Known) -> list[str]:
    """Return a short run of the same steps, after which a plan knows how long the whole run takes."""
    words = [word for word in known.words if not word.startswith("max_duration=")]
    changes = ["max_duration=200st"]
    sizes = {split.setting.micro_batch for split in splits}
    if len(sizes) == 1 and not any(
        "whole share" in split.reason or split.reason.startswith("as st") for split in splits
    ):
        words = [word for word in words if not word.startswith("micro_batch_size=")]
        changes += [f"micro_batch_size={sizes.pop()}"]
    if all(split.setting.recompute for split in splits) and not config.gradient_checkpointing:
        changes += ["gradient_checkpointing=true"]
    on_nodes = "--gpus" in words or "--cluster" in words
    return ["trainyard", "submit" if on_nodes else "run", words[0], *changes, *words[1:]]


def _count_flops(split: Split) -> float:
    return split.step.flops / split.setting.micro_batch


def _write(name: str, text: str) -> Iterator[str]:
    """Yield a name and its text, wrapped; a line to type is not broken."""
    lines = textwrap.wrap(text, _WIDTH - _INDENT - 1, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"{'' if number else name:<{_INDENT}} {line}"


def _format_ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _format_gib(size: float) -> str:
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"
