"""Aligns the impressions of a finger, so that descriptors of ridges can be trained: ridges, and where each is from.

A finger has a frame, and each impression is turned and moved into it as a whole; `place` says where in the frame each
cell of it truly is, as bent skin is a few pixels off. Of synthetic prints the frame is the master, and all is known. Of
real ones it is the finger's first impression, onto which the matcher grows a field; what does not agree stays unknown.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

from .baseline import DPI, SIDE_PX
from .matching import register_pair
from .matching.fields import BLOCK_PX
from .matching.prints import Floats, enhance_image, enhance_print, index_prints
from .synthesis.impressions import draw_touch

CELL_PX = 8
CELLS = SIDE_PX // CELL_PX
LEVELS = 40.0  # of int8 to a standard deviation of ridges
LEAST_COVER = 0.9  # of a cell whose place is known
LEAST_BLOCKS = 30  # that agree: fewer may agree by chance
FIRST_BLOCK_PX = BLOCK_PX / 2 - 0.5  # the middle of the matcher's first block, as far from the next as cells are


@dataclass(frozen=True)
class AlignedPrint:
    """An impression in the frame of its finger, at 250 dpi."""

    ridges: NDArray[np.int8]  # (256, 256), `LEVELS` to a standard deviation; 0 outside of the print
    place: Floats  # (32, 32, 3): y and x of each cell's middle in the frame, in px, and whether they are known, 0 or 1


def centre_print(gray: NDArray[np.uint8], dpi: float) -> AlignedPrint:
    """Return a print as it lies, centred, with no place known."""
    return AlignedPrint(quantise(enhance_print(gray, dpi)[0]), np.zeros((CELLS, CELLS, 3), dtype=np.float32))


def align_synthetic(gray: NDArray[np.uint8], seed: int, finger: int, number: int) -> AlignedPrint:
    """Return an impression of `synthesis` on its master, with the displacement that it was drawn with."""
    touch = draw_touch(seed, finger, number)
    ridges, mask, middle = enhance_image(gray, 2 * DPI)
    y, x = (grid.ravel() for grid in np.mgrid[: gray.shape[0] : CELL_PX, : gray.shape[1] : CELL_PX])
    touched = touch.firmness[y, x] > 0
    y, x = y[touched], x[touched]
    there_N2 = np.stack([touch.source_y[y, x], touch.source_x[y, x]], axis=1).astype(np.float64)
    here_N2: NDArray[np.float64] = (np.stack([y, x], axis=1) - 0.5) / 2
    pose = fit_pose(here_N2, there_N2 / 2)
    aligned, cover, cells_at = lay_into_frame(ridges, mask, middle, pose)
    place = [
        ndimage.map_coordinates(part, 2 * cells_at + 0.5, order=1, mode="nearest") / 2
        for part in (touch.source_y, touch.source_x)
    ]
    return AlignedPrint(aligned, np.stack([*place, cover > LEAST_COVER], axis=-1, dtype=np.float32))


def align_real(gray: NDArray[np.uint8], dpi: float, frame_gray: NDArray[np.uint8], frame_dpi: float) -> AlignedPrint:
    """Return an impression in the frame of another one, onto which it is matched; what does not agree is unknown."""
    (ridges, mask), frame = enhance_print(gray, dpi), enhance_print(frame_gray, frame_dpi)
    prints = index_prints(*(torch.from_numpy(np.stack(parts)) for parts in zip(frame, (ridges, mask), strict=True)))
    field = register_pair(prints, 0, 1)
    if field.accepted.sum() < LEAST_BLOCKS:
        return AlignedPrint(quantise(ridges), np.zeros((CELLS, CELLS, 3), dtype=np.float32))
    here_N2 = np.argwhere(field.accepted).astype(np.float64) * CELL_PX + FIRST_BLOCK_PX
    pose = fit_pose(here_N2, field.there[field.accepted])
    aligned, cover, cells_at = lay_into_frame(ridges, mask, (SIDE_PX / 2, SIDE_PX / 2), pose)
    blocks_at = (cells_at - FIRST_BLOCK_PX) / CELL_PX
    *place, known = (
        ndimage.map_coordinates(part, blocks_at, order=1, cval=0)
        for part in (field.there[..., 0], field.there[..., 1], field.accepted.astype(np.float32))
    )
    is_known = (cover > LEAST_COVER) & (known > 0.999)
    return AlignedPrint(aligned, np.stack([*place, is_known], axis=-1, dtype=np.float32))


def lay_into_frame(
    ridges: Floats, mask: Floats, middle: tuple[float, float], pose: "Pose"
) -> tuple[NDArray[np.int8], Floats, Floats]:
    """Turn and move an image of a print so that it lies as in the frame, and its middle is that of the result.

    Returns:
        Its ridges, as of `AlignedPrint`; the share of each cell (32, 32) that is print; and where in the image the
        middles of the cells are, (2, 32, 32) y and x.
    """
    middle_there = pose.apply(np.array(middle)) - (SIDE_PX / 2 - 0.5)

    def find_source(y: Floats, x: Floats) -> Floats:
        source = pose.invert(np.stack([y, x], axis=-1) + middle_there)
        return np.moveaxis(source, -1, 0).astype(np.float32)

    at = find_source(*np.mgrid[:SIDE_PX, :SIDE_PX].astype(np.float32))
    aligned, covered = (ndimage.map_coordinates(part, at, order=1, cval=0) for part in (ridges * mask, mask))
    cover = covered.reshape(CELLS, CELL_PX, CELLS, CELL_PX).mean(axis=(1, 3))
    cells = np.mgrid[:CELLS, :CELLS].astype(np.float32) * CELL_PX + (CELL_PX / 2 - 0.5)
    return quantise(aligned), cover, find_source(*cells)


@dataclass(frozen=True)
class Pose:
    """A rotation, and a shift after it."""

    turn: NDArray[np.float64]  # (2, 2)
    shift: NDArray[np.float64]  # (2,)

    def apply(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return points (..., 2) in the frame."""
        moved: NDArray[np.float64] = points @ self.turn.T + self.shift
        return moved

    def invert(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return from where points (..., 2) of the frame are."""
        back: NDArray[np.float64] = (points - self.shift) @ self.turn
        return back


def fit_pose(here_N2: NDArray[np.float64], there_N2: NDArray[np.float64]) -> Pose:
    """Return the rotation and shift that take points nearest to others in the mean square."""
    middle, middle_there = here_N2.mean(axis=0), there_N2.mean(axis=0)
    here_N2, there_N2 = here_N2 - middle, there_N2 - middle_there
    angle = np.arctan2(
        (here_N2[:, 0] * there_N2[:, 1] - here_N2[:, 1] * there_N2[:, 0]).sum(), (here_N2 * there_N2).sum()
    )
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return Pose(turn, middle_there - turn @ middle)


def quantise(ridges: Floats) -> NDArray[np.int8]:
    """Return ridges as int8, `LEVELS` to a standard deviation."""
    levels: NDArray[np.int8] = np.clip(np.rint(ridges * LEVELS), -127, 127).astype(np.int8)
    return levels
