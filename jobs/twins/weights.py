"""Adapts pretrained weights of vision transformers: to our names, another image size, and fewer blocks."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.errors import UserError
from trainyard.train.module import AdaptedWeights
from trainyard.train.weights_file import rename_tensors

from .network import DualCrossAttention

PREFIXES = ("model.", "backbone.", "encoder.", "vit.", "deit.")
UNUSED = ("head.*", "head_dist.*", "fc_norm.*", "pre_logits.*", "pooler.*")
HINT = "Set model.dims, model.layers, model.patch_px, image.channels and model.stem to match the file."

OTHERS = {
    "dist_token": "a distilled DeiT, whose distillation token this network does not have",
    "embeddings.distillation_token": "a distilled DeiT, whose distillation token this network does not have",
    "blocks.0.ls1.gamma": "a ViT with LayerScale, such as DINOv2, CaiT or DeiT III, which scales what blocks add",
    "register_tokens": "a ViT with register tokens, such as DINOv2",
    "blocks.0.attn.q_norm.weight": "a ViT that normalises queries and keys",
    "patch_embed.norm.weight": "a Swin transformer",
}
"""A tensor of a vision transformer that computes something else than ours -> the name of that transformer."""

TORCHVISION = {
    r"class_token": "cls_token",
    r"encoder\.pos_embedding": "pos_embed",
    r"conv_proj\.(.*)": r"patch_embed.proj.\1",
    r"encoder\.layers\.encoder_layer_(\d+)\.ln_(\d)\.(.*)": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(.*)": r"blocks.\1.attn.qkv.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(.*)": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:linear_1|0)\.(.*)": r"blocks.\1.mlp.fc1.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:linear_2|3)\.(.*)": r"blocks.\1.mlp.fc2.\2",
    r"encoder\.ln\.(.*)": r"norm.\1",
    r"heads\.(.*)": r"head.\1",
}
"""Names of torchvision's VisionTransformer -> timm's, which are ours."""

TRANSFORMERS = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings\.projection\.(.*)": r"patch_embed.proj.\1",
    r"(?:encoder\.)?layer\.(\d+)\.layernorm_before\.(.*)": r"blocks.\1.norm1.\2",
    r"(?:encoder\.)?layer\.(\d+)\.layernorm_after\.(.*)": r"blocks.\1.norm2.\2",
    r"(?:encoder\.)?layer\.(\d+)\.attention\.attention\.(query|key|value)\.(.*)": r"blocks.\1.attn.\2.\3",
    r"(?:encoder\.)?layer\.(\d+)\.attention\.output\.dense\.(.*)": r"blocks.\1.attn.proj.\2",
    r"(?:encoder\.)?layer\.(\d+)\.intermediate\.dense\.(.*)": r"blocks.\1.mlp.fc1.\2",
    r"(?:encoder\.)?layer\.(\d+)\.output\.dense\.(.*)": r"blocks.\1.mlp.fc2.\2",
    r"layernorm\.(.*)": r"norm.\1",
    r"classifier\.(.*)": r"head.\1",
}
"""Names of transformers' ViTModel and DeiTModel -> timm's."""


def adapt_weights(network: DualCrossAttention, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
    """Return a ViT's weights by the names of `network`; its global-local block starts as a copy of the last block.

    The file's names may be those of timm, DeiT and DINO, which are ours (`blocks.0.attn.qkv.weight`, ...), of
    torchvision or of transformers. Position embeddings are interpolated to the network's grid; the file's heads, and
    its blocks beyond the network's depth, are not used.

    Raises:
        UserError: it is a ViT that computes something else.
    """
    layout, named = _rename(tensors)
    for name, model in OTHERS.items():
        if name in named or any(given.endswith(f".{name}") for given in tensors):
            raise UserError(f"These weights are of {model}: they have '{name}'. Expected a plain ViT, DeiT or DINO.")
    if "pos_embed" in named:
        named["pos_embed"] = _interpolate_positions(named["pos_embed"], network.grid)
    if network.glca is not None:
        last = f"blocks.{len(network.blocks) - 1}."
        for name in network.glca.state_dict():
            source = name if name.startswith("norm.") else last + name
            if source in named:
                named[f"glca.{name}"] = named[source]
    blocks = {match[1] for name in named if (match := re.match(r"blocks\.(\d+)\.", name))}
    beyond = tuple(f"blocks.{number}.*" for number in blocks if int(number) >= len(network.blocks))
    return AdaptedWeights(named, layout, unused=(*UNUSED, *beyond), hint=HINT)


def _rename(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Return whose names these are, and the tensors by timm's names."""
    if any(name.endswith("conv_proj.weight") for name in tensors):
        return "torchvision's VisionTransformer", rename_tensors(tensors, TORCHVISION)
    stripped = {_strip_prefixes(name): value for name, value in tensors.items()}
    if "embeddings.cls_token" not in stripped:
        return "timm, DeiT and DINO", stripped
    renamed = rename_tensors(stripped, TRANSFORMERS)
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in renamed for part in parts):
            renamed[name.replace(".query.", ".qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return "transformers' ViTModel", renamed


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
