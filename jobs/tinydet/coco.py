"""Reads and checks COCO annotations, and maps sparse category ids to 0..K-1."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from trainyard.errors import UserError

SETS = ("train", "val", "test")


@dataclass(frozen=True)
class Rules:
    """What counts as an object, and how images without a named set are divided into sets."""

    scale: float = 1.0
    outside: str = "fail"
    side_min_px: float = 1.0
    val_share: float = 0.15
    test_share: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class AnnotatedImage:
    """One annotated image. Boxes are in pixels of the image as packed, that is after `Rules.scale`."""

    name: str  # `file_name` in the annotations
    path: Path | None  # None: listed, but the file is missing
    image_id: int
    set: str
    raw_px: tuple[int, int]  # width, height of the file
    size_px: tuple[int, int]  # width, height as packed
    boxes: np.ndarray  # (n, 4) float64 x1, y1, x2, y2
    labels: np.ndarray  # (n,) int64 in 0..K-1
    areas: np.ndarray  # (n,) float64 px^2, from the annotation's `area` if it has one
    crowd: np.ndarray  # (n,) bool: not trained on, and ignored in evaluation


@dataclass(frozen=True)
class Collection:
    """All annotated images of a raw folder."""

    images: list[AnnotatedImage]
    categories: list[str]  # name of each label
    category_ids: list[int]  # id of each label in the annotations
    counts: Mapping[str, int] = field(default_factory=dict)  # boxes that were clipped or left out, by reason


def read_collection(raw: Path, rules: Rules) -> Collection:
    """Read every annotation file of a raw folder; an unchanged folder is read once per process.

    Annotations are `*.json` in `annotations/`, else in the folder itself. A file whose name ends in train, val or test
    names the set of its images; images of any other file are assigned by a hash, and a sequence is never divided.

    Raises:
        UserError: there are no annotations, or one is wrong; the message names the file and the entry.
    """
    files = find_annotation_files(raw)
    if not files:
        raise UserError(
            f"{raw}: no annotations. Expected COCO JSON files in {raw}/annotations, such as instances_train.json and "
            "instances_val.json, and the images in the folder images."
        )
    stamp = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    return _read_cached(raw, stamp, rules)


def find_annotation_files(raw: Path) -> list[Path]:
    """Return the annotation files of a raw folder, sorted by name, without unions of other files."""
    files = sorted((raw / "annotations").glob("*.json")) or sorted(raw.glob("*.json"))
    names = {path.stem for path in files}
    unions = {path for path in files if path.stem.endswith("trainval") and {_find_train_stem(path)} <= names}
    return [path for path in files if path not in unions]


def find_image(raw: Path, name: str) -> Path | None:
    """Return the path of an image: as named, or in `images`, with or without the folders in its name."""
    for folder in (raw, raw / "images"):
        for tail in (name, Path(name).name):
            if (folder / tail).is_file():
                return folder / tail
    return None


def _find_train_stem(path: Path) -> str:
    """'instances_trainval' -> 'instances_train': if that file exists, the union of train and val is not read."""
    return path.stem.removesuffix("val")


@lru_cache(maxsize=2)
def _read_cached(raw: Path, stamp: tuple[tuple[Path, int, int], ...], rules: Rules) -> Collection:
    contents = {path: _read_json(path) for path, _, _ in stamp}
    names = _read_categories(contents)
    ids = sorted(names)
    label_of = {category: label for label, category in enumerate(ids)}
    counts: Counter[str] = Counter()
    images: list[AnnotatedImage] = []
    listed_in: dict[str, Path] = {}
    for path, content in contents.items():
        for image in _read_images(raw, path, content, label_of, names, rules, counts):
            if image.name in listed_in:
                raise UserError(
                    f"{path}: the image '{image.name}' is listed twice, also in {listed_in[image.name]}. "
                    "List it once: a set that shares an image with another measures nothing."
                )
            listed_in[image.name] = path
            images.append(image)
    _log_counts(counts)
    if not any(image.set == "train" for image in images):
        raise UserError(f"{raw}: none of the {len(images)} images is left to train on. Lower packing.val_share.")
    return Collection(images, [names[i] for i in ids], ids, counts)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}). Expected COCO annotations.") from None
    missing = [key for key in ("images", "annotations", "categories") if key not in content]
    if not isinstance(content, dict) or missing:
        raise UserError(f"{path}: not COCO annotations: {', '.join(missing)} missing. Move other JSON files elsewhere.")
    return content


def _read_categories(contents: Mapping[Path, dict[str, Any]]) -> dict[int, str]:
    """Return the name of each category id; all files must agree."""
    names: dict[int, str] = {}
    for path, content in contents.items():
        _check_unique(path, "category", [entry["id"] for entry in content["categories"]])
        for entry in content["categories"]:
            number, name = entry["id"], str(entry["name"])
            if names.setdefault(number, name) != name:
                raise UserError(
                    f"{path}: category {number} is '{name}', but in another file it is '{names[number]}'. Give "
                    "each category the same id in all files."
                )
    return names


def _read_images(
    raw: Path,
    path: Path,
    content: dict[str, Any],
    label_of: Mapping[int, int],
    names: Mapping[int, str],
    rules: Rules,
    counts: Counter[str],
) -> Iterator[AnnotatedImage]:
    images = content["images"]
    _check_unique(path, "image", [entry["id"] for entry in images])
    _check_unique(path, "annotation", [entry["id"] for entry in content["annotations"]])
    by_image: dict[int, list[dict[str, Any]]] = {entry["id"]: [] for entry in images}
    for entry in content["annotations"]:
        if entry["image_id"] not in by_image:
            raise UserError(
                f"{path}: annotation {entry['id']} refers to image {entry['image_id']}, which is not listed. "
                "Add the image, or remove the annotation."
            )
        if entry["category_id"] not in label_of:
            known = ", ".join(f"{i} {name}" for i, name in sorted(names.items())[:10])
            raise UserError(
                f"{path}: annotation {entry['id']} has category {entry['category_id']}, which is unknown. "
                f"Known: {known}{' ...' * (len(names) > 10)}. Add it to the categories, or remove the annotation."
            )
        by_image[entry["image_id"]].append(entry)
    named_set = next(
        (name for name in SETS if path.stem.lower().endswith(name) and not path.stem.endswith("trainval")), ""
    )
    for entry in sorted(images, key=lambda image: str(image["file_name"])):
        width, height = int(entry["width"]), int(entry["height"])
        rows = list(_read_objects(path, by_image[entry["id"]], width, height, rules, counts))
        table = np.array([row[:5] for row in rows], dtype=np.float64).reshape(-1, 5)
        sequence = str(entry.get("sequence", entry["file_name"]))
        size_px = scale_size((width, height), rules.scale)
        factor = np.array([size_px[0] / width, size_px[1] / height])
        yield AnnotatedImage(
            name=str(entry["file_name"]),
            path=find_image(raw, str(entry["file_name"])),
            image_id=int(entry["id"]),
            set=named_set or _assign_set(sequence, rules),
            raw_px=(width, height),
            size_px=size_px,
            boxes=table[:, :4] * np.tile(factor, 2),
            labels=np.array([label_of[row[5]] for row in rows], dtype=np.int64),
            areas=table[:, 4] * factor.prod(),
            crowd=np.array([row[6] for row in rows], dtype=bool),
        )


def scale_size(size_px: tuple[int, int], scale: float) -> tuple[int, int]:
    """Return width and height of a scaled image; each at least 1."""
    return max(1, round(size_px[0] * scale)), max(1, round(size_px[1] * scale))


def _read_objects(
    path: Path, entries: Iterable[dict[str, Any]], width: int, height: int, rules: Rules, counts: Counter[str]
) -> Iterator[tuple[float, float, float, float, float, int, bool]]:
    """Yield x1, y1, x2, y2, area, category and crowd of each object, clipped to its image."""
    for entry in entries:
        x, y, w, h = (float(value) for value in entry["bbox"])
        where = f"{path}: annotation {entry['id']}, bbox [{x:g}, {y:g}, {w:g}, {h:g}]"
        if not all(math.isfinite(value) for value in (x, y, w, h)):
            raise UserError(f"{where}: not finite. Expected x, y, width, height in pixels.")
        outside = x >= width or y >= height or x + w <= 0 or y + h <= 0
        if w < 0 or h < 0 or (outside and min(w, h) > 0):
            if rules.outside == "skip":
                counts["outside their image, or of negative size"] += 1
                continue
            what = "its width or height is negative" if w < 0 or h < 0 else "it is outside its image of"
            size = "" if w < 0 or h < 0 else f" {width} x {height} pixels"
            raise UserError(
                f"{where}: {what}{size}. Expected x, y, width, height in pixels. Fix it, or leave such boxes out: "
                "packing.outside=skip"
            )
        x1, y1, x2, y2 = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
        if min(x2 - x1, y2 - y1) * rules.scale < rules.side_min_px:
            counts[f"with a side below {rules.side_min_px:g} px"] += 1
            continue
        clipped = (x1, y1, x2, y2) != (x, y, x + w, y + h)
        counts["clipped"] += clipped
        area = (x2 - x1) * (y2 - y1) if clipped else float(entry.get("area", w * h))
        yield x1, y1, x2, y2, area, entry["category_id"], bool(entry.get("iscrowd", 0))


def _assign_set(sequence: str, rules: Rules) -> str:
    """Return the set of a sequence, from a hash: an image added later moves no other."""
    digest = hashlib.sha256(f"{rules.seed} {sequence}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < rules.test_share:
        return "test"
    return "val" if share < rules.test_share + rules.val_share else "train"


def _check_unique(path: Path, what: str, ids: list[Any]) -> None:
    duplicates = [str(number) for number, count in Counter(ids).items() if count > 1]
    if duplicates:
        more = f" and {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        raise UserError(
            f"{path}: {what} id {', '.join(duplicates[:5])}{more} is used more than once. An id must name one {what}: "
            "renumber them."
        )


def _log_counts(counts: Counter[str]) -> None:
    if counts["clipped"]:
        logger.info("{} boxes reach beyond their image and were clipped", counts["clipped"])
    for what, count in counts.items():
        if what != "clipped" and count:
            logger.warning("{} boxes {} were left out", count, what)


def select_set(collection: Collection, name: str) -> Collection:
    """Return the images of one set."""
    return replace(collection, images=[image for image in collection.images if image.set == name])
