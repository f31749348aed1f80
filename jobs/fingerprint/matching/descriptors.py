"""Describes the surroundings of each cell of a print by a small network, and compares prints by their cells.

The network is trained on synthetic prints (`jobs.fingerprint.dense`). Under the rotations that ridge directions
propose, each cell of one print looks for the most similar one of the other, and votes for how far the two are apart.
Around the displacement with the most votes each cell is looked for again, near to where its neighbours went. Two things
count: the votes, and by how much the cell found there is more similar than every cell elsewhere, because ridges that
merely run alike are like many places.

Axes of tensors: N prints, P pairs, D descriptor size, L cells of one print, M cells of another, I and J rows and
columns of cells, T rotations, H displacements along an axis, W cells of a window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import radians
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from trainyard.train import precision

from ..baseline import SIDE_PX
from ..network import sample_bilinear
from .poses import measure_likeness, rotate
from .prints import Prints

WEIGHTS = Path(__file__).with_suffix(".safetensors")  # of a run; the family's README has the commands
CELL_PX = 8
CELLS = SIDE_PX // CELL_PX
DIMS = 64
ANGLES_DEG = tuple(range(-90, 90, 8))
LIKELY = 4  # rotations of a pair
LEAST_COVER = 0.6  # share of a cell inside of the print
INT8_LEVELS = 256.0  # to 1: most numbers of a descriptor are below a quarter
LEAST_SIMILAR = 0.5  # of cells that vote
VOTE_CELLS = 1.0  # standard deviation of a vote
DESCRIBED = 2048  # prints whose cells are held: 0.2 GB
FEW_CELLS = 20  # added to their number: of a few cells, more agree by chance
LEAST_VOTES = 0.0066  # half of the pairs of two synthetic fingers have fewer, and none of 800 genuine ones
PARTNERS_AT_ONCE = 16
ROUNDS = ((2, 4.0), (1, 2.5), (1, 2.0))  # how far a cell is looked for, and over how many its displacement is averaged


class DescriptorNetwork(nn.Module):
    """Maps enhanced ridges at 250 dpi to a descriptor of unit length for each cell of 8 px.

    A descriptor sees 63 px, about 14 ridges. It is of the upper left pixel of its cell: each of the three strided
    layers keeps that pixel in the middle of its kernel. 297,192 parameters, 0.4 G multiplications a print at width 1.

    Shapes: B prints, H x W pixels, multiples of 8; D descriptor size, h x w = H / 8 x W / 8 cells.

    Args:
        dims: D.
        width: factor on every channel count.
    """

    def __init__(self, dims: int = DIMS, width: float = 1.0) -> None:
        super().__init__()
        c24, c48, c64, c96, c128 = (max(4, round(channels * width)) for channels in (24, 48, 64, 96, 128))
        self.body = nn.Sequential(
            _make_layer(1, c24, 7, stride=2),
            _make_layer(c24, c48, 3, stride=2),
            _make_layer(c48, c64, 3),
            _make_layer(c64, c96, 3, stride=2),
            _make_layer(c96, c96, 3),
            _make_layer(c96, c128, 3),
        )
        self.project = nn.Conv2d(c128, dims, 1)

    def forward(self, ridges_B1HW: Tensor) -> Tensor:
        """Return the descriptors (B, D, h, w) float32."""
        map_BDhw: Tensor = self.project(self.body(ridges_B1HW)).float()
        return functional.normalize(map_BDhw, dim=1)


def _make_layer(channels: int, out: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


def interpolate_descriptors(map_BDhw: Tensor, place_BP2: Tensor) -> Tensor:
    """Return descriptors (B, P, D) of unit length at places in px (y, x), bilinearly; the nearest one's outside."""
    size = torch.tensor(map_BDhw.shape[2:], device=map_BDhw.device)
    if precision.can_use_grid_sample(map_BDhw.device):
        grid_B1P2 = (place_BP2 / CELL_PX / (size - 1) * 2 - 1).flip(-1)[:, None]
        found_BD1P = functional.grid_sample(map_BDhw, grid_B1P2, padding_mode="border", align_corners=True)
    else:
        found_BD1P = sample_bilinear(map_BDhw, ((place_BP2 / CELL_PX * 2 + 1) / size - 1).flip(-1)[:, None])
    return functional.normalize(found_BD1P[:, :, 0].transpose(1, 2), dim=2)


@cache
def load_descriptors(device: torch.device) -> DescriptorNetwork:
    """Return the network that ships, in evaluation mode."""
    network = DescriptorNetwork()
    network.load_state_dict(load_file(WEIGHTS))
    return network.eval().requires_grad_(False).to(device)


