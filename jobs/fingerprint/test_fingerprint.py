"""What the tests over all families need from the fingerprint family."""

import numpy as np


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    finger = columns["finger"][ids]
    embedding = np.eye(finger.max() + 1, dtype=np.float32)[finger]
    rows = {"embedding": embedding, "finger": finger, "impression": columns["impression"][ids], "sample_id": ids}
    return rows, {"eer": 0.0, "eer_all_pairs": 0.0, "zero_fmr": 0.0}
