"""The networks, which turn feature maps into embeddings: three SE-ResNets, and the ResNet-18 of one-class learning.

Legend: B utterances, C channels, F bins, T frames, D embedding dimensions. Every network takes (B, F, T) float32 and
returns (B, D); the classification head belongs to the loss (`losses.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class SeNet(nn.Module):
    """SENet34 and SENet50 of ASSERT (Lai et al. 2019, arXiv:1904.01120, table 2): a quarter of the usual width.

    Args:
        bottleneck: SENet50's blocks, 1x1 - 3x3 - 1x1 with twice the width at the end, instead of two 3x3.
    """

    def __init__(self, *, bottleneck: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(build_conv(1, 16, 7, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.dims = build_stages(16, layers=(3, 4, 6, 3), bottleneck=bottleneck)
        initialise(self)

    def compute_maps(self, map_BFT: Tensor) -> Tensor:
        """Return the maps before pooling, (B, C, F', T')."""
        out: Tensor = self.blocks(self.stem(map_BFT.unsqueeze(1)))
        return out

    def forward(self, map_BFT: Tensor) -> Tensor:
        return self.compute_maps(map_BFT).mean(dim=(2, 3))


class SeResNet(nn.Module):
    """The reference SE-ResNet: full width, attentive statistics over time, two dense layers to the embedding.

    Args:
        layers: blocks of each stage: [2, 2, 2, 2] or [3, 4, 6, 3].
        dropout: before every dense layer except the first.
    """

    def __init__(self, *, layers: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(build_conv(1, 64, 7, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks, channels = build_stages(64, layers=layers, bottleneck=False)
        self.pool = AttentiveStatistics(channels)
        self.dense = nn.Sequential(
            nn.Linear(2 * channels, 512),
            DenseNorm(512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, 256),
            DenseNorm(256),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.dims = 256
        initialise(self)

    def forward(self, map_BFT: Tensor) -> Tensor:
        out: Tensor = self.dense(self.pool(self.compute_maps(map_BFT)))
        return out

    def compute_maps(self, map_BFT: Tensor) -> Tensor:
        """Return the maps averaged over frequency, (B, C, T')."""
        return self.blocks(self.stem(map_BFT.unsqueeze(1))).mean(dim=2)  # type: ignore[no-any-return]


class OneClassResNet(nn.Module):
    """ResNet-18 of AIR (Zhang, Jiang and Duan 2021, arXiv:2010.13995): pre-activation blocks, attention over time.

    Takes 60 bins, which its kernels reduce to one.
    """

    BINS = 60

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, (9, 3), stride=(3, 1), padding=(1, 1), bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        channels = 16
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [PreActivationBlock(channels, width, stride), PreActivationBlock(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(nn.Conv2d(512, 256, 3, padding=(0, 1), bias=False), nn.BatchNorm2d(256), nn.ReLU())
        self.attention = nn.Parameter(torch.empty(256))
        self.embedding = nn.Linear(512, 256)
        self.dims = 256
        initialise(self)
        nn.init.normal_(self.attention, std=256**-0.5)

    def forward(self, map_BFT: Tensor) -> Tensor:
        assert map_BFT.shape[1] == self.BINS, map_BFT.shape
        x_BCT = self.last(self.blocks(self.stem(map_BFT.unsqueeze(1)))).squeeze(2)
        with torch.autocast(x_BCT.device.type, enabled=False):
            weight_BT = torch.einsum("bct,c->bt", x_BCT.float(), self.attention.float()).tanh().softmax(dim=1)
            pooled = compute_weighted_statistics(x_BCT.float(), weight_BT)
        out: Tensor = self.embedding(pooled)
        return out


class SqueezeExcitation(nn.Module):
    """Scales channels by gates computed from all of them (Hu et al. 2018, arXiv:1709.01507); reduction 16, no bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, channels // 16, bias=False)
        self.up = nn.Linear(channels // 16, channels, bias=False)

    def forward(self, x_BCFT: Tensor) -> Tensor:
        scale_BC = self.up(functional.relu(self.down(x_BCFT.mean(dim=(2, 3))))).sigmoid()
        scaled: Tensor = x_BCFT * scale_BC[:, :, None, None]
        return scaled


class Block(nn.Module):
    """A residual block with squeeze-and-excitation after its last normalisation, before the sum."""

    def __init__(self, channels: int, width: int, *, out: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        convolutions = [(channels, width, 3, stride), (width, out, 3, 1)]
        if bottleneck:
            convolutions = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        body: list[nn.Module] = []
        for before, after, size, step in convolutions:
            body += [build_conv(before, after, size, stride=step), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*body[:-1], SqueezeExcitation(out))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(build_conv(channels, out, 1, stride=stride), nn.BatchNorm2d(out))

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return functional.relu(self.body(x_BCFT) + self.shortcut(x_BCFT))


class PreActivationBlock(nn.Module):
    """A residual block with normalisation before each convolution (He et al. 2016, arXiv:1603.05027)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.body = nn.Sequential(
            build_conv(channels, width, 3, stride=stride), nn.BatchNorm2d(width), nn.ReLU(), build_conv(width, width, 3)
        )
        changes = stride != 1 or channels != width
        self.shortcut = build_conv(channels, width, 1, stride=stride) if changes else None

    def forward(self, x_BCFT: Tensor) -> Tensor:
        active = self.before(x_BCFT)
        shortcut = x_BCFT if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.body(active) + shortcut
        return out


class DenseNorm(nn.BatchNorm1d):
    """Batch normalisation of vectors; a batch of one, which a rank may get, is normalised as in evaluation."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.training and len(x_BD) == 1:
            return functional.batch_norm(
                x_BD, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(x_BD)


class AttentiveStatistics(nn.Module):
    """Mean and standard deviation over time, with frame weights from a small network (Okabe et al. 2018).

    (B, C, T) to (B, 2 C), in float32: a variance is the difference of two numbers that are close.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Conv1d(channels, 128, 1), nn.ReLU(), nn.Conv1d(128, 1, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        with torch.autocast(x_BCT.device.type, enabled=False):
            x_BCT = x_BCT.float()
            return compute_weighted_statistics(x_BCT, self.attention(x_BCT).squeeze(1).softmax(dim=1))


def compute_weighted_statistics(x_BCT: Tensor, weight_BT: Tensor) -> Tensor:
    """Return the weighted mean and standard deviation, (B, 2 C); weights sum to 1 over time."""
    mean_BC = torch.einsum("bct,bt->bc", x_BCT, weight_BT)
    square_BC = torch.einsum("bct,bt->bc", x_BCT.square(), weight_BT)
    return torch.cat([mean_BC, (square_BC - mean_BC.square()).clamp(min=1e-12).sqrt()], dim=1)


def build_stages(width: int, *, layers: Sequence[int], bottleneck: bool) -> tuple[nn.Sequential, int]:
    """Return the blocks of all stages and their output channels; every stage after the first halves the map and
    doubles the width. The stem's channels are the first stage's width."""
    blocks: list[nn.Module] = []
    channels = width
    for stage, count in enumerate(layers):
        for i in range(count):
            stride, out = 2 if stage > 0 and i == 0 else 1, width * (2 if bottleneck else 1)
            blocks.append(Block(channels, width, out=out, stride=stride, bottleneck=bottleneck))
            channels = out
        width *= 2
    return nn.Sequential(*blocks), channels


def build_conv(channels: int, out: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Return a square convolution without bias; at stride 1 it keeps the map's size."""
    return nn.Conv2d(channels, out, size, stride=stride, padding=size // 2, bias=False)


def initialise(network: nn.Module) -> None:
    """Initialise convolutions by Kaiming's rule (fan-out), dense layers by Xavier's, and biases to 0."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv1d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
        if isinstance(layer, nn.Linear | nn.Conv1d) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
