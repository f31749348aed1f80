"""Saves a run: decides when, copies the state, and has a thread write it while training goes on."""

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from trainyard.config.compose import list_kept_options
from trainyard.data.host_memory import count_pinned_bytes, read_available_memory
from trainyard.runs.changes import FILES, describe_files
from trainyard.runs.folder import read_env, select_fixed_env, update_env
from trainyard.text import format_size
from trainyard.train import checkpoint, distributed
from trainyard.train.checkpoint import State
from trainyard.train.meters import Interval
from trainyard.train.recorder import Recorder
from trainyard.train.run_context import RunContext
from trainyard.train.run_state import encode_state
from trainyard.train.step import TrainState


def compute_interval_s(save_s: float, *, mtbf_hours: float, max_minutes: float) -> float:
    """Return the seconds of training between two saves for which saving and lost work together cost least.

    Young's first-order optimum sqrt(2 C M) (Young 1974, CACM 17(9), 530-531), for a save of C seconds and a mean time
    M between failures of the whole run, but at least 10 saves long (overhead below a tenth), and at most `max_minutes`.
    Daly's estimate (Daly 2006, FGCS 22(3), 303-312, eq. 37) differs by less than 2 % while C < M / 1000.
    """
    assert save_s > 0, save_s
    young = math.sqrt(2 * save_s * mtbf_hours * 3600)
    return min(max(young, 10 * save_s), max_minutes * 60)


