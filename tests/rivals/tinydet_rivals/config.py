"""Every option of the tinydet_rivals family: those of tinydet, and which detector."""

from dataclasses import dataclass

from jobs.tinydet import config as tinydet
from trainyard.config.settings import option


@dataclass
class Config(tinydet.Config):
    """All options of a rival; `model.*` sizes it as far as it has such a part, and `model.variant` decides nothing."""

    rival: str = option(
        "faster_rcnn",
        "faster_rcnn: torchvision's Faster R-CNN; deformable_detr: transformers' Deformable DETR",
        choices=("faster_rcnn", "deformable_detr"),
    )
