"""Evaluation: rows from every rank, gathered once, each sample once, scored as a whole set."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

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
) -> dict[str, float]:
    """Score a module on the samples `ids`; every rank takes part and gets the metrics.

    The module's mode (training or evaluation) is put back as it was.
    """
    was_training = module.training
    module.eval()
    mine: list[Rows] = []
    with torch.inference_mode():
        for micro in loader.evaluate(ids, batch_size=batch_size):
            with autocast():
                rows = module.predict(micro.batch)
            mine.append(
                {
                    name: value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
                    for name, value in rows.items()
                }
            )
    module.train(was_training)
    parts = distributed.to_main(mine)
    metrics = None
    if parts is not None:
        metrics = {
            name: float(v) for name, v in module.score(_join([row for part in parts for row in part], ids)).items()
        }
    result: dict[str, float] = distributed.from_main(metrics)
    return result


def _join(parts: list[Rows], ids: np.ndarray) -> Rows:
    """Join rows of all ranks in order of sample id, and make sure that they are the set asked for."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(rows[SAMPLE_ID], kind="stable")
    rows = {name: values[order] for name, values in rows.items()}
    assert np.array_equal(rows[SAMPLE_ID], np.sort(ids)), "predict must return one row per sample"
    return rows
