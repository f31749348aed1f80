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
class Item:
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


class Draws:
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

    def add_to(self, items: Iterator[Item]) -> Iterator[Item]:
        """Add the random numbers of each item, drawn for several items at a time; evaluation has none."""
        while group := deque(itertools.islice(items, _DRAWN_TOGETHER)):
            self._draw_noise([item for item in group if item.epoch is not None])
            for _, alike in itertools.groupby(group, key=lambda item: (item.epoch is None, item.size)):
                self._draw_parameters(list(alike))
            while group:
                yield group.popleft()  # whoever gets it decides how long its memory is in use

    def _draw_noise(self, items: Sequence[Item]) -> None:
        if not items or not self._noise:
            return
        noise = augment.draw_noise(seed=self._seed, epoch=_repeat_epochs(items), sample_ids=_join_ids(items))
        for item, part in zip(items, np.split(noise, _find_ends(items)[:-1]), strict=True):
            item.values["noise"] = torch.from_numpy(part)

    def _draw_parameters(self, items: Sequence[Item]) -> None:
        """Draw the augmentation of items of one input size, and add the batch's entries about it."""
        if self._regions is None:
            return
        height, width = items[0].size
        if items[0].epoch is not None:
            ids = _join_ids(items)
            drawn = augment.draw(
                self._settings,
                seed=self._seed,
                epoch=_repeat_epochs(items),
                sample_ids=ids,
                regions=self._regions[ids],
                height_px=height,
                width_px=width,
                letterbox=self._letterbox,
                keep_boxes=self._read_boxes(ids),
            )
            for item, parameters in zip(items, drawn.split(_find_ends(items)), strict=True):
                item.parameters = parameters
        together = Parameters.join([item.parameters for item in items if item.parameters is not None])
        affine = augment.compute_affine(together, height_px=height, width_px=width)
        for item, part in zip(items, np.split(affine, _find_ends(items)[:-1]), strict=True):
            item.values["affine"] = torch.from_numpy(part)


def _join_ids(items: Sequence[Item]) -> np.ndarray:
    return np.concatenate([item.ids for item in items])


def _repeat_epochs(items: Sequence[Item]) -> np.ndarray:
    return np.repeat([item.epoch for item in items if item.epoch is not None], [len(item.ids) for item in items])


def _find_ends(items: Sequence[Item]) -> np.ndarray:
    return np.cumsum([len(item.ids) for item in items])
