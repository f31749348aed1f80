"""A micro-batch while it is prepared in the background, and the random numbers of its samples."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainyard.config.settings import AugmentSettings
from trainyard.data import augment
from trainyard.data.augment import Parameters

_DRAWN_TOGETHER = 8  # micro-batches whose random numbers are drawn in one call, which takes the time of three


@dataclass(slots=True)
class HostBatch:
    """A micro-batch, as background threads prepare it on the host; later its tensors are on the device."""

    ids: np.ndarray
    weight: float
    last: bool
    epoch: int | None  # None in evaluation
    size: tuple[int, int] = (0, 0)  # height and width of the model's input
    parameters: Parameters | None = None  # None without images, and before they are drawn
    values: dict[str, Tensor] = field(default_factory=dict)  # of the batch, all but its image
    augmentation: dict[str, Tensor] = field(default_factory=dict)  # what `prepare_model_input` takes
    images: Tensor | None = None  # (B, H, W, C) uint8, in a buffer that will be reused, or on the device
    copied: Any = None  # the event of its copy to a GPU


class RandomDraws:
    """Random numbers of samples: pure functions of (seed, epoch, sample id), whatever is drawn together."""

    def __init__(
        self,
        settings: AugmentSettings,
        *,
        seed: int,
        regions: np.ndarray | None,
        letterbox: bool,
        read_boxes: Callable[[np.ndarray], Sequence[np.ndarray]],
        noise: bool,
    ) -> None:
        """Store the inputs of the random draws.

        Args:
            regions: (N, 4) int32, the part of each image that counts as the whole; None without images.
            letterbox: as `augment.draw` takes it.
            read_boxes: returns the boxes of some samples of which each crop keeps one; none if crops keep none.
            noise: whether the job reads random numbers for its own augmentation.
        """
        self._settings, self._seed, self._regions, self._letterbox = settings, seed, regions, letterbox
        self._read_boxes, self._noise = read_boxes, noise

    def attach(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """Add the random numbers of each batch, drawn for several batches at a time; evaluation has none."""
        while group := deque(itertools.islice(batches, _DRAWN_TOGETHER)):
            self._draw_noise([batch for batch in group if batch.epoch is not None])
            for _, alike in itertools.groupby(group, key=lambda batch: (batch.epoch is None, batch.size)):
                self._draw_parameters(list(alike))
            while group:
                yield group.popleft()  # whoever gets it decides how long its memory is in use

    def _draw_noise(self, batches: Sequence[HostBatch]) -> None:
        if not batches or not self._noise:
            return
        noise = augment.draw_noise(seed=self._seed, epoch=_repeat_epochs(batches), sample_ids=_join_ids(batches))
        for batch, part in zip(batches, np.split(noise, _find_ends(batches)[:-1]), strict=True):
            batch.values["noise"] = torch.from_numpy(part)

    def _draw_parameters(self, batches: Sequence[HostBatch]) -> None:
        """Draw the augmentation of batches of one input size, and add their entries about it."""
        if self._regions is None:
            return
        height, width = batches[0].size
        if batches[0].epoch is not None:
            ids = _join_ids(batches)
            drawn = augment.draw(
                self._settings,
                seed=self._seed,
                epoch=_repeat_epochs(batches),
                sample_ids=ids,
                regions=self._regions[ids],
                height_px=height,
                width_px=width,
                letterbox=self._letterbox,
                keep_boxes=self._read_boxes(ids),
            )
            for batch, parameters in zip(batches, drawn.split(_find_ends(batches)), strict=True):
                batch.parameters = parameters
        together = Parameters.join([batch.parameters for batch in batches if batch.parameters is not None])
        affine = augment.compute_affine(together, height_px=height, width_px=width)
        for batch, part in zip(batches, np.split(affine, _find_ends(batches)[:-1]), strict=True):
            batch.values["affine"] = torch.from_numpy(part)


def _join_ids(batches: Sequence[HostBatch]) -> np.ndarray:
    return np.concatenate([batch.ids for batch in batches])


def _repeat_epochs(batches: Sequence[HostBatch]) -> np.ndarray:
    return np.repeat(
        [batch.epoch for batch in batches if batch.epoch is not None], [len(batch.ids) for batch in batches]
    )


def _find_ends(batches: Sequence[HostBatch]) -> np.ndarray:
    return np.cumsum([len(batch.ids) for batch in batches])
