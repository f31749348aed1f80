"""Dual cross-attention on a vision transformer: what a face picture becomes, on up to three branches.

Zhu, Ke, Li, Liu, Tian and Shan, "Dual cross-attention learning for fine-grained visual categorization and object
re-identification" (CVPR 2022, arXiv:2205.02151), on the ViT of Dosovitskiy et al. (2021, arXiv:2010.11929).

Axes: B pictures, N tokens (class token first), D numbers of a token, H heads, E = D / H, R local queries.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS_AT_ONCE = 256
"""Rows of an attention map that the rollout holds at a time."""


@dataclass(frozen=True)
class Branches:
    """What the network says of each picture; a branch it does not have, or that was not asked for, is None."""

    sa_BD: Tensor  # class token after self-attention
    glca_BD: Tensor | None  # global-local cross-attention
    pwca_BD: Tensor | None  # pair-wise cross-attention: the same picture, distracted by another one


class DualCrossAttention(nn.Module):
    """Self-attention blocks, one global-local block, and the pair-wise path, which has no weights of its own.

    Args:
        image_px: height and width of the pictures, multiples of `patch_px`.
        glca: whether there is a global-local block.
        local_share: of the patches, those the global-local block asks for.
        pwca_layers: last self-attention blocks that the pair-wise path goes through with a partner. Before them both
            paths are one, and cost one.
        drop_path: probability of leaving out the last block for a sample, rising linearly from 0 at the first
            (stochastic depth, arXiv:1603.09382).
        conv_stem: cut patches with small convolutions, not with one as large as a patch.
    """

    def __init__(
        self,
        *,
        image_px: tuple[int, int],
        patch_px: int,
        channels: int,
        dims: int,
        layers: int,
        heads: int,
        glca: bool,
        local_share: float,
        pwca_layers: int,
        drop_path: float = 0.0,
        conv_stem: bool = False,
    ) -> None:
        super().__init__()
        self.grid = (image_px[0] // patch_px, image_px[1] // patch_px)
        self.patch_embed = ConvStem(channels, dims, patch_px) if conv_stem else PatchEmbed(channels, dims, patch_px)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        self.pos_embed = nn.Parameter(sine_positions(self.grid, dims))
        self.blocks = nn.ModuleList(Block(dims, heads, drop_path * i / max(1, layers - 1)) for i in range(layers))
        self.norm = nn.LayerNorm(dims, eps=1e-6)
        self.glca = LocalBlock(dims, heads) if glca else None
        self.local_queries = max(1, round(local_share * math.prod(self.grid)))
        self.pwca_layers = pwca_layers
        self.apply(_initialise)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, image_BCHW: Tensor, partner_B: Tensor | None = None) -> Branches:
        """Encode each picture once.

        Args:
            partner_B: for each picture the row of the one that distracts it; None leaves the pair-wise path out.
        """
        x_BND = self.patch_embed(image_BCHW)
        x_BND = torch.cat([self.cls_token.expand(len(x_BND), -1, -1), x_BND], dim=1) + self.pos_embed
        fork = len(self.blocks) - (self.pwca_layers if partner_B is not None else 0)
        paired_BND: Tensor | None = None
        attended: list[tuple[Tensor, Tensor]] = []
        for depth, block in enumerate(self.blocks):
            if depth == fork:
                paired_BND = x_BND
            if paired_BND is not None:
                paired_BND = block(paired_BND, partner_B)[0]
            x_BND, q_BHNE, k_BHNE = block(x_BND)
            attended.append((q_BHNE.detach(), k_BHNE.detach()))
        return Branches(
            sa_BD=self.norm(x_BND)[:, 0],
            glca_BD=None if self.glca is None else self._local(x_BND, attended),
            pwca_BD=None if paired_BND is None else self.norm(paired_BND)[:, 0],
        )

    def _local(self, x_BND: Tensor, attended: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        assert self.glca is not None
        seen_BN = rollout(attended)
        chosen_BR = seen_BN[:, 1:].topk(self.local_queries, dim=1).indices + 1
        local: Tensor = self.glca(x_BND, chosen_BR)
        return local


class PatchEmbed(nn.Module):
    """Pictures (B, C, H, W) to one token per patch, row by row."""

    def __init__(self, channels: int, dims: int, patch_px: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dims, patch_px, stride=patch_px)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        tokens: Tensor = self.proj(image_BCHW).flatten(2).transpose(1, 2)
        return tokens


class ConvStem(nn.Module):
    """The same by convolutions that halve the picture, each with twice the channels (arXiv:2106.14881).

    It finds a spot wherever in a patch it lies, which one large convolution has to learn place by place.
    """

    def __init__(self, channels: int, dims: int, patch_px: int) -> None:
        super().__init__()
        halvings = patch_px.bit_length() - 1
        widths = [channels] + [max(8, dims >> (halvings - i)) for i in range(halvings)]
        layers: list[nn.Module] = []
        for c_in, c_out in itertools.pairwise(widths):
            layers += [nn.Conv2d(c_in, c_out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
        self.convs = nn.Sequential(*layers)
        self.proj = nn.Conv2d(widths[-1], dims, 1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        tokens: Tensor = self.proj(self.convs(image_BCHW)).flatten(2).transpose(1, 2)
        return tokens


class Block(nn.Module):
    """Pre-norm transformer block. With a partner, keys and values are those of both pictures: one softmax over 2N."""

    def __init__(self, dims: int, heads: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims, eps=1e-6)
        self.attn = Attention(dims, heads)
        self.norm2 = nn.LayerNorm(dims, eps=1e-6)
        self.mlp = Mlp(dims)
        self.drop_path = drop_path

    def forward(self, x_BND: Tensor, partner_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (B, N, D), and the queries and keys (B, H, N, E) behind them.

        PWCA, equation 5 of the paper: softmax(Q1 [K1; K2]^T / sqrt(E)) [V1; V2]. The partner is another row of the
        same batch at the same depth, so its keys and values are there already.
        """
        q, k, v = self.attn.project(self.norm1(x_BND))
        keys, values = k, v
        if partner_B is not None:
            keys, values = torch.cat([k, k[partner_B]], dim=2), torch.cat([v, v[partner_B]], dim=2)
        x_BND = x_BND + self._kept(self.attn.attend(q, keys, values))
        return x_BND + self._kept(self.mlp(self.norm2(x_BND))), q, k

    def _kept(self, change_BND: Tensor) -> Tensor:
        """Leave out the change of some samples, and scale the others so that the mean stays."""
        if not self.training or self.drop_path == 0:
            return change_BND
        kept_B11 = torch.rand(len(change_BND), 1, 1, device=change_BND.device) >= self.drop_path
        return change_BND * (kept_B11 / (1 - self.drop_path)).to(change_BND.dtype)


