"""Tries the largest step and the largest evaluation batch before training, and leaves the run's state as it was.

Each rank tries them on its own module, without DDP, so that a rank whose memory is not enough keeps no other waiting.
Then all agree, and halve together what did not fit.

On the CPU nothing is tried: the kernel would kill the rank. A step is predicted if its batch is large.
"""

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from loguru import logger

from trainyard.choice import Choice
from trainyard.config.settings import TrainConfig
from trainyard.data.augment import list_scales
from trainyard.data.host_memory import read_available_memory
from trainyard.data.loader import Loader
from trainyard.data.order import EpochOrder
from trainyard.data.shards import ShardSet
from trainyard.errors import ALLOCATION_ERRORS, is_out_of_memory
from trainyard.text import format_size
from trainyard.train import distributed
from trainyard.train.evaluate import predict_share
from trainyard.train.out_of_memory import EVALUATION, choose_smaller, explain_out_of_memory, name_phase, release_memory
from trainyard.train.precision import allow_nondeterministic_operators
from trainyard.train.run_context import TRAIN, RunContext, check_batch_memory
from trainyard.train.run_state import build_state
from trainyard.train.step import TrainState, compute_gradients, read_one_step, update_weights

UNLIKELY_SHARE = 0.001
"""Of a host's memory: if the loader's buffers take less, the step is not predicted, which may take seconds.

Assumed: a step takes less than a thousand times the memory of its batch.
"""

Autocast = Callable[[], AbstractContextManager[None]]


class Probe(NamedTuple):
    """Sizes that fit, and the reason."""

    micro_batch_size: int
    eval_batch_size: int
    finding: str
    reason: str


def probe_memory(
    context: RunContext,
    state: TrainState,
    loader: Loader,
    order: EpochOrder,
    *,
    autocast: Autocast,
) -> Probe:
    """Try training and evaluation, and halve what does not fit on some rank. Every rank takes part.

    The step is a real one: the global batch with the largest input size, with the longest samples in each rank's
    share; its order and augmentation are the epoch's. Costs that step, and a copy of the state on the host.

    Raises:
        OutOfDeviceMemory: it does not fit, and may not be halved; on all ranks alike.
        UserError: the host has no memory for a step on the CPU.
    """
    micro_batch_size, eval_batch_size = context.micro_batch_size, context.eval_batch_size
    if reason := _explain_no_probe(context):
        finding = "off"
        if context.device.type == "cpu" and context.config.probe_memory == "auto":
            finding, reason = _predict_on_host(context, loader, autocast)
        return Probe(micro_batch_size, eval_batch_size, finding, reason)
    device = context.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    epoch = state.progress.epoch
    scales = list_scales(context.config.image.scales, seed=context.config.seed, epoch=epoch, count=len(order))
    lengths = list_lengths(context.data, context.config)
    tried, index = build_largest_batch(order, lengths, scales, world_size=context.world.world_size)

    def train(size: int) -> int:
        with _put_back(state, device):
            stream = loader.train(lambda epoch: tried, epoch=state.progress.epoch, start=index, micro_batch_size=size)
            with closing(stream):
                _take_step(context, state, read_one_step(stream, state.progress, device), autocast)
        return size

    def predict(size: int) -> int:
        with _put_back(state, device):
            module = state.module if state.ema is None else state.ema
            return predict_share(module, loader, eval_ids, [], batch_size=size, autocast=autocast)

    while failure := _try_on_all_ranks(train, micro_batch_size)[0]:
        smaller = choose_smaller(context.config, micro_batch_size)
        if smaller is None:
            with explain_out_of_memory(context, micro_batch_size), name_phase("memory probe"):
                raise torch.OutOfMemoryError(failure)
        logger.warning("memory probe: micro-batches of {} do not fit, trying {}", micro_batch_size, smaller)
        micro_batch_size = smaller
    eval_ids = select_largest_eval_ids(context.splits, lengths, count=eval_batch_size * context.world.world_size)
    if len(eval_ids):
        failure, eval_batch_size = _try_on_all_ranks(predict, eval_batch_size)
        if failure:
            with explain_out_of_memory(context, micro_batch_size), name_phase(EVALUATION):
                raise torch.OutOfMemoryError(failure)
    tried_what = "the largest step and evaluation batch"
    if context.precision.cuda_graphs:
        tried_what += "; not what CUDA graphs keep, which are recorded in later steps"
    return Probe(micro_batch_size, eval_batch_size, _describe_peak(device), tried_what)


def _explain_no_probe(context: RunContext) -> str:
    config = context.config
    if config.probe_memory == "off":
        return "probe_memory=off"
    if config.probe_memory == "auto" and context.device.type == "cpu":
        return "probe_memory=auto tries the memory of GPUs only"
    if config.sync_batchnorm and context.world.world_size > 1:
        return "sync_batchnorm=true: in a step, a rank whose memory is not enough would keep the others waiting"
    return ""


def _predict_on_host(context: RunContext, loader: Loader, autocast: Autocast) -> Choice[str]:
    """Compare the memory of a step on the CPU with that of this host; return the result with its reason.

    Raises:
        UserError: it is too much.
    """
    available = read_available_memory()
    if loader.count_host_bytes(context.micro_batch_size) < UNLIKELY_SHARE * available.bytes:
        return Choice(
            "off", "probe_memory=auto tries the memory of GPUs only, and predicts on the CPU where batches are large"
        )
    if context.world.world_size > 1 and context.module.sparse_gradients():
        return Choice("off", "a step whose ranks exchange sparse gradients is not predicted")
    from trainyard.train import step_memory  # few runs need it

    try:
        needed = _predict_step(context, loader, autocast)
    except step_memory.VALUES_ARE_READ as error:
        return Choice(
            "off", f"a step of family {context.config.family} reads values, so it cannot be predicted: {error.func}"
        )
    check_batch_memory(context, loader, available=available, step_bytes=needed)
    return Choice(
        "fits",
        f"predicted: {format_size(needed)} for a step, of {format_size(available.bytes)} ({available.source})",
    )


