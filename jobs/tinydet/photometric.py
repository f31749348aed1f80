"""Photometric augmentation of a training batch on the device, drawn from the batch's own `noise`.

Axes: B images, C = 3 colours, H, W, L boxes. Images are float32 RGB in 0..1. Nothing here waits for the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import geometry
from .config import PhotometricSettings

COLOUR, BRIGHTNESS, CONTRAST, SATURATION, HUE, CLAHE, BLUR, BLUR_LENGTH, BLUR_ANGLE, PASTE, PASTED = range(11)
"""Columns of the noise; from PASTED on, three for each pasted object: which one, x and y."""

_RIM_PX = 2  # of its surroundings, copied with a pasted object and blended in


def augment(x_BCHW: Tensor, noise_BN: Tensor, settings: PhotometricSettings) -> Tensor:
    """Apply colour jitter, CLAHE and motion blur; the result is in 0..1, and boxes stay valid."""
    if settings.colour_p:
        on = noise_BN[:, COLOUR] < settings.colour_p
        x_BCHW = torch.where(on.view(-1, 1, 1, 1), jitter_colour(x_BCHW, noise_BN, settings), x_BCHW)
    if settings.clahe_p:
        on = noise_BN[:, CLAHE] < settings.clahe_p
        changed = apply_clahe(x_BCHW, clip=settings.clahe_clip, tiles=settings.clahe_tiles)
        x_BCHW = torch.where(on.view(-1, 1, 1, 1), changed, x_BCHW)
    if settings.blur_p:
        on = noise_BN[:, BLUR] < settings.blur_p
        odd = (settings.blur_px - 3) // 2 + 1  # 3, 5, ... blur_px
        length = 3 + 2 * (noise_BN[:, BLUR_LENGTH] * odd).floor()
        angle = 2 * math.pi * noise_BN[:, BLUR_ANGLE]
        changed = apply_motion_blur(x_BCHW, torch.where(on, length, 1.0), angle, longest=settings.blur_px)
        x_BCHW = torch.where(on.view(-1, 1, 1, 1), changed, x_BCHW)
    return x_BCHW


def jitter_colour(x_BCHW: Tensor, noise_BN: Tensor, settings: PhotometricSettings) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order; the result is in 0..1."""

    def draw_factor(column: int, range_: float) -> Tensor:
        return (1 + range_ * (2 * noise_BN[:, column] - 1)).view(-1, 1, 1, 1)

    x = x_BCHW * draw_factor(BRIGHTNESS, settings.brightness)
    mean = _compute_luma(x).mean(dim=(1, 2, 3), keepdim=True)
    x = mean + (x - mean) * draw_factor(CONTRAST, settings.contrast)
    gray = _compute_luma(x)
    x = gray + (x - gray) * draw_factor(SATURATION, settings.saturation)
    return _rotate_hue(x, math.radians(settings.hue_deg) * (2 * noise_BN[:, HUE] - 1)).clamp(0, 1)


def _compute_luma(x_BCHW: Tensor) -> Tensor:
    """Return luma (B, 1, H, W) with the weights of ITU-R BT.601."""
    weight = x_BCHW.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (x_BCHW * weight).sum(dim=1, keepdim=True)


def _rotate_hue(x_BCHW: Tensor, angle_B: Tensor) -> Tensor:
    """Rotate the chroma plane of YIQ (NTSC 1953) by an angle; luma and saturation stay."""
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    from_yiq = torch.linalg.inv(to_yiq)
    cos, sin, zero, one = angle_B.cos(), angle_B.sin(), torch.zeros_like(angle_B), torch.ones_like(angle_B)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=1).view(-1, 3, 3)
    rgb_turn = from_yiq.to(turn) @ turn @ to_yiq.to(turn)
    return torch.einsum("bij,bjhw->bihw", rgb_turn, x_BCHW)


