"""Builders shared by the tests of the twins family."""

import itertools
import json
import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from jobs.twins import protocol
from jobs.twins.config import Config, ModelSettings
from jobs.twins.module import TwinsModule, build
from jobs.twins.network import Block, DualCrossAttention
from jobs.twins.pack import samples, splits
from jobs.twins.synthesis import DATASET, PAIRS
from trainyard.data.shards import Sample
from trainyard.train.module import DataInfo


def find_orl_faces() -> Path:
    """Return the folder of ORL faces, which is not part of the repository, or skip the test."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "faces" / "orl"
    if not folder.is_dir():
        pytest.skip(f"no faces at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def make_network(*, pwca_layers: int = 3, glca: bool = True, drop_path: float = 0.0) -> DualCrossAttention:
    torch.manual_seed(0)
    model = ModelSettings(
        dims=24,
        layers=3,
        heads=4,
        patch_px=8,
        glca=glca,
        local_share=0.25,
        pwca_layers=pwca_layers,
        drop_path=drop_path,
    )
    network = DualCrossAttention(model, image_px=(32, 32), channels=3)
    with torch.no_grad():  # as large as trained weights, so that attention is far from uniform
        for block in list_blocks(network):
            block.attn.qkv.weight.normal_(std=0.5)
    return network


def list_blocks(network: DualCrossAttention) -> list[Block]:
    return [cast(Block, block) for block in network.blocks]


def make_faces(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def make_config(**head: float | str | bool) -> Config:
    config = Config()
    config.model.dims, config.model.layers, config.model.heads, config.model.patch_px = 24, 2, 4, 8
    config.model.pwca_layers, config.model.drop_path = 2, 0.0
    config.image.height_px = config.image.width_px = 32
    config.image.channels = 3
    config.evaluation.bootstrap_draws = 5
    for name, value in head.items():
        setattr(config.head, name, value)
    return config


def make_data(*, family_counts: dict[str, int] | None = None, per_person: int = 4) -> DataInfo:
    """Make the columns that `samples` yields, with twin families in each set."""
    rows: list[tuple[str, str, str]] = []
    number = itertools.count()
    for set_name, count in (family_counts or {"train": 6, "val": 4, "test": 4}).items():
        for family in itertools.islice(number, count):
            rows += [(f"{family:02d}{twin}", f"{family:02d}0", set_name) for twin in "01" for _ in range(per_person)]
    texts = {"person": [r[0] for r in rows], "family": [r[1] for r in rows], "set": [r[2] for r in rows]}
    pairs = [""] * len(rows)
    for set_name in ("val", "test"):
        ids = [i for i, row in enumerate(rows) if row[2] == set_name]
        pairs_by_image = protocol.draw_pairs([rows[i][0] for i in ids], [rows[i][1] for i in ids], strangers=5, seed=0)
        for i, found in zip(ids, pairs_by_image, strict=True):
            pairs[i] = protocol.format_pairs([(kind, ids[j]) for kind, j in found])
    columns: dict[str, np.ndarray] = {"number": np.arange(len(rows))}
    vocabulary: dict[str, list[str]] = {}
    for name, values in {**texts, "pairs": pairs}.items():
        names, columns[name] = np.unique(values, return_inverse=True)
        vocabulary[name] = names.tolist()
    train_ids = np.array([i for i, row in enumerate(rows) if row[2] == "train"])
    return DataInfo(columns, vocabulary, train_ids)


def make_module(config: Config | None = None, data: DataInfo | None = None) -> TwinsModule:
    torch.manual_seed(0)
    module = build(config or make_config(), data or make_data())
    assert isinstance(module, TwinsModule)
    return module


def make_batch(data: DataInfo, ids: np.ndarray) -> dict[str, torch.Tensor]:
    batch = {name: torch.from_numpy(values[ids]) for name, values in data.columns.items()}
    return {**batch, "image": make_faces(len(ids)), "sample_id": torch.from_numpy(ids)}


def select_ids(data: DataInfo, name: str) -> np.ndarray:
    return splits(data.columns, data.vocabulary, Config())[name]


def write_raw_folder(root: Path, image_counts: dict[str, int], pairs: object, *, side: int = 64) -> Path:
    """Write images `root/<person>/<i>.png` with both listing files."""
    listing = {}
    for number, (person, count) in enumerate(image_counts.items()):
        (root / person).mkdir(parents=True)
        listing[person] = [f"{person}/{i}.png" for i in range(count)]
        for i, name in enumerate(listing[person]):
            Image.new("RGB", (side, side), (number, i, 9)).save(root / name)
    (root / DATASET).write_text(json.dumps(listing))
    (root / PAIRS).write_text(json.dumps(pairs))
    return root


NAMES = [f"9{i:02d}{twin}" for i in range(10) for twin in (4, 5)]


TWINS = [[NAMES[i], NAMES[i + 1]] for i in range(0, 20, 2)]


def read_samples(raw: Path, config: Config | None = None) -> list[Sample]:
    return list(samples(raw, config or Config()))


def index_by_person(found: list[Sample]) -> dict[str, tuple[str, str]]:
    return {str(s.columns["person"]): (str(s.columns["family"]), str(s.columns["set"])) for s in found}
