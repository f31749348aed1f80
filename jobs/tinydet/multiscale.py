"""The detector for tiny objects: deformable attention over several levels, two stages, denoising.

The attention, the two stages and the refinement are from Deformable DETR (arXiv:2010.04159), the encoder from RT-DETR
(arXiv:2304.08069), the encoding of boxes from DAB-DETR (arXiv:2201.12329), the denoising with negatives from DINO
(arXiv:2203.03605). Everything is plain torch. Axes: B images, Q queries, N denoising queries, M heads, L levels,
P points, S cells of all levels, d the width of a token.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.train import precision

from . import geometry
from .config import ModelSettings
from .exact import ExactLinear
from .network import (
    MLP,
    Backbone,
    DenoisingQueries,
    Outputs,
    Predictions,
    encode_grid_positions,
    inverse_sigmoid,
    make_box_head,
    make_class_head,
    make_group_norm,
    sine,
)
from .vanilla import EncoderLayer

Grids = list[tuple[int, int]]
"""Height and width of each level, in cells."""


class DeformableDETR(nn.Module):
    """Deformable DETR with a hybrid encoder and contrastive denoising."""

    def __init__(self, backbone: Backbone, model: ModelSettings, *, categories: int, temperature: float) -> None:
        super().__init__()
        dims, layers = model.dims, range(model.decoder_layers)
        self.backbone, self.strides, self.dims, self.queries = backbone, model.strides, dims, model.queries
        self.temperature, self.anchor_strides = temperature, model.anchor_strides
        self.encoder = HybridEncoder([backbone.channels[stride] for stride in model.strides], model, temperature)
        self.proposal = nn.Sequential(nn.Linear(dims, dims), nn.LayerNorm(dims))
        self.proposal_class, self.proposal_box = make_class_head(dims, categories), make_box_head(dims)
        if model.denoising:
            self.label_embed = nn.Embedding(categories, dims)
        self.box_position = MLP(2 * dims, dims, dims, 2)
        self.decoder = nn.ModuleList(_DecoderLayer(model) for _ in layers)
        self.class_embed = nn.ModuleList(make_class_head(dims, categories) for _ in layers)
        self.bbox_embed = nn.ModuleList(make_box_head(dims) for _ in layers)

    def forward(
        self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, denoising_queries: DenoisingQueries | None = None
    ) -> Outputs:
        """Find objects in images, and denoise the denoising queries."""
        size = (x_BCHW.shape[2], x_BCHW.shape[3])
        stages = {4 << number: stage for number, stage in enumerate(self.backbone(x_BCHW))}  # by stride
        levels = [stages[stride] for stride in self.strides]
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        masks = [geometry.make_image_mask(affine_B23, image_px_B2, size, grid) for grid in grids]
        levels = self.encoder(levels, masks[-1])
        image_BS = torch.cat([mask.flatten(1) for mask in masks], dim=1)
        memory_BSd = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1) * image_BS[..., None]
        proposals, token, boxes = self._propose(memory_BSd, image_BS, grids, size)
        blocked = None
        if denoising_queries is not None:
            blocked = make_blocked_mask(denoising_queries, boxes.shape[1])  # a small input has fewer cells than queries
            token = torch.cat([self.label_embed(denoising_queries.labels_BN).to(token.dtype), token], dim=1)
            boxes = torch.cat([denoising_queries.boxes_BN4, boxes], dim=1)
        decoded = self._decode(token, boxes, memory_BSd, grids, blocked)
        if denoising_queries is None:
            return Outputs(decoded, proposals)
        count = denoising_queries.labels_BN.shape[1]
        denoised = Predictions(decoded.logits_DBQK[:, :, :count], decoded.boxes_DBQ4[:, :, :count])
        return Outputs(
            Predictions(decoded.logits_DBQK[:, :, count:], decoded.boxes_DBQ4[:, :, count:]), proposals, denoised
        )

    def _propose(
        self, memory_BSd: Tensor, image_BS: Tensor, grids: Grids, size: tuple[int, int]
    ) -> tuple[Predictions, Tensor, Tensor]:
        """Score an anchor in each cell; the best become queries with their refined boxes."""
        token_BSd = self.proposal(memory_BSd)
        logits_BSK = self.proposal_class(token_BSd)
        anchors_S4 = make_anchors(grids, self.strides, size, side=self.anchor_strides, device=memory_BSd.device)
        score_BS = logits_BSK.detach().float().amax(dim=-1).masked_fill(~image_BS, -math.inf)
        best_BQ = score_BS.topk(min(self.queries, score_BS.shape[1]), dim=1).indices
        chosen_BQd = _gather_tokens(token_BSd, best_BQ)
        boxes_BQ4 = (self.proposal_box(chosen_BQd) + inverse_sigmoid(anchors_S4)[best_BQ]).sigmoid()
        proposals = Predictions(_gather_tokens(logits_BSK, best_BQ)[None], boxes_BQ4[None])
        return proposals, chosen_BQd.detach(), boxes_BQ4.detach()

    def _decode(
        self, token: Tensor, boxes: Tensor, memory: Tensor, grids: Grids, blocked: Tensor | None
    ) -> Predictions:
        """Refine boxes layer by layer; each layer starts from the detached boxes of the one before."""
        logits, all_boxes = [], []
        for layer, to_class, to_box in zip(self.decoder, self.class_embed, self.bbox_embed, strict=True):
            box_encoding = sine(2 * math.pi * boxes, self.dims // 2, self.temperature).flatten(-2)
            token = layer(token, self.box_position(box_encoding), boxes, memory, grids, blocked)
            refined = (to_box(token) + inverse_sigmoid(boxes)).sigmoid()
            logits.append(to_class(token))
            all_boxes.append(refined)
            boxes = refined.detach()
        return Predictions(torch.stack(logits), torch.stack(all_boxes))

    def repeated_layers(self) -> list[nn.Module]:
        """Return the layers of encoder and decoder."""
        return [*self.encoder.attention, *self.decoder]


def _gather_tokens(x_BSd: Tensor, index_BQ: Tensor) -> Tensor:
    return x_BSd.gather(1, index_BQ[..., None].expand(-1, -1, x_BSd.shape[2]))


def make_anchors(
    grids: Grids, strides: list[int], size: tuple[int, int], *, side: float, device: torch.device
) -> Tensor:
    """Return (S, 4) float32 boxes in centre form, relative to the input: a square of `side` strides in each cell."""
    boxes = []
    for (h, w), stride in zip(grids, strides, strict=True):
        y, x = torch.meshgrid(
            (torch.arange(h, device=device) + 0.5) / h, (torch.arange(w, device=device) + 0.5) / w, indexing="ij"
        )
        sides = (
            torch.full_like(x, min(0.9, side * stride / size[1])),
            torch.full_like(y, min(0.9, side * stride / size[0])),
        )
        boxes.append(torch.stack([x, y, *sides], dim=-1).flatten(0, 1))
    return torch.cat(boxes)


def make_blocked_mask(denoising_queries: DenoisingQueries, queries: int) -> Tensor:
    """Return (B, 1, N + Q, N + Q) bool: True where a query (row) must not attend to a key (column).

    A denoising query reveals where the object is, so the other queries must not attend to it. It attends to the used
    ones of its group, and to all other queries.
    """
    group_N = denoising_queries.group_N
    row_group = F.pad(group_N, (0, queries), value=-1)
    other_group = row_group[:, None] != group_N[None, :]
    mask = other_group[None] | ~denoising_queries.used_BN[:, None, :]
    return F.pad(mask, (0, queries), value=False)[:, None]


class HybridEncoder(nn.Module):
    """Self-attention on the coarsest level, then convolutions down to the finest and up (RT-DETR, section 4.2)."""

    def __init__(self, channels: list[int], model: ModelSettings, temperature: float) -> None:
        super().__init__()
        dims = model.dims
        self.dims, self.temperature = dims, temperature
        self.project = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, dims, 1, bias=False), make_group_norm(dims)) for c in channels
        )
        self.attention = nn.ModuleList(EncoderLayer(model) for _ in range(model.encoder_layers))
        count = len(channels) - 1
        self.down = nn.ModuleList(_Fuse(dims) for _ in range(count))
        self.up = nn.ModuleList(_Fuse(dims) for _ in range(count))
        self.shrink = nn.ModuleList(_make_conv(dims, stride=2) for _ in range(count))

    def forward(self, levels: list[Tensor], image_Bhw: Tensor) -> list[Tensor]:
        """Return (B, d, h, w) for each level; `image_Bhw` marks the cells of the coarsest that show the image."""
        levels = [project(level) for project, level in zip(self.project, levels, strict=True)]
        levels[-1] = self._attend_coarsest(levels[-1], image_Bhw)
        for i in range(len(levels) - 2, -1, -1):
            upsampled = F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
            levels[i] = self.down[i](levels[i], upsampled)
        for i in range(len(levels) - 1):
            levels[i + 1] = self.up[i](levels[i + 1], self.shrink[i](levels[i]))
        return levels

    def _attend_coarsest(self, level: Tensor, image_Bhw: Tensor) -> Tensor:
        image_Bhw = image_Bhw | ~image_Bhw.any(dim=(1, 2), keepdim=True)  # a sliver between the centres: attend to all
        token, padding_mask = level.flatten(2).transpose(1, 2), ~image_Bhw.flatten(1)
        position = encode_grid_positions(image_Bhw, self.dims, self.temperature)
        for layer in self.attention:
            token = layer(token, padding_mask, position)
        return torch.unflatten(token.transpose(1, 2), 2, level.shape[2:])


def _make_conv(dims: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(dims, dims, 3, stride, 1, bias=False), make_group_norm(dims), nn.SiLU(inplace=True))


class _Fuse(nn.Module):
    """Adds two levels, then two convolutions with a residual connection."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.path = nn.Sequential(_make_conv(dims), _make_conv(dims))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = one + other
        out: Tensor = both + self.path(both)
        return out


