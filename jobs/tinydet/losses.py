"""Losses of all layers at once: category, L1 and overlap. Axes as in `matching`; N denoising queries; M matches.

Everything is float32 and relative to the input size: areas in square pixels overflow half precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import geometry
from .config import LossSettings
from .matching import Matches, Objects, compute_overlap, match
from .network import DenoisingQueries, Outputs, Predictions


def compute_losses(
    outputs: Outputs,
    denoising_queries: DenoisingQueries | None,
    objects: Objects,
    *,
    terms: LossSettings,
    divisor: Tensor,
) -> dict[str, Tensor]:
    """Return `loss` and its parts, () float32.

    `class_loss`, `box_loss` and `overlap_loss` are those of the last layer, unweighted; `earlier_loss` is the weighted
    sum over the layers before it and the proposals, `denoising_loss` that of the denoising queries. Every layer has the
    same terms.

    Args:
        divisor: () float32, number of objects, by which the sums are divided.
    """
    stages = [outputs.predictions] if outputs.proposals is None else [outputs.predictions, outputs.proposals]
    logits = torch.cat([s.logits_DBQK.float() for s in stages]) if len(stages) > 1 else stages[0].logits_DBQK.float()
    boxes = torch.cat([s.boxes_DBQ4 for s in stages]) if len(stages) > 1 else stages[0].boxes_DBQ4
    last = len(outputs.predictions.logits_DBQK) - 1
    pairs = match(logits.detach(), boxes.detach(), objects, terms)
    parts_D3 = compute_layer_losses(Predictions(logits, boxes), pairs, objects, terms=terms, divisor=divisor)
    weight_3 = parts_D3.new_tensor([terms.class_weight, terms.box_weight, terms.overlap_weight])
    whole_D = (parts_D3 * weight_3).sum(dim=1)
    losses = {
        "loss": whole_D.sum(),
        "class_loss": parts_D3[last, 0],
        "box_loss": parts_D3[last, 1],
        "overlap_loss": parts_D3[last, 2],
        "earlier_loss": whole_D.sum() - whole_D[last],
        "broken_costs": parts_D3.new_tensor(float(pairs.non_finite)),
    }
    if outputs.denoising is not None and denoising_queries is not None:
        parts = compute_layer_losses(
            Predictions(outputs.denoising.logits_DBQK.float(), outputs.denoising.boxes_DBQ4),
            match_denoising_queries(denoising_queries, len(outputs.denoising.logits_DBQK)),
            objects,
            terms=terms,
            divisor=divisor * compute_mean_repeats(denoising_queries, objects.valid_BL.shape[1]),
            counted_BQ=denoising_queries.used_BN,
        )
        losses["denoising_loss"] = terms.denoising_weight * (parts * weight_3).sum()
        losses["loss"] = losses["loss"] + losses["denoising_loss"]
    return losses


def compute_mean_repeats(denoising_queries: DenoisingQueries, length: int) -> float:
    """Return how often an object is noised on average, by which the denoising losses are divided as well."""
    count = denoising_queries.labels_BN.shape[1]
    per_image = min(length, count // 2)
    return count // (2 * per_image) * per_image / length


def match_denoising_queries(denoising_queries: DenoisingQueries, layers: int) -> Matches:
    """Match each denoising query with the object it was made from; negatives have no object.

    Unmatched queries are included with object -1 and weight 0, so that the number does not depend on the data.
    """
    batch, count = denoising_queries.labels_BN.shape
    grid = torch.arange(layers * batch * count, device=denoising_queries.labels_BN.device)
    image, query = grid // count % batch, grid % count
    positive = denoising_queries.positive_BN[image, query]
    target = torch.where(positive, denoising_queries.target_BN[image, query], -1)
    return Matches(grid // (batch * count), image, query, target, non_finite=0)


def compute_layer_losses(
    predictions: Predictions,
    pairs: Matches,
    objects: Objects,
    *,
    terms: LossSettings,
    divisor: Tensor,
    counted_BQ: Tensor | None = None,
) -> Tensor:
    """Return (D, 3) float32: category, L1 and overlap loss of each layer.

    Args:
        pairs: those with a negative object do not count.
        counted_BQ: (B, Q) bool, predictions that count in the category loss; None: all.
    """
    layers = len(predictions.logits_DBQK)
    real_M = pairs.object_M >= 0
    object_M = pairs.object_M.clamp(min=0)
    box_M4 = predictions.boxes_DBQ4[pairs.layer_M, pairs.image_M, pairs.query_M]
    true_M4 = objects.boxes_BL4[pairs.image_M, object_M]
    distance_M = (box_M4 - true_M4).abs().sum(dim=1)
    overlap_M = compute_overlap(box_M4, true_M4, objects.size_px, share=terms.nwd_share, nwd_px=terms.nwd_px)
    in_layer_DM = (pairs.layer_M == torch.arange(layers, device=real_M.device)[:, None]) & real_M
    box_D = _sum_where(in_layer_DM, distance_M)
    overlap_D = _sum_where(in_layer_DM, 1 - overlap_M)
    class_D = _compute_class_losses(predictions, pairs, object_M, real_M, objects, terms, counted_BQ)
    if terms.classification != "softmax":
        class_D = class_D / divisor
    return torch.stack([class_D, box_D / divisor, overlap_D / divisor], dim=1)


def _sum_where(chosen_DM: Tensor, value_M: Tensor) -> Tensor:
    return torch.where(chosen_DM, value_M, 0.0).sum(dim=1)


def _compute_class_losses(
    predictions: Predictions,
    pairs: Matches,
    object_M: Tensor,
    real_M: Tensor,
    objects: Objects,
    terms: LossSettings,
    counted_BQ: Tensor | None,
) -> Tensor:
    """Return (D,) float32: a weighted mean for softmax, otherwise the sum over all predictions."""
    logits = predictions.logits_DBQK
    label_M = objects.labels_BL[pairs.image_M, object_M]
    index = (pairs.layer_M, pairs.image_M, pairs.query_M)
    if terms.classification == "softmax":
        nothing = logits.shape[-1] - 1
        true_DBQ = torch.full(logits.shape[:3], nothing, dtype=torch.long, device=logits.device)
        true_DBQ[index] = torch.where(real_M, label_M, nothing)
        weight_DBQ = torch.where(true_DBQ == nothing, terms.no_object, 1.0)
        if counted_BQ is not None:
            weight_DBQ = weight_DBQ * counted_BQ
        entropy_DBQ = F.cross_entropy(logits.flatten(0, 2), true_DBQ.flatten(), reduction="none").view_as(weight_DBQ)
        return (entropy_DBQ * weight_DBQ).sum(dim=(1, 2)) / weight_DBQ.sum(dim=(1, 2)).clamp(min=1e-6)
    target = torch.zeros_like(logits)
    quality_M = real_M.to(logits.dtype)
    if terms.classification == "varifocal":
        box_M4, true_M4 = predictions.boxes_DBQ4[index].detach(), objects.boxes_BL4[pairs.image_M, object_M]
        quality_M = quality_M * geometry.iou(geometry.cxcywh_to_xyxy(box_M4), geometry.cxcywh_to_xyxy(true_M4))[0]
    label_M = torch.where(real_M, label_M, 0)
    target[(*index, label_M)] = quality_M
    is_true = torch.zeros_like(logits)
    is_true[(*index, label_M)] = real_M.to(logits.dtype)
    form = varifocal if terms.classification == "varifocal" else focal
    loss = form(logits, target, is_true)
    if counted_BQ is not None:
        loss = loss * counted_BQ[None, :, :, None]
    return loss.sum(dim=(1, 2, 3))


def focal(logits: Tensor, target: Tensor, is_true: Tensor) -> Tensor:
    """Return the focal loss (arXiv:1708.02002, equation 5), alpha 0.25, gamma 2, per prediction and category."""
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    missed = p + target - 2 * p * target  # 1 - p of the true outcome
    return (0.75 - 0.5 * target) * missed.square() * entropy


def varifocal(logits: Tensor, target: Tensor, is_true: Tensor) -> Tensor:
    """Return the varifocal loss (arXiv:2008.13367, equation 2), alpha 0.75, gamma 2: the score learns the IoU.

    Args:
        target: the IoU for a true category, else 0.
    """
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    weight = torch.where(is_true > 0, target, 0.75 * logits.detach().sigmoid().square())
    return weight * entropy