class LocalBlock(nn.Module):
    """GLCA: the patches that mattered most to the class token ask all tokens again, with weights of their own.

    The class token is among those that ask, and what is returned is half its answer and half the mean of the others.
    Read from a class token that did not ask, the block would get no gradient at all; read from the class token alone,
    it would not matter which patches asked.
    """

    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims, eps=1e-6)
        self.attn = Attention(dims, heads)
        self.norm2 = nn.LayerNorm(dims, eps=1e-6)
        self.mlp = Mlp(dims)
        self.norm = nn.LayerNorm(dims, eps=1e-6)

    def forward(self, x_BND: Tensor, chosen_BR: Tensor) -> Tensor:
        """Return (B, D).

        Args:
            chosen_BR: token numbers of the local queries, 1 .. N-1.
        """
        asking_BQ = functional.pad(chosen_BR, (1, 0))  # token 0 is the class token
        q_BHNE, k_BHNE, v_BHNE = self.attn.project(self.norm1(x_BND))
        heads, size = q_BHNE.shape[1], q_BHNE.shape[3]
        local_BHQE = q_BHNE.gather(2, asking_BQ[:, None, :, None].expand(-1, heads, -1, size))
        z_BQD = x_BND.gather(1, asking_BQ[..., None].expand(-1, -1, x_BND.shape[2]))
        z_BQD = z_BQD + self.attn.attend(local_BHQE, k_BHNE, v_BHNE)
        z_BQD = self.norm(z_BQD + self.mlp(self.norm2(z_BQD)))
        answer: Tensor = (z_BQD[:, 0] + z_BQD[:, 1:].mean(dim=1)) / 2
        return answer


