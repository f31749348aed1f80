"""FCOS (Tian et al. 2019, arXiv:1904.01355), with torchvision's head and feature pyramid: learns from few images.

Legend: B samples, N cells of all levels, K categories, L objects, n detections. Boxes are corners in
pixels of the input.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOSHead  # type: ignore[import-untyped]
from torchvision.ops import FeaturePyramidNetwork, sigmoid_focal_loss  # type: ignore[import-untyped]

from . import geometry
from .config import ModelSettings
from .matching import Objects
from .network import Backbone, Detections

_RADIUS = 1.5
"""Cells whose centre is that close to an object's centre, in strides, belong to it: FCOS's centre sampling."""

_REACH = 8
"""A level has objects whose farthest edge is up to that many strides away; the coarsest has all larger ones."""


_CANDIDATES = 1000
"""Of twice the detections, at most so many are compared in pairs: their memory grows with the square."""


class FCOS(nn.Module):
    """Predicts from each cell the category of the object there, the distances of its edges, and how central it is."""

    def __init__(self, backbone: Backbone, model: ModelSettings, *, categories: int) -> None:
        super().__init__()
        self.backbone, self.strides = backbone, model.strides
        self.pyramid = FeaturePyramidNetwork([backbone.channels[stride] for stride in model.strides], model.dims)
        self.head = FCOSHead(model.dims, num_anchors=1, num_classes=categories)
        nn.init.ones_(self.head.regression_head.bbox_reg.bias)  # at 0, a ReLU may cut off an edge everywhere

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits (B, N, K), boxes (B, N, 4), logits of centrality (B, N), and the cells (N, 3): x, y, stride."""
        stages = dict(zip((4, 8, 16, 32), self.backbone(x_BCHW), strict=False))
        levels = list(self.pyramid(OrderedDict((str(stride), stages[stride]) for stride in self.strides)).values())
        parts = self.head(levels)
        with torch.autocast(x_BCHW.device.type, enabled=False):
            cells_N3 = torch.cat([list_cells(x, stride) for x, stride in zip(levels, self.strides, strict=True)])
            edges_BN4 = parts["bbox_regression"].float() * cells_N3[:, 2:]
            corner_N2 = cells_N3[:, :2]
            boxes_BN4 = torch.cat([corner_N2 - edges_BN4[..., :2], corner_N2 + edges_BN4[..., 2:]], dim=-1)
            return parts["cls_logits"].float(), boxes_BN4, parts["bbox_ctrness"].float().squeeze(2), cells_N3

    def detect(self, x_BCHW: Tensor, *, most: int, overlap: float = 0.6) -> Detections:
        """Return the best detections; of those of one category that overlap, the best.

        A suppressed detection suppresses others as well (Bolya et al. 2019, arXiv:1904.02689, section 4.3), so that
        shapes do not depend on the image. Suppressed detections have score 0.
        """
        logits_BNK, boxes_BN4, central_BN, _ = self(x_BCHW)
        with torch.autocast(x_BCHW.device.type, enabled=False):
            score_BNK = (logits_BNK.sigmoid() * central_BN.sigmoid()[..., None]).sqrt()
            categories = score_BNK.shape[2]
            candidates = max(most, min(2 * most, _CANDIDATES))
            score, index = score_BNK.flatten(1).topk(min(candidates, score_BNK[0].numel()), dim=1)
            label = index % categories
            height, width = x_BCHW.shape[2:]
            limit = boxes_BN4.new_tensor([width, height, width, height])
            boxes = boxes_BN4.gather(1, (index // categories)[..., None].expand(-1, -1, 4)).clamp(min=0).minimum(limit)
            last_first_n = -torch.arange(score.shape[1], device=score.device, dtype=score.dtype)
            score, order = torch.where(apply_fast_nms(boxes, label, overlap), score, last_first_n).topk(
                min(most, score.shape[1]), dim=1
            )
            return boxes.gather(1, order[..., None].expand(-1, -1, 4)), score.clamp(min=0), label.gather(1, order)

    def compute_losses(self, x_BCHW: Tensor, objects: Objects) -> tuple[dict[str, Tensor], Tensor]:
        """Return the sums of focal loss, 1 - GIoU and centrality's cross-entropy, and the cells that have an object."""
        logits_BNK, boxes_BN4, central_BN, cells_N3 = self(x_BCHW)
        with torch.autocast(x_BCHW.device.type, enabled=False):
            height, width = objects.size_px
            corners_BL4 = geometry.cxcywh_to_xyxy(objects.boxes_BL4) * boxes_BN4.new_tensor(
                [width, height, width, height]
            )
            assigned = [assign(cells_N3, *image) for image in zip(corners_BL4, objects.valid_BL, strict=True)]
            index_BN, has_BN = (torch.stack(parts) for parts in zip(*assigned, strict=True))
            target_BN4 = corners_BL4.gather(1, index_BN[..., None].expand(-1, -1, 4))
            label_BN = objects.labels_BL.gather(1, index_BN)
            wanted_BNK = F.one_hot(label_BN, logits_BNK.shape[2]) * has_BN[..., None]
            box_BN = 1 - geometry.giou(boxes_BN4, target_BN4)
            centrality_BN = compute_centrality(cells_N3, target_BN4)
            central_loss_BN = F.binary_cross_entropy_with_logits(central_BN, centrality_BN, reduction="none")
            losses = {
                "class": sigmoid_focal_loss(logits_BNK, wanted_BNK.float(), reduction="sum"),
                "box": (box_BN * has_BN).sum(),
                "centrality": (central_loss_BN * has_BN).sum(),
            }
            return losses, has_BN.sum().float()

    def repeated_layers(self) -> list[nn.Module]:
        """Return none: all cells share one head."""
        return []


def list_cells(map_BCHW: Tensor, stride: int) -> Tensor:
    """Return the centre of each cell in pixels and the stride, (H W, 3) float32, in order of rows."""
    height, width = map_BCHW.shape[2:]
    y, x = (
        (torch.arange(count, device=map_BCHW.device, dtype=torch.float32) + 0.5) * stride for count in (height, width)
    )
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([grid_x.flatten(), grid_y.flatten(), torch.full_like(grid_x.flatten(), stride)], dim=1)


def assign(cells_N3: Tensor, corners_L4: Tensor, valid_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return each cell's object, (N,) int64, and whether it has one, (N,) bool: the smallest that the cell is in.

    An object smaller than a stride counts as large as one: else it would have no cell, and not be learned.
    """
    stride_N1 = cells_N3[:, 2:]
    middle_L2, side_L2 = (corners_L4[:, :2] + corners_L4[:, 2:]) / 2, corners_L4[:, 2:] - corners_L4[:, :2]
    half_NL2 = torch.maximum(side_L2, stride_N1[..., None]) / 2
    distance_NL2 = (cells_N3[:, None, :2] - middle_L2).abs()
    is_near_NL = (distance_NL2 <= torch.minimum(half_NL2, _RADIUS * stride_N1[..., None])).all(dim=2)
    farthest_NL = (distance_NL2 + half_NL2).amax(dim=2)
    lowest_N1 = torch.where(stride_N1 == stride_N1.amin(), 0.0, _REACH / 2 * stride_N1)
    highest_N1 = torch.where(stride_N1 == stride_N1.amax(), torch.inf, _REACH * stride_N1)
    is_in_NL = is_near_NL & (farthest_NL >= lowest_N1) & (farthest_NL < highest_N1) & valid_L
    return torch.where(is_in_NL, geometry.area(corners_L4), torch.inf).argmin(dim=1), is_in_NL.any(dim=1)


def compute_centrality(cells_N3: Tensor, corners_BN4: Tensor) -> Tensor:
    """Return (B, N), 1 at the centre of a box and 0 at its edges and outside (equation 3)."""
    edges_BN22 = torch.stack([cells_N3[:, :2] - corners_BN4[..., :2], corners_BN4[..., 2:] - cells_N3[:, :2]], dim=-1)
    edges_BN22 = edges_BN22.clamp(min=0)
    ratios_BN2 = edges_BN22.amin(dim=-1) / edges_BN22.amax(dim=-1).clamp(min=1e-6)
    return ratios_BN2.prod(dim=-1).sqrt()


def apply_fast_nms(boxes_Bn4: Tensor, label_Bn: Tensor, overlap: float) -> Tensor:
    """Return which detections, best first, do not overlap a better one of their category, (B, n) bool.

    Fast NMS of YOLACT (Bolya et al., arXiv:1904.02689): a detection that is dropped still drops others.

    Args:
        overlap: the IoU up to which two are both kept.
    """
    over_Bnn = geometry.iou(boxes_Bn4[:, :, None], boxes_Bn4[:, None])[0] > overlap
    same_Bnn = label_Bn[:, :, None] == label_Bn[:, None]
    return ~(over_Bnn & same_Bnn).triu(diagonal=1).any(dim=1)
