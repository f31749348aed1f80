"""Measures the training loop: rates, waiting, idle time, intervals, and scalars read one step late."""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from trainyard.config.duration import Duration

T = TypeVar("T")


DeviceEvent = torch.cuda.Event
"""A mark in the queue of a device: reached when all that was queued before is done."""


def choose_event_type(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """Return what makes an event of this device; None for the CPU, which has done its work when a call returns."""
    return partial(DeviceEvent, enable_timing=True) if device.type == "cuda" else None


def count_skipped_in_a_row(before: int, skipped: float | None) -> int:
    """Return how many steps in a row were skipped; None (a save has already checked the step) changes nothing."""
    if skipped is None:
        return before
    return before + 1 if skipped else 0


def read_peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class DeferredScalar:
    """A scalar on its way from the device: reading it waits for the step that computed it, not for later work."""

    def __init__(self, step: int, value: Tensor, make_event: Callable[[], DeviceEvent] | None) -> None:
        self.step = step
        self._host = torch.empty((), pin_memory=True).copy_(value, non_blocking=True) if value.is_cuda else value
        self._ready = None if make_event is None else make_event()
        if self._ready is not None:
            self._ready.record()

    def read(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._host)


class Interval:
    """An interval in steps, or in minutes on rank 0's clock; with an empty text, never due."""

    def __init__(self, text: str, steps_per_epoch: int) -> None:
        length = Duration.parse(text) if text else None
        self.seconds = length.value * 60 if length is not None and length.unit == "min" else None
        self._steps = max(1, length.to_steps(steps_per_epoch)) if length is not None and self.seconds is None else None
        self._since = time.monotonic()
        self._reported = False

    def is_due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def has_elapsed(self) -> bool:
        """Return True once when the time is over, until the next `restart`: the ranks act on it a step later."""
        is_over = not self._reported and self.seconds is not None and time.monotonic() - self._since >= self.seconds
        self._reported |= is_over
        return is_over

    def restart(self) -> None:
        self._since, self._reported = time.monotonic(), False


class StepMeter:
    """Measures the time of steps, without evaluation and saving, and how much of it the device was idle.

    The calls of a step return before an asynchronous device has done its work. So a step is over when the device has
    finished it, which the host learns when it has launched the next one: it is never further ahead. The device is idle
    from the end of its queue until the next micro-batch arrives; events in the queue measure that. Kernels that prepare
    it are work. On the CPU a step is over when its calls return, and the time spent waiting for data is idle.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent] | None) -> None:
        """Begin to measure, with events of the type that `choose_event_type` returned."""
        self.longest_step_s = 0.0
        self.input_wait_s = 0.0  # in which the device was idle, of all steps so far
        self._make_event = make_event
        self._launched: _LaunchedStep | None = None
        self._gaps: list[_Gap] = []
        self._counted_until = time.monotonic()
        self._queue_end = self._record()
        self._arrival: DeviceEvent | None = None
        self._reset()

    @property
    def unfinished_steps(self) -> int:
        """Number of launched steps that the device may not have finished: 0 or 1."""
        return 0 if self._launched is None else 1

    def note_arrival(self) -> None:
        """Mark where the next micro-batch has arrived; otherwise `watch` does, behind the work queued until then."""
        self._arrival = self._record()

    def watch(self, micro_batches: Iterable[T]) -> Iterator[T]:
        """Yield the micro-batches of a step, which queues the computation of each before it takes the next."""
        for micro_batch in micro_batches:
            arrival = self._record() if self._arrival is None else self._arrival
            self._arrival = None
            if self._queue_end is not None and arrival is not None:
                self._gaps.append((self._queue_end, arrival))
            yield micro_batch
            self._queue_end = self._record()

    def end_step(self, samples: int, wait_s: float) -> float:
        """Count a launched step, and wait for the one before it.

        Returns:
            the seconds of training that ended with the step waited for; 0.0 if there was none.
        """
        self._steps += 1
        self._samples += samples
        self._wait_s += wait_s
        self._queue_end = self._record()
        if self._queue_end is None:
            self._count_idle(wait_s)
            return self._count_time()
        before, self._launched = self._launched, _LaunchedStep(self._queue_end, self._gaps)
        self._gaps = []
        return 0.0 if before is None else self._finish(before)

    def synchronize(self) -> float:
        """Wait until the device has finished every step; return the seconds of training not returned before."""
        step, self._launched = self._launched, None
        return self._count_time() if step is None else self._finish(step)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time inside. Call `synchronize` first: queued work would be left out too."""
        assert self._launched is None, "synchronize first"
        begin = time.monotonic()
        yield
        paused_s = time.monotonic() - begin
        self._begin += paused_s
        self._counted_until += paused_s
        self._queue_end = self._record()
        self._arrival = None  # of a micro-batch that was read inside

    def pop_timings(self) -> dict[str, float]:
        """Return means per step since the last call, and reset. Call `synchronize` first."""
        assert self._launched is None, "synchronize first"
        elapsed_s, steps = time.monotonic() - self._begin, self._steps
        result = {
            "samples_per_s": self._samples / elapsed_s,
            "step_ms": 1000 * elapsed_s / steps,
            "data_wait_ms": 1000 * self._wait_s / steps,
            "idle_ms": 1000 * self._idle_s / steps,
            "compute_ms": 1000 * max(0.0, elapsed_s - self._idle_s) / steps,
        }
        self._reset()
        return result

    def _record(self) -> DeviceEvent | None:
        if self._make_event is None:
            return None
        event = self._make_event()
        event.record()
        return event

    def _finish(self, step: "_LaunchedStep") -> float:
        step.end.synchronize()
        self._count_idle(sum(begin.elapsed_time(end) for begin, end in step.gaps) / 1000)
        return self._count_time()

    def _count_idle(self, seconds: float) -> None:
        self._idle_s += seconds
        self.input_wait_s += seconds

    def _count_time(self) -> float:
        now = time.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        self.longest_step_s = max(self.longest_step_s, seconds)
        return seconds

    def _reset(self) -> None:
        self._begin = time.monotonic()
        self._steps = self._samples = 0
        self._wait_s = self._idle_s = 0.0


_Gap = tuple[DeviceEvent, DeviceEvent]
"""The end of the queue, and the arrival of the next micro-batch."""


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that the device may not have finished."""

    end: DeviceEvent
    gaps: list[_Gap]  # before each of its micro-batches
