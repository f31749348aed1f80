"""The networks: DeBERTa-v3 for the text; for prices, branches for numbers and images and a head; a head for tokens."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DebertaV2Config, DebertaV2Model

from trainyard.errors import UserError
from trainyard.foreign import read_json
from trainyard.text import format_override

from .attention import replace_attention
from .config import ModelSettings, RateSettings

INIT_STD = 0.02


class PriceNetwork(nn.Module):
    """Predicts the standardised ln(price) of an item.

    Axes: B samples, L tokens, D dims of the encoder, F numbers.

    The text enters as its class token, the mean of its last states and, with `bag`, the mean of its word embeddings,
    which learns first from few rows and random weights. The head always computes in float32.

    Args:
        encoder: from `build_random_encoder` or `build_encoder`.
        numbers: F.
    """

    def __init__(self, encoder: DebertaV2Model, model: ModelSettings, *, numbers: int, image_channels: int) -> None:
        super().__init__()
        self.encoder, self.bag, dims = encoder, model.bag, model.number_dims
        self.number_branch = nn.Sequential(nn.Linear(numbers, dims), nn.ReLU(), nn.Dropout(0.1), nn.LayerNorm(dims))
        self.image_branch = ImageBranch(image_channels, model.image_dims) if model.image_dims else None
        text_dims = (3 if model.bag else 2) * encoder.config.hidden_size
        self.head = _build_head(text_dims + dims + model.image_dims, model.head_dims, model.head_dropout)

    def forward(self, token_BL: Tensor, count_B: Tensor, number_BF: Tensor, image: Tensor | None = None) -> Tensor:
        """Return (B,) float32.

        Args:
            token_BL: int ids, padded with 0.
            count_B: int64 tokens of each sample.
            image: (B, C, H, W), required if the network has an image branch.
        """
        parts = [self._encode_text(token_BL.long(), count_B), self.number_branch(number_BF)]
        if self.image_branch is not None:
            assert image is not None
            parts.append(self.image_branch(image))
        with torch.autocast(number_BF.device.type, enabled=False):  # 8 bits cannot resolve 0.01 in ln(price)
            standard_B1: Tensor = self.head(torch.cat([part.float() for part in parts], dim=1))
            return standard_B1.squeeze(1)

    def _encode_text(self, token_BL: Tensor, count_B: Tensor) -> Tensor:
        mask_BL = _mask_padding(token_BL, count_B)
        states = self.encoder(input_ids=token_BL, attention_mask=mask_BL.long(), output_hidden_states=True)
        last_BLD = states.last_hidden_state
        pooled = [last_BLD[:, 0], _mean_pool(last_BLD, mask_BL)]
        if self.bag:
            pooled.append(_mean_pool(states.hidden_states[0], mask_BL))
        return torch.cat(pooled, dim=1)


class TextNetwork(nn.Module):
    """Predicts masked tokens, with BERT's head, whose output weights are the word embeddings.

    Devlin et al. 2019, arXiv:1810.04805, and the authors' code. Axes: B samples, L tokens, K places, V pieces.
    """

    def __init__(self, encoder: DebertaV2Model) -> None:
        super().__init__()
        self.encoder = encoder
        pieces, dims = get_word_embeddings(encoder).shape
        self.token_head = nn.Sequential(nn.Linear(encoder.config.hidden_size, dims), nn.GELU(), nn.LayerNorm(dims))
        self.token_bias = nn.Parameter(torch.zeros(pieces))

    def forward(self, token_BL: Tensor, count_B: Tensor, place_BK: Tensor) -> Tensor:
        """Return the logits (B, K, V) at the places `place_BK` (int64) of each text."""
        mask_BL = _mask_padding(token_BL, count_B)
        last_BLD = self.encoder(input_ids=token_BL, attention_mask=mask_BL.long()).last_hidden_state
        state_BKD = last_BLD.gather(1, place_BK.unsqueeze(2).expand(-1, -1, last_BLD.shape[2]))
        return functional.linear(self.token_head(state_BKD), get_word_embeddings(self.encoder), self.token_bias)


class ImageBranch(nn.Module):
    """A small convolutional network: (B, C, H, W) to (B, dims), four halvings, then global average pooling.

    Uses group normalisation, because batches of long texts are small.
    """

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        widths = [channels, *(max(16, dims // 8 * 2**i // 8 * 8) for i in range(4))]
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, b), nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1, bias=False), nn.GroupNorm(8, b), nn.ReLU(),
            )
            for a, b in itertools.pairwise(widths)
        )  # fmt: skip
        self.out = nn.Linear(widths[-1], dims)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, dims)."""
        for step in self.steps:
            x_BCHW = step(x_BCHW)
        out_BD: Tensor = self.out(x_BCHW.mean(dim=(2, 3)))
        return out_BD


