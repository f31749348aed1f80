"""Handles a GPU that has no memory left: the run starts again with half the micro-batch, or prints the command to type.

In a step, the rank that fails cannot answer the collectives in which the others may be waiting already, and the
optimizer may have changed some parameters. So nothing of the step is used: all ranks start again from the newest
checkpoint, with a micro-batch that rank 0 reads from the run's record. One rank does so in its process; of several,
the failing one exits at once, and whoever started the ranks ends the others and starts all of them again. No rank
waits for an answer that cannot come. Evaluation needs none of this: between its collectives each rank is alone.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainyard.config.settings import TrainConfig
from trainyard.errors import ALLOCATION_ERRORS, OutOfDeviceMemory, is_out_of_memory
from trainyard.text import quote_path
from trainyard.train.run_context import RunContext

EVALUATION, BATCH_STATISTICS = "evaluation", "recomputing of BatchNorm statistics"
"""Phases in which a smaller micro-batch would not help. Evaluation gives up at one sample (`predict_share`)."""

_PHASE = "phase: "


@contextmanager
def name_phase(phase: str) -> Iterator[None]:
    """Note in an error about memory in which phase of a step it was raised; the innermost name counts."""
    try:
        yield
    except ALLOCATION_ERRORS as error:
        if is_out_of_memory(error) and not _list_phases(error):
            error.add_note(_PHASE + phase)
        raise


def _list_phases(error: BaseException) -> list[str]:
    notes: list[str] = getattr(error, "__notes__", [])
    return [note.removeprefix(_PHASE) for note in notes if note.startswith(_PHASE)]


@contextmanager
def explain_out_of_memory(context: RunContext, micro_batch_size: int) -> Iterator[None]:
    """Turn an error about a GPU's memory into one with the remedy; the micro-batch is the one in effect.

    Raises:
        OutOfDeviceMemory: instead of it.
    """
    try:
        yield
    except ALLOCATION_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        phase = next(iter(_list_phases(error)), "step")
        run, config, world, smaller = context.run, context.config, context.world, None
        batch, other_card = f"micro-batches of {micro_batch_size}", _advise_other_card(run)
        if phase == EVALUATION:
            batch, advice = "one sample", f"Type {other_card}."
        elif phase == BATCH_STATISTICS:
            batch = f"batches of {config.eval_batch_size}"
            fewer = f"trainyard resume {quote_path(run)} eval_batch_size={halve(config.eval_batch_size)}"
            advice = f"Type {other_card}; or {fewer}."
        elif smaller := choose_smaller(config, micro_batch_size):
            advice = f"The next start takes micro-batches of {smaller} from the newest checkpoint on: the same steps."
        else:
            can_recompute = not config.gradient_checkpointing and any(True for _ in context.module.repeated_layers())
            advice = _advise(run, config, micro_batch_size, can_recompute=can_recompute)
        raise OutOfDeviceMemory(
            f"Rank {world.rank} of {world.world_size} on {socket.gethostname()}: out of memory in the {phase}, with "
            f"{batch}. {_quote(error)} {advice}",
            next_micro_batch_size=smaller,
            phase=phase,
            micro_batch_size=micro_batch_size,
        ) from error


def choose_smaller(config: TrainConfig, micro_batch_size: int) -> int | None:
    """Return half of a micro-batch, rounded up, or None if it may not be halved: the option forbids it, or it is 1."""
    if micro_batch_size == 1 or config.halve_micro_batch == "never":
        return None
    if config.halve_micro_batch == "auto" and config.explain_batch_dependence():
        return None
    return halve(micro_batch_size)


def halve(size: int) -> int:
    """Return half of a number of samples, rounded up: twice as many of them are enough."""
    return -(-size // 2)


def release_memory() -> None:
    """Return memory that an error left behind to the device. Call it when nothing refers to the error any more."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # of the start that ended


def _advise(run: Path, config: TrainConfig, micro_batch_size: int, *, can_recompute: bool) -> str:
    """Explain why the micro-batch is not halved, and suggest other options."""
    lines = [_advise_other_card(run)]
    if micro_batch_size == 1:
        why = "A micro-batch cannot be smaller than one sample."
    else:
        told = f"trainyard resume {quote_path(run)} halve_micro_batch=always"
        dependence = config.explain_batch_dependence()
        why = "It is not halved (halve_micro_batch=never)."
        if config.halve_micro_batch == "auto":
            why = f"It is not halved unless told, because results would change: {dependence}."
            told += ", which then trains otherwise"
        lines.insert(0, told)
    if can_recompute:
        lines.append(f"a new run that recomputes activations: trainyard run {config.job} gradient_checkpointing=true")
    return f"{why} Type {'; or '.join(lines)}."


def _advise_other_card(run: Path) -> str:
    return f"trainyard resume {quote_path(run)} on a GPU with more memory (in Slurm: --hw TYPE)"


def _quote(error: BaseException) -> str:
    """Return the allocator's numbers from torch's error, on one line, without its general advice."""
    text = " ".join(str(error).split()).partition(" If reserved but unallocated")[0][:600].strip()
    return text if text.endswith(".") else f"{text}."
