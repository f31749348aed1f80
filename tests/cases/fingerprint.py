"""Builders that the tests of this family share."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from jobs.fingerprint.config import Config
from jobs.fingerprint.module import FingerprintModule, build
from trainyard.train.module import DataInfo


def find_shared_prints() -> Path:
    """Return the folder of real prints, which is not part of the repository."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "fingerprint"
    if not folder.is_dir():
        pytest.skip(f"no real prints at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def make_config() -> Config:
    config = Config()
    config.model.width, config.model.blocks, config.model.embedding_dims = 0.1, [1, 1, 1], 16
    config.image.height_px = config.image.width_px = 75
    config.head.centre_weight = 2.0
    config.evaluation.bootstrap_draws = 20
    return config


def make_minutia_config(name: str) -> Config:
    config = make_config()
    config.model.name, config.packing.minutiae = name, "extract"
    config.model.width = 0.05  # at which rounding gives the stems other numbers of channels
    return config


def make_module(
    config: Config | None = None, *, fingers: int = 6, records: tuple[str, ...] = ("minutiae",)
) -> FingerprintModule:
    finger = np.repeat(np.arange(fingers), 4)
    names = [f"f{i}" for i in range(fingers)]
    torch.manual_seed(0)
    train_ids = np.flatnonzero(finger >= 2)  # the first two fingers do not train
    read = {name: lambda ids: [np.zeros((0, 3), np.float32) for _ in ids] for name in records}
    data = DataInfo({"finger": finger}, {"finger": names}, train_ids, read=lambda name, ids: read[name](ids))
    module = build(config or make_config(), data)
    assert isinstance(module, FingerprintModule)
    return module


def make_batch(count: int, *, codes: tuple[int, ...] = (2, 3, 4, 5)) -> dict[str, torch.Tensor]:
    return {
        "image": torch.rand(count, 1, 75, 75, generator=torch.Generator().manual_seed(1)),
        "sample_id": torch.arange(count),
        "finger": torch.tensor(codes).repeat(count)[:count],
        "impression": torch.arange(count),
    }


def make_rows(embedding: np.ndarray, finger: np.ndarray) -> dict[str, np.ndarray]:
    impression = np.concatenate([1 + np.arange(n) for n in np.unique(finger, return_counts=True)[1]])
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return {"embedding": unit.astype(np.float32), "finger": finger, "impression": impression}


def draw_ridges(height: int = 120, width: int = 100) -> np.ndarray:
    """Return a gray image with stripes in its lower right quarter."""
    image = np.full((height, width), 255, np.uint8)
    image[height // 2 :, width // 2 :] = (128 + 120 * np.sin(np.arange(width // 2) * 0.7)).astype(np.uint8)
    return image