def build_random_encoder(model: ModelSettings, *, vocabulary: int, max_tokens: int) -> DebertaV2Model:
    """Build a DeBERTa-v3 encoder (He et al. 2021, arXiv:2111.09543) with random weights.

    Raises:
        UserError: `model.heads` does not divide `model.dims`.
    """
    if model.dims % model.heads:
        raise UserError(f"model.dims={model.dims}: expected a multiple of model.heads={model.heads}.")
    settings: dict[str, Any] = {  # not keywords: DebertaV2Config does not declare all of them
        "vocab_size": vocabulary,
        "hidden_size": model.dims,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.feedforward,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.dropout,
        "max_position_embeddings": max_tokens,
        "relative_attention": True,
        "position_buckets": model.position_buckets,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "pad_token_id": 0,
        "initializer_range": INIT_STD,
    }
    return replace_attention(DebertaV2Model(DebertaV2Config(**settings)))


def build_encoder(folder: Path, *, vocabulary: int, dropout: float) -> DebertaV2Model:
    """Build the encoder that the `config.json` of a local checkpoint describes, with random weights.

    Args:
        vocabulary: size of the tokenizer's vocabulary.

    Raises:
        UserError: the file is missing, it is not of DeBERTa-v2 or -v3, or the tokenizer has more pieces than the
            checkpoint has embeddings.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"model.encoder={folder}: no config.json there. Give the folder of a DeBERTa-v3 checkpoint.")
    settings = read_json(config_file, dict[str, Any], expected="the configuration of a DeBERTa-v3 checkpoint")
    if settings.get("model_type") != "deberta-v2":
        raise UserError(
            f"model.encoder={folder}: config.json has model_type '{settings.get('model_type')}', expected 'deberta-v2'."
        )
    pieces = settings.get("vocab_size")
    if not isinstance(pieces, int):
        raise UserError(f"{config_file}: vocab_size: expected int, found {json.dumps(pieces)}.")
    if pieces < vocabulary:
        raise UserError(
            f"model.encoder={folder}: it has {pieces} word embeddings, but the tokenizer has "
            f"{vocabulary} pieces. Pack with the encoder's own tokenizer: "
            f"{format_override('packing.tokenizer', str(folder))}"
        )
    settings |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return replace_attention(DebertaV2Model(DebertaV2Config.from_dict(settings)))


def get_word_embeddings(encoder: DebertaV2Model) -> Tensor:
    """Return the word embeddings (V, D)."""
    embeddings: nn.Embedding = encoder.get_input_embeddings()  # type: ignore[no-untyped-call]
    return embeddings.weight


def assign_learning_rates(network: PriceNetwork | TextNetwork, rates: RateSettings) -> list[tuple[nn.Parameter, float]]:
    """Return every trainable parameter with its learning rate factor; freeze the word embeddings if told to.

    The factor is 1 for the head and the branches, `encoder` for the encoder's last layer, and that times `layer_decay`
    for each layer further down; the embeddings count as the layer below the first (discriminative fine-tuning: Howard
    and Ruder 2018, arXiv:1801.06146, section 3.2).
    """
    encoder, decay = rates.encoder, rates.layer_decay
    layers = list(network.encoder.encoder.layer)
    factor = {id(p): 1.0 for p in network.parameters()}
    factor |= {id(p): encoder * decay ** len(layers) for p in network.encoder.parameters()}
    for depth, layer in enumerate(layers):
        factor |= {id(p): encoder * decay ** (len(layers) - 1 - depth) for p in layer.parameters()}
    if rates.freeze_embeddings:
        get_word_embeddings(network.encoder).requires_grad_(False)
    return [(p, factor[id(p)]) for p in network.parameters() if p.requires_grad]


def _build_head(inputs: int, dims: Sequence[int], dropout: Sequence[float]) -> nn.Sequential:
    """Build hidden layers and a last one whose output starts near 0, which is the mean price."""
    widths = [inputs, *dims]
    layers: list[nn.Module] = []
    for (a, b), p in zip(itertools.pairwise(widths), dropout, strict=True):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), nn.Dropout(p)]
    last = nn.Linear(widths[-1], 1)
    nn.init.zeros_(last.bias)
    nn.init.normal_(last.weight, std=INIT_STD)
    return nn.Sequential(*layers, last)


def _mask_padding(token_BL: Tensor, count_B: Tensor) -> Tensor:
    """Return (B, L) bool, true at the tokens and false at the padding."""
    return torch.arange(token_BL.shape[1], device=token_BL.device) < count_B[:, None]


def _mean_pool(x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return (B, D) float32, the mean over the tokens where the mask is true."""
    weight_BL1 = mask_BL.unsqueeze(2).float()
    return (x_BLD.float() * weight_BL1).sum(dim=1) / weight_BL1.sum(dim=1).clamp_min(1)


def get_encoder_layers(network: PriceNetwork | TextNetwork) -> Iterable[nn.Module]:
    """Return the encoder's layers, whose activations take most of the memory."""
    return network.encoder.encoder.layer
