"""Grows displacement fields block by block, and measures how much of two prints agrees under them.

Axes of tensors: N prints, B problems (a pair in a pose), I and J rows and columns of the grid of blocks, G = I * J, C
candidates or cells, Q blocks to look for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..baseline import SIDE_PX
from .poses import BORDER_PX, Poses
from .prints import COARSE_PX, Prints, make_window

BLOCK_PX, STEP_PX = 32, 8
BLOCKS = (SIDE_PX - BLOCK_PX) // STEP_PX + 1
REACH_PX = 2  # a block is looked for so far from where its neighbours predict it
LEAST_NCC = 0.45  # of a block that is accepted
LEAST_COVER = 0.6  # share of a block inside of the print that is compared
LEAST_HIT = 0.5  # share of its counterpart inside of the other print
BEHIND = 0.05  # blocks this much worse than the best candidate of their problem are accepted with it
CANDIDATES = 8  # blocks that may be a seed
SEED_STEP = 3  # blocks between those that are tried as a seed
SEED_REACH_PX = 3
UNEVEN_PX = 4.0  # at this distance from the affine map a block counts for 0.6
EVALUATED = 256  # blocks at once: they fit the cache


@dataclass(frozen=True, slots=True)
class Field:
    """Displacement fields of B problems over (I, J) blocks of 32 px, one every 8 px.

    Attributes:
        accepted_BIJ: bool.
        moved_BIJ2: float32, y and x in px, to be added to the shift of the pose; 0 where not accepted.
        ncc_BIJ: correlation of an accepted block with its counterpart, else 0.
    """

    accepted_BIJ: Tensor
    moved_BIJ2: Tensor
    ncc_BIJ: Tensor

    def sum_agreement(self) -> Tensor:
        """Return the sum (B,) over accepted blocks of their correlation above 0.4."""
        return (self.ncc_BIJ - 0.4).clamp(min=0).flatten(1).sum(dim=1)

    def take_better(self, field: "Field") -> "Field":
        """Return for each problem the field of the two that agrees more."""
        better_B11 = (field.sum_agreement() > self.sum_agreement())[:, None, None]
        return Field(
            torch.where(better_B11, field.accepted_BIJ, self.accepted_BIJ),
            torch.where(better_B11[..., None], field.moved_BIJ2, self.moved_BIJ2),
            torch.where(better_B11, field.ncc_BIJ, self.ncc_BIJ),
        )


class FieldGrower:
    """Grows a displacement field for each problem, from a block that agrees well under its pose.

    In each round all blocks next to accepted ones are predicted by the mean of their accepted neighbours and looked for
    within 2 px, by the correlation normalised by energy (NCC) under a Hann window; the best of each problem, and those
    almost as good, are accepted. So ridges lead across noise, not the reverse. A problem is over when no candidate
    reaches 0.45.

    Attributes:
        seed_B: mean correlation of the eight blocks that agree best near to each pose, before anything is grown.
    """

    def __init__(self, prints: Prints, one_B: Tensor, other_B: Tensor, poses: Poses) -> None:
        self._prints, self._poses = prints, poses
        self._compare = _Comparison(prints, one_B, other_B, poses)
        self._place_BC, self._moved_BC2, self._ncc_BC = _choose_seeds(self._compare)
        self.seed_B = self._ncc_BC.mean(dim=1)

    def grow(self, wanted_B: Tensor) -> Field:
        """Return the fields from the blocks that agree best; those not wanted stay empty."""
        ncc_B = self._ncc_BC[:, 0] * wanted_B
        return _grow_from(self._compare, self._place_BC[:, 0], self._moved_BC2[:, 0], ncc_B)

    def grow_elsewhere(self, field: Field, wanted_B: Tensor) -> Field:
        """Return fields of which those wanted are from the best block outside of `field`, where that agrees more."""
        taken_BC = field.accepted_BIJ.flatten(1).gather(1, self._place_BC) | ~wanted_B[:, None]
        ncc_B, c = self._ncc_BC.masked_fill(taken_BC, 0).max(dim=1)
        at = torch.arange(len(c), device=c.device)
        return field.take_better(_grow_from(self._compare, self._place_BC[at, c], self._moved_BC2[at, c], ncc_B))

    def locate(self, field: Field) -> Tensor:
        """Return where in the unrotated print the middles of the blocks are, (B, I, J, 2) px y and x."""
        place_I = torch.arange(BLOCKS, device=field.moved_BIJ2.device) * STEP_PX + (BLOCK_PX / 2 - 0.5)
        place_IJ2 = torch.stack(torch.meshgrid(place_I, place_I, indexing="ij"), dim=2)
        middle = SIDE_PX / 2 - 0.5
        y, x = (place_IJ2 + field.moved_BIJ2 + self._poses.shift_B2[:, None, None] - middle).unbind(dim=3)
        cos, sin = (part(self._poses.angle_B)[:, None, None] for part in (torch.cos, torch.sin))
        return torch.stack([sin * x + cos * y, cos * x - sin * y], dim=3) + middle

    def measure_agreement(self, field: Field) -> Tensor:
        """Return how much of the possible overlap agrees, and how much of it moves evenly, (B, 2); 0 of empty fields.

        The possible overlap is the blocks whose counterpart, by an affine map fitted to the accepted ones, is inside of
        the posed print. The agreement is the sum over accepted blocks of their correlation above 0.4, relative to the
        overlap. The second value is relative to the root of the overlap, which favours large ones, and counts a block
        less the further it is from the affine map: fields that grow between two fingers wander.
        """
        agreement_B2 = torch.zeros(len(field.ncc_BIJ), 2, device=field.ncc_BIJ.device)
        problem_L = field.accepted_BIJ.flatten(1).any(dim=1).nonzero()[:, 0]
        accepted_LG, moved_LG2 = field.accepted_BIJ[problem_L].flatten(1), field.moved_BIJ2[problem_L].flatten(1, 2)
        place_G2 = torch.cartesian_prod(*[torch.arange(BLOCKS, device=problem_L.device, dtype=torch.float32)] * 2)
        basis_G3 = functional.pad(place_G2 - (BLOCKS - 1) / 2, (1, 0), value=1.0).double()
        weighted_LG3 = accepted_LG[:, :, None] * basis_G3  # halves: sums are exact in float64, in whatever order
        ridge_33 = torch.diag(torch.tensor([1e-3, 30.0, 30.0], dtype=torch.float64, device=problem_L.device))
        normal_L33 = weighted_LG3.transpose(1, 2) @ basis_G3 + ridge_33
        right_L32 = weighted_LG3.transpose(1, 2) @ moved_LG2.double()
        affine_L132 = torch.linalg.solve(normal_L33, right_L32)[:, None]
        affine_LG2 = (basis_G3[:, :, None] * affine_L132).sum(dim=2).float()
        middle_G2 = place_G2 * STEP_PX + (BLOCK_PX / 2 - 0.5)
        at_LG2 = middle_G2 + affine_LG2 + self._poses.shift_B2[problem_L, None]
        hit_LG = self._compare.look_up(self._prints.cover_NCC, problem_L[:, None], at_LG2)
        possible_L = ((hit_LG > LEAST_HIT) & self._compare.inside_BIJ[problem_L].flatten(1)).sum(dim=1)
        possible_L = torch.maximum(possible_L, accepted_LG.sum(dim=1)).clamp(min=10) + 20
        off_LG = (moved_LG2 - affine_LG2).square().sum(dim=2)
        gain_LG = (field.ncc_BIJ[problem_L].flatten(1) - 0.4).clamp(min=0)
        even_L = (gain_LG * torch.exp(-off_LG / (2 * UNEVEN_PX**2))).sum(dim=1)
        agreement_B2[problem_L] = torch.stack([gain_LG.sum(dim=1) / possible_L, even_L / possible_L.sqrt()], dim=1)
        return agreement_B2


def _grow_from(compare: "_Comparison", seed_B: Tensor, moved_B2: Tensor, ncc_B: Tensor) -> Field:
    """Grow the field of each problem from one block; a problem whose seed does not agree stays empty."""
    total, device = len(seed_B), seed_B.device
    accepted = torch.zeros(total, BLOCKS, BLOCKS, dtype=torch.bool, device=device)
    moved = torch.zeros(total, 2, BLOCKS, BLOCKS, device=device)
    ncc = torch.zeros(total, BLOCKS, BLOCKS, device=device)
    at = torch.arange(total, device=device)
    good = ncc_B > LEAST_NCC
    accepted.view(total, -1)[at, seed_B] = good
    moved.view(total, 2, -1)[at, :, seed_B] = moved_B2.float() * good[:, None]
    ncc.view(total, -1)[at, seed_B] = ncc_B * good
    live = at[good]
    state = _Candidates(live, accepted[live], moved[live], ncc[live], compare.inside_BIJ[live])
    while len(state.problem):
        block, predicted = state.predict()
        problem, i, j = block.unbind(1)
        ncc_Q, moved_Q2 = compare.search(state.problem[problem], i, j, predicted, reach_px=REACH_PX)
        state.offer(block, ncc_Q, moved_Q2)
        growing = state.accept()
        if 2 * int(growing.sum()) <= len(growing):
            accepted[state.problem], moved[state.problem], ncc[state.problem] = state.accepted, state.moved, state.ncc
            state = state.select(growing)
    return Field(accepted, moved.permute(0, 2, 3, 1), ncc)


class _Candidates:
    """The problems that still grow: their accepted blocks, and the best place of each block that was looked for."""

    def __init__(self, problem: Tensor, accepted: Tensor, moved: Tensor, ncc: Tensor, inside: Tensor) -> None:
        self.problem, self.accepted, self.moved, self.ncc, self.inside = problem, accepted, moved, ncc, inside
        self.offered_ncc = torch.zeros_like(ncc)
        self.offered = torch.zeros_like(moved)
        self.predicted = torch.full_like(moved, 1e3)

    def select(self, kept: Tensor) -> "_Candidates":
        """Return the problems of a mask."""
        less = _Candidates(*(x[kept] for x in (self.problem, self.accepted, self.moved, self.ncc, self.inside)))
        less.offered_ncc, less.offered, less.predicted = (
            x[kept] for x in (self.offered_ncc, self.offered, self.predicted)
        )
        return less

    def predict(self) -> tuple[Tensor, Tensor]:
        """Return blocks whose prediction is new, (Q, 3) problem, i, j, and where they should be, (Q, 2) int64."""
        weight = self.accepted[:, None].float()
        padded = functional.pad(torch.cat([weight, self.moved], dim=1), (1, 1, 1, 1))
        rows = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
        nearby = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
        cross = rows[:, 0, :, 1:-1] + padded[:, 0, 1:-1, :-2] + padded[:, 0, 1:-1, 2:]
        frontier = (cross > 0) & self.inside & ~self.accepted
        predicted = (nearby[:, 1:] / nearby[:, :1].clamp(min=1)).round()
        new = frontier & (predicted != self.predicted).any(dim=1)
        self.predicted = torch.where(new[:, None], predicted, self.predicted)
        block = new.nonzero()
        problem, i, j = block.unbind(1)
        return block, predicted[problem, :, i, j].long()

    def offer(self, block: Tensor, ncc: Tensor, moved: Tensor) -> None:
        """Remember the places that are better than earlier ones of the same block."""
        problem, i, j = block.unbind(1)
        better = ncc > self.offered_ncc[problem, i, j]
        problem, i, j = problem[better], i[better], j[better]
        self.offered_ncc[problem, i, j] = ncc[better]
        self.offered[problem, :, i, j] = moved[better].float()

    def accept(self) -> Tensor:
        """Accept the best candidates of each problem; return which problems had any."""
        waiting = self.offered_ncc.masked_fill(self.accepted, 0)
        bar = (waiting.amax(dim=(1, 2), keepdim=True) - BEHIND).clamp(min=LEAST_NCC)
        chosen = waiting > bar
        self.accepted = self.accepted | chosen
        self.moved = torch.where(chosen[:, None], self.offered, self.moved)
        self.ncc = torch.where(chosen, self.offered_ncc, self.ncc)
        return chosen.any(dim=2).any(dim=1)


class _Comparison:
    """Compares blocks of other prints with places in the posed ones."""

    def __init__(self, prints: Prints, one_B: Tensor, other_B: Tensor, poses: Poses) -> None:
        self.prints, self.one_B, self.other_B, self.poses = prints, one_B, other_B, poses
        self.window = make_window().to(one_B.device)
        self.window = self.window / self.window.sum()
        centre = (BLOCK_PX // 2 + STEP_PX * torch.arange(BLOCKS, device=one_B.device)) // COARSE_PX
        self.energy_BIJ = prints.energy_NCC[other_B][:, centre][:, :, centre]
        self.cover_BIJ = prints.cover_NCC[other_B][:, centre][:, :, centre]
        self.inside_BIJ = self.cover_BIJ > LEAST_COVER
        self.blocks_NIJHW = prints.ridges_NSS.unfold(1, BLOCK_PX, STEP_PX).unfold(2, BLOCK_PX, STEP_PX)
        self.cos_B, self.sin_B = poses.angle_B.cos(), poses.angle_B.sin()

    def look_up(self, map_NCC: Tensor, problem: Tensor, place_2: Tensor) -> Tensor:
        """Return a map of the unrotated print at places (..., 2) px of the rotated one; 0 outside."""
        middle = SIDE_PX / 2 - 0.5
        y, x = (place_2 - middle).unbind(-1)
        cos, sin = self.cos_B[problem], self.sin_B[problem]
        cell = [((at + middle + 0.5) / COARSE_PX).round().long() for at in (sin * x + cos * y, cos * x - sin * y)]
        last = map_NCC.shape[-1] - 1
        valid = (cell[0] >= 0) & (cell[0] <= last) & (cell[1] >= 0) & (cell[1] <= last)
        return map_NCC[self.one_B[problem], cell[0].clamp(0, last), cell[1].clamp(0, last)] * valid

    def search(
        self, problem: Tensor, i: Tensor, j: Tensor, predicted_Q2: Tensor, *, reach_px: int
    ) -> tuple[Tensor, Tensor]:
        """Return the best correlation of each block near to where it should be, (Q,), and the place, (Q, 2)."""
        parts = []
        for start in range(0, len(problem), EVALUATED):
            end = start + EVALUATED
            parts.append(
                self._search_part(problem[start:end], i[start:end], j[start:end], predicted_Q2[start:end], reach_px)
            )
        if not parts:
            return predicted_Q2.new_zeros(0, dtype=torch.float32), predicted_Q2
        ncc, moved = (torch.cat(part) for part in zip(*parts, strict=True))
        return ncc, moved

    def _search_part(
        self, problem: Tensor, i: Tensor, j: Tensor, predicted_Q2: Tensor, reach_px: int
    ) -> tuple[Tensor, Tensor]:
        side = BLOCK_PX + 2 * reach_px
        shift_Q2 = self.poses.shift_B2[problem]
        corner_Q2 = torch.stack([i, j], dim=1) * STEP_PX + shift_Q2
        start_Q2 = (corner_Q2 + predicted_Q2 - reach_px + BORDER_PX).clamp(0, SIDE_PX + 2 * BORDER_PX - side)
        all_windows = self.poses.rotated_USS.unfold(1, side, 1).unfold(2, side, 1)
        windows_QHW = all_windows[self.poses.rotated_B[problem], start_Q2[:, 0], start_Q2[:, 1]]
        blocks_QHW = self.blocks_NIJHW[self.other_B[problem], i, j] * self.window
        product_QYX = functional.conv2d(windows_QHW[None], blocks_QHW[:, None], groups=len(problem))[0]
        best_Q = product_QYX.flatten(1).argmax(dim=1)
        steps = 2 * reach_px + 1
        moved_Q2 = predicted_Q2 + torch.stack([best_Q // steps, best_Q % steps], dim=1) - reach_px
        middle_Q2 = corner_Q2 + moved_Q2 + (BLOCK_PX / 2 - 0.5)
        energy_Q = self.look_up(self.prints.energy_NCC, problem, middle_Q2) * self.cover_BIJ[problem, i, j]
        hit_Q = self.look_up(self.prints.cover_NCC, problem, middle_Q2)
        highest_Q = product_QYX.flatten(1).gather(1, best_Q[:, None])[:, 0]
        ncc_Q = highest_Q / ((energy_Q * self.energy_BIJ[problem, i, j]).sqrt() + 1e-3)
        return torch.where(hit_Q > LEAST_HIT, ncc_Q, 0), moved_Q2


def _choose_seeds(compare: _Comparison) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks of each problem that agree best near to its pose, best first.

    Returns:
        Their flat indices (B, C), displacements (B, C, 2) int64 and correlations (B, C), 0 where there is no block.
    """
    inside_BIJ = torch.zeros_like(compare.inside_BIJ)
    inside_BIJ[:, ::SEED_STEP, ::SEED_STEP] = compare.inside_BIJ[:, ::SEED_STEP, ::SEED_STEP]
    problem, i, j = inside_BIJ.nonzero().unbind(1)
    ncc, moved = compare.search(problem, i, j, torch.zeros_like(i)[:, None].expand(-1, 2), reach_px=SEED_REACH_PX)
    ncc_BIJ = torch.zeros_like(compare.cover_BIJ)
    ncc_BIJ[problem, i, j] = ncc
    moved_BIJ2 = torch.zeros(*ncc_BIJ.shape, 2, dtype=torch.int64, device=ncc.device)
    moved_BIJ2[problem, i, j] = moved
    best_BC, place_BC = ncc_BIJ.flatten(1).topk(CANDIDATES, dim=1)
    moved_BC2 = moved_BIJ2.flatten(1, 2).gather(1, place_BC[:, :, None].expand(-1, -1, 2))
    return place_BC, moved_BC2, best_BC
