"""Reads the minutiae of a print from the file next to it: an ISO/IEC 19794-2:2005 record, or a text."""

import struct
from math import isfinite, pi
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainyard.data.shards import BadRecord

SUFFIXES = (".ist", ".fmr", ".mnt")
HEADER = struct.Struct(">4s4sI2x4HBxxxBB")  # through the number of minutiae; big-endian, as all of the record
MINUTIA = np.dtype([("type_x", ">u2"), ("y", ">u2"), ("angle", "u1"), ("quality", "u1")])
LOW_14_BITS = 2**14 - 1
UNCLEAR_SCALE = 0.05  # a size that differs by less is a crop as likely as a scale

Table = NDArray[np.float64]
Size = tuple[int, int]


def read_minutiae(image: Path, size_px: Size) -> NDArray[np.float32]:
    """Return x, y and direction (N, 3) of the minutiae of an image, from the file next to it.

    Pixels are of the image, the upper left corner at (0, 0), a minutia in the middle of its pixel. Directions are in
    radians, counter-clockwise from the x axis. If the record is of the image in another size, as SFinGe's are,
    positions are scaled.

    Args:
        size_px: height and width of the image.

    Raises:
        BadRecord: there is no such file or more than one, it is damaged, or it is of an image of another shape.
    """
    file = _find_file(image)
    read = _read_text if file.suffix == ".mnt" else _read_iso
    table_N3, (height, width) = read(file)
    scale_y, scale_x = size_px[0] / height, size_px[1] / width
    is_alike = abs(width * scale_y - size_px[1]) <= 1 and abs(scale_y - 1) > UNCLEAR_SCALE
    if (height, width) != tuple(size_px) and not is_alike:
        whole = f"{size_px[1]} x {size_px[0]} px as the image, or the same shape in another scale"
        raise _make_error(file, "width and height", whole, f"{width} x {height}")
    table_N3[:, :2] = (table_N3[:, :2] + 0.5) * (scale_x, scale_y)
    return table_N3.astype(np.float32)


def _find_file(image: Path) -> Path:
    """Return `101_1.ist`, or `101_1.tif.ist`, of `101_1.tif`."""
    names = [stem + suffix for suffix in SUFFIXES for stem in (image.stem, image.name)]
    present = [name for name in names if image.with_name(name).is_file()]
    if len(present) != 1:
        raise BadRecord(
            f"packing.minutiae=files: expected one of {', '.join(names[::2])} next to it, found "
            f"{' and '.join(present) or 'none'}. To find minutiae in the image, type packing.minutiae=extract"
        )
    return image.with_name(present[0])


def _make_error(file: Path, field: str, expected: object, value: object) -> BadRecord:
    return BadRecord(f"its minutiae, {file.name}: {field}: expected {expected}, found {value}")


def _read_iso(file: Path) -> tuple[Table, Size]:
    """Return x, y in px and direction (N, 3) of a record, and height and width of its image."""
    data = file.read_bytes()
    if len(data) < HEADER.size:
        raise _make_error(file, "size", f"{HEADER.size} bytes of header or more", f"{len(data)} bytes")
    magic, version, length, width, height, _, _, views, _, count = HEADER.unpack_from(data)
    minutiae_end = HEADER.size + count * MINUTIA.itemsize
    extra = int.from_bytes(data[minutiae_end : minutiae_end + 2], "big")
    for field, expected, value in (
        ("format identifier", b"FMR\0", magic),
        ("version", b" 20\0", version),
        ("record length", len(data), length),
        ("number of finger views", 1, views),
        (f"size with {count} minutiae and {extra} bytes of extended data", minutiae_end + 2 + extra, len(data)),
    ):
        if value != expected:
            raise _make_error(file, field, expected, value)
    table = np.frombuffer(data, MINUTIA, count, HEADER.size)
    x, y = table["type_x"] & LOW_14_BITS, table["y"] & LOW_14_BITS
    rows = np.stack([x, y, table["angle"] * (2 * pi / 256)], axis=1).astype(np.float64)
    _check_rows(file, rows, (height, width))
    return rows, (height, width)


def _read_text(file: Path) -> tuple[Table, Size]:
    """Return the same of a text: a name; number, height and width; and a line of x, y and radians for each minutia."""
    try:
        lines = file.read_bytes().decode("ascii").rstrip().splitlines()
        count, height, width = (int(word) for word in lines[1].split())
    except (ValueError, IndexError):
        raise _make_error(file, "line 2", "number of minutiae, height, width", "something else") from None
    if len(lines) - 2 != count:
        raise _make_error(file, "minutiae", f"{count} lines, as line 2 says", len(lines) - 2)
    rows = np.zeros((count, 3))
    for i, line in enumerate(lines[2:]):
        try:
            x, y, direction = (float(word) for word in line.split())
        except ValueError:
            raise _make_error(file, f"line {i + 3}", "x, y and direction", repr(line[:40])) from None
        rows[i] = x, y, direction
    _check_rows(file, rows, (height, width))
    return rows, (height, width)


def _check_rows(file: Path, rows: Table, size: Size) -> None:
    """Refuse an image without pixels, and minutiae outside of it or with an angle that is not in radians."""
    height, width = size
    if min(size) < 1:
        raise _make_error(file, "width and height", "1 px or more", f"{width} x {height}")
    for name, column, limit in (("x", 0, width), ("y", 1, height), ("direction", 2, 2 * pi + 1e-3)):
        for number, value in enumerate(rows[:, column].tolist(), 1):
            if not (isfinite(value) and 0 <= value < limit):
                unit = "radians" if name == "direction" else "px"
                raise _make_error(file, f"{name} of minutia {number}", f"{unit} from 0 to {limit:.6g}", f"{value:g}")
