"""Weights of a vision transformer from a file, fitted to another picture size and depth."""

from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional

from trainyard.errors import UserError
from trainyard.text import nearest

from .network import DualCrossAttention

PREFIXES = ("module.", "model.", "backbone.", "encoder.")
NESTS = ("state_dict", "model", "teacher")
LEFT_OUT = ("head.", "head_dist.", "fc_norm.", "pre_logits.", "dist_token")


def load_weights(network: DualCrossAttention, file: str) -> None:
    """Fill the self-attention part of a network; the global-local block starts as a copy of its last block.

    Names are timm's and DeiT's (`patch_embed.proj.weight`, `blocks.0.attn.qkv.weight`, ...), which are ours. Position
    embeddings are interpolated to the network's grid; blocks beyond its depth are not used; heads are left out.

    Args:
        file: safetensors, or what `torch.save` wrote, read with `weights_only`: nothing in it is executed.

    Raises:
        UserError: there is no such file, it is no weights file, or a weight is missing or has another shape.
    """
    found = _read(Path(file))
    wanted = {name: value for name, value in network.state_dict().items() if not name.startswith("glca.")}
    if "pos_embed" in found:
        found["pos_embed"] = _interpolated(found["pos_embed"], network.grid)
    for name, value in wanted.items():
        if name not in found:
            near = ", ".join(nearest(name, found, most=3, always=True)) or "nothing"
            raise UserError(
                f"model.weights={file}: no '{name}' in it; nearest: {near}. Expected a ViT in timm's names."
            )
        if found[name].shape != value.shape:
            raise UserError(
                f"model.weights={file}: '{name}' is {tuple(found[name].shape)}, but the model wants "
                f"{tuple(value.shape)}. Set model.dims, model.patch_px and image.channels to those of the file."
            )
    network.load_state_dict({name: found[name] for name in wanted}, strict=False)
    if network.glca is not None:
        network.glca.load_state_dict(network.blocks[-1].state_dict(), strict=False)
        network.glca.norm.load_state_dict(network.norm.state_dict())
    unused = sorted(name for name in found if name not in wanted and not name.startswith(LEFT_OUT))
    logger.info("{}: {} weights loaded, {} not used", file, len(wanted), len(unused))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"model.weights={path}: no such file. Give a .safetensors or .pth file, or leave it empty.")
    try:
        content: Any = _safetensors(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except Exception as error:  # each reader has its own errors for a broken or unsafe file
        raise UserError(f"model.weights={path}: not a file of tensors ({type(error).__name__}: {error}).") from error
    for nest in NESTS:
        if isinstance(content, dict) and isinstance(content.get(nest), dict):
            content = content[nest]
    return {_bare(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _interpolated(pos_1ND: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return position embeddings (1, 1 + H * W, D) for another grid, bicubic, from a square one."""
    class_token, patches_1ND = pos_1ND[:, :1], pos_1ND[:, 1:]
    side = round(patches_1ND.shape[1] ** 0.5)
    if side**2 != patches_1ND.shape[1] or (side, side) == grid:
        return pos_1ND
    map_1DHW = patches_1ND.transpose(1, 2).reshape(1, -1, side, side)
    resized = functional.interpolate(map_1DHW.float(), size=grid, mode="bicubic", align_corners=False)
    return torch.cat([class_token, resized.flatten(2).transpose(1, 2).to(pos_1ND.dtype)], dim=1)
