"""Networks: sizes, memory layout, pooling."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from .aasist import Aasist
from .filters import build_band_passes
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


def test_aasist_has_the_published_size_and_every_parameter_learns() -> None:
    torch.manual_seed(0)
    network, decision = Aasist(rate_hz=16000), CrossEntropy(160, counts=(1, 1))
    assert count_weights(network) + count_weights(decision) == 297_866
    with torch.no_grad():
        assert network.compute_maps(torch.randn(1, 1, 64600)).shape == (1, 64, 23, 29)
    embedding_BD = network(torch.randn(3, 1, 8000))
    assert embedding_BD.shape == (3, network.dims)
    decision(embedding_BD, torch.tensor([0, 1, 1])).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in network.parameters())


def test_the_band_passes_of_aasist_cover_all_frequencies_once() -> None:
    response = np.fft.rfft(build_band_passes(70, 129, rate_hz=16000), 1024, axis=1)
    total = np.abs((response * np.exp(2j * np.pi * np.arange(513) * 64 / 1024)).sum(axis=0))
    np.testing.assert_allclose(total[8:-8], 1.0, atol=0.01)
    peaks_hz = np.abs(response).argmax(axis=1) * 16000 / 1024
    assert (np.diff(peaks_hz) >= 0).all() and peaks_hz[0] < 50 and peaks_hz[-1] > 7500


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
