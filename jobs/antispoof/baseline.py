"""Logistic regression on each utterance's pooled features: the baseline without a network, and half of a blend."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from trainyard.train.module import Batch, SampleSource

from . import frontends

ComputeMaps = Callable[[Batch], Tensor]
"""A batch to feature maps (B, F, T), as the network gets them in evaluation."""


class PooledLogistic(nn.Module):
    """Log-odds of bona fide speech from mean and deviation over time of each bin of the log-power spectrum.

    The mean over the utterance stays: loudness and channel reveal copies where a few recordings train.

    Args:
        state: weights and bias as `fit_logistic` returns them, in JSON; "{}": maps alone.
    """

    weight_K: Tensor

    def __init__(self, state: str, *, rate_hz: int, frames: int) -> None:
        super().__init__()
        name = "spec257" if rate_hz == frontends.RATES_HZ["spec257"] else "spec129"
        self.maps = frontends.build(name, rate_hz=rate_hz, frames=frames, mean="none", slopes="htk")
        fitted = json.loads(state)
        self.bias = float(fitted.get("bias", 0.0))
        self.register_buffer("weight_K", torch.tensor(fitted.get("weights", [])), persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        """Return (B,) float32."""
        return pool(self.maps(wave_BN)).float() @ self.weight_K + self.bias


def score_trials(compute_maps: ComputeMaps, training: SampleSource, evaluated: SampleSource) -> np.ndarray:
    """Return the log-odds of bona fide speech of each evaluated utterance, (n,) float64.

    Costs the front end on both sets.
    """
    fitted = fit_logistic(pool_features(compute_maps, training), training.data.columns["label"][training.ids])
    scores: np.ndarray = pool_features(compute_maps, evaluated) @ np.array(fitted["weights"]) + fitted["bias"]
    return scores


def fit_logistic(features_NK: np.ndarray, label_N: np.ndarray) -> dict[str, Any]:
    """Return weights (K,) and bias for the log-odds of label 1; both classes weigh the same."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]  # here: it loads for a second

    mean_K, std_K = features_NK.mean(axis=0), features_NK.std(axis=0) + 1e-6
    model = LogisticRegression(class_weight="balanced", max_iter=1000).fit((features_NK - mean_K) / std_K, label_N)
    weight_K = model.coef_[0] / std_K
    return {"weights": weight_K.tolist(), "bias": float(model.intercept_[0] - mean_K @ weight_K)}


@torch.inference_mode()
def pool_features(compute_maps: ComputeMaps, source: SampleSource) -> np.ndarray:
    """Return mean and standard deviation over time of each bin, (n, 2 F) float64."""
    pooled = []
    with tqdm(total=len(source.ids), unit="utterance", desc="pooling", disable=None, leave=False) as bar:
        for batch in source.read_batches():
            pooled.append(pool(compute_maps(batch)).double().cpu().numpy())
            bar.update(len(pooled[-1]))
    return np.concatenate(pooled)


def pool(map_BFT: Tensor) -> Tensor:
    """Return mean and standard deviation over time of each bin, (B, 2 F)."""
    return torch.cat([map_BFT.mean(dim=2), map_BFT.std(dim=2)], dim=1)
