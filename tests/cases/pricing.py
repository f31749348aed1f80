"""Builders that the tests of this family share."""

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.pricing import catalog
from jobs.pricing.config import Config
from jobs.pricing.module import PricingModule, build
from jobs.pricing.pack import fit_artifacts, samples, splits
from trainyard.config.settings import TrainConfig
from trainyard.data import pack as packing
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import EpochOrder
from trainyard.data.shards import ShardSet
from trainyard.train.module import DataInfo

VALID_ROWS = [
    [str(i), f"Item Name: {'abcdefghij'[i % 10] * 3} {'abcd'[i // 10]}, {i} oz", str(5 + i)] for i in range(40)
]
COLUMNS = catalog.Columns("sample_id", ("catalog_content",), "price")


def find_shared_catalogue() -> Path:
    """Return the CSV of real furniture, which is not part of the repository."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    file = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "pricing" / "ikea" / "train_like.csv"
    if not file.is_file():
        pytest.skip(f"no catalogue at {file}: set TRAINYARD_SHARED_DATA")
    return file


def make_config(**packing: Any) -> Config:
    config = Config()
    config.packing = replace(config.packing, vocabulary=300, max_tokens=48, **packing)
    model = config.model
    model.dims, model.layers, model.heads, model.feedforward, model.position_buckets = 16, 2, 2, 32, 8
    model.dropout, model.number_dims, model.head_dims, model.head_dropout = 0.0, 8, [16, 8], [0.0, 0.0]
    config.evaluation.bootstrap_draws = 10
    return config


def disable_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def pack_catalogue(raw: Path, config: Config, out: Path, **options: Any) -> ShardSet:
    artifacts = fit_artifacts(raw, config)
    return packing.pack(samples(raw, config), out, meta={}, workers=1, artifacts=artifacts, **options)


def make_module(data: ShardSet, config: Config | None = None) -> PricingModule:
    torch.manual_seed(0)
    config = config or make_config()
    train_ids = splits(data.columns, data.vocabulary, config)["train"]
    module = build(config, DataInfo.from_shards(data, train_ids))
    assert isinstance(module, PricingModule)
    disable_dropout(module)
    return module


def build_loader(data: ShardSet) -> Loader:
    """Build the real loader on the CPU."""
    return Loader(TrainConfig(), data, device=torch.device("cpu"), decode="cpu")


def make_micro_batches(data: ShardSet, batches: list[list[int]], micro_batch_size: int) -> list[MicroBatch]:
    """Return the micro-batches of these global batches from the real loader."""
    sizes = {len(batch) for batch in batches}
    order = EpochOrder(np.concatenate(batches).astype(np.int64), max(sizes))
    stream = build_loader(data).train(lambda epoch: order, epoch=0, start=0, micro_batch_size=micro_batch_size)
    micro_batches: list[MicroBatch] = []
    while sum(micro_batch.last for micro_batch in micro_batches) < len(batches):
        micro_batches.append(next(stream))
    stream.close()
    return micro_batches


def make_batch(data: ShardSet, ids: list[int]) -> dict[str, torch.Tensor]:
    return make_micro_batches(data, [ids], 0)[0].batch


@contextlib.contextmanager
def record_saved_bytes() -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage saved for the backward pass, by its address."""
    saved: dict[int, int] = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        yield saved


def format_csv(rows: list[list[str]], *, header: str = "sample_id,catalog_content,price") -> str:
    out = io.StringIO()
    csv.writer(out).writerows([header.split(","), *rows])
    return out.getvalue()


def write_catalogue(tmp_path: Path, rows: list[list[str]], **options: Any) -> Path:
    path = tmp_path / "some.csv"
    path.write_text(format_csv(rows, **options), encoding="utf-8", newline="")
    return path
