"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import EvaluationSettings, HoldOutSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """A log-mel spectrogram, and the network that reads it."""

    name: str = option(
        "resnet18", "a residual network; small: a few convolutions, for CPUs", choices=("resnet18", "resnet34", "small")
    )
    dropout: float = option(0.0, "dropout before the classifier", low=0, high=0.9)
    mel_bands: int = option(64, "bands of the spectrogram, up to half the sampling rate", low=8)
    window_ms: float = option(25.0, "length of a window", low=1)
    hop_ms: float = option(10.0, "from a window to the next", low=0.5)


@dataclass
class LossSettings:
    """Options of the loss."""

    label_smoothing: float = option(0.0, "share of the target given to all classes alike", low=0, high=0.5)


@dataclass
class PackingSettings(HoldOutSettings):
    """From raw files to records and sets. Changing an option means packing again."""

    stereo: str = option("fail", "recordings of several channels: refused, or mixed to one", choices=("fail", "mix"))


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "loss")
    packing: PackingSettings = option(PackingSettings, "raw files to records and sets")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm uses the statistics of a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
