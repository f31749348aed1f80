"""The family meets the contract of a family: trainyard check-family gpt --jobs examples."""

import numpy as np


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    return {"nats": np.zeros(len(ids), np.float32), "sample_id": ids}, {"bits_per_character": 0.0}