class Attention(nn.Module):
    """The projections of multi-head attention, and attention itself."""

    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dims, 3 * dims)
        self.proj = nn.Linear(dims, dims)

    def project(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, N, E)."""
        batch, tokens, _ = x_BND.shape
        q, k, v = self.qkv(x_BND).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def attend(self, q_BHQE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor) -> Tensor:
        """Return (B, Q, D)."""
        mixed_BHQE = functional.scaled_dot_product_attention(q_BHQE, k_BHNE, v_BHNE)
        answer: Tensor = self.proj(mixed_BHQE.transpose(1, 2).flatten(2))
        return answer


class Mlp(nn.Sequential):
    """Two layers, four times as wide between."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dims, 4 * dims)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * dims, dims)


@torch.no_grad()
def rollout(attended: Sequence[tuple[Tensor, Tensor]], rows_at_once: int = ROWS_AT_ONCE) -> Tensor:
    """Return how much each token reached the class token, (B, N) float32: its row of the attention rollout.

    The rollout is the product of (S + 1) / 2 over the layers, last one first, S being the mean over heads
    (Abnar and Zuidema 2020, arXiv:2005.00928). Only one row of it is needed, so a row vector goes through the layers
    from the last to the first, and each S is computed again from queries and keys, some rows at a time: no map of
    N x N is kept, and the main path may use fused attention, which never has one.

    Args:
        attended: queries and keys (B, H, N, E) of each layer, first one first.
    """
    q_BHNE = attended[-1][0]
    batch, _, tokens, size = q_BHNE.shape
    row_BN = torch.zeros(batch, tokens, device=q_BHNE.device)
    row_BN[:, 0] = 1
    with torch.autocast(q_BHNE.device.type, enabled=False):
        for q_BHNE, k_BHNE in reversed(attended):
            passed_BN = torch.zeros_like(row_BN)
            keys_BHEN = k_BHNE.float().transpose(2, 3) / math.sqrt(size)
            for start in range(0, tokens, rows_at_once):
                rows = slice(start, start + rows_at_once)
                map_BRN = (q_BHNE[:, :, rows].float() @ keys_BHEN).softmax(dim=-1).mean(dim=1)
                passed_BN += (row_BN[:, None, rows] @ map_BRN)[:, 0]
            row_BN = (row_BN + passed_BN) / 2
    return row_BN


def random_partners(count: int, device: torch.device) -> Tensor:
    """Return (count,) rows: a random permutation that leaves no row in its place, except where there is only one."""
    order = torch.randperm(count, device=device)
    partner_B = torch.empty_like(order)
    partner_B[order] = order.roll(1)
    return partner_B


def twin_partners(person_B: Tensor, family_B: Tensor, *, share: float) -> Tensor:
    """Return (B,) rows: with probability `share` a random picture of one's twin, if there is any; else a random one.

    The pairs of AHAN's twin-aware attention. Rows are not a permutation: a picture may distract several others.
    """
    count, device = len(person_B), person_B.device
    is_twin_BB = (family_B[:, None] == family_B) & (person_B[:, None] != person_B)
    luck_BB = torch.rand(count, count, device=device) * is_twin_BB
    wants_B = (torch.rand(count, device=device) < share) & is_twin_BB.any(dim=1)
    return torch.where(wants_B, luck_BB.argmax(dim=1), random_partners(count, device))


def sine_positions(grid: tuple[int, int], dims: int) -> Tensor:
    """Return (1, 1 + H * W, D): sines and cosines of row and column, zero for the class token (arXiv:2104.02057).

    Learning where things are from noise takes more pictures than a small set of faces has.
    """
    frequency = 10000 ** -(torch.arange(dims // 4) / max(1, dims // 4))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = [place.reshape(-1, 1) * frequency for place in (rows, columns)]
    waves = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
    return functional.pad(waves, (0, dims - waves.shape[1], 1, 0))[None]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
