"""Trains the encoder to predict masked tokens, without prices, for a run that starts from it (objective=text)."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.errors import UserError
from trainyard.train.module import Batch, DataInfo

from . import tokenizer
from .config import Config
from .encoder_module import EncoderModule
from .network import TextNetwork
from .pack import TOKENIZER

SHARE = 0.15  # of a text's tokens that are predicted
MASKED, RANDOM = 0.8, 0.1  # of these, shares replaced with [MASK] and with random pieces; the others stay


class TextModule(EncoderModule):
    """Predicts masked tokens (Devlin et al. 2019, arXiv:1810.04805, section 3.1); scored by the validation loss.

    Axes: B samples, L tokens, K places. [CLS], [SEP], [UNK] and padding are neither predicted nor replaced.
    """

    network: TextNetwork

    def __init__(self, network: TextNetwork, config: Config, data: DataInfo) -> None:
        super().__init__(network, config, data)
        vocabulary = tokenizer.parse(data.artifacts[TOKENIZER])
        mask = vocabulary.token_to_id("[MASK]")
        if mask is None:
            raise UserError(
                "objective=text replaces tokens with [MASK], which the tokenizer of "
                f"packing.tokenizer={config.packing.tokenizer} lacks. Add it there, or train one: packing.tokenizer="
            )
        self.mask, self.pieces = mask, vocabulary.get_vocab_size()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the mean over the samples of the cross-entropy of their chosen tokens, in nats."""
        return {"loss": self._compute_losses(batch).mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return each sample's loss, which does not depend on the others."""
        return {"sample_id": batch["sample_id"], "loss": self._compute_losses(batch)}

    def _compute_losses(self, batch: Batch) -> Tensor:
        """Return (B,) float32."""
        masked_BL, place_BK, is_chosen_BK = self._mask(batch)
        target_BK = batch["tokens"].long().gather(1, place_BK)
        logits_BKV = self.network(masked_BL, batch["tokens_count"], place_BK)
        loss_BK = functional.cross_entropy(logits_BKV.float().flatten(0, 1), target_BK.flatten(), reduction="none")
        return (loss_BK.view_as(target_BK) * is_chosen_BK).sum(dim=1) / is_chosen_BK.sum(dim=1).clamp_min(1)

    def _mask(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masked tokens (B, L), K places of each text (B, K), and which of these are chosen (B, K).

        In training, places and replacements are drawn from torch's generator. In evaluation, places are a function of
        the sample's id and its tokens, and all are replaced with [MASK]: losses of steps, and of runs on the same
        packed data, can be compared.
        """
        token_BL, device = batch["tokens"].long(), batch["tokens"].device
        place_L = torch.arange(token_BL.shape[1], device=device)
        if self.training:
            draw_BL = torch.rand(token_BL.shape, device=device)
        else:  # Knuth's multiplicative hash: steps of the golden ratio, modulo 1
            draw_BL = (batch["sample_id"][:, None] * 7919 + place_L) * 2654435761 % 2**32 / 2**32
        is_usable_BL = token_BL > tokenizer.UNK
        order_BL = draw_BL.masked_fill(~is_usable_BL, 2).argsort(dim=1, stable=True)
        place_BK = order_BL[:, : math.ceil(SHARE * len(place_L))]
        old_BK = token_BL.gather(1, place_BK)
        count_B1 = (SHARE * is_usable_BL.sum(dim=1, keepdim=True)).round().clamp_min(1)
        is_chosen_BK = (place_L[: place_BK.shape[1]] < count_B1) & (old_BK > tokenizer.UNK)
        new_BK = torch.full_like(old_BK, self.mask)
        if self.training:
            draw_BK = torch.rand(place_BK.shape, device=device)
            random_BK = torch.randint(tokenizer.UNK + 1, self.pieces, place_BK.shape, device=device)
            new_BK = torch.where(draw_BK < MASKED, new_BK, torch.where(draw_BK < MASKED + RANDOM, random_BK, old_BK))
        masked_BL = token_BL.scatter(1, place_BK, torch.where(is_chosen_BK, new_BK, old_BK))
        return masked_BL, place_BK, is_chosen_BK
