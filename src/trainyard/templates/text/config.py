"""Every option of the family."""

from dataclasses import dataclass

from trainyard.config.settings import TrainConfig, option


@dataclass
class ModelSettings:
    """A decoder-only transformer."""

    layers: int = option(4, "blocks", low=1)
    heads: int = option(4, "attention heads", low=1)
    width: int = option(128, "width of the residual stream, a multiple of the heads", low=8)


@dataclass
class PackingSettings:
    """From a text to windows. Changing an option means packing again."""

    context: int = option(128, "characters that the model sees at once", low=2)
    val_share: float = option(0.1, "share at the end of the text that selects the checkpoint", low=0.01, high=0.5)


@dataclass
class Config(TrainConfig):
    """All options of the family's jobs."""

    model: ModelSettings = option(ModelSettings, "network")
    packing: PackingSettings = option(PackingSettings, "text to windows")

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return ""

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""
