"""Maps boxes between stored image and network input, measures their overlap, and merges detections of tiles.

Everything is float32 or float64 and without matrix products, so that neither autocast nor TF32 rounds a coordinate.
Axes: B samples, L boxes. Boxes are x1, y1, x2, y2 unless a name says `centre`: centre x, centre y, width, height.
"""

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import nms  # type: ignore[import-untyped]

SIDE_MIN = 1e-6
"""Shortest side of a box relative to the input: no area or ratio below becomes 0 or infinite."""


def map_to_input(boxes_BL4: Tensor, affine_B23: Tensor) -> Tensor:
    """Return the boxes around the mapped corners: exact for scaling, shifts and flips, larger for rotations.

    Args:
        boxes_BL4: float32, pixels of the stored image.
        affine_B23: float32, from (x, y, 1) in the stored image to the input (`batch["affine"]`).

    Returns:
        (B, L, 4) float32, pixels of the input, not clipped.
    """
    x1, y1, x2, y2 = boxes_BL4.unbind(-1)
    corners_BL42 = torch.stack([torch.stack(corner, -1) for corner in ((x1, y1), (x2, y1), (x1, y2), (x2, y2))], -2)
    mapped_BL42 = _apply_affine(affine_B23[:, None, None], corners_BL42)
    return torch.cat([mapped_BL42.amin(dim=2), mapped_BL42.amax(dim=2)], dim=-1)


def _apply_affine(affine: Tensor, points: Tensor) -> Tensor:
    """Map points (..., 2) by maps (..., 2, 3); leading axes broadcast.

    Written out, because as a matrix product autocast would round it to bfloat16 and TF32 to 10 bits: pixels at 640.
    """
    x, y = points[..., 0, None], points[..., 1, None]
    return affine[..., 0] * x + affine[..., 1] * y + affine[..., 2]


def invert_affine(affine_B23: Tensor) -> Tensor:
    """Return the inverse maps, (B, 2, 3) float32."""
    a, b, tx, c, d, ty = affine_B23.double().flatten(1).unbind(1)
    determinant = a * d - b * c
    rows = [d, -b, b * ty - d * tx, -c, a, c * tx - a * ty]
    return (torch.stack(rows, dim=1) / determinant[:, None]).view(-1, 2, 3).to(affine_B23.dtype)


def map_from_input(boxes_BL4: Tensor, affine_B23: Tensor, image_px_B2: Tensor) -> Tensor:
    """Map boxes of the input to pixels of the stored image, and clip them to it.

    Args:
        image_px_B2: float32 height and width of the stored images.
    """
    back_BL4 = map_to_input(boxes_BL4, invert_affine(affine_B23))
    width_height_B4 = image_px_B2.flip(1).repeat(1, 2)
    return back_BL4.clamp(min=0).minimum(width_height_B4[:, None])


def clip_boxes(
    boxes_BL4: Tensor, size_px: tuple[int, int], *, visible: float, side_min_px: float
) -> tuple[Tensor, Tensor]:
    """Clip boxes to an input of height and width `size_px`.

    Returns:
        the clipped boxes, and (B, L) bool: those that keep a share of at least `visible` of their area and have sides
        of at least `side_min_px`.
    """
    limit = boxes_BL4.new_tensor([size_px[1], size_px[0]] * 2)
    clipped_BL4 = boxes_BL4.clamp(min=0).minimum(limit)
    whole, left = area(boxes_BL4), area(clipped_BL4)
    sides = (clipped_BL4[..., 2:] - clipped_BL4[..., :2]).amin(dim=-1)
    return clipped_BL4, (left > 0) & (left >= visible * whole) & (sides >= side_min_px)


