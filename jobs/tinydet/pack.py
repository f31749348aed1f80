"""Turns images with boxes into samples: whole images, or overlapping tiles."""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from loguru import logger
from PIL import Image, ImageOps

from trainyard.data.raw import IMAGES, list_named
from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import open_image
from trainyard.errors import UserError
from trainyard.text import align_columns, join_names

from .coco import AnnotatedImage, read_collection, scale_size, summarize_sets
from .config import Config, PackingSettings
from .folders import ORIENTATION, read_upright_px
from .layout import SETS
from .synthesis import synthesize as synthesize

TRUTH = ("x1", "y1", "x2", "y2", "area", "label", "crowd")
"""Columns of the record `truth`: every object of a whole image, in its pixels. Only the first tile has rows."""


@dataclass(frozen=True)
class Tile:
    """A part of an image, in pixels of the image as packed."""

    x: int
    y: int
    width: int
    height: int


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every tile of every annotated image, image by image; an image that is not cut is one tile.

    Columns: `set`, `image_name` (text), `tile_x`, `tile_y`: the tile's upper left corner in the image, px. Records:
    `image`; `boxes` (n, 4) float32 x1, y1, x2, y2 in pixels of the tile and `labels` (n,) int64 in 0..K-1, without
    crowds; `truth` (m, 7) float64, see `TRUTH`.

    Raises:
        UserError: the annotations are wrong, or a tile has more objects than `packing.objects_max`, if that is set.
    """
    yield from _make_samples(raw, read_collection(raw, config.packing).images, config.packing)


def log_reading(raw: Path, config: Config) -> None:
    """Log how five annotated images are read: their sets, sizes and first objects."""
    collection = read_collection(raw, config.packing)
    shown = [image for image in collection.images if len(image.boxes)] or collection.images
    rows = [["image", "set", "size", "objects", "the first: category at x1, y1, x2, y2"]]
    for image in (shown[i] for i in sorted({n * (len(shown) - 1) // 4 for n in range(5)})):
        first = "-"
        if len(image.boxes):
            corners = ", ".join(f"{value:g}" for value in image.boxes[0].round(1))
            first = f"{collection.categories[image.labels[0]]} at {corners}"
        size = "{} x {}".format(*image.size_px)
        rows.append([image.name, image.set, size, str(len(image.boxes)), first])
    files = join_names(sorted({image.file for image in collection.images}))
    logger.info("{}: {} images, as {} says. For example:", raw, len(collection.images), files)
    for line in align_columns(rows, indent="  "):
        logger.info("{}", line)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return every annotated tile of a folder to evaluate, and the artifacts of the run, whose categories count.

    Raises:
        UserError: as in `samples`, or there are objects of a category that the run does not know.
    """
    collection = read_collection(raw, config.packing, trains=False)
    known = _list_category_names(artifacts)
    used = {collection.categories[label] for image in collection.images for label in np.unique(image.labels).tolist()}
    if unknown := sorted(used - set(known)):
        raise UserError(
            f"{raw}: has objects of the category '{unknown[0]}', but the run knows {join_names(known)}. Give the "
            "categories the same names, or remove the others."
        )
    label_of = np.array([known.index(name) if name in known else -1 for name in collection.categories], dtype=np.int64)
    images = [replace(image, labels=label_of[image.labels]) for image in collection.images]
    return _make_samples(raw, images, config.packing), artifacts


def join_artifacts(folder: Path, own: Mapping[str, str], packed: Mapping[str, str]) -> Mapping[str, str]:
    """Return the artifacts with which a run reads packed data: its own.

    Raises:
        UserError: the data has other categories, so its labels mean something else.
    """
    names, others = _list_category_names(own), _list_category_names(packed)
    if names != others:
        raise UserError(
            f"{folder}: packed with the categories {join_names(others)}, but the run knows {join_names(names)}. Name "
            "the raw files instead: the run packs them with its own."
        )
    return own


def _list_category_names(artifacts: Mapping[str, str]) -> list[str]:
    return [str(entry["name"]) for entry in json.loads(artifacts["categories"])]


