"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import HoldOutSettings, TrainConfig, option


@dataclass
class ModelSettings:
    """A U-Net."""

    levels: int = option(3, "resolutions, each half of the one above it", low=2, high=6)
    width: int = option(16, "channels of the first level; they double at each", low=4)


@dataclass
class PackingSettings(HoldOutSettings):
    """From images and masks to records and sets. Changing an option means packing again."""

    classes: list[str] = option(list, "name of each value of a mask, from 0, such as [background,road]")


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    packing: PackingSettings = option(PackingSettings, "raw files to records and sets")

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm uses the statistics of a micro-batch"

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
