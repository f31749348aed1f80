"""Starts a network from a backbone's or a whole detector's weights; a classifier of other categories is left out."""

import argparse
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.text import nearest

from .network import Backbone

PREFIXES = ("module.", "_orig_mod.", "network.")
NESTS = ("ema", "model", "state_dict", "module")
HEADS = ("class_embed.", "proposal_class.", "label_embed.")
"""Parts that know the categories."""

OTHERS = {
    "backbone.0.body.": "backbone.body.",
    "transformer.decoder.norm.": "decoder_norm.",
    "transformer.decoder.query_scale.": "query_scale.",
    "transformer.decoder.ref_point_head.": "ref_point_head.",
}
"""Names of facebookresearch/detr and Atten4Vis/ConditionalDETR, and ours."""


def load_backbone(backbone: Backbone, file: str) -> None:
    """Fill a backbone from weights in torchvision's names; the classifier `fc` is left out.

    Raises:
        UserError: no such file, no weights file, or a weight is missing or of another shape.
    """
    found = {name.removeprefix("body."): value for name, value in read(file, "model.backbone_weights").items()}
    wanted = {name: value for name, value in backbone.body.state_dict().items() if "num_batches_tracked" not in name}
    option = f"model.backbone_weights={file}"
    for name, value in wanted.items():
        _refuse(option, name, value, found, "Set model.backbone to that of the file.")
    backbone.body.load_state_dict({name: found[name] for name in wanted}, strict=False)
    logger.info("{}: {} weights of the backbone loaded, {} not used", file, len(wanted), len(set(found) - set(wanted)))


def load_detector(network: nn.Module, file: str) -> None:
    """Fill a detector from a checkpoint of ours, of facebookresearch/detr (vanilla) or of Conditional DETR (cond).

    Where the file knows another number of categories its classifier is left out, and ours stays as it was drawn.

    Raises:
        UserError: no such file, no weights file, or a weight that is not of the classifier is missing or does not fit.
    """
    found = {_ours(name): value for name, value in read(file, "model.weights").items()}
    wanted = {name: value for name, value in network.state_dict().items() if "num_batches_tracked" not in name}
    replaced = []
    for name, value in wanted.items():
        if name.startswith(HEADS) and (name not in found or found[name].shape != value.shape):
            replaced.append(name)
            continue
        hint = "Set model.queries to that of the file." if name.startswith("query_embed") else (
            "Set model.variant, backbone, dims, heads, feedforward and the numbers of layers to those of the file."
        )  # fmt: skip
        _refuse(f"model.weights={file}", name, value, found, hint)
    network.load_state_dict({name: found[name] for name in wanted if name not in replaced}, strict=False)
    told = "its classifier is kept: it must be of the same categories, in the same order"
    if replaced:
        told = f"its classifier is of other categories, ours starts anew: {', '.join(replaced)}"
    logger.info("{}: {} weights loaded; {}", file, len(wanted) - len(replaced), told)


def read(file: str, option: str) -> dict[str, Tensor]:
    """Return the tensors of a file by bare name: .safetensors, or what `torch.save` wrote, nothing of it executed.

    Raises:
        UserError: there is no such file, or it holds no tensors.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{option}={file}: no such file. Give a .safetensors, .pth or .ckpt file, or leave it empty.")
    try:
        content: Any = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    except Exception as error:  # each reader has its own errors for a broken or unsafe file
        raise UserError(f"{option}={file}: not a file of tensors ({type(error).__name__}: {error}).") from error
    for nest in NESTS:
        if isinstance(content, dict) and isinstance(content.get(nest), dict):
            content = content[nest]
    tensors = {_bare(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{option}={file}: no tensors in it, but {', '.join(map(str, list(content)[:5]))}.")
    return tensors


def _refuse(option: str, name: str, value: Tensor, found: dict[str, Tensor], hint: str) -> None:
    if name not in found:
        near = ", ".join(nearest(name, found, most=3, always=True)) or "nothing"
        raise UserError(f"{option}: no '{name}' in it; nearest: {near}. {hint}")
    if found[name].shape != value.shape:
        raise UserError(
            f"{option}: '{name}' is {tuple(found[name].shape)}, but the model wants {tuple(value.shape)}. {hint}"
        )


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _pickled(path: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):  # DETR keeps its command line beside the weights
        return torch.load(path, map_location="cpu", weights_only=True)


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _ours(name: str) -> str:
    for theirs, ours in OTHERS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