class _DecoderLayer(nn.Module):
    """Queries attend to each other, then to the levels around their boxes."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        dims = model.dims
        self.heads, self.attention_dropout = model.heads, model.dropout
        self.asks, self.values, self.out = nn.Linear(dims, 2 * dims), nn.Linear(dims, dims), nn.Linear(dims, dims)
        self.look = DeformableAttention(dims, heads=model.heads, levels=len(model.strides), points=model.points)
        self.linear1, self.linear2 = nn.Linear(dims, model.feedforward), nn.Linear(model.feedforward, dims)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self, token: Tensor, position: Tensor, boxes: Tensor, memory: Tensor, grids: Grids, blocked: Tensor | None
    ) -> Tensor:
        q, k = self.asks(token + position).chunk(2, dim=-1)
        attn_out = F.scaled_dot_product_attention(
            self._split(q),
            self._split(k),
            self._split(self.values(token)),
            attn_mask=None if blocked is None else ~blocked,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        token = self.norm1(token + self.dropout(self.out(attn_out.transpose(1, 2).flatten(2))))
        token = self.norm2(token + self.dropout(self.look(token + position, boxes, memory, grids)))
        out: Tensor = self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


class DeformableAttention(nn.Module):
    """Each head samples P points of each level around the query's box (arXiv:2010.04159, equation 3)."""

    def __init__(self, dims: int, *, heads: int, levels: int, points: int) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = ExactLinear(dims, heads * levels * points * 2)
        self.weights = nn.Linear(dims, heads * levels * points)
        self.values, self.out = nn.Linear(dims, dims), nn.Linear(dims, dims)
        for layer in (self.offsets, self.weights):
            nn.init.zeros_(layer.weight)
        nn.init.zeros_(self.weights.bias)
        angle = torch.arange(heads) * (2 * math.pi / heads)
        circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
        circle = circle / circle.abs().amax(dim=-1, keepdim=True)  # on a square around the box's centre
        reach = torch.arange(1, points + 1).view(1, 1, -1, 1)
        with torch.no_grad():
            self.offsets.bias.copy_((circle.view(heads, 1, 1, 2) * reach).expand(-1, levels, -1, -1).flatten())

    def forward(self, query: Tensor, boxes: Tensor, memory: Tensor, grids: Grids) -> Tensor:
        """Return (B, Q, d).

        Args:
            query: (B, Q, d).
            boxes: (B, Q, 4) float32 in centre form, relative to the input. An offset of P reaches a box's edge.
            memory: (B, S, d), the cells of all levels, level by level and row by row.
        """
        offsets = self.offsets(query).unflatten(-1, (self.heads, self.levels, self.points, 2))
        weights = self.weights(query).float().unflatten(-1, (self.heads, -1)).softmax(dim=-1)
        half = boxes[:, :, None, None, None, 2:] / 2
        points = boxes[:, :, None, None, None, :2] + offsets / self.points * half
        weights = weights.unflatten(-1, (self.levels, self.points))
        values = self.values(memory).float().unflatten(-1, (self.heads, -1))  # bfloat16 would round positions to 1/256
        out: Tensor = self.out(sample_levels(values, grids, points, weights))
        return out


