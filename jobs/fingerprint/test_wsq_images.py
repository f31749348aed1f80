"""Reading WSQ files."""

import io
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import wsq
from PIL import Image

from trainyard.data.shards import BadRecord
from trainyard.errors import UserError

from .config import Config
from .pack import samples
from .wsq_images import DECODER, decode_wsq

PUBLISHED = Path(wsq.__file__).parent / "tests" / "test.wsq"  # a print that the package brings along


def make_wsq(ppi: int) -> bytes:
    """Return a WSQ file of 120 x 100 px whose comment states a resolution, as NIST's own encoder writes it."""
    rows, columns = np.mgrid[:120, :100]
    file = io.BytesIO()
    Image.fromarray((128 + 100 * np.sin(0.7 * (rows + columns))).astype(np.uint8)).save(file, "WSQ")
    comment = b"PPI 500\n"
    assert comment in file.getvalue()
    return file.getvalue().replace(comment, b"PPI %3d\n" % ppi)


def test_pixels_and_resolution_of_a_wsq_file_are_read() -> None:
    pixels, dpi = decode_wsq(PUBLISHED.read_bytes())
    with Image.open(PUBLISHED) as image:
        assert np.array_equal(pixels, np.asarray(image))
    assert pixels.shape == (520, 540) and np.ptp(pixels) > 200 and dpi == 0
    assert decode_wsq(make_wsq(569))[1] == 569


def test_a_wsq_file_is_packed_as_png_at_its_own_resolution_unless_another_is_stated(tmp_path: Path) -> None:
    (tmp_path / "101_1.wsq").write_bytes(make_wsq(569))
    (tmp_path / "101_2.WSQ").write_bytes(PUBLISHED.read_bytes())
    config = Config()
    config.packing.dpi, config.packing.region_px = 400, 64
    first, second = (sample.load() for sample in samples(tmp_path, config))
    assert isinstance(first["image"], bytes)
    with Image.open(io.BytesIO(first["image"])) as image:
        assert image.format == "PNG" and np.array_equal(np.asarray(image), decode_wsq(make_wsq(569))[0])
    assert (first["dpi"], first["box_width"], second["dpi"]) == (569, round(64 * 569 / 500), 400)
    config.packing.dpi_of_sets = ["*:500"]
    assert [sample.load()["dpi"] for sample in samples(tmp_path, config)] == [500, 500]
    (tmp_path / "101_1.wsq").write_bytes(make_wsq(1))
    config.packing.dpi_of_sets = []
    with pytest.raises(BadRecord, match=r"its comment says 1 dpi.*packing\.dpi_of_sets=\[\*:500\]"):
        next(samples(tmp_path, config)).load()


def test_wsq_files_without_their_decoder_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "101_1.wsq").write_bytes(make_wsq(569))
    monkeypatch.setitem(sys.modules, DECODER, None)  # Python then finds no such module
    expected = r"WSQ files are here \(101_1.wsq\), but no decoder is installed.*make setup.*pip install wsq"
    with pytest.raises(UserError, match=expected):
        next(iter(samples(tmp_path, Config())))


@pytest.mark.parametrize("kept", [0, 2, 300, 10_000])
def test_a_wsq_file_that_is_cut_off_is_refused_with_the_reason(kept: int) -> None:
    with pytest.raises(BadRecord, match="the file is empty" if not kept else "the WSQ image cannot be decoded: "):
        decode_wsq(PUBLISHED.read_bytes()[:kept])


def test_damage_that_ends_the_decoder_does_not_end_packing() -> None:
    for seed in (122, 126, 130, 134):  # 122 made the decoder write outside its memory (wsq 0.9, x86-64)
        draw, data = random.Random(seed), bytearray(PUBLISHED.read_bytes())
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(700)] = draw.randrange(256)
        try:
            pixels, _ = decode_wsq(bytes(data))
        except BadRecord as error:
            assert str(error).startswith("the WSQ image cannot be decoded: ")
        else:
            assert pixels.ndim == 2
