"""Identification metrics of a search, where it is known whose each probe and each gallery row is."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trainyard.scoring import Identification
from trainyard.tools.nearest import Nearest


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
