"""Evaluation: predict on every rank, gather the rows once, and score the whole set."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from trainyard.data.loader import Loader
from trainyard.errors import ALLOCATION_ERRORS, is_out_of_memory
from trainyard.runs import pair_scores
from trainyard.train import distributed
from trainyard.train.contract import check_figures, check_metrics, check_rows, check_scores
from trainyard.train.data_parallel import share_saved_buffers
from trainyard.train.module import Batch, DataInfo, Rows, SampleSource, TrainModule
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
    save_figures: Callable[[dict[str, bytes], dict[str, bytes]], None] | None = None,
    with_samples: bool = False,
    progress: Callable[[int], object] = lambda samples: None,
    keep_smaller: Callable[[int], object] = lambda size: None,
    compare: Callable[[Rows], object] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score a module on the samples `ids`; every rank takes part and gets what `score_rows` returns.

    Args:
        save_figures: at the end of training: called on rank 0 with the module's report figures of this set and the
            images of its samples; then the metrics also have their intervals.
        with_samples: samples may be shown (report.samples); else there are no images of them.
        progress: called with the number of samples of each batch that is done.
        keep_smaller: called on every rank with the batch size that was needed, if `batch_size` did not fit somewhere.
        compare: called on rank 0 with the rows that were scored.
    """
    gathered = gather_rows(module, loader, ids, batch_size=batch_size, autocast=autocast, progress=progress)
    scored = None
    if gathered is not None:
        rows, size = gathered
        was_training = module.training
        module.eval()  # figures and baselines are also of samples without augmentation
        scores = score_rows(module, rows, with_intervals=save_figures is not None)
        if save_figures is not None:
            figures = check_figures(module.report_figures, module.report_figures(rows))
            samples = module.sample_figures(rows) if with_samples else {}
            save_figures(figures, check_figures(module.sample_figures, samples))
        if compare is not None:
            compare(rows)
        module.train(was_training)
        scored = *scores, size
    metrics, shown, size = distributed.broadcast_from_rank0(scored)
    if size < batch_size:
        keep_smaller(size)
    return metrics, shown


def open_source(loader: Loader, data: DataInfo, ids: np.ndarray, *, batch_size: int) -> SampleSource:
    """Return samples as baselines read them; the loader is that of one rank alone."""
    return SampleSource(data, ids, partial(_read_batches, loader, ids, batch_size))


def _read_batches(loader: Loader, ids: np.ndarray, batch_size: int) -> Iterator[Batch]:
    with closing(loader.evaluate(ids, batch_size=batch_size)) as stream:
        for micro_batch in stream:
            yield micro_batch.batch


def score_rows(module: TrainModule, rows: Rows, *, with_intervals: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of a whole set, and texts and histograms as `check_scores` does.

    The ends of the metrics' intervals come after them, because resampling takes long.
    """
    metrics, shown = check_scores(module.score, module.score(rows))
    if with_intervals:
        metrics |= check_metrics(module.compute_intervals, module.compute_intervals(rows))
        if names := find_constant_outputs(module, rows):
            logger.warning(
                "{}: the same for all {} samples, so the network ignores its input. Usual causes: too few steps, a "
                "learning rate that is too high, inputs that are all alike",
                ", ".join(names),
                len(rows[SAMPLE_ID]),
            )
    return metrics, shown


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

    All ranks predict with the weights that a checkpoint would have: buffers become rank 0's. Afterwards the module is
    in the mode (training or evaluation) in which it was. Rank 0 has the rows in memory once, the others their share.
    """
    was_training = module.training
    share_saved_buffers(module)
    joined = JoinedRows(ids) if distributed.is_rank0() else None
    share: list[Rows] = []
    kept = share if joined is None else joined
    size = predict_share(module, loader, ids, kept, batch_size=batch_size, autocast=autocast, progress=progress)
    module.train(was_training)
    sizes = distributed.gather_to_rank0(size)
    distributed.move_to_rank0(share, kept.append)
    return None if joined is None or sizes is None else (joined.finish(), min(sizes))


def list_final_sets(context: RunContext) -> tuple[list[str], bool]:
    """Return the sets that the final weights are scored on, and whether the scores of validation pairs are stored.

    These are the test sets; without one, validation if the job has figures. Jobs that compare samples have pairs.
    """
    kind, splits = type(context.module), context.splits
    names = [name for name in splits if name not in (TRAIN, VALIDATION)]
    has_figures = (kind.report_figures, kind.sample_figures) != (TrainModule.report_figures, TrainModule.sample_figures)
    if not names and VALIDATION in splits and has_figures:
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
        pair_scores.write_pair_scores(
            context.run / pair_scores.FILE, scores, step=step, precision=context.precision.dtype
        )


class JoinedRows:
    """Rows of the samples `ids`, by sample id. Memory is taken once: each batch goes to its place at once."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids = np.sort(ids)
        self._rows: Rows = {}
        self._is_there = np.zeros(len(ids), dtype=bool)

    def append(self, batch: Rows) -> None:
        """Put the rows of some samples to their places."""
        if not self._rows:
            self._rows = {name: np.empty((len(self._ids), *v.shape[1:]), v.dtype) for name, v in batch.items()}
        places = np.searchsorted(self._ids, batch[SAMPLE_ID])
        assert not self._is_there[places].any(), "predict must return one row per sample"
        for name, rows in self._rows.items():
            rows[places] = batch[name]
        self._is_there[places] = True

    def clear(self) -> None:
        """Forget all batches; their memory is used again."""
        self._is_there[:] = False

    def finish(self) -> Rows:
        """Return the rows, which are exactly those of the samples."""
        same = self._is_there.all() and np.array_equal(self._rows[SAMPLE_ID], self._ids)
        assert same, "predict must return one row per sample"
        return self._rows


def predict_share(
    module: TrainModule,
    loader: Loader,
    ids: np.ndarray,
    rows: list[Rows] | JoinedRows,
    *,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], object] = lambda samples: None,
) -> int:
    """Append the rows of this rank's share of `ids` to `rows`, batch by batch; return the batch size that fitted.

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
                for batch in predict_batches(
                    module, loader, ids, batch_size=batch_size, autocast=autocast, progress=count
                ):
                    rows.append(batch)
                return batch_size
        except ALLOCATION_ERRORS as error:
            if batch_size == 1 or not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        count(-done)
        rows.clear()
        gc.collect()  # objects that the error referred to
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
    is_first = True
    with closing(loader.evaluate(ids, batch_size=batch_size)) as stream:
        for micro_batch in stream:
            with autocast():
                rows = module.predict(micro_batch.batch)
            if is_first:
                check_rows(module, rows, len(micro_batch.batch[SAMPLE_ID]))
                is_first = False
            copies.append(_RowCopy(rows))
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
