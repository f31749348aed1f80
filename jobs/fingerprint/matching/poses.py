"""Proposes poses of one print on another: rotations from ridge directions, shifts from phase correlation.

Axes of tensors: N prints, P pairs, K poses of a pair, B = P * K problems, R rotations, T twos of them, S side of a
print in px, G of the grid of the search, F frequencies, C cells, V considered cells, U rotated prints.
"""

from dataclasses import dataclass
from math import pi, radians

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..baseline import SIDE_PX
from .prints import CELL_PX, Prints, compute_phases, make_band

ANGLES_DEG = tuple(range(-92, 92, 4))
LIKELY = 8  # twos of rotations to search: of turned DB4_B prints, six have the right one in 99 % of clear pairs
TURN_PENALTY = 0.3  # on the likeness of ridge directions, at 90 degrees: people turn fingers little
POSES = 5  # one pose misses more distorted prints, more than five add chance agreement
CONSIDERED = 256  # highest cells among which poses are picked: more than picked poses can suppress
APART_PX = 8  # two poses of about one rotation are further apart than this
LEAST_OVERLAP = 0.15  # share of the smaller print
PARTNERS_AT_ONCE = 4  # their correlations fit the cache
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
    """Return the poses with the highest phase correlation, at rotations from -92 to 88 degrees.

    Ridge directions choose 16 of 46 rotations for each pair. Correlates on a grid of 192 x 192 points: 16 inverse
    Fourier transforms a pair, and a rotation and a transform of each print of `one` for each rotation that any of its
    pairs needs.

    A small overlap correlates by chance, so peaks are divided by the root of the overlap, and one below 15 % of the
    smaller print does not count.
    """
    device = prints.ridges_NSS.device
    angles_R = torch.tensor([radians(degrees) for degrees in ANGLES_DEG], device=device)
    angle_PK, slot_PK = (torch.zeros(len(one), POSES, dtype=torch.int64, device=device) for _ in range(2))
    shift_PK2, value_PK = angle_PK.new_zeros(len(one), POSES, 2), torch.zeros(len(one), POSES, device=device)
    highest_P = torch.zeros(len(one), device=device)
    rotated: list[Tensor] = []
    for print_row in np.unique(one).tolist():
        print_SS = prints.ridges_NSS[print_row]
        pairs = torch.from_numpy(np.flatnonzero(one == print_row)).to(device)
        partner_P = torch.from_numpy(other[one == print_row]).to(device)
        row_PR, overlap_PRCC = _choose_rotations(prints, print_row, partner_P, angles_R)
        needed, place_PR = torch.unique(row_PR, return_inverse=True)
        phases_RGF = compute_phases(rotate(print_SS, angles_R[needed]))
        for part in torch.split(torch.arange(len(pairs), device=device), PARTNERS_AT_ONCE):
            surface_PRGG = _correlate(phases_RGF[place_PR[part]], prints.phases_NGF[partner_P[part], None])
            picked = _pick_peaks(surface_PRGG, overlap_PRCC[part], row_PR[part])
            into = pairs[part]
            angle_PK[into], shift_PK2[into], value_PK[into], highest_P[into] = picked
        used, slot_PK[pairs] = torch.unique(angle_PK[pairs], return_inverse=True)
        slot_PK[pairs] += sum(map(len, rotated))
        rotated.append(rotate(print_SS, angles_R[used], mode="bicubic"))
    rotated_USS = functional.pad(torch.cat(rotated), (BORDER_PX,) * 4)
    angle_B, peak_P2 = angles_R[angle_PK.flatten()], torch.stack([highest_P, value_PK[:, 0]], dim=1)
    return Poses(rotated_USS, slot_PK.flatten(), angle_B, shift_PK2.flatten(0, 1), value_PK.flatten(), peak_P2)


