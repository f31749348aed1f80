"""Evaluation: rows from every rank, gathered once, each sample once, scored as a whole set."""

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
    show: Callable[[dict[str, bytes]], None] | None = None,
) -> dict[str, float]:
    """Score a module on the samples `ids`; every rank takes part and gets the metrics.

    The module's mode (training or evaluation) is put back as it was.

    Args:
        show: called on rank 0 with the module's exhibits of this set.
    """
    was_training = module.training
    module.eval()
    mine: list[Rows] = []
    with torch.inference_mode():
        for micro in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                mine.append(_on_host(module.predict(micro.batch)))
    module.train(was_training)
    parts = distributed.gather_to_rank0(mine)
    metrics = None
    if parts is not None:
        rows = _join([row for part in parts for row in part], ids)
        metrics = {name: float(value) for name, value in module.score(rows).items()}
        if show is not None:
            show(module.report_figures(rows))
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
        for micro in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                parts.append(_on_host(module.predict(micro.batch)))
            progress(len(micro.batch[SAMPLE_ID]))
    return _join(parts, ids)


def _on_host(rows: dict[str, Tensor]) -> Rows:
    return {name: (v.float() if v.is_floating_point() else v).cpu().numpy() for name, v in rows.items()}


def _join(parts: list[Rows], ids: np.ndarray) -> Rows:
    """Join rows of all ranks in order of sample id, and make sure that they are the set asked for."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows[SAMPLE_ID], kind="stable")
    rows = {name: values[order] for name, values in rows.items()}
    assert np.array_equal(rows[SAMPLE_ID], np.sort(ids)), "predict must return one row per sample"
    return rows
