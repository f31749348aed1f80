"""Builders that the family's tests share: configs, modules, batches, COCO folders, packed data."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from jobs.tinydet.config import Config, LossSettings
from jobs.tinydet.matching import Objects
from jobs.tinydet.module import TinyDet, build, build_network
from jobs.tinydet.network import Backbone, Predictions
from jobs.tinydet.overfit import make_small_config
from jobs.tinydet.pack import fit_artifacts, samples
from trainyard.data.loader import Loader
from trainyard.data.pack import pack
from trainyard.data.shards import Sample, ShardSet
from trainyard.train.module import DataInfo

TiledData = tuple[DataInfo, Config, list[Sample]]
"""Packed tiles, the config that packed them, and the samples they were packed from."""


def pad(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), dtype=values.dtype)])


def find_shared_data(name: str) -> Path:
    """Return a folder of real data, which is not part of the repository; skip the test if it is missing."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "detection" / name
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def make_config(variant: str = "ms", **model: Any) -> Config:
    config = make_small_config(variant, tile_px=64, scale=1.0)
    config.packing.tile_px = 0
    wanted = {"width": 8, "strides": [8, 16], "dims": 32, "feedforward": 32, "decoder_layers": 2, "queries": 12}
    for name, value in {**wanted, "denoising": 8, **model}.items():
        setattr(config.model, name, value)
    config.evaluation.detections = 12
    return config


ARTIFACTS = {
    "categories": json.dumps([{"id": 3, "name": "car"}, {"id": 7, "name": "ball"}]),
    "sets": "[]",
    "objects": json.dumps({"images": 2, "width_px": 64, "height_px": 64, "side_px": 8.0, "per_sample": 2.0, "most": 3}),
}


def make_module(config: Config) -> TinyDet:
    torch.manual_seed(0)
    return build(config, DataInfo({}, {}, np.arange(2), ARTIFACTS))


def make_batch(*, boxes: int = 3, images: int = 2, noise: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    corner = 5 + 40 * torch.rand(images, boxes, 2, generator=generator)
    batch = {
        "image": torch.rand(images, 3, 64, 64, generator=generator),
        "boxes": torch.cat([corner, corner + 4 + 8 * torch.rand(images, boxes, 2, generator=generator)], dim=2),
        "labels": torch.randint(2, (images, boxes), generator=generator),
        "boxes_count": torch.tensor([boxes, *[max(0, boxes - 1)] * (images - 1)]),
        "affine": torch.eye(3)[:2].repeat(images, 1, 1),
        "image_px": torch.full((images, 2), 64.0),
        "sample_id": torch.arange(images),
    }
    return {**batch, "noise": torch.rand(images, 32, generator=generator)} if noise else batch


def make_objects(rng: np.random.Generator, count: int, *, images: int = 1, length: int | None = None) -> Objects:
    length = count if length is None else length
    boxes = torch.from_numpy(rng.uniform(0.1, 0.4, (images, length, 4))).float()
    labels = torch.from_numpy(rng.integers(0, 3, (images, length)))
    return Objects(boxes, labels, torch.arange(length).expand(images, -1) < count, (64, 96))


def make_predictions(rng: np.random.Generator, *, layers: int = 1, images: int = 1, queries: int = 6) -> Predictions:
    boxes = torch.from_numpy(rng.uniform(0.05, 0.5, (layers, images, queries, 4))).float()
    return Predictions(torch.from_numpy(rng.normal(size=(layers, images, queries, 3))).float(), boxes)


FOCAL = LossSettings("focal", 2, 2, 5, 2, nwd_px=12.8)


def write_rectangles(folder: Path, *, size: tuple[int, int] = (120, 90)) -> Path:
    """Write images with one red and one green rectangle each, and their annotations."""
    (folder / "images").mkdir(parents=True)
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}],
    }
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
        for category, left in ((0, 8), (1, 68)):
            w, h = rng.integers(12, 24, 2).tolist()
            x, y = left + int(rng.integers(0, 20)), int(rng.integers(8, 60))
            pixels[y : y + h, x : x + w, category] = 255
            entry = {"id": len(content["annotations"]) + 1, "image_id": number, "category_id": category + 1}
            content["annotations"].append({**entry, "bbox": [x, y, w, h], "iscrowd": 0})
        Image.fromarray(pixels).save(folder / "images" / f"{number:02d}.png")
        content["images"].append({"id": number, "file_name": f"{number:02d}.png", "width": size[0], "height": size[1]})
    (folder / "instances_train.json").write_text(json.dumps(content))
    return folder


def pack_folder(raw: Path, out: Path, config: Config) -> ShardSet:
    return pack(samples(raw, config), out, meta={}, workers=1, artifacts=fit_artifacts(raw, config))


def make_loader(data: ShardSet, config: Config, decode: str) -> Loader:
    return Loader(config, data, device=torch.device("cpu"), decode=decode)


def write_coco(folder: Path, *, annotations: list[dict[str, Any]] | None = None, **change: Any) -> Path:
    """Write three images of 60 x 40 with an object each, and their annotations; `change` replaces entries."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images = [list_image(10 * n + 5, f"{n}.png") for n in range(3)]
    for entry in images:
        Image.new("RGB", (60, 40), (90, 90, 90)).save(folder / "images" / entry["file_name"])
    if annotations is None:
        annotations = [{"id": n, "image_id": 10 * n + 5, "category_id": 7, "bbox": [4 + n, 5, 10, 8]} for n in range(3)]
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 7, "name": "ball"}, {"id": 3, "name": "car"}],
    }
    (folder / "instances_train.json").write_text(json.dumps({**content, **change}))
    return folder


def list_image(number: int, file: str) -> dict[str, Any]:
    return {"id": number, "file_name": file, "width": 60, "height": 40}


def make_entry(*bbox: float, **change: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 5, "category_id": 7, "bbox": list(bbox), **change}


def load_samples(raw: Path, config: Config | None = None) -> list[dict[str, Any]]:
    config = config or Config()
    return [{**sample.columns, **sample.load(), "key": sample.key} for sample in samples(raw, config)]


def make_true_rows(data: DataInfo, *, length: int = 4) -> dict[str, np.ndarray]:
    """Return each tile's objects as its detections; the more of an object it shows, the higher the score."""
    ids = np.arange(len(data.columns["tile_x"]))
    boxes, labels = data.read("boxes", ids), data.read("labels", ids)
    area = [(b[:, 2:] - b[:, :2]).prod(axis=1) for b in boxes]
    return {
        "sample_id": ids,
        "box": np.stack([pad(b, length) for b in boxes]),
        "score": np.stack([pad(a / 100, length) for a in area]),
        "label": np.stack([pad(b, length) for b in labels]),
    }


def make_vanilla(categories: int, *, backbone: str = "small") -> torch.nn.Module:
    config = make_config("vanilla")
    torch.manual_seed(categories)
    return build_network(config.model, Backbone(backbone, norm="frozen", width=8), categories=categories)


def rename_as_published(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights with the names of facebookresearch/detr."""
    renamed = {}
    for name, value in network.state_dict().items():
        name = name.replace("backbone.body.", "backbone.0.body.").replace("decoder_norm.", "transformer.decoder.norm.")
        renamed[name] = value
    return renamed
