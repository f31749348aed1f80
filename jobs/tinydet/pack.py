"""Pictures with COCO annotations into samples: whole, or cut into tiles that overlap."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import open_image
from trainyard.errors import UserError

from .coco import SETS, Picture, Rules, read, scaled_px
from .config import Config, PackingSettings
from .synthesis import synthesize

__all__ = ["answer_place", "fit_artifacts", "samples", "splits", "synthesize", "unlabelled"]

ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
KINDS = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
TRUTH = ("x1", "y1", "x2", "y2", "area", "label", "crowd")
"""Columns of the record `truth`: every object of a whole picture, in its pixels. Its first tile has it, others none."""


@dataclass(frozen=True)
class Tile:
    """A part of a picture, in pixels of the picture as packed."""

    x: int
    y: int
    width: int
    height: int


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every tile of every annotated picture, picture by picture; a picture that is not cut is one tile.

    Columns: `set`, `picture` (text), `tile_x`, `tile_y`: its upper left corner in the picture, px. Records: `image`;
    `boxes` (n, 4) float32 x1, y1, x2, y2 in pixels of the tile and `labels` (n,) int64 in 0..K-1, crowds left out;
    `truth` (m, 7) float64, see `TRUTH`.

    Raises:
        UserError: the annotations are wrong, or a tile has more objects than `packing.objects_max`.
    """
    rule = config.packing
    for picture in read(raw, rules_of(rule)).pictures:
        for number, tile in enumerate(tiles(picture.size_px, side_px=rule.tile_px, overlap=rule.tile_overlap)):
            boxes, labels = objects_of(picture, tile, visible=rule.tile_visible)
            if len(labels) > rule.objects_max:
                where = f" in a tile at {tile.x},{tile.y}" * bool(number)
                cut = "Cut pictures into tiles: packing.tile_px=512" if not rule.tile_px else "Use smaller tiles"
                raise UserError(
                    f"{raw}: {picture.name} has {len(labels)} objects{where}, "
                    f"expected {rule.objects_max} at most. {cut}, or raise packing.objects_max."
                )
            yield Sample(
                key=key_of(picture.name, tile, rule.tile_px),
                load=partial(load, picture, tile, boxes, labels, first=number == 0),
                columns={"picture": picture.name, "set": picture.set, **place_of(tile)},
                source=picture.path,
            )


def fit_artifacts(raw: Path, config: Config) -> dict[str, str]:
    """Return `categories`, a JSON list of {"id", "name"} by label, and `objects`, numbers of the training part.

    `objects` is JSON: `pictures`, and of their tiles the mean `width_px` and `height_px`; `side_px`, the mean square
    root of an object's area; `per_sample` and `most`, objects of a tile on the mean and at most.
    """
    rule = config.packing
    collection = read(raw, rules_of(rule))
    pictures = [picture for picture in collection.pictures if picture.set == "train"]
    counts: list[int] = []
    sides: list[float] = []
    sizes: list[tuple[int, int]] = []
    for picture in pictures:
        for tile in tiles(picture.size_px, side_px=rule.tile_px, overlap=rule.tile_overlap):
            boxes, labels = objects_of(picture, tile, visible=rule.tile_visible)
            counts.append(len(labels))
            sizes.append((tile.width, tile.height))
            sides += np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1)).tolist()
    width_px, height_px = np.mean(sizes, axis=0).tolist()
    names = zip(collection.category_ids, collection.categories, strict=True)
    objects = {
        "pictures": len(pictures),
        "width_px": width_px,
        "height_px": height_px,
        "side_px": float(np.mean(sides)) if sides else 0.0,
        "per_sample": float(np.mean(counts)),
        "most": max(counts),
    }
    return {
        "categories": json.dumps([{"id": number, "name": name} for number, name in names]),
        "objects": json.dumps(objects),
    }


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test": no picture, and no sequence, is in two of them."""
    set_of = np.array(vocabulary["set"])[columns["set"]]
    return {name: np.flatnonzero(set_of == name) for name in SETS if name in vocabulary["set"]}


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every tile of every picture file in a folder and those below, for `trainyard predict`."""
    rule = config.packing
    for path in sorted(path for path in raw.rglob("*") if path.suffix.lower() in KINDS):
        name = str(path.relative_to(raw))
        try:
            with Image.open(path) as header:
                upright = header.getexif().get(ORIENTATION, 1) < 5
                raw_px = header.size if upright else header.size[::-1]
        except OSError as error:
            raise UserError(f"{path}: no picture ({error}). Remove it from {raw}.") from None
        size_px = scaled_px(raw_px, rule.scale)
        for tile in tiles(size_px, side_px=rule.tile_px, overlap=rule.tile_overlap):
            yield Sample(
                key=key_of(name, tile, rule.tile_px),
                load=partial(load_picture, path, raw_px, size_px, tile),
                columns={"picture": name, **place_of(tile)},
                source=path,
            )


def rules_of(packing: PackingSettings) -> Rules:
    """Return how annotations are read."""
    return Rules(
        scale=packing.scale,
        outside=packing.outside,
        side_min_px=packing.side_min_px,
        val_share=packing.val_share,
        test_share=packing.test_share,
        seed=packing.seed,
    )


def place_of(tile: Tile) -> dict[str, int]:
    """Return the columns that say where a tile lies."""
    return {"tile_x": tile.x, "tile_y": tile.y}


def key_of(name: str, tile: Tile, tile_px: int) -> str:
    """'a.png', or with tiles 'a.png@512,0'."""
    return f"{name}@{tile.x},{tile.y}" if tile_px else name


def answer_place(key: str) -> tuple[str, int, int]:
    """'a.png@512,0' -> ('a.png', 512, 0), 'a.png' -> ('a.png', 0, 0)."""
    name, at, place = key.rpartition("@")
    x, comma, y = place.partition(",")
    if at and comma and x.isdigit() and y.isdigit():
        return name, int(x), int(y)
    return key, 0, 0


def tiles(size_px: tuple[int, int], *, side_px: int, overlap: float) -> list[Tile]:
    """Return the tiles of a picture, row by row: side_px squares that overlap by a share, the last ones more.

    They cover the picture and never reach beyond it; a picture no larger than a tile along an axis is not cut there.
    """
    if not side_px:
        return [Tile(0, 0, *size_px)]
    across, down = (_starts(length, side_px, overlap) for length in size_px)
    return [Tile(x, y, min(side_px, size_px[0]), min(side_px, size_px[1])) for y in down for x in across]


def _starts(length: int, side: int, overlap: float) -> list[int]:
    if length <= side:
        return [0]
    step = max(1, round(side * (1 - overlap)))
    return [*range(0, length - side, step), length - side]


def objects_of(picture: Picture, tile: Tile, *, visible: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what a tile has of a picture's objects, crowds left out.

    Returns:
        boxes (n, 4) float32 in pixels of the tile, cut to it; labels (n,) int64. An object of which the tile shows a
        share of its box below `visible` is not among them.
    """
    corner, size = np.array([tile.x, tile.y] * 2), np.array([tile.width, tile.height] * 2)
    cut = np.clip(picture.boxes - corner, 0, size)
    whole = (picture.boxes[:, 2:] - picture.boxes[:, :2]).prod(axis=1)
    shown = (cut[:, 2:] - cut[:, :2]).prod(axis=1)
    kept = (shown > 0) & (shown >= visible * whole) & ~picture.crowd
    return cut[kept].astype(np.float32), picture.labels[kept]


