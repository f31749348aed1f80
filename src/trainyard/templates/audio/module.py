"""The model: a residual network that classifies recordings by their log-mel spectrograms."""

import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional

from trainyard import scoring
from trainyard.report.score_figures import draw_confusion_matrix
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, Score, Signature, TrainModule, average_segments

from .config import Config, ModelSettings
from .pack import CLASSES


def build(config: Config, data: DataInfo) -> "Classifier":
    """Build the network for the classes of the data."""
    classes, model = json.loads(data.artifacts[CLASSES]), config.model
    network = build_network(model, channels=1, classes=len(classes))
    spectrogram = LogMel(
        rate_hz=config.sound.rate_hz, bands=model.mel_bands, window_ms=model.window_ms, hop_ms=model.hop_ms
    )
    return Classifier(spectrogram, network, classes=classes, labels=data.columns.get("label"), config=config)


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


class LogMel(nn.Module):
    """Turns waveforms (B, N) float32 in [-1, 1) into (B, 1, F, T) log powers of F mel bands, in float32.

    The bands are triangles of equal width in mel, 2595 log10(1 + f / 700) (O'Shaughnessy, Speech Communication, 1987).
    Each recording's mean is subtracted, so that its loudness does not matter.
    """

    window: Tensor
    filters_FK: Tensor

    def __init__(self, *, rate_hz: int, bands: int, window_ms: float, hop_ms: float) -> None:
        super().__init__()
        self.hop = max(1, round(hop_ms / 1000 * rate_hz))
        length = max(2, round(window_ms / 1000 * rate_hz))
        self.fft = 1 << (length - 1).bit_length()
        self.register_buffer("window", torch.hann_window(length), persistent=False)
        top = 2595 * np.log10(1 + rate_hz / 2 / 700)
        edges_hz = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
        bins_hz = np.linspace(0, rate_hz / 2, self.fft // 2 + 1)
        low, centre, high = edges_hz[:-2, None], edges_hz[1:-1, None], edges_hz[2:, None]
        filters = np.minimum((bins_hz - low) / (centre - low), (high - bins_hz) / (high - centre)).clip(min=0)
        self.register_buffer("filters_FK", torch.tensor(filters, dtype=torch.float32), persistent=False)

    @torch.no_grad()
    def forward(self, wave_BN: Tensor) -> Tensor:
        with torch.autocast(wave_BN.device.type, enabled=False):  # powers span more decades than 16 bits
            spectrum_BKT = torch.stft(
                wave_BN, self.fft, self.hop, len(self.window), self.window, pad_mode="constant", return_complex=True
            )
            power_BKT = torch.view_as_real(spectrum_BKT).square().sum(-1)
            log_BFT = (self.filters_FK @ power_BKT + 1e-6).log()
            return (log_BFT - log_BFT.mean(dim=(1, 2), keepdim=True)).unsqueeze(1)


class Classifier(TrainModule):
    """Classifies recordings.

    Axes: B recordings, N frames, F bands, T windows, K classes.

    Args:
        spectrogram: (B, N) to (B, 1, F, T).
        network: (B, 1, F, T) to (B, K).
        labels: (N,) the class of each sample of the data set; None: unknown.
    """

    monitor = ("accuracy", "max")
    tie_breaks = (("cross_entropy", "min"),)
    baseline = ("the most frequent class", "accuracy_constant")

    def __init__(
        self,
        spectrogram: LogMel,
        network: nn.Module,
        *,
        classes: Sequence[str],
        labels: np.ndarray | None,
        config: Config,
    ) -> None:
        super().__init__()
        self.spectrogram, self.network, self.classes, self.labels = spectrogram, network, classes, labels
        self.rate_hz, self.frames = config.sound.rate_hz, config.sound.frames
        self.label_smoothing, self.draws = config.loss.label_smoothing, config.evaluation.bootstrap_draws

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and the share of recordings that are classified correctly."""
        logits_BK = self._compute_logits(batch)
        loss = functional.cross_entropy(logits_BK, batch["label"], label_smoothing=self.label_smoothing)
        return {"loss": loss, "accuracy": (logits_BK.argmax(1) == batch["label"]).float().mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the logits of each recording, (B, K) float32; needs no labels."""
        logits_BK = average_segments(self._compute_logits, batch, "wave", frames=self.frames)
        return {"logits": logits_BK, "sample_id": batch["sample_id"]}

    def _compute_logits(self, batch: Batch) -> Tensor:
        return self.network(self.spectrogram(batch["wave"])).float()  # type: ignore[no-any-return]

    def describe_predict(self) -> Signature:
        """Describe the network's inputs and outputs."""
        return Signature(
            {"wave": f"samples at {self.rate_hz} Hz, the first of a recording; a shorter one is repeated"},
            {"logits": "one for each class; their softmax is the probability"},
            {"classes": list(self.classes)},
            tolerance=0.01,  # logarithms of weak bands
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return `scoring.compute_class_metrics`."""
        return scoring.compute_class_metrics(rows["logits"], self._find_labels(rows))

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the 95 % intervals of `score`'s metrics over resampled recordings."""
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
        """Yield the class of each recording, and its probability."""
        for key, logits in zip(keys, rows["logits"], strict=True):
            yield {"path": key, **scoring.describe_class(logits, self.classes)}

    def repeated_layers(self) -> Iterator[nn.Module]:
        """Return the residual blocks; the small network has none."""
        if isinstance(self.network, nn.Sequential):
            return
        for name in ("layer1", "layer2", "layer3", "layer4"):
            yield from self.network.get_submodule(name).children()

    def _find_labels(self, rows: Rows) -> np.ndarray:
        assert self.labels is not None, "only labelled samples are scored"
        return self.labels[rows["sample_id"]]
