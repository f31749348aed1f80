"""Minutiae of files."""

import struct
from math import pi
from pathlib import Path

import numpy as np
import pytest

from trainyard.data.shards import BadRecord

from .minutia_files import read_minutiae

SIZE = (560, 416)
RECORD = (
    struct.pack(">4s4sIHHHHHBBBBBB", b"FMR\0", b" 20\0", 42, 0, 416, 560, 197, 197, 1, 0, 0, 0, 80, 2)
    + struct.pack(">HHBB", 1 << 14 | 208, 46, 128, 0)
    + struct.pack(">HHBB", 2 << 14 | 0, 559, 64, 0)
    + struct.pack(">H", 0)
)
TEXT = "dp_0\n2 560 416\n208 46 3.141593\n0 559 1.570796\n"


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / "dp_0.bmp"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dp_0.ist", RECORD),
        ("dp_0.fmr", RECORD),
        ("dp_0.mnt", TEXT.encode()),
        ("dp_0.bmp.mnt", TEXT.replace("\n", "\r\n").encode()),
    ],
)
def test_every_minutia_of_a_record_or_text_is_read_in_radians(tmp_path: Path, name: str, content: bytes) -> None:
    found = read_minutiae(write(tmp_path, name, content), SIZE)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[208.5, 46.5, pi], [0.5, 559.5, pi / 2]], rtol=1e-6)


def test_minutiae_of_a_record_in_another_scale_are_scaled_as_the_image(tmp_path: Path) -> None:
    found = read_minutiae(write(tmp_path, "dp_0.ist", RECORD), (392, 292))  # as SFinGe writes both
    np.testing.assert_allclose(found[:, 0], [208.5 * 292 / 416, 0.5 * 292 / 416], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], [46.5 * 0.7, 559.5 * 0.7], rtol=1e-6)


def test_extended_data_after_the_minutiae_is_skipped(tmp_path: Path) -> None:
    longer = RECORD[:8] + struct.pack(">I", 45) + RECORD[12:-2] + b"\0\3abc"
    assert len(read_minutiae(write(tmp_path, "dp_0.ist", longer), SIZE)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dp_0.ist", RECORD[:20], "dp_0.ist: size: expected 28 bytes of header or more, found 20 bytes"),
        ("dp_0.ist", b"ISO" + RECORD[3:], r"format identifier: expected b'FMR\\x00', found b'ISO\\x00'"),
        ("dp_0.ist", RECORD[:4] + b"030\0" + RECORD[8:], "version: expected b' 20"),
        ("dp_0.ist", RECORD[:-8], "record length: expected 34, found 42"),
        (
            "dp_0.ist",
            RECORD[:27] + b"\7" + RECORD[28:],
            "size with 7 minutiae and 0 bytes of extended data: expected 72",
        ),
        ("dp_0.ist", RECORD[:22] + b"\2" + RECORD[23:], "number of finger views: expected 1, found 2"),
        ("dp_0.ist", RECORD[:14] + b"\0\0" + RECORD[16:], "width and height: expected 1 px or more, found 0 x 560"),
        ("dp_0.ist", RECORD[:28] + b"\x41\xa0" + RECORD[30:], "x of minutia 1: expected px from 0 to 416, found 416"),
        ("dp_0.mnt", b"", "line 2: expected number of minutiae, height, width"),
        ("dp_0.mnt", TEXT[:31].encode(), "minutiae: expected 2 lines, as line 2 says, found 1"),
        ("dp_0.mnt", TEXT.replace("3.14", "pi").encode(), "line 3: expected x, y and direction, found '208 46 pi1593'"),
        (
            "dp_0.mnt",
            TEXT.replace("1.570796", "90").encode(),
            "direction of minutia 2: expected radians from 0 to 6.28",
        ),
        (
            "dp_0.mnt",
            TEXT.replace("1.570796", "nan").encode(),
            "direction of minutia 2: expected radians .*, found nan",
        ),
        (
            "dp_0.mnt",
            TEXT.replace("560 416", "416 560").encode(),
            "y of minutia 2: expected px from 0 to 416, found 559",
        ),
        ("dp_0.mnt", TEXT.replace("560 416", "564 416").encode(), "expected 416 x 560 px .* found 416 x 564"),
        ("dp_0.mnt", TEXT.replace("560 416", "570 424").encode(), "expected 416 x 560 px .* found 424 x 570"),
        ("dp_1.mnt", TEXT.encode(), "expected one of dp_0.ist, dp_0.fmr, dp_0.mnt next to it, found none"),
    ],
)
def test_a_damaged_file_is_refused_with_its_field(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        read_minutiae(write(tmp_path, name, content), SIZE)


def test_two_files_of_one_print_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "dp_0.mnt", TEXT.encode())
    with pytest.raises(BadRecord, match=r"found dp_0\.ist and dp_0\.mnt"):
        read_minutiae(write(tmp_path, "dp_0.ist", RECORD), SIZE)
