"""Filling an encoder from a local file, name by name and shape by shape."""

from pathlib import Path

import torch
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.text import nearest

FILES = ("model.safetensors", "pytorch_model.bin")
PREFIX = "deberta."


def fill(encoder: nn.Module, folder: Path) -> tuple[int, int]:
    """Load the weights of `folder` into `encoder`; return how many were used and how many were not.

    Args:
        folder: holds safetensors, or what `torch.save` wrote, read with `weights_only`: nothing in it is executed.

    Raises:
        UserError: there is no such file, it is no weights file, or weights are missing or have other shapes.
    """
    found = {name.removeprefix(PREFIX): value for name, value in _read(folder).items()}
    wanted = encoder.state_dict()
    missing = sorted(name for name in wanted if name not in found)
    if missing:
        near = ", ".join(nearest(missing[0], found, most=3, always=True)) or "nothing"
        raise UserError(
            f"model.encoder={folder}: {len(missing)} of {len(wanted)} weights are not in it; the first: "
            f"'{missing[0]}'; nearest: {near}. Expected a DeBERTa-v3 checkpoint in the names of transformers."
        )
    other = [name for name, value in wanted.items() if found[name].shape != value.shape]
    if other:
        shown = "".join(f"\n  {n}: {tuple(found[n].shape)}, expected {tuple(wanted[n].shape)}" for n in other[:5])
        raise UserError(
            f"model.encoder={folder}: {len(other)} weights have other shapes than config.json beside them says:{shown}"
        )
    encoder.load_state_dict({name: found[name] for name in wanted})
    return len(wanted), len(found) - len(wanted)


def _read(folder: Path) -> dict[str, Tensor]:
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise UserError(
            f"model.encoder={folder}: no {' and no '.join(FILES)} there. Copy the checkpoint's weights there."
        )
    path = paths[0]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader has its own errors for a broken or unsafe file
        raise UserError(f"model.encoder={path}: not a file of tensors ({type(error).__name__}: {error}).") from error
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}
