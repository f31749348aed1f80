"""Adapts published weights of detectors and of backbones to our names; a classifier of other categories is left out."""

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.train.module import AdaptedWeights
from trainyard.train.weights_file import rename_tensors

from .conditional import ConditionalDETR
from .vanilla import DETR

CATEGORY_PARTS = ("class_embed.", "proposal_class.", "label_embed.")
"""Parameters that depend on the categories."""

HINT = (
    "Set model.variant, backbone, norm, dims, heads, feedforward, model.queries and the numbers of layers to those in "
    "the file."
)
BACKBONE_HINT = "Set model.backbone to the one in the file, and model.norm=frozen or batch."

PUBLISHED = {
    r"backbone\.0\.body\.(.*)": r"backbone.body.\1",
    r"transformer\.decoder\.norm\.(.*)": r"decoder_norm.\1",
    r"transformer\.decoder\.(query_scale|ref_point_head)\.(.*)": r"\1.\2",
}
"""Names in facebookresearch/detr and Atten4Vis/ConditionalDETR -> ours."""


def adapt_backbone(body: nn.Module, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return the weights of torchvision's or timm's ResNet for a backbone's body; its classifier is left out."""
    named = {name.removeprefix("body."): value for name, value in tensors.items()}
    stages = {name.split(".")[0] for name in body.state_dict()}
    removed = {name.split(".")[0] for name in named if re.match(r"layer\d\.", name)} - stages
    unused = ("fc.*", "classifier.*", *(f"{stage}.*" for stage in sorted(removed)))
    return AdaptedWeights(named, "torchvision's or timm's ResNet", unused=unused, hint=BACKBONE_HINT)


def adapt_detector(network: nn.Module, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return a detector's weights by the names of `network`.

    The names may be ours, or those of facebookresearch/detr and of Conditional DETR's authors. A classifier of another
    number of categories is left out, and ours keeps its random weights.

    Raises:
        UserError: they are of another variant of ours.
    """
    if any("ca_qcontent_proj." in name for name in tensors) and not isinstance(network, ConditionalDETR):
        raise UserError("These weights are of Conditional DETR. Set model.variant=cond.")
    if any(".multihead_attn." in name for name in tensors) and not isinstance(network, DETR):
        raise UserError("These weights are of DETR. Set model.variant=vanilla.")
    named = rename_tensors(tensors, PUBLISHED)
    layout = "facebookresearch/detr and Conditional DETR" if named.keys() != tensors.keys() else ""
    expected = network.state_dict()
    replaced = tuple(
        name
        for name, value in expected.items()
        if name.startswith(CATEGORY_PARTS) and (name not in named or named[name].shape != value.shape)
    )
    unused = (*replaced, "transformer.decoder.bbox_embed.*")  # the authors of Conditional DETR save these twice
    return AdaptedWeights(named, layout, new=replaced, unused=unused, hint=HINT)


def adapt_module(
    module: nn.Module, network: nn.Module, body: nn.Module, tensors: Mapping[str, Tensor]
) -> AdaptedWeights:
    """Return weights by the names of the whole module, which has `network`, and in it the backbone's `body`."""
    if "layer1.0.conv1.weight" in tensors or "body.layer1.0.conv1.weight" in tensors:  # an image network alone
        adapted = adapt_backbone(body, tensors).add_prefix("network.backbone.body.")
        return replace(adapted, new=tuple(n for n in module.state_dict() if not n.startswith("network.backbone.")))
    ours = {name.removeprefix("network."): value for name, value in tensors.items()}
    return adapt_detector(network, ours).add_prefix("network.")
