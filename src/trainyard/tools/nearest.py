"""Exact search by inner product: the best rows of a gallery for each probe, block by block."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.tools.trained_model import find_wrong_length

PROBE_ROWS, GALLERY_ROWS = 256, 16_384
"""Rows that are compared at once: 16 MiB of scores, and never the whole matrix."""

_PAIRS_AT_ONCE = 8192
_UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True)
class Nearest:
    """The k best gallery rows of each of P probes, best first."""

    rows: NDArray[np.int64]  # (P, k)
    scores: NDArray[np.float64]  # (P, k), as `scoring.compare_embeddings` computes them
    seconds: float


def find_nearest_rows(
    probes_PD: NDArray[np.float32],
    gallery_ND: NDArray[np.float32],
    *,
    k: int,
    leave_out_self: bool = False,
    names: tuple[str, str] = ("probes", "gallery"),
    progress: Callable[[int], object] = lambda rows: None,
) -> Nearest:
    """Return the k gallery rows with the highest inner product for each probe; among equal ones, the lower row.

    Products in float32 only select candidates. The error of such a product of D terms is at most D u / (1 - D u) times
    the lengths of both vectors, in any order of summation, with u = 2**-24 (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., section 3.1). Every row within twice that error of the k-th best is a candidate, and candidates
    are compared by their products in float64. So the result is the one of a search in float64, and independent of the
    sizes of blocks. Reads the gallery once; needs about 120 MiB besides the probes.

    Args:
        probes_PD, gallery_ND: of unit length; the gallery may be mapped and larger than the memory.
        leave_out_self: the probes are the gallery, and a row is no answer to itself.
        names: of both, for errors.
        progress: called with the gallery rows done since the last call.

    Raises:
        UserError: the vectors differ in size, one is not finite or not of unit length, or the gallery has fewer rows
            than k.
    """
    begin = time.monotonic()
    count, dims = gallery_ND.shape
    if probes_PD.shape[1] != dims:
        raise UserError(
            f"{names[0]} has embeddings of {probes_PD.shape[1]} numbers, {names[1]} of {dims}: they are of different "
            "models. Embed both with one run: trainyard embed RUN FOLDER OUT.safetensors"
        )
    if not 0 < k <= count - leave_out_self:
        raise UserError(f"k={k}: expected 1 to {count - leave_out_self}, the rows of {names[1]} that a probe can find.")
    _refuse_wrong_length(probes_PD, names[0], 0)
    best = _Best(probes_PD, k)
    for start in range(0, count, GALLERY_ROWS):
        block_BD = gallery_ND[start : start + GALLERY_ROWS]
        _refuse_wrong_length(block_BD, names[1], start)
        for first in range(0, len(probes_PD), PROBE_ROWS):
            best.update(slice(first, first + PROBE_ROWS), block_BD, start, leave_out_self=leave_out_self)
        progress(len(block_BD))
    return Nearest(best.rows_PK, best.scores_PK, time.monotonic() - begin)


class _Best:
    """The best rows so far of each probe."""

    def __init__(self, probes_PD: NDArray[np.float32], k: int) -> None:
        self.probes_PD, self.k = probes_PD, k
        self.rows_PK = np.full((len(probes_PD), k), np.iinfo(np.int64).max)
        self.scores_PK = np.full((len(probes_PD), k), -np.inf)
        terms = (probes_PD.shape[1] + 2) * _UNIT_ROUNDOFF  # two more, for rounding the bound itself
        self.margin = 2 * 1.01 * terms / (1 - terms)  # lengths may be 1 + 5e-4

    def update(self, part: slice, block_BD: NDArray[np.float32], start: int, *, leave_out_self: bool) -> None:
        """Take a block of the gallery, which begins at row `start`, into account for a part of the probes."""
        score_pB = self.probes_PD[part] @ block_BD.T
        if leave_out_self:
            probe = np.arange(part.start, part.start + len(score_pB))
            inside = (probe >= start) & (probe < start + len(block_BD))
            score_pB[np.flatnonzero(inside), probe[inside] - start] = -np.inf
        bound_p = self.scores_PK[part, -1] - self.margin
        is_candidate = score_pB >= bound_p[:, None].astype(np.float32)
        if np.count_nonzero(is_candidate) > 4 * self.k * len(score_pB) and len(block_BD) > self.k:
            kth_p = np.partition(score_pB, -self.k, axis=1)[:, -self.k]
            bound_p = np.maximum(bound_p, kth_p.astype(np.float64) - self.margin)
            is_candidate = score_pB >= bound_p[:, None].astype(np.float32)
        probe_C, column_C = np.nonzero(is_candidate & (score_pB > -np.inf))
        for first in range(0, len(probe_C), _PAIRS_AT_ONCE):
            chosen = slice(first, first + _PAIRS_AT_ONCE)
            self._merge(part, probe_C[chosen], block_BD, column_C[chosen], start)

    def _merge(
        self,
        part: slice,
        probe_C: NDArray[np.int64],
        block_BD: NDArray[np.float32],
        column_C: NDArray[np.int64],
        start: int,
    ) -> None:
        """Compare candidates with the best so far, in float64, and keep the k best of each probe."""
        score_C = scoring.compare_embeddings(self.probes_PD[part][probe_C], block_BD[column_C])
        changed_c, inverse_C = np.unique(probe_C, return_inverse=True)
        old = part.start + changed_c
        probe = np.concatenate([np.repeat(np.arange(len(old)), self.k), inverse_C])
        score = np.concatenate([self.scores_PK[old].ravel(), score_C])
        row = np.concatenate([self.rows_PK[old].ravel(), start + column_C])
        order = np.lexsort((row, -score, probe))
        first = np.searchsorted(probe[order], np.arange(len(old)))
        kept = order[first[:, None] + np.arange(self.k)]
        self.scores_PK[old], self.rows_PK[old] = score[kept], row[kept]


def _refuse_wrong_length(vectors_ND: NDArray[np.float32], name: str, start: int) -> None:
    wrong = find_wrong_length(vectors_ND)
    if wrong is not None:
        raise UserError(
            f"{name}: the embedding in row {start + wrong} is not finite or not of unit length, so it has no score. "
            "Embed the files again: trainyard embed RUN FOLDER OUT.safetensors"
        )
