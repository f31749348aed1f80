"""Scores pairs of prints without training: ridges are enhanced, and one print is bent onto the other block by block.

A finger is soft, so two impressions of it agree under no rotation and shift alone. The matcher proposes a few poses of
one print on the other by phase correlation (`find_poses`), and from the block that agrees best under each pose grows a
displacement field: a block next to accepted ones is expected where they moved, and accepted if its ridges agree there
(`grow_fields`). The score says how much of the overlap agrees, and how well.

Everything is at 250 dpi, where a ridge has about 4.5 px, as in `baseline.py`. The constants of the score are from
synthetic prints. The smoothing of spectra, the number of seeds and the order of growth were chosen on FVC2004 DB1_B,
whose errors are therefore too low for a test.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from .fields import grow_fields, measure_agreement
from .poses import POSES, find_poses
from .prints import Prints, enhance_print, index_prints, prepare_prints

__all__ = ["Prints", "enhance_print", "fuse_parts", "index_prints", "match_pairs", "measure_pairs", "prepare_prints"]

BATCH_PAIRS = 32
PARTS = ("correlation", "masked_correlation", "agreement", "even_agreement")
MEANS = np.array([0.076, 0.080, 0.047, 0.55])
DEVIATIONS = np.array([0.016, 0.014, 0.033, 0.35])
"""Of `PARTS` over 200 pairs of different fingers among 160 prints of `pack.synthesize` with seed 7; no real print."""
WEIGHTS = np.array([1, 1, 2, 2]) / 6
"""Agreement counts twice: alone it has half the errors of correlation on the same prints."""


def match_pairs(
    prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64], *, batch: int = BATCH_PAIRS
) -> NDArray[np.float64]:
    """Return the score of each pair of prints, (P,): the higher, the more alike; impostors are around 0.

    Not symmetric: `one` is rotated and moved onto `other`, whose blocks are looked for. Deterministic on one device; a
    score does not depend on the other pairs. Pairs that share `one` are cheaper.

    Args:
        one, other: (P,) rows of `prints`.
        batch: pairs at once.
    """
    return fuse_parts(measure_pairs(prints, one, other, batch=batch))


@torch.inference_mode()
def measure_pairs(
    prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64], *, batch: int = BATCH_PAIRS
) -> NDArray[np.float64]:
    """Return what `fuse_parts` sums, (P, 4): `PARTS` of each pair."""
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
    score: NDArray[np.float64] = ((parts_PF - MEANS) / DEVIATIONS * WEIGHTS).sum(axis=1)
    return score


def _measure_batch(prints: Prints, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    poses = find_poses(prints, one, other)
    device = prints.ridges_NSS.device
    one_B, other_B = (torch.from_numpy(rows).to(device).repeat_interleave(POSES) for rows in (one, other))
    field = grow_fields(prints, one_B, other_B, poses)
    agreement_BF = measure_agreement(prints, one_B, other_B, poses, field)
    best_PF = agreement_BF.view(len(one), POSES, -1).amax(dim=1)
    return torch.cat([poses.peak_P2, best_PF], dim=1).double().cpu().numpy()
