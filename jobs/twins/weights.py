"""Load pretrained weights of a vision transformer, adapted to another image size and depth."""

from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional

from trainyard.errors import UserError
from trainyard.text import find_nearest

from .network import DualCrossAttention

PREFIXES = ("module.", "model.", "backbone.", "encoder.")
NESTED_KEYS = ("state_dict", "model", "teacher")
IGNORED_PREFIXES = ("head.", "head_dist.", "fc_norm.", "pre_logits.", "dist_token")


def load_weights(network: DualCrossAttention, file: str) -> None:
    """Load the self-attention weights of a network; the global-local block starts as a copy of its last block.

    Our parameter names are those of timm and DeiT (`patch_embed.proj.weight`, `blocks.0.attn.qkv.weight`, ...).
    Position embeddings are interpolated to the network's grid; blocks beyond its depth and heads are ignored.

    Args:
        file: safetensors, or a file from `torch.save`, read with `weights_only` so that no code in it runs.

    Raises:
        UserError: the file is missing or not a weights file, or a weight is missing or has another shape.
    """
    loaded = _read_tensors(Path(file))
    expected = {name: value for name, value in network.state_dict().items() if not name.startswith("glca.")}
    if "pos_embed" in loaded:
        loaded["pos_embed"] = _interpolate_positions(loaded["pos_embed"], network.grid)
    for name, value in expected.items():
        if name not in loaded:
            near = ", ".join(find_nearest(name, loaded, most=3, always=True)) or "nothing"
            raise UserError(
                f"model.weights={file}: no '{name}' in it; nearest: {near}. Expected a ViT with timm's parameter names."
            )
        if loaded[name].shape != value.shape:
            raise UserError(
                f"model.weights={file}: '{name}' is {tuple(loaded[name].shape)}, but the model expects "
                f"{tuple(value.shape)}. Set model.dims, model.patch_px and image.channels to match the file."
            )
    network.load_state_dict({name: loaded[name] for name in expected}, strict=False)
    if network.glca is not None:
        network.glca.load_state_dict(network.blocks[-1].state_dict(), strict=False)
        network.glca.norm.load_state_dict(network.norm.state_dict())
    unused = sorted(name for name in loaded if name not in expected and not name.startswith(IGNORED_PREFIXES))
    logger.info("{}: {} weights loaded, {} not used", file, len(expected), len(unused))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file. Give a .safetensors or .pth file, or leave it empty.")
    try:
        content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except Exception as error:  # each reader raises its own errors for a broken or unsafe file
        raise UserError(f"model.weights={path}: not a file of tensors ({type(error).__name__}: {error}).") from error
    for key in NESTED_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    return {_strip_prefixes(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _strip_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _interpolate_positions(pos_1ND: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings (1, 1 + H * W, D) bicubically from a square grid to another grid."""
    class_token, patches_1ND = pos_1ND[:, :1], pos_1ND[:, 1:]
    side = round(patches_1ND.shape[1] ** 0.5)
    if side**2 != patches_1ND.shape[1] or (side, side) == grid:
        return pos_1ND
    map_1DHW = patches_1ND.transpose(1, 2).reshape(1, -1, side, side)
    resized = functional.interpolate(map_1DHW.float(), size=grid, mode="bicubic", align_corners=False)
    return torch.cat([class_token, resized.flatten(2).transpose(1, 2).to(pos_1ND.dtype)], dim=1)
