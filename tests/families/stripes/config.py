"""Every option of the stripes family."""

from dataclasses import dataclass

from trainyard.config.settings import TrainConfig, option


@dataclass
class ModelSettings:
    """A small convolutional network."""

    channels: int = option(8, "of each layer", low=1)
    batch_norm: bool = option(True, "normalise by batch statistics")
    dropout: float = option(0.1, "share of features dropped", low=0, high=0.9)
    branch: bool = option(False, "add a layer that a batch uses whose first sample has the first direction")
    diary: str = option("", "file to append the sample ids of each training batch to", mutable_on_resume=True)
    sleep_ms: int = option(0, "extra time per training batch", low=0, mutable_on_resume=True)
    poison_step: int = option(-1, "samples seen at which the loss becomes infinite; -1: never", low=-1)
    unpool_step: int = option(
        -1, "samples seen from which training uses an operator that has no deterministic kernel; -1: never", low=-1
    )
    full_above: int = option(-1, "samples above which there is no memory, in `full_phase`; -1: never", low=-1)
    full_phase: str = option("forward", "when: forward, backward, optimizer or evaluation, or several with +")
    full_rank: int = option(-1, "rank that has no memory; -1: every rank", low=-1)
    full_step: int = option(0, "samples seen from which there is no memory in training", low=0)


@dataclass
class Config(TrainConfig):
    """All options of a stripes job."""

    model: ModelSettings = option(ModelSettings, "network")

    def explain_varying_inputs(self) -> str:
        """Return why repeated layers get inputs of many shapes; "" if they do not."""
        return ""

    def explain_batch_dependence(self) -> str:
        """Return why results depend on the micro-batch; "" if they do not."""
        return "BatchNorm statistics are over a micro-batch" if self.model.batch_norm else ""
