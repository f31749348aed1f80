"""Adapts published weights of detectors and of backbones to our names; a classifier of other categories is left out."""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.train.module import AdaptedWeights
from trainyard.train.weights_file import rename_tensors

from .conditional import ConditionalDETR
from .multiscale import DeformableDETR

CATEGORY_PARTS = ("class_embed.", "proposal_class.", "label_embed.")
"""Parameters that depend on the categories."""

HINT = (
    "Set model.variant, backbone, norm, dims, heads, feedforward, model.queries and the numbers of layers to those in "
    "the file."
)
BACKBONE_HINT = "Set model.backbone to the one in the file, and model.norm=frozen or batch."

OTHERS = {
    "fpn_blocks.": (
        "RT-DETR: its encoder concatenates levels, ours adds them",
        "Its image network begins with three convolutions, ours with one, so that does not fit either.",
    ),
    "sampling_offsets.": (
        "Deformable DETR or a successor (DAB, DINO): its encoder attends on all levels",
        "Its image network is the same, if model.backbone and model.norm=frozen say so: "
        "start_from_partial=[network.backbone.*]",
    ),
}
"""A part of the names of detectors that do not compute what a variant of ours does, what they are, and what of them
fits."""

PUBLISHED = {
    r"backbone\.0\.body\.(.*)": r"backbone.body.\1",
    r"transformer\.decoder\.norm\.(.*)": r"decoder_norm.\1",
    r"transformer\.decoder\.(query_scale|ref_point_head)\.(.*)": r"\1.\2",
}
"""Names in facebookresearch/detr and Atten4Vis/ConditionalDETR -> ours."""

_LAYER = r"model\.(encoder|decoder)\.layers\.(\d+)\."
_OURS = r"transformer.\1.layers.\2."
_TRANSFORMERS_BODY = r"model\.backbone\.(?:conv_encoder\.)?model\.(.*)"
TRANSFORMERS = {
    _TRANSFORMERS_BODY: r"backbone.body.\1",
    r"model\.input_projection\.(.*)": r"input_proj.\1",
    r"model\.query_position_embeddings\.(.*)": r"query_embed.\1",
    r"model\.decoder\.layernorm\.(.*)": r"decoder_norm.\1",
    r"model\.decoder\.(query_scale|ref_point_head)\.(.*)": r"\1.\2",
    r"class_labels_classifier\.(.*)": r"class_embed.\1",
    r"bbox_predictor\.(.*)": r"bbox_embed.\1",
    _LAYER + r"((?:sa|ca)_\w+_proj)\.(.*)": _OURS + r"\3.\4",
    _LAYER + r"self_attn_layer_norm\.(.*)": _OURS + r"norm1.\3",
    _LAYER + r"encoder_attn_layer_norm\.(.*)": _OURS + r"norm2.\3",
    _LAYER + r"fc([12])\.(.*)": _OURS + r"linear\3.\4",
    _LAYER + r"self_attn\.(.*)": _OURS + r"self_attn.\3",
}
"""Names in files of transformers' DETR and Conditional DETR -> ours; those of a layer that differ between the two, and
in a decoder, are in `_rename_transformers`."""

RESNET = {
    r"(?:resnet\.)?embedder\.embedder\.convolution\.(.*)": r"conv1.\1",
    r"(?:resnet\.)?embedder\.embedder\.normalization\.(.*)": r"bn1.\1",
    r"(?:resnet\.)?encoder\.stages\.(\d)\.layers\.(\d+)\.shortcut\.convolution\.(.*)": r"layer\1+.\2.downsample.0.\3",
    r"(?:resnet\.)?encoder\.stages\.(\d)\.layers\.(\d+)\.shortcut\.normalization\.(.*)": r"layer\1+.\2.downsample.1.\3",
    r"(?:resnet\.)?encoder\.stages\.(\d)\.layers\.(\d+)\.layer\.(\d)\.convolution\.(.*)": r"layer\1+.\2.conv\3+.\4",
    r"(?:resnet\.)?encoder\.stages\.(\d)\.layers\.(\d+)\.layer\.(\d)\.normalization\.(.*)": r"layer\1+.\2.bn\3+.\4",
}
"""Names of transformers' ResNetModel -> torchvision's and timm's, which are ours; a number before "+" is one less."""


