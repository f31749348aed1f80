"""torch's kernels of synchronised BatchNorm, which it has for GPUs alone, on the CPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def use_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.nn.SyncBatchNorm, with the collectives between ranks, run on the CPU."""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")  # of the devices that it accepts
    monkeypatch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda model, module: None)
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        monkeypatch.setattr(torch, kernel.__name__, kernel)


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(_axes(x)), (x.var(_axes(x), correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    shares, total = (counts / counts.sum())[:, None], counts.sum()
    mean_C = (mean * shares).sum(0)
    variance_C = ((invstd**-2 - eps + (mean - mean_C) ** 2) * shares).sum(0)
    running_mean.lerp_(mean_C, momentum)
    running_var.lerp_(variance_C * total / (total - 1), momentum)
    return mean_C, (variance_C + eps).rsqrt()


def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return (x - _spread(mean, x)) * _spread(invstd * weight, x) + _spread(bias, x)


def batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_C, product_C = grad.sum(_axes(x)), (grad * (x - _spread(mean, x))).sum(_axes(x))
    return sum_C, product_C, product_C * invstd, sum_C


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_C: Tensor,
    product_C: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    along = (x - _spread(mean, x)) * _spread(product_C / total * invstd**2, x)
    return (grad - _spread(sum_C / total, x) - along) * _spread(invstd * weight, x)


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.ndim) if axis != 1]


def _spread(values_C: Tensor, x: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (x.ndim - 2))
