"""Deformable attention over several levels, two stages, denoising: what finds tiny objects.

Deformable DETR (arXiv:2010.04159) gives the attention, the two stages and the refinement, RT-DETR (arXiv:2304.08069)
the encoder, DAB-DETR (arXiv:2201.12329) the positions of boxes, DINO (arXiv:2203.03605) the denoising with negatives.
Everything is plain torch. Axes: B pictures, Q queries, N noised objects, M heads, L levels, P points, d numbers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import geometry
from .network import (
    MLP,
    Backbone,
    Detected,
    Noised,
    Outputs,
    box_head,
    class_head,
    grid_positions,
    group_norm,
    inverse_sigmoid,
    sine,
)
from .vanilla import EncoderLayer


class DeformableDETR(nn.Module):
    """The detector for tiny objects.

    Args:
        strides: of the levels, finest first.
        anchor_strides: side of the first guess at an object in each cell, in strides of its level.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        categories: int,
        strides: list[int],
        dims: int,
        heads: int,
        points: int,
        feedforward: int,
        encoder_layers: int,
        decoder_layers: int,
        queries: int,
        dropout: float,
        temperature: float,
        anchor_strides: float,
        denoising: int,
    ) -> None:
        super().__init__()
        self.backbone, self.strides, self.dims, self.queries = backbone, strides, dims, queries
        self.temperature, self.anchor_strides = temperature, anchor_strides
        self.encoder = HybridEncoder(
            [backbone.channels[stride] for stride in strides],
            dims=dims,
            heads=heads,
            feedforward=feedforward,
            layers=encoder_layers,
            dropout=dropout,
            temperature=temperature,
        )
        self.proposal = nn.Sequential(nn.Linear(dims, dims), nn.LayerNorm(dims))
        self.proposal_class, self.proposal_box = class_head(dims, categories), box_head(dims)
        if denoising:
            self.label_embed = nn.Embedding(categories, dims)
        self.box_position = MLP(2 * dims, dims, dims, 2)
        self.decoder = nn.ModuleList(
            _DecoderLayer(dims, heads, feedforward, dropout, levels=len(strides), points=points)
            for _ in range(decoder_layers)
        )
        self.class_embed = nn.ModuleList(class_head(dims, categories) for _ in range(decoder_layers))
        self.bbox_embed = nn.ModuleList(box_head(dims) for _ in range(decoder_layers))

    def forward(self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, noised: Noised | None = None) -> Outputs:
        """Find objects in pictures, and mend the noised ones."""
        size = (x_BCHW.shape[2], x_BCHW.shape[3])
        stages = {4 << number: stage for number, stage in enumerate(self.backbone(x_BCHW))}  # by stride
        levels = [stages[stride] for stride in self.strides]
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        shown = [geometry.picture_mask(affine_B23, image_px_B2, size, grid) for grid in grids]
        levels = self.encoder(levels, shown[-1])
        shown_BS = torch.cat([mask.flatten(1) for mask in shown], dim=1)
        memory_BSd = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1) * shown_BS[..., None]
        proposals, token, boxes = self._first_guesses(memory_BSd, shown_BS, grids, size)
        blocked = None
        if noised is not None:
            blocked = blocked_between(noised, boxes.shape[1])  # a small input has fewer cells than queries
            token = torch.cat([self.label_embed(noised.labels_BN).to(token.dtype), token], dim=1)
            boxes = torch.cat([noised.boxes_BN4, boxes], dim=1)
        found = self._decoded(token, boxes, memory_BSd, grids, blocked)
        if noised is None:
            return Outputs(found, proposals)
        count = noised.labels_BN.shape[1]
        mended = Detected(found.logits_DBQK[:, :, :count], found.boxes_DBQ4[:, :, :count])
        return Outputs(Detected(found.logits_DBQK[:, :, count:], found.boxes_DBQ4[:, :, count:]), proposals, mended)

    def _first_guesses(
        self, memory_BSd: Tensor, shown_BS: Tensor, grids: list[tuple[int, int]], size: tuple[int, int]
    ) -> tuple[Detected, Tensor, Tensor]:
        """Let each cell guess an object; the likeliest guesses become queries and their boxes."""
        token_BSd = self.proposal(memory_BSd)
        logits_BSK = self.proposal_class(token_BSd)
        anchors_S4 = anchors(grids, self.strides, size, side=self.anchor_strides, device=memory_BSd.device)
        likely_BS = logits_BSK.detach().float().amax(dim=-1).masked_fill(~shown_BS, -math.inf)
        best_BQ = likely_BS.topk(min(self.queries, likely_BS.shape[1]), dim=1).indices
        chosen_BQd = _pick(token_BSd, best_BQ)
        boxes_BQ4 = (self.proposal_box(chosen_BQd).float() + inverse_sigmoid(anchors_S4)[best_BQ]).sigmoid()
        proposals = Detected(_pick(logits_BSK, best_BQ)[None], boxes_BQ4[None])
        return proposals, chosen_BQd.detach(), boxes_BQ4.detach()

    def _decoded(
        self, token: Tensor, boxes: Tensor, memory: Tensor, grids: list[tuple[int, int]], blocked: Tensor | None
    ) -> Detected:
        """Refine boxes layer by layer; each starts from what the one before found, without its gradient."""
        logits, found = [], []
        for layer, to_class, to_box in zip(self.decoder, self.class_embed, self.bbox_embed, strict=True):
            place = sine(2 * math.pi * boxes, self.dims // 2, self.temperature).flatten(-2)
            token = layer(token, self.box_position(place), boxes, memory, grids, blocked)
            refined = (to_box(token).float() + inverse_sigmoid(boxes)).sigmoid()
            logits.append(to_class(token))
            found.append(refined)
            boxes = refined.detach()
        return Detected(torch.stack(logits), torch.stack(found))

    def layers(self) -> list[nn.Module]:
        """Return the layers that come several times."""
        return [*self.encoder.attention, *self.decoder]


def _pick(x_BSd: Tensor, index_BQ: Tensor) -> Tensor:
    return x_BSd.gather(1, index_BQ[..., None].expand(-1, -1, x_BSd.shape[2]))


def anchors(
    grids: list[tuple[int, int]], strides: list[int], size: tuple[int, int], *, side: float, device: torch.device
) -> Tensor:
    """Return (S, 4) float32 boxes in centre form, shares of the input: a square of `side` strides in each cell."""
    found = []
    for (h, w), stride in zip(grids, strides, strict=True):
        y, x = torch.meshgrid(
            (torch.arange(h, device=device) + 0.5) / h, (torch.arange(w, device=device) + 0.5) / w, indexing="ij"
        )
        sides = (
            torch.full_like(x, min(0.9, side * stride / size[1])),
            torch.full_like(y, min(0.9, side * stride / size[0])),
        )
        found.append(torch.stack([x, y, *sides], dim=-1).flatten(0, 1))
    return torch.cat(found)


def blocked_between(noised: Noised, queries: int) -> Tensor:
    """Return (B, 1, N + Q, N + Q) bool: what must not be looked at, asking one by looked-at one.

    A noised object tells where the object is, so no query may see one, and none of another group or a stand-in may be
    seen by those of a group; all may see the queries.
    """
    group_N = noised.group_N
    asks = F.pad(group_N, (0, queries), value=-1)
    other_group = asks[:, None] != group_N[None, :]
    blocked = other_group[None] | ~noised.used_BN[:, None, :]
    return F.pad(blocked, (0, queries), value=False)[:, None]


class HybridEncoder(nn.Module):
    """Self-attention on the coarsest level, then convolutions down to the finest and up (RT-DETR, section 4.2)."""

    def __init__(
        self,
        channels: list[int],
        *,
        dims: int,
        heads: int,
        feedforward: int,
        layers: int,
        dropout: float,
        temperature: float,
    ) -> None:
        super().__init__()
        self.dims, self.temperature = dims, temperature
        self.project = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, dims, 1, bias=False), group_norm(dims)) for c in channels
        )
        self.attention = nn.ModuleList(EncoderLayer(dims, heads, feedforward, dropout) for _ in range(layers))
        count = len(channels) - 1
        self.down = nn.ModuleList(_Fuse(dims) for _ in range(count))
        self.up = nn.ModuleList(_Fuse(dims) for _ in range(count))
        self.shrink = nn.ModuleList(_convolved(dims, stride=2) for _ in range(count))

    def forward(self, levels: list[Tensor], shown_Bhw: Tensor) -> list[Tensor]:
        """Return (B, d, h, w) for each level; `shown_Bhw` tells which cells of the coarsest show the picture."""
        levels = [project(level) for project, level in zip(self.project, levels, strict=True)]
        levels[-1] = self._attended(levels[-1], shown_Bhw)
        for i in range(len(levels) - 2, -1, -1):
            wider = F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
            levels[i] = self.down[i](levels[i], wider)
        for i in range(len(levels) - 1):
            levels[i + 1] = self.up[i](levels[i + 1], self.shrink[i](levels[i]))
        return levels

    def _attended(self, level: Tensor, shown_Bhw: Tensor) -> Tensor:
        shown_Bhw = shown_Bhw | ~shown_Bhw.any(dim=(1, 2), keepdim=True)  # a sliver between the centres: look at all
        token, hidden = level.flatten(2).transpose(1, 2), ~shown_Bhw.flatten(1)
        position = grid_positions(shown_Bhw, self.dims, self.temperature)
        for layer in self.attention:
            token = layer(token, hidden, position)
        return token.transpose(1, 2).unflatten(2, level.shape[2:])


