"""Chooses the GPU type and the micro-batch of a job, from the needs of its preset (`settings.NeedsSettings`).

The memory of another micro-batch has not been measured. Weights and optimizer take the same for any size, so a
smaller micro-batch needs at least its proportion of the stated memory: with less than that a type is refused, with more
it may still be too little, and the reason tells.
"""

from dataclasses import dataclass, replace

from trainyard.cluster.description import Cluster, GpuNodes
from trainyard.config.settings import NeedsSettings, TrainConfig
from trainyard.errors import UserError
from trainyard.hardware import GPUS, Precision, choose_precision, choose_sync_batchnorm, get_gpu
from trainyard.split import BatchSplit, explain_micro_batch, split_batch
from trainyard.text import join_names, suggest_nearest


@dataclass(frozen=True)
class GpuChoice:
    """A GPU type, and what follows from it for training."""

    config: TrainConfig  # with the micro-batch that was chosen
    hw: str
    why_hw: str
    split: BatchSplit
    why_micro_batch: str
    precision: Precision


def choose_gpu(
    config: TrainConfig, cluster: Cluster, *, gpus: int, hw: str = "", keeps_micro_batch: bool = False
) -> GpuChoice:
    """Choose the type of `gpus` GPUs, or check the one that was requested as `hw`.

    Without a request: the first type that has enough, among those with the card that the preset was written for, then
    among all. If none has enough memory, the micro-batch is halved until one has, where results do not depend on it.

    Args:
        keeps_micro_batch: the run exists, so its micro-batch cannot change.

    Raises:
        UserError: no type fits, or not the one requested; has the option to type.
    """
    if hw and hw not in cluster.gpus:
        hint = suggest_nearest(hw.lower(), cluster.gpus)
        raise UserError(
            f"HW={hw}: {cluster.name} has no such GPU type.{hint} It has: {list_hardware(cluster)} ({cluster.path})."
        )
    _check_card(config)
    if hw:
        return _check_requested(config, cluster, gpus, hw, keeps_micro_batch=keeps_micro_batch)
    enough = {name: kind for name, kind in cluster.gpus.items() if kind.per_node * kind.nodes >= gpus}
    if not enough:
        raise UserError(
            f"{gpus} GPUs requested, but no GPU type of {cluster.name} has that many: {list_hardware(cluster)}."
        )
    preferred = [name for name, kind in enough.items() if _is_card(kind, config.needs.card)]
    passed: dict[str, str] = {}
    for name in [*preferred, *(name for name in enough if name not in preferred)]:
        passed[name] = _explain_misfit(config, enough[name], gpus)
        if not passed[name]:
            return _accept(config, enough[name], gpus, name, _explain_first(config, cluster, gpus, name, passed))
    for name, kind in enough.items():
        smaller = None if keeps_micro_batch else _shrink_micro_batch(config, kind, gpus)
        if smaller is not None:
            return _accept(smaller, kind, gpus, name, f"no type has more: {_list_misfits(passed)}", halved_from=config)
    if all(_read_memory_gib(kind) >= _compute_least_gib(config, gpus) for kind in enough.values()):
        _choose_policy(config, next(iter(enough.values())), gpus)  # raises if it is impossible there
    raise UserError(
        f"{_describe_needs(config)}, and no GPU type of {cluster.name} with {gpus} GPUs has that: "
        f"{_list_misfits(passed)}. {_advise(config, cluster, gpus, next(iter(enough)), keeps_micro_batch)}"
    )


def list_hardware(cluster: Cluster) -> str:
    """List the types of a cluster for a message."""
    return ", ".join(f"{hw} ({kind.nodes} x {kind.per_node})" for hw, kind in cluster.gpus.items())


def _check_requested(
    config: TrainConfig, cluster: Cluster, gpus: int, hw: str, *, keeps_micro_batch: bool
) -> GpuChoice:
    kind = cluster.gpus[hw]
    _choose_policy(config, kind, gpus)  # raises if it is impossible there
    if not (misfit := _explain_misfit(config, kind, gpus)):
        return _accept(config, kind, gpus, hw, "requested")
    if not keeps_micro_batch and (smaller := _shrink_micro_batch(config, kind, gpus)) is not None:
        return _accept(smaller, kind, gpus, hw, "requested", halved_from=config)
    raise UserError(
        f"HW={hw}: {_describe_needs(config)}, but {hw} {misfit}. "
        f"{_advise(config, cluster, gpus, hw, keeps_micro_batch)}"
    )


def _accept(
    config: TrainConfig, kind: GpuNodes, gpus: int, hw: str, why: str, *, halved_from: TrainConfig | None = None
) -> GpuChoice:
    split = _split(config, gpus)
    needs, has_gib = config.needs, _read_memory_gib(kind)
    reason = explain_micro_batch(config.micro_batch_size)
    if halved_from is not None:
        reason = f"halved from {_split(halved_from, gpus).micro_batch}: results do not depend on it"
    if has_gib < (stated_gib := read_needed_gib(needs)):
        reason += (
            f"; {hw} has {has_gib:g} GiB, and {stated_gib:g} are stated for {needs.micro_batch_size}: "
            f"whether {split.micro_batch} fit was not measured"
        )
    return GpuChoice(config, hw, why, split, reason, _choose_policy(config, kind, gpus))


# A job's needs


