"""Baselines without training: a variant's class in transformers, and torchvision's FCOS, both with random weights."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .config import ModelSettings
from .network import choose_best

Detections = tuple[Tensor, Tensor, Tensor]
"""As `network.choose_best` returns them; score 0 where an image has fewer than another."""

Detect = Callable[[Tensor], Detections]
"""Takes normalised images, (B, 3, H, W) float32."""

_STAGES = {4: "stage1", 8: "stage2", 16: "stage3", 32: "stage4"}
_BLOCKS = {"resnet18": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3], "resnet50": [3, 4, 6, 3], "small": [1, 1, 1, 1]}
_CLASSES = {
    "vanilla": ("DETR", "Detr"),
    "cond": ("Conditional DETR", "ConditionalDetr"),
    "ms": ("Deformable DETR", "DeformableDetr"),
}
"""Variant -> its published name, and the prefix of its classes."""


def build_untrained(model: ModelSettings, *, categories: int, most: int, device: torch.device) -> dict[str, Detect]:
    """Return detectors with random weights by their names; the same weights whenever it is called.

    Their sizes and their numbers of layers and queries are the model's; what else a class can choose is as published.

    Args:
        most: detections of an image.
    """
    name, prefix = _CLASSES[model.variant]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = _build_transformer(prefix, model, categories).to(device).eval()
        fcos = _build_fcos(model, categories, most).to(device).eval()

    def detect_by_transformer(x_BCHW: Tensor) -> Detections:
        outputs, size_px = transformer(x_BCHW), (x_BCHW.shape[2], x_BCHW.shape[3])
        is_softmax = model.variant == "vanilla"
        return choose_best(outputs.logits, outputs.pred_boxes, size_px=size_px, most=most, is_softmax=is_softmax)

    def detect_by_fcos(x_BCHW: Tensor) -> Detections:
        sides = sorted(x_BCHW.shape[2:])  # so that it does not resize them
        fcos.transform.min_size, fcos.transform.max_size = (sides[0],), sides[1]
        detections = fcos(list(x_BCHW))
        boxes, scores, labels = (
            nn.utils.rnn.pad_sequence([row[key] for row in detections], batch_first=True)
            for key in ("boxes", "scores", "labels")
        )
        return boxes, scores, labels

    return {f"untrained {name} (transformers)": detect_by_transformer, "untrained FCOS (torchvision)": detect_by_fcos}


def _build_transformer(prefix: str, model: ModelSettings, categories: int) -> Any:
    import transformers

    strides = model.strides if model.variant == "ms" else [32]
    expansion = 4 if model.backbone == "resnet50" else 1
    width = model.width if model.backbone == "small" else 64
    backbone = cast(Any, transformers.ResNetConfig)(
        embedding_size=width,
        hidden_sizes=[expansion * width * factor for factor in (1, 2, 4, 8)],
        depths=_BLOCKS[model.backbone],
        layer_type="basic" if expansion == 1 else "bottleneck",
        out_features=[_STAGES[stride] for stride in strides],
    )
    settings: dict[str, Any] = {
        "backbone_config": backbone,
        "num_labels": categories,
        "d_model": model.dims,
        "num_queries": model.queries,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
        "encoder_attention_heads": model.heads,
        "decoder_attention_heads": model.heads,
        "encoder_ffn_dim": model.feedforward,
        "decoder_ffn_dim": model.feedforward,
    }
    if model.variant == "ms":
        settings |= {"num_feature_levels": len(strides), "encoder_n_points": model.points}
        settings |= {"decoder_n_points": model.points, "disable_custom_kernels": True}
    make, configure = (getattr(transformers, f"{prefix}{part}") for part in ("ForObjectDetection", "Config"))
    return make(configure(**settings))


def _build_fcos(model: ModelSettings, categories: int, most: int) -> Any:
    from torchvision.models.detection import FCOS  # type: ignore[import-untyped]
    from torchvision.models.detection.anchor_utils import AnchorGenerator  # type: ignore[import-untyped]
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone  # type: ignore[import-untyped]

    backbone = resnet_fpn_backbone(
        backbone_name="resnet18" if model.backbone == "small" else model.backbone,
        weights=None,
        returned_layers=[2, 3, 4],
    )
    anchors = AnchorGenerator(  # one in each cell of the four levels, with the stride as its side, as FCOS has it
        sizes=((8,), (16,), (32,), (64,)), aspect_ratios=((1.0,),) * 4
    )
    # the images are normalised already, and a threshold would leave no detection of an untrained network
    return FCOS(
        backbone,
        categories,
        anchor_generator=anchors,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        score_thresh=0.0,
        detections_per_img=most,
    )