def make_image_mask(affine_B23: Tensor, image_px_B2: Tensor, size_px: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return (B, h, w) bool: the cells of a grid over the input whose centres show the image, not the fill.

    Args:
        size_px: height and width of the input.
        grid: h and w of the cells.
    """
    y = (torch.arange(grid[0], device=affine_B23.device) + 0.5) * (size_px[0] / grid[0])
    x = (torch.arange(grid[1], device=affine_B23.device) + 0.5) * (size_px[1] / grid[1])
    back = invert_affine(affine_B23)
    at_hw2 = torch.stack([x[None].expand(*grid), y[:, None].expand(*grid)], dim=-1)
    at_Bhw2 = _apply_affine(back[:, None, None], at_hw2)
    limit_B2 = image_px_B2.flip(1)
    return ((at_Bhw2 >= 0) & (at_Bhw2 <= limit_B2[:, None, None])).all(dim=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """x1, y1, x2, y2 -> centre x, centre y, width, height; any leading axes."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], dim=-1)


def cxcywh_to_xyxy(centred: Tensor) -> Tensor:
    """Centre x, centre y, width, height -> x1, y1, x2, y2; any leading axes."""
    half = centred[..., 2:] / 2
    return torch.cat([centred[..., :2] - half, centred[..., :2] + half], dim=-1)


def area(boxes: Tensor) -> Tensor:
    """Return the areas; 0 for inverted boxes."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection over union and the union, of boxes that broadcast."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    common = (high - low).clamp(min=0).prod(dim=-1)
    union = area(a) + area(b) - common
    return common / union.clamp(min=SIDE_MIN**2), union


def giou(a: Tensor, b: Tensor) -> Tensor:
    """Return IoU minus the share of the enclosing box that neither covers, in -1..1 (arXiv:1902.09630, algorithm 1)."""
    overlap, union = iou(a, b)
    low, high = torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])
    hull = (high - low).clamp(min=0).prod(dim=-1).clamp(min=SIDE_MIN**2)
    return overlap - (hull - union) / hull


def nwd(a_centre: Tensor, b_centre: Tensor, constant: float) -> Tensor:
    """Return the normalised Wasserstein distance exp(-W / C) in 0..1, 1 for equal boxes (arXiv:2110.13389, eqs. 6-8).

    A box is modelled as a Gaussian, so W^2 = dx^2 + dy^2 + (dw^2 + dh^2) / 4. Unlike IoU it measures how far apart two
    disjoint boxes are, and changes little when a box of six pixels is off by one.

    Args:
        a_centre, b_centre: centre x, centre y, width, height in pixels; the two broadcast.
        constant: C in px, about the mean size of the objects.
    """
    difference = a_centre - b_centre
    squared = difference[..., :2].square().sum(-1) + difference[..., 2:].square().sum(-1) / 4
    return torch.exp(-(squared + 1e-12).sqrt() / constant)  # the root has no finite slope at 0


def merge_detections(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, *, by: str, above: float, nwd_px: float
) -> np.ndarray:
    """Choose the detections to keep when the tiles of an image are merged: greedy suppression per category.

    Args:
        boxes: (n, 4) float, pixels of the whole image.
        by: "iou", or "nwd" with the constant `nwd_px`.
        above: a detection is dropped if its overlap with one of a higher score is above this.

    Returns:
        (m,) int64 indices, by descending score.
    """
    kept: list[np.ndarray] = []
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        box = torch.from_numpy(boxes[own]).double()
        score = torch.from_numpy(scores[own]).double()
        best = nms(box, score, above) if by == "iou" else _suppress_by_nwd(xyxy_to_cxcywh(box), score, above, nwd_px)
        kept.append(own[best.numpy()])
    joined = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    best_first: np.ndarray = joined[np.argsort(-scores[joined], kind="stable")]
    return best_first


def _suppress_by_nwd(centre: Tensor, score: Tensor, above: float, nwd_px: float) -> Tensor:
    """Choose the detections of one category to keep; costs O(detections x kept detections)."""
    left = score.argsort(descending=True, stable=True)
    kept = []
    while len(left):
        kept.append(left[0])
        rest = left[1:]
        left = rest[nwd(centre[left[0]], centre[rest], nwd_px) <= above]
    return torch.stack(kept)
