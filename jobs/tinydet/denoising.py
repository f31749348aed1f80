"""Contrastive denoising: noised objects that the decoder restores alongside its search (DINO, arXiv:2203.03605)."""

import torch
from torch import Tensor

from .geometry import SIDE_MIN, cxcywh_to_xyxy, xyxy_to_cxcywh
from .network import DenoisingQueries


def build_denoising_queries(
    boxes_BL4: Tensor,
    labels_BL: Tensor,
    valid_BL: Tensor,
    *,
    count: int,
    categories: int,
    label_noise: float,
    box_noise: float,
) -> DenoisingQueries:
    """Make `count` denoising queries from the objects of each image; draws from the device's generator.

    They form groups of 2 L. A group has each object twice: as a positive, with edges moved by less than half a side
    times `box_noise`, which the decoder restores, and as a negative, with edges moved by more, which it rejects as no
    object (section 3.3). Shapes do not depend on L: as many whole groups as fit are made; if not even one fits, the
    objects of each image are used from a random one on.

    Args:
        boxes_BL4: float32 centre form, relative to the input.
    """
    batch, length = labels_BL.shape
    device = boxes_BL4.device
    per_image = min(length, count // 2)
    groups = count // (2 * per_image)
    slot_N = torch.arange(count, device=device)
    group_N = slot_N // (2 * per_image)
    spare_N = group_N >= groups
    start_B1 = (torch.rand(batch, 1, device=device) * length).long()
    if per_image == length:  # all objects fit
        start_B1 = torch.zeros_like(start_B1)
    target_BN = (slot_N % per_image + start_B1) % length
    positive_N = slot_N % (2 * per_image) < per_image
    used_BN = valid_BL.gather(1, target_BN) & ~spare_N
    box_BN4 = boxes_BL4.gather(1, target_BN[..., None].expand(-1, -1, 4))
    label_BN = labels_BL.gather(1, target_BN)
    relabel_BN = torch.rand(batch, count, device=device) < label_noise * 0.5  # half of the rate, as in DINO's code
    random_label_BN = torch.randint(categories, (batch, count), device=device)
    share = torch.rand(batch, count, 4, device=device)
    share = torch.where(positive_N[:, None], share, 1 + share)
    sign = torch.randint(2, (batch, count, 4), device=device) * 2 - 1
    half_BN4 = (box_BN4[..., 2:] / 2).repeat(1, 1, 2)
    noised_BN4 = xyxy_to_cxcywh((cxcywh_to_xyxy(box_BN4) + sign * share * half_BN4 * box_noise).clamp(0, 1))
    sides = noised_BN4[..., 2:].abs().clamp(min=SIDE_MIN)  # also of boxes with swapped edges
    noised_BN4 = torch.cat([noised_BN4[..., :2], sides], dim=-1)
    middle = noised_BN4.new_tensor([0.5, 0.5, 0.1, 0.1])
    return DenoisingQueries(
        labels_BN=torch.where(relabel_BN, random_label_BN, label_BN),
        boxes_BN4=torch.where(used_BN[..., None], noised_BN4, middle),
        target_BN=target_BN,
        positive_BN=positive_N.expand(batch, -1) & used_BN,
        used_BN=used_BN,
        group_N=torch.where(spare_N, groups + slot_N, group_N),
    )