def _predict_step(context: RunContext, loader: Loader, autocast: Autocast) -> int:
    """Return the bytes that a step of this rank takes on the CPU besides what exists before it."""
    from trainyard.train.step_memory import compute_without_values, list_axes, predict_step, read_template, resize_batch

    config, ids = context.config, context.splits[TRAIN]
    batch, axes = read_template(loader, ids), list_axes(context.data, ids, config.image)
    scaler = torch.amp.GradScaler("cpu", enabled=context.precision.loss_scaling)
    accumulates = context.world.world_size * context.micro_batch_size < config.global_batch_size
    without_values = compute_without_values(context.module)
    with _restore_generators(context.device), allow_nondeterministic_operators(), without_values as module:
        state = build_state(module, config, scaler=scaler)
        largest = resize_batch(
            batch, samples=context.micro_batch_size, axes=axes, channels_last=context.precision.channels_last
        )
        step = predict_step(
            state,
            largest,
            micro_batches=2 if accumulates or context.world.world_size > 1 else 1,
            clip_grad_norm=config.clip_grad_norm,
            autocast=autocast,
            on_gpu=False,
        )
    return step.activations


def build_largest_batch(
    order: EpochOrder, lengths: Sequence[np.ndarray], scales: np.ndarray, *, world_size: int
) -> tuple[EpochOrder, int]:
    """Return an epoch order with a batch that takes as much memory as any, and the index of that batch.

    It is the epoch's first full batch of the largest input size. Where samples differ in length, the longest ones take
    the first places of each rank's share: padding makes all others of their micro-batch as long.

    Args:
        lengths: (N,) each, by sample id.
        scales: (number of batches,) of the model's input size.
    """
    size = order.global_batch_size
    index = int(np.argmax(scales[: max(1, len(order.ids) // size)]))
    ids, count = order.ids.copy(), len(order.batch(index))
    for rank in range(world_size):
        low, high = (index * size + count * r // world_size for r in (rank, rank + 1))
        longest = [order.ids[np.argmax(values[order.ids])] for values in lengths]
        ids[low:high][: len(longest)] = longest[: high - low]
    return EpochOrder(ids, size), index


def list_lengths(data: ShardSet, config: TrainConfig) -> list[np.ndarray]:
    """Return (N,) lengths of each kind of record that has different ones, and of the column that batches follow."""
    lengths = [axis for records in data.records.values() for axis in records.shape.T[: records.varying_axes]]
    if config.data.order == "buckets":
        lengths.append(data.columns[config.data.order_by])
    return [values for values in lengths if values.min() < values.max()]


def select_largest_eval_ids(
    splits: Mapping[str, np.ndarray], lengths: Sequence[np.ndarray], *, count: int
) -> np.ndarray:
    """Return so many samples, the longest of all sets that are evaluated, in order of length.

    Args:
        lengths: (N,) each, by sample id.
    """
    sets = [ids for name, ids in splits.items() if name != TRAIN]
    ids = np.concatenate(sets) if sets else np.empty(0, dtype=np.int64)
    for values in lengths:
        ids = ids[np.argsort(-values[ids], kind="stable")]
    return ids[:count]


def _take_step(context: RunContext, state: TrainState, step: Iterator[object], autocast: Autocast) -> None:
    tried = replace(state, model=state.module, scaler=copy.deepcopy(state.scaler))
    with allow_nondeterministic_operators(), warnings.catch_warnings():  # which may be used is decided later
        warnings.simplefilter("ignore")
        compute_gradients(tried, step, world_size=1, seed=0, autocast=autocast)  # type: ignore[arg-type]
    update_weights(tried, clip_grad_norm=context.config.clip_grad_norm)


def _try_on_all_ranks(work: Callable[[int], int], size: int) -> tuple[str, int]:
    """Do `work` on every rank; return the allocator's error of one where it failed, and the smallest size."""
    failure = ""
    try:
        size = work(size)
    except ALLOCATION_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error)
    gc.collect()  # objects that the error referred to
    release_memory()
    trials = distributed.gather_to_rank0((failure, size))
    agreed = None
    if trials is not None:
        agreed = next((failed for failed, _ in trials if failed), ""), min(fitting for _, fitting in trials)
    result: tuple[str, int] = distributed.broadcast_from_rank0(agreed)
    return result


@contextmanager
def _put_back(state: TrainState, device: torch.device) -> Iterator[None]:
    """Keep everything that a step changes on the host, as a checkpoint would, and write it back at the end."""
    modules = [state.module] if state.ema is None else [state.module, state.ema]
    optimizer = state.optimizer
    moments = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    tensors += [value for values in moments.values() for value in values.values() if isinstance(value, torch.Tensor)]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    training = [module.training for module in modules]
    try:
        with _restore_generators(device):
            yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)
        optimizer.state.clear()
        optimizer.state.update(moments)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
        for module, mode in zip(modules, training, strict=True):
            module.train(mode)


@contextmanager
def _restore_generators(device: torch.device) -> Iterator[None]:
    """Leave the random generators of Python, NumPy and torch as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _describe_peak(device: torch.device) -> str:
    """Return how much of the GPU's memory the probe took, and count from 0 again."""
    if device.type != "cuda":
        return "fits"
    peak, total = torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    return f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB"
