"""A training loop as guides to faster training begin with it, in which each optimisation is a switch."""

import inspect
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from trainyard.data.index import IMAGE
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import EpochOrder
from trainyard.data.shards import ShardSet
from trainyard.tools.trial import Trial
from trainyard.train.compiled_layers import compile_layers
from trainyard.train.own_optimizer import is_own
from trainyard.train.precision import allow_nondeterministic_operators, set_switches
from trainyard.train.run_context import VALIDATION
from trainyard.train.run_state import build_state
from trainyard.train.step import TrainState, enable_activation_checkpointing, list_groups, train_step
from trainyard.train.step_memory import LiveStorages

Batch = dict[str, Tensor]

_MOST_SAMPLES, _MOST_BYTES = 2048, 256 << 20  # of the set that is measured, in shards and as files
_DEFAULT_PREFETCH = 2  # batches of each worker: torch's


@dataclass(frozen=True)
class Loop:
    """Ways to read data, take steps and evaluate a set. The defaults are those of the guides' first loops."""

    micro_batch: int  # samples
    eval_batch: int  # samples
    log_every: int = 1  # steps: how often the host reads a loss
    accumulate: int = 1  # micro-batches of a step
    files: bool = True  # each record is a file; else shards
    loader: str = "torch"  # a DataLoader; "cpu", "dali": Trainyard's, with that decoder
    is_ordered: bool = False  # as the job's `data.order` says; else at random
    workers: int = 0  # this and the next four: of a DataLoader
    persistent: bool = False
    prefetch: int = _DEFAULT_PREFETCH
    pinned: bool = False
    non_blocking: bool = False
    amp: bool = False  # in the data type that the job's policy has for this card
    tf32: bool = False
    channels_last: bool = False
    benchmark: bool = False  # cuDNN times its algorithms
    deterministic: bool = False
    compile: bool = False
    recompute: bool = False  # activation checkpointing
    fused: bool = False
    set_to_none: bool = False
    inference_mode: bool = False
    own_step: bool = False  # Trainyard's train_step instead of the loop's


