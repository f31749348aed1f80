"""Turns images with boxes in COCO's format into samples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from trainyard.data.coco import explain_lost_boxes, read_annotations
from trainyard.data.labelled import SETS, assign_sets, find_sets
from trainyard.data.raw import IMAGES, find_listed, list_files, list_named
from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample
from trainyard.data.write_shard import read_image
from trainyard.errors import UserError

from .config import Config

CATEGORIES = "categories"
_SIDE_PX = 64  # of a generated image


@dataclass(frozen=True)
class Listed:
    """One image of an annotation file."""

    key: str  # its file_name
    path: Path
    size_px: tuple[int, int]  # width and height, as listed
    set: str  # "": the files do not say
    boxes: tuple[tuple[float, float, float, float], ...]  # x0, y0, x1, y1 in pixels
    categories: tuple[str, ...]  # one name for each box


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return the names of the categories, a JSON list.

    Raises:
        UserError: no box that is to train has sides of a pixel or more.
    """
    images = list_images(raw)
    boxes = [box for image in images if image.set in ("", "train") for box in image.boxes]
    if not any(x1 - x0 >= 1 and y1 - y0 >= 1 for x0, y0, x1, y1 in boxes):
        reason = explain_lost_boxes([(x0, y0, x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes])
        raise UserError(f"{raw}: none of {len(boxes)} boxes to train on has sides of a pixel or more.{reason}")
    return {CATEGORIES: json.dumps(sorted({name for image in images for name in image.categories}))}


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every image that the annotation files of `raw` list: instances_train.json and so on, or one for all.

    Records: `image`; `boxes` (n, 4) float32 (x0, y0, x1, y1) in pixels of the stored image; `labels` (n,) int64, the
    categories' numbers. Columns: `number`, its place in the listing, and `set` (text).
    """
    images = list_images(raw)
    stated = {image.key: image.set for image in images}
    sets = assign_sets(dict.fromkeys(stated, ""), config.packing, stated=stated)
    for i, image in enumerate(images):
        yield Sample(image.key, partial(load, image), columns={"number": i, "set": sets[image.key]}, source=image.path)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the images of a labelled folder to evaluate, all in "test", and the artifacts of the run."""
    images, known = list_images(raw), json.loads(artifacts[CATEGORIES])
    unknown = sorted({name for image in images for name in image.categories} - set(known))
    if unknown:
        raise UserError(f"{raw}: '{unknown[0]}' is no category of the model, which knows {', '.join(known)}.")
    return (
        Sample(image.key, partial(load, image, artifacts), columns={"number": i, "set": "test"}, source=image.path)
        for i, image in enumerate(images)
    ), artifacts


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image in a folder and below it, or the file `raw` itself."""
    for key, path in list_named(raw, IMAGES):
        yield Sample(key, partial(load_alone, path), source=path)


def load(image: Listed, artifacts: Mapping[str, str]) -> Loaded:
    """Read one image and its boxes.

    Raises:
        BadRecord: it is missing or broken, has another size than listed, or a box without an area or outside of it.
    """
    names = json.loads(artifacts[CATEGORIES])
    data, size_px = _read_upright(image.path)
    if size_px != image.size_px:
        raise BadRecord(f"the image has {size_px} pixels, and is listed with {image.size_px}: boxes would not fit")
    for box in image.boxes:
        if not (0 <= box[0] < box[2] <= size_px[0] + 1 and 0 <= box[1] < box[3] <= size_px[1] + 1):
            raise BadRecord(f"box {box} (x0, y0, x1, y1) has no area, or is not inside the image of {size_px} pixels")
    labels = [names.index(name) for name in image.categories]
    boxes = np.array(image.boxes, np.float32).reshape(-1, 4)
    return {"image": data, "boxes": Ragged(boxes), "labels": Ragged(np.array(labels, np.int64))}


def load_alone(path: Path) -> Loaded:
    """Read an image without boxes; raises BadRecord as `load`."""
    return {"image": _read_upright(path)[0]}


def _read_upright(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of an image, and its width and height."""
    if not path.is_file():
        raise BadRecord("listed, but there is no such file")
    data, image = read_image(path)
    if image.getexif().get(0x0112, 1) != 1:
        raise BadRecord("the file says that it is rotated, and boxes may be meant either way: rotate its pixels")
    return data, image.size


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test", as packed."""
    return find_sets(columns, vocabulary)


def list_images(raw: Path) -> list[Listed]:
    """Return the images of all annotation files in a folder and in its `annotations/`, in their order.

    Raises:
        UserError: there is no such file, or several that do not name sets; one is not in COCO's format; or an image is
            listed twice.
    """
    files = [path for folder in (raw, raw / "annotations") for path in list_files(folder, {".json"}, depth=0)]
    names = {path: next((name for name in SETS if path.stem in (name, f"instances_{name}")), "") for path in files}
    if not files:  # next to the images of each set, as Roboflow writes them
        folders = {"train": "train", "valid": "val", "val": "val", "test": "test"}
        names = {path: folders[name] for name in folders for path in list_files(raw / name, {".json"}, depth=0)}
        files = list(names)
    if not files or (len(files) > 1 and not all(names.values())):
        raise UserError(
            f"{raw}: {len(files)} annotation files (*.json, annotations/*.json). Expected one, or train.json, val.json "
            "and test.json, or instances_train.json and so on, or one in each of the folders train, valid and test."
        )
    listed: dict[str, Listed] = {}
    for path in files:
        for image in _read_annotations(raw, path, names[path] if len(files) > 1 else ""):
            if image.key in listed:
                raise UserError(f"{path}: '{image.key}' is listed twice, so that it could be in training and in test.")
            listed[image.key] = image
    return list(listed.values())


def _read_annotations(raw: Path, path: Path, set_name: str) -> Iterator[Listed]:
    content = read_annotations(path)
    names, objects = {kind.id: kind.name for kind in content.categories}, content.group_objects()
    for image in content.images:
        place = find_listed(raw, image.file_name, where=str(path), folders=(raw, path.parent, raw / "images"))
        kept = [entry for _, entry in objects[image.id] if not entry.is_ignored]
        boxes = tuple((x, y, x + width, y + height) for x, y, width, height in (entry.bbox for entry in kept))
        labels = tuple(names[entry.category_id] for entry in kept)
        key = image.file_name if path.parent in (raw, raw / "annotations") else f"{path.parent.name}/{image.file_name}"
        yield Listed(key, place or raw / image.file_name, image.size_px, set_name, boxes, labels)


def draw_scene(number: int) -> tuple[np.ndarray, list[tuple[int, int, int, int]], list[str]]:
    """Draw an image (64, 64) uint8 of bright squares and dark discs; return it with their boxes and names."""
    rng = np.random.default_rng(number)
    pixels = rng.normal(120, 8, (_SIDE_PX, _SIDE_PX))
    boxes, names = [], []
    for i in range(1 + number % 3):
        side, x = int(rng.integers(10, 18)), 2 + 20 * i
        y = int(rng.integers(2, _SIDE_PX - 20))
        name = ("disc", "square")[int(rng.integers(2))]
        rows, columns = np.mgrid[:side, :side] - (side - 1) / 2
        inside = np.hypot(rows, columns) <= side / 2 if name == "disc" else np.ones((side, side), bool)
        pixels[y : y + side, x : x + side][inside] = 30 if name == "disc" else 220
        boxes.append((x, y, x + side, y + side))
        names.append(name)
    return pixels.clip(0, 255).astype(np.uint8), boxes, names


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Draw `count` images with their annotation file: the smoke test trains on them."""
    raw.mkdir(parents=True, exist_ok=True)
    categories = [{"id": 1, "name": "disc"}, {"id": 2, "name": "square"}]
    images, annotations = [], list[dict[str, object]]()
    for i in range(count):
        pixels, boxes, names = draw_scene(i)
        Image.fromarray(pixels).convert("RGB").save(raw / f"{i:05d}.png")
        images.append({"id": i, "file_name": f"{i:05d}.png", "width": _SIDE_PX, "height": _SIDE_PX})
        for (x0, y0, x1, y1), name in zip(boxes, names, strict=True):
            kind = 1 if name == "disc" else 2
            annotations.append(
                {"id": len(annotations), "image_id": i, "category_id": kind, "bbox": [x0, y0, x1 - x0, y1 - y0]}
            )
    content = {"images": images, "annotations": annotations, "categories": categories}
    (raw / "annotations.json").write_text(json.dumps(content))
