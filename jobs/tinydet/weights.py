"""Initialises a network from backbone or detector weights; a classifier of other categories is left out."""

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
NESTED_KEYS = ("ema", "model", "state_dict", "module")
CATEGORY_PARTS = ("class_embed.", "proposal_class.", "label_embed.")
"""Parameters that depend on the categories."""

RENAMED_PREFIXES = {
    "backbone.0.body.": "backbone.body.",
    "transformer.decoder.norm.": "decoder_norm.",
    "transformer.decoder.query_scale.": "query_scale.",
    "transformer.decoder.ref_point_head.": "ref_point_head.",
}
"""Prefixes in facebookresearch/detr and Atten4Vis/ConditionalDETR -> ours."""


def load_backbone(backbone: Backbone, file: str) -> None:
    """Load weights with torchvision's names into a backbone; the classifier `fc` is left out.

    Raises:
        UserError: the file is missing or has no weights, or a weight is missing or has another shape.
    """
    found = {name.removeprefix("body."): value for name, value in read_tensors(file, "model.backbone_weights").items()}
    wanted = {name: value for name, value in backbone.body.state_dict().items() if "num_batches_tracked" not in name}
    option = f"model.backbone_weights={file}"
    for name, value in wanted.items():
        _check_weight(option, name, value, found, "Set model.backbone to the one in the file.")
    backbone.body.load_state_dict({name: found[name] for name in wanted}, strict=False)
    logger.info("{}: {} weights of the backbone loaded, {} not used", file, len(wanted), len(set(found) - set(wanted)))


def load_detector(network: nn.Module, file: str) -> None:
    """Load a checkpoint of this job, of facebookresearch/detr (vanilla) or of Conditional DETR (cond) into a detector.

    If the file has another number of categories, its classifier is left out and ours keeps its random weights.

    Raises:
        UserError: the file is missing or has no weights, or a weight outside the classifier is missing or does not fit.
    """
    found = {_rename_key(name): value for name, value in read_tensors(file, "model.weights").items()}
    wanted = {name: value for name, value in network.state_dict().items() if "num_batches_tracked" not in name}
    replaced = []
    for name, value in wanted.items():
        if name.startswith(CATEGORY_PARTS) and (name not in found or found[name].shape != value.shape):
            replaced.append(name)
            continue
        hint = "Set model.queries to the number in the file." if name.startswith("query_embed") else (
            "Set model.variant, backbone, dims, heads, feedforward and the numbers of layers to those in the file."
        )  # fmt: skip
        _check_weight(f"model.weights={file}", name, value, found, hint)
    network.load_state_dict({name: found[name] for name in wanted if name not in replaced}, strict=False)
    outcome = "its classifier is used: the categories must be the same, in the same order"
    if replaced:
        outcome = f"its classifier has other categories, ours starts from random weights: {', '.join(replaced)}"
    logger.info("{}: {} weights loaded; {}", file, len(wanted) - len(replaced), outcome)


def read_tensors(file: str, option: str) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or `torch.save` file by name without prefixes; executes no code from it.

    Raises:
        UserError: there is no such file, or it contains no tensors.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{option}={file}: no such file. Give a .safetensors, .pth or .ckpt file, or leave it empty.")
    try:
        content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    except Exception as error:  # each reader raises its own errors for a broken or unsafe file
        raise UserError(f"{option}={file}: not a file of tensors ({type(error).__name__}: {error}).") from error
    for key in NESTED_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {_strip_prefixes(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{option}={file}: it contains no tensors, only {', '.join(map(str, list(content)[:5]))}.")
    return tensors


def _check_weight(option: str, name: str, value: Tensor, found: dict[str, Tensor], hint: str) -> None:
    if name not in found:
        near = ", ".join(nearest(name, found, most=3, always=True)) or "nothing"
        raise UserError(f"{option}: it contains no '{name}'; nearest: {near}. {hint}")
    if found[name].shape != value.shape:
        raise UserError(
            f"{option}: '{name}' is {tuple(found[name].shape)}, but the model expects {tuple(value.shape)}. {hint}"
        )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_pickle(path: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):  # DETR stores its command line with the weights
        return torch.load(path, map_location="cpu", weights_only=True)


def _strip_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _rename_key(name: str) -> str:
    for theirs, ours in RENAMED_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
