"""torchvision's Faster R-CNN and transformers' Deformable DETR, from random weights, in the place of tinydet's network.

Networks, losses and decoding are the libraries'; images, objects and metrics are tinydet's.
"""

from collections import OrderedDict
from typing import Any

import torch
from rivals.tinydet_rivals.config import Config
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

from jobs.tinydet.geometry import cxcywh_to_xyxy
from jobs.tinydet.matching import Objects
from jobs.tinydet.module import Artifacts, TinyDet
from jobs.tinydet.network import Backbone, Detections, choose_best, make_class_head, make_group_norm
from trainyard.train.module import Batch, DataInfo, TrainModule


class Rival(TinyDet):
    """tinydet with another detector."""

    parameter_groups = TrainModule.parameter_groups

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the detector's own losses and their sum."""
        x_BCHW, objects, _ = self._prepare(batch)
        return self.network.compute_losses(x_BCHW, objects)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the detector's own decoding finds, as rows of tinydet."""
        x_BCHW = self._normalise(batch["image"] * self.loader_std + self.loader_mean)
        return self._make_rows(self.network.detect(x_BCHW, most=self.evaluation.detections), batch)


class TorchvisionDetector(nn.Module):
    """Faster R-CNN (arXiv:1506.01497) with group norm and, at each level and one above, anchors of two strides.

    Of torchvision's defaults three differ, besides the size of the input: 128 regions of an image, not 512, train the
    second stage, because no image has more than 30 objects and a step would take twice as long; the first stage keeps
    500 for it, not 2000; and detections count from a score of 0.001, not 0.05, because average precision counts all.
    """

    def __init__(self, config: Config, *, categories: int) -> None:
        super().__init__()
        model, sides = config.model, (config.image.height_px, config.image.width_px)
        backbone = SmallPyramid(config) if model.backbone == "small" else resnet_fpn_backbone(
            backbone_name=model.backbone, weights=None, norm_layer=make_group_norm, trainable_layers=5,
            returned_layers=[(4, 8, 16, 32).index(stride) + 1 for stride in model.strides],
        )  # fmt: skip
        sizes = [(2 * stride,) for stride in (*model.strides, 2 * model.strides[-1])]
        self.detector = FasterRCNN(
            backbone, 1 + categories, min_size=min(sides), max_size=max(sides), image_mean=[0.0] * 3,
            image_std=[1.0] * 3, rpn_anchor_generator=AnchorGenerator(sizes, [(0.5, 1.0, 2.0)] * len(sizes)),
            rpn_post_nms_top_n_train=500, rpn_post_nms_top_n_test=500, box_batch_size_per_image=128,
            box_roi_pool=MultiScaleRoIAlign([str(level) for level in range(len(model.strides))], 7, 2),
            box_score_thresh=0.001, box_detections_per_img=config.evaluation.detections,
        )  # fmt: skip

    def compute_losses(self, x_BCHW: Tensor, objects: Objects) -> dict[str, Tensor]:
        """Return the two losses of each stage, and their sum."""
        corners_BL4 = cxcywh_to_xyxy(objects.boxes_BL4) * objects.boxes_BL4.new_tensor([*objects.size_px[::-1]] * 2)
        images = zip(corners_BL4, objects.labels_BL, objects.valid_BL, strict=True)
        targets = [{"boxes": boxes[valid], "labels": 1 + labels[valid]} for boxes, labels, valid in images]
        losses = self.detector(list(x_BCHW), targets)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def detect(self, x_BCHW: Tensor, *, most: int) -> Detections:
        """Return corners (B, n, 4) px, scores and labels (B, n), with score 0 where an image has fewer."""
        found = self.detector(list(x_BCHW))
        boxes, scores, labels = (
            nn.utils.rnn.pad_sequence([image[name] for image in found], batch_first=True)
            for name in ("boxes", "scores", "labels")
        )
        return boxes, scores, (labels - 1).clamp(min=0)


