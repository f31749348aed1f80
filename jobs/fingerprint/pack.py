"""Turns folders of fingerprint images into samples, and splits fingers into training, validation and test."""

import hashlib
import io
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from trainyard.data.shards import BadRecord, Loaded, Sample
from trainyard.data.write_shard import open_image
from trainyard.errors import UserError

from .config import Config
from .synthesis import synthesize

__all__ = ["samples", "splits", "synthesize"]

SUFFIXES = {".tif", ".tiff", ".png", ".bmp", ".jpg", ".jpeg"}
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
BLOCK_PX = 8  # cell size of the search for the print, at 500 dpi: about one ridge


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every image `raw/<finger>_<impression>.<suffix>` and `raw/<set>/<finger>_<impression>.<suffix>`.

    The last underscore separates the impression, a number; the finger itself may contain underscores. Files with other
    suffixes are skipped. Columns: `finger` (text, unique over all sets), `impression` (number), `set` (text, "" for
    images directly in `raw`), and `box_y, box_x, box_height, box_width`, the square to crop in px.
    """
    for folder in (raw, *sorted(path for path in raw.iterdir() if path.is_dir())):
        set_name = "" if folder == raw else folder.name
        for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES):
            yield Sample(
                key=path.relative_to(raw).as_posix(),
                load=partial(load, path, set_name, config.packing.dpi, config.packing.region_px, config.image.fill),
                source=path,
            )


def load(path: Path, set_name: str, dpi: int, region_px: int, fill: int) -> Loaded:
    """Read one image and find the print in it.

    Raises:
        BadRecord: the name is not `<finger>_<impression>`, or the file is not a complete image of a known format.
    """
    finger, underscore, impression = path.stem.rpartition("_")
    if not underscore or not finger or not impression.isdecimal():
        raise BadRecord(f"the name is not <finger>_<impression>{path.suffix}, such as 101_1{path.suffix}")
    data, gray = _encode_gray(path.read_bytes(), fill)
    centre_y, centre_x = find_print_centre(gray, dpi)
    side = round(region_px * dpi / 500)
    return {
        "image": data,
        "finger": f"{set_name}/{finger}" if set_name else finger,
        "impression": int(impression),
        "set": set_name,
        "box_y": round(centre_y - side / 2),
        "box_x": round(centre_x - side / 2),
        "box_height": side,
        "box_width": side,
    }


def _encode_gray(data: bytes, fill: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Return an encoded 8-bit gray image and its pixels (H, W).

    A plain gray JPEG or PNG keeps its bytes; anything else becomes a lossless PNG.
    """
    image = open_image(data)
    rotated = image.getexif().get(ORIENTATION, 1) != 1
    if image.mode == "L" and not image.has_transparency_data and not rotated:
        pixels = np.asarray(image)
        if image.format in ("JPEG", "PNG"):
            return data, pixels
    else:
        pixels = np.asarray(_convert_to_gray(ImageOps.exif_transpose(image), fill))
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG", compress_level=1)
    return png.getvalue(), pixels


def _convert_to_gray(image: Image.Image, fill: int) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, (fill, fill, fill, 255))
        return Image.alpha_composite(background, image.convert("RGBA")).convert("L")
    if image.mode in ("1", "L", "P", "RGB", "YCbCr", "CMYK"):
        return image.convert("L")
    raise BadRecord(f"the pixels have mode {image.mode} with an unknown range: convert the file to 8-bit gray")


