"""The table of `trainyard plan --all`: whether each preset's step fits on each card. Loads no torch."""

import argparse
import os
from collections.abc import Iterator, Sequence

from trainyard import config as configs
from trainyard.cli.choices import compose_job
from trainyard.cluster import description as clusters
from trainyard.errors import UserError
from trainyard.families import list_roots
from trainyard.hardware import GpuType
from trainyard.launch.memory_prediction import (
    MISFIT,
    TIGHT,
    CannotPredict,
    NotPredicted,
    Predict,
    choose_split,
    complete_store,
    find_cache,
    open_store,
)
from trainyard.settings import TrainConfig


def tabulate_presets(
    args: argparse.Namespace, cluster: clusters.Cluster | None, cards: dict[str, GpuType]
) -> Iterator[str]:
    """Yield the lines of the table, in Markdown, after what was never predicted is: minutes for all presets.

    Args:
        args: of the command, with overrides that hold for each preset. With --stored, nothing is predicted.
    """
    from tqdm import tqdm  # here, because submit loads this file and must respond quickly

    rows, notes, where = [], Notes(), str(find_cache(os.environ))
    roots = [args.jobs] if args.typed_jobs else list_roots()
    presets = {job: root for root in reversed(roots) for job in configs.find_jobs(root)}  # the first root has priority
    for job in tqdm(sorted(presets), unit="preset", leave=False, disable=True if args.stored else None):
        jobs = presets[job]
        config = compose_job(argparse.Namespace(**{**vars(args), "job": job, "jobs": jobs}), cluster).config
        try:
            store = open_store(config, jobs, os.environ)
            if not args.stored:
                store = complete_store(
                    config,
                    jobs,
                    list(cards.values()),
                    gpus=args.gpus,
                    environ=os.environ,
                    announce=lambda: None,  # the bar says it
                )
        except CannotPredict as error:
            cells = [notes.refer(str(error).replace(where, "CACHE"))] * len(cards)
            rows.append([*_describe_training(config), *cells])
            continue
        rows.append(describe_preset(config, list(cards.values()), gpus=args.gpus, predict=store.read, notes=notes))
    header = ["preset", "global batch", "learning rate", "seed", *cards]
    yield from (f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])
    yield ""
    yield (
        f"A cell: micro-batch x accumulation steps on each of {args.gpus} GPU{'s' * (args.gpus > 1)}, where that fits. "
        "Global batch, peak learning rate, and seed, and so the order of samples, are the same on each card. "
        "*recomputed*: with `gradient_checkpointing=true`, because memory binds."
    )
    yield ""
    yield from notes.list_lines()
    yield (
        "Estimated, never observed: no number here comes from a run on these cards. What is assumed, and what runs "
        "observed: `trainyard plan JOB`."
    )


class Notes:
    """Reasons that cells refer to by number, because they are too long for a table."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def refer(self, reason: str) -> str:
        """Return what a cell says for this reason."""
        return f"no [{self._numbers.setdefault(reason, len(self._numbers) + 1)}]"

    def list_lines(self) -> Iterator[str]:
        """Yield the reasons as a list in Markdown, if there are any."""
        for reason, number in self._numbers.items():
            yield f"{number}. {reason}"
        if self._numbers:
            yield ""


def describe_preset(
    config: TrainConfig, cards: Sequence[GpuType], *, gpus: int, predict: Predict, notes: Notes
) -> list[str]:
    """Return the row of one preset."""
    return [*_describe_training(config), *(_describe_split(config, card, gpus, predict, notes) for card in cards)]


def _describe_training(config: TrainConfig) -> list[str]:
    """Return the cells of what is the same on each card."""
    return [config.job, str(config.global_batch_size), f"{config.optimizer.lr:g}", str(config.seed)]


def _describe_split(config: TrainConfig, card: GpuType, gpus: int, predict: Predict, notes: Notes) -> str:
    try:
        split = choose_split(config, card, gpus=gpus, predict=predict)
    except NotPredicted:
        return "not predicted"
    except UserError as error:
        return notes.refer(str(error).partition(". ")[0].removesuffix(".") + ".")
    if split.step.refused:
        return notes.refer(split.step.refused)
    if split.verdict == MISFIT:
        return MISFIT
    note = " recomputed" * (split.setting.recompute and not config.gradient_checkpointing)
    return f"{split.setting.micro_batch} x {split.accumulation_steps}{note}{f', {TIGHT}' * (split.verdict == TIGHT)}"
