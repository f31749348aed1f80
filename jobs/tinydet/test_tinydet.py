"""The family as a whole: the rows of a perfect model, and its options."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger

from tests.cases.tinydet import ARTIFACTS, make_batch, make_config, make_module, make_vanilla, pad, rename_as_published
from trainyard.config import compose as configs
from trainyard.errors import UserError
from trainyard.train.module import DataInfo

from .config import Config
from .module import build, choose_temperature
from .synthesis import draw_scene


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and the scores that it must get.

    A scene is drawn from its number, which is the code of its file name.
    """
    scenes = [draw_scene(number, 0) for number in columns["image_name"][ids].tolist()]
    most = max(len(labels) for _, _, labels in scenes)
    rows = {
        "box": np.stack([pad(boxes, most) for _, boxes, _ in scenes]).astype(np.float32),
        "score": np.stack([pad(np.ones(len(labels)), most) for _, _, labels in scenes]).astype(np.float32),
        "label": np.stack([pad(labels, most) for _, _, labels in scenes]),
        "sample_id": ids,
    }
    return rows, {
        "ap": 1.0,
        "ap50": 1.0,
        "ap_verytiny": 1.0,
        "ap_tiny": 1.0,
        "ap_category_car": 1.0,
        "ap_category_ball": 1.0,
    }


@pytest.mark.parametrize(
    ("images", "weights", "warned"), [(60, "", True), (9_999, "", True), (10_000, "", False), (60, "file", False)]
)
def test_training_from_scratch_on_few_images_warns(tmp_path: Path, images: int, weights: str, warned: bool) -> None:
    config = make_config("vanilla")
    if weights:
        torch.save(rename_as_published(make_vanilla(91)), tmp_path / "w.pth")
        config.model.weights = str(tmp_path / "w.pth")
    objects = {**json.loads(ARTIFACTS["objects"]), "images": images}
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}", level="WARNING")
    try:
        build(config, DataInfo({}, {}, np.arange(2), {**ARTIFACTS, "objects": json.dumps(objects)}))
    finally:
        logger.remove(sink)
    assert any("known to find little" in line and "model.weights=FILE" in line for line in messages) == warned


def test_more_objects_than_queries_warn() -> None:
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}", level="WARNING")
    try:
        make_module(make_config(queries=2))
    finally:
        logger.remove(sink)
    assert any("up to 3 objects, but at most model.queries=2" in line for line in messages)


@pytest.mark.parametrize(
    ("preset", "temperature"), [("tinydet", 20), ("tinydet_vanilla", 10_000), ("tinydet_cond", 10_000)]
)
def test_positions_have_the_published_temperature_and_runs_of_before_keep_theirs(
    tmp_path: Path, preset: str, temperature: float
) -> None:
    jobs = Path(__file__).resolve().parents[1]
    config = configs.compose(preset, [], jobs)
    assert isinstance(config, Config) and choose_temperature(config.model) == temperature
    configs.save_config(configs.compose(preset, ["model.temperature=20"], jobs), tmp_path / "config.yaml")
    before = configs.load_config(tmp_path / "config.yaml", jobs)
    assert isinstance(before, Config) and choose_temperature(before.model) == 20


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_an_image_with_more_objects_than_queries_trains(variant: str) -> None:
    losses = make_module(make_config(variant))(make_batch(boxes=40))
    assert losses["loss"].isfinite() and losses["broken_costs"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image.fit": "stretch"}, r"image.fit=stretch: it changes the shape"),
        ({"image.height_px": 100}, r"expected multiples of 32, such as image.height_px=96"),
        ({"image.channels": 1}, r"image.channels=1: tinydet needs RGB"),
        ({"model.dims": 36}, r"model.dims=36: expected a multiple of 4 model.heads=16"),
        ({"model.temperature": 0.5}, r"model.temperature=0.5: expected 1 or more, or 0 for the published one"),
        ({"model.strides": [4, 16]}, r"model.strides=\[4, 16\]: expected neighbours"),
        ({"loss.classification": "softmax"}, r"loss.classification=softmax: only model.variant=vanilla"),
        ({"model.variant": "vanilla", "loss.classification": "focal"}, r"model.variant=vanilla needs softmax"),
        ({"model.weights": "x", "model.norm": "group"}, r"model.norm=group: pretrained weights have batch norm"),
    ],
)
def test_contradictory_options_are_refused(change: dict[str, Any], message: str) -> None:
    config = make_config()
    for name, value in change.items():
        part, option = name.split(".")
        setattr(getattr(config, part), option, value)
    with pytest.raises(UserError, match=message):
        make_module(config)
