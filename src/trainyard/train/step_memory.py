"""Predicts the device memory of one optimizer step by taking it with torch's fake tensors, which have no values.

The real module, loss, backward pass and optimizer run, so the tensors saved for the backward pass, and their lifetime,
are decided by the same code as in training. `LiveStorages` adds up the storages that are alive.

torch has such a counter, MemTracker among the tools of torch.distributed. It is not used: it refuses a step that calls
its module more than once, as one with several micro-batches does, and it knows nothing of averaged weights.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainyard.config.settings import ImageSettings
from trainyard.data.index import IMAGE, MASK, list_followers
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.shards import ShardSet
from trainyard.train.module import TrainModule
from trainyard.train.step import TrainState, train_step

GPU_BLOCK_BYTES = 512
"""torch's allocator on GPUs rounds each tensor up to this (kMinBlockSize in c10/cuda/CUDACachingAllocator.h)."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device of a step with one micro-batch size.

    Everything but `activations` stays from step to step. `activations` is what else is alive at the peak: the tensors
    of the micro-batch's forward and backward pass, and those gradients that exist at that moment.
    """

    parameters: int
    buffers: int
    optimizer: int
    averages: int  # EMA and SWA
    batch: int  # one micro-batch
    gradients: int  # of all parameters; part of the peak as far as they exist then
    activations: int

    @property
    def peak(self) -> int:
        """Return the most bytes that are alive at once."""
        return self.parameters + self.buffers + self.optimizer + self.averages + self.batch + self.activations


VALUES_ARE_READ = (DataDependentOutputException, DynamicOutputShapeException)
"""Exceptions of a step that reads values, as tensor.item() does, or makes a tensor whose size depends on them."""

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def compute_without_values(module: Module) -> Iterator[Module]:
    """Have tensors that are made in this context no values; yield such a copy of a module."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        tensors = chain(module.parameters(), module.buffers())
        yield copy.deepcopy(module, {id(tensor): fake.from_tensor(tensor) for tensor in tensors})


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operators create, until they are freed.

    Memory that an operator allocates and frees inside itself, a workspace, is not seen.
    """

    def __init__(self, *, block_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._block_bytes = block_bytes
        self._known: dict[int, weakref.ref[Any]] = {}  # by the address of the storage, until it is freed

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count storages that exist already; return their bytes. One that is counted already adds nothing."""
        before = self.live_bytes
        for tensor in tensors:
            self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return self.live_bytes - before

    def round_up(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors in the allocator's blocks."""
        return sum(self._round_up(tensor.untyped_storage().nbytes()) for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE:
            return None
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return out  # most calls are this one
        self.add(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            size = self._round_up(storage.nbytes())
            self._known[address] = weakref.ref(storage, partial(self._forget, address, size))
            self.live_bytes += size

    def _forget(self, address: int, size: int, _: Any) -> None:
        del self._known[address]
        self.live_bytes -= size

    def _round_up(self, size: int) -> int:
        return -(-size // self._block_bytes) * self._block_bytes


_IN_PLACE = {torch.ops.aten._fused_sgd_.default, torch.ops.aten._amp_update_scale_.default}
"""Operators that change their arguments, create nothing, and that torch cannot run without values."""


def predict_step(
    state: TrainState,
    batch: dict[str, Tensor],
    *,
    micro_batches: int,
    clip_grad_norm: float,
    autocast: Callable[[], AbstractContextManager[None]],
    on_gpu: bool,
) -> StepMemory:
    """Return the memory of a step. Call it in a `FakeTensorMode`, with a state and a batch without values.

    torch runs a backward pass on tensors of a GPU only where there is one. So that of a GPU is that of the CPU, but
    with the GPU's blocks and data types (`_AutocastAsOnGpu`).

    Args:
        batch: alive during the whole step; each micro-batch of the step is this one.
        micro_batches: of a step.
    """
    for group in state.optimizer.param_groups:
        if on_gpu and not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True  # torch's default on a GPU: it makes temporary tensors of all parameters at once
    _create_moments(state.optimizer)
    storages = LiveStorages(block_bytes=GPU_BLOCK_BYTES if on_gpu else 1)
    copies = [copy for copy in (state.ema, state.swa.module if state.swa else None) if copy is not None]
    moments = (value for moments in state.optimizer.state.values() for value in moments.values())
    sizes = {
        "parameters": storages.add(state.module.parameters()),
        "buffers": storages.add(state.module.buffers()),
        "optimizer": storages.add(value for value in moments if isinstance(value, Tensor)),
        "averages": storages.add(tensor for copy in copies for tensor in chain(copy.parameters(), copy.buffers())),
        "batch": storages.add(batch.values()),
    }
    fixed = storages.live_bytes
    parts = _take_last_micro_batch(state.module, batch, weight=1 / micro_batches)
    with storages, _AutocastAsOnGpu() if on_gpu else nullcontext():
        train_step(state, parts, lr=1.0, world_size=1, seed=0, clip_grad_norm=clip_grad_norm, autocast=autocast)
    gradients = storages.round_up(p.grad for p in state.module.parameters() if p.grad is not None)
    state.optimizer.zero_grad(set_to_none=True)
    return StepMemory(**sizes, gradients=gradients, activations=storages.peak_bytes - fixed)


def cast_layers_as_on_gpu(module: TrainModule) -> None:
    """Make repeated layers cast as autocast does on a GPU; before `recompute_layers`.

    `predict_step` sees to it everywhere else. But the backward pass, in which these are recomputed, leaves every
    TorchFunctionMode, so each brings its own.
    """
    for layer in module.repeated_layers():
        layer.forward = partial(_run_as_on_gpu, layer.forward)


def _run_as_on_gpu(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _AutocastAsOnGpu():
        return forward(*args, **kwargs)


def _take_last_micro_batch(module: nn.Module, batch: dict[str, Tensor], *, weight: float) -> Iterator[MicroBatch]:
    """Yield the last micro-batch of a step, with the gradients of earlier ones if there are any.

    Those before it take no more, because each finds at most the same gradients.
    """
    if weight < 1:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
    yield MicroBatch(batch, weight=weight, last=True, wait_s=0.0)


def read_template(loader: Loader, ids: np.ndarray) -> dict[str, Tensor]:
    """Return a training batch of two samples of this rank's share of `ids`; for `resize_batch`."""
    with closing(loader.evaluate(ids, batch_size=2)) as stream:
        batch = dict(next(stream).batch)
    noise = torch.zeros(len(batch["sample_id"]), 32)
    start = torch.zeros((), dtype=torch.int64)
    return batch | {"noise": noise, "epoch": start, "samples_seen": start}


def list_axes(data: ShardSet, ids: np.ndarray, image: ImageSettings) -> dict[str, dict[int, int]]:
    """Return the axes of a batch that vary besides the first, at the longest that the samples `ids` and images have."""
    records, scale = data.records.items(), max(image.scales)
    axes = {
        name: dict(enumerate(record.shape[ids, : record.varying_axes].max(axis=0).tolist(), 1))
        for name, record in records
        if record.varying_axes
    }
    size = round(image.height_px * scale), round(image.width_px * scale)
    followers = list_followers(data.records).items()
    images = {IMAGE, *(name for name, record in followers if record.kind != MASK)}
    axes |= {name: dict(enumerate(size, 2)) for name in images}
    return axes | {name: dict(enumerate(size, 1)) for name, record in followers if record.kind == MASK}


def resize_batch(
    batch: Mapping[str, Tensor],
    *,
    samples: int,
    axes: Mapping[str, Mapping[int, int]],
    channels_last: bool,
) -> dict[str, Tensor]:
    """Return a batch with another number of samples, without values.

    Args:
        batch: of any number of samples.
        axes: lengths of other axes than the first, by name and axis.
        channels_last: whether images are NHWC in memory.
    """
    resized = {}
    for name, values in batch.items():
        lengths = {**({0: samples} if values.ndim else {}), **axes.get(name, {})}
        shape = [lengths.get(axis, length) for axis, length in enumerate(values.shape)]
        layout = torch.channels_last if channels_last and name == IMAGE else torch.contiguous_format
        resized[name] = torch.empty(shape, dtype=values.dtype, memory_format=layout)
    return resized


class _AutocastAsOnGpu(TorchFunctionMode):
    """Casts to float32 what autocast casts on a GPU, and not on the CPU.

    The list is that of the functions "that autocast to float32" on CUDA in the documentation of torch.amp (2.13).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FLOAT32_ON_GPU and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _to_float32, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_NAMES = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss "
    "cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss "
    "kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss "
    "multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss "
    "soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss"
)
_FLOAT32_ON_GPU = frozenset(_NAMES.split())


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, as its first step does: the step that is counted is one of the many after it."""
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        parameter.grad = torch.empty_like(parameter)
    with LiveStorages(block_bytes=1):  # which leaves out what torch cannot run
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
