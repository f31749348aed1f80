"""Packing: tiles, scaling, stored bytes, splits."""

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cases.tinydet import find_shared_data, load_samples, make_entry, write_coco

from .coco import read_collection
from .config import Config, PackingSettings
from .pack import cut_tiles, load_image, parse_key, samples, splits, unlabelled


@pytest.mark.parametrize(
    ("size", "side", "overlap"), [((882, 215), 256, 0.2), ((100, 100), 30, 0.5), ((64, 64), 64, 0.2), ((65, 40), 64, 0)]
)
def test_tiles_cover_an_image_overlap_and_stay_within_it(size: tuple[int, int], side: int, overlap: float) -> None:
    found = cut_tiles(size, side_px=side, overlap=overlap)
    covered = np.zeros(size[::-1], dtype=int)
    for tile in found:
        assert tile.x >= 0 and tile.y >= 0 and tile.x + tile.width <= size[0] and tile.y + tile.height <= size[1]
        covered[tile.y : tile.y + tile.height, tile.x : tile.x + tile.width] += 1
    assert covered.min() >= 1 and len(set(found)) == len(found)
    starts = sorted({tile.x for tile in found})
    assert all(b - a <= max(1, round(side * (1 - overlap))) for a, b in itertools.pairwise(starts))
    assert cut_tiles(size, side_px=0, overlap=0.2)[0].width == size[0]


def test_a_tile_has_every_object_that_it_shows_enough_of(tmp_path: Path) -> None:
    raw = write_coco(tmp_path, annotations=[make_entry(16, 5, 10, 8), make_entry(22, 20, 6, 4, id=2)])
    config = Config()
    config.packing.tile_px, config.packing.tile_overlap, config.packing.tile_visible = 24, 0.0, 0.4
    found = [one for one in load_samples(raw, config) if one["image_name"] == "0.png"]
    assert [one["key"] for one in found[:4]] == ["0.png@0,0", "0.png@24,0", "0.png@36,0", "0.png@0,16"]
    assert found[0]["boxes"].values.tolist() == [[16, 5, 24, 13]], "8 of 10 columns of one object, 2 of 6 of the other"
    assert found[1]["boxes"].values.tolist() == [[0, 20, 4, 24]], "4 of 6 columns; of the first object 2 of 10"
    assert [len(one["truth"].values) for one in found] == [2, 0, 0, 0, 0, 0]
    for one in found:
        with Image.open(io.BytesIO(one["image"])) as image:
            assert image.size == (24, 24)
    assert parse_key("a@b.png@24,16") == ("a@b.png", 24, 16) and parse_key("a@b.png") == ("a@b.png", 0, 0)


def test_scaled_images_have_scaled_boxes_and_areas() -> None:
    config = Config()
    config.packing.scale = 0.5
    raw = find_shared_data("kit_ais_cars")
    whole, half = (read_collection(raw, PackingSettings(scale=scale)) for scale in (1.0, 0.5))
    assert (len(whole.images), sum(len(p.boxes) for p in whole.images)) == (65, 2593)
    sides = np.concatenate([np.sqrt((p.boxes[:, 2:] - p.boxes[:, :2]).prod(axis=1)) for p in half.images])
    assert np.median(sides) == pytest.approx(12.5, abs=0.1)
    one, other = whole.images[0], half.images[0]
    assert (
        other.size_px == (882, 215)
        and np.allclose(other.boxes, one.boxes / 2)
        and np.allclose(other.areas, one.areas / 4)
    )
    sample = next(iter(samples(raw, config)))
    with Image.open(io.BytesIO(sample.load()["image"])) as image:  # type: ignore[arg-type]
        assert image.size == (882, 215)
    sets = {name: {str(p.name) for p in whole.images if p.set == name} for name in ("train", "val")}
    assert [len(names) for names in sets.values()] == [45, 20]


def test_files_are_stored_byte_for_byte_unless_cut_rotated_or_of_another_format(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    original, whole = Image.fromarray(pixels), cut_tiles((60, 40), side_px=0, overlap=0)[0]
    turned = Image.Exif()
    turned[0x0112] = 6
    cases: dict[str, tuple[dict[str, Any], bool]] = {
        "a.jpg": ({}, True),
        "b.png": ({}, True),
        "c.bmp": ({}, False),
        "d.jpg": ({"exif": turned}, False),
    }
    for name, (options, kept) in cases.items():
        stored = original.transpose(Image.Transpose.ROTATE_90) if options else original
        stored.save(tmp_path / name, **options)
        image = load_image(tmp_path / name, (60, 40), (60, 40), whole)["image"]
        assert isinstance(image, bytes) and (image == (tmp_path / name).read_bytes()) == kept, name
        with Image.open(io.BytesIO(image)) as again:
            assert again.size == (60, 40)


def test_unlabelled_images_are_cut_like_labelled_ones(tmp_path: Path) -> None:
    raw = write_coco(tmp_path / "raw")
    config = Config()
    config.packing.tile_px, config.packing.scale = 20, 0.5
    known = {sample.key: sample.load()["image"] for sample in samples(raw, config)}
    new = {sample.key: sample.load({}) for sample in unlabelled(raw / "images", config, {})}
    assert len(new) == 6 and {key: value["image"] for key, value in new.items()} == known


def test_splits_are_the_packed_sets() -> None:
    columns = {"set": np.array([1, 0, 1, 1])}
    found = splits(columns, {"set": ["train", "val"]}, Config())
    assert {name: ids.tolist() for name, ids in found.items()} == {"train": [1], "val": [0, 2, 3]}