def measure_likeness(prints: Prints, row: int, partner_P: Tensor, angles_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return how well the ridge directions of a print agree with those of partners under rotations, at the best shift.

    That is the sum of the cosines of twice the angle between ridges, divided by the root of the overlap, less a penalty
    for large rotations. Directions vary slowly: rotations of a print 8 degrees apart are enough.

    Args:
        row, partner_P: of `prints`.
        angles_T: radians.

    Returns:
        The likeness (P, T), and the overlap at every shift, (P, T, C, C), a share of the smaller print.
    """
    flow_CC, mask_CC = _measure_flow(prints.ridges_NSS[row : row + 1])[0], prints.coarse_NCC[row]
    turned_TCC = torch.complex(rotate(flow_CC.real, angles_T), rotate(flow_CC.imag, angles_T))
    turned_TCC = turned_TCC * torch.polar(torch.ones_like(angles_T), -2 * angles_T)[:, None, None]
    flow_PCC, mask_PCC = _measure_flow(prints.ridges_NSS[partner_P]), prints.coarse_NCC[partner_P]
    size_P111 = (torch.minimum(mask_CC.sum(), mask_PCC.sum(dim=(1, 2))) + 1e-2)[:, None, None, None]
    likeness_PTCC = torch.fft.ifft2(torch.fft.fft2(turned_TCC) * torch.fft.fft2(flow_PCC).conj()[:, None]).real
    masks_TCF, mask_PCF = torch.fft.rfft2(rotate(mask_CC, angles_T)), torch.fft.rfft2(mask_PCC)
    overlap_PTCC = torch.fft.irfft2(masks_TCF * mask_PCF.conj()[:, None], s=mask_CC.shape) / size_P111
    likeness_PTCC = _discount_chance(likeness_PTCC / size_P111, overlap_PTCC)
    return likeness_PTCC.amax(dim=(2, 3)) - TURN_PENALTY * (angles_T / (pi / 2)).square(), overlap_PTCC


def _choose_rotations(prints: Prints, row: int, partner_P: Tensor, angles_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotations of a print that are likely for each partner, and its overlap with the partner under them.

    Two rotations 4 degrees apart share a decision.

    Returns:
        Rows (P, R) of `angles_R`, and for each the overlap at every shift, (P, R, C, C), a share of the smaller print.
    """
    likeness_PT, overlap_PTCC = measure_likeness(prints, row, partner_P, angles_R.view(-1, 2).mean(dim=1))
    likely_PT = likeness_PT.topk(LIKELY, dim=1).indices
    row_PR = torch.stack([2 * likely_PT, 2 * likely_PT + 1], dim=2).flatten(1)
    overlap_PTCC = overlap_PTCC[torch.arange(len(partner_P), device=row_PR.device)[:, None], likely_PT]
    return row_PR, overlap_PTCC.repeat_interleave(2, dim=1)


def _measure_flow(ridges_NSS: Tensor) -> Tensor:
    """Return the direction of the ridges in each cell, (N, C, C) complex: its phase is twice the angle of the gradient.

    Its length is 1 where all ridges are parallel, and 0 without ridges. Doubled angles can be averaged: after Kass and
    Witkin, "Analyzing oriented patterns" (Computer Vision, Graphics, and Image Processing 37(3), 1987).
    """
    down = ridges_NSS[:, 2::2, 1:-1:2] - ridges_NSS[:, :-2:2, 1:-1:2]
    across = ridges_NSS[:, 1:-1:2, 2::2] - ridges_NSS[:, 1:-1:2, :-2:2]
    parts_N3YX = torch.stack([across**2 - down**2, 2 * across * down, across**2 + down**2], dim=1)
    cell = CELL_PX // 2  # of a gradient at every second pixel; averaged over 2 x 2 cells
    real, imaginary, energy = functional.avg_pool2d(
        functional.pad(parts_N3YX, (0, 1, 0, 1)), 2 * cell, cell, padding=cell // 2
    ).unbind(dim=1)
    return torch.complex(real, imaginary) / (energy + 1e-3)


def _discount_chance(value: Tensor, overlap: Tensor) -> Tensor:
    """Return values divided by the root of the overlap, -1 where that is too small to say anything."""
    return (value / (overlap.clamp(min=0) + LEAST_OVERLAP).sqrt()).masked_fill(overlap < LEAST_OVERLAP, -1)


def _pick_peaks(surface_PRGG: Tensor, overlap_PRCC: Tensor, row_PR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rotations (P, K), shifts (P, K, 2) px and values (P, K) of the peaks, best first, and the highest (P,).

    Args:
        row_PR: which rotation each surface belongs to.
    """
    side, cells = surface_PRGG.shape[-1], overlap_PRCC.shape[-1]
    highest_PRCC, place_PRCC = functional.max_pool2d(surface_PRGG, side // cells, return_indices=True)
    value_PRCC = _discount_chance(highest_PRCC, overlap_PRCC)
    value_PV, cell_PV = value_PRCC.flatten(1).topk(CONSIDERED, dim=1)
    place_PV, row_PV = place_PRCC.flatten(1).gather(1, cell_PV), row_PR.gather(1, cell_PV // cells**2)
    y_PV, x_PV = place_PV // side, place_PV % side
    picked = []
    for _ in range(POSES):
        value_P1, best_P1 = value_PV.max(dim=1, keepdim=True)
        row_P1, y_P1, x_P1 = (part.gather(1, best_P1) for part in (row_PV, y_PV, x_PV))
        picked.append((row_P1, y_P1, x_P1, value_P1))
        apart = [torch.minimum(d, side - d) for d in ((y_PV - y_P1).abs(), (x_PV - x_P1).abs())]
        near_PV = torch.maximum(*apart) <= APART_PX * side / SIDE_PX
        value_PV = value_PV.masked_fill(near_PV & ((row_PV - row_P1).abs() <= 1), -1)
    row_PK, y_PK, x_PK, value_PK = (torch.cat(part, dim=1) for part in zip(*picked, strict=True))
    shift_PK2 = (torch.stack([y_PK, x_PK], dim=2) + side // 2) % side - side // 2
    shift_PK2 = (shift_PK2 * (SIDE_PX / side)).round().long()
    return row_PK, shift_PK2, value_PK, highest_PRCC.amax(dim=(1, 2, 3))


def _correlate(phases_RGF: Tensor, other_RGF: Tensor) -> Tensor:
    """Return the correlations (..., G, G) over shifts; 1 for a print with itself at shift 0."""
    side = phases_RGF.shape[-2]
    scale = side**2 / (2 * float(make_band().sum()))
    surface: Tensor = torch.fft.irfft2(phases_RGF * (other_RGF.conj() * scale), s=(side, side))
    return surface


def rotate(print_SS: Tensor, angles_R: Tensor, *, mode: str = "bilinear") -> Tensor:
    """Return (R, S, S): a print rotated by each of the angles about its middle."""
    size = (len(angles_R), 1, *print_SS.shape)
    step = 2 / print_SS.shape[-1]
    across = torch.arange(print_SS.shape[-1], device=print_SS.device) * step + (step / 2 - 1)
    cos, sin = angles_R.cos()[:, None, None], angles_R.sin()[:, None, None]
    x, y = across[None, None], across[None, :, None]
    grid = torch.stack([cos * x - sin * y, sin * x + cos * y], dim=-1)
    rotated: Tensor = functional.grid_sample(print_SS.expand(size), grid, mode=mode, align_corners=False)
    return rotated[:, 0]
