"""What is decided before training starts, and what follows: epoch order, number of steps, loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig, parse_monitor
from trainyard.data import order
from trainyard.data.host_memory import AvailableMemory, read_available_memory, refuse_oversized_batches
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.hardware import Precision
from trainyard.runs.events import MetricOrder
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
        return order.order_epoch(self.splits[TRAIN], self.data.columns, self.config, epoch=epoch)


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


def read_one_step(stream: Iterable[MicroBatch], samples_seen: int, device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one optimizer step, each with the samples that the run used before it."""
    samples_before_step = torch.tensor(samples_seen).to(device, non_blocking=True)
    for micro_batch in stream:
        micro_batch.batch["samples_seen"] = samples_before_step
        yield micro_batch
        if micro_batch.last:
            return


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
    refuse_batches_without_memory(context, loader, available=read_available_memory())
    return loader


def refuse_batches_without_memory(
    context: RunContext, loader: Loader, *, available: AvailableMemory, step_bytes: int = 0
) -> None:
    """Refuse batches for which the ranks on this host have no memory; `step_bytes`: what a rank's step takes there.

    Raises:
        UserError: the host has no memory for the batches.
    """
    config = context.config
    refuse_oversized_batches(
        loader,
        run=context.run,
        job=config.job,
        micro_batch_size=context.micro_batch_size,
        eval_batch_size=context.eval_batch_size,
        global_batch_size=config.global_batch_size,
        train_samples=len(context.splits[TRAIN]),
        local_world_size=context.world.local_world_size,
        available=available,
        step_bytes=step_bytes,
    )
