"""Folders of twin faces into samples with their evaluation pairs."""

import io
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trainyard.data.shards import BadRecord, Loaded, Sample
from trainyard.data.write_shard import open_image

from . import protocol
from .config import Config
from .listing import SETS, Cut, people
from .synthesis import synthesize

__all__ = ["samples", "splits", "synthesize"]

ORIENTATION = 0x0112  # the EXIF tag; 1 is upright


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every picture that a raw folder names; `listing.people` says in which forms.

    Columns: `person`, `family` and `set` (text), `number` (the picture's place in the listing) and `pairs`, its
    evaluation pairs as `protocol.written` writes them; empty in the training set.
    """
    rule = config.packing
    cut = Cut(rule.val_share, rule.test_share, rule.seed)
    everybody = people(raw, singles=rule.singles, cut=cut)
    rows = [(person, picture) for person in everybody for picture in person.pictures]
    pairs = [""] * len(rows)
    for name in SETS[1:]:
        numbers = [i for i, (person, _) in enumerate(rows) if person.set == name]
        drawn = protocol.draw(
            [rows[i][0].name for i in numbers],
            [rows[i][0].family for i in numbers],
            strangers=rule.strangers,
            seed=rule.seed,
        )
        for i, found in zip(numbers, drawn, strict=True):
            pairs[i] = protocol.written([(kind, numbers[j]) for kind, j in found])
    for i, (person, picture) in enumerate(rows):
        yield Sample(
            key=picture.name,
            load=partial(load, picture.path, rule.min_side_px, rule.aspect_max),
            columns={
                "person": person.name,
                "family": person.family,
                "set": person.set,
                "number": i,
                "pairs": pairs[i],
            },
            source=picture.path,
        )


def load(path: Path | None, min_side_px: int, aspect_max: float) -> Loaded:
    """Read one picture.

    Raises:
        BadRecord: it is not there, no complete picture of a known kind, or not of the size of a face crop.
    """
    if path is None:
        raise BadRecord("listed, but there is no such file")
    data = path.read_bytes()
    picture = open_image(data)
    short, long = sorted(picture.size)
    if short < min_side_px or long > aspect_max * short:
        raise BadRecord(
            f"{picture.width} x {picture.height} pixels are no face crop: expected sides of {min_side_px} or more, "
            f"the longer one at most {aspect_max:g} shorter ones (packing.min_side_px, packing.aspect_max)"
        )
    return {"image": _plain(data, picture)}


def _plain(data: bytes, picture: Image.Image) -> bytes:
    """Return the bytes as they are if they are an upright 8-bit JPEG or PNG, gray or RGB; else as PNG."""
    turned = picture.getexif().get(ORIENTATION, 1) != 1
    if picture.format in ("JPEG", "PNG") and picture.mode in ("L", "RGB") and not turned:
        return data
    if picture.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "YCbCr", "CMYK"):
        raise BadRecord(
            f"its pixels are of mode {picture.mode}, whose range is unknown: convert it to 8-bit RGB or gray"
        )
    png = io.BytesIO()
    ImageOps.exif_transpose(picture).convert("L" if picture.mode == "L" else "RGB").save(png, "PNG", compress_level=1)
    return png.getvalue()


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test" as packed: no family is in two of them."""
    set_of = np.array(vocabulary["set"])[columns["set"]]
    return {name: np.flatnonzero(set_of == name) for name in SETS if name in vocabulary["set"]}
