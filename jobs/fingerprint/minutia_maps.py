"""Moves minutiae as augmentation and alignment move their image, and draws them as the maps that train a network.

Coordinates are in pixels, the upper left corner of an image at (0, 0) and the centre of its first pixel at (0.5, 0.5).
Directions are in radians, counter-clockwise from the x axis. Coordinates are float32 and computed without matrix
products, which autocast and TF32 would round to a pixel. Axes: B prints, L minutiae (padded), K channels.
"""

from math import pi

import torch
from torch import Tensor

from trainyard.train.module import Batch

from .network import MAP_CHANNELS

SIGMA_CELLS = 1.5
"""Of a minutia in a map, as the reference draws it in 128 x 128."""


@torch.no_grad()
def draw_targets(batch: Batch, pose_B23: Tensor | None, cells: tuple[int, int]) -> Tensor:
    """Return the maps of a batch's minutiae (B, K, h, w), moved as its images are: by augmentation and the aligner.

    Args:
        batch: with `image`, `affine`, `minutiae` (B, L, 3) in pixels of the stored image, and `minutiae_count`.
        pose_B23: of the aligner, if there is one.
        cells: h and w.
    """
    size_px = (batch["image"].shape[2], batch["image"].shape[3])
    minutiae_BL3 = move_minutiae(batch["minutiae"], batch["affine"])
    if pose_B23 is not None:
        minutiae_BL3 = move_minutiae(minutiae_BL3, invert_pose(pose_B23, size_px))
    return draw_maps(minutiae_BL3, batch["minutiae_count"], size_px, cells)


def move_minutiae(minutiae_BL3: Tensor, affine_B23: Tensor) -> Tensor:
    """Return x, y and direction (B, L, 3) after a map of (x, y, 1), which may turn, scale and mirror.

    Directions are of the moved points: a mirrored minutia points the other way.
    """
    x, y, direction = minutiae_BL3.unbind(-1)
    a, b, shift_x, c, d, shift_y = affine_B23.flatten(1)[..., None].unbind(1)
    ahead_x, ahead_y = torch.cos(direction), -torch.sin(direction)  # y points down
    moved = torch.atan2(-(c * ahead_x + d * ahead_y), a * ahead_x + b * ahead_y)
    return torch.stack([a * x + b * y + shift_x, c * x + d * y + shift_y, moved], dim=-1)


def invert_pose(pose_B23: Tensor, size_px: tuple[int, int]) -> Tensor:
    """Return (B, 2, 3), which maps pixels of an image to pixels of the aligned image.

    Args:
        pose_B23: a rotation and a shift as `affine_grid` takes them: from the aligned image, in -1..1, to the image.
        size_px: height and width of both.
    """
    height, width = size_px
    cos, sin, shift_x, shift_y = pose_B23[:, 0, 0], pose_B23[:, 1, 0], pose_B23[:, 0, 2], pose_B23[:, 1, 2]
    aspect, one = width / height, torch.ones_like(cos)
    left, top = one + shift_x, one + shift_y  # in half sides: the point of the image that becomes the middle
    row_x = torch.stack([cos, sin * aspect, width / 2 * (one - cos * left - sin * top)], dim=1)
    row_y = torch.stack([-sin / aspect, cos, height / 2 * (one + sin * left - cos * top)], dim=1)
    return torch.stack([row_x, row_y], dim=1)


def draw_maps(minutiae_BL3: Tensor, count_B: Tensor, size_px: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    """Return minutia maps (B, K, h, w) in 0..1 of a whole image.

    A minutia is a Gaussian around its place. Channel k, of direction 2 pi k / K, shows it with the share
    softmax(-|angle between the two|). Minutiae add up to 1 at most.

    Args:
        count_B: minutiae of each print; what follows them is padding.
        size_px: height and width of the image in which they are.
        cells: h and w.
    """
    x, y, direction = minutiae_BL3.unbind(-1)
    row = torch.arange(cells[0], device=x.device) + 0.5 - y[..., None] * (cells[0] / size_px[0])
    column = torch.arange(cells[1], device=x.device) + 0.5 - x[..., None] * (cells[1] / size_px[1])
    down_BLh, across_BLw = (torch.exp(-(distance**2) / (2 * SIGMA_CELLS**2)) for distance in (row, column))
    channel_K = torch.arange(MAP_CHANNELS, device=x.device) * (2 * pi / MAP_CHANNELS)
    turn_BLK = torch.remainder(direction[..., None] - channel_K + pi, 2 * pi) - pi
    is_there_BL1 = (torch.arange(x.shape[1], device=x.device) < count_B[:, None])[..., None]
    share_BLK = torch.softmax(-turn_BLK.abs(), dim=-1) * is_there_BL1
    return torch.einsum("blk,blh,blw->bkhw", share_BLK, down_BLh, across_BLw).clamp(max=1)
