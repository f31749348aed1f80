"""What the training loop measures: rates, waiting, intervals, and scalars read one step late."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainyard.settings import Duration


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

    def __init__(self, step: int, value: Tensor) -> None:
        self.step = step
        self._ready: Any = None
        self._host = value
        if value.is_cuda:
            self._host = torch.empty((), pin_memory=True).copy_(value, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
    """Measures where the time since the last log line went, without evaluation and saving."""

    def __init__(self) -> None:
        self._reset()

    def add(self, samples: int, wait_s: float) -> None:
        self._steps += 1
        self._samples += samples
        self._wait_s += wait_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._begin += time.monotonic() - begin

    def pop_timings(self) -> dict[str, float]:
        """Return means per step since the last call, and reset."""
        elapsed_s, steps = time.monotonic() - self._begin, self._steps
        result = {
            "samples_per_s": self._samples / elapsed_s,
            "step_ms": 1000 * elapsed_s / steps,
            "data_wait_ms": 1000 * self._wait_s / steps,
            "compute_ms": 1000 * (elapsed_s - self._wait_s) / steps,
        }
        self._reset()
        return result

    def _reset(self) -> None:
        self._begin = time.monotonic()
        self._steps = self._samples = 0
        self._wait_s = 0.0
