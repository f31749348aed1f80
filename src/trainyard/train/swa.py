"""Stochastic weight averaging: the mean of the weights at each new best validation score (arXiv:1803.05407)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainyard.data.loader import Loader
from trainyard.train import distributed
from trainyard.train.data_parallel import BatchNorm
from trainyard.train.module import TrainModule


@dataclass
class WeightAverage:
    """The mean of `count` snapshots."""

    module: TrainModule  # a copy that no optimizer updates
    count: int = 0
    refreshed: bool = False  # whether its BatchNorm statistics match its weights

    @torch.no_grad()
    def add(self, module: TrainModule) -> None:
        """Add a snapshot to the mean; buffers are those of the latest snapshot, which its evaluation made rank 0's."""
        self.refreshed = False
        average = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        average(list(self.module.parameters()), list(module.parameters()), self.count)
        self.count += 1
        for target, source in zip(self.module.buffers(), module.buffers(), strict=True):
            target.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"module": self.module.state_dict(), "count": self.count, "refreshed": self.refreshed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
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
        """Recompute BatchNorm statistics over the samples `ids`; the present ones do not match the averaged weights.

        Means over batches, as in torch's `update_bn`. Every rank processes its share, and all get the same result.
        """
        norms = [m for m in self.module.modules() if isinstance(m, BatchNorm) and m.track_running_stats]
        if norms:
            with _accumulate_statistics(norms), torch.no_grad():
                for micro_batch in loader.evaluate(ids, batch_size=batch_size):
                    if len(micro_batch.batch["sample_id"]) > 1:  # a single sample has no variance
                        with autocast():
                            self.module.predict(micro_batch.batch)
            for norm in norms:
                _average_over_ranks(norm)
        self.refreshed = True


@contextmanager
def _accumulate_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Put these layers alone into training mode, with a plain mean over their batches."""
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


def _average_over_ranks(norm: BatchNorm) -> None:
    """Average the statistics over ranks, weighted by their number of batches."""
    assert norm.num_batches_tracked is not None
    batches = norm.num_batches_tracked.float()
    total_batches = distributed.sum_over_ranks(batches.clone())
    for values in (norm.running_mean, norm.running_var):
        assert values is not None
        values.copy_(distributed.sum_over_ranks(values * batches) / total_batches)
