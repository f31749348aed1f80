"""Turns decoded images into model input on the device: cast, resample, gain, contrast, normalise."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare_model_input(
    image_BHWC: Tensor,
    augmentation: Mapping[str, Tensor],
    *,
    fill: int,
    mean: float | Tensor,
    std: float | Tensor,
    channels_last: bool,
) -> Tensor:
    """Turn decoded images into the model's input.

    Args:
        image_BHWC: uint8.
        augmentation: what `Parameters.select_for_device` returns, as tensors on the device; empty: none.
        fill: gray level outside the image.
        mean, std: of all channels, or of each: what `shape_channels` returns.

    Returns:
        (B, C, H, W) float32: ((clamp(x) in 0..1) - mean) / std, in new memory, NHWC if `channels_last`. The caller may
        reuse `image_BHWC` as soon as this has run.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x_BCHW = image_BHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout, copy=True).div_(255)
    if "theta" in augmentation:
        x_BCHW = _resample(x_BCHW, augmentation["theta"], fill / 255).contiguous(memory_format=layout)
    gain, contrast = (augmentation[name].view(-1, 1, 1, 1) if augmentation else 1.0 for name in ("gain", "contrast"))
    x_BCHW.mul_(gain).sub_(0.5).mul_(contrast).add_(0.5).clamp_(0, 1)
    return x_BCHW.sub_(mean).div_(std)


def shape_channels(values: float | Sequence[float], device: torch.device) -> float | Tensor:
    """Return a number for all channels as it is, and one per channel as (C, 1, 1) float32 on the device."""
    if not isinstance(values, Sequence):
        return values
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def _resample(x_BCHW: Tensor, theta: Tensor, fill: float) -> Tensor:
    """Sample bilinearly; subtracting `fill` first turns grid_sample's zero padding into the fill level."""
    grid = F.affine_grid(theta, list(x_BCHW.shape), align_corners=False)
    return F.grid_sample(x_BCHW - fill, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + fill
