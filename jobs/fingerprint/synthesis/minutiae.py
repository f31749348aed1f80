"""Minutiae: where the ridges of a master end or fork, found on their skeleton, and where an impression shows them."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

from .impressions import Impression
from .masters import CELL_PX, Master

BORDER_PX = 14  # skeletons end at the border of an image, ridges do not
SPACING_PX = 6.0  # two minutiae closer than this are a spur, a gap or a bridge, and are left out
NEIGHBOURS = (
    (-1, 0),
    (-1, 1),
    (0, 1),
    (1, 1),
    (1, 0),
    (1, -1),
    (0, -1),
    (-1, -1),
)  # (row, column), clockwise from north

Bits = NDArray[np.uint8]


@dataclass(frozen=True)
class Minutiae:
    """(N,) each; positions are of the master, or of an impression."""

    x: NDArray[np.float64]  # column
    y: NDArray[np.float64]  # row
    direction: NDArray[np.float64]  # radians, counter-clockwise from the x axis; see `find_minutiae`
    is_bifurcation: NDArray[np.bool_]  # else a ridge ends

    def __len__(self) -> int:
        return len(self.x)


def find_minutiae(master: Master) -> Minutiae:
    """Return the minutiae of a master, at least 14 px from its border. About 60 ms.

    As in ISO/IEC 19794-2 the direction of an ending points along its ridge, that of a bifurcation along the valley
    between its branches: towards the side where the line that ends there continues.
    """
    skeleton = thin(master.ridges > 0)
    row, column, is_bifurcation = find_crossings(skeleton, np.ones(skeleton.shape, dtype=bool))
    angle = master.angle[row // CELL_PX, column // CELL_PX].astype(np.float64)
    direction = choose_directions(master.ridges, row, column, angle, is_bifurcation)
    return Minutiae(column.astype(np.float64), row.astype(np.float64), direction, is_bifurcation)


def choose_directions(
    ridges: NDArray[np.float32],
    row: NDArray[np.int64],
    column: NDArray[np.int64],
    angle: NDArray[np.float64],
    is_bifurcation: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the directions of minutiae, (N,) in 0..2 pi: see `find_minutiae`.

    Args:
        ridges: (H, W), positive on ridges.
        angle: (N,) radians, counter-clockwise from the x axis, in which the ridges run, forwards or backwards.
    """
    ahead = np.arange(3, 8)[:, None]
    sides = [
        ndimage.map_coordinates(
            ridges,
            (row - s * ahead * np.sin(angle), column + s * ahead * np.cos(angle)),
            order=1,
            mode="nearest",
        ).sum(axis=0)
        for s in (1, -1)
    ]
    is_backward = (sides[0] < sides[1]) != is_bifurcation
    direction: NDArray[np.float64] = np.arctan2(np.sin(angle), np.cos(angle)) + np.pi * is_backward
    return direction % (2 * np.pi)


def map_minutiae(minutiae: Minutiae, impression: Impression) -> tuple[Minutiae, NDArray[np.bool_]]:
    """Return the minutiae of a master where an impression shows them, and (N,) bool: whether it does.

    The impression knows from where each of its pixels comes; this is inverted by iteration, to less than 0.1 px
    where it is smooth. The order is kept, so row i of two impressions is the same minutia.
    """
    y, x = _find_pixels(impression, minutiae.y, minutiae.x)
    ahead_y, ahead_x = _find_pixels(
        impression, minutiae.y - 3 * np.sin(minutiae.direction), minutiae.x + 3 * np.cos(minutiae.direction)
    )
    direction = np.arctan2(y - ahead_y, ahead_x - x) % (2 * np.pi)
    shown_y, shown_x = impression.look_up_source(y, x)
    height, width = impression.contact.shape
    row, column = y.round().astype(np.int64).clip(0, height - 1), x.round().astype(np.int64).clip(0, width - 1)
    is_reached = np.hypot(shown_y - minutiae.y, shown_x - minutiae.x) < 1
    return Minutiae(x, y, direction, minutiae.is_bifurcation), is_reached & impression.contact[row, column]


