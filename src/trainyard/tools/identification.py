"""Identification metrics of a search, where it is known whose each probe and each gallery row is.

Definitions of ISO/IEC 19795-1:2021: a mated probe's identity is in the gallery, a non-mated probe's is not. FPIR at a
threshold is the share of non-mated probes for which any gallery row scores at least the threshold; FNIR the share of
mated probes for which no row of their identity is among the k candidates returned with at least that score.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.tools.nearest import Nearest

FPIRS = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Identification:
    """What a search found, as far as it is known whose the samples are."""

    mated: int  # probes
    non_mated: int
    rank1: float | None  # share of the mated probes whose best row is of their identity; None without mated probes
    mate_score_M: np.ndarray  # (mated,) best score of the own identity among the k candidates; -inf: not among them
    top_score_U: np.ndarray  # (non_mated,) best score of anybody

    def find_fnir(self, fpir: float) -> tuple[float, float]:
        """Return FNIR and the threshold, the lowest with at most this FPIR.

        Raises:
            UserError: there is no mated probe, or too few non-mated probes to establish the rate.
        """
        if not 0 < fpir < 1:
            raise UserError(f"--fpir {fpir:g}: expected a rate between 0 and 1, such as 0.01.")
        if not self.mated or fpir < scoring.compute_smallest_rate(self.non_mated):
            raise UserError(
                f"--fpir {fpir:g}: needs mated probes, found {self.mated:,}, and {round(3 / fpir):,} or more non-mated "
                f"ones (rule of 3, ISO/IEC 19795-1), found {self.non_mated:,}. Add probes of people who are not in the "
                "gallery, or type a higher --fpir."
            )
        is_found = np.isfinite(self.mate_score_M)
        top = np.sort(self.top_score_U)
        accepted = int(np.floor(fpir * len(top) + 1e-9))
        # the lowest threshold that at most `accepted` of the top scores reach; ties count as reached
        threshold = float(np.nextafter(top[len(top) - accepted - 1], np.inf))
        return float(np.mean(~is_found | (self.mate_score_M < threshold))), threshold

    def list_supported(self) -> list[float]:
        """Return which of the usual FPIRs these probes can establish."""
        least = scoring.compute_smallest_rate(self.non_mated)
        return [fpir for fpir in FPIRS if self.mated and fpir >= least]


def compute_identification(
    nearest: Nearest, probe_identity: Sequence[str], gallery_identity: Sequence[str], *, leave_out_self: bool
) -> Identification:
    """Return what the k candidates of each probe say about identities.

    Args:
        leave_out_self: the probes are the gallery: a probe is mated if another row has its identity.
    """
    count = Counter(gallery_identity)
    is_mated = np.array([count[name] > leave_out_self for name in probe_identity], dtype=bool)
    codes = {name: code for code, name in enumerate(sorted({*probe_identity, *gallery_identity}))}
    probe = np.array([codes[name] for name in probe_identity])
    gallery = np.array([codes[name] for name in gallery_identity])
    is_own_PK = gallery[nearest.rows] == probe[:, None]
    mate_score_P = np.where(is_own_PK, nearest.scores, -np.inf).max(axis=1)
    return Identification(
        mated=int(is_mated.sum()),
        non_mated=int((~is_mated).sum()),
        rank1=float(is_own_PK[is_mated, 0].mean()) if is_mated.any() else None,
        mate_score_M=mate_score_P[is_mated],
        top_score_U=nearest.scores[~is_mated, 0],
    )
