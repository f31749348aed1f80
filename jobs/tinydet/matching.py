"""Assigns predictions to objects optimally (Hungarian matching), with one copy to the host for all layers.

Axes: D layers, B images, Q predictions, L objects (padded), K categories.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainyard.train.module import has_values

from . import geometry
from .config import LossSettings

WORST = 1e6
"""Replaces a non-finite cost: far above any real cost, and exact in float32."""


class Objects(NamedTuple):
    """The objects of a batch of images, on the device."""

    boxes_BL4: Tensor  # float32 centre form, relative to the input, sides of at least geometry.SIDE_MIN
    labels_BL: Tensor  # int64
    valid_BL: Tensor  # bool: an object, not padding
    size_px: tuple[int, int]  # height, width of the input


class Matches(NamedTuple):
    """M pairs of a prediction and an object."""

    layer_M: Tensor  # all int64, on the device
    image_M: Tensor
    query_M: Tensor
    object_M: Tensor
    non_finite: int  # how many costs were not finite


@torch.no_grad()
def match(logits_DBQK: Tensor, boxes_DBQ4: Tensor, objects: Objects, terms: LossSettings) -> Matches:
    """Assign one prediction to each object, in each layer and image, at the lowest total cost.

    Costs are computed in float32 from boxes relative to the input, whose areas fit any float. All matrices are copied
    to the host at once, so the host waits for the device once. Non-finite costs are counted and become `WORST`, so that
    assignment never fails (the loss of such a prediction is not finite, and the step is skipped).
    """
    cost_DBQL = compute_costs(logits_DBQK, boxes_DBQ4, objects, terms)
    shape, length = cost_DBQL.shape, objects.valid_BL.numel()
    joined = torch.cat([objects.valid_BL.flatten().float(), cost_DBQL.flatten()]).cpu()
    assign = _solve
    if has_values(joined):
        host = joined.numpy()
    else:  # memory is predicted: as many pairs as can be
        host, assign = np.ones(joined.shape, dtype=np.float32), _pair_in_order
    valid_BL = host[:length].reshape(objects.valid_BL.shape) > 0
    return solve_assignments(host[length:].reshape(shape), valid_BL, device=cost_DBQL.device, assign=assign)


def _solve(cost_QL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the queries and the objects of the assignment that costs least."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # here: it loads for half a second

    query, column = linear_sum_assignment(cost_QL)
    return query, column


def _pair_in_order(cost_QL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.arange(min(cost_QL.shape))
    return pairs, pairs


def solve_assignments(
    cost_DBQL: np.ndarray,
    valid_BL: np.ndarray,
    *,
    device: torch.device,
    assign: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = _solve,
) -> Matches:
    """Solve all assignments on the host, each by `assign`, which returns queries and objects."""
    non_finite = 0
    pairs_by_problem: list[np.ndarray] = []
    for image in range(cost_DBQL.shape[1]):
        real = np.flatnonzero(valid_BL[image])
        if not len(real):
            continue
        for layer in range(cost_DBQL.shape[0]):
            cost_QL = cost_DBQL[layer, image][:, real]
            finite = np.isfinite(cost_QL)
            if not finite.all():
                non_finite += int((~finite).sum())
                cost_QL = np.where(finite, cost_QL, WORST)
            query, column = assign(cost_QL)
            pairs_by_problem.append(
                np.stack([np.full_like(query, layer), np.full_like(query, image), query, real[column]])
            )
    pairs = np.concatenate([np.zeros((4, 0), dtype=np.int64), *pairs_by_problem], axis=1)
    layer_M, image_M, query_M, object_M = torch.from_numpy(pairs).to(device, non_blocking=True).unbind(0)
    return Matches(layer_M, image_M, query_M, object_M, non_finite=non_finite)


def compute_costs(logits_DBQK: Tensor, boxes_DBQ4: Tensor, objects: Objects, terms: LossSettings) -> Tensor:
    """Return (D, B, Q, L) float32: the weighted sum of category, L1 distance and overlap.

    The category cost for softmax is that of DETR (arXiv:2005.12872, section 3.1): minus the probability of the object's
    category; otherwise that of Deformable DETR: the focal loss of a yes minus that of a no, alpha 0.25, gamma 2.
    """
    logits, boxes = logits_DBQK.float(), boxes_DBQ4.float()
    label = objects.labels_BL[None, :, None, :].expand(*logits.shape[:3], -1)
    if terms.classification == "softmax":
        category = -logits.softmax(dim=-1).gather(-1, label)
    else:
        p = logits.sigmoid().clamp(1e-8, 1 - 1e-7)
        yes, no = 0.25 * (1 - p).square() * -p.log(), 0.75 * p.square() * -(1 - p).log()
        category = (yes - no).gather(-1, label)
    predicted, target = boxes[:, :, :, None], objects.boxes_BL4[None, :, None]
    distance = (predicted - target).abs().sum(dim=-1)
    overlap = compute_overlap(predicted, target, objects.size_px, share=terms.nwd_share, nwd_px=terms.nwd_px)
    return terms.match_class * category + terms.box_weight * distance - terms.overlap_weight * overlap


def compute_overlap(
    predicted: Tensor, target: Tensor, size_px: tuple[int, int], *, share: float, nwd_px: float
) -> Tensor:
    """Return a weighted mean of GIoU and NWD of boxes in centre form, relative to an input of `size_px` (h, w).

    NWD is computed in pixels of the input, where both axes have the same unit.
    """
    overlap = predicted.new_zeros(())
    if share < 1:
        overlap = (1 - share) * geometry.giou(geometry.cxcywh_to_xyxy(predicted), geometry.cxcywh_to_xyxy(target))
    if share > 0:
        scale = predicted.new_tensor([size_px[1], size_px[0]] * 2)
        overlap = overlap + share * geometry.nwd(predicted * scale, target * scale, nwd_px)
    return overlap
