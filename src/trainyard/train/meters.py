"""What the training loop keeps an eye on: rates and waiting, intervals, numbers read one step late."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainyard.settings import Duration


def skipped_in_a_row(before: int, skipped: float | None) -> int:
    """Return how many steps in a row were skipped; None, where a save has looked already, leaves the count alone."""
    if skipped is None:
        return before
    return before + 1 if skipped else 0


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class DeferredScalar:
    """A number on its way from the device: reading it waits for the step that made it, not for what came after."""

    def __init__(self, step: int, value: Tensor) -> None:
        self.step = step
        self._ready: Any = None
        self._host = value
        if value.is_cuda:
            self._host = torch.empty((), pin_memory=True).copy_(value, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def value(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._host)


class Interval:
    """An interval in steps, or in minutes of the main rank's clock; an empty text never comes."""

    def __init__(self, text: str, steps_per_epoch: int) -> None:
        length = Duration.parse(text) if text else None
        self.seconds = length.value * 60 if length is not None and length.unit == "min" else None
        self._steps = max(1, length.steps(steps_per_epoch)) if length is not None and self.seconds is None else None
        self._since = time.monotonic()
        self._told = False

    def due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def elapsed(self) -> bool:
        """Tell, once until the next `restart`, that the time is over: the ranks act on it a step later."""
        is_over = not self._told and self.seconds is not None and time.monotonic() - self._since >= self.seconds
        self._told |= is_over
        return is_over

    def restart(self) -> None:
        self._since, self._told = time.monotonic(), False


class StepMeter:
    """Where the time since the last log line went, pauses for evaluation and saving left out."""

    def __init__(self) -> None:
        self._reset()

    def add(self, samples: int, wait_s: float) -> None:
        self._steps += 1
        self._samples += samples
        self._wait_s += wait_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._begin += time.monotonic() - begin

    def timings(self) -> dict[str, float]:
        """Return means per step, and start anew."""
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