def _make_samples(raw: Path, images: Sequence[AnnotatedImage], rule: PackingSettings) -> Iterator[Sample]:
    for image in images:
        for number, tile in enumerate(cut_tiles(image.size_px, side_px=rule.tile_px, overlap=rule.tile_overlap)):
            boxes, labels = clip_objects(image, tile, visible=rule.tile_visible)
            if 0 < rule.objects_max < len(labels):
                where = f" in a tile at {tile.x},{tile.y}" * bool(number)
                cut = "Cut images into tiles: packing.tile_px=512" if not rule.tile_px else "Use smaller tiles"
                raise UserError(
                    f"{raw}: {image.name} has {len(labels)} objects{where}, "
                    f"expected {rule.objects_max} at most. {cut}, or raise packing.objects_max."
                )
            yield Sample(
                key=make_key(image.name, tile, rule.tile_px),
                load=partial(load, image, tile, boxes, labels, first=number == 0),
                columns={"image_name": image.name, "set": image.set, "tile_x": tile.x, "tile_y": tile.y},
                source=image.path,
            )


def fit_artifacts(raw: Path, config: Config) -> dict[str, str]:
    """Return `categories`, a JSON list of {"id", "name"} by label; `sets`, a JSON list of `SetSummary`, which is also
    logged; and `objects`, statistics of the training set.

    `objects` is JSON: `images`, the number of images; `width_px` and `height_px`, the mean size of their tiles;
    `side_px`, the mean square root of an object's area; `per_sample` and `most`, mean and maximum objects of a tile.
    """
    rule = config.packing
    collection = read_collection(raw, rule)
    summaries = summarize_sets(collection)
    for summary in summaries:
        logger.info("{}", summary)
    images = [image for image in collection.images if image.set == "train"]
    counts: list[int] = []
    sides: list[float] = []
    sizes: list[tuple[int, int]] = []
    for image in images:
        for tile in cut_tiles(image.size_px, side_px=rule.tile_px, overlap=rule.tile_overlap):
            boxes, labels = clip_objects(image, tile, visible=rule.tile_visible)
            counts.append(len(labels))
            sizes.append((tile.width, tile.height))
            sides += np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1)).tolist()
    if not any(counts):
        crowds = sum(int(image.crowd.sum()) for image in images)
        raise UserError(
            f"{raw}: no box is left to train on in {len(images)} images; {crowds} are crowds or to be ignored. "
            f"{collection.lost or 'The annotations have no other.'}"
        )
    width_px, height_px = np.mean(sizes, axis=0).tolist()
    names = zip(collection.category_ids, collection.categories, strict=True)
    objects = {
        "images": len(images),
        "width_px": width_px,
        "height_px": height_px,
        "side_px": float(np.mean(sides)) if sides else 0.0,
        "per_sample": float(np.mean(counts)),
        "most": max(counts),
    }
    return {
        "categories": json.dumps([{"id": number, "name": name} for number, name in names]),
        "sets": json.dumps([asdict(summary) for summary in summaries]),
        "objects": json.dumps(objects),
    }


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test"; no image and no sequence is in two of them."""
    set_of = np.array(vocabulary["set"])[columns["set"]]
    return {name: np.flatnonzero(set_of == name) for name in SETS if name in vocabulary["set"]}


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every tile of every image file in a folder and below it, or of the file `raw` itself."""
    rule = config.packing
    for name, path in list_named(raw, IMAGES):
        raw_px = read_upright_px(path)
        size_px = scale_size(raw_px, rule.scale)
        for tile in cut_tiles(size_px, side_px=rule.tile_px, overlap=rule.tile_overlap):
            yield Sample(
                key=make_key(name, tile, rule.tile_px),
                load=partial(load_image, path, raw_px, size_px, tile),
                columns={"image_name": name, "tile_x": tile.x, "tile_y": tile.y},
                source=path,
            )


def make_key(name: str, tile: Tile, tile_px: int) -> str:
    """Return 'a.png', or for a tile 'a.png@512,0'."""
    return f"{name}@{tile.x},{tile.y}" if tile_px else name


def parse_key(key: str) -> tuple[str, int, int]:
    """'a.png@512,0' -> ('a.png', 512, 0), 'a.png' -> ('a.png', 0, 0)."""
    match = re.fullmatch(r"(.*)@(\d+),(\d+)", key, re.DOTALL)
    return (match[1], int(match[2]), int(match[3])) if match else (key, 0, 0)


def cut_tiles(size_px: tuple[int, int], *, side_px: int, overlap: float) -> list[Tile]:
    """Return the tiles of an image, row by row: squares of side_px that overlap by a share, the last ones by more.

    They cover the image and never reach beyond it; an axis no longer than a tile is not cut.
    """
    if not side_px:
        return [Tile(0, 0, *size_px)]
    step = max(1, round(side_px * (1 - overlap)))
    width, height = (min(side_px, length) for length in size_px)
    across, down = ([*range(0, length - side_px, step), max(0, length - side_px)] for length in size_px)
    return [Tile(x, y, width, height) for y in down for x in across]


def clip_objects(image: AnnotatedImage, tile: Tile, *, visible: float) -> tuple[np.ndarray, np.ndarray]:
    """Clip an image's objects to a tile; crowds are left out.

    Returns:
        boxes (n, 4) float32 in pixels of the tile, clipped to it; labels (n,) int64. An object is left out if the tile
        shows less than a share of `visible` of its box.
    """
    corner, size = np.array([tile.x, tile.y] * 2), np.array([tile.width, tile.height] * 2)
    clipped = np.clip(image.boxes - corner, 0, size)
    whole = (image.boxes[:, 2:] - image.boxes[:, :2]).prod(axis=1)
    shown = (clipped[:, 2:] - clipped[:, :2]).prod(axis=1)
    kept = (shown > 0) & (shown >= visible * whole) & ~image.crowd
    return clipped[kept].astype(np.float32), image.labels[kept]


def load(
    image: AnnotatedImage,
    tile: Tile,
    boxes: np.ndarray,
    labels: np.ndarray,
    artifacts: Mapping[str, str] | None = None,
    *,
    first: bool,
) -> Loaded:
    """Read one tile with its objects.

    Raises:
        BadRecord: the image is missing, cannot be read, or its size is not the annotated one.
    """
    if image.path is None:
        places = ", ".join(map(str, image.searched))
        raise BadRecord(f"the annotations list it, but the file is missing; searched: {places}")
    truth = np.column_stack([image.boxes, image.areas, image.labels, image.crowd]).astype(np.float64)
    return {
        **load_image(image.path, image.raw_px, image.size_px, tile),
        "boxes": Ragged(boxes),
        "labels": Ragged(labels),
        "truth": Ragged(truth.reshape(-1, len(TRUTH))[: None if first else 0]),
    }


def load_image(
    path: Path,
    raw_px: tuple[int, int],
    size_px: tuple[int, int],
    tile: Tile,
    artifacts: Mapping[str, str] | None = None,
) -> Loaded:
    """Read one tile's pixels: the file's own bytes if it is a whole upright 8-bit JPEG or PNG, else a PNG."""
    data, image = _decode(path, raw_px)
    if data is not None and (tile.width, tile.height) == size_px == raw_px:
        return {"image": data}
    if size_px != raw_px:
        image = _decode_and_scale(path, raw_px, size_px)
    png = io.BytesIO()
    part = image.crop((tile.x, tile.y, tile.x + tile.width, tile.y + tile.height))
    part.save(png, "PNG", compress_level=1)
    return {"image": png.getvalue()}


@lru_cache(maxsize=1)  # the tiles of an image are read one after the other
def _decode(path: Path, raw_px: tuple[int, int]) -> tuple[bytes | None, Image.Image]:
    """Return the file's bytes if they can be stored as they are, and its pixels, gray or RGB, oriented as annotated."""
    data = path.read_bytes()
    image = open_image(data)
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "YCbCr", "CMYK"):
        raise BadRecord(f"its pixels have mode {image.mode} of unknown range: convert it to 8-bit RGB or gray")
    is_storable = image.format in ("JPEG", "PNG") and image.mode in ("L", "RGB")
    if image.getexif().get(ORIENTATION, 1) != 1:  # tools show it upright, unless the annotated size says otherwise
        upright, is_storable = ImageOps.exif_transpose(image), False
        image = upright if upright.size == raw_px else image
    if image.size != raw_px:
        raise BadRecord(
            f"it is {image.width} x {image.height} pixels, but the annotations say {raw_px[0]} x {raw_px[1]}: "
            "they belong to another version of it"
        )
    return data if is_storable else None, image if image.mode in ("L", "RGB") else image.convert("RGB")


@lru_cache(maxsize=1)
def _decode_and_scale(path: Path, raw_px: tuple[int, int], size_px: tuple[int, int]) -> Image.Image:
    return _decode(path, raw_px)[1].resize(size_px, Image.Resampling.LANCZOS)