def sample_levels(values: Tensor, grids: Grids, points: Tensor, weights: Tensor) -> Tensor:
    """Return (B, Q, M * c): weighted sums of values sampled bilinearly, zero outside.

    Args:
        values: (B, S, M, c).
        points: (B, Q, M, L, P, 2), x and y relative to the input.
        weights: (B, Q, M, L, P).
    """
    return (_sample_maps if precision.can_use_grid_sample(values.device) else sum_cells)(values, grids, points, weights)


def _sample_maps(values: Tensor, grids: Grids, points: Tensor, weights: Tensor) -> Tensor:
    batch, _, heads, _ = values.shape
    total = values.new_zeros(())
    levels = torch.split(values, [h * w for h, w in grids], dim=1)
    for number, (level, (h, w)) in enumerate(zip(levels, grids, strict=True)):
        maps = level.permute(0, 2, 3, 1).reshape(batch * heads, -1, h, w)
        grid = (2 * points[:, :, :, number] - 1).transpose(1, 2).flatten(0, 1)  # (B * M, Q, P, 2)
        sampled = F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        weight = weights[:, :, :, number].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (sampled * weight).sum(dim=-1)  # (B * M, c, Q)
    return torch.unflatten(total, 0, (batch, heads)).flatten(1, 2).transpose(1, 2)


