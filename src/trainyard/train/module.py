"""The contract between a job and the engine: the engine knows nothing else of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""One micro-batch on the device. First axis of every entry: B samples.

`sample_id` (B,) int64, every numeric column of the data set under its name (B,), and `image` (B, C, H, W) float32,
already cast, normalised and augmented.
"""

Rows = dict[str, np.ndarray]
"""What `predict` said of a whole evaluation set, on the host: each sample once, sorted by `sample_id`."""


@dataclass(frozen=True)
class DataInfo:
    """What a job may know of its data set when it builds its model."""

    columns: Mapping[str, np.ndarray]  # name -> (N,) numbers or codes, N samples of the whole data set
    vocabulary: Mapping[str, list[str]]  # text column -> the text of each code
    train_ids: np.ndarray  # (n,) int64, the samples that train


class TrainModule(nn.Module):
    """A model with its loss and its score.

    A job's `module.py` defines one subclass and `build(config, data: DataInfo) -> TrainModule`. `build` is called
    with the host's generator already seeded, equally on every rank.
    """

    monitor: tuple[str, str] = ("loss", "min")
    """Which metric of `score` decides the best checkpoint, and whether "min" or "max" is better."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return {"loss": () float32, ...}; every further scalar is logged under its name.

        `loss` is a mean over the samples of the batch: the engine weights micro-batches and ranks by their number of
        samples, so that one step equals the mean over the whole global batch.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one row per sample, first axis B, with `sample_id` (B,) int64 among them. Runs in inference mode."""
        raise NotImplementedError

    def score(self, rows: Rows) -> dict[str, float]:
        """Turn the rows of one whole evaluation set into metrics. Runs once, on rank 0, on the host."""
        raise NotImplementedError

    def repeated_layers(self) -> Iterable[nn.Module]:
        """Layers whose activations gradient checkpointing drops and computes again in the backward pass."""
        return ()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Optimizer groups. Default: no weight decay on vectors and scalars (biases, normalisation)."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
