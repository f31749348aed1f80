"""Conditional DETR: queries that look around a place of their own (Meng et al., arXiv:2108.06152)."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .network import MLP, Backbone, Detected, Noised, Outputs, class_head, inverse_sigmoid, sine
from .vanilla import EncoderLayer, LayerStack, encoded


class ConditionalDETR(nn.Module):
    """Conditional DETR.

    Axes as in `vanilla.Vanilla`. Cross-attention asks with content and place side by side, 2 d numbers: the place is
    the sine position of the query's reference point, scaled by what the decoder has found (equations 4-6).
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        categories: int,
        dims: int,
        heads: int,
        feedforward: int,
        encoder_layers: int,
        decoder_layers: int,
        queries: int,
        dropout: float,
        temperature: float,
    ) -> None:
        super().__init__()
        self.backbone, self.dims, self.temperature = backbone, dims, temperature
        self.input_proj = nn.Conv2d(backbone.channels[32], dims, 1)
        decoder = LayerStack(
            _ConditionalLayer(dims, heads, feedforward, dropout, first=number == 0) for number in range(decoder_layers)
        )
        self.transformer = nn.ModuleDict(
            {
                "encoder": LayerStack(EncoderLayer(dims, heads, feedforward, dropout) for _ in range(encoder_layers)),
                "decoder": decoder,
            }
        )
        self.query_scale = MLP(dims, dims, dims, 2)
        self.ref_point_head = MLP(dims, dims, 2, 2)
        self.decoder_norm = nn.LayerNorm(dims)
        self.query_embed = nn.Embedding(queries, dims)
        for weight in [
            *self.transformer.parameters(),
            *self.query_scale.parameters(),
            *self.ref_point_head.parameters(),
        ]:
            if weight.ndim > 1:
                nn.init.xavier_uniform_(weight)
        self.class_embed = class_head(dims, categories)
        self.bbox_embed = MLP(dims, dims, 4, 3)
        nn.init.zeros_(self.bbox_embed.layers[-1].weight)
        nn.init.zeros_(self.bbox_embed.layers[-1].bias)

    def forward(self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, noised: Noised | None = None) -> Outputs:
        """Find objects in pictures."""
        memory, position, hidden = encoded(self, x_BCHW, affine_B23, image_px_B2)
        query_pos = self.query_embed.weight.expand(len(memory), -1, -1)
        reference_BQ2 = self.ref_point_head(query_pos).float().sigmoid()
        place = place_of(reference_BQ2, self.dims, self.temperature)
        token = torch.zeros_like(query_pos)
        seen = []
        for number, layer in enumerate(cast(LayerStack, self.transformer["decoder"]).layers):
            scaled = place if number == 0 else place * self.query_scale(token)
            token = layer(token, memory, hidden, position, query_pos, scaled)
            seen.append(self.decoder_norm(token))
        token_DBQd = torch.stack(seen)
        change_DBQ4 = self.bbox_embed(token_DBQd).float()
        centre = change_DBQ4[..., :2] + inverse_sigmoid(reference_BQ2)
        boxes = torch.cat([centre, change_DBQ4[..., 2:]], dim=-1).sigmoid()
        return Outputs(Detected(self.class_embed(token_DBQd), boxes))

    def layers(self) -> list[nn.Module]:
        """Return the layers that come several times."""
        return [layer for stack in self.transformer.values() for layer in cast(LayerStack, stack).layers]


def place_of(shares: Tensor, dims: int, temperature: float) -> Tensor:
    """Return (..., dims): sine positions of places (..., 2), x and y in 0..1; row first, as `grid_positions`."""
    at = 2 * math.pi * shares
    return torch.cat([sine(at[..., 1], dims // 2, temperature), sine(at[..., 0], dims // 2, temperature)], dim=-1)


class _Attention(nn.Module):
    """Attention whose queries, keys and values were projected before; `side` of the content is joined by place."""

    def __init__(self, dims: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.out_proj = nn.Linear(dims, dims)

    def forward(
        self, parts_q: list[Tensor], parts_k: list[Tensor], v_BSd: Tensor, padding_mask_BS: Tensor | None
    ) -> Tensor:
        q, k = (torch.cat([self._split(part) for part in parts], dim=-1) for parts in (parts_q, parts_k))
        allowed = None if padding_mask_BS is None else ~padding_mask_BS[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, self._split(v_BSd), attn_mask=allowed, dropout_p=dropout)
        return self.out_proj(seen.transpose(1, 2).flatten(2))

    def _split(self, x_BSd: Tensor) -> Tensor:
        return x_BSd.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _ConditionalLayer(nn.Module):
    """Queries look at each other, then at the picture near their own place."""

    def __init__(self, dims: int, heads: int, feedforward: int, dropout: float, *, first: bool) -> None:
        super().__init__()
        for name in ("qcontent", "qpos", "kcontent", "kpos", "v"):
            self.add_module(f"sa_{name}_proj", nn.Linear(dims, dims))
            if name != "qpos" or first:  # later layers know the place from the reference alone
                self.add_module(f"ca_{name}_proj", nn.Linear(dims, dims))
        self.ca_qpos_sine_proj = nn.Linear(dims, dims)
        self.self_attn, self.cross_attn = _Attention(dims, heads, dropout), _Attention(dims, heads, dropout)
        self.linear1, self.linear2 = nn.Linear(dims, feedforward), nn.Linear(feedforward, dims)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(dropout)
        self.first = first

    def forward(
        self,
        token: Tensor,
        memory: Tensor,
        hidden: Tensor | None,
        position: Tensor,
        query_pos: Tensor,
        place: Tensor,
    ) -> Tensor:
        q = self.sa_qcontent_proj(token) + self.sa_qpos_proj(query_pos)
        k = self.sa_kcontent_proj(token) + self.sa_kpos_proj(query_pos)
        token = self.norm1(token + self.dropout(self.self_attn([q], [k], self.sa_v_proj(token), None)))
        q, k = self.ca_qcontent_proj(token), self.ca_kcontent_proj(memory)
        k_pos = self.ca_kpos_proj(position)
        if self.first:
            q, k = q + self.ca_qpos_proj(query_pos), k + k_pos
        q_place = self.ca_qpos_sine_proj(place)
        seen = self.cross_attn([q, q_place], [k, k_pos], self.ca_v_proj(memory), hidden)
        token = self.norm2(token + self.dropout(seen))
        return self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
