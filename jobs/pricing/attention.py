"""DeBERTa's self-attention without `gather`: relative positions are windows of a product with distances."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DebertaV2Model
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention


def replace_attention(encoder: DebertaV2Model) -> DebertaV2Model:
    """Replace the encoder's self-attention by `WindowedSelfAttention`; weights and their names stay the same."""
    if encoder.config.relative_attention:  # without relative positions there is no gather
        for layer in cast(list[Any], encoder.encoder.layer):
            layer.attention.self = WindowedSelfAttention(layer.attention.self)
    return encoder


class WindowedSelfAttention(nn.Module):
    """Disentangled self-attention (He et al. 2020, arXiv:2006.03654, equations 2 to 4).

    Axes: B texts, L tokens, H heads, D dims of a head, N = H D, X = B L, Y = H B, P position vectors.

    The score of query i and key j is (q_i k_j + q_i r_ij + k_j s_ij) / sqrt(3 D), where r_ij and s_ij are projections
    of the position vector of the distance i - j. Transformers multiplies each token with all P position vectors and
    picks from the products with `gather`. The backward pass of that adds H B L L numbers at indices that repeat,
    which CUDA sorts if the result must not vary. `multiply_with_distances` needs no index there.

    As in the authors' code, whose weights are the published ones, both terms use the distance i - j; equation 4 has
    j - i in the last one.

    Args:
        original: its parameters and dropouts are used, not copied.
    """

    def __init__(self, original: DisentangledSelfAttention) -> None:
        super().__init__()
        self.heads: int = original.num_attention_heads
        self.span: int = original.pos_ebd_size
        self.terms: list[str] = original.pos_att_type
        self.query_proj: nn.Linear = original.query_proj
        self.key_proj: nn.Linear = original.key_proj
        self.value_proj: nn.Linear = original.value_proj
        self.pos_dropout: nn.Dropout = original.pos_dropout
        self.shares_projections: bool = original.share_att_key
        if not self.shares_projections and "c2p" in self.terms:
            self.pos_key_proj: nn.Linear = original.pos_key_proj
        if not self.shares_projections and "p2c" in self.terms:
            self.pos_query_proj: nn.Linear = original.pos_query_proj
        self.dropout: nn.Dropout = original.dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return the context vectors (B, L, N), with the signature that the layers of Transformers call.

        Args:
            hidden_states: (B, L, N).
            attention_mask: (B, 1, L, L), 0 where a query may not see a key.
            relative_pos: (1, L, L) int64, bucket of the distance i - j of query i and key j.
            rel_embeddings: (P, N), position vectors.
        """
        assert relative_pos is not None and rel_embeddings is not None
        assert query_states is None and not output_attentions
        batch, length, _ = hidden_states.shape
        query_HXD = self._split_heads(self.query_proj(hidden_states))
        key_HXD = self._split_heads(self.key_proj(hidden_states))
        value_YLD = self._split_heads(self.value_proj(hidden_states)).view(self.heads * batch, length, -1)
        scale = 1 / math.sqrt(query_HXD.shape[-1] * (1 + len(self.terms)))
        query_HXD = query_HXD * scale

        position_PN = self.pos_dropout(rel_embeddings)
        bucket_E = list_buckets(relative_pos, self.span)
        scores_YLL = query_HXD.new_zeros(())
        if "c2p" in self.terms:
            project = self.key_proj if self.shares_projections else self.pos_key_proj
            scores_YLL = multiply_with_distances(query_HXD, project(position_PN), bucket_E)
        if "p2c" in self.terms:
            project = self.query_proj if self.shares_projections else self.pos_query_proj
            term_YLL = multiply_with_distances(key_HXD, project(position_PN) * scale, bucket_E.flip(0))
            scores_YLL = scores_YLL + term_YLL.transpose(1, 2)
        scores_YLL = torch.baddbmm(scores_YLL, query_HXD.view_as(value_YLD), key_HXD.view_as(value_YLD).transpose(1, 2))

        scores = scores_YLL.view(self.heads, batch, length, length)
        scores.masked_fill_(~attention_mask.bool().transpose(0, 1), torch.finfo(scores.dtype).min)
        weights_YLL = self.dropout(functional.softmax(scores, dim=-1)).view_as(scores_YLL)
        context_YLD = torch.bmm(weights_YLL, value_YLD)
        context = context_YLD.view(self.heads, batch, length, -1).permute(1, 2, 0, 3)
        return context.reshape(hidden_states.shape[:2] + (-1,)), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """Turn (B, L, N) into (H, B L, D) in new memory."""
        return x.view(-1, self.heads, x.shape[-1] // self.heads).transpose(0, 1).contiguous()


def list_buckets(relative_pos: Tensor, span: int) -> Tensor:
    """Return (2 L - 1,) int64: the position vectors of the distances L - 1, L - 2, .., 1 - L.

    Args:
        relative_pos: (1, L, L), a function of i - j: so its last row and its first one have all distances.
    """
    bucket_E = torch.cat([relative_pos[0, -1], relative_pos[0, 0, 1:]])
    return (bucket_E + span).clamp(0, 2 * span - 1)


def multiply_with_distances(x_HXD: Tensor, position_PN: Tensor, bucket_E: Tensor) -> Tensor:
    """Return (H B, L, L): in row i, column j the product of x_i and the position vector number bucket_E[j - i + L - 1].

    Each token is multiplied with the vectors of all E = 2 L - 1 distances. Of these products, row i needs the L from
    number L - 1 - i on: one element further left in each row, which is a view with strides (E - 1, 1). Its backward
    pass copies the window back into zeros.
    """
    heads, tokens, dims = x_HXD.shape
    distances = bucket_E.shape[0]
    length = (distances + 1) // 2
    vector_HDE = functional.embedding(bucket_E, position_PN).view(distances, heads, dims).permute(1, 2, 0)
    product_HXE = torch.bmm(x_HXD, vector_HDE)
    return product_HXE.as_strided(
        (heads * tokens // length, length, length), (length * distances, distances - 1, 1), length - 1
    )
