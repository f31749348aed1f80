"""The loss of every step since the last training line, which lists them: kept on the device until then."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainyard.train import distributed

_DIGITS = 6  # of a listed loss: float32 has seven, and a curve shows three


class StepLosses:
    """The losses of steps that no line lists yet.

    Adding one neither waits for the device nor communicates. The sum over ranks takes part in the all-reduce of a
    training line. A checkpoint stores the losses, so that the line after a resume lists those before it, too.
    """

    def __init__(self, summed: Sequence[float] = ()) -> None:
        """Begin with those of a checkpoint, which are sums over ranks."""
        self.summed = list(summed)
        self._parts: list[Tensor] = []  # () float32 on the device: this rank's parts of the losses of the steps since

    def __len__(self) -> int:
        return len(self.summed) + len(self._parts)

    def add(self, part: Tensor) -> None:
        """Keep this rank's part of the loss of one more step, () float32."""
        self._parts.append(part)

    def sum_over_ranks(self, latest: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Sum up what was added, and return the sums of all losses of the latest step. Every rank takes part."""
        latest = latest or {}
        if not latest and not self._parts:
            return {}
        values = distributed.sum_over_ranks(torch.stack([*latest.values(), *self._parts])).tolist()
        self.summed += values[len(latest) :]
        self._parts.clear()
        return dict(zip(latest, values, strict=False))

    def pop(self) -> list[float | None]:
        """Return what was summed up, oldest first, and forget it; None for a loss that was not finite."""
        listed = [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in self.summed]
        self.summed = []
        return listed
