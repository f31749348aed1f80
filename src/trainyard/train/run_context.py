"""Decisions made before training starts, and their consequences: epoch order, number of steps, loader."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig, parse_monitor
from trainyard.data import order
from trainyard.data.host_memory import AvailableMemory, read_available_memory
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.hardware import Precision
from trainyard.runs.events import MetricOrder
from trainyard.text import count_nouns, format_size, quote_path
from trainyard.train.heartbeat import Heartbeat
from trainyard.train.module import TrainModule
from trainyard.train.world import World

TRAIN, VALIDATION = "train", "val"


@dataclass(frozen=True)
class RunContext:
    """Everything that is decided before training starts."""

    config: TrainConfig
    module: TrainModule
    data: ShardSet
    splits: Mapping[str, np.ndarray]  # sample ids of "train", "val" (may be absent) and test sets by their names
    world: World
    device: torch.device
    precision: Precision
    decode: str
    threads: int  # decoding threads of this rank
    run: Path
    heartbeat: Heartbeat
    check_owner: Callable[[], None]  # raises if another process has taken over the run
    micro_batch_size: int  # in effect, samples; 0: a rank's whole share
    eval_batch_size: int  # in effect, samples of a rank

    @cached_property
    def orders(self) -> order.EpochOrders:
        """Return the orders of epochs: pure functions of the config and of the data's columns.

        Calling it raises a UserError if there is nothing to train on.
        """
        return order.EpochOrders(self._order_epoch)

    def _order_epoch(self, epoch: int) -> order.EpochOrder:
        if not len(self.splits[TRAIN]):
            raise UserError(
                f"{self.data.folder}: none of its {self.data.count} samples is in the training split. "
                "Check how the data is split."
            )
        data = self.data
        return order.order_epoch(self.splits[TRAIN], data.columns, self.config, epoch=epoch, texts=data.vocabulary)


def compute_total_steps(config: TrainConfig, steps_per_epoch: int) -> int | None:
    """Return the optimizer steps of the whole run, None if its length is a time."""
    length = Duration.parse(config.max_duration)
    return None if length.unit == "min" else length.to_steps(steps_per_epoch)


def compute_total_minutes(config: TrainConfig) -> float | None:
    """Return the minutes of training of the whole run, None if its length is a number of steps."""
    length = Duration.parse(config.max_duration)
    return length.to_minutes() if length.unit == "min" else None


def choose_monitor(context: RunContext) -> MetricOrder:
    """Return the metrics that decide which evaluation is the best.

    Raises:
        UserError: `patience` waits for evaluations that there will not be.
    """
    config, module = context.config, context.module
    if config.patience and VALIDATION not in context.splits:
        raise UserError(
            f"patience={config.patience} counts evaluations of the validation set, and {context.data.folder} has "
            "none. Start again without it: patience=0"
        )
    return parse_monitor(config.monitor) or (module.monitor, *module.tie_breaks)


def describe_monitor(context: RunContext) -> dict[str, Any]:
    """Return the metric that decides as the start of an attempt records it: with split, mode, ties and baseline."""
    (metric, mode), *ties = choose_monitor(context)
    described: dict[str, Any] = {"split": VALIDATION, "metric": metric, "mode": mode}
    if ties:
        described["ties"] = ties
    if context.module.baseline is not None and metric == context.module.monitor[0]:
        described["baseline"] = context.module.baseline
    return described


def make_loader(context: RunContext) -> Loader:
    """Return this rank's loader.

    Raises:
        UserError: the host has no memory for the batches.
    """
    loader = Loader(
        context.config,
        context.data,
        device=context.device,
        decode=context.decode,
        rank=context.world.rank,
        world_size=context.world.world_size,
        threads=context.threads,
        channels_last=context.precision.channels_last,
        reads_noise=context.module.reads_noise,
    )
    check_batch_memory(context, loader, available=read_available_memory())
    return loader


def check_batch_memory(context: RunContext, loader: Loader, *, available: AvailableMemory, step_bytes: int = 0) -> None:
    """Compare the loader's allocation for a batch with the memory that the ranks of this node can still get.

    Before anything is allocated: the kernel would kill the rank. Memory of the model is not counted: this is a lower
    bound of what training needs.

    Args:
        step_bytes: further memory of a rank's step on the host.

    Raises:
        UserError: it is too much; has the size that would fit, and notes a batch of more samples than there are.
    """
    run, config, samples = context.run, context.config, len(context.splits[TRAIN])
    ranks = context.world.local_world_size
    sizes = {"micro_batch_size": context.micro_batch_size, "eval_batch_size": context.eval_batch_size}
    for name, size in sizes.items():
        in_step = step_bytes if name == "micro_batch_size" else 0
        needed = (loader.count_host_bytes(size) + in_step) * ranks
        if needed <= available.bytes:
            continue
        what = "the loader's buffers and the activations of a step" if in_step else "the loader's buffers"
        fitting = max(1, math.floor(size * available.bytes / needed / 2))  # leaves as much for everything else
        fitting = 2 ** int(math.log2(fitting))
        advice, few = f"Resume with a smaller one: trainyard resume {quote_path(run)} {name}={fitting}", ""
        if name == "micro_batch_size":  # a run keeps it
            start = f"trainyard run {config.job}"
            advice = f"Start again with a smaller one: {start} {name}={fitting}"
            if config.global_batch_size > samples:
                few = f" The training set has {samples:,} samples, fewer than "
                few += f"global_batch_size={config.global_batch_size}."
                advice += f", or {start} global_batch_size={samples}"
        raise UserError(
            f"{name}={size}: {what} of {count_nouns(ranks, 'rank')} on this host would take "
            f"{format_size(needed)}, and {format_size(available.bytes)} are available ({available.source}).{few} "
            f"{advice}"
        )
