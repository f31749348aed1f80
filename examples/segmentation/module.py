"""The model: a small U-Net that says the class of each pixel. Masks follow the images through augmentation."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.train.module import Batch, DataInfo, Rows, Signature, TrainModule

from .config import Config

OUTSIDE = 255  # what a mask has where the input shows nothing of the stored image


def build(config: Config, data: DataInfo) -> "UNet":
    """Build the network."""
    model = config.model
    return UNet(config.packing.classes, channels=config.image.channels, width=model.width, levels=model.levels)


class UNet(TrainModule):
    """Ronneberger et al. 2015 (arXiv:1505.04597), with padding and BatchNorm. Axes: B images, K classes."""

    monitor = ("mean_iou", "max")
    reads_noise = False

    def __init__(self, classes: Sequence[str], *, channels: int, width: int, levels: int) -> None:
        super().__init__()
        self.classes = classes
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(_double(below + here, here) for below, here in pairs)
        self.head = nn.Conv2d(width, len(classes), 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy over the pixels of each image."""
        logits_BKHW, true_BHW = self._compute(batch["image"]), batch["mask"]
        loss_BHW = functional.cross_entropy(logits_BKHW, true_BHW, ignore_index=OUTSIDE, reduction="none")
        pixels_B = (true_BHW != OUTSIDE).sum((1, 2)).clamp(min=1)
        return {"loss": (loss_BHW.sum((1, 2)) / pixels_B).mean()}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return `mask` (B, H, W) uint8; with a true mask, also `both` and `either` (B, K), in pixels."""
        found_BHW = self._compute(batch["image"]).argmax(1)
        rows = {"sample_id": batch["sample_id"], "mask": found_BHW.to(torch.uint8)}
        if "mask" in batch:
            numbers_K = torch.arange(len(self.classes), device=found_BHW.device)
            found, true = (values[..., None] == numbers_K for values in (found_BHW, batch["mask"]))
            rows |= {"both": (found & true).sum((1, 2)), "either": (found | true).sum((1, 2))}
        return rows

    def _compute(self, image_BCHW: Tensor) -> Tensor:
        x, kept = image_BCHW, []
        for layer in self.down:
            x = layer(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for layer, skip in zip(self.up, kept[-2::-1], strict=True):
            x = functional.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = layer(torch.cat([x, skip], dim=1))
        return self.head(x).float()

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the intersection over union of each class that occurs, over all pixels, and their mean."""
        both, either = rows["both"].sum(0), rows["either"].sum(0)
        found = {name: both[k] / either[k] for k, name in enumerate(self.classes) if either[k]}
        return {"mean_iou": sum(found.values()) / len(found), **{f"iou_{name}": value for name, value in found.items()}}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield the share of each class in each image."""
        for key, mask in zip(keys, rows["mask"], strict=True):
            yield {"path": key, **{name: float((mask == k).mean()) for k, name in enumerate(self.classes)}}

    def describe_predict(self) -> Signature:
        """Describe the inputs and outputs of the network."""
        classes = {"classes": list(self.classes)}
        return Signature({"image": "resized to height and width"}, {"mask": "class of each pixel"}, classes)


def _double(channels_in: int, channels: int) -> nn.Module:
    pairs = (channels_in, channels), (channels, channels)
    layers = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()] for a, b in pairs]
    return nn.Sequential(*layers[0], *layers[1])
