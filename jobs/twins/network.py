"""Dual cross-attention on a vision transformer: encodes a face image on up to three branches.

Zhu, Ke, Li, Liu, Tian and Shan, "Dual cross-attention learning for fine-grained visual categorization and object
re-identification" (CVPR 2022, arXiv:2205.02151), on the ViT of Dosovitskiy et al. (2021, arXiv:2010.11929).

Axes: B images, N tokens (class token first), D token width, H heads, E = D / H, R local queries, Q = R + 1.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelSettings

ROWS_AT_ONCE = 256
"""Rows of an attention map that the rollout keeps in memory at a time."""


@dataclass(frozen=True)
class BranchTokens:
    """One output token per image and branch; None for a branch that does not exist or was not requested."""

    sa_BD: Tensor  # class token after self-attention
    glca_BD: Tensor | None  # global-local cross-attention
    pwca_BD: Tensor | None  # pair-wise cross-attention: the same image with a distractor


class DualCrossAttention(nn.Module):
    """Self-attention blocks, one global-local block, and the pair-wise path, which shares the blocks' weights.

    The blocks before the last `pwca_layers` run once for both paths. Blocks are skipped for a sample with a
    probability that rises linearly from 0 at the first (stochastic depth, arXiv:1603.09382).

    Args:
        image_px: height and width of the images, multiples of `patch_px`.
    """

    def __init__(self, model: ModelSettings, *, image_px: tuple[int, int], channels: int) -> None:
        super().__init__()
        dims, layers, heads = model.dims, model.layers, model.heads
        self.grid = (image_px[0] // model.patch_px, image_px[1] // model.patch_px)
        self.patch_embed = (ConvStem if model.stem == "conv" else PatchEmbed)(channels, dims, model.patch_px)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        self.pos_embed = nn.Parameter(build_sine_positions(self.grid, dims))
        self.blocks = nn.ModuleList(Block(dims, heads, model.drop_path * i / max(1, layers - 1)) for i in range(layers))
        self.norm = nn.LayerNorm(dims, eps=1e-6)
        self.glca = GlobalLocalBlock(dims, heads) if model.glca else None
        self.local_queries = max(1, round(model.local_share * math.prod(self.grid)))
        self.pwca_layers = model.pwca_layers
        self.apply(_initialise)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, image_BCHW: Tensor, partner_B: Tensor | None = None) -> BranchTokens:
        """Encode each image once.

        Args:
            partner_B: the row of each image's distractor; None skips the pair-wise path.
        """
        x_BND = self._embed(image_BCHW)
        fork = len(self.blocks) - (self.pwca_layers if partner_B is not None else 0)
        paired_BND: Tensor | None = None
        queries_keys: list[tuple[Tensor, Tensor]] = []
        for depth, block in enumerate(self.blocks):
            if depth == fork:
                paired_BND = x_BND
            if paired_BND is not None:
                paired_BND = block(paired_BND, partner_B)[0]
            x_BND, q_BHNE, k_BHNE = block(x_BND)
            queries_keys.append((q_BHNE.detach(), k_BHNE.detach()))
        sa_BD = self.norm(x_BND)[:, 0]
        local_BD: Tensor | None = None
        if self.glca is not None:
            local_ids_BR = compute_rollout(queries_keys)[:, 1:].topk(self.local_queries, dim=1).indices + 1
            local_BD = self.glca(x_BND, local_ids_BR)
        pwca_BD = None if paired_BND is None else self.norm(paired_BND)[:, 0]
        return BranchTokens(sa_BD, local_BD, pwca_BD)

    def encode_patches(self, image_BCHW: Tensor) -> Tensor:
        """Return the patches after the self-attention blocks, (B, N - 1, D): what `objective=image` predicts from."""
        x_BND = self._embed(image_BCHW)
        for block in self.blocks:
            x_BND = block(x_BND)[0]
        patches_BND: Tensor = self.norm(x_BND)[:, 1:]
        return patches_BND

    def _embed(self, image_BCHW: Tensor) -> Tensor:
        x_BND = self.patch_embed(image_BCHW)
        return torch.cat([self.cls_token.expand(x_BND.shape[0], -1, -1), x_BND], dim=1) + self.pos_embed


class PatchEmbed(nn.Module):
    """Embeds images (B, C, H, W) as one token per patch, in row-major order."""

    def __init__(self, channels: int, dims: int, patch_px: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dims, patch_px, stride=patch_px)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        tokens: Tensor = self.proj(image_BCHW).flatten(2).transpose(1, 2)
        return tokens


class ConvStem(nn.Module):
    """Embeds patches with convolutions that halve the image and double the channels (arXiv:2106.14881).

    It detects a feature anywhere in a patch; one large convolution has to learn each position separately.
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
    """Pre-norm transformer block. With a partner, keys and values come from both images: one softmax over 2N."""

    def __init__(self, dims: int, heads: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims, eps=1e-6)
        self.attn = Attention(dims, heads)
        self.norm2 = nn.LayerNorm(dims, eps=1e-6)
        self.mlp = Mlp(dims)
        self.drop_path = drop_path

    def forward(self, x_BND: Tensor, partner_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens (B, N, D), and the queries and keys (B, H, N, E) used for them.

        PWCA, equation 5 of the paper: softmax(Q1 [K1; K2]^T / sqrt(E)) [V1; V2]. The partner is another row of the
        same batch at the same depth, so its keys and values are already computed.
        """
        q, k, v = self.attn.project(self.norm1(x_BND))
        keys, values = k, v
        if partner_B is not None:
            keys, values = torch.cat([k, k[partner_B]], dim=2), torch.cat([v, v[partner_B]], dim=2)
        x_BND = x_BND + self._apply_drop_path(self.attn.attend(q, keys, values))
        return x_BND + self._apply_drop_path(self.mlp(self.norm2(x_BND))), q, k

    def _apply_drop_path(self, change_BND: Tensor) -> Tensor:
        """Drop the residual update of some samples, and scale the others to keep the expected value."""
        if not self.training or self.drop_path == 0:
            return change_BND
        keep_B11 = torch.rand(len(change_BND), 1, 1, device=change_BND.device) >= self.drop_path
        return change_BND * (keep_B11 / (1 - self.drop_path)).to(change_BND.dtype)


class GlobalLocalBlock(nn.Module):
    """GLCA: the patches that mattered most to the class token attend to all tokens again, with separate weights.

    The class token is also a query; the output is the mean of its result and of the average over the patch queries.
    If the class token were no query, its output would give this block no gradient; if it were the only output, the
    choice of patches would not matter.
    """

    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims, eps=1e-6)
        self.attn = Attention(dims, heads)
        self.norm2 = nn.LayerNorm(dims, eps=1e-6)
        self.mlp = Mlp(dims)
        self.norm = nn.LayerNorm(dims, eps=1e-6)

    def forward(self, x_BND: Tensor, local_ids_BR: Tensor) -> Tensor:
        """Return (B, D).

        Args:
            local_ids_BR: token indices of the local queries, 1 .. N-1.
        """
        query_ids_BQ = functional.pad(local_ids_BR, (1, 0))  # token 0 is the class token
        q_BHNE, k_BHNE, v_BHNE = self.attn.project(self.norm1(x_BND))
        heads, size = q_BHNE.shape[1], q_BHNE.shape[3]
        local_BHQE = q_BHNE.gather(2, query_ids_BQ[:, None, :, None].expand(-1, heads, -1, size))
        z_BQD = x_BND.gather(1, query_ids_BQ[..., None].expand(-1, -1, x_BND.shape[2]))
        z_BQD = z_BQD + self.attn.attend(local_BHQE, k_BHNE, v_BHNE)
        z_BQD = self.norm(z_BQD + self.mlp(self.norm2(z_BQD)))
        out: Tensor = (z_BQD[:, 0] + z_BQD[:, 1:].mean(dim=1)) / 2
        return out


class Attention(nn.Module):
    """Multi-head attention, with projection and attention as separate calls."""

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
        attn_out_BHQE = functional.scaled_dot_product_attention(q_BHQE, k_BHNE, v_BHNE)
        out: Tensor = self.proj(attn_out_BHQE.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Sequential):
    """Two linear layers with a hidden width of 4 * dims."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dims, 4 * dims)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * dims, dims)


@torch.no_grad()
def compute_rollout(queries_keys: Sequence[tuple[Tensor, Tensor]], rows_at_once: int = ROWS_AT_ONCE) -> Tensor:
    """Return how much each token contributed to the class token, (B, N) float32: its row of the attention rollout.

    The rollout is the product of (S + 1) / 2 over the layers, last layer first, where S is the attention map averaged
    over heads (Abnar and Zuidema 2020, arXiv:2005.00928). Only one row of it is needed, so a row vector is multiplied
    through the layers from last to first. Each S is recomputed from queries and keys, some rows at a time: no N x N
    map is stored, and the main path can use fused attention, which never materialises one.

    Args:
        queries_keys: queries and keys (B, H, N, E) of each layer, first layer first.
    """
    q_BHNE = queries_keys[-1][0]
    batch, _, tokens, size = q_BHNE.shape
    row_BN = torch.zeros(batch, tokens, device=q_BHNE.device)
    row_BN[:, 0] = 1
    with torch.autocast(q_BHNE.device.type, enabled=False):
        for q_BHNE, k_BHNE in reversed(queries_keys):
            product_BN = torch.zeros_like(row_BN)
            keys_BHEN = k_BHNE.float().transpose(2, 3) / math.sqrt(size)
            for start in range(0, tokens, rows_at_once):
                rows = slice(start, start + rows_at_once)
                map_BRN = (q_BHNE[:, :, rows].float() @ keys_BHEN).softmax(dim=-1).mean(dim=1)
                product_BN += (row_BN[:, None, rows] @ map_BRN)[:, 0]
            row_BN = (row_BN + product_BN) / 2
    return row_BN


def draw_random_partners(count: int, device: torch.device) -> Tensor:
    """Return (count,) row indices: a random permutation without fixed points (unless count is 1)."""
    order = torch.randperm(count, device=device)
    partner_B = torch.empty_like(order)
    partner_B[order] = order.roll(1)
    return partner_B


def draw_twin_partners(person_B: Tensor, family_B: Tensor, *, share: float) -> Tensor:
    """Return (B,) row indices: with probability `share` a random image of the twin, if there is one; else any image.

    These are the pairs of AHAN's twin-aware attention. The result is no permutation: an image may distract several.
    """
    count, device = len(person_B), person_B.device
    is_twin_BB = (family_B[:, None] == family_B) & (person_B[:, None] != person_B)
    priority_BB = torch.rand(count, count, device=device) * is_twin_BB
    use_twin_B = (torch.rand(count, device=device) < share) & is_twin_BB.any(dim=1)
    return torch.where(use_twin_B, priority_BB.argmax(dim=1), draw_random_partners(count, device))


def build_sine_positions(grid: tuple[int, int], dims: int) -> Tensor:
    """Return (1, 1 + H * W, D): sines and cosines of row and column, zero for the class token (arXiv:2104.02057).

    Learning positions from random initial values takes more images than a small data set of faces has.
    """
    frequency = 10000 ** -(torch.arange(dims // 4) / max(1, dims // 4))
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = [coordinate.reshape(-1, 1) * frequency for coordinate in (rows, columns)]
    waves = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
    return functional.pad(waves, (0, dims - waves.shape[1], 1, 0))[None]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
