"""Stochastic weight averaging: the mean of the weights at each new best validation score (arXiv:1803.05407)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainyard.data.loader import Loader
from trainyard.train import distributed
from trainyard.train.module import TrainModule


@dataclass
class WeightAverage:
    """The mean of `count` snapshots."""

    module: TrainModule  # a copy that no optimizer knows
    count: int = 0
    refreshed: bool = False  # whether its batch statistics are those of its weights

    @torch.no_grad()
    def add(self, module: TrainModule) -> None:
        """Take one more snapshot into the mean; everything but weights is that of the last."""
        self.count += 1
        self.refreshed = False
        torch._foreach_lerp_(list(self.module.parameters()), list(module.parameters()), 1 / self.count)
        for target, source in zip(self.module.buffers(), module.buffers(), strict=True):
            target.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        return {"module": self.module.state_dict(), "count": self.count, "refreshed": self.refreshed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.module.load_state_dict(saved["module"])
        self.count, self.refreshed = saved["count"], saved["refreshed"]

    def refresh(
        self,
        loader: Loader,
        ids: np.ndarray,
        *,
        batch_size: int,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the batch statistics anew from the samples `ids`: those averaged belong to none of the weights.

        Means over batches, as in torch's `update_bn`; every rank takes part with its share, and all get the same.
        """
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if norms:
            with _gathering(norms), torch.no_grad():
                for micro in loader.evaluate(ids, batch_size=batch_size):
                    if len(micro.batch["sample_id"]) > 1:  # one alone has no variance
                        with autocast():
                            self.module.predict(micro.batch)
            for norm in norms:
                _join_ranks(norm)
        self.refreshed = True


@contextmanager
def _gathering(norms: list[_BatchNorm]) -> Iterator[None]:
    """Let layers, and only these, run as in training, with a plain mean over what they see."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


def _join_ranks(norm: _BatchNorm) -> None:
    """Make the statistics the mean over ranks, each weighted by the batches it saw."""
    assert norm.num_batches_tracked is not None
    seen = norm.num_batches_tracked.float()
    total = distributed.sum_over_ranks(seen.clone())
    for values in (norm.running_mean, norm.running_var):
        assert values is not None
        values.copy_(distributed.sum_over_ranks(values * seen) / total)