class FileSet(ShardSet):
    """A packed set, each record of which is read from a separate file."""

    def __init__(self, packed: ShardSet, files: Path) -> None:
        """Write the files when they are needed first: `write`."""
        super().__init__(packed.folder)
        self._files = files

    def write(self, ids: np.ndarray) -> None:
        """Write the records of some samples."""
        for name in self.records:
            (self._files / name).mkdir(exist_ok=True)
            for i in ids.tolist():
                [record] = super().read_bytes(name, np.array([i]))
                record.tofile(self._files / name / str(i))

    def read_bytes(
        self, name: str, ids: np.ndarray, *, check_crc: str = "", buffer: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Read the files of some records; there are no checksums."""
        return [np.fromfile(self._files / name / str(i), dtype=np.uint8) for i in ids.tolist()]

    def read_into(self, name: str, ids: np.ndarray, out: np.ndarray, *, check_crc: str = "") -> None:
        """Copy records of one shape."""
        for row, record in zip(out, self.read_bytes(name, ids), strict=True):
            row[...] = record.view(out.dtype).reshape(row.shape)


Place = tuple[int | None, int, int]
"""Epoch (None: evaluation), global batch in it, sample id."""


class Samples(Dataset[Batch]):
    """Samples as a DataLoader takes them: each read, decoded and augmented by itself."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getitem__(self, place: Place) -> Batch:
        epoch, index, sample = place
        return self._loader.read_here(np.array([sample]), epoch=epoch, index=index)


def collate(samples: Sequence[Batch]) -> Batch:
    """Join samples; those of varying length are padded with zeros."""
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        longest = [max(lengths) for lengths in zip(*(value.shape[1:] for value in values), strict=True)]
        batch[name] = torch.cat([F.pad(v, _count_padding(v.shape[1:], longest)) for v in values])
    return batch


def _count_padding(shape: Sequence[int], longest: Sequence[int]) -> list[int]:
    """Return zeros before and after each axis, the last axis first, as `functional.pad` takes them."""
    return [n for length, most in reversed([*zip(shape, longest, strict=True)]) for n in (0, most - length)]


class _Epochs:
    """The batches of one epoch after another: a DataLoader asks for an iterator at the beginning of each."""

    def __init__(self, order: EpochOrder, size: int, *, is_ordered: bool) -> None:
        self._order, self._size, self._is_ordered, self._epoch = order, size, is_ordered, -1

    def __iter__(self) -> Iterator[list[Place]]:
        self._epoch += 1
        ids = self._order.ids
        if not self._is_ordered:
            ids = np.random.default_rng(self._epoch).permutation(ids)
        whole = self._order.global_batch_size
        for begin in range(0, len(ids), whole):
            for i in range(begin, min(begin + whole, len(ids)), self._size):
                last = min(i + self._size, begin + whole)
                yield [(self._epoch, begin // whole, sample) for sample in ids[i:last].tolist()]


@dataclass(frozen=True)
class Turn:
    """Measurements of a loop in one turn."""

    sample_s: float  # seconds for a sample, trained or evaluated
    epoch_start_s: float = 0.0  # before the first batch of an epoch, in which nothing is trained
    warm_up_s: float = 0.0  # of the first step, which compiles


class LoopRunner:
    """Runs loops of one job, each from the same weights."""

    def __init__(self, trial: Trial, files: Path) -> None:
        """Choose the samples that are measured, and write them as files.

        Args:
            files: an empty folder.
        """
        self.trial, self.context, self.module = trial, trial.context, trial.state.module
        data, order = self.context.data, self.context.orders(0)
        self._initial = {name: value.to("cpu", copy=True) for name, value in self.module.state_dict().items()}
        sample_bytes = sum(records.size.sum() for records in data.records.values()) / data.count
        most = min(_MOST_SAMPLES, int(_MOST_BYTES / max(1.0, sample_bytes))) // order.global_batch_size
        self.order = replace(order, ids=order.ids[: max(1, most) * order.global_batch_size])
        self.eval_ids = self.context.splits.get(VALIDATION, np.empty(0, np.int64))[: len(self.order.ids)]
        as_files = FileSet(data, files)
        as_files.write(np.union1d(self.order.ids, self.eval_ids))
        self._data = {False: data, True: as_files}
        self._loaders: dict[tuple[object, ...], Loader] = {}
        self._counts: dict[tuple[str, Loop], int] = {}  # steps or batches of a turn: the same in each, so equal work

    def train(self, loop: Loop, *, seconds: float) -> Turn:
        """Take steps for about so long, and at least two; as many again in each later turn of the same loop."""
        starts_s: list[float] = []
        with self._prepare(loop) as take_step, closing(self._read(loop, starts_s)) as stream:
            warm_up_s, _ = self._time(take_step, stream, 1)
            workers = loop.workers * loop.prefetch
            for _ in range(workers if loop.loader == "torch" else self.context.config.data.prefetch + 2):
                next(stream)  # batches that the loader may have ready
            once_s, _ = self._time(take_step, stream, 1)
            before = len(starts_s)
            steps = self._counts.setdefault(("train", loop), max(2, round(seconds / once_s)))
            spent_s, samples = self._time(take_step, stream, steps)
        spent_s -= sum(starts_s[before:])
        start_s = median(starts_s[loop.persistent :]) if starts_s[loop.persistent :] else 0.0
        return Turn(spent_s / samples, start_s, warm_up_s)

    def list_losses(self, loop: Loop, *, steps: int) -> list[float]:
        """Return the losses of the first steps, over the same samples whatever the loop's order."""
        with (
            self._prepare(replace(loop, log_every=1)) as take_step,
            closing(self._read(replace(loop, is_ordered=True, persistent=False), [])) as stream,
        ):
            return [take_step(stream).loss for _ in range(steps)]

    def measure_memory(self, loop: Loop) -> int | None:
        """Return the most bytes that tensors take on the device in a step; None for compiled code on the CPU."""
        on_cpu = self.context.device.type == "cpu"
        if on_cpu and loop.compile:
            return None
        with self._prepare(loop) as take_step, closing(self._read(loop, [])) as stream:
            take_step(stream)  # creates the optimizer's moments
            if on_cpu:
                storages = LiveStorages(block_bytes=1)
                moments = (value for state in take_step.state.optimizer.state.values() for value in state.values())
                storages.add([*self.module.parameters(), *self.module.buffers()])
                storages.add(value for value in moments if isinstance(value, Tensor))
                with storages:
                    take_step(stream)
                return storages.peak_bytes
            torch.cuda.reset_peak_memory_stats(self.context.device)
            take_step(stream)
            return torch.cuda.max_memory_allocated(self.context.device)

    def evaluate(self, loop: Loop, *, seconds: float) -> Turn:
        """Predict samples of the validation set for about so long: whole batches, and again from the first.

        As many again in each later turn of the same loop.
        """
        samples = batches = 0
        most = self._counts.get(("evaluate", loop))
        with self._prepare(loop):
            self.module.eval()
            with torch.inference_mode() if loop.inference_mode else torch.no_grad():
                begin = time.perf_counter()
                for batch in itertools.chain.from_iterable(self._read_evaluation(loop) for _ in itertools.count()):
                    with self._autocast(loop):
                        rows = self.module.predict(batch)
                    samples += len({name: value.cpu() for name, value in rows.items()}["sample_id"])
                    batches += 1
                    if batches == most or (most is None and time.perf_counter() - begin >= seconds):
                        break
            self._counts[("evaluate", loop)] = batches
            return Turn((time.perf_counter() - begin) / samples)

    def _time(self, take_step: "_Step", stream: Iterator[Batch], steps: int) -> tuple[float, int]:
        """Return the seconds of some steps, with the device's part of them, and their samples."""
        before, begin = take_step.samples, time.perf_counter()
        for _ in range(steps):
            take_step(stream)
        self.trial.wait()
        return time.perf_counter() - begin, take_step.samples - before

    @contextmanager
    def _prepare(self, loop: Loop) -> Iterator["_Step"]:
        """Set switches, weights and layers as a loop wants them; afterwards the layers are as before."""
        context, module, layers = self.context, self.module, list(self.module.repeated_layers())
        policy = replace(context.precision, tf32=loop.tf32 and context.precision.tf32)
        set_switches(policy, deterministic=loop.deterministic)
        torch.backends.cudnn.benchmark = loop.benchmark
        layout: Any = torch.channels_last if loop.channels_last else torch.contiguous_format
        module.to(memory_format=layout)  # type: ignore[call-overload]
        module.load_state_dict(self._initial)
        kept = [layer.__dict__.get("forward") for layer in layers]
        if loop.recompute:
            enable_activation_checkpointing(module)
        scaler = torch.amp.GradScaler(context.device.type, enabled=loop.amp and policy.loss_scaling)
        state = build_state(module, replace(context.config, ema_decay=0.0, swa=False), scaler=scaler)
        if loop.compile and not compile_layers(module):
            state.model = torch.compile(module)
        if not loop.fused and not is_own(module, "build_optimizer"):
            groups = list_groups(module, context.config.optimizer.weight_decay)
            known = inspect.signature(type(state.optimizer)).parameters
            settings = {name: v for name, v in state.optimizer.defaults.items() if name in known} | {"fused": None}
            state.optimizer = type(state.optimizer)(groups, **settings)
        try:
            with allow_nondeterministic_operators():
                yield _Step(self, loop, state)
        finally:
            for layer, forward in zip(layers, kept, strict=True):
                layer.__dict__.pop("forward", None)
                if forward is not None:
                    layer.forward = forward

    def _autocast(self, loop: Loop) -> AbstractContextManager[None]:
        return self.trial.autocast() if loop.amp else nullcontext()

    def _get_loader(self, loop: Loop, *, for_torch: bool) -> Loader:
        """Return a loader of Trainyard's that is kept, because DALI takes seconds to start; or one for a DataLoader."""
        context = self.context
        key = (for_torch, loop.loader, loop.files, loop.channels_last)
        if key not in self._loaders:
            self._loaders[key] = Loader(
                context.config,
                self._data[loop.files],
                device=torch.device("cpu") if for_torch else context.device,
                decode="cpu" if for_torch else loop.loader,
                threads=0 if for_torch else context.threads,
                channels_last=loop.channels_last and not for_torch,
                reads_noise=self.module.reads_noise,
            )
        return self._loaders[key]

    def _make_torch_loader(self, loop: Loop, batches: Iterable[list[Place]]) -> "DataLoader[Batch]":
        workers: dict[str, Any] = {"prefetch_factor": loop.prefetch, "persistent_workers": loop.persistent}
        return DataLoader(
            Samples(self._get_loader(loop, for_torch=True)),
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=loop.workers,
            pin_memory=loop.pinned,
            **(workers if loop.workers else {}),
        )

    def _read(self, loop: Loop, starts_s: list[float]) -> Generator[Batch, None, None]:
        """Yield micro-batches without end, and note the seconds that worker processes take to begin an epoch."""
        if loop.loader != "torch":
            loader = self._get_loader(loop, for_torch=False)
            size = loop.micro_batch
            with closing(loader.train(lambda epoch: self.order, epoch=0, start=0, micro_batch_size=size)) as stream:
                for micro_batch in stream:
                    yield micro_batch.batch
        epochs = self._make_torch_loader(
            loop,
            _Epochs(self.order, loop.micro_batch, is_ordered=loop.is_ordered),
        )
        batches: Iterator[Batch] = iter(())
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                # workers that persist are created for a first epoch of one batch, and asked again for the second
                is_first = loop.persistent and not starts_s
                batches = itertools.islice(iter(epochs), 1 if is_first else None)
                batch = next(batches)
                if loop.workers:
                    starts_s.append(time.perf_counter() - begin)
            yield self._move(batch, loop)

    def _read_evaluation(self, loop: Loop) -> Iterator[Batch]:
        size = loop.eval_batch
        if loop.loader != "torch":
            with closing(self._get_loader(loop, for_torch=False).evaluate(self.eval_ids, batch_size=size)) as stream:
                yield from (micro_batch.batch for micro_batch in stream)
            return
        places: list[Place] = [(None, 0, sample) for sample in self.eval_ids.tolist()]
        batches = [places[i : i + size] for i in range(0, len(places), size)]
        yield from (self._move(batch, loop) for batch in self._make_torch_loader(loop, batches))

    def _move(self, batch: Mapping[str, Tensor], loop: Loop) -> Batch:
        moved = {name: v.to(self.context.device, non_blocking=loop.non_blocking) for name, v in batch.items()}
        if loop.channels_last and IMAGE in moved:
            moved[IMAGE] = moved[IMAGE].to(memory_format=torch.channels_last)
        return moved


class _Step:
    """Takes the steps of a loop."""

    def __init__(self, runner: LoopRunner, loop: Loop, state: TrainState) -> None:
        self._runner, self._loop, self.state = runner, loop, state
        self._config, self._device = runner.context.config, runner.context.device
        self.samples = self._steps = 0
        self.loss = 0.0  # of the latest step that the host read

    def __call__(self, stream: Iterator[Batch]) -> "_Step":
        loss = self._take_own(stream) if self._loop.own_step else self._take(stream)
        if self._steps % self._loop.log_every == 0:
            self.loss = loss.item()
        self._steps += 1
        return self

    def _read(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        seen = torch.tensor(self.samples).to(self._device)
        for _ in range(self._loop.accumulate):
            batch = next(stream)
            self.samples += len(batch["sample_id"])
            yield {**batch, "epoch": torch.zeros_like(seen), "samples_seen": seen}

    def _take(self, stream: Iterator[Batch]) -> Tensor:
        state, loop = self.state, self._loop
        state.optimizer.zero_grad(set_to_none=loop.set_to_none)
        total = torch.zeros((), device=self._device)
        for batch in self._read(stream):
            torch.manual_seed(self.samples)  # here: a DataLoader draws a number when an epoch begins
            with self._runner._autocast(loop):
                loss = state.model(batch)["loss"] / loop.accumulate
            state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        state.scaler.unscale_(state.optimizer)
        if self._config.clip_grad_norm:
            clip_grad_norm_(state.module.parameters(), self._config.clip_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        return total

    def _take_own(self, stream: Iterator[Batch]) -> Tensor:
        count = self._loop.accumulate
        parts = (MicroBatch(batch, 1 / count, i == count - 1, 0.0) for i, batch in enumerate(self._read(stream)))
        result = train_step(
            self.state,
            parts,
            lr=self._config.optimizer.lr,
            world_size=1,
            seed=self._steps,
            clip_grad_norm=self._config.clip_grad_norm,
            autocast=lambda: self._runner._autocast(self._loop),
        )
        return result.losses["loss"]
