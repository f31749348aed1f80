"""Divides a global batch among ranks and micro-batches: computed here, for plans, runs and the loader."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSplit:
    """The samples of one step, on their way through the network. The last parts may be smaller than the others."""

    global_batch: int  # samples of a step
    ranks: int
    micro_batch: int  # samples that a rank computes at once

    @property
    def share(self) -> int:
        """Return the most samples of a rank in a step."""
        return -(-self.global_batch // self.ranks)

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches of a rank in a step."""
        return -(-self.share // self.micro_batch)

    @property
    def accumulates(self) -> bool:
        """Return whether gradients wait for those of other micro-batches or ranks."""
        return self.accumulation_steps > 1 or self.ranks > 1

    @property
    def is_even(self) -> bool:
        """Return whether all parts are equal."""
        return self.micro_batch * self.accumulation_steps * self.ranks == self.global_batch


def split_batch(global_batch: int, *, ranks: int, micro_batch: int = 0) -> BatchSplit:
    """Divide a global batch.

    Args:
        micro_batch: the most samples that a rank computes at once; 0: its whole share.
    """
    share = -(-global_batch // ranks)
    return BatchSplit(global_batch, ranks, min(micro_batch or share, share))


def explain_micro_batch(stated: int) -> str:
    """Return where the size of a micro-batch comes from.

    Args:
        stated: `micro_batch_size` of the config.
    """
    return "stated by the preset or typed" if stated else "a rank's whole share of the global batch"
