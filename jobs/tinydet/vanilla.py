"""DETR: a transformer on the coarsest features, with learned queries (Carion et al., arXiv:2005.12872)."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import geometry
from .config import ModelSettings
from .network import Backbone, DenoisingQueries, Outputs, Predictions, encode_grid_positions, make_box_head


class EncoderDecoder(nn.Module):
    """Encode the features of the last stage; the base of DETR and Conditional DETR."""

    backbone: Backbone
    input_proj: nn.Conv2d
    transformer: nn.ModuleDict  # "encoder" and "decoder", each a `LayerStack`
    dims: int
    temperature: float

    def encode(self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the encoder's tokens (B, S, d), their positions (B, S, d), and the padding mask (B, S)."""
        features: Tensor = self.input_proj(self.backbone(x_BCHW)[-1])
        size, grid = (x_BCHW.shape[2], x_BCHW.shape[3]), (features.shape[2], features.shape[3])
        image_Bhw = geometry.make_image_mask(affine_B23, image_px_B2, size, grid)
        image_Bhw = image_Bhw | ~image_Bhw.any(dim=(1, 2), keepdim=True)  # a sliver between the centres: attend to all
        padding_mask = ~image_Bhw.flatten(1)
        position = encode_grid_positions(image_Bhw, self.dims, self.temperature)
        token = features.flatten(2).transpose(1, 2)
        for layer in self.list_layers("encoder"):
            token = layer(token, padding_mask, position)
        return token, position, padding_mask

    def list_layers(self, stack: str) -> nn.ModuleList:
        return cast(LayerStack, self.transformer[stack]).layers

    def repeated_layers(self) -> list[nn.Module]:
        """Return the layers of encoder and decoder."""
        return [*self.list_layers("encoder"), *self.list_layers("decoder")]


class DETR(EncoderDecoder):
    """DETR.

    Axes: B images, S tokens of the last stage, Q queries, d the width of a token. Parameters have the names of
    facebookresearch/detr, so that its weights fit; with ResNet-50 and 91 categories 41,302,368 of them are trained.
    """

    def __init__(self, backbone: Backbone, model: ModelSettings, *, categories: int, temperature: float) -> None:
        super().__init__()
        self.backbone, self.dims, self.temperature = backbone, model.dims, temperature
        self.input_proj = nn.Conv2d(backbone.channels[32], model.dims, 1)
        self.transformer = nn.ModuleDict(
            {
                "encoder": LayerStack(EncoderLayer(model) for _ in range(model.encoder_layers)),
                "decoder": LayerStack(_DecoderLayer(model) for _ in range(model.decoder_layers)),
            }
        )
        self.decoder_norm = nn.LayerNorm(model.dims)
        self.query_embed = nn.Embedding(model.queries, model.dims)
        self.class_embed = nn.Linear(model.dims, categories + 1)
        self.bbox_embed = make_box_head(model.dims, initially_zero=False)
        for name, weight in self.transformer.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                nn.init.xavier_uniform_(weight)

    def forward(
        self, x_BCHW: Tensor, affine_B23: Tensor, image_px_B2: Tensor, denoising_queries: DenoisingQueries | None = None
    ) -> Outputs:
        """Find objects in images."""
        memory, position, padding_mask = self.encode(x_BCHW, affine_B23, image_px_B2)
        query_pos = self.query_embed.weight.expand(memory.shape[0], -1, -1)
        token = torch.zeros_like(query_pos)
        outputs = []
        for layer in self.list_layers("decoder"):
            token = layer(token, memory, padding_mask, position, query_pos)
            outputs.append(self.decoder_norm(token))
        token_DBQd = torch.stack(outputs)
        return Outputs(Predictions(self.class_embed(token_DBQd), self.bbox_embed(token_DBQd).sigmoid()))


class LayerStack(nn.Module):
    """A list of layers, named as in published weights."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block, each followed by a norm."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        dims = model.dims
        self.self_attn = nn.MultiheadAttention(dims, model.heads, dropout=model.dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dims, model.feedforward), nn.Linear(model.feedforward, dims)
        self.norm1, self.norm2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, token_BSd: Tensor, padding_mask_BS: Tensor | None, position_BSd: Tensor) -> Tensor:
        query = token_BSd + position_BSd
        attn_out = self.self_attn(query, query, token_BSd, key_padding_mask=padding_mask_BS, need_weights=False)[0]
        token = self.norm1(token_BSd + self.dropout(attn_out))
        out: Tensor = self.norm2(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out


class _DecoderLayer(nn.Module):
    """Queries attend to each other, then to the image."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        dims = model.dims
        self.self_attn = nn.MultiheadAttention(dims, model.heads, dropout=model.dropout, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(dims, model.heads, dropout=model.dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dims, model.feedforward), nn.Linear(model.feedforward, dims)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self, token: Tensor, memory: Tensor, padding_mask: Tensor | None, position: Tensor, query_pos: Tensor
    ) -> Tensor:
        query = token + query_pos
        attn_out = self.self_attn(query, query, token, need_weights=False)[0]
        token = self.norm1(token + self.dropout(attn_out))
        key, query = memory + position, token + query_pos
        attn_out = self.multihead_attn(query, key, memory, key_padding_mask=padding_mask, need_weights=False)[0]
        token = self.norm2(token + self.dropout(attn_out))
        out: Tensor = self.norm3(token + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(token))))))
        return out
