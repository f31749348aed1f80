"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import TrainConfig, option


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
    """What is minimised."""

    label_smoothing: float = option(0.0, "share of the target given to all classes alike", low=0, high=0.5)


@dataclass
class PackingSettings:
    """From raw files to records and sets. Changing an option means packing again."""

    val_share: float = option(
        0.15, "share of each class that selects the checkpoint, unless raw/val/ does", low=0, high=0.5
    )
    test_share: float = option(
        0.15, "share of each class to test on, unless there are raw/train/ and raw/test/", low=0, high=0.5
    )
    seed: int = option(0, "seed of the division into sets", low=0)


@dataclass
class EvaluationSettings:
    """Scoring."""

    bootstrap_draws: int = option(1000, "resamples of the images behind each 95 % interval; 0: none", low=0)


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