def read_needed_gib(needs: NeedsSettings) -> float:
    """Return the memory that a preset states, or that of the card it was written for; 0: nothing is known."""
    if needs.memory_gib or not needs.card:
        return needs.memory_gib
    return min((gpu.memory_gib for gpu in GPUS if gpu.is_called(needs.card)), default=0.0)


def _explain_misfit(config: TrainConfig, kind: GpuNodes, gpus: int) -> str:
    """Return why a type cannot run the job, as a predicate; "" if it may."""
    needs_gib, has_gib = _compute_least_gib(config, gpus), _read_memory_gib(kind)
    if has_gib < needs_gib:
        return f"has {has_gib:g} GiB"
    try:
        _choose_policy(config, kind, gpus)
    except UserError as error:
        return f"cannot: {str(error).partition('. ')[0]}"
    return ""


def _compute_least_gib(config: TrainConfig, gpus: int) -> float:
    """Return a lower bound on the memory of this micro-batch, scaled from the stated size."""
    stated_size = config.needs.micro_batch_size
    scale = min(1.0, _split(config, gpus).micro_batch / stated_size) if stated_size else 1.0
    return read_needed_gib(config.needs) * scale


def _split(config: TrainConfig, gpus: int) -> BatchSplit:
    return split_batch(config.global_batch_size, ranks=gpus, micro_batch=config.micro_batch_size)


def _shrink_micro_batch(config: TrainConfig, kind: GpuNodes, gpus: int, *, force: bool = False) -> TrainConfig | None:
    """Return the config with the micro-batch halved until the type may hold it; None if results depend on its size.

    Args:
        force: halve even if results change; only to build a suggestion.
    """
    if not config.needs.micro_batch_size or (config.explain_batch_dependence() and not force):
        return None
    smaller = replace(config, micro_batch_size=_split(config, gpus).micro_batch)
    while _explain_misfit(smaller, kind, gpus):
        if smaller.micro_batch_size == 1:
            return None
        smaller = replace(smaller, micro_batch_size=smaller.micro_batch_size // 2)
    return smaller


def _read_memory_gib(kind: GpuNodes) -> float:
    """Return the memory of one GPU; of a rank on the CPU, from the cluster file."""
    card = get_gpu(kind.card)
    return kind.memory_gib_per_gpu if card is None else card.memory_gib


def _choose_policy(config: TrainConfig, kind: GpuNodes, gpus: int) -> Precision:
    """Return how a job computes on a type.

    Raises:
        UserError: it asks for what `gpus` ranks cannot do there; they would refuse it, after the queue.
    """
    card = get_gpu(kind.card)
    choose_sync_batchnorm(config.sync_batchnorm, device_type="cpu" if card is None else "cuda", world_size=gpus)
    return choose_precision(
        None if card is None else card.sm,
        precision=config.precision,
        channels_last=config.channels_last,
        compile=config.compile,
        varying_shapes=config.explain_varying_shapes(),
    )


def _is_card(kind: GpuNodes, card: str) -> bool:
    gpu = get_gpu(kind.card)
    return gpu is not None and gpu.is_called(card)


def _check_card(config: TrainConfig) -> None:
    card = config.needs.card
    if card and not any(gpu.is_called(card) for gpu in GPUS):
        keys = [gpu.key for gpu in GPUS]
        raise UserError(
            f"needs.card={card}: no such card.{suggest_nearest(card, keys)} Cards, or the beginning of one: "
            f"{', '.join(keys)}."
        )


# Sentences


def _describe_needs(config: TrainConfig) -> str:
    needs = config.needs
    size = f" for micro-batches of {needs.micro_batch_size}" if needs.micro_batch_size else ""
    written = f" (it was written for {needs.card})" if needs.card else ""
    return f"{config.job} needs {read_needed_gib(config.needs):g} GiB per GPU{size}{written}"


def _explain_first(config: TrainConfig, cluster: Cluster, gpus: int, hw: str, passed: dict[str, str]) -> str:
    needed = f" and {_compute_least_gib(config, gpus):g} GiB" if read_needed_gib(config.needs) else ""
    if _is_card(cluster.gpus[hw], config.needs.card):
        return f"the card that {config.job} was written for, {config.needs.card}"
    misfits = _list_misfits(passed)
    rest = f"; {misfits}" if misfits else f": {', '.join(cluster.gpus)}"
    return f"the first type in {cluster.path.name} that has {gpus}{needed}{rest}"


def _list_misfits(passed: dict[str, str]) -> str:
    return join_names([f"{hw} {misfit}" for hw, misfit in passed.items() if misfit])


def _advise(config: TrainConfig, cluster: Cluster, gpus: int, hw: str, keeps_micro_batch: bool) -> str:
    """Suggest another type, a smaller micro-batch, or a correction of the stated need."""
    enough = {name: kind for name, kind in cluster.gpus.items() if kind.per_node * kind.nodes >= gpus}
    lines = [f"HW={name}" for name, kind in enough.items() if not _explain_misfit(config, kind, gpus)]
    smaller = None if keeps_micro_batch else _shrink_micro_batch(config, cluster.gpus[hw], gpus, force=True)
    if smaller is not None and (dependence := config.explain_batch_dependence()):
        lines.append(f"micro_batch_size={smaller.micro_batch_size} with HW={hw}, which trains otherwise: {dependence}")
    lines.append("needs.memory_gib=0 needs.card= to try it as it is")
    return f"Type {', or '.join(lines)}."
