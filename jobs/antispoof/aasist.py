"""AASIST (Jung et al. 2022, arXiv:2110.01200): a network on the waveform, with attention among bands and among times.

Legend: B utterances, N samples, C channels, F bands, T times, M nodes of a graph, D features of a node.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .filters import build_band_passes

_BANDS = 70
_TAPS = 129
_WIDTHS = (1, 32, 32, 64, 64, 64, 64)
_JOINT = 32  # features of a node of the joint graphs


class Aasist(nn.Module):
    """Takes waveforms as maps of one bin, (B, 1, N) float32, and returns embeddings, (B, 160).

    Fixed band-pass filters and residual blocks give a map of bands and times. Its largest values over time are the
    nodes of a graph of bands, and those over bands the nodes of a graph of times. Two branches join the graphs.

    Args:
        rate_hz: sampling rate, which spaces the filters.
    """

    filter_F1N: Tensor

    def __init__(self, *, rate_hz: int) -> None:
        super().__init__()
        filters = torch.from_numpy(build_band_passes(_BANDS, _TAPS, rate_hz=rate_hz)).float()
        self.register_buffer("filter_F1N", filters[:, None], persistent=False)
        self.stem = nn.Sequential(nn.MaxPool2d(3), nn.BatchNorm2d(1), nn.SELU())
        self.blocks = nn.Sequential(*(ResidualBlock(before, after) for before, after in pairwise(_WIDTHS)))
        width = _WIDTHS[-1]
        self.position_FD = nn.Parameter(torch.randn(_BANDS // 3, width))
        self.band_attention, self.time_attention = GraphAttention(width, width), GraphAttention(width, width)
        self.band_pool, self.time_pool = NodePool(width, 0.5), NodePool(width, 0.7)
        self.branches = nn.ModuleList([Branch(width), Branch(width)])
        self.dims = 5 * _JOINT

    def forward(self, map_BFT: Tensor) -> Tensor:
        map_BCFT = self.compute_maps(map_BFT).abs()
        band_BMD = self.band_pool(self.band_attention(map_BCFT.amax(dim=3).transpose(1, 2) + self.position_FD))
        time_BMD = self.time_pool(self.time_attention(map_BCFT.amax(dim=2).transpose(1, 2)))
        pairs = zip(*(branch(time_BMD, band_BMD) for branch in self.branches), strict=True)
        time_BMD, band_BMD, stack_BD = (torch.maximum(*pair) for pair in pairs)
        largest = [nodes.abs().amax(dim=1) for nodes in (time_BMD, band_BMD)]
        means = [nodes.mean(dim=1) for nodes in (time_BMD, band_BMD)]
        return functional.dropout(torch.cat([*largest, *means, stack_BD], dim=1), 0.5, self.training)

    def compute_maps(self, map_BFT: Tensor) -> Tensor:
        """Return the map of bands and times, (B, 64, 23, T)."""
        band_BFN = functional.conv1d(map_BFT, self.filter_F1N)
        out: Tensor = self.blocks(self.stem(band_BFN.abs().unsqueeze(1)))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions of 2 bands by 3 times, and a maximum over 3 times."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.before = nn.Identity() if channels == 1 else nn.Sequential(nn.BatchNorm2d(channels), nn.SELU())
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, (2, 3), padding=(1, 1)),
            nn.BatchNorm2d(width),
            nn.SELU(),
            nn.Conv2d(width, width, (2, 3), padding=(0, 1)),
        )
        self.shortcut = nn.Identity() if channels == width else nn.Conv2d(channels, width, (1, 3), padding=(0, 1))

    def forward(self, x_BCFT: Tensor) -> Tensor:
        return functional.max_pool2d(self.body(self.before(x_BCFT)) + self.shortcut(x_BCFT), (1, 3))


class GraphAttention(nn.Module):
    """Mixes the nodes of a graph, each connected to all, by attention from products of their features (section 3.1).

    Args:
        kinds: of pairs of nodes, each with weights.
        heat: the softmax's temperature.
    """

    def __init__(self, dims: int, out: int, *, kinds: int = 1, heat: float = 2.0) -> None:
        super().__init__()
        self.heat = heat
        self.pair, self.pair_weight = nn.Linear(dims, out), nn.Parameter(torch.empty(out, kinds))
        self.mixed, self.own = nn.Linear(dims, out), nn.Linear(dims, out)
        self.norm = nn.BatchNorm1d(out)
        nn.init.xavier_normal_(self.pair_weight)

    def forward(self, node_BMD: Tensor) -> Tensor:
        node_BMD = functional.dropout(node_BMD, 0.2, self.training)
        return self.mix(node_BMD, self.rate_pairs(node_BMD).squeeze(3))

    def rate_pairs(self, node_BMD: Tensor) -> Tensor:
        """Return the logit of each pair for each kind, (B, M, M, kinds)."""
        return self.pair(node_BMD[:, :, None] * node_BMD[:, None]).tanh() @ self.pair_weight  # type: ignore[no-any-return]

    def mix(self, node_BMD: Tensor, logit_BMM: Tensor) -> Tensor:
        """Return (B, M, out)."""
        mixed_BMD = self.mixed((logit_BMM / self.heat).softmax(dim=2) @ node_BMD) + self.own(node_BMD)
        return functional.selu(self.norm(mixed_BMD.transpose(1, 2)).transpose(1, 2))


class JointAttention(GraphAttention):
    """Attention among the nodes of two graphs and a stack node, which gathers from all and gives to none (3.2)."""

    def __init__(self, dims: int, out: int) -> None:
        super().__init__(dims, out, kinds=3, heat=100.0)
        self.time_input, self.band_input = nn.Linear(dims, dims), nn.Linear(dims, dims)
        self.stack_pair, self.stack_weight = nn.Linear(dims, out), nn.Parameter(torch.empty(out, 1))
        self.stack_mixed, self.stack_own = nn.Linear(dims, out), nn.Linear(dims, out)
        nn.init.xavier_normal_(self.stack_weight)

    def join(self, time_BMD: Tensor, band_BMD: Tensor, stack_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes of times and of bands, and the stack node."""
        times = time_BMD.shape[1]
        node_BMD = torch.cat([self.time_input(time_BMD), self.band_input(band_BMD)], dim=1)
        node_BMD = functional.dropout(node_BMD, 0.2, self.training)
        is_band_M = torch.arange(node_BMD.shape[1], device=node_BMD.device) >= times
        time_logit, band_logit, cross_logit = self.rate_pairs(node_BMD).unbind(dim=3)
        same_logit = torch.where(is_band_M, band_logit, time_logit)
        mixed_BMD = self.mix(node_BMD, torch.where(is_band_M[:, None] == is_band_M, same_logit, cross_logit))
        share_BM = (self.stack_pair(node_BMD * stack_BD[:, None]).tanh() @ self.stack_weight / self.heat).softmax(dim=1)
        stack_BD = self.stack_mixed((share_BM * node_BMD).sum(dim=1)) + self.stack_own(stack_BD)
        return mixed_BMD[:, :times], mixed_BMD[:, times:], stack_BD


