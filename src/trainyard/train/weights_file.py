"""Reads tensors by name from files that others wrote: safetensors, and what torch.save writes. No code in them runs."""

import argparse
import hashlib
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainyard.errors import UserError
from trainyard.files import open_untrusted
from trainyard.runs.manifest import DATA_NAME
from trainyard.train import checkpoint
from trainyard.train.archive import check_archive, check_state

_NESTED_KEYS = ("ema", "model_ema", "state_dict_ema", "teacher", "state_dict", "model", "module")
"""Keys under which training code saves the weights, in order: averaged ones first."""

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile put before each name."""


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file by name, on the CPU."""

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]


def read_weights(path: Path, *, option: str) -> WeightsFile:
    """Read the weights in a file: averaged ones if it has any. Reads it twice, to hash it and to load it.

    Args:
        path: a checkpoint of a run, .safetensors, or a zip archive from torch.save, in which weights may be nested.
        option: as typed, for errors.

    Raises:
        UserError: there is no such file, it is damaged, has no tensors, or contains more than data.
    """
    if not path.is_file():
        raise UserError(f"{option}: no such file: {path}. Expected .safetensors, or what torch.save writes.")
    if DATA_NAME.fullmatch(path.name) and path.with_suffix(".json").is_file():
        content: Any = checkpoint.select_weights(checkpoint.load(path))
    else:
        content = _read(path, option)
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{option}: {path}: it contains no tensors, only {', '.join(map(str, list(content)[:5]))}.")
    with open_untrusted(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return WeightsFile(path, sha256, _strip_wrappers(tensors))


def rename_tensors(tensors: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors with new names; those that no pattern matches keep theirs."""
    renamed = {}
    for name, value in tensors.items():
        match = next((matched for pattern in patterns if (matched := re.fullmatch(pattern, name))), None)
        renamed[match.expand(patterns[match.re.pattern]) if match else name] = value
    return renamed


def _read(path: Path, option: str) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _read_archive(path)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{option}: {path}: not a file of tensors: {' '.join(str(error).split())[:300]}. Expected .safetensors, or "
            "the zip archive that torch.save writes since torch 1.6. If you trust an older file, convert it with the "
            f"code that wrote it: safetensors.torch.save_file(weights, '{path.stem}.safetensors')"
        ) from None
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError, EOFError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{option}: {path}: not a file of tensors ({reason}).") from None


def _read_archive(path: Path) -> dict[str, Any]:
    check_archive(path)
    with torch.serialization.safe_globals([argparse.Namespace]):  # DETR stores its command line with the weights
        content = torch.load(path, map_location="cpu", weights_only=True)
    for key in _NESTED_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not tensors by name")
    tensors = {str(name): value for name, value in content.items()}
    check_state({name: value for name, value in tensors.items() if isinstance(value, Tensor)})
    return tensors


def _strip_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return dict(tensors)
