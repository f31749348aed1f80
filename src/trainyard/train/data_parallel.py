"""Data-parallel training: the order in which ranks sum gradients, and the buffers that they share."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainyard.choice import Choice
from trainyard.config.families import locate_code
from trainyard.data.loader import MicroBatch
from trainyard.errors import ContractError
from trainyard.runs.folder import read_env
from trainyard.text import join_names
from trainyard.train import distributed, precision
from trainyard.train.contract import list_without_gradient, try_gradients
from trainyard.train.module import TrainModule

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
"""The layers that normalise by statistics of a batch."""

FEW_SAMPLES = 16
"""Below this, the error of networks with BatchNorm rises as their batch shrinks (Wu and He 2018, arXiv:1803.08494)."""


def describe_batch_statistics(
    module: nn.Module, *, micro_batch_size: int, world_size: int, sync_batchnorm: bool
) -> Choice[int] | None:
    """Return the number of samples behind BatchNorm's statistics, and its meaning; None without BatchNorm."""
    if not any(isinstance(layer, BatchNorm) for layer in module.modules()):
        return None
    samples = micro_batch_size * (world_size if sync_batchnorm else 1)
    if samples >= FEW_SAMPLES:
        return Choice(samples, "BatchNorm computes its statistics over the samples of a micro-batch")
    return Choice(
        samples,
        f"BatchNorm computes its statistics over {samples} samples, fewer than {FEW_SAMPLES}: they are noisy, and "
        "results get worse (arXiv:1803.08494). Use larger micro-batches, sync_batchnorm=true on several GPUs, or "
        "another normalisation",
    )


def choose_unused_search(
    module: TrainModule,
    peek: Callable[[], Sequence[MicroBatch]],
    *,
    run: Path,
    wanted: str,
    autocast: Callable[[], AbstractContextManager[None]],
) -> Choice[bool]:
    """Return whether DDP looks in each step for parameters that a rank did not use, and why. Every rank takes part.

    With "auto", the first attempt tries a few micro-batches of each rank on copies of the module. Parameters that only
    some of them use need the search. Those that none uses do not: they would never train, so the first step refuses
    them by name (`contract.check_gradients`). Later attempts read the record: rounding depends on the choice, because
    with the search DDP forms other buckets.

    Args:
        peek: returns some of this rank's next micro-batches, which are used only to try them.
        wanted: the option `find_unused_parameters`.
    """
    if wanted != "auto":
        return Choice(wanted == "on", f"find_unused_parameters={wanted}")
    recorded = read_env(run).get("choices", {}).get("find_unused_parameters") if distributed.is_rank0() else None
    if recorded := distributed.broadcast_from_rank0(recorded):
        return Choice(**recorded)
    with precision.allow_nondeterministic_operators():
        tried = [try_gradients(module, part.batch, autocast) for part in peek() if part.weight]
    # names of parameters with sparse gradients are left out: DDP ignores these
    unused = [set(list_without_gradient(gradients)).difference(module.sparse_gradients()) for gradients in tried]
    found = [names for names_of_rank in distributed.gather_to_rank0(unused) or [] for names in names_of_rank]
    partly = sorted(set[str]().union(*found).difference(set.intersection(*found))) if found else []
    if partly := distributed.broadcast_from_rank0(partly):
        return Choice(True, f"of the first micro-batches, only some use {join_names(partly)}")
    return Choice(False, "the first micro-batches all use the same parameters")


@contextmanager
def explain_unused(module: TrainModule) -> Iterator[None]:
    """Raise a UserError for DDP's error about parameters that the step before did not use on this rank."""
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters=True" not in str(error):
            raise
        raise ContractError(
            f"{locate_code(module.forward)}: in the step before, this rank's micro-batches left out parameters whose "
            "gradients the other ranks wait for. Continue with: trainyard resume RUN find_unused_parameters=on"
        ) from None


