"""The model: a linear layer."""

import numpy as np
from torch import Tensor, nn

from trainyard.train.module import Batch, DataInfo, Rows, TrainModule

from .config import Config


def build(config: Config, data: DataInfo) -> "Regression":
    """Build the network for the shape of the data's arrays."""
    return Regression(data.read("x", data.train_ids[:1])[0].size)


class Regression(TrainModule):
    """Predicts a number for each of B samples."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the mean squared error."""
        return {"loss": (self.predict(batch)["found"] - batch["y"]).square().mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return `found` (B,), the number that is predicted, and `y` (B,), the true one."""
        return {"sample_id": batch["sample_id"], "found": self.layer(batch["x"].flatten(1))[:, 0], "y": batch["y"]}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the mean squared error, which selects the checkpoint."""
        return {"loss": float(np.square(rows["found"] - rows["y"]).mean())}
