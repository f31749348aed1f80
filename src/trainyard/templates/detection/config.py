"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import HoldOutSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """FCOS on a residual network with a feature pyramid."""

    backbone: str = option(
        "resnet18", "network that extracts the features", choices=("resnet18", "resnet34", "resnet50")
    )
    detections: int = option(100, "most objects that are reported of an image", low=1)


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    packing: HoldOutSettings = option(HoldOutSettings, "raw files to records and sets")

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "the loss is divided by the objects of a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