class HostCopy:
    """Buffers in host memory that hold one copy of a state; they are kept, and used again for the next copy."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """The memory that the buffers take."""
        return sum(count_pinned_bytes(b.nbytes) if b.is_pinned() else b.nbytes for b in self._buffers)

    @staticmethod
    def predict_bytes(state: State) -> int:
        """Return the memory that a copy of this state takes."""
        storages = checkpoint.list_storages(state)
        return sum(count_pinned_bytes(s.nbytes()) if s.device.type == "cuda" else s.nbytes() for s in storages)

    def take(self, state: State) -> State:
        """Return a copy of a state that training may change afterwards. It is valid until the next call.

        Each storage is copied once and whole, so tensors that share memory also share it in the copy. Storage of
        a GPU is copied to pinned memory. Returns once the copy is complete.
        """
        storages: dict[int, Tensor] = {}
        copied: State = self._copy(state, storages)
        del self._buffers[len(storages) :]
        if any(buffer.is_pinned() for buffer in self._buffers):
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, value: Any, storages: dict[int, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, storages)
        if type(value) in (dict, OrderedDict):
            copied = copy.copy(value)  # with the versions that torch attaches to a state_dict
            copied.update((key, self._copy(item, storages)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, storages) for item in value)
        return value  # a number, a text or None; anything else is refused by the save

    def _copy_tensor(self, tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
        source = tensor.untyped_storage()
        if source.data_ptr() not in storages:
            storages[source.data_ptr()] = self._fill_buffer(len(storages), source)
        buffer = storages[source.data_ptr()].untyped_storage()
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        copied = torch.empty(0, dtype=tensor.dtype).set_(buffer, *layout)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _fill_buffer(self, index: int, source: torch.UntypedStorage) -> Tensor:
        if index == len(self._buffers) or self._buffers[index].nbytes != source.nbytes():
            self._buffers[index:] = []  # the model has changed: later storages also have other sizes
            pinned = source.device.type == "cuda"
            self._buffers.append(torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned))
        bytes_ = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        return self._buffers[index].copy_(bytes_, non_blocking=True)


@dataclass
class _Write:
    """A checkpoint that the thread writes, or has written."""

    step: int
    result: "Future[tuple[Path, float]]"  # the file, and the seconds that it took
    started_s: float
    copy_s: float
    spent: Mapping[str, float]  # seconds of the attempt until then, by phase
    waited_s: float = 0.0  # by training: for the copy, for the checkpoint before, and for this one if it had to
    waited_for_previous_s: float = 0.0


class Saver:
    """Writes the checkpoints of a run, at most one at a time. Rank 0 writes; the others learn when it has ended.

    Every rank calls `save` and `finish` at the same steps, from the training thread: both contain a collective. The
    thread calls none, and touches nothing but the copy and the folder of checkpoints.
    """

    def __init__(
        self,
        context: RunContext,
        recorder: Recorder | None,
        *,
        steps_per_epoch: int,
        log_event: Callable[..., None],
    ) -> None:
        """Prepare; `log_event` takes the name of an event, its fields and the step that it belongs to."""
        self._context, self._recorder, self._log_event = context, recorder, log_event
        self._settings = context.config.checkpoint
        # With no interval it is due after the first step, whose save measures the cost.
        self.every = Interval(self._settings.every or "0min", steps_per_epoch)
        self._keep_every = Interval(self._settings.keep_every, steps_per_epoch)
        self._env = select_fixed_env(read_env(context.run)) if recorder is not None else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copy, self._choice = HostCopy(), ""
        self._write: _Write | None = None  # on rank 0
        self._cost_s = 0.0  # of the newest save: its copy and its write
        self.is_writing = False  # the same on all ranks

    @property
    def reserve_s(self) -> float:
        """Seconds that the save in flight and one more may take together: a time limit leaves as much."""
        begun_s = 0.0 if self._write is None else time.perf_counter() - self._write.started_s
        return 2 * max(self._cost_s, begun_s)

    def has_elapsed(self) -> bool:
        """Return whether a save is due by the clock; not while one is in flight. For rank 0, once before each save."""
        return not self.is_writing and self.every.has_elapsed()

    def has_written(self) -> bool:
        """Return whether the save in flight has ended. For rank 0."""
        return self._write is not None and self._write.result.done()

    def save(self, state: TrainState, *, wait: bool) -> None:
        """Save the state as it is now; it may change once this returns.

        Args:
            wait: return only when the checkpoint is complete.

        Raises:
            CheckpointError: this save or the one before failed.
        """
        begin, previous_s = time.perf_counter(), 0.0
        if self.is_writing:
            self.finish(wait=True)
            previous_s = time.perf_counter() - begin
        if self._recorder is not None:
            self._write = self._start(state, self._recorder, wait=wait)
            self._write.waited_for_previous_s = previous_s
            self._write.waited_s = time.perf_counter() - begin
        self.every.restart()
        self.finish(wait=wait or self._choice == _FOREGROUND)

    def finish(self, *, wait: bool) -> None:
        """Record the save in flight if it has ended; all ranks learn together whether it has.

        Raises:
            CheckpointError: it failed.
        """
        if self._write is not None and (wait or self._write.result.done()):
            begin = time.perf_counter()
            self._write.result.exception()  # waits
            self._write.waited_s += time.perf_counter() - begin if wait else 0.0
            self._record()
        self.is_writing, self._cost_s = distributed.broadcast_from_rank0((self._write is not None, self._cost_s))

    def close(self) -> None:
        """Wait for the save in flight, on the way out after an error: the save's error is logged, not raised."""
        self._thread.shutdown()
        if self._write is not None and (error := self._write.result.exception()) is not None:
            logger.error("{}", error)
        elif self._write is not None:
            with suppress(OSError):  # the error on the way is more than a second one about this line
                self._record()

    def _start(self, state: TrainState, recorder: Recorder, *, wait: bool) -> _Write:
        begin, spent = time.perf_counter(), self._context.heartbeat.read_spent()
        step, data, metrics = state.progress.step, self._context.data, recorder.describe_metrics()
        content = encode_state(
            state, fingerprint=data.fingerprint, metrics_position=metrics["bytes"], artifacts=data.artifacts
        )
        meta: dict[str, Any] = {"epoch": state.progress.epoch, "world_size": self._context.world.world_size}
        meta |= {"best": state.best, "swa": state.swa.count if state.swa is not None and state.swa.refreshed else 0}
        meta[FILES] = describe_files(list_kept_options(self._context.config), self._env, metrics)
        if not wait and self._can_copy(content):
            content = self._copy.take(content)
        best = state.best["step"] if state.best else None
        copied = time.perf_counter()
        result = self._thread.submit(partial(self._write_aside, content, step=step, meta=meta, best=best))
        return _Write(step, result, started_s=begin, copy_s=copied - begin, spent=spent)

    def _can_copy(self, content: checkpoint.State) -> bool:
        """Choose whether training goes on during the write, and record the choice when it changes."""
        needed = self._copy.predict_bytes(content)
        if not self._settings.background:
            return self._choose(_FOREGROUND, "checkpoint.background=false")
        if needed > self._copy.bytes:
            available = read_available_memory()
            memory = f"{format_size(available.bytes)} are available ({available.source})"
            if needed - self._copy.bytes > available.bytes // 2:  # leaves as much for everything else
                return self._choose(_FOREGROUND, f"a copy takes {format_size(needed)} of host memory, and {memory}")
            return self._choose(_BACKGROUND, f"the copy takes {format_size(needed)} of host memory; {memory}")
        return True

    def _choose(self, choice: str, reason: str) -> bool:
        if choice != self._choice:
            self._choice = choice
            update_env(self._context.run, "choices", {"checkpoint_write": {"value": choice, "reason": reason}})
            logger.info("{:<16} {}  ({})", "checkpoint_write", choice, reason)
        return choice == _BACKGROUND

    def _write_aside(
        self, content: checkpoint.State, *, step: int, meta: Mapping[str, Any], best: int | None
    ) -> tuple[Path, float]:
        """Write a checkpoint and delete old ones, in the thread."""
        begin, folder = time.perf_counter(), self._context.run / "checkpoints"
        saved = checkpoint.save(folder, content, step=step, meta=meta, check_owner=self._context.check_owner)
        self._context.check_owner()
        checkpoint.prune(
            folder,
            keep_last=self._settings.keep_last,
            protect=lambda other: other == best or self._keep_every.is_due_at(other),
            written=saved,
        )
        return saved, time.perf_counter() - begin

    def _record(self) -> None:
        """Log the save that has ended, and set the next interval by its cost."""
        assert self._write is not None
        write, self._write = self._write, None
        saved, write_s = write.result.result()
        self._cost_s = write.copy_s + write_s
        if not self._settings.every:
            self.every.seconds = compute_interval_s(
                max(self._cost_s, 1e-3), mtbf_hours=self._settings.mtbf_hours, max_minutes=self._settings.max_minutes
            )
        waits = {"waited_for_previous_s": write.waited_for_previous_s} if write.waited_for_previous_s else {}
        fields = {"write_s": write_s, "bytes": saved.stat().st_size, "file": saved.name, "spent": write.spent, **waits}
        self._log_event("checkpoint", step=write.step, seconds=write.waited_s, **fields)


_BACKGROUND, _FOREGROUND = "in the background", "in the foreground"