def find_cells(ridges_SS: Tensor) -> Tensor:
    """Return which cells (I, J) of a print are inside of it."""
    is_print_1SS = (ridges_SS.abs() > 0.02).float()[None]
    cover_IJ = functional.avg_pool2d(functional.pad(is_print_1SS, (CELL_PX // 2,) * 4), CELL_PX)[0, :-1, :-1]
    is_inside_IJ: Tensor = cover_IJ > LEAST_COVER
    return is_inside_IJ


@dataclass(frozen=True, slots=True)
class Cells:
    """The described cells of a print: those inside of it."""

    descriptor_LD: Tensor
    place_L2: Tensor  # int64, row and column
    index_IJ: Tensor  # int64, the row of a cell in the other two, -1 outside of the print


def describe_cells(network: DescriptorNetwork, ridges_SS: Tensor) -> Cells:
    """Return the cells of a print."""
    map_DIJ = network(ridges_SS[None, None])[0]
    is_inside_IJ = find_cells(ridges_SS)
    place_L2 = is_inside_IJ.nonzero()
    index_IJ = torch.full(is_inside_IJ.shape, -1, device=place_L2.device)
    index_IJ[is_inside_IJ] = torch.arange(len(place_L2), device=place_L2.device)
    return Cells(map_DIJ[:, is_inside_IJ].T.contiguous(), place_L2, index_IJ)


class Evidence(NamedTuple):
    """Two scores of 0 or more for each of P pairs. They do not depend on the other pairs."""

    votes_P: NDArray[np.float64]
    """Votes for the displacement that has most of them, for each cell. About 0.01 of two fingers."""
    margin_P: NDArray[np.float64]
    """By how much cells matched there are more similar than all others, relative to the overlap; 0: not measured."""


def round_to_int8(descriptor_LD: Tensor) -> Tensor:
    """Return descriptors of which each number is one of 255 levels."""
    rounded_LD: Tensor = (descriptor_LD * INT8_LEVELS).round().clamp(-127, 127) / INT8_LEVELS
    return rounded_LD


def take_signs(descriptor_LD: Tensor) -> Tensor:
    """Return descriptors of which each number is a bit, of unit length."""
    signs_LD: Tensor = torch.where(descriptor_LD > 0, 1.0, -1.0) / descriptor_LD.shape[1] ** 0.5
    return signs_LD


def count_cells(prints: Prints) -> float:
    """Return how many cells of a print are described, on average."""
    return float(np.mean([int(find_cells(ridges_SS).sum()) for ridges_SS in prints.ridges_NSS]))


@torch.inference_mode()
def compare_descriptors(
    network: DescriptorNetwork,
    prints: Prints,
    one: NDArray[np.int64],
    other: NDArray[np.int64],
    *,
    least_votes: float = LEAST_VOTES,
    store: Callable[[Tensor], Tensor] | None = None,
) -> Evidence:
    """Match the descriptors of each pair of prints.

    A print of `one` is described under up to 23 rotations: pairs that share it are cheaper.

    Args:
        one, other: (P,) rows of `prints`.
        least_votes: the margin of pairs with fewer is not measured.
        store: maps the descriptors (L, D) of a print of `other` to those that a template keeps.
    """
    device = prints.ridges_NSS.device
    angles_T = torch.tensor([radians(degrees) for degrees in ANGLES_DEG], device=device)
    evidence = Evidence(np.zeros(len(one)), np.zeros(len(one)))

    @lru_cache(maxsize=DESCRIBED)
    def describe(row: int) -> Cells:
        cells = describe_cells(network, prints.ridges_NSS[row])
        return cells if store is None else replace(cells, descriptor_LD=store(cells.descriptor_LD))

    with tqdm(total=len(one), unit="pair", desc="compare", disable=None, leave=False) as bar:
        for row in np.unique(one).tolist():

            @cache
            def describe_rotated(t: int, row: int = row) -> Cells:
                return describe_cells(network, rotate(prints.ridges_NSS[row], angles_T[t : t + 1], mode="bicubic")[0])

            pairs_Q = np.flatnonzero(one == row)
            for begin in range(0, len(pairs_Q), PARTNERS_AT_ONCE):
                part = pairs_Q[begin : begin + PARTNERS_AT_ONCE]
                partner_P = torch.from_numpy(other[part]).to(device)
                likely_PT = measure_likeness(prints, row, partner_P, angles_T)[0].topk(LIKELY, dim=1).indices
                for pair, likely in zip(part.tolist(), likely_PT.sort(dim=1).values.tolist(), strict=True):
                    rotations = [describe_rotated(t) for t in likely]
                    match = compare_cells(rotations, describe(int(other[pair])), least_votes)
                    evidence.votes_P[pair], evidence.margin_P[pair] = match
                bar.update(len(part))
    return evidence


def compare_cells(rotations: Sequence[Cells], other: Cells, least_votes: float) -> tuple[float, float]:
    """Return the votes for the displacement with most of them, and the margin there, as `Evidence`."""
    if not len(other.place_L2) or not all(len(turned.place_L2) for turned in rotations):
        return 0.0, 0.0
    similar_TLM = [other.descriptor_LD @ turned.descriptor_LD.T for turned in rotations]
    votes_THH = blur(torch.stack([vote(*pair, other) for pair in zip(similar_TLM, rotations, strict=True)]), VOTE_CELLS)
    t, y, x = (int(at) for at in np.unravel_index(int(votes_THH.argmax()), votes_THH.shape))
    votes = float(votes_THH[t, y, x]) / (len(other.place_L2) + FEW_CELLS)
    if votes < least_votes:
        return votes, 0.0
    return votes, measure_margin(similar_TLM[t], rotations[t], other, (y - CELLS, x - CELLS))


def vote(similar_LM: Tensor, one: Cells, other: Cells) -> Tensor:
    """Return the votes (2 I, 2 J) for displacements, 0 in the middle: each cell's for the one most similar to it.

    A vote weighs more the more similar the two are, and double if the other cell would choose the same.
    """
    value_L, best_L = similar_LM.max(dim=1)
    is_mutual_L = similar_LM.amax(dim=0)[best_L] == value_L
    weight_L = (value_L - LEAST_SIMILAR).clamp(min=0).square() * (1 + is_mutual_L.float())
    moved_L2 = one.place_L2[best_L] - other.place_L2 + CELLS
    votes_HH = torch.zeros(2 * CELLS, 2 * CELLS, device=weight_L.device)
    return votes_HH.index_put((moved_L2[:, 0], moved_L2[:, 1]), weight_L, accumulate=True)


def blur(map_NHW: Tensor, sd: float) -> Tensor:
    """Return sums over a neighbourhood, with Gaussian weights of which the largest is 1."""
    reach = int(2.5 * sd + 0.5)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1, device=map_NHW.device) ** 2) / (2 * sd**2))
    blurred = functional.conv2d(map_NHW[:, None], kernel[:, None][None, None], padding=(reach, 0))
    return functional.conv2d(blurred, kernel[None][None, None], padding=(0, reach))[:, 0]


