"""Conditional DETR: each query attends around its reference point (Meng et al., arXiv:2108.06152)."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelSettings
from .exact import ExactLinear
from .network import (
    MLP,
    Backbone,
    DenoisingQueries,
    Outputs,
    Predictions,
    inverse_sigmoid,
    make_box_head,
    make_class_head,
    sine,
)
from .vanilla import EncoderDecoder, EncoderLayer, LayerStack


class ConditionalDETR(EncoderDecoder):
    """Conditional DETR.

    Axes as in `vanilla.DETR`. A query of the cross-attention concatenates content and position, 2 d numbers. The
    position is the sine encoding of the reference point, scaled by a function of the decoder's token (equations 4-6).
    """

    def __init__(self, backbone: Backbone, model: ModelSettings, *, categories: int, temperature: float) -> None:
        super().__init__()
        dims = model.dims
        self.backbone, self.dims, self.temperature = backbone, dims, temperature
        self.input_proj = nn.Conv2d(backbone.channels[32], dims, 1)
        decoder = LayerStack(_ConditionalLayer(model, first=number == 0) for number in range(model.decoder_layers))
        encoder = LayerStack(EncoderLayer(model) for _ in range(model.encoder_layers))
        self.transformer = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        drawn_uniformly: list[nn.Module] = [self.transformer]
        if model.decoder_layers > 1:  # the first layer does not use it; ranks would wait forever for its gradient
            self.query_scale = MLP(dims, dims, dims, 2)
            drawn_uniformly.append(self.query_scale)
        self.ref_point_head = MLP(dims, dims, 2, 2, linear=ExactLinear)
        self.decoder_norm = nn.LayerNorm(dims)
        self.query_embed = nn.Embedding(model.queries, dims)
        drawn_uniformly.append(self.ref_point_head)
        for weight in itertools.chain.from_iterable(part.parameters() for part in drawn_uniformly):
            if weight.ndim > 1:
                nn.init.xavier_uniform_(weight)
        self.class_embed = make_class_head(dims, categories)
        self.bbox_embed = make_box_head(dims)

    def forward(
        self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, denoising_queries: DenoisingQueries | None = None
    ) -> Outputs:
        """Find objects in images."""
        memory, position, padding_mask = self.encode(x_BCHW, affine_B23, image_px_B2)
        query_pos = self.query_embed.weight.expand(memory.shape[0], -1, -1)
        reference_BQ2 = self.ref_point_head(query_pos).sigmoid()
        reference_pos = encode_points(reference_BQ2, self.dims, self.temperature)
        token = torch.zeros_like(query_pos)
        tokens = []
        for number, layer in enumerate(self.list_layers("decoder")):
            scaled = reference_pos if number == 0 else reference_pos * self.query_scale(token)
            token = layer(token, memory, padding_mask, position, query_pos, scaled)
            tokens.append(self.decoder_norm(token))
        token_DBQd = torch.stack(tokens)
        change_DBQ4 = self.bbox_embed(token_DBQd)
        centre = change_DBQ4[..., :2] + inverse_sigmoid(reference_BQ2)
        boxes = torch.cat([centre, change_DBQ4[..., 2:]], dim=-1).sigmoid()
        return Outputs(Predictions(self.class_embed(token_DBQd), boxes))


def encode_points(points: Tensor, dims: int, temperature: float) -> Tensor:
    """Return (..., dims): sine encodings of points (..., 2), x and y in 0..1; row first, as `encode_grid_positions`."""
    phase = 2 * math.pi * points
    return torch.cat([sine(phase[..., 1], dims // 2, temperature), sine(phase[..., 0], dims // 2, temperature)], dim=-1)


class _Attention(nn.Module):
    """Attention on projected queries, keys and values; each query or key is a concatenation of parts."""

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
        attn_out = F.scaled_dot_product_attention(q, k, self._split(v_BSd), attn_mask=allowed, dropout_p=dropout)
        out: Tensor = self.out_proj(attn_out.transpose(1, 2).flatten(2))
        return out

    def _split(self, x_BSd: Tensor) -> Tensor:
        return torch.unflatten(x_BSd, -1, (self.heads, -1)).transpose(1, 2)


class _ConditionalLayer(nn.Module):
    """Queries attend to each other, then to the image near their reference points."""

    sa_qcontent_proj: nn.Linear
    sa_qpos_proj: nn.Linear
    sa_kcontent_proj: nn.Linear
    sa_kpos_proj: nn.Linear
    sa_v_proj: nn.Linear
    ca_qcontent_proj: nn.Linear
    ca_qpos_proj: nn.Linear  # first layer only
    ca_kcontent_proj: nn.Linear
    ca_kpos_proj: nn.Linear
    ca_v_proj: nn.Linear

    def __init__(self, model: ModelSettings, *, first: bool) -> None:
        super().__init__()
        dims, heads, feedforward, dropout = model.dims, model.heads, model.feedforward, model.dropout
        for name in ("qcontent", "qpos", "kcontent", "kpos", "v"):
            self.add_module(f"sa_{name}_proj", nn.Linear(dims, dims))
            if name != "qpos" or first:  # later layers take the position from the reference point alone
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
        padding_mask: Tensor | None,
        position: Tensor,
        query_pos: Tensor,
        reference_pos: Tensor,
    ) -> Tensor:
        q = self.sa_qcontent_proj(token) + self.sa_qpos_proj(query_pos)
        k = self.sa_kcontent_proj(token) + self.sa_kpos_proj(query_pos)
        token = self.norm1(token + self.dropout(self.self_attn([q], [k], self.sa_v_proj(token), None)))
        q, k = self.ca_qcontent_proj(token), self.ca_kcontent_proj(memory)
        k_pos = self.ca_kpos_proj(position)
        if self.first:
            q, k = q + self.ca_qpos_proj(query_pos), k + k_pos
        q_pos = self.ca_qpos_sine_proj(reference_pos)
        attn_out = self.cross_attn([q, q_pos], [k, k_pos], self.ca_v_proj(memory), padding_mask)
        token = self.norm2(token + self.dropout(attn_out))
        out: Tensor = self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out
