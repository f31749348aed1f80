"""Logistic regression on each utterance's pooled features: the baseline without a network, or what one starts from."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from trainyard.train.module import Batch, SampleSource

from . import frontends

ComputeFeatures = Callable[[Batch], Tensor]
"""A batch to `pool` of spectra, (B, 2 F)."""


class PooledLogistic(nn.Module):
    """Log-odds of bona fide speech from mean and deviation over time of each bin of the log-power spectrum.

    The mean over the utterance stays: loudness and channel reveal copies where a few recordings train.

    Args:
        state: weights and biases as `fit_folds` returns them, in JSON; "{}": maps alone.
    """

    weight_RK: Tensor
    bias_R: Tensor

    def __init__(self, state: str, *, rate_hz: int, frames: int) -> None:
        super().__init__()
        self.maps = frontends.build_spectra(rate_hz=rate_hz, frames=frames)
        fitted = json.loads(state)
        self.register_buffer("weight_RK", torch.tensor(fitted.get("weights", [])), persistent=False)
        self.register_buffer("bias_R", torch.tensor(fitted.get("bias", [])), persistent=False)

    def forward(self, wave_BN: Tensor, fold_B: Tensor | None = None) -> Tensor:
        """Return (B,) float32, fitted on all training utterances or, with folds, on those outside its fold."""
        row = 0 if fold_B is None else fold_B
        return (pool(self.maps(wave_BN)).float() * self.weight_RK[row]).sum(dim=1) + self.bias_R[row]


def score_trials(compute: ComputeFeatures, training: SampleSource, evaluated: SampleSource) -> np.ndarray:
    """Return the log-odds of bona fide speech of each evaluated utterance, (n,) float64.

    Costs spectra of both sets.
    """
    fitted = fit_logistic(pool_features(compute, training), training.data.columns["label"][training.ids])
    scores: np.ndarray = pool_features(compute, evaluated) @ np.array(fitted["weights"]) + fitted["bias"]
    return scores


def fit_folds(features_NK: np.ndarray, label_N: np.ndarray, fold_N: np.ndarray) -> dict[str, Any]:
    """Return weights (R, K) and biases (R,): row 0 is fitted on all utterances, row f on those outside fold f.

    With few utterances, log-odds are too large. All rows are scaled by one regression on the log-odds of the folds left
    out (Platt 1999, "Probabilistic outputs for support vector machines"); at least by 0.01, which keeps their order.
    """
    fits = [fit_logistic(features_NK[kept], label_N[kept]) for kept in (fold_N != f for f in range(fold_N.max() + 1))]
    weight_RK, bias_R = (np.array([fit[name] for fit in fits]) for name in ("weights", "bias"))
    log_odds_N = (features_NK * weight_RK[fold_N]).sum(axis=1) + bias_R[fold_N]
    scaling = fit_logistic(log_odds_N[:, None], label_N)
    slope = max(0.01, scaling["weights"][0])
    return {"weights": (slope * weight_RK).tolist(), "bias": (slope * bias_R + scaling["bias"]).tolist()}


def fit_logistic(features_NK: np.ndarray, label_N: np.ndarray) -> dict[str, Any]:
    """Return weights (K,) and bias for the log-odds of label 1; both classes weigh the same."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]  # here: it loads for a second

    mean_K, std_K = features_NK.mean(axis=0), features_NK.std(axis=0) + 1e-6
    model = LogisticRegression(class_weight="balanced", max_iter=1000).fit((features_NK - mean_K) / std_K, label_N)
    weight_K = model.coef_[0] / std_K
    return {"weights": weight_K.tolist(), "bias": float(model.intercept_[0] - mean_K @ weight_K)}


@torch.inference_mode()
def pool_features(compute: ComputeFeatures, source: SampleSource) -> np.ndarray:
    """Return mean and standard deviation over time of each bin, (n, 2 F) float64."""
    pooled = []
    with tqdm(total=len(source.ids), unit="utterance", desc="pooling", disable=None, leave=False) as bar:
        for batch in source.read_batches():
            pooled.append(compute(batch).double().cpu().numpy())
            bar.update(len(pooled[-1]))
    return np.concatenate(pooled)


def pool(map_BFT: Tensor) -> Tensor:
    """Return mean and standard deviation over time of each bin, (B, 2 F)."""
    return torch.cat([map_BFT.mean(dim=2), map_BFT.std(dim=2)], dim=1)