def _find_pixels(
    impression: Impression, y: NDArray[np.float64], x: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the (row, column) of an impression that shows points of its master."""
    height, width = impression.contact.shape
    rows, columns = (part.ravel() for part in np.mgrid[8:height:16, 8:width:16].astype(np.float64))
    source = np.stack([*impression.look_up_source(rows, columns), np.ones(len(rows))])
    affine = np.linalg.lstsq(source.T, np.stack([rows, columns], axis=1), rcond=None)[0].T
    place = affine @ np.stack([y, x, np.ones(len(y))])
    for _ in range(12):
        place += affine[:, :2] @ (np.stack([y, x]) - np.stack(impression.look_up_source(*place)))
    return place[0], place[1]


def thin(is_ridge: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the skeleton of an image: lines one pixel wide, connected as before.

    Zhang and Suen, "A fast parallel algorithm for thinning digital patterns" (Communications of the ACM 27(3), 1984).
    """
    image = np.pad(is_ridge, 1).astype(np.uint8)
    while True:
        before = image.sum()
        for table in _tabulate_removal():
            image[1:-1, 1:-1] &= ~table[_encode_neighbours(image)] & 1
        if image.sum() == before:
            break
    return image[1:-1, 1:-1].astype(bool)


def count_crossings(skeleton: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return how many lines leave each pixel of a skeleton, 0 outside: 1 where a ridge ends, 3 where it forks."""
    codes = _encode_neighbours(np.pad(skeleton, 1).astype(np.uint8))
    crossings: NDArray[np.uint8] = np.where(skeleton, _tabulate_transitions()[codes], 0).astype(np.uint8)
    return crossings


def find_crossings(
    skeleton: NDArray[np.bool_], foreground: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return row, column and whether a ridge forks (else ends) of the minutiae of a skeleton, (N,) each.

    Left out are those within 14 px of the border of the image or of the foreground, and those closer than 6 px to
    another; of neighbouring pixels where one ridge forks, one counts.
    """
    inside = ndimage.distance_transform_edt(np.pad(foreground, 1))[1:-1, 1:-1] > BORDER_PX
    crossings = np.where(inside, count_crossings(skeleton), 0)
    forks, _ = ndimage.label(crossings == 3, structure=np.ones((3, 3)))
    y, x = np.nonzero((crossings == 1) | (crossings == 3))
    label = forks[y, x]
    kept = label == 0
    kept[np.unique(label, return_index=True)[1]] = True  # the first pixel of each
    y, x = y[kept], x[kept]
    distance = np.hypot(y[:, None] - y, x[:, None] - x)
    np.fill_diagonal(distance, np.inf)
    alone = distance.min(axis=1, initial=np.inf) >= SPACING_PX
    y, x = y[alone], x[alone]
    return y, x, crossings[y, x] == 3


def _encode_neighbours(padded: Bits) -> Bits:
    """Return the eight neighbours of each pixel as bits, clockwise from north; the border is cut off."""
    height, width = padded.shape
    code = np.zeros((height - 2, width - 2), dtype=np.uint8)
    for bit, (dy, dx) in enumerate(NEIGHBOURS):
        code |= padded[1 + dy : height - 1 + dy, 1 + dx : width - 1 + dx] << bit
    return code


@cache
def _tabulate_transitions() -> Bits:
    """Return for each code how often a 0 is followed by a 1 around the pixel."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    count: Bits = ((bits == 0) & (np.roll(bits, -1, axis=1) == 1)).sum(axis=1).astype(np.uint8)
    return count


@cache
def _tabulate_removal() -> tuple[Bits, Bits]:
    """Return for each code whether each of the two steps of Zhang and Suen removes the pixel."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    north, east, south, west = bits[:, ::2].T
    count, is_simple = bits.sum(axis=1), _tabulate_transitions() == 1
    is_inner = is_simple & (count >= 2) & (count <= 6)
    one = is_inner & (north * east * south == 0) & (east * south * west == 0)
    other = is_inner & (north * east * west == 0) & (north * south * west == 0)
    return one.astype(np.uint8), other.astype(np.uint8)
