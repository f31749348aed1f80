"""Evaluation: predict on every rank, gather the rows once, and score the whole set."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from trainyard.data.loader import Loader
from trainyard.train import distributed
from trainyard.train.module import Rows, TrainModule

SAMPLE_ID = "sample_id"


def evaluate(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    save_figures: Callable[[dict[str, bytes]], None] | None = None,
) -> dict[str, float]:
    """Score a module on the samples `ids`; every rank takes part and gets the metrics.

    Afterwards the module is in the mode (training or evaluation) in which it was.

    Args:
        save_figures: called on rank 0 with the module's report figures of this set.
    """
    was_training = module.training
    module.eval()
    own_rows: list[Rows] = []
    with torch.inference_mode():
        for micro_batch in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                own_rows.append(_copy_to_host(module.predict(micro_batch.batch)))
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
    module.eval()
    parts: list[Rows] = []
    with torch.inference_mode():
        for micro_batch in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                parts.append(_copy_to_host(module.predict(micro_batch.batch)))
            progress(len(micro_batch.batch[SAMPLE_ID]))
    return _join_rows(parts, ids)


def _copy_to_host(rows: dict[str, Tensor]) -> Rows:
    return {name: (v.float() if v.is_floating_point() else v).cpu().numpy() for name, v in rows.items()}


def _join_rows(parts: list[Rows], ids: np.ndarray) -> Rows:
    """Join rows in order of sample id, and check that they are exactly the samples `ids`."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows[SAMPLE_ID], kind="stable")
    rows = {name: values[order] for name, values in rows.items()}
    assert np.array_equal(rows[SAMPLE_ID], np.sort(ids)), "predict must return one row per sample"
    return rows
