"""The family meets the contract of a family: trainyard check-family segmentation --jobs examples."""

import numpy as np


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    pixels = np.full((len(ids), 3), 10)
    return {"both": pixels, "either": pixels, "sample_id": ids}, {"mean_iou": 1.0, "iou_disc": 1.0}
