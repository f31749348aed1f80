"""Noised objects for the decoder to mend beside its own search: contrastive denoising (DINO, arXiv:2203.03605)."""

import torch
from torch import Tensor

from .geometry import SIDE_MIN, to_centre, to_corners
from .network import Noised


def noised(
    boxes_BL4: Tensor,
    labels_BL: Tensor,
    valid_BL: Tensor,
    *,
    count: int,
    categories: int,
    label_noise: float,
    box_noise: float,
) -> Noised:
    """Make `count` noised objects of each picture's own; draws from the device's generator.

    They come in groups of 2 L: each object once with edges moved by less than half a side times `box_noise`, to be
    mended, and once moved by more, to be recognised as no object (section 3.3). The number is fixed, whatever L is, so
    that shapes stay the same: there are as many whole groups as fit, and if not even one does, each picture's objects
    take part from a random one on.

    Args:
        boxes_BL4: float32 centre form, shares of the input.
    """
    batch, length = labels_BL.shape
    device = boxes_BL4.device
    kept = min(length, count // 2)
    groups = count // (2 * kept)
    slot_N = torch.arange(count, device=device)
    group_N = slot_N // (2 * kept)
    stand_in_N = group_N >= groups
    turn_B1 = _turns(valid_BL, kept)
    target_BN = (slot_N % kept + turn_B1) % length
    positive_N = slot_N % (2 * kept) < kept
    used_BN = valid_BL.gather(1, target_BN) & ~stand_in_N
    box_BN4 = boxes_BL4.gather(1, target_BN[..., None].expand(-1, -1, 4))
    label_BN = labels_BL.gather(1, target_BN)
    other_BN = torch.rand(batch, count, device=device) < label_noise * 0.5  # as DINO: half of the rate it states
    any_BN = torch.randint(categories, (batch, count), device=device)
    share = torch.rand(batch, count, 4, device=device)
    share = torch.where(positive_N[:, None], share, 1 + share)
    sign = torch.randint(2, (batch, count, 4), device=device) * 2 - 1
    half_BN4 = (box_BN4[..., 2:] / 2).repeat(1, 1, 2)
    moved = to_centre((to_corners(box_BN4) + sign * share * half_BN4 * box_noise).clamp(0, 1))
    middle = moved.new_tensor([0.5, 0.5, 0.1, 0.1])
    return Noised(
        labels_BN=torch.where(other_BN, any_BN, label_BN),
        boxes_BN4=torch.where(used_BN[..., None], _upright(moved), middle),
        target_BN=target_BN,
        positive_BN=positive_N.expand(batch, -1) & used_BN,
        used_BN=used_BN,
        group_N=torch.where(stand_in_N, groups + slot_N, group_N),
    )


def _turns(valid_BL: Tensor, kept: int) -> Tensor:
    """Return (B, 1) where each picture's objects begin: at the first, unless not all of them find room."""
    batch, length = valid_BL.shape
    start = (torch.rand(batch, 1, device=valid_BL.device) * length).long()
    return start if kept < length else torch.zeros_like(start)


def _upright(boxes: Tensor) -> Tensor:
    """Return boxes whose edges have changed places as boxes again."""
    return torch.cat([boxes[..., :2], boxes[..., 2:].abs().clamp(min=SIDE_MIN)], dim=-1)
