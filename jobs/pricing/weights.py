"""Loads an encoder's weights from a local file and checks every name and shape."""

from pathlib import Path

import torch
from torch import Tensor, nn

from trainyard.errors import UserError
from trainyard.text import find_nearest

FILES = ("model.safetensors", "pytorch_model.bin")
PREFIX = "deberta."


def load_weights(encoder: nn.Module, folder: Path) -> tuple[int, int]:
    """Load the weights in `folder` into `encoder`; return how many were used and how many were not.

    Args:
        folder: contains safetensors or a `torch.save` file; the latter is read with `weights_only`, which runs no code.

    Raises:
        UserError: there is no such file, it is not a weights file, or weights are missing or have other shapes.
    """
    found = {name.removeprefix(PREFIX): value for name, value in _read_tensors(folder).items()}
    expected = encoder.state_dict()
    missing = sorted(name for name in expected if name not in found)
    if missing:
        near = ", ".join(find_nearest(missing[0], found, most=3, always=True)) or "nothing"
        raise UserError(
            f"model.encoder={folder}: {len(missing)} of {len(expected)} weights are missing; the first: "
            f"'{missing[0]}'; nearest: {near}. Expected a DeBERTa-v3 checkpoint with the names of transformers."
        )
    wrong = [name for name, value in expected.items() if found[name].shape != value.shape]
    if wrong:
        shapes = "".join(f"\n  {n}: {tuple(found[n].shape)}, expected {tuple(expected[n].shape)}" for n in wrong[:5])
        raise UserError(
            f"model.encoder={folder}: {len(wrong)} weights do not have the shapes that config.json implies:{shapes}"
        )
    encoder.load_state_dict({name: found[name] for name in expected})
    return len(expected), len(found) - len(expected)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise UserError(
            f"model.encoder={folder}: no {' and no '.join(FILES)} there. Copy the checkpoint's weights into it."
        )
    path = paths[0]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader raises its own errors for a broken or unsafe file
        raise UserError(f"model.encoder={path}: not a file of tensors ({type(error).__name__}: {error}).") from error
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}
