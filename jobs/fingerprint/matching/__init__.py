"""Scores pairs of prints: ridges are enhanced, and one print is bent onto the other block by block.

A finger is soft, so two impressions of it agree under no rotation and shift alone. The matcher proposes a few poses of
one print on the other by phase correlation (`find_poses`), and from the block that agrees best under each pose grows a
displacement field: a block next to accepted ones is expected where they moved, and accepted if its ridges agree there
(`FieldGrower`). The score rates how much of the overlap agrees. Nothing in this is learned. The other half
of the score are learned descriptors of each cell's surroundings (`descriptors`).

Everything is at 250 dpi, where a ridge has about 4.5 px, as in `baseline.py`. The constants of the score are from
synthetic prints. The smoothing of spectra, seeds, the order of growth, and which pairs are grown were chosen on FVC2004
DB1_B, the grid of the search on DB1_B and DB4_B, and that votes count on these two and synthetic prints: the errors of
DB1_B and DB4_B are therefore too low for a test.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from .descriptors import LEAST_VOTES, Evidence, compare_descriptors, load_descriptors
from .fields import Field, FieldGrower
from .poses import POSES, find_poses
from .prints import Prints, enhance_print, index_prints, prepare_prints

__all__ = [
    "Evidence",
    "Prints",
    "Registration",
    "add_descriptors",
    "compare_descriptors",
    "enhance_print",
    "fuse_parts",
    "index_prints",
    "load_descriptors",
    "match_pairs",
    "match_ridges",
    "measure_pairs",
    "prepare_prints",
    "register_pair",
    "score_descriptors",
]

BATCH_PAIRS = 64
GROWN_POSES = 3  # whose seeds agree most: the right one is among them in 99 % of clear pairs of DB1_B, DB4_B, UareU
LEAST_QUICK = -0.5  # of the parts before growth: below, nothing is grown
LEAST_SCORE = 0.0  # after one field for each pose: below, no second one is grown from another place
PARTS = ("correlation", "masked_correlation", "seeds", "agreement", "even_agreement")
MEANS = np.array([0.0653, 0.0686, 0.503, 0.0406, 0.493])
DEVIATIONS = np.array([0.0134, 0.0119, 0.157, 0.0352, 0.367])
"""Of `PARTS` over 200 pairs of two fingers among 160 prints of `pack.synthesize` with seed 7, all of them grown."""
QUICK_WEIGHTS = np.array([1, 1, 2]) / 4
WEIGHTS = np.array([1, 1, 0, 2, 2]) / 6
"""Agreement counts twice: alone it has half the errors of correlation on the same prints."""

SCORE_DEVIATION = 0.80
EVIDENCE = ((0.0090, 0.0073), (0.0351, 0.0218))
"""Of two fingers among the same prints: of `fuse_parts`, and means and deviations of votes and margins."""


@dataclass(frozen=True)
class Registration:
    """Which blocks of a print have a counterpart in another one, (29, 29), and its middle there, (29, 29, 2) px."""

    accepted: NDArray[np.bool_]
    there: NDArray[np.float64]


def match_pairs(prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the score of each pair of prints, (P,), by ridges and by the descriptors that ship.

    The higher, the more alike; two fingers have about 0, with a standard deviation below 1. Not symmetric: `one` is
    rotated and moved onto `other`, whose blocks are looked for. Deterministic on one device; a score does not depend on
    the other pairs. Pairs that share `one` are cheaper.

    Args:
        one, other: (P,) rows of `prints`.
    """
    evidence = compare_descriptors(load_descriptors(prints.ridges_NSS.device), prints, one, other)
    score_P = np.zeros(len(one))
    is_likely_P = evidence.votes_P >= LEAST_VOTES
    score_P[is_likely_P] = match_ridges(prints, one[is_likely_P], other[is_likely_P])
    return add_descriptors(score_P, evidence)


def match_ridges(
    prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64], *, batch: int = BATCH_PAIRS
) -> NDArray[np.float64]:
    """Return the score of each pair by its ridges alone, (P,), without anything learned.

    Args:
        batch: pairs at once.
    """
    return fuse_parts(measure_pairs(prints, one, other, batch=batch))


