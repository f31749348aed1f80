"""Packing prints."""

import io
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from tests.cases.fingerprint import draw_ridges, find_shared_prints
from trainyard.data.prepare import build_meta
from trainyard.data.shards import BadRecord, Ragged

from .config import Config
from .listing import describe_listing, list_prints
from .pack import BLOCK_PX, find_print_centre, list_labelled, load, samples, unlabelled


def read_pixels(data: object) -> np.ndarray:
    assert isinstance(data, bytes)
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == "L"
        return np.asarray(image)


def make_config(layout: str) -> Config:
    config = Config()
    config.packing.layout = layout
    return config


load_500_dpi = partial(load, stated_dpi=0, default_dpi=500, region_px=64, fill=255)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_gray_jpeg_and_png_files_are_kept_byte_for_byte(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"101_3.{suffix}"
    Image.fromarray(draw_ridges()).save(path)
    assert load_500_dpi(path)["image"] == path.read_bytes()


def test_other_images_become_gray_png_without_loss(tmp_path: Path) -> None:
    gray = Image.fromarray(draw_ridges())
    palette = gray.point(lambda v: 255 - v)
    palette = palette.convert("P")
    palette.putpalette([v for level in range(255, -1, -1) for v in (level, level, level)])
    on_glass = Image.merge("LA", (Image.new("L", gray.size, 0), gray.point(lambda v: 255 - v)))
    deep = Image.fromarray(draw_ridges().astype(np.uint16) * 256 + 77)
    for name, image in {
        "1_1.tif": gray,
        "1_2.bmp": gray,
        "1_3.tif": palette,
        "1_4.png": gray.convert("RGB"),
        "1_5.png": deep,
        "1_6.tiff": deep,
        "1_7.png": on_glass,
    }.items():
        image.save(tmp_path / name)
        assert np.array_equal(read_pixels(load_500_dpi(tmp_path / name)["image"]), draw_ridges()), name
    gray.save(tmp_path / "1_8.png", transparency=255)
    assert np.array_equal(read_pixels(load_500_dpi(tmp_path / "1_8.png", fill=9)["image"]) == 9, draw_ridges() == 255)


def test_a_rotated_jpeg_is_stored_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed after a quarter turn clockwise
    Image.fromarray(draw_ridges()).save(tmp_path / "1_1.jpg", exif=exif, quality=100)
    stored = read_pixels(load_500_dpi(tmp_path / "1_1.jpg")["image"])
    assert stored.shape == (100, 120)
    assert np.abs(stored.astype(int) - np.rot90(draw_ridges(), -1)).max() < 30


def test_names_split_at_the_last_underscore_and_fingers_are_unique_over_sets(tmp_path: Path) -> None:
    for name in ("B/101_1.png", "A/101_1.png", "A/012_10_7.png", "loose_2.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draw_ridges()).save(path)
    (tmp_path / "A" / "readme.txt").write_text("not an image")
    listed = list(samples(tmp_path, make_config("sets")))
    assert [s.key for s in listed] == ["loose_2.png", "A/012_10_7.png", "A/101_1.png", "B/101_1.png"]
    rows = [s.columns for s in listed]
    assert [r["finger"] for r in rows] == ["loose", "A/012_10", "A/101", "B/101"]
    assert [r["impression"] for r in rows] == [2, 7, 1, 1]
    assert [r["set"] for r in rows] == ["", "A", "A", "B"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("thumb.png", "whole", "the name is not <finger>_<impression>"),
        ("101_left.png", "whole", "the name is not"),
        ("_1.png", "whole", "the name is not"),
        ("101_1.png", "empty", "the file is empty"),
        ("101_1.tif", "text", "not an image"),
        ("101_1.png", "half", "cannot be decoded"),
        ("101_1.tif", "half", "cannot be decoded"),
        ("101_1.jpg", "half", "cannot be decoded"),
        ("101_1.tiff", "float", "mode F"),
    ],
)
def test_a_file_that_is_not_a_print_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    path = tmp_path / name
    whole = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8))
    (whole.convert("F") if content == "float" else whole).save(path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"scanned in May", "half": data[: len(data) // 2]}.get(content, data))
    with pytest.raises(BadRecord, match=reason):
        next(samples(tmp_path, Config())).load()


def test_the_region_is_a_square_around_the_print_in_source_pixels(tmp_path: Path) -> None:
    Image.fromarray(draw_ridges(400, 300)).save(tmp_path / "1_1.png")
    for dpi, side in ((500, 64), (1000, 128)):
        row = cast(dict[str, int], load_500_dpi(tmp_path / "1_1.png", stated_dpi=dpi))
        assert row["box_height"] == row["box_width"] == side
        # the middle of the stripes is (300, 225); the estimate is accurate to a cell or two
        assert row["box_y"] + side / 2 == pytest.approx(300, abs=16)
        assert row["box_x"] + side / 2 == pytest.approx(225, abs=16)


def test_without_a_print_the_centre_is_the_middle_of_the_image() -> None:
    assert find_print_centre(np.full((50, 80), 200, np.uint8), 500) == (25, 40)
    assert find_print_centre(np.zeros((1, 1), np.uint8), 500) == (0.5, 0.5)


def find_centre_plainly(gray: np.ndarray, dpi: int) -> tuple[float, float]:
    """Compute what `find_print_centre` documents, with numbers too large to overflow and one cell at a time."""
    block = min(round(BLOCK_PX * dpi / 500), *(side - 1 for side in gray.shape))
    rows, columns = ((side - 1) // block for side in gray.shape)
    pixels = gray.astype(np.int64)
    change = np.abs(np.diff(pixels, axis=0))[:, :-1] + np.abs(np.diff(pixels, axis=1))[:-1]
    cells = np.array(
        [[change[y * block :, x * block :][:block, :block].sum() for x in range(columns)] for y in range(rows)]
    )
    energy = np.array(
        [[cells[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3].sum() / 25 for x in range(columns)] for y in range(rows)]
    )
    y, x = np.nonzero(energy > 0.5 * np.quantile(energy, 0.9))
    return (y.mean() + 0.5) * block, (x.mean() + 0.5) * block


@pytest.mark.parametrize("dpi", [500, 1000, 10_000])
def test_the_centre_is_that_of_the_plain_formula_to_the_last_bit(dpi: int) -> None:
    """Also where a row of a cell sums to more than 16 bits: 160 px of the largest differences, at 10,000 dpi."""
    checkers = (np.indices((330, 3000)).sum(axis=0) % 2 * 255).astype(np.uint8)
    checkers[:, :1500] //= 3  # background, unless the sums of the others overflow
    prints = [np.pad(draw_ridges(400, 300), ((0, 90), (40, 0)), constant_values=255), checkers]
    for gray in [
        *prints,
        prints[0][180:233, 100:],
        np.random.default_rng(0).integers(0, 256, (65, 331), dtype=np.uint8),
    ]:
        assert find_print_centre(gray, dpi) == find_centre_plainly(gray, dpi)


def test_real_prints_of_three_sensors_are_packed_without_their_palette() -> None:
    folder = find_shared_prints()
    listed = list(samples(folder, Config()))
    assert len(listed) == 680
    for key in ("FVC2004_DB1_B/101_1.tif", "FVC2004_DB4_B/101_1.tif", "UareU/012_10_1.tif"):
        (sample,) = [s for s in listed if s.key == key]
        stored = read_pixels(sample.load()["image"])
        with Image.open(folder / key) as source:
            assert np.array_equal(stored, np.asarray(source.convert("L")))
        assert np.ptp(stored) > 100


def test_minutiae_are_packed_for_training_alone(tmp_path: Path) -> None:
    Image.fromarray(draw_ridges(200, 180)).save(tmp_path / "1_1.png")
    config = make_config("sets")
    assert [set(one.load()) & {"minutiae"} for one in samples(tmp_path, config)] == [set()]
    config.model.name = "deepprint_minu"
    config.packing.minutiae = "files"
    with pytest.raises(BadRecord, match=r"expected one of 1_1\.ist, .* found none"):
        next(samples(tmp_path, config)).load()
    (tmp_path / "1_1.mnt").write_text("1_1\n1 200 180\n9 10 1.5\n")
    loaded = next(samples(tmp_path, config)).load()["minutiae"]
    assert isinstance(loaded, Ragged)
    np.testing.assert_array_equal(loaded.values, np.array([[9.5, 10.5, 1.5]], np.float32))
    (labelled,), _ = list_labelled(tmp_path, config, {})
    (unknown,) = unlabelled(tmp_path, config, {})
    assert "minutiae" not in labelled.load() and "minutiae" not in unknown.load()
    assert not any(
        "not read" in line for line in describe_listing(list_prints(tmp_path, config.packing), config.packing)
    )


def test_data_packed_before_minutiae_were_an_option_keeps_its_name() -> None:
    config = Config()
    assert "minutiae" not in build_meta(config)["packing"]
    config.packing.minutiae = "extract"
    assert build_meta(config)["packing"]["minutiae"] == "extract"