def _convolved(dims: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(dims, dims, 3, stride, 1, bias=False), group_norm(dims), nn.SiLU(inplace=True))


class _Fuse(nn.Module):
    """Two convolutions over the sum of two levels, beside it."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.path = nn.Sequential(_convolved(dims), _convolved(dims))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = one + other
        return both + self.path(both)


class _DecoderLayer(nn.Module):
    """Queries look at each other, then at the levels around their boxes."""

    def __init__(self, dims: int, heads: int, feedforward: int, dropout: float, *, levels: int, points: int) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, dropout
        self.asks, self.values, self.out = nn.Linear(dims, 2 * dims), nn.Linear(dims, dims), nn.Linear(dims, dims)
        self.look = DeformableAttention(dims, heads=heads, levels=levels, points=points)
        self.linear1, self.linear2 = nn.Linear(dims, feedforward), nn.Linear(feedforward, dims)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        boxes: Tensor,
        memory: Tensor,
        grids: list[tuple[int, int]],
        blocked: Tensor | None,
    ) -> Tensor:
        q, k = self.asks(token + position).chunk(2, dim=-1)
        seen = F.scaled_dot_product_attention(
            self._split(q),
            self._split(k),
            self._split(self.values(token)),
            attn_mask=None if blocked is None else ~blocked,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        token = self.norm1(token + self.dropout(self.out(seen.transpose(1, 2).flatten(2))))
        token = self.norm2(token + self.dropout(self.look(token + position, boxes, memory, grids)))
        return self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class DeformableAttention(nn.Module):
    """Each head reads P points of each level around the query's box (arXiv:2010.04159, equation 3)."""

    def __init__(self, dims: int, *, heads: int, levels: int, points: int) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(dims, heads * levels * points * 2)
        self.weights = nn.Linear(dims, heads * levels * points)
        self.values, self.out = nn.Linear(dims, dims), nn.Linear(dims, dims)
        for layer in (self.offsets, self.weights):
            nn.init.zeros_(layer.weight)
        nn.init.zeros_(self.weights.bias)
        angle = torch.arange(heads) * (2 * math.pi / heads)
        circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
        circle = circle / circle.abs().amax(dim=-1, keepdim=True)  # on a square about the box's centre
        reach = torch.arange(1, points + 1).view(1, 1, -1, 1)
        with torch.no_grad():
            self.offsets.bias.copy_((circle.view(heads, 1, 1, 2) * reach).expand(-1, levels, -1, -1).flatten())

    def forward(self, query: Tensor, boxes: Tensor, memory: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        """Return (B, Q, d).

        Args:
            query: (B, Q, d).
            boxes: (B, Q, 4) float32 in centre form, shares of the input. An offset of P reaches a box's edge.
            memory: (B, S, d), the levels' cells one after the other, row by row.
        """
        offsets = self.offsets(query).float().unflatten(-1, (self.heads, self.levels, self.points, 2))
        weights = self.weights(query).float().unflatten(-1, (self.heads, -1)).softmax(dim=-1)
        half = boxes[:, :, None, None, None, 2:] / 2
        at = boxes[:, :, None, None, None, :2] + offsets / self.points * half
        weights = weights.unflatten(-1, (self.levels, self.points))
        values = self.values(memory).float().unflatten(-1, (self.heads, -1))  # 8 bits of place would be 1/256 of it
        return self.out(sampled(values, grids, at, weights))


def sampled(values: Tensor, grids: list[tuple[int, int]], at: Tensor, weights: Tensor) -> Tensor:
    """Return (B, Q, M * c): weighted sums of values read bilinearly, zero outside.

    Args:
        values: (B, S, M, c).
        at: (B, Q, M, L, P, 2), x and y in shares of the input.
        weights: (B, Q, M, L, P).
    """
    batch, _, heads, _ = values.shape
    found = values.new_zeros(())
    levels = values.split([h * w for h, w in grids], dim=1)
    for number, (level, (h, w)) in enumerate(zip(levels, grids, strict=True)):
        maps = level.permute(0, 2, 3, 1).reshape(batch * heads, -1, h, w)
        where = (2 * at[:, :, :, number] - 1).transpose(1, 2).flatten(0, 1)  # (B * M, Q, P, 2)
        read = F.grid_sample(maps, where, mode="bilinear", padding_mode="zeros", align_corners=False)
        share = weights[:, :, :, number].transpose(1, 2).flatten(0, 1)[:, None]
        found = found + (read * share).sum(dim=-1)  # (B * M, c, Q)
    return found.unflatten(0, (batch, heads)).flatten(1, 2).transpose(1, 2)