def load(
    picture: Picture,
    tile: Tile,
    boxes: np.ndarray,
    labels: np.ndarray,
    artifacts: Mapping[str, str] | None = None,
    *,
    first: bool,
) -> Loaded:
    """Read one tile with its objects.

    Raises:
        BadRecord: the picture is not there, cannot be read, or is not of the size that the annotations say.
    """
    if picture.path is None:
        raise BadRecord("the annotations list it, but there is no such file")
    truth = np.column_stack([picture.boxes, picture.areas, picture.labels, picture.crowd]).astype(np.float64)
    return {
        **load_picture(picture.path, picture.raw_px, picture.size_px, tile),
        "boxes": Ragged(boxes),
        "labels": Ragged(labels),
        "truth": Ragged(truth.reshape(-1, len(TRUTH))[: None if first else 0]),
    }


def load_picture(
    path: Path,
    raw_px: tuple[int, int],
    size_px: tuple[int, int],
    tile: Tile,
    artifacts: Mapping[str, str] | None = None,
) -> Loaded:
    """Read one tile's pixels: the file's own bytes where it is a whole upright 8-bit JPEG or PNG, else a PNG."""
    data, picture = _decoded(path, raw_px)
    whole = (tile.width, tile.height) == size_px
    if data is not None and whole and size_px == raw_px:
        return {"image": data}
    if size_px != raw_px:
        picture = _scaled(path, raw_px, size_px)
    png = io.BytesIO()
    part = picture.crop((tile.x, tile.y, tile.x + tile.width, tile.y + tile.height))
    part.save(png, "PNG", compress_level=1)
    return {"image": png.getvalue()}


@lru_cache(maxsize=1)  # the tiles of a picture are neighbours
def _decoded(path: Path, raw_px: tuple[int, int]) -> tuple[bytes | None, Image.Image]:
    """Return the file's bytes if they can be kept, and its pixels, gray or RGB, as the annotations see them."""
    data = path.read_bytes()
    picture = open_image(data)
    if picture.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "YCbCr", "CMYK"):
        raise BadRecord(
            f"its pixels are of mode {picture.mode}, whose range is unknown: convert it to 8-bit RGB or gray"
        )
    kept = picture.format in ("JPEG", "PNG") and picture.mode in ("L", "RGB")
    if picture.getexif().get(ORIENTATION, 1) != 1:
        upright = ImageOps.exif_transpose(picture)  # annotators see it upright, unless their tool says otherwise
        picture, kept = (upright if upright.size == raw_px else picture), False
    if picture.size != raw_px:
        raise BadRecord(
            f"it is {picture.width} x {picture.height} pixels, the annotations say {raw_px[0]} x {raw_px[1]}: "
            "they are of another version of it"
        )
    return data if kept else None, picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


@lru_cache(maxsize=1)
def _scaled(path: Path, raw_px: tuple[int, int], size_px: tuple[int, int]) -> Image.Image:
    return _decoded(path, raw_px)[1].resize(size_px, Image.Resampling.LANCZOS)