def apply_clahe(x_BCHW: Tensor, *, clip: float, tiles: int) -> Tensor:
    """Equalise the histogram of L in CIELAB in each of tiles x tiles parts, with bounded slope; a and b stay.

    Contrast-limited adaptive histogram equalisation (Zuiderveld, Graphics Gems IV, 1994): counts above `clip` times
    their mean are spread evenly over the 256 levels, and the curves of the four nearest tiles are interpolated
    bilinearly at each pixel. Levels are counted by sorting, which is exact and deterministic on any device.
    """
    lab = rgb_to_lab(x_BCHW)
    level_BHW = (lab[:, 0] * (255 / 100)).clamp(0, 255)
    height, width = level_BHW.shape[1:]
    tall, wide = -(-height // tiles), -(-width // tiles)
    padded = F.pad(level_BHW[:, None], (0, wide * tiles - width, 0, tall * tiles - height), mode="replicate")[:, 0]
    curves = _compute_curves(padded.round(), tiles=tiles, tall=tall, wide=wide, clip=clip)
    y_low, y_high, y_share = _find_neighbours(height, tall, tiles, x_BCHW.device)
    x_low, x_high, x_share = _find_neighbours(width, wide, tiles, x_BCHW.device)
    level = level_BHW.round().long()
    batch = torch.arange(len(level), device=level.device)[:, None, None]

    def look_up(row: Tensor, column: Tensor) -> Tensor:
        return curves[batch, row[None, :, None], column[None, None, :], level]

    upper = torch.lerp(look_up(y_low, x_low), look_up(y_low, x_high), x_share[None, None, :])
    lower = torch.lerp(look_up(y_high, x_low), look_up(y_high, x_high), x_share[None, None, :])
    equalised = torch.lerp(upper, lower, y_share[None, :, None])
    return lab_to_rgb(torch.stack([equalised * (100 / 255), lab[:, 1], lab[:, 2]], dim=1)).clamp(0, 1)


def _compute_curves(level_BHW: Tensor, *, tiles: int, tall: int, wide: int, clip: float) -> Tensor:
    """Return (B, tiles, tiles, 256) float32 in 0..255: the new value of each level in each tile.

    Args:
        level_BHW: integers 0..255, (B, tiles * tall, tiles * wide).
    """
    pixels = tall * wide
    parts = level_BHW.view(-1, tiles, tall, tiles, wide).permute(0, 1, 3, 2, 4).reshape(-1, pixels)
    edges = torch.arange(256, device=parts.device, dtype=parts.dtype).expand(len(parts), 256).contiguous()
    below = torch.searchsorted(parts.sort(dim=1).values, edges, right=True).to(torch.float32)
    counts = torch.diff(below, dim=1, prepend=below.new_zeros(len(below), 1))
    limit = max(1.0, clip * pixels / 256)
    excess = (counts - limit).clamp(min=0).sum(dim=1, keepdim=True)
    counts = counts.clamp(max=limit) + excess / 256
    # CUDA's cumsum of floats is nondeterministic. As integers, sums are exact for tiles below 2**23 pixels.
    sums = (counts.double() * 2**40).long().cumsum(dim=1).double().mul(2**-40).float()
    return (sums * (255 / pixels)).clamp(0, 255).view(-1, tiles, tiles, 256)


def _find_neighbours(length: int, side: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each pixel along an axis, the tiles with centres before and after it, and its position between."""
    position = (torch.arange(length, device=device) + 0.5) / side - 0.5
    low = position.floor()
    share = position - low
    return low.clamp(0, tiles - 1).long(), (low + 1).clamp(0, tiles - 1).long(), share


_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)  # D65
_EDGE = 6 / 29


def rgb_to_lab(x_BCHW: Tensor) -> Tensor:
    """Convert sRGB in 0..1 to CIELAB (IEC 61966-2-1, CIE 15): L in 0..100, white point D65."""
    linear = torch.where(x_BCHW <= 0.04045, x_BCHW / 12.92, ((x_BCHW + 0.055) / 1.055).clamp(min=0) ** 2.4)
    xyz = torch.einsum("ij,bjhw->bihw", x_BCHW.new_tensor(_TO_XYZ), linear)
    xyz = xyz / xyz.new_tensor(_WHITE).view(1, 3, 1, 1)
    f = torch.where(xyz > _EDGE**3, xyz.clamp(min=_EDGE**3) ** (1 / 3), xyz / (3 * _EDGE**2) + 4 / 29)
    return torch.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], dim=1)


def lab_to_rgb(lab: Tensor) -> Tensor:
    """Convert CIELAB to sRGB; colours outside the gamut are outside 0..1."""
    y = (lab[:, 0] + 16) / 116
    f = torch.stack([y + lab[:, 1] / 500, y, y - lab[:, 2] / 200], dim=1)
    xyz = torch.where(f > _EDGE, f**3, 3 * _EDGE**2 * (f - 4 / 29)) * f.new_tensor(_WHITE).view(1, 3, 1, 1)
    to_rgb = torch.linalg.inv(torch.tensor(_TO_XYZ, dtype=torch.float64)).to(lab.device, lab.dtype)
    linear = torch.einsum("ij,bjhw->bihw", to_rgb, xyz)
    return torch.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear.clamp(min=1e-9) ** (1 / 2.4) - 0.055)


def apply_motion_blur(x_BCHW: Tensor, length_B: Tensor, angle_B: Tensor, *, longest: int) -> Tensor:
    """Average each image along a line of `length_B` px at `angle_B` through each pixel; edges are replicated.

    The line is symmetric about the pixel, so objects do not move.
    """
    kernel_B1kk = make_line_kernels(length_B, angle_B, longest)[:, None]
    batch, colours, height, width = x_BCHW.shape
    rim = longest // 2
    padded = F.pad(x_BCHW, (rim, rim, rim, rim), mode="replicate")
    stacked = padded.reshape(1, batch * colours, *padded.shape[2:])
    blurred = F.conv2d(stacked, kernel_B1kk.repeat_interleave(colours, dim=0), groups=batch * colours)
    return blurred.view(batch, colours, height, width)


def make_line_kernels(length_B: Tensor, angle_B: Tensor, side: int) -> Tensor:
    """Return (B, side, side) float32 kernels of sum 1: lines through the centre, antialiased by one pixel."""
    reach = torch.arange(side, device=length_B.device, dtype=torch.float32) - side // 2
    y, x = reach[None, :, None], reach[None, None, :]
    cos, sin = angle_B.cos().view(-1, 1, 1), angle_B.sin().view(-1, 1, 1)
    along, across = (x * cos + y * sin).abs(), (y * cos - x * sin).abs()
    across_weight = (1 - across).clamp(min=0)
    along_weight = (length_B.view(-1, 1, 1) / 2 + 0.5 - along).clamp(0, 1)
    kernel = across_weight * along_weight
    return kernel / kernel.sum(dim=(1, 2), keepdim=True)


def paste(
    x_BCHW: Tensor,
    boxes_BL4: Tensor,
    labels_BL: Tensor,
    valid_BL: Tensor,
    noise_BN: Tensor,
    settings: PhotometricSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy small objects from the next image of the batch to free places (after arXiv:1902.07296).

    An object is copied with a rim of two pixels of its surroundings, which is blended in. If it would touch another
    object, or the next image has no object with sides up to `paste_px`, it is left out: its box is returned as invalid.
    Unlike all other augmentation, the result depends on the neighbour in the micro-batch, so on the micro-batch's size.

    Args:
        boxes_BL4: pixels of the input.

    Returns:
        images, boxes (B, L + n, 4), labels and valid (B, L + n), where n is `paste_count`.
    """
    wanted = noise_BN[:, PASTE] < settings.paste_p
    donor_B4, donor_boxes, donor_labels = x_BCHW.roll(-1, 0), boxes_BL4.roll(-1, 0), labels_BL.roll(-1, 0)
    sides = donor_boxes[..., 2:] - donor_boxes[..., :2]
    small = valid_BL.roll(-1, 0) & (sides.amax(dim=-1) <= settings.paste_px)
    for number in range(settings.paste_count):
        which, u, v = noise_BN[:, PASTED + 3 * number : PASTED + 3 * number + 3].unbind(1)
        chosen, has_donor = _choose(small, which)
        box = donor_boxes.gather(1, chosen.view(-1, 1, 1).expand(-1, 1, 4))[:, 0]
        new = _place_randomly(box, u, v, x_BCHW.shape[2:])
        overlaps = (geometry.iou(_grow(new)[:, None], boxes_BL4)[0] > 0) & valid_BL
        good = wanted & has_donor & ~overlaps.any(dim=1)
        x_BCHW = _blend(x_BCHW, donor_B4, box, new, good, side=settings.paste_px + 2 * _RIM_PX + 2)
        boxes_BL4 = torch.cat([boxes_BL4, new[:, None]], dim=1)
        labels_BL = torch.cat([labels_BL, donor_labels.gather(1, chosen[:, None])], dim=1)
        valid_BL = torch.cat([valid_BL, good[:, None]], dim=1)
    return x_BCHW, boxes_BL4, labels_BL, valid_BL


def _choose(allowed_BL: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of one allowed object, and whether there is one."""
    if not allowed_BL.shape[1]:
        return torch.zeros_like(u_B, dtype=torch.long), torch.zeros_like(u_B, dtype=torch.bool)
    count = allowed_BL.sum(dim=1)
    place = (u_B * count).floor().clamp(max=(count - 1).clamp(min=0)).long()
    rank = allowed_BL.cumsum(dim=1) - 1
    return ((rank == place[:, None]) & allowed_BL).to(torch.uint8).argmax(dim=1), count > 0


def _place_randomly(box_B4: Tensor, u_B: Tensor, v_B: Tensor, size: torch.Size) -> Tensor:
    """Move each box by whole pixels to a random position in the input."""
    height, width = size
    rim = _RIM_PX + 1
    side = box_B4[:, 2:] - box_B4[:, :2]
    free = (side.new_tensor([width, height]) - 2 * rim - side).clamp(min=0)
    corner = rim + torch.stack([u_B, v_B], dim=1) * free
    move = (corner - box_B4[:, :2]).round()
    return box_B4 + move.repeat(1, 2)


def _grow(box_B4: Tensor) -> Tensor:
    return box_B4 + box_B4.new_tensor([-_RIM_PX, -_RIM_PX, _RIM_PX, _RIM_PX])


def _blend(x_BCHW: Tensor, donor_BCHW: Tensor, old_B4: Tensor, new_B4: Tensor, good_B: Tensor, *, side: int) -> Tensor:
    """Blend the donor's window around `old_B4` over the one around `new_B4`; windows have side x side px."""
    height, width = x_BCHW.shape[2:]
    side = min(side, height, width)
    step = torch.arange(side, device=x_BCHW.device)
    corner = (new_B4[:, :2] - _RIM_PX).floor().long()
    corner = torch.minimum(corner.clamp(min=0), corner.new_tensor([width - side, height - side]))
    move = (new_B4[:, :2] - old_B4[:, :2]).round().long()
    ys, xs = corner[:, 1, None] + step, corner[:, 0, None] + step  # (B, side)
    from_y, from_x = (ys - move[:, 1, None]).clamp(0, height - 1), (xs - move[:, 0, None]).clamp(0, width - 1)
    batch = torch.arange(len(x_BCHW), device=x_BCHW.device)[:, None, None]
    old = x_BCHW[batch, :, ys[:, :, None], xs[:, None, :]]  # (B, side, side, C)
    pasted = donor_BCHW[batch, :, from_y[:, :, None], from_x[:, None, :]]
    share = (
        _compute_blend_weights(xs + 0.5, new_B4[:, 0], new_B4[:, 2])[:, None, :]
        * _compute_blend_weights(ys + 0.5, new_B4[:, 1], new_B4[:, 3])[:, :, None]
    )
    share = (share * good_B.view(-1, 1, 1))[..., None]
    changed = x_BCHW.clone()
    changed[batch, :, ys[:, :, None], xs[:, None, :]] = torch.lerp(old, pasted, share)
    return changed


def _compute_blend_weights(position: Tensor, low_B: Tensor, high_B: Tensor) -> Tensor:
    """Return 1 between low and high, falling to 0 over the rim."""
    distance = torch.maximum(low_B[:, None] - position, position - high_B[:, None]).clamp(min=0)
    return (1 - distance / _RIM_PX).clamp(0, 1)