class Branch(nn.Module):
    """Joins the graphs twice; the second time adds to the first."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.stack_1D = nn.Parameter(torch.randn(1, dims))
        self.first, self.second = JointAttention(dims, _JOINT), JointAttention(_JOINT, _JOINT)
        self.time_pool, self.band_pool = NodePool(_JOINT, 0.5), NodePool(_JOINT, 0.5)

    def forward(self, time_BMD: Tensor, band_BMD: Tensor) -> list[Tensor]:
        time_BMD, band_BMD, stack_BD = self.first.join(time_BMD, band_BMD, self.stack_1D.expand(len(time_BMD), -1))
        nodes = (self.time_pool(time_BMD), self.band_pool(band_BMD), stack_BD)
        added = self.second.join(*nodes)
        return [functional.dropout(x + y, 0.2, self.training) for x, y in zip(nodes, added, strict=True)]


class NodePool(nn.Module):
    """Keeps a share of a graph's nodes, those with the largest gates, times their gates."""

    def __init__(self, dims: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.gate = nn.Linear(dims, 1)

    def forward(self, node_BMD: Tensor) -> Tensor:
        gate_BM1 = self.gate(functional.dropout(node_BMD, 0.3, self.training)).sigmoid()
        kept_BM1 = gate_BM1.topk(max(1, int(node_BMD.shape[1] * self.share)), dim=1).indices
        kept_BMD: Tensor = (node_BMD * gate_BM1).gather(1, kept_BM1.expand(-1, -1, node_BMD.shape[2]))
        return kept_BMD