def find_print_centre(gray: NDArray[np.uint8], dpi: int) -> tuple[float, float]:
    """Return the centroid (y, x) of the print in pixels; the middle of an image without contrast.

    Ridges are where neighbouring pixels differ most. A cell of about one ridge counts as print if its summed absolute
    differences, smoothed over 5 x 5 cells, exceed half of their 90th percentile. About 2 ms for 640 x 480.
    """
    height, width = gray.shape
    block = max(1, min(round(BLOCK_PX * dpi / 500), height - 1, width - 1))
    rows, columns = (height - 1) // block, (width - 1) // block
    if rows == 0 or columns == 0:
        return height / 2, width / 2
    pixels = gray.astype(np.int16)[: rows * block + 1, : columns * block + 1]
    change = np.abs(np.diff(pixels, axis=0))[:, :-1] + np.abs(np.diff(pixels, axis=1))[:-1]
    cells = change.reshape(rows, block, columns, block).sum(axis=(1, 3), dtype=np.int64)
    energy = _compute_box_mean(cells.astype(np.float64), 2)
    ridges = energy > 0.5 * np.quantile(energy, 0.9)
    if not ridges.any():
        return height / 2, width / 2
    y, x = np.nonzero(ridges)
    return (float(y.mean()) + 0.5) * block, (float(x.mean()) + 0.5) * block


def _compute_box_mean(cells: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    side = 2 * reach + 1
    padded = np.pad(cells, ((reach + 1, reach), (reach + 1, reach)), mode="constant")
    total = padded.cumsum(axis=0).cumsum(axis=1)
    summed = total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]
    mean: NDArray[np.float64] = summed / side**2
    return mean


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and the tests, which share no finger.

    Fingers are held out in the order of a hash of (seed, name), so the split depends on nothing else. Shares are of the
    fingers in `train_sets`, rounded, and at least two fingers, because one finger has no impostors.

    Args:
        columns: `finger` and `set`, (N,) codes.
        vocabulary: the names of those codes.

    Returns:
        Ascending int64 ids. Tests are named "test_<set>", or "test" if there are no `test_sets`.

    Raises:
        UserError: a pattern matches no set, a set has two roles, or too few fingers are left for training.
    """
    settings = config.split
    train_sets = _match_sets("split.train_sets", settings.train_sets, vocabulary["set"])
    val_sets = _match_sets("split.val_sets", settings.val_sets, vocabulary["set"])
    test_sets = _match_sets("split.test_sets", settings.test_sets, vocabulary["set"])
    if settings.train_sets == ["*"]:
        train_sets = [name for name in train_sets if name not in val_sets + test_sets]
    _refuse_two_roles(train_sets, val_sets, test_sets)

    set_names, finger_codes = np.array(vocabulary["set"])[columns["set"]], columns["finger"]
    fingers = np.unique(finger_codes[np.isin(set_names, train_sets)])
    fingers = np.array(
        sorted(fingers, key=lambda code: _hash_finger(config.seed, vocabulary["finger"][code])), dtype=np.int64
    )
    test_count = 0 if test_sets else _count_held_out(len(fingers), settings.test_share)
    val_count = 0 if val_sets else _count_held_out(len(fingers), settings.val_share)
    test, val, train = np.split(fingers, [test_count, test_count + val_count])
    if len(train) < 2:
        raise UserError(
            f"{len(fingers)} fingers to train on, less {test_count} for testing and {val_count} for validation: at "
            "least 2 must be left. Give more data, or lower split.val_share and split.test_share."
        )
    masks = {"train": np.isin(finger_codes, train), "val": np.isin(finger_codes, val) | np.isin(set_names, val_sets)}
    masks |= {f"test_{name}": set_names == name for name in test_sets}
    if test_count:
        masks["test"] = np.isin(finger_codes, test)
    return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}


def _match_sets(option: str, patterns: list[str], names: list[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            found = ", ".join(name or "(none: images directly in the raw folder)" for name in sorted(names))
            raise UserError(f"{option}: '{pattern}' matches no set. Sets (sub-folders) found: {found}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _refuse_two_roles(train_sets: list[str], val_sets: list[str], test_sets: list[str]) -> None:
    roles = [*train_sets, *val_sets, *test_sets]
    repeated = sorted({name for name in roles if roles.count(name) > 1})
    if repeated:
        raise UserError(
            f"'{repeated[0]}' is named in two of split.train_sets, split.val_sets and split.test_sets, but these "
            "must not share fingers. Keep it in one of them."
        )


def _hash_finger(seed: int, finger: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{finger}".encode()).digest()


def _count_held_out(fingers: int, share: float) -> int:
    return max(2, round(share * fingers)) if share > 0 else 0
