"""The model: FCOS, which finds objects in images and says of which category they are."""

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS  # type: ignore[import-untyped]
from torchvision.models.detection.anchor_utils import AnchorGenerator  # type: ignore[import-untyped]
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone  # type: ignore[import-untyped]

from trainyard.train.module import Batch, DataInfo, Rows, TrainModule

from .config import Config
from .pack import CATEGORIES


def build(config: Config, data: DataInfo) -> "Detector":
    """Build the network for the categories of the data, with random weights (FCOS: Tian et al., arXiv:1904.01355)."""
    model, image = config.model, config.image
    backbone = resnet_fpn_backbone(
        backbone_name=model.backbone,
        weights=None,
        norm_layer=_make_norm,
        returned_layers=[2, 3, 4],
        trainable_layers=5,
    )
    categories = json.loads(data.artifacts[CATEGORIES])
    network = FCOS(
        backbone,
        num_classes=len(categories),
        anchor_generator=AnchorGenerator(sizes=((8,), (16,), (32,), (64,)), aspect_ratios=((1.0,),) * 4),
        image_mean=[0.0] * 3,  # the loader has normalised and resized them
        image_std=[1.0] * 3,
        min_size=min(image.height_px, image.width_px),
        max_size=max(image.height_px, image.width_px),
        score_thresh=0.01,
        detections_per_img=model.detections,
    )
    every = np.arange(len(data.columns.get("number", ())))  # none: to predict
    objects = (data.read("boxes", every), data.read("labels", every)) if len(every) else ([], [])
    return Detector(network, categories=categories, objects=objects, detections=model.detections)


def _make_norm(channels: int) -> nn.GroupNorm:
    """Return a normalisation that does not depend on the micro-batch and trains from random weights."""
    return nn.GroupNorm(32, channels)


class Detector(TrainModule):
    """Finds objects.

    Axes: B images, K detections of an image, n objects of an image.

    Args:
        objects: for `score`: the boxes (n, 4) of each image of the data set, and their categories (n,).
    """

    monitor = ("ap50", "max")
    tie_breaks = (("ap", "max"),)
    baseline = ("finding nothing", 0.0)

    def __init__(
        self,
        network: nn.Module,
        *,
        categories: Sequence[str],
        objects: tuple[list[np.ndarray], list[np.ndarray]],
        detections: int,
    ) -> None:
        super().__init__()
        self.network, self.categories, self.objects, self.detections = network, categories, objects, detections

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of FCOS's three losses, and each of them."""
        boxes_BL4 = _map_boxes(batch["boxes"], batch["affine"])
        targets = []
        for boxes, labels, count in zip(boxes_BL4, batch["labels"], batch["boxes_count"], strict=True):
            inside = _clip(boxes[:count], batch["image"].shape)
            kept = (inside[:, 2:] - inside[:, :2] > 1).all(dim=1)  # the others left the image when it was augmented
            targets.append({"boxes": inside[kept], "labels": labels[:count][kept]})
        losses = self.network(list(batch["image"]), targets)
        return {"loss": sum(losses.values()), **{name: value.detach() for name, value in losses.items()}}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the detections of each image, best first: `box` (B, K, 4), `score` (B, K) and `label` (B, K).

        Boxes are (x0, y0, x1, y1) in pixels of the stored image; the score is 0 where there are fewer than K.
        """
        detected = self.network(list(batch["image"].float()))
        rows: dict[str, Tensor] = {"sample_id": batch["sample_id"]}
        for name, key in (("box", "boxes"), ("score", "scores"), ("label", "labels")):
            first = detected[0][key]
            padded = first.new_zeros((len(detected), self.detections, *first.shape[1:]))
            for i, boxes in enumerate(detected):
                padded[i, : len(boxes[key])] = boxes[key]
            rows[name] = padded
        return {**rows, "box": _map_boxes(rows["box"], _invert(batch["affine"]))}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return COCO's average precision, at all overlaps and at 0.5, and its recall of all objects, 0..1."""
        from pycocotools.coco import COCO  # type: ignore[import-untyped]
        from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

        ids = rows["sample_id"]
        truth, detections = COCO(), []
        boxes, labels = ([values[i] for i in ids] for values in self.objects)
        truth.dataset = {
            "images": [{"id": int(i)} for i in ids],
            "categories": [{"id": i, "name": name} for i, name in enumerate(self.categories)],
            "annotations": [
                {
                    "id": 1 + 100_000 * place + i, "image_id": int(ids[place]), "category_id": int(labels[place][i]),
                    "bbox": _to_xywh(box), "area": float((box[2] - box[0]) * (box[3] - box[1])), "iscrowd": 0,
                }
                for place in range(len(ids))
                for i, box in enumerate(boxes[place])
            ],
        }  # fmt: skip
        for place, sample in enumerate(ids):
            for box, score, label in zip(rows["box"][place], rows["score"][place], rows["label"][place], strict=True):
                if score > 0:
                    detections.append(
                        {
                            "image_id": int(sample), "category_id": int(label), "bbox": _to_xywh(box),
                            "score": float(score),
                        }
                    )  # fmt: skip
        if not detections:
            return {"ap": 0.0, "ap50": 0.0, "recall": 0.0}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            truth.createIndex()
            coco = COCOeval(truth, truth.loadRes(detections), "bbox")
            coco.evaluate()
            coco.accumulate()
            coco.summarize()
        return {"ap": float(coco.stats[0]), "ap50": float(coco.stats[1]), "recall": float(coco.stats[8])}

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield a line for each detection, with its box in pixels of the image."""
        for i, key in enumerate(keys):
            for box, score, label in zip(rows["box"][i], rows["score"][i], rows["label"][i], strict=True):
                if score > 0:
                    sides = dict(zip(("x0", "y0", "x1", "y1"), box.tolist(), strict=True))
                    yield {"path": key, "category": self.categories[int(label)], "score": float(score), **sides}


def _map_boxes(boxes_BL4: Tensor, affine_B23: Tensor) -> Tensor:
    """Return the boxes (x0, y0, x1, y1) around the images of the given ones under maps of points."""
    x0, y0, x1, y1 = boxes_BL4.float().unbind(-1)
    corners_BL42 = torch.stack([torch.stack([x, y], -1) for x in (x0, x1) for y in (y0, y1)], dim=2)
    moved = torch.einsum("bij,blkj->blki", affine_B23[:, :, :2], corners_BL42) + affine_B23[:, None, None, :, 2]
    return torch.cat([moved.amin(dim=2), moved.amax(dim=2)], dim=-1)


def _clip(boxes_N4: Tensor, shape: Sequence[int]) -> Tensor:
    height, width = shape[-2:]
    return torch.stack([boxes_N4[:, 0::2].clamp(0, width), boxes_N4[:, 1::2].clamp(0, height)], dim=2).flatten(1)


def _invert(affine_B23: Tensor) -> Tensor:
    """Return the inverse maps."""
    inverse_B22 = torch.linalg.inv(affine_B23[:, :, :2])
    return torch.cat([inverse_B22, -inverse_B22 @ affine_B23[:, :, 2:]], dim=2)


def _to_xywh(box: Any) -> list[float]:
    x0, y0, x1, y1 = (float(value) for value in np.asarray(box))
    return [x0, y0, x1 - x0, y1 - y0]
