"""A job's training step on this machine, prepared as a run prepares it, for whoever measures it."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch

from trainyard.config.settings import TrainConfig
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.stage import stage
from trainyard.node.choices import build_context
from trainyard.runs.create import create_run
from trainyard.train import distributed
from trainyard.train.determinism import choose_determinism
from trainyard.train.heartbeat import Heartbeat
from trainyard.train.precision import make_autocast
from trainyard.train.run_context import RunContext, make_loader
from trainyard.train.run_state import prepare_state, wrap_model
from trainyard.train.schedule import build_schedule
from trainyard.train.step import StepResult, TrainState, read_one_step, train_step
from trainyard.train.world import World


@dataclass
class Trial:
    """A job's state, ready to take optimizer steps, whose changes are thrown away."""

    context: RunContext
    state: TrainState

    @cached_property
    def loader(self) -> Loader:
        """This rank's loader."""
        return make_loader(self.context)

    @cached_property
    def schedule(self) -> Callable[[int], float]:
        """The learning rate of a step."""
        context = self.context
        return build_schedule(self.state.module, context.config, steps_per_epoch=len(context.orders(0)))

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """The precision of a step."""
        return make_autocast(self.context.precision, self.context.device)

    @property
    def samples_per_step(self) -> int:
        """Samples of a full optimizer step of all ranks."""
        return self.context.config.global_batch_size

    def open_stream(self, loader: Loader | None = None) -> Generator[MicroBatch, None, None]:
        """Return a loader's stream of micro-batches, from the first on; close it. None: this rank's own."""
        size = self.context.micro_batch_size
        return (loader or self.loader).train(self.context.orders, epoch=0, start=0, micro_batch_size=size)

    def read_step(self) -> list[MicroBatch]:
        """Return the micro-batches of the first step, on the device."""
        with closing(self.open_stream()) as stream:
            return list(self.take_micro_batches(stream))

    def take_micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield those of the next step."""
        return read_one_step(stream, self.state.progress, self.context.device)

    def take_step(self, micro_batches: Iterator[MicroBatch] | list[MicroBatch]) -> StepResult:
        """Take an optimizer step, with the learning rate that a run would have."""
        context, progress = self.context, self.state.progress
        config = context.config
        result = train_step(
            self.state,
            micro_batches,
            lr=self.schedule(progress.step),
            world_size=context.world.world_size,
            seed=config.seed,
            clip_grad_norm=config.clip_grad_norm,
            autocast=self.autocast,
        )
        progress.step += 1
        progress.samples_seen += self.samples_per_step
        return result

    def wait(self) -> None:
        """Wait until the device has done everything that was started."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)


@contextmanager
def open_trial(config: TrainConfig, jobs_dir: Path, environ: Mapping[str, str]) -> Iterator[Trial]:
    """Prepare the step of a job with packed data in a temporary run folder, which is deleted at the end."""
    with TemporaryDirectory(prefix="trainyard-trial-") as scratch:
        run = create_run(Path(scratch), replace(config, trackers=[]), name=uuid4().hex)
        with prepare_trial(run, config, jobs_dir, World(), environ) as trial:
            yield trial


@contextmanager
def prepare_trial(
    run: Path, config: TrainConfig, jobs_dir: Path, world: World, environ: Mapping[str, str]
) -> Iterator[Trial]:
    """Prepare the step of a run on one rank; every rank takes part. The process group is joined already."""
    staged = stage(Path(config.data.path), wanted="off", environ=environ)
    heartbeat = Heartbeat(run, "trial", is_main=world.is_main)
    context = build_context(run, config, staged, jobs_dir, world, heartbeat, None, environ)
    with closing(context.data):
        state, _ = prepare_state(context)
        trial = Trial(context, state)
        wrap_model(context, state, trial.read_step, autocast=trial.autocast)
        if config.deterministic:
            choose_determinism(
                state.module,
                lambda: trial.read_step()[0],
                run=run,
                device=context.device,
                is_main=distributed.is_rank0(),
                autocast=trial.autocast,
            )
        yield trial
