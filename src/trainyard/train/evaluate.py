"""Evaluation: predict on every rank, gather the rows once, and score the whole set."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from trainyard.data.loader import Loader
from trainyard.errors import is_out_of_memory
from trainyard.runs.pair_scores import write_pair_scores
from trainyard.train import distributed
from trainyard.train.data_parallel import share_saved_buffers
from trainyard.train.module import Rows, TrainModule
from trainyard.train.out_of_memory import EVALUATION, halve, name_phase, release_memory
from trainyard.train.run_context import TRAIN, VALIDATION, RunContext

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
    keep_smaller: Callable[[int], object] = lambda size: None,
) -> dict[str, float]:
    """Score a module on the samples `ids`; every rank takes part and gets the metrics.

    Args:
        save_figures: at the end of training: called on rank 0 with the module's report figures of this set; then the
            metrics have their intervals, too.
        progress: called with the number of samples of each batch that is done.
        keep_smaller: called on every rank with the batch size that was needed, if `batch_size` did not fit somewhere.
    """
    gathered = gather_rows(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=progress)
    scored = None
    if gathered is not None:
        rows, size = gathered
        metrics = score_rows(module, rows, with_intervals=save_figures is not None)
        if save_figures is not None:
            save_figures(module.report_figures(rows))
        scored = metrics, size
    result: tuple[dict[str, float], int] = distributed.broadcast_from_rank0(scored)
    if result[1] < batch_size:
        keep_smaller(result[1])
    return result[0]


def score_rows(module: TrainModule, rows: Rows, *, with_intervals: bool) -> dict[str, float]:
    """Return the metrics of a whole set; the ends of their intervals after them, because resampling takes long."""
    metrics = module.score(rows)
    if with_intervals:
        metrics = metrics | module.compute_intervals(rows)
        if names := find_constant_outputs(module, rows):
            logger.warning(
                "{}: the same for all {} samples, so the network ignores what it sees. Usual causes: too few steps, a "
                "learning rate that is too high, inputs that are all alike",
                ", ".join(names),
                len(rows[SAMPLE_ID]),
            )
    return {name: float(value) for name, value in metrics.items()}


def find_constant_outputs(module: TrainModule, rows: Rows) -> list[str]:
    """Return the outputs of `predict` if all of them are the same for every sample, to a thousandth of their size.

    Only families that describe their outputs (`describe_predict`) are looked at: other rows may hold the truth.
    """
    if type(module).describe_predict is TrainModule.describe_predict or len(rows[SAMPLE_ID]) < 2:
        return []
    outputs = {name: rows[name] for name in module.describe_predict().outputs if rows[name].dtype.kind == "f"}
    same = all(np.ptp(values, axis=0).max() <= 1e-3 * np.abs(values).max() for values in outputs.values())
    return list(outputs) if same else []


def gather_rows(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object] = lambda samples: None,
) -> tuple[Rows, int] | None:
    """Return the module's rows of the samples `ids` on rank 0, and None on the others; every rank takes part.

    Beside the rows is the batch size that fitted on every rank, `batch_size` or less.

    All ranks predict with what a checkpoint of the module has: its buffers become rank 0's. Afterwards the module is
    in the mode (training or evaluation) in which it was.
    """
    was_training = module.training
    share_saved_buffers(module)
    share = predict_share(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=progress)
    module.train(was_training)
    shares = distributed.gather_to_rank0(share)
    if shares is None:
        return None
    return _join_rows([row for rows, _ in shares for row in rows], ids), min(size for _, size in shares)


def list_final_sets(context: RunContext) -> tuple[list[str], bool]:
    """Return the sets that the final weights are scored on, and whether the scores of validation pairs are stored.

    These are the test sets; without one, validation if the job has report figures. Jobs that compare samples have
    pairs.
    """
    kind, splits = type(context.module), context.splits
    names = [name for name in splits if name not in (TRAIN, VALIDATION)]
    if not names and VALIDATION in splits and kind.report_figures is not TrainModule.report_figures:
        names = [VALIDATION]
    return names, VALIDATION in splits and kind.select_pair_scores is not TrainModule.select_pair_scores


def store_pair_scores(
    context: RunContext,
    module: TrainModule,
    loader: Loader,
    *,
    step: int,
    autocast: Callable[[], AbstractContextManager[None]],
) -> None:
    """Write the scores of the validation pairs into the run; every rank takes part. Costs one evaluation.

    Args:
        module: has the weights of training step `step`.
    """
    ids, batch_size = context.splits[VALIDATION], context.config.eval_batch_size
    touch = context.heartbeat.touch
    gathered = gather_rows(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=touch)
    if gathered is not None:
        context.check_owner()
        scores = module.select_pair_scores(gathered[0])
        write_pair_scores(context.run, scores, step=step, precision=context.precision.dtype)


def predict_share(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object] = lambda samples: None,
) -> tuple[list[Rows], int]:
    """Return the rows of this rank's share of `ids`, one entry per batch, and the batch size that fitted.

    If the GPU's memory is not enough for a batch, all rows are predicted again in batches of half the size: rows belong
    to samples, and no other rank takes part. Leaves the module in evaluation mode.

    Raises:
        RuntimeError: the memory is not enough for one sample.
    """
    done = 0

    def count(samples: int) -> None:
        nonlocal done
        done += samples
        progress(samples)

    while True:
        try:
            with name_phase(EVALUATION):
                rows = predict_batches(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=count)
                return list(rows), batch_size
        except RuntimeError as error:
            if batch_size == 1 or not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        count(-done)
        gc.collect()  # what the error referred to
        release_memory()
        logger.warning("evaluation in batches of {}, because {} do not fit: {}", halve(batch_size), batch_size, reason)
        batch_size = halve(batch_size)


@torch.inference_mode()
def predict_batches(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object],
) -> Iterator[Rows]:
    """Yield the rows of this rank's share of `ids`, batch by batch; leaves the module in evaluation mode.

    Rows are read a few batches late, so that the host queues the next batches while the device computes.
    """
    module.eval()
    copies: deque[_RowCopy] = deque()
    with closing(loader.evaluate(ids, batch_size=batch_size)) as stream:
        for micro_batch in stream:
            with autocast():
                copies.append(_RowCopy(module.predict(micro_batch.batch)))
            if len(copies) > _UNFINISHED_COPIES:
                yield copies.popleft().finish()
            progress(len(micro_batch.batch[SAMPLE_ID]))
    while copies:
        yield copies.popleft().finish()


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