def is_backbone(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file has the weights of an image network alone."""
    names = ("layer1.0.conv1.weight", "body.layer1.0.conv1.weight", "embedder.embedder.convolution.weight")
    return any(name in tensors or f"resnet.{name}" in tensors for name in names)


def adapt_backbone(body: nn.Module, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return the weights of an image network by the names of a backbone's body; its classifier is left out.

    The names may be those of torchvision's and timm's ResNets, or of transformers' ResNetModel.
    """
    named = _rename_resnet({name.removeprefix("body."): value for name, value in tensors.items()})
    stages = {name.split(".")[0] for name in body.state_dict()}
    removed = {name.split(".")[0] for name in named if re.match(r"layer\d\.", name)} - stages
    unused = ("fc.*", "classifier.*", *(f"{stage}.*" for stage in sorted(removed)))
    return AdaptedWeights(named, "torchvision's or timm's ResNet", unused=unused, hint=BACKBONE_HINT)


def adapt_detector(network: nn.Module, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return a detector's weights by the names of `network`.

    The names may be ours, those of facebookresearch/detr and of Conditional DETR's authors, or those of transformers'
    classes of these two. A classifier of another number of categories is left out, and ours keeps its random weights.

    Raises:
        UserError: they are of another variant of ours.
    """
    _refuse_other_variants(network, tensors)
    other = next((about for part, about in OTHERS.items() if any(part in name for name in tensors)), None)
    if other is not None:
        return _adapt_other_detector(tensors, *other)
    layout = ""
    if "class_labels_classifier.weight" in tensors:
        layout, named = "transformers", _rename_transformers(tensors, conditional=isinstance(network, ConditionalDETR))
    else:
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


def _adapt_other_detector(tensors: Mapping[str, Tensor], model: str, fitting: str) -> AdaptedWeights:
    """Return the image network of a detector that no variant of ours computes, and why nothing else fits."""
    named = rename_tensors(tensors, PUBLISHED | {_TRANSFORMERS_BODY: r"backbone.body.\1"})
    prefix = "backbone.body."
    body = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    found = {prefix + name: value for name, value in _rename_resnet(body).items()}
    hint = f"These weights are of {model}, so no model.variant computes what they do. {fitting}"
    return AdaptedWeights(found, model.partition(":")[0], hint=hint)


def _refuse_other_variants(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    is_conditional = any("ca_qcontent_proj." in name for name in tensors)
    is_vanilla = any(".multihead_attn." in name or ".encoder_attn.q_proj." in name for name in tensors)
    if is_conditional and not isinstance(network, ConditionalDETR):
        raise UserError("These weights are of Conditional DETR. Set model.variant=cond.")
    if is_vanilla and isinstance(network, ConditionalDETR | DeformableDETR):
        raise UserError("These weights are of DETR. Set model.variant=vanilla.")


def _rename_transformers(tensors: Mapping[str, Tensor], *, conditional: bool) -> dict[str, Tensor]:
    attention = "cross_attn" if conditional else "multihead_attn"
    rules = {
        **TRANSFORMERS,
        _LAYER + r"encoder_attn\.(.*)": _OURS + rf"{attention}.\3",
        r"model\.encoder\.layers\.(\d+)\.final_layer_norm\.(.*)": r"transformer.encoder.layers.\1.norm2.\2",
        r"model\.decoder\.layers\.(\d+)\.final_layer_norm\.(.*)": r"transformer.decoder.layers.\1.norm3.\2",
    }
    named = rename_tensors(tensors, rules)
    for name in [name for name in named if ".q_proj." in name]:
        parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        if all(part in named for part in parts):
            named[name.replace(".q_proj.", ".in_proj_")] = torch.cat([named.pop(part) for part in parts])
    prefix = "backbone.body."
    body = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    rest = {name: value for name, value in named.items() if not name.startswith(prefix)}
    return rest | {prefix + name: value for name, value in _rename_resnet(body).items()}


def _rename_resnet(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        re.sub(r"(\d)\+", lambda found: str(int(found[1]) + 1), name): value
        for name, value in rename_tensors(tensors, RESNET).items()
    }


def adapt_module(
    module: nn.Module, network: nn.Module, body: nn.Module, tensors: Mapping[str, Tensor]
) -> AdaptedWeights:
    """Return weights by the names of the whole module, which has `network`, and in it the backbone's `body`."""
    if is_backbone(tensors):
        adapted = adapt_backbone(body, tensors).add_prefix("network.backbone.body.")
        return replace(adapted, new=tuple(n for n in module.state_dict() if not n.startswith("network.backbone.")))
    ours = {name.removeprefix("network."): value for name, value in tensors.items()}
    return adapt_detector(network, ours).add_prefix("network.")
