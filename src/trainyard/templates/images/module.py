"""The model: a residual network that classifies images."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring
from trainyard.report.score_figures import draw_confusion_matrix
from trainyard.train.module import AdaptedWeights, Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule

from .config import Config, ModelSettings
from .pack import CLASSES


def build(config: Config, data: DataInfo) -> "Classifier":
    """Build the network for the classes of the data."""
    classes = json.loads(data.artifacts[CLASSES])
    network = build_network(config.model, channels=config.image.channels, classes=len(classes))
    return Classifier(network, classes=classes, labels=data.columns.get("label"), config=config)


def build_network(model: ModelSettings, *, channels: int, classes: int) -> nn.Module:
    """Return a network from (B, channels, H, W) to (B, classes), with random weights."""
    if model.name == "small":
        layers: list[nn.Module] = []
        for width in (32, 64, 128):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(model.dropout), nn.Linear(channels, classes)]
        return nn.Sequential(*layers, *head)
    network: nn.Module = getattr(torchvision.models, model.name)(weights=None, num_classes=classes)
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    network.fc = nn.Sequential(nn.Dropout(model.dropout), network.get_submodule("fc"))
    return network


class Classifier(TrainModule):
    """Classifies images.

    Axes: B images, C channels, K classes.

    Args:
        network: (B, C, H, W) to (B, K).
        labels: (N,) the class of each sample of the data set; None: unknown.
    """

    monitor = ("accuracy", "max")
    tie_breaks = (("cross_entropy", "min"),)
    baseline = ("the most frequent class", "accuracy_constant")

    def __init__(
        self, network: nn.Module, *, classes: Sequence[str], labels: np.ndarray | None, config: Config
    ) -> None:
        super().__init__()
        self.network, self.classes, self.labels = network, classes, labels
        self.label_smoothing, self.draws = config.loss.label_smoothing, config.evaluation.bootstrap_draws

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and the share of images that are classified correctly."""
        logits_BK = self.network(batch["image"]).float()
        loss = functional.cross_entropy(logits_BK, batch["label"], label_smoothing=self.label_smoothing)
        return {"loss": loss, "accuracy": (logits_BK.argmax(1) == batch["label"]).float().mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the logits of each image, (B, K) float32; needs no labels."""
        return {"logits": self.network(batch["image"]).float(), "sample_id": batch["sample_id"]}

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        return Signature(
            {"image": "resized to height and width"},
            {"logits": "one for each class; their softmax is the probability"},
            {"classes": list(self.classes)},
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return `scoring.compute_class_metrics`."""
        return scoring.compute_class_metrics(rows["logits"], self._find_labels(rows))

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the 95 % intervals of `score`'s metrics over resampled images."""
        intervals = scoring.bootstrap_class_metrics(rows["logits"], self._find_labels(rows), draws=self.draws)
        return intervals.to_metrics()

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return the metrics of a constant: each class as frequent as in training."""
        training = open_training()
        counts = np.bincount(training.data.columns["label"][training.ids], minlength=len(self.classes))
        logits = np.log(np.maximum(counts / counts.sum(), 1e-6)).astype(np.float32)
        constant = self.score({**rows, "logits": np.tile(logits, (len(rows["sample_id"]), 1))})
        return {"most frequent class": Score(constant)}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return the confusion matrix."""
        predicted = rows["logits"].argmax(1)
        return {"Confusion matrix": draw_confusion_matrix(self._find_labels(rows), predicted, self.classes)}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the class of each image, and its probability."""
        for key, logits in zip(keys, rows["logits"], strict=True):
            yield {"path": key, **scoring.describe_class(logits, self.classes)}

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a run of this family, or of torchvision's network: the classifier then is new."""
        if any(name.startswith("network.") for name in tensors):
            return super().adapt_weights(tensors)
        return AdaptedWeights(tensors, "torchvision", new=("fc.*",), unused=("fc.*",)).add_prefix("network.")

    def repeated_layers(self) -> Iterator[nn.Module]:
        """Return the residual blocks; the small network has none."""
        if isinstance(self.network, nn.Sequential):
            return
        for name in ("layer1", "layer2", "layer3", "layer4"):
            yield from self.network.get_submodule(name).children()

    def _find_labels(self, rows: Rows) -> np.ndarray:
        assert self.labels is not None, "only labelled samples are scored"
        return self.labels[rows["sample_id"]]
