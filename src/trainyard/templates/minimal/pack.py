"""Turns a folder of .npz files, each with an array `x` and a number `y`, into samples."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from trainyard.data.labelled import assign_sets
from trainyard.data.raw import list_named
from trainyard.data.shards import Loaded, Sample

from .config import Config


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every file. Record: `x`. Columns: `y`, `set` (text), which divides samples into train, val and test."""
    files = dict(list_named(raw, {".npz"}))
    sets = assign_sets(dict.fromkeys(files, ""), config.packing)
    for key, path in files.items():
        yield Sample(key, partial(load, path), {"set": sets[key]}, source=path)


def load(path: Path) -> Loaded:
    """Read one file."""
    with np.load(path, allow_pickle=False) as file:
        return {"x": file["x"].astype(np.float32), "y": float(file["y"])}


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Write files of three numbers and their mean."""
    raw.mkdir(exist_ok=True)
    for i, x in enumerate(np.random.default_rng(seed).random((count, 3))):
        np.savez(raw / f"{i:05d}.npz", x=x, y=x.mean())
