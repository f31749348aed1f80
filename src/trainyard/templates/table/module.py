"""The model: a multilayer perceptron on numbers and embedded categories."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring
from trainyard.report.score_figures import draw_confusion_matrix, draw_scatter
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule

from .config import Config
from .pack import Scaling


def build(config: Config, data: DataInfo) -> "Perceptron":
    """Build the network for the columns of the data."""
    return Perceptron(Scaling.from_artifacts(data.artifacts), targets=data.columns.get("target"), config=config)


class Perceptron(TrainModule):
    """Predicts a number or a class from a row.

    Axes: B rows, D features, K classes.

    Args:
        targets: (N,) the target of each sample of the data set; None: unknown.
    """

    def __init__(self, scaling: Scaling, *, targets: np.ndarray | None, config: Config) -> None:
        super().__init__()
        self.scaling, self.targets, self.draws = scaling, targets, config.evaluation.bootstrap_draws
        model = config.model
        sizes = [1 + len(values) for values in scaling.categories.values()]
        self.embeddings = nn.ModuleList(nn.Embedding(size, model.category_dims) for size in sizes)
        dims = max(1, 2 * len(scaling.numbers)) + len(sizes) * model.category_dims
        layers: list[nn.Module] = []
        for _ in range(model.layers):
            layers += [nn.Linear(dims, model.width), nn.LayerNorm(model.width), nn.GELU(), nn.Dropout(model.dropout)]
            dims = model.width
        self.layers = nn.Sequential(*layers, nn.Linear(dims, max(1, len(scaling.classes))))
        self.monitor = ("accuracy", "max") if scaling.classes else ("rmse", "min")
        self.tie_breaks = (("cross_entropy", "min"),) if scaling.classes else ()
        constants = ("the most frequent class", "accuracy_constant"), ("the mean", "rmse_constant")
        self.baseline = constants[0] if scaling.classes else constants[1]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss: cross-entropy of a class, or smooth L1 of a number in standard deviations."""
        out_BK = self._compute(batch)
        if self.scaling.classes:
            label_B = batch["target"].long()
            accuracy = (out_BK.argmax(1) == label_B).float().mean()
            return {"loss": functional.cross_entropy(out_BK, label_B), "accuracy": accuracy}
        mean, std = self.scaling.target
        return {"loss": functional.smooth_l1_loss(out_BK[:, 0], (batch["target"].float() - mean) / std)}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return `logits` (B, K) float32 of a class, or `predicted` (B,) float32; needs no targets."""
        out_BK = self._compute(batch)
        if self.scaling.classes:
            return {"logits": out_BK, "sample_id": batch["sample_id"]}
        mean, std = self.scaling.target
        return {"predicted": out_BK[:, 0] * std + mean, "sample_id": batch["sample_id"]}

    def _compute(self, batch: Batch) -> Tensor:
        code_BC = batch["categories"]
        embedded = [embedding(code_BC[:, i]) for i, embedding in enumerate(self.embeddings)]
        out: Tensor = self.layers(torch.cat([batch["numbers"], *embedded], dim=1))
        return out.float()

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        numbers = "value and 1 if missing, for each of " + (", ".join(self.scaling.numbers) or "none: one 0")
        codes = "place in its list, from 1, for each of " + (", ".join(self.scaling.categories) or "none: one 0")
        out = {"logits": "one for each class"} if self.scaling.classes else {"predicted": "in units of the target"}
        settings = {"numbers": self.scaling.numbers, "categories": self.scaling.categories}
        return Signature({"numbers": numbers, "categories": codes}, out, {**settings, "classes": self.scaling.classes})

    def score(self, rows: Rows) -> dict[str, float]:
        """Return `scoring.compute_class_metrics` or `scoring.compute_error_metrics`."""
        if self.scaling.classes:
            return scoring.compute_class_metrics(rows["logits"], self._find_targets(rows).astype(np.int64))
        return scoring.compute_error_metrics(rows["predicted"], self._find_targets(rows))

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the 95 % intervals of `score`'s metrics over resampled rows."""
        target = self._find_targets(rows)
        if self.scaling.classes:
            intervals = scoring.bootstrap_class_metrics(rows["logits"], target.astype(np.int64), draws=self.draws)
        else:
            intervals = scoring.bootstrap_error_metrics(rows["predicted"], target, draws=self.draws)
        return intervals.to_metrics()

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return the metrics of a constant: the training set's mean, or each class as frequent as there."""
        training = open_training()
        target, count = training.data.columns["target"][training.ids], len(rows["sample_id"])
        if self.scaling.classes:
            shares = np.bincount(target.astype(np.int64), minlength=len(self.scaling.classes)) / len(target)
            logits = np.log(np.maximum(shares, 1e-6)).astype(np.float32)
            constant = self.score({**rows, "logits": np.tile(logits, (count, 1))})
            return {"most frequent class": Score(constant)}
        return {"mean of training": Score(self.score({**rows, "predicted": np.full(count, target.mean())}))}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the confusion matrix, or predicted against true targets."""
        target = self._find_targets(rows)
        if self.scaling.classes:
            predicted, classes = rows["logits"].argmax(1), self.scaling.classes
            return {"Confusion matrix": draw_confusion_matrix(target.astype(np.int64), predicted, classes)}
        return {"Predicted and true": draw_scatter(target, rows["predicted"])}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the prediction of each row."""
        for i, key in enumerate(keys):
            if self.scaling.classes:
                yield {"row": key, **scoring.describe_class(rows["logits"][i], self.scaling.classes)}
            else:
                yield {"row": key, "predicted": float(rows["predicted"][i])}

    def _find_targets(self, rows: Rows) -> np.ndarray:
        assert self.targets is not None, "only labelled samples are scored"
        return self.targets[rows["sample_id"]]