def measure_margin(similar_LM: Tensor, one: Cells, other: Cells, shift: tuple[int, int]) -> float:
    """Return the margin of cells near to a displacement, relative to the overlap under it.

    In three rounds each cell is looked for where the average of its neighbours' displacements expects it. A cell counts
    less the further it is from that average.
    """
    expected_L2 = torch.tensor(shift, device=similar_LM.device, dtype=torch.float32).expand(len(similar_LM), 2)
    for reach, sd in ROUNDS:
        near_LW, is_there_LW, moved_LW2 = _find_cells(one, other, expected_L2.round().long(), reach)
        similar_LW = similar_LM.gather(1, near_LW).masked_fill(~is_there_LW, -1)
        value_L, best_L = similar_LW.max(dim=1)
        moved_L2 = moved_LW2[torch.arange(len(best_L), device=best_L.device), best_L].float()
        expected_L2 = _average_displacement(
            moved_L2, (value_L - 0.2).clamp(min=0) ** 3, other.place_L2, sd, expected_L2
        )
    elsewhere_L = similar_LM.scatter(1, near_LW, similar_LM.gather(1, near_LW).masked_fill(is_there_LW, -1)).amax(dim=1)
    is_there_L = is_there_LW.any(dim=1)
    evenness_L = torch.exp(-(moved_L2 - expected_L2).square().sum(dim=1) / 2)
    margin_L = (value_L - elsewhere_L).clamp(min=0) * evenness_L * is_there_L
    return float(margin_L.sum() / (is_there_L.sum() + FEW_CELLS))


def _find_cells(one: Cells, other: Cells, expected_L2: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cells of `one` around where those of `other` are expected: indices (L, W), which are there, and moves."""
    window = torch.cartesian_prod(*[torch.arange(-reach, reach + 1, device=expected_L2.device)] * 2)
    moved_LW2 = expected_L2[:, None] + window
    place_LW2 = other.place_L2[:, None] + moved_LW2
    is_there_LW = ((place_LW2 >= 0) & (place_LW2 < CELLS)).all(dim=2)
    near_LW = one.index_IJ[place_LW2[..., 0].clamp(0, CELLS - 1), place_LW2[..., 1].clamp(0, CELLS - 1)]
    return near_LW.clamp(min=0), is_there_LW & (near_LW >= 0), moved_LW2


def _average_displacement(moved_L2: Tensor, weight_L: Tensor, place_L2: Tensor, sd: float, before_L2: Tensor) -> Tensor:
    """Return weighted averages of displacements around each cell; `before_L2` where no cell near has a weight."""
    sums_3IJ = torch.zeros(3, CELLS, CELLS, device=moved_L2.device)
    row_L, column_L = place_L2.unbind(dim=1)
    sums_3IJ[:, row_L, column_L] = torch.cat([moved_L2 * weight_L[:, None], weight_L[:, None]], dim=1).T
    sums_L3 = blur(sums_3IJ, sd)[:, row_L, column_L].T
    return torch.where(sums_L3[:, 2:] > 1e-4, sums_L3[:, :2] / sums_L3[:, 2:].clamp(min=1e-4), before_L2)