def wrap_in_ddp(
    module: TrainModule, *, device: torch.device, sync_batchnorm: bool, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Wrap a module so that ranks train it together. Its optimizer and its averaged copies stay valid.

    All buffers become rank 0's, once. After that, each step starts from rank 0's BatchNorm statistics, so that a resume
    from its checkpoint continues with those that every rank had; all other buffers count as constant.
    """
    if sync_batchnorm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    distributed.overwrite_with_rank0(module.buffers())
    statistics = list_statistics(module)
    constants = [name for name, _ in module.named_buffers() if name not in statistics]
    # torch writes the name of a parameter of the root module once as "name" and once as ".name"
    sparse = [spelling for name in module.sparse_gradients() for spelling in (name, f".{name}")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        module, [*constants, *sparse]
    )
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(
        module, device_ids=ids, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
    )
    if not find_unused_parameters:  # else DDP keeps the buckets that it begins with
        _fix_bucket_order(model)
    return model


def share_saved_buffers(module: TrainModule) -> None:
    """Give every rank the buffers that a checkpoint has: rank 0's.

    In a step, each rank updates running statistics with its own micro-batches. The ranks must score with the values
    that are saved.
    """
    saved: dict[str, Tensor] = module.state_dict()
    distributed.overwrite_with_rank0(saved[name] for name, _ in module.named_buffers() if name in saved)


def hash_constant_buffers(module: nn.Module) -> dict[str, str]:
    """Return a digest of each saved buffer that is none of BatchNorm's; {} on a single rank."""
    if not distributed.has_ranks():
        return {}
    saved, statistics = module.state_dict(), list_statistics(module)
    names = [name for name, _ in module.named_buffers() if name in saved and name not in statistics]
    flat = {name: saved[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name in names}
    return {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in flat.items()}


def check_buffers_agree(module: nn.Module, before: Mapping[str, str]) -> None:
    """Refuse a module whose buffers a step has changed to other values on each rank. Every rank takes part.

    Args:
        before: what `hash_constant_buffers` returned before the step.

    Raises:
        UserError: names them, on every rank.
    """
    changed = {name: digest for name, digest in hash_constant_buffers(module).items() if digest != before[name]}
    by_rank = distributed.gather_to_rank0(changed) or []
    named = sorted({name for digests in by_rank for name in digests})
    differing = [name for name in named if len({digests.get(name) for digests in by_rank}) > 1]
    if names := distributed.broadcast_from_rank0(differing):
        raise ContractError(
            f"{inspect.getsourcefile(type(module))}: {type(module).__name__}: a step changes the buffers "
            f"{join_names(names)} to other values on each rank, and a checkpoint would have rank 0's alone. Compute "
            "them from all ranks (torch.distributed.all_reduce), or do not save them: persistent=False"
        )


@contextmanager
def leave_out_of_statistics(module: nn.Module) -> Iterator[None]:
    """Keep a micro-batch that counts for nothing out of batch statistics, in its forward and its backward pass.

    BatchNorm normalises it by the running statistics, and leaves those as they are. A synchronised layer still takes
    part in the ranks' collectives, with no samples: the others would wait for it.
    """
    norms = [m for m in module.modules() if isinstance(m, BatchNorm) and m.training and m.track_running_stats]
    for norm in norms:
        if isinstance(norm, nn.SyncBatchNorm):
            norm.forward = partial(_take_part_without_samples, norm)  # type: ignore[method-assign]
        else:
            norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()
            vars(norm).pop("forward", None)


def _take_part_without_samples(norm: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """Normalise by the running statistics; the ranks' other samples update them here as everywhere.

    A single vector has no variance, and it may be all that the other ranks have. So in a layer of vectors the
    micro-batch stays in the statistics.
    """
    if x[0, 0].numel() == 1:
        return nn.SyncBatchNorm.forward(norm, x)
    no_samples = nn.SyncBatchNorm.forward(norm, x[:0].float())  # the data type of the other ranks' statistics
    normalised = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    return normalised + no_samples.sum()  # 0, so that the backward pass also takes part


def list_statistics(module: nn.Module) -> set[str]:
    """Return the names of the buffers that training updates."""
    return {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        for name, _ in layer.named_buffers(recurse=False)
    }


def _fix_bucket_order(model: DistributedDataParallel) -> None:
    """Have DDP choose its gradient buckets now, from parameters in reverse order, not from the first step's gradients.

    DDP puts all gradients into one bucket at first. After one reduction it forms the final buckets, of 1 MiB and then
    25 MiB, in the order in which that reduction got its gradients. From three ranks on, rounding depends on a
    gradient's place in its bucket, so the first step of an attempt would round unlike the same step of a run that was
    not interrupted. A reduction of zeros before the first step makes every step use the final buckets. Their order is a
    function of the module alone; it suits layers that are defined in the order in which they compute.
    """
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(trained):
        parameter.backward(torch.zeros_like(parameter))
    model.zero_grad(set_to_none=True)
