"""The table of `trainyard plan --all`: whether each preset's step fits on each card. Loads no torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainyard.cli.choices import compose_job
from trainyard.cluster import description as clusters
from trainyard.config.families import Root, find_jobs
from trainyard.config.settings import TrainConfig
from trainyard.hardware import GpuType
from trainyard.plan.memory import MISFIT, TIGHT, CannotPredict, NotPredicted, Predict, complete_cache, find_cache
from trainyard.plan.resources import RunRequest
from trainyard.plan.screen import CPU, fit_card

_HEADER = ["preset", "global batch", "learning rate", "seed"]


def tabulate_presets(
    request: RunRequest,
    cluster: clusters.Cluster | None,
    cards: Mapping[str, GpuType],
    *,
    roots: Sequence[Path],
    predicts: bool,
) -> Iterator[str]:
    """Yield the lines of the table, in Markdown; first make missing predictions: minutes for all presets.

    Args:
        request: with overrides that hold for each preset.
        roots: folders of families; of two presets with one name, that of the first counts.
        predicts: whether missing predictions are made now.
    """
    from tqdm import tqdm  # here, because submit loads this file and must respond quickly

    rows: list[list[str]] = []
    notes: dict[str, int] = {}
    gpus = request.resources.gpus
    presets = {job: root for root in reversed(roots) for job in find_jobs(root)}  # the first root has priority
    for job in tqdm(sorted(presets), unit="preset", leave=False, disable=None if predicts else True):
        jobs = presets[job]
        config = compose_job(replace(request, job=job, families=Root(jobs, "")), cluster).config
        wanted = [card for card in cards.values() if predicts and card is not CPU]
        try:
            predict = complete_cache(config, jobs, wanted, gpus=gpus, environ=os.environ, announce=None).read
        except CannotPredict as error:
            reason = str(error).replace(str(find_cache(os.environ)), "CACHE")
            rows.append([*_describe_training(config), *[_refer(reason, notes)] * len(cards)])
            continue
        rows.append(describe_preset(config, cards, gpus=gpus, predict=predict, notes=notes))
    header = [*_HEADER, *cards]
    yield from (f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])
    yield ""
    yield (
        f"A cell: micro-batch x accumulation steps on each of {gpus} GPU{'s' * (gpus > 1)}, where that fits. "
        "*recomputed*: with `gradient_checkpointing=true`, because memory binds. Estimated, never observed on these "
        "cards. More of one preset: `trainyard plan JOB`."
    )
    yield from (f"{'' if number > 1 else chr(10)}{number}. {reason}" for reason, number in notes.items())


def describe_preset(
    config: TrainConfig, cards: Mapping[str, GpuType], *, gpus: int, predict: Predict, notes: dict[str, int]
) -> list[str]:
    """Return the row of one preset; reasons that are too long for a cell are numbered in `notes`."""
    return [
        *_describe_training(config),
        *(_describe_fit(config, card, gpus, predict, notes) for card in cards.values()),
    ]


def _describe_training(config: TrainConfig) -> list[str]:
    return [config.job, str(config.global_batch_size), f"{config.optimizer.lr:g}", str(config.seed)]


def _describe_fit(config: TrainConfig, card: GpuType, gpus: int, predict: Predict, notes: dict[str, int]) -> str:
    try:
        fit = fit_card(config, card, gpus=gpus, predict=predict)
    except NotPredicted:
        return "not predicted"
    if isinstance(fit, str) or fit.step.refused:
        return _refer(fit if isinstance(fit, str) else fit.step.refused, notes)
    if fit.verdict == MISFIT:
        return MISFIT
    note = " recomputed" * (fit.setting.recompute and not config.gradient_checkpointing)
    return f"{fit.split.micro_batch} x {fit.split.accumulation_steps}{note}{f', {TIGHT}' * (fit.verdict == TIGHT)}"


def _refer(reason: str, notes: dict[str, int]) -> str:
    return f"no [{notes.setdefault(reason, len(notes) + 1)}]"
