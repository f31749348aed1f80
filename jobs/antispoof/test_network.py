"""Networks: sizes, memory layout, pooling."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from .losses import CrossEntropy
from .network import Block, DenseNorm, OneClassResNet, SeNet, SeResNet, compute_weighted_statistics


def count_weights(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize(
    ("build", "dims", "published"),
    [
        (partial(SeNet, bottleneck=False), 128, 1.344),
        (partial(SeNet, bottleneck=True), 256, 1.093),
        (partial(SeResNet, layers=[2, 2, 2, 2], dropout=0.3), 256, 11.98),
        (partial(SeResNet, layers=[3, 4, 6, 3], dropout=0.3), 256, 22.16),
    ],
)
def test_networks_have_as_many_weights_as_published(
    build: Callable[[], SeNet | SeResNet], dims: int, published: float
) -> None:
    with torch.device("meta"):
        network, decision = build(), CrossEntropy(dims, counts=(1, 1))
    assert network.dims == dims
    digits = len(str(published).partition(".")[2])
    assert round((count_weights(network) + count_weights(decision)) / 1e6, digits) == published


def test_maps_have_the_published_sizes() -> None:
    assert SeNet(bottleneck=False).compute_maps(torch.randn(1, 257, 400)).shape == (1, 128, 9, 13)
    assert SeResNet(layers=[1, 1, 1, 1], dropout=0).compute_maps(torch.randn(1, 60, 404)).shape == (1, 512, 13)
    assert OneClassResNet()(torch.randn(2, 60, 750)).shape == (2, 256)


def test_channels_last_reaches_every_layer() -> None:
    network = SeNet(bottleneck=True)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch declares no such overload
    is_channels_last = []

    def record_layout(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        is_channels_last.append(out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous())

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | Block):
            layer.register_forward_hook(record_layout)
    network(torch.randn(2, 129, 101))
    assert len(is_channels_last) > 100 and all(is_channels_last)


def test_a_batch_of_one_trains() -> None:
    norm = DenseNorm(4)
    out = norm(torch.ones(1, 4))
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, torch.zeros(4)) and bool(out.isfinite().all())
    SeResNet(layers=[1, 1, 1, 1], dropout=0)(torch.randn(1, 60, 64)).sum().backward()


def test_attentive_statistics_are_weighted_mean_and_deviation() -> None:
    x, weight = torch.randn(2, 5, 30), torch.rand(2, 30).softmax(dim=1)
    found = compute_weighted_statistics(x, weight)
    mean = (x * weight[:, None]).sum(dim=2)
    deviation = ((x - mean[..., None]).square() * weight[:, None]).sum(dim=2).sqrt()
    torch.testing.assert_close(found, torch.cat([mean, deviation], dim=1), rtol=1e-4, atol=1e-5)