class SmallPyramid(nn.Module):
    """tinydet's small backbone with a feature pyramid, as `resnet_fpn_backbone` returns them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.body, self.out_channels = make_small_backbone(config), config.model.dims
        channels = [self.body.channels[stride] for stride in config.model.strides]
        self.pyramid = FeaturePyramidNetwork(channels, config.model.dims, extra_blocks=LastLevelMaxPool())

    def forward(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        return self.pyramid(OrderedDict(zip("0123", self.body(x_BCHW), strict=False)))


class TransformersDetector(nn.Module):
    """Deformable DETR (arXiv:2010.04159) with box refinement and the losses of all layers, on tinydet's small backbone.

    It has one stage: of two, the class computes no loss of the first (transformers 5.23). The last layers of its heads
    start as the authors' do, which the class leaves out: probability 0.01, boxes around their points.
    """

    def __init__(self, config: Config, *, categories: int) -> None:
        super().__init__()
        model, backbone = config.model, make_small_backbone(config)
        self.detector: Any = DeformableDetrForObjectDetection(DeformableDetrConfig(
            backbone_config={
                "model_type": "resnet", "layer_type": "basic", "depths": [1] * 4,
                "hidden_sizes": list(backbone.channels.values()),
                "out_features": [f"stage{number + 1}" for number in range(len(model.strides))],
            },
            d_model=model.dims, num_queries=model.queries, num_feature_levels=len(model.strides),
            encoder_layers=model.encoder_layers, decoder_layers=model.decoder_layers,
            encoder_attention_heads=model.heads, decoder_attention_heads=model.heads,
            encoder_ffn_dim=model.feedforward, decoder_ffn_dim=model.feedforward, encoder_n_points=model.points,
            decoder_n_points=model.points, dropout=model.dropout, num_labels=categories, with_box_refine=True,
            auxiliary_loss=True,
        ))  # fmt: skip
        self.detector.model.backbone.model = backbone
        for head in self.detector.class_embed:
            nn.init.constant_(head.bias, float(make_class_head(1, 1).bias.detach()))
        for head in self.detector.bbox_embed:
            nn.init.zeros_(head.layers[-1].weight)
            head.layers[-1].bias.data = torch.tensor([0.0, 0.0, -2.0, -2.0])

    def compute_losses(self, x_BCHW: Tensor, objects: Objects) -> dict[str, Tensor]:
        """Return the weighted sum of the losses of all layers, and those of the last."""
        images = zip(objects.boxes_BL4, objects.labels_BL, objects.valid_BL, strict=True)
        labels = [{"boxes": boxes[valid], "class_labels": labels[valid]} for boxes, labels, valid in images]
        found = self.detector(x_BCHW, labels=labels)
        return {"loss": found.loss, **{name: found.loss_dict[name] for name in ("loss_ce", "loss_bbox", "loss_giou")}}

    def detect(self, x_BCHW: Tensor, *, most: int) -> Detections:
        """Return the best of all queries and categories, as transformers' image processor does."""
        found = self.detector(x_BCHW)
        size_px = (x_BCHW.shape[2], x_BCHW.shape[3])
        return choose_best(found.logits, found.pred_boxes, size_px=size_px, most=most, is_softmax=False)


def make_small_backbone(config: Config) -> Backbone:
    """Build tinydet's small backbone, whose stages are at strides 4, 8, and so on up to the coarsest."""
    model = config.model
    return Backbone("small", norm="group", width=model.width, coarsest=model.strides[-1])


def build(config: Config, data: DataInfo) -> Rival:
    """Build a rival for the categories of the data."""
    artifacts = Artifacts.from_data(data)
    make = {"faster_rcnn": TorchvisionDetector, "deformable_detr": TransformersDetector}[config.rival]
    network: Any = make(config, categories=len(artifacts.categories))
    return Rival(network, config, terms=config.loss, artifacts=artifacts, data=data)
