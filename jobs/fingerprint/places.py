"""Says where on its finger each cell of a print is, so that descriptors of ridges can be trained.

A finger has a frame, in which all its impressions have places. Of synthetic prints it is the master, and all places are
known. Of real ones it is the finger's first impression, onto which the matcher grows a field; what does not agree stays
unknown.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

from .baseline import DPI, SIDE_PX
from .matching import register_pair
from .matching.fields import BLOCK_PX
from .matching.prints import Floats, centre_image, enhance_image, enhance_print, index_prints
from .synthesis.impressions import draw_touch

CELL_PX = 8
CELLS = SIDE_PX // CELL_PX
LEVELS = 40.0  # of int8 to a standard deviation of ridges
LEAST_COVER = 0.9  # of a cell whose place is known
LEAST_BLOCKS = 30  # that agree: fewer may agree by chance
FIRST_BLOCK_PX = BLOCK_PX / 2 - 0.5  # the middle of the matcher's first block, as far from the next as cells are


@dataclass(frozen=True)
class PlacedPrint:
    """An impression as it lies, centred, at 250 dpi."""

    ridges: NDArray[np.int8]  # (256, 256), `LEVELS` to a standard deviation; 0 outside of the print
    place: Floats  # (32, 32, 3): y and x of each cell's middle in the frame, in px, and whether they are known, 0 or 1


def place_nowhere(gray: NDArray[np.uint8], dpi: float) -> PlacedPrint:
    """Return a print with no place known."""
    return PlacedPrint(quantise(enhance_print(gray, dpi)[0]), np.zeros((CELLS, CELLS, 3), dtype=np.float32))


def place_synthetic(gray: NDArray[np.uint8], seed: int, finger: int, number: int) -> PlacedPrint:
    """Return an impression of `synthesis` with places on its master, by the displacement that it was drawn with."""
    touch = draw_touch(seed, finger, number)
    ridges, mask, (top, left) = centre_image(*enhance_image(gray, 2 * DPI))
    y, x = (2 * (middle + corner) + 0.5 for middle, corner in zip(find_middles(), (top, left), strict=True))
    place = [
        ndimage.map_coordinates(part, (y, x), order=1, mode="nearest") / 2 for part in (touch.source_y, touch.source_x)
    ]
    is_touched = ndimage.map_coordinates(touch.firmness, (y, x), order=1, mode="constant", cval=-1) > 0
    return place_cells(ridges, mask, place, is_touched)


def place_real(gray: NDArray[np.uint8], dpi: float, frame_gray: NDArray[np.uint8], frame_dpi: float) -> PlacedPrint:
    """Return an impression with places on another one, onto which it is matched; what does not agree is unknown."""
    (ridges, mask), frame = enhance_print(gray, dpi), enhance_print(frame_gray, frame_dpi)
    prints = index_prints(*(torch.from_numpy(np.stack(parts)) for parts in zip(frame, (ridges, mask), strict=True)))
    field = register_pair(prints, 0, 1)
    blocks_at = (np.stack(find_middles()) - FIRST_BLOCK_PX) / CELL_PX
    *place, known = (
        ndimage.map_coordinates(part, blocks_at, order=1, cval=0)
        for part in (field.there[..., 0], field.there[..., 1], field.accepted.astype(np.float32))
    )
    return place_cells(ridges, mask, place, (known > 0.999) & (field.accepted.sum() >= LEAST_BLOCKS))


def find_middles() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return y and x of the middles of the cells, (32, 32) each, in px."""
    y, x = np.mgrid[:CELLS, :CELLS] * float(CELL_PX) + (CELL_PX / 2 - 0.5)
    return y, x


def place_cells(ridges: Floats, mask: Floats, place: list[Floats], is_known: NDArray[np.bool_]) -> PlacedPrint:
    """Return a print with the places (y, x) of cells that are known, and inside of the print."""
    cover = mask.reshape(CELLS, CELL_PX, CELLS, CELL_PX).mean(axis=(1, 3))
    is_known = is_known & (cover > LEAST_COVER)
    return PlacedPrint(quantise(ridges), np.stack([*place, is_known], axis=-1, dtype=np.float32, casting="same_kind"))


def quantise(ridges: Floats) -> NDArray[np.int8]:
    """Return ridges as int8, `LEVELS` to a standard deviation."""
    levels: NDArray[np.int8] = np.clip(np.rint(ridges * LEVELS), -127, 127).astype(np.int8)
    return levels
