"""Every option of the tiny family."""

from dataclasses import dataclass

from trainyard.config.settings import TrainConfig, option


@dataclass
class HeadSettings:
    """The last layer."""

    width: int = option(8, "channels", low=1)
    dropout: float = option(0.0, "share of channels dropped", low=0, high=1)


@dataclass
class Config(TrainConfig):
    """All options of a tiny job."""

    head: HeadSettings = option(HeadSettings, "last layer", mutable_on_resume=True)
    labels: list[int] = option(list, "labels to train on; empty: all")
