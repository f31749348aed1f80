"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import EvaluationSettings, HoldOutSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """The network."""

    name: str = option(
        "resnet18",
        "a residual network; small: a few convolutions, for CPUs",
        choices=("resnet18", "resnet34", "resnet50", "small"),
    )
    dropout: float = option(0.0, "dropout before the classifier", low=0, high=0.9)


@dataclass
class LossSettings:
    """Options of the loss."""

    label_smoothing: float = option(0.0, "share of the target given to all classes alike", low=0, high=0.5)


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    loss: LossSettings = option(LossSettings, "loss")
    packing: HoldOutSettings = option(HoldOutSettings, "raw files to records and sets")
    evaluation: EvaluationSettings = option(EvaluationSettings, "scoring", mutable_on_resume=True)

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm uses the statistics of a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