def sum_cells(values: Tensor, grids: Grids, points: Tensor, weights: Tensor) -> Tensor:
    """Return what `sample_levels` does, up to rounding, as one weighted sum of cells for each query and head.

    The backward pass of `embedding_bag` sorts the cells and adds in that order. torch lists only mode="max" as
    nondeterministic on CUDA (`torch.use_deterministic_algorithms`, 2.13).
    """
    batch, cells, heads, _ = values.shape
    numbers, shares, before = [], [], 0
    for (h, w), point, weight in zip(grids, points.unbind(3), weights.unbind(3), strict=True):
        (x, x_share), (y, y_share) = _find_cells(point[..., 0], w), _find_cells(point[..., 1], h)
        numbers.append((before + y[..., :, None] * w + x[..., None, :]).flatten(3))
        shares.append((y_share[..., :, None] * x_share[..., None, :] * weight[..., None, None]).flatten(3))
        before += h * w
    image = torch.arange(batch, device=values.device)[:, None, None, None]
    head = torch.arange(heads, device=values.device)[:, None]
    row = (image * cells + torch.cat(numbers, dim=3)) * heads + head  # (B, Q, M, cells of all points)
    summed = F.embedding_bag(
        row.flatten(0, 2), values.flatten(0, 2), mode="sum", per_sample_weights=torch.cat(shares, dim=3).flatten(0, 2)
    )
    return torch.unflatten(summed, 0, row.shape[:3]).flatten(2)


def _find_cells(at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the two cells (..., 2) around positions (...) relative to an axis, and their shares: 0 outside of it."""
    at = at * length - 0.5
    low = at.detach().floor()
    cell = torch.stack([low, low + 1], dim=-1).long()
    share = torch.stack([1 + low - at, at - low], dim=-1) * ((cell >= 0) & (cell < length))
    return cell.clamp(0, length - 1), share
