"""Search by inner product: the best rows of a gallery for each probe, block by block."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import UserError
from trainyard.tools.trained_model import find_wrong_length

PROBE_ROWS, GALLERY_ROWS = 256, 16_384
"""Rows that are compared at once: 16 MiB of scores, and never the whole matrix."""


@dataclass(frozen=True)
class Nearest:
    """The k best gallery rows of each of P probes, best first."""

    rows: NDArray[np.int64]  # (P, k)
    scores: NDArray[np.float32]  # (P, k)
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

    Compares every pair, in float32: scores within about 1e-6 of each other may change places on another machine.
    Reads the gallery once; needs about 120 MiB besides the probes.

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
    _check_unit_length(probes_PD, names[0], 0)
    rows_PK = np.full((len(probes_PD), k), -1)
    scores_PK = np.full((len(probes_PD), k), -np.inf, dtype=np.float32)
    for start in range(0, count, GALLERY_ROWS):
        block_BD = gallery_ND[start : start + GALLERY_ROWS]
        _check_unit_length(block_BD, names[1], start)
        for first in range(0, len(probes_PD), PROBE_ROWS):
            part = slice(first, first + PROBE_ROWS)
            score_pB = probes_PD[part] @ block_BD.T
            if leave_out_self:
                np.fill_diagonal(score_pB[max(0, start - first) :, max(0, first - start) :], -np.inf)
            rows_PK[part], scores_PK[part] = _merge_best(rows_PK[part], scores_PK[part], score_pB, start)
        progress(len(block_BD))
    return Nearest(rows_PK, scores_PK, time.monotonic() - begin)


def _merge_best(
    rows_pK: NDArray[np.int64], scores_pK: NDArray[np.float32], score_pB: NDArray[np.float32], start: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the K best of those so far and of a block whose first gallery row is `start`."""
    k = rows_pK.shape[1]
    is_better_pB = score_pB > scores_pK[:, -1:]  # at an equal score, the earlier row stays
    if np.count_nonzero(is_better_pB) > 4 * k * len(score_pB) and score_pB.shape[1] > k:
        is_better_pB &= score_pB >= np.partition(score_pB, -k, axis=1)[:, [-k]]
    probe_C, column_C = np.nonzero(is_better_pB)
    probe = np.concatenate([np.repeat(np.arange(len(score_pB)), k), probe_C])
    row = np.concatenate([rows_pK.ravel(), start + column_C])
    score = np.concatenate([scores_pK.ravel(), score_pB[probe_C, column_C]])
    order = np.lexsort((row, -score, probe))
    first_p = np.searchsorted(probe[order], np.arange(len(score_pB)))
    kept_pK = order[first_p[:, None] + np.arange(k)]
    return row[kept_pK], score[kept_pK]


def _check_unit_length(vectors_ND: NDArray[np.float32], name: str, start: int) -> None:
    wrong = find_wrong_length(vectors_ND)
    if wrong is not None:
        raise UserError(
            f"{name}: the embedding in row {start + wrong} is not finite or not of unit length, so it has no score. "
            "Embed the files again: trainyard embed RUN FOLDER OUT.safetensors"
        )
