"""Initialises a network from backbone or detector weights; a classifier of other categories is left out."""

import argparse
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.text import find_nearest

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
    loaded = {name.removeprefix("body."): value for name, value in read_tensors(file, "model.backbone_weights").items()}
    expected = {name: value for name, value in backbone.body.state_dict().items() if "num_batches_tracked" not in name}
    option = f"model.backbone_weights={file}"
    for name, value in expected.items():
        _check_weight(option, name, value, loaded, "Set model.backbone to the one in the file.")
    backbone.body.load_state_dict({name: loaded[name] for name in expected}, strict=False)
    logger.info(
        "{}: {} weights of the backbone loaded, {} not used", file, len(expected), len(set(loaded) - set(expected))
    )


def load_detector(network: nn.Module, file: str) -> None:
    """Load a checkpoint of this job, of facebookresearch/detr (vanilla) or of Conditional DETR (cond) into a detector.

    If the file has another number of categories, its classifier is left out and ours keeps its random weights.

    Raises:
        UserError: the file is missing or has no weights, or a weight outside the classifier is missing or does not fit.
    """
    loaded = {_rename_key(name): value for name, value in read_tensors(file, "model.weights").items()}
    expected = {name: value for name, value in network.state_dict().items() if "num_batches_tracked" not in name}
    replaced = []
    for name, value in expected.items():
        if name.startswith(CATEGORY_PARTS) and (name not in loaded or loaded[name].shape != value.shape):
            replaced.append(name)
            continue
        hint = "Set model.queries to the number in the file." if name.startswith("query_embed") else (
            "Set model.variant, backbone, dims, heads, feedforward and the numbers of layers to those in the file."
        )  # fmt: skip
        _check_weight(f"model.weights={file}", name, value, loaded, hint)
    network.load_state_dict({name: loaded[name] for name in expected if name not in replaced}, strict=False)
    outcome = "its classifier is used: the categories must be the same, in the same order"
    if replaced:
        outcome = f"its classifier has other categories, ours starts from random weights: {', '.join(replaced)}"
    logger.info("{}: {} weights loaded; {}", file, len(expected) - len(replaced), outcome)


def read_tensors(file: str, option: str) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or `torch.save` file by name without prefixes; executes no code from it.

    Raises:
        UserError: there is no such file, or it contains no tensors.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{option}={file}: no such file. Give a .safetensors, .pth or .ckpt file, or leave it empty.")
    try:
        content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch_file(path)
    except Exception as error:  # each reader raises its own errors for a broken or unsafe file
        raise UserError(f"{option}={file}: not a file of tensors ({type(error).__name__}: {error}).") from error
    for key in NESTED_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {_strip_prefixes(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{option}={file}: it contains no tensors, only {', '.join(map(str, list(content)[:5]))}.")
    return tensors


def _check_weight(option: str, name: str, value: Tensor, loaded: dict[str, Tensor], hint: str) -> None:
    if name not in loaded:
        near = ", ".join(find_nearest(name, loaded, most=3, always=True)) or "nothing"
        raise UserError(f"{option}: it contains no '{name}'; nearest: {near}. {hint}")
    if loaded[name].shape != value.shape:
        raise UserError(
            f"{option}: '{name}' is {tuple(loaded[name].shape)}, but the model expects {tuple(value.shape)}. {hint}"
        )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_torch_file(path: Path) -> Any:
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
