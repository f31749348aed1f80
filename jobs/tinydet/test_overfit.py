"""Overfitting a few scenes and tiles."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cases.tinydet import ARTIFACTS, write_coco
from trainyard.errors import UserError

from .overfit import make_small_config, overfit, record_learning_curve
from .synthesis import draw_scene


@pytest.mark.slow
def test_the_detector_for_tiny_objects_overfits_two_scenes() -> None:
    config = make_small_config("ms", tile_px=160, scale=1.0)
    config.image.height_px, config.image.width_px = 128, 160
    config.model.width, config.model.dims, config.model.feedforward, config.model.queries = 16, 64, 96, 40
    config.evaluation.detections = 40
    tiles = []
    for number in range(2):
        pixels, boxes, labels = draw_scene(number, 5)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        tiles.append((str(number), png.getvalue(), boxes.astype(np.float32), labels))
    curve = list(record_learning_curve(config, tiles, ARTIFACTS, steps=60, every=30, lr=2e-3))
    assert curve[-1]["ap50"] > 0.9 and curve[-1]["loss"] < 0.8 * curve[0]["loss"], curve


@pytest.mark.slow
def test_overfitting_writes_a_curve_for_each_variant_on_the_same_tiles(tmp_path: Path) -> None:
    raw = write_coco(tmp_path / "raw")
    options: dict[str, Any] = {"steps": 2, "tiles": 2, "tile_px": 32, "scale": 1.0, "results": tmp_path}
    path = overfit(raw, variants=["ms", "vanilla"], **options)
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (
        head["options"]["objects"] == 2
        and len(head["options"]["tiles"]) == 2
        and head["environment"]["versions"]["torch"]
    )
    assert [(line["variant"], line["step"]) for line in lines] == [("ms", 1), ("ms", 2), ("vanilla", 1), ("vanilla", 2)]
    assert overfit(raw, variants=["cond"], **options) != path, "no result file is overwritten"
    with pytest.raises(UserError, match="expected some of ms, cond, vanilla, found yolo"):
        overfit(raw, variants=["yolo"], **options)
