"""Self-training on faces without labels: the backbone learns to fill in masked squares, for a run that starts from it.

Xie et al., "SimMIM: a simple framework for masked image modeling" (CVPR 2022, arXiv:2111.09886): a linear layer
predicts the raw pixels, and the loss is their mean absolute error in the squares.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.train.module import AdaptedWeights, Batch, TrainModule

from .config import ModelSettings
from .network import DualCrossAttention
from .weights import adapt_weights

MASKED_SHARE = 0.6
SQUARES = 6
"""Squares along the shorter side: the paper masks 60 % of squares of 32 px in images of 192 px."""

_FIXED_MASKS = 64  # of evaluation, in turns by sample id


class ImageModule(TrainModule):
    """Predicts the pixels of the masked squares of a face.

    Masked pixels are 0 before patches are embedded. The paper replaces embedded patches by a learned token instead, but
    the convolutions of model.stem=conv would have seen their pixels. With model.stem=patch both give all masked patches
    one learned embedding, here the convolution's bias.

    The names `backbone` and `head` are those of published weights, which `adapt_weights` knows.
    """

    reads_noise = False

    def __init__(self, model: ModelSettings, *, image_px: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.backbone = DualCrossAttention(
            replace(model, glca=False, pwca_layers=0), image_px=image_px, channels=channels
        )
        self.patch_px = model.patch_px
        self.head = nn.Linear(model.dims, channels * model.patch_px**2)
        self.square_px = model.patch_px * max(1, round(min(image_px) / SQUARES / model.patch_px))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the mean absolute error of the masked pixels, in units of the normalised image."""
        image_BCHW = batch["image"]
        mask_B1HW = self._draw_masks(batch)
        patches_BDN = self.head(self.backbone.encode_patches(image_BCHW * ~mask_B1HW)).transpose(1, 2)
        filled_BCHW = functional.pixel_shuffle(patches_BDN.unflatten(2, self.backbone.grid), self.patch_px)
        error_BCHW = (filled_BCHW.float() - image_BCHW).abs() * mask_B1HW
        error_B = error_BCHW.mean(dim=1).sum(dim=(1, 2)) / mask_B1HW.sum(dim=(1, 2, 3))
        return {"loss": error_B.mean()}

    def _draw_masks(self, batch: Batch) -> Tensor:
        """Return the masked pixels, (B, 1, H, W) bool; in evaluation those of the sample, so that losses compare."""
        sample_id_B, (height, width) = batch["sample_id"], batch["image"].shape[2:]
        grid = (math.ceil(height / self.square_px), math.ceil(width / self.square_px))
        squares = math.prod(grid)
        if self.training:
            noise_BS = torch.rand(len(sample_id_B), squares, device=sample_id_B.device)
        else:
            fixed = torch.rand(_FIXED_MASKS, squares, generator=torch.Generator().manual_seed(0))
            noise_BS = fixed.to(sample_id_B.device)[sample_id_B % _FIXED_MASKS]
        masked = math.ceil(MASKED_SHARE * squares)
        mask_BS = noise_BS <= noise_BS.sort(dim=1).values[:, masked - 1 : masked]
        mask_B1HW = functional.interpolate(mask_BS.view(-1, 1, *grid).float(), scale_factor=self.square_px)
        return mask_B1HW[:, :, :height, :width].bool()

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the backbone's weights of such a run or of a ViT: the linear layer starts from scratch."""
        return replace(adapt_weights(self.backbone, tensors).add_prefix("backbone."), new=("head.*",))

    def repeated_layers(self) -> nn.ModuleList:
        """Return the self-attention blocks."""
        return self.backbone.blocks