@torch.inference_mode()
def measure_pairs(
    prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64], *, batch: int = BATCH_PAIRS
) -> NDArray[np.float64]:
    """Return what `fuse_parts` sums, (P, 5): `PARTS` of each pair."""
    order = np.argsort(one, kind="stable")
    parts = np.zeros((len(one), len(PARTS)))
    with tqdm(total=len(one), unit="pair", desc="match", disable=None, leave=False) as bar:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            parts[rows] = _measure_batch(prints, one[rows], other[rows])
            bar.update(len(rows))
    return parts


def fuse_parts(parts_PF: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weighted mean of the standardised parts, (P,): two synthetic fingers have 0 on average."""
    score: NDArray[np.float64] = (_standardise(parts_PF) * WEIGHTS).sum(axis=1)
    return score


@torch.inference_mode()
def register_pair(prints: Prints, one: int, other: int) -> "Registration":
    """Return where in `one` the blocks of `other` are, both rows of `prints`."""
    rows = np.array([one]), np.array([other])
    poses = find_poses(prints, *rows)
    device = prints.ridges_NSS.device
    one_B, other_B = (torch.from_numpy(row).to(device).repeat_interleave(POSES) for row in rows)
    grower = FieldGrower(prints, one_B, other_B, poses)
    everything_B = torch.ones(POSES, dtype=torch.bool, device=device)
    field = grower.grow_elsewhere(grower.grow(everything_B), everything_B)
    best = int(grower.measure_agreement(field)[:, 1].argmax())
    there_IJ2 = grower.locate(field)[best]
    return Registration(field.accepted_BIJ[best].cpu().numpy(), there_IJ2.cpu().double().numpy())


def add_descriptors(score_P: NDArray[np.float64], evidence: Evidence) -> NDArray[np.float64]:
    """Return the score of pairs by ridges and by descriptors, (P,): the mean of three, in standard deviations.

    Pairs with few votes have the average score by ridges of two fingers, 0, whatever it is.

    Args:
        score_P: of `fuse_parts`.
    """
    ridges_P = np.where(evidence.votes_P < LEAST_VOTES, 0, score_P / SCORE_DEVIATION)
    total: NDArray[np.float64] = (ridges_P + 2 * score_descriptors(evidence)) / 3
    return total


def score_descriptors(evidence: Evidence) -> NDArray[np.float64]:
    """Return the score of pairs by their descriptors alone, (P,): the mean of both, in standard deviations."""
    standard_2P = [(part - mean) / sd for part, (mean, sd) in zip(evidence, EVIDENCE, strict=True)]
    score: NDArray[np.float64] = np.mean(standard_2P, axis=0)
    return score


def _measure_batch(prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    poses = find_poses(prints, one, other)
    device = prints.ridges_NSS.device
    one_B, other_B = (torch.from_numpy(rows).to(device).repeat_interleave(POSES) for rows in (one, other))
    grower = FieldGrower(prints, one_B, other_B, poses)
    seed_PK = grower.seed_B.view(len(one), POSES)
    is_likely_PK = seed_PK >= seed_PK.topk(GROWN_POSES, dim=1).values[:, -1:]
    quick_PF = torch.cat([poses.peak_P2, seed_PK.amax(dim=1, keepdim=True)], dim=1).double().cpu().numpy()

    def select(is_wanted_P: NDArray[np.bool_]) -> Tensor:
        return (is_likely_PK & torch.from_numpy(is_wanted_P).to(device)[:, None]).flatten()

    def measure(field: Field) -> NDArray[np.float64]:
        agreement_PF = grower.measure_agreement(field).view(len(one), POSES, -1).amax(dim=1)
        return np.concatenate([quick_PF, agreement_PF.double().cpu().numpy()], axis=1)

    quick_P = (_standardise(quick_PF) * QUICK_WEIGHTS).sum(axis=1)
    field = grower.grow(select(quick_P > LEAST_QUICK))
    score_P = fuse_parts(measure(field))
    return measure(grower.grow_elsewhere(field, select(score_P > LEAST_SCORE)))


def _standardise(parts_PF: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the first F of `PARTS` in standard deviations of two synthetic fingers."""
    parts = parts_PF.shape[1]
    standard: NDArray[np.float64] = (parts_PF - MEANS[:parts]) / DEVIATIONS[:parts]
    return standard
