"""Losses of all layers at once: category, L1 and overlap. Axes as in `matching`; N noised objects; M matches.

Everything is float32 and in shares of the input: areas of boxes in pixels overflow half precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import geometry
from .matching import Matches, Objects, Terms, match, overlap_of
from .network import Detected, Noised, Outputs


def losses_of(
    outputs: Outputs, noised: Noised | None, objects: Objects, *, terms: Terms, divisor: Tensor
) -> dict[str, Tensor]:
    """Return `loss` and its parts, () float32.

    `class_loss`, `box_loss` and `overlap_loss` are those of the last layer, before their weights; `earlier_loss` is all
    that the layers before it and the proposals say, `denoising_loss` what the noised objects say, weighted. Every layer
    bears the same terms.

    Args:
        divisor: () float32, the number of objects that sums are divided by.
    """
    found = [outputs.found] if outputs.proposals is None else [outputs.found, outputs.proposals]
    logits = torch.cat([part.logits_DBQK.float() for part in found]) if len(found) > 1 else found[0].logits_DBQK.float()
    boxes = torch.cat([part.boxes_DBQ4 for part in found]) if len(found) > 1 else found[0].boxes_DBQ4
    last = len(outputs.found.logits_DBQK) - 1
    pairs = match(logits.detach(), boxes.detach(), objects, terms)
    parts_D3 = matched_losses(Detected(logits, boxes), pairs, objects, terms=terms, divisor=divisor)
    weight_3 = parts_D3.new_tensor([terms.class_weight, terms.box_weight, terms.overlap_weight])
    whole_D = (parts_D3 * weight_3).sum(dim=1)
    losses = {
        "loss": whole_D.sum(),
        "class_loss": parts_D3[last, 0],
        "box_loss": parts_D3[last, 1],
        "overlap_loss": parts_D3[last, 2],
        "earlier_loss": whole_D.sum() - whole_D[last],
        "broken_costs": parts_D3.new_tensor(float(pairs.broken)),
    }
    if outputs.noised is not None and noised is not None:
        parts = matched_losses(
            Detected(outputs.noised.logits_DBQK.float(), outputs.noised.boxes_DBQ4),
            mended(noised, len(outputs.noised.logits_DBQK)),
            objects,
            terms=terms,
            divisor=divisor * groups_of(noised, objects.valid_BL.shape[1]),
            counted_BQ=noised.used_BN,
        )
        losses["denoising_loss"] = terms.denoising_weight * (parts * weight_3).sum()
        losses["loss"] = losses["loss"] + losses["denoising_loss"]
    return losses


def groups_of(noised: Noised, length: int) -> float:
    """Return how many times an object is noised, on the mean: what their losses are divided by besides."""
    count = noised.labels_BN.shape[1]
    kept = min(length, count // 2)
    return count // (2 * kept) * kept / length


def mended(noised: Noised, layers: int) -> Matches:
    """Return noised objects as matches with what they were made of: those to be recognised as none have no match.

    Where nothing is to be mended a match of weight 0 stands, so that the number does not depend on the data.
    """
    batch, count = noised.labels_BN.shape
    grid = torch.arange(layers * batch * count, device=noised.labels_BN.device)
    picture, query = grid // count % batch, grid % count
    positive = noised.positive_BN[picture, query]
    target = torch.where(positive, noised.target_BN[picture, query], -1)
    return Matches(grid // (batch * count), picture, query, target, broken=0)


def matched_losses(
    said: Detected,
    pairs: Matches,
    objects: Objects,
    *,
    terms: Terms,
    divisor: Tensor,
    counted_BQ: Tensor | None = None,
) -> Tensor:
    """Return (D, 3) float32: category, L1 and overlap loss of each layer.

    Args:
        pairs: those with an object below 0 do not count.
        counted_BQ: (B, Q) bool, predictions whose category counts; None: all.
    """
    layers = len(said.logits_DBQK)
    real_M = pairs.object_M >= 0
    object_M = pairs.object_M.clamp(min=0)
    box_M4 = said.boxes_DBQ4[pairs.layer_M, pairs.picture_M, pairs.query_M]
    true_M4 = objects.boxes_BL4[pairs.picture_M, object_M]
    distance_M = (box_M4 - true_M4).abs().sum(dim=1)
    overlap_M = overlap_of(box_M4, true_M4, objects.size_px, share=terms.nwd_share, nwd_px=terms.nwd_px)
    in_layer_DM = (pairs.layer_M == torch.arange(layers, device=real_M.device)[:, None]) & real_M
    box_D = _sum_where(in_layer_DM, distance_M)
    overlap_D = _sum_where(in_layer_DM, 1 - overlap_M)
    class_D = _class_losses(said, pairs, object_M, real_M, objects, terms, counted_BQ)
    if terms.classification != "softmax":
        class_D = class_D / divisor
    return torch.stack([class_D, box_D / divisor, overlap_D / divisor], dim=1)


def _sum_where(chosen_DM: Tensor, value_M: Tensor) -> Tensor:
    return torch.where(chosen_DM, value_M, 0.0).sum(dim=1)


def _class_losses(
    said: Detected,
    pairs: Matches,
    object_M: Tensor,
    real_M: Tensor,
    objects: Objects,
    terms: Terms,
    counted_BQ: Tensor | None,
) -> Tensor:
    """Return (D,) float32: of softmax a weighted mean, of the others sums over all predictions."""
    logits = said.logits_DBQK
    label_M = objects.labels_BL[pairs.picture_M, object_M]
    place = (pairs.layer_M, pairs.picture_M, pairs.query_M)
    if terms.classification == "softmax":
        nothing = logits.shape[-1] - 1
        true_DBQ = torch.full(logits.shape[:3], nothing, dtype=torch.long, device=logits.device)
        true_DBQ[place] = torch.where(real_M, label_M, nothing)
        weight_DBQ = torch.where(true_DBQ == nothing, terms.no_object, 1.0)
        if counted_BQ is not None:
            weight_DBQ = weight_DBQ * counted_BQ
        entropy_DBQ = F.cross_entropy(logits.flatten(0, 2), true_DBQ.flatten(), reduction="none").view_as(weight_DBQ)
        return (entropy_DBQ * weight_DBQ).sum(dim=(1, 2)) / weight_DBQ.sum(dim=(1, 2)).clamp(min=1e-6)
    target = torch.zeros_like(logits)
    quality_M = real_M.to(logits.dtype)
    if terms.classification == "varifocal":
        ours, theirs = said.boxes_DBQ4[place].detach(), objects.boxes_BL4[pairs.picture_M, object_M]
        quality_M = quality_M * geometry.iou(geometry.to_corners(ours), geometry.to_corners(theirs))[0]
    label_M = torch.where(real_M, label_M, 0)
    target[(*place, label_M)] = quality_M
    is_true = torch.zeros_like(logits)
    is_true[(*place, label_M)] = real_M.to(logits.dtype)
    form = varifocal if terms.classification == "varifocal" else focal
    loss = form(logits, target, is_true)
    if counted_BQ is not None:
        loss = loss * counted_BQ[None, :, :, None]
    return loss.sum(dim=(1, 2, 3))


def focal(logits: Tensor, target: Tensor, is_true: Tensor) -> Tensor:
    """Return the focal loss (arXiv:1708.02002, equation 5), alpha 0.25, gamma 2, per prediction and category."""
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    missed = p + target - 2 * p * target  # 1 - p of what is true
    return (0.75 - 0.5 * target) * missed.square() * entropy


def varifocal(logits: Tensor, target: Tensor, is_true: Tensor) -> Tensor:
    """Return the varifocal loss (arXiv:2008.13367, equation 2), alpha 0.75, gamma 2: the score learns the IoU.

    Args:
        target: the IoU of a true category, else 0.
    """
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    weight = torch.where(is_true > 0, target, 0.75 * logits.detach().sigmoid().square())
    return weight * entropy
