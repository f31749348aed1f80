"""Which prediction answers for which object: optimal assignment, with one copy to the host for all layers.

Axes: D layers, B pictures, Q predictions, L objects (padded), K categories.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from . import geometry

WORST = 1e6
"""Cost in place of one that is not finite: far above any real one, and exact in float32."""


@dataclass(frozen=True)
class Terms:
    """How costs and losses are made of their parts."""

    classification: str  # "softmax", "focal" or "varifocal"
    match_class: float  # weight of the category in matching
    class_weight: float  # and in the loss
    box_weight: float
    overlap_weight: float
    nwd_share: float = 0.0
    nwd_px: float = 12.8
    no_object: float = 0.1  # softmax: weight of predictions without an object
    denoising_weight: float = 1.0


class Objects(NamedTuple):
    """What a batch of pictures holds, on the device."""

    boxes_BL4: Tensor  # float32 centre form, shares of the input, sides of geometry.SIDE_MIN or more
    labels_BL: Tensor  # int64
    valid_BL: Tensor  # bool: is one, and no filling
    size_px: tuple[int, int]  # height, width of the input


class Matches(NamedTuple):
    """M pairs of a prediction and an object."""

    layer_M: Tensor  # all int64, on the device
    picture_M: Tensor
    query_M: Tensor
    object_M: Tensor
    broken: int  # costs that were not finite


@torch.no_grad()
def match(logits_DBQK: Tensor, boxes_DBQ4: Tensor, objects: Objects, terms: Terms) -> Matches:
    """Assign an own prediction to each object, in each layer and picture, at the lowest sum of terms.

    Costs are computed in float32 from boxes in shares of the input, whose areas fit any float. All matrices come to
    the host in one copy, which waits for the device once; costs that are not finite are counted and become `WORST`,
    so that assignment never fails (the loss of such a prediction will not be finite, and the step be refused).
    """
    cost_DBQL = costs_of(logits_DBQK, boxes_DBQ4, objects, terms)
    shape, length = cost_DBQL.shape, objects.valid_BL.numel()
    host = torch.cat([objects.valid_BL.flatten().float(), cost_DBQL.flatten()]).cpu().numpy()
    valid_BL = host[:length].reshape(objects.valid_BL.shape) > 0
    return assigned(host[length:].reshape(shape), valid_BL, device=cost_DBQL.device)


def assigned(cost_DBQL: np.ndarray, valid_BL: np.ndarray, *, device: torch.device) -> Matches:
    """Solve all assignments on the host."""
    broken = 0
    found: list[np.ndarray] = []
    for picture in range(cost_DBQL.shape[1]):
        real = np.flatnonzero(valid_BL[picture])
        if not len(real):
            continue
        for layer in range(cost_DBQL.shape[0]):
            cost_QL = cost_DBQL[layer, picture][:, real]
            finite = np.isfinite(cost_QL)
            if not finite.all():
                broken += int((~finite).sum())
                cost_QL = np.where(finite, cost_QL, WORST)
            query, column = linear_sum_assignment(cost_QL)
            found.append(np.stack([np.full_like(query, layer), np.full_like(query, picture), query, real[column]]))
    pairs = np.concatenate(found, axis=1) if found else np.zeros((4, 0), dtype=np.int64)
    return Matches(*torch.from_numpy(pairs.astype(np.int64)).to(device, non_blocking=True).unbind(0), broken=broken)


def costs_of(logits_DBQK: Tensor, boxes_DBQ4: Tensor, objects: Objects, terms: Terms) -> Tensor:
    """Return (D, B, Q, L) float32: category, L1 distance, and overlap, weighted and added up.

    Category as DETR (arXiv:2005.12872, section 3.1) for softmax: less the probability of the object's category; for
    the others as Deformable DETR: the focal loss of saying yes less that of saying no, alpha 0.25, gamma 2.
    """
    logits, boxes = logits_DBQK.float(), boxes_DBQ4.float()
    label = objects.labels_BL[None, :, None, :].expand(*logits.shape[:3], -1)
    if terms.classification == "softmax":
        category = -logits.softmax(dim=-1).gather(-1, label)
    else:
        p = logits.sigmoid().clamp(1e-8, 1 - 1e-7)
        yes, no = 0.25 * (1 - p).square() * -p.log(), 0.75 * p.square() * -(1 - p).log()
        category = (yes - no).gather(-1, label)
    ours, theirs = boxes[:, :, :, None], objects.boxes_BL4[None, :, None]
    distance = (ours - theirs).abs().sum(dim=-1)
    overlap = overlap_of(ours, theirs, objects.size_px, share=terms.nwd_share, nwd_px=terms.nwd_px)
    return terms.match_class * category + terms.box_weight * distance - terms.overlap_weight * overlap


def overlap_of(ours: Tensor, theirs: Tensor, size_px: tuple[int, int], *, share: float, nwd_px: float) -> Tensor:
    """Return GIoU, or a mean of it and NWD of boxes in centre form, shares of an input of height and width `size_px`.

    NWD is told in pixels of the input: a pixel is a pixel there, along either axis.
    """
    found = ours.new_zeros(())
    if share < 1:
        found = (1 - share) * geometry.giou(geometry.to_corners(ours), geometry.to_corners(theirs))
    if share > 0:
        scale = ours.new_tensor([size_px[1], size_px[0]] * 2)
        found = found + share * geometry.nwd(ours * scale, theirs * scale, nwd_px)
    return found
