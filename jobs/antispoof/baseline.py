"""The baseline without a network: logistic regression on each utterance's pooled features."""

from collections.abc import Callable

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from torch import Tensor
from tqdm import tqdm

from trainyard.train.module import Batch, SampleSource

ComputeMaps = Callable[[Batch], Tensor]
"""A batch to feature maps (B, F, T), as the network gets them in evaluation."""


def score_trials(compute_maps: ComputeMaps, training: SampleSource, evaluated: SampleSource) -> np.ndarray:
    """Return the log-odds of bona fide speech of each evaluated utterance, (n,) float64.

    Both classes weigh the same. Costs the front end on both sets.
    """
    features, labels = pool_features(compute_maps, training), training.data.columns["label"][training.ids]
    mean, std = features.mean(axis=0), features.std(axis=0) + 1e-6
    model = LogisticRegression(class_weight="balanced", max_iter=1000).fit((features - mean) / std, labels)
    scores: np.ndarray = model.decision_function((pool_features(compute_maps, evaluated) - mean) / std)
    return scores


@torch.inference_mode()
def pool_features(compute_maps: ComputeMaps, source: SampleSource) -> np.ndarray:
    """Return mean and standard deviation over time of each bin, (n, 2 F) float64."""
    pooled = []
    with tqdm(total=len(source.ids), unit="utterance", desc="pooling", disable=None, leave=False) as bar:
        for batch in source.read_batches():
            map_BFT = compute_maps(batch)
            pooled.append(torch.cat([map_BFT.mean(dim=2), map_BFT.std(dim=2)], dim=1).double().cpu().numpy())
            bar.update(len(map_BFT))
    return np.concatenate(pooled)
