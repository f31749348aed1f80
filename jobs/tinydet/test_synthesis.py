"""Synthetic scenes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainyard.errors import UserError

from . import geometry
from .coco import read_collection
from .config import PackingSettings
from .pack import synthesize
from .synthesis import CATEGORIES, draw_scene


def test_scenes_depend_only_on_the_seed_and_can_be_read(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=12, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.*"))
    assert len(files) == 14
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    found = read_collection(tmp_path / "once", PackingSettings())
    assert [sum(p.set == name for p in found.images) for name in ("train", "val")] == [10, 2]
    assert found.categories == ["car", "ball"] and found.category_ids == [number for number, _ in CATEGORIES]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(UserError, match="already contains files"):
        synthesize(tmp_path / "once", count=12, seed=3)
    with pytest.raises(UserError, match="expected 6 or more"):
        synthesize(tmp_path / "few", count=5, seed=3)


def test_objects_in_scenes_are_tiny_disjoint_and_inside_their_boxes() -> None:
    sides = []
    for number in range(20):
        pixels, boxes, labels = draw_scene(number, 0)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= [160, 128]).all()
        sides += np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1)).tolist()
        overlap = geometry.iou(torch.from_numpy(boxes)[:, None], torch.from_numpy(boxes)[None])[0]
        assert overlap.fill_diagonal_(0).max() == 0
        for (x1, y1, x2, y2), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            if label == 1:  # a ball is brighter than the ground
                inner = pixels[int(y1) + 1 : int(y2), int(x1) + 1 : int(x2)].mean()
                assert inner > np.median(pixels)
    assert min(sides) >= 4 and max(sides) <= 20 and 8 < np.mean(sides) < 13
