"""Evaluation: predict on every rank, gather the rows once, and score the whole set."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from trainyard.data.loader import Loader
from trainyard.train import distributed
from trainyard.train.data_parallel import share_saved_buffers
from trainyard.train.module import Rows, TrainModule

SAMPLE_ID = "sample_id"
_UNFINISHED_COPIES = 2  # batches whose rows may still be on their way to the host while the next one is computed


def evaluate(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    save_figures: Callable[[dict[str, bytes]], None] | None = None,
    progress: Callable[[int], object] = lambda samples: None,
) -> dict[str, float]:
    """Score a module on the samples `ids`; every rank takes part and gets the metrics.

    All ranks score what a checkpoint of the module has: its buffers become rank 0's. Afterwards the module is in the
    mode (training or evaluation) in which it was.

    Args:
        save_figures: called on rank 0 with the module's report figures of this set.
        progress: called with the number of samples of each batch that is done.
    """
    was_training = module.training
    share_saved_buffers(module)
    own_rows = _predict_share(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=progress)
    module.train(was_training)
    parts = distributed.gather_to_rank0(own_rows)
    metrics = None
    if parts is not None:
        rows = _join_rows([row for part in parts for row in part], ids)
        metrics = {name: float(value) for name, value in module.score(rows).items()}
        if save_figures is not None:
            save_figures(module.report_figures(rows))
    result: dict[str, float] = distributed.broadcast_from_rank0(metrics)
    return result


def predict(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object],
) -> Rows:
    """Return the module's rows of the samples `ids`, on this rank alone; `progress` is called with samples done."""
    parts = _predict_share(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=progress)
    return _join_rows(parts, ids)


def _predict_share(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object] = lambda samples: None,
) -> list[Rows]:
    """Return the rows of this rank's share of `ids`, one entry per batch; leaves the module in evaluation mode.

    Rows are read a few batches late, so that the host queues the next batches while the device computes.
    """
    module.eval()
    parts: list[Rows] = []
    copies: deque[_RowCopy] = deque()
    with torch.inference_mode():
        for micro_batch in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                copies.append(_RowCopy(module.predict(micro_batch.batch)))
            if len(copies) > _UNFINISHED_COPIES:
                parts.append(copies.popleft().finish())
            progress(len(micro_batch.batch[SAMPLE_ID]))
        return parts + [copy.finish() for copy in copies]


class _RowCopy:
    """Rows of one batch on their way from the device into page-locked memory."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        wide = {name: v.float() if v.is_floating_point() else v for name, v in rows.items()}
        self._rows = {name: v.to("cpu", non_blocking=True) for name, v in wide.items()}
        self._is_complete: torch.cuda.Event | None = None
        if rows[SAMPLE_ID].is_cuda:
            self._is_complete = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_complete.record()

    def finish(self) -> Rows:
        """Wait for the copy, and return the rows in ordinary memory: page-locked memory is scarce."""
        if self._is_complete is None:
            return {name: v.numpy() for name, v in self._rows.items()}
        self._is_complete.synchronize()
        return {name: v.numpy().copy() for name, v in self._rows.items()}


def _join_rows(parts: list[Rows], ids: np.ndarray) -> Rows:
    """Join rows in order of sample id, and check that they are exactly the samples `ids`."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows[SAMPLE_ID], kind="stable")
    rows = {name: values[order] for name, values in rows.items()}
    assert np.array_equal(rows[SAMPLE_ID], np.sort(ids)), "predict must return one row per sample"
    return rows
