"""Reading and packing images."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases.twins import NAMES, TWINS, find_orl_faces, read_samples, write_raw_folder
from trainyard.data.shards import BadRecord

from .config import Config
from .pack import load


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but there is no such file"),
        ("empty", "the file is empty"),
        ("text", "not an image"),
        ("half", "cannot be decoded"),
        ("tiny", r"40 x 64 pixels are not a face crop: expected sides of 48 or more"),
        ("strip", r"300 x 64 pixels are not a face crop.*at most 1\.6 times the shorter"),
    ],
)
def test_an_image_that_is_not_a_face_crop_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    raw = write_raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    path = raw / "9004/0.png"
    size = {"tiny": (40, 64), "strip": (300, 64)}.get(content, (64, 64))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"a face", "half": data[: len(data) // 2]}.get(content, data))
    if content == "missing":
        path.unlink()
    (sample,) = [s for s in read_samples(raw) if s.columns["person"] == "9004"]
    with pytest.raises(BadRecord, match=reason):
        sample.load()


def test_jpeg_and_png_are_kept_byte_for_byte_and_other_formats_become_png(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (60, 64), dtype=np.uint8)
    for name, image, kept in (
        ("a.jpg", Image.fromarray(pixels), True),
        ("b.png", Image.fromarray(pixels).convert("RGB"), True),
        ("c.pgm", Image.fromarray(pixels), False),
        ("d.png", Image.fromarray(pixels).convert("RGBA"), False),
    ):
        image.save(tmp_path / name)
        stored = load(tmp_path / name, 48, 1.6)["image"]
        assert isinstance(stored, bytes)
        assert (stored == (tmp_path / name).read_bytes()) == kept, name
        if not kept:
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored)).convert("L")), pixels)


def test_a_16_bit_image_is_refused_and_not_clipped_to_white(tmp_path: Path) -> None:
    Image.fromarray(np.full((64, 64), 4000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(BadRecord, match="pixel mode I;16 has an unknown value range"):
        load(tmp_path / "deep.png", 48, 1.6)


def test_orl_faces_pack_as_strangers() -> None:
    config = Config()
    config.packing.singles, config.packing.val_share, config.packing.test_share = "keep", 0.25, 0.5
    found = read_samples(find_orl_faces(), config)
    assert len(found) == 400
    data = [str(s.columns["pairs"]) for s in found if s.columns["set"] == "test"]
    assert len(data) == 200
    words = " ".join(data).split()
    assert sum(word[0] == "s" for word in words) == 20 * 45
    assert "t" not in {word[0] for word in words}
    with Image.open(io.BytesIO(found[0].load()["image"])) as image:  # type: ignore[arg-type]
        assert image.size == (92, 112)
