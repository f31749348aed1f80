"""Proposes poses of one print on another by phase correlation.

Axes of tensors: N prints, P pairs, K poses of a pair, B = P * K problems, R rotations, S side of a print in px, F
frequencies, C cells, U rotated prints.
"""

from dataclasses import dataclass
from math import radians

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..baseline import SIDE_PX
from .prints import CELL_PX, Prints, compute_phases, make_band

ANGLES_DEG = tuple(range(-44, 45, 4))
POSES = 5  # one pose misses more distorted prints, more than five add chance agreement
CONSIDERED = 256  # highest cells among which poses are picked: more than picked poses can suppress
APART_PX = 8  # two poses of about one rotation are further apart than this
LEAST_OVERLAP = 0.15  # share of the smaller print
BORDER_PX = 40  # zeros around a rotated print: windows beyond it are empty


@dataclass(frozen=True, slots=True)
class Poses:
    """K poses of each of P pairs, B = P * K of them: the print rotated by an angle and moved by whole pixels.

    Attributes:
        rotated_USS: ridges of the rotated prints that occur, with a border of 40 zeros.
        rotated_B: which of these.
        angle_B: radians.
        shift_B2: int64, y and x: the rotated print at a place plus the shift is like the other print at that place.
        value_B: height of the peak, divided by the root of the overlap.
        peak_P2: highest correlation of the pair, as it is and divided by the root of the overlap.
    """

    rotated_USS: Tensor
    rotated_B: Tensor
    angle_B: Tensor
    shift_B2: Tensor
    value_B: Tensor
    peak_P2: Tensor


def find_poses(prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64]) -> Poses:
    """Return the poses with the highest phase correlation.

    Costs 23 inverse Fourier transforms of 256 x 256 a pair, and 23 rotations and transforms for each print of `one`.

    A small overlap correlates by chance, so peaks are divided by the root of the overlap, and one below 15 % of the
    smaller print does not count.
    """
    device = prints.ridges_NSS.device
    angles_R = torch.tensor([radians(degrees) for degrees in ANGLES_DEG], device=device)
    found: list[tuple[Tensor, ...]] = [()] * len(one)
    rotated: list[Tensor] = []
    for print_row in np.unique(one):
        turned_RSS = _rotate(prints.ridges_NSS[print_row], angles_R)
        phases_RSF = compute_phases(turned_RSS)
        masks_RCF = torch.fft.rfft2(_rotate(prints.coarse_NCC[print_row], angles_R))
        base = sum(map(len, rotated))
        used: dict[int, int] = {}
        for pair in np.flatnonzero(one == print_row).tolist():
            partner = other[pair]
            surface_RSS = _correlate(phases_RSF, prints.phases_NSF[partner])
            smaller = torch.minimum(prints.coarse_NCC[print_row].sum(), prints.coarse_NCC[partner].sum()) + 1e-2
            partner_CF = torch.fft.rfft2(prints.coarse_NCC[partner])
            overlap_RCC = torch.fft.irfft2(masks_RCF * partner_CF.conj(), s=(SIDE_PX // CELL_PX,) * 2) / smaller
            angle_K, shift_K2, value_K, highest = _pick_peaks(surface_RSS, overlap_RCC)
            for row in angle_K.tolist():
                used.setdefault(row, base + len(used))
            slot_K = torch.tensor([used[row] for row in angle_K.tolist()], device=device)
            found[pair] = (slot_K, angles_R[angle_K], shift_K2, value_K, torch.stack([highest, value_K[0]]))
        rotated.append(_rotate(prints.ridges_NSS[print_row], angles_R[list(used)], mode="bicubic"))
    slot_PK, angle_PK, shift_PK2, value_PK, peak_P2 = (torch.stack(part) for part in zip(*found, strict=True))
    rotated_USS = functional.pad(torch.cat(rotated), (BORDER_PX,) * 4)
    return Poses(
        rotated_USS, slot_PK.flatten(), angle_PK.flatten(), shift_PK2.flatten(0, 1), value_PK.flatten(), peak_P2
    )


def _pick_peaks(surface_RSS: Tensor, overlap_RCC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row of the angle, shift and value of K peaks, highest first, and the highest correlation."""
    side, cells = SIDE_PX, overlap_RCC.shape[-1]
    highest_RCC, place_RCC = functional.max_pool2d(surface_RSS, side // cells, return_indices=True)
    value_RCC = highest_RCC / (overlap_RCC.clamp(min=0) + LEAST_OVERLAP).sqrt()
    value_RCC = value_RCC.masked_fill(overlap_RCC < LEAST_OVERLAP, -1)
    value, cell = value_RCC.flatten().topk(CONSIDERED)
    place, row = place_RCC.flatten()[cell], cell // cells**2
    y, x = place // side, place % side
    picked = []
    for _ in range(POSES):
        best = value.argmax()
        picked.append((row[best], torch.stack([y[best], x[best]]), value[best].clone()))
        apart_y, apart_x = (y - y[best]).abs(), (x - x[best]).abs()
        apart = torch.maximum(torch.minimum(apart_y, side - apart_y), torch.minimum(apart_x, side - apart_x))
        near = apart <= APART_PX
        value = value.masked_fill(near & ((row - row[best]).abs() <= 1), -1)
    angle_K, place_K2, value_K = (torch.stack(part) for part in zip(*picked, strict=True))
    shift_K2 = (place_K2 + side // 2) % side - side // 2
    return angle_K, shift_K2, value_K, highest_RCC.amax()


def _correlate(phases_RSF: Tensor, other_SF: Tensor) -> Tensor:
    """Return the correlation (R, S, S) over shifts; 1 for a print with itself at shift 0."""
    scale = SIDE_PX**2 / (2 * float(make_band().sum()))
    surface: Tensor = torch.fft.irfft2(phases_RSF * (other_SF.conj() * scale), s=(SIDE_PX, SIDE_PX))
    return surface


def _rotate(print_SS: Tensor, angles_R: Tensor, *, mode: str = "bilinear") -> Tensor:
    """Return (R, S, S): a print rotated by each of the angles about its middle."""
    size = (len(angles_R), 1, *print_SS.shape)
    step = 2 / print_SS.shape[-1]
    across = torch.arange(print_SS.shape[-1], device=print_SS.device) * step + (step / 2 - 1)
    cos, sin = angles_R.cos()[:, None, None], angles_R.sin()[:, None, None]
    x, y = across[None, None], across[None, :, None]
    grid = torch.stack([cos * x - sin * y, sin * x + cos * y], dim=-1)
    rotated: Tensor = functional.grid_sample(print_SS.expand(size), grid, mode=mode, align_corners=False)
    return rotated[:, 0]
