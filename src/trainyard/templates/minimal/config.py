"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import HoldOutSettings, TrainConfig, option


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    packing: HoldOutSettings = option(HoldOutSettings, "raw files to records and sets")
