"""DETR: a transformer on the coarsest features, with learned queries (Carion et al., arXiv:2005.12872)."""

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import geometry
from .network import Backbone, DenoisingQueries, Outputs, Predictions, encode_grid_positions, make_box_head


class DETR(nn.Module):
    """DETR.

    Axes: B images, S tokens of the last stage, Q queries, d the width of a token. Parameters have the names of
    facebookresearch/detr, so that its weights fit; with ResNet-50 and 91 categories 41,302,368 of them are trained.
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
        self.transformer = nn.ModuleDict(
            {
                "encoder": LayerStack(EncoderLayer(dims, heads, feedforward, dropout) for _ in range(encoder_layers)),
                "decoder": LayerStack(_DecoderLayer(dims, heads, feedforward, dropout) for _ in range(decoder_layers)),
            }
        )
        self.decoder_norm = nn.LayerNorm(dims)
        self.query_embed = nn.Embedding(queries, dims)
        self.class_embed = nn.Linear(dims, categories + 1)
        self.bbox_embed = make_box_head(dims, initially_zero=False)
        for name, weight in self.transformer.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                nn.init.xavier_uniform_(weight)

    def forward(
        self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, denoising_queries: DenoisingQueries | None = None
    ) -> Outputs:
        """Find objects in images."""
        memory, position, padding_mask = encode(self, x_BCHW, affine_B23, image_px_B2)
        query_pos = self.query_embed.weight.expand(memory.shape[0], -1, -1)
        token = torch.zeros_like(query_pos)
        outputs = []
        for layer in cast(LayerStack, self.transformer["decoder"]).layers:
            token = layer(token, memory, padding_mask, position, query_pos)
            outputs.append(self.decoder_norm(token))
        token_DBQd = torch.stack(outputs)
        return Outputs(Predictions(self.class_embed(token_DBQd), self.bbox_embed(token_DBQd).sigmoid()))

    def repeated_layers(self) -> list[nn.Module]:
        """Return the layers of encoder and decoder."""
        return [layer for stack in self.transformer.values() for layer in cast(LayerStack, stack).layers]


class _HasEncoder(Protocol):
    backbone: Backbone
    input_proj: nn.Conv2d
    transformer: nn.ModuleDict
    dims: int
    temperature: float


def encode(
    network: _HasEncoder, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the encoder's tokens (B, S, d), their positions (B, S, d), and the padding mask (B, S)."""
    features: Tensor = network.input_proj(network.backbone(x_BCHW)[-1])
    size, grid = (x_BCHW.shape[2], x_BCHW.shape[3]), (features.shape[2], features.shape[3])
    image_Bhw = geometry.make_image_mask(affine_B23, image_px_B2, size, grid)
    image_Bhw = image_Bhw | ~image_Bhw.any(dim=(1, 2), keepdim=True)  # a sliver between the centres: attend to all
    padding_mask = ~image_Bhw.flatten(1)
    position = encode_grid_positions(image_Bhw, network.dims, network.temperature)
    token = features.flatten(2).transpose(1, 2)
    for layer in cast(LayerStack, network.transformer["encoder"]).layers:
        token = layer(token, padding_mask, position)
    return token, position, padding_mask


class LayerStack(nn.Module):
    """A list of layers, named as in published weights."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block, each followed by a norm."""

    def __init__(self, dims: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dims, heads, dropout=dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dims, feedforward), nn.Linear(feedforward, dims)
        self.norm1, self.norm2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token_BSd: Tensor, padding_mask_BS: Tensor | None, position_BSd: Tensor) -> Tensor:
        query = token_BSd + position_BSd
        attn_out = self.self_attn(query, query, token_BSd, key_padding_mask=padding_mask_BS, need_weights=False)[0]
        token = self.norm1(token_BSd + self.dropout(attn_out))
        out: Tensor = self.norm2(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out


class _DecoderLayer(nn.Module):
    """Queries attend to each other, then to the image."""

    def __init__(self, dims: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dims, heads, dropout=dropout, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(dims, heads, dropout=dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dims, feedforward), nn.Linear(feedforward, dims)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        token_BQd: Tensor,
        memory_BSd: Tensor,
        padding_mask_BS: Tensor | None,
        position_BSd: Tensor,
        query_pos: Tensor,
    ) -> Tensor:
        query = token_BQd + query_pos
        attn_out = self.self_attn(query, query, token_BQd, need_weights=False)[0]
        token = self.norm1(token_BQd + self.dropout(attn_out))
        keys = memory_BSd + position_BSd
        attn_out = self.multihead_attn(
            token + query_pos, keys, memory_BSd, key_padding_mask=padding_mask_BS, need_weights=False
        )[0]
        token = self.norm2(token + self.dropout(attn_out))
        out: Tensor = self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out
