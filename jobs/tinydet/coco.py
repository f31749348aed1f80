"""Collects the annotated images of a raw folder, and maps sparse category ids to 0..K-1."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from trainyard.data.coco import (
    Annotations,
    Id,
    ImageEntry,
    ObjectEntry,
    check_category_ids,
    explain_lost_boxes,
    read_annotations,
)
from trainyard.errors import UserError
from trainyard.foreign import note_read

from . import folders, visdrone
from .config import PackingSettings
from .layout import BOTH, SETS, AnnotationFile, find_annotation_files, find_image, list_image_folders

CLIPPED = "reach beyond their image and were clipped"
MANY = 0.1
"""Share of lost or clipped boxes from which on something is probably wrong with all of them."""


@dataclass(frozen=True)
class AnnotatedImage:
    """One annotated image. Boxes are in pixels of the image as packed, that is after `packing.scale`."""

    name: str  # `file_name` in the annotations, after the folder of a set that has its annotations in it
    path: Path | None  # None: listed, but the file is missing
    searched: tuple[Path, ...]  # folders in which it was searched
    file: str  # name of the annotation file
    image_id: Id
    set: str
    raw_px: tuple[int, int]  # width, height of the file
    size_px: tuple[int, int]  # width, height as packed
    boxes: np.ndarray  # (n, 4) float64 x1, y1, x2, y2
    labels: np.ndarray  # (n,) int64 in 0..K-1
    areas: np.ndarray  # (n,) float64 px^2, from the annotation's `area` if it has one
    crowd: np.ndarray  # (n,) bool: iscrowd or ignore is set: not trained on, and ignored in evaluation


@dataclass(frozen=True)
class Collection:
    """All annotated images of a raw folder."""

    images: list[AnnotatedImage]
    categories: list[str]  # name of each label
    category_ids: list[Id]  # id of each label in the annotations
    lost: str  # why boxes may be lost, for the error if none is left to train on


@dataclass(frozen=True)
class SetSummary:
    """Counts of one set."""

    name: str
    images: int
    boxes: int
    most: int  # boxes in one image
    files: list[str]  # annotation files

    def __str__(self) -> str:
        """Return one line for people."""
        images, boxes = "image" + "s" * (self.images != 1), "box" + "es" * (self.boxes != 1)
        counts = f"{self.images} {images}, {self.boxes} {boxes}, at most {self.most} in an image"
        return f"{self.name}: {counts} (from {', '.join(self.files)})"


def read_collection(raw: Path, rules: PackingSettings, *, trains: bool = True) -> Collection:
    """Read every annotation file of a raw folder; an unchanged folder is read once per process.

    The name of an annotation file names the set of its images (`layout.py`). Those of a file that names no single set
    are divided by a hash among the sets that no file names; a sequence is never divided.

    Args:
        trains: whether images to train on are needed.

    Raises:
        UserError: there are no annotations, or one is wrong; the message names the file and the entry.
    """
    paired = folders.find_folders(raw) if raw.is_dir() else []
    files, left_out = (paired, []) if paired else find_annotation_files(raw)
    stats = [(path, path.stat()) for file in files for path in file.parts]
    for path, _ in stats:
        note_read(path)  # also if it was read before
    stamp = tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    collection = _read_cached(raw, tuple(files), stamp, tuple(left_out), astuple(rules))
    if trains and not any(image.set == "train" for image in collection.images):
        divided = any(file.set in ("", BOTH) for file in files)
        file = f"{files[0].path.parent}/train.json"
        way_out = (
            "Lower packing.val_share" if divided else f"Add a set train, such as {raw / 'train' if paired else file}"
        )
        raise UserError(f"{raw}: none of the {len(collection.images)} images is left to train on. {way_out}.")
    return collection


@lru_cache(maxsize=2)
def _read_cached(
    raw: Path,
    files: tuple[AnnotationFile, ...],
    stamp: tuple[tuple[Path, int, int], ...],  # another one: the files have changed
    left_out: tuple[Path, ...],
    options: tuple[Any, ...],
) -> Collection:
    rules = PackingSettings(*options)
    if left_out:
        logger.info(
            "boxes are read from {}; not read, because they annotate the same images: {}",
            ", ".join(file.name for file in files),
            ", ".join(path.name for path in left_out),
        )
    contents = [(file, _read_file(file)) for file in files]
    names = _join_categories(contents)
    ids = sorted(names)
    label_of = {category: label for label, category in enumerate(ids)}
    counts: Counter[str] = Counter()
    images: list[AnnotatedImage] = []
    listed_in: dict[str, Path] = {}
    rules = _divide_among_unnamed_sets(rules, files)
    for file, content in contents:
        for image in _read_images(raw, file, content, label_of, rules, counts):
            if image.name in listed_in:
                raise _describe_duplicate(file.path, image.name, listed_in[image.name])
            listed_in[image.name] = file.path
            images.append(image)
    boxes = [entry.bbox for _, content in contents for entry in content.annotations]
    for what, count in counts.items():
        is_many = count >= MANY * len(boxes)
        log = logger.warning if is_many or what != CLIPPED else logger.info
        log("{} of {} boxes {}.{}", count, len(boxes), what, explain_lost_boxes(boxes) if is_many else "")
    lost = "; ".join(f"{count} of {len(boxes)} {what}" for what, count in counts.items() if what != CLIPPED)
    return Collection(images, [names[i] for i in ids], ids, f"{lost}.{explain_lost_boxes(boxes)}" if lost else "")


def _read_file(file: AnnotationFile) -> Annotations:
    if file.folder is not None:
        return folders.read_folder(file.folder)
    return (visdrone.read_annotations if file.path.is_dir() else read_annotations)(file.path)


def _divide_among_unnamed_sets(rules: PackingSettings, files: Sequence[AnnotationFile]) -> PackingSettings:
    """Return the rules for images of files that name no single set: an official val or test set gets no others."""
    named = {file.set for file in files}
    rules = replace(
        rules,
        val_share=0.0 if "val" in named else rules.val_share,
        test_share=0.0 if "test" in named else rules.test_share,
    )
    for file in files:
        if file.set in ("", BOTH):
            logger.info(
                "{} names no single set: its images are divided, {:.0%} to val, {:.0%} to test, the rest to train "
                "(packing.val_share, test_share, seed)",
                file.name,
                rules.val_share,
                rules.test_share,
            )
    return rules


def _describe_duplicate(path: Path, name: str, other: Path) -> UserError:
    if path == other:
        return UserError(f"{path}: the image '{name}' is listed twice. List it once.")
    return UserError(
        f"{path}: the image '{name}' is listed twice, also in {other}, and a set that shares an image with another "
        "measures nothing. If the files are two versions of one set, or one contains the other, move one of them "
        f"elsewhere; if these are two images, put their folders into file_name, such as 'train/{Path(name).name}'."
    )


def _join_categories(contents: Sequence[tuple[AnnotationFile, Annotations]]) -> dict[Id, str]:
    """Return the name of each category id; all files must agree."""
    names: dict[Id, str] = {}
    ids: dict[str, Id] = {}
    for file, content in contents:
        for entry in content.categories:
            name, number = names.setdefault(entry.id, entry.name), ids.setdefault(entry.name, entry.id)
            if (name, number) != (entry.name, entry.id):
                known = f"{entry.id} '{name}'" if name != entry.name else f"{number} '{entry.name}'"
                raise UserError(
                    f"{file.path}: category {entry.id} is '{entry.name}', but in another file it is {known}. Give each "
                    "category the same id and the same name in all files."
                )
        check_category_ids(file.path, names)
    return names


def _read_images(
    raw: Path,
    file: AnnotationFile,
    content: Annotations,
    label_of: Mapping[Id, int],
    rules: PackingSettings,
    counts: Counter[str],
) -> Iterator[AnnotatedImage]:
    path, images, objects = file.path, content.images, content.group_objects()
    places = list_image_folders(raw, file)
    paths = {entry.file_name: find_image(raw, places, entry.file_name, where=str(path)) for entry in images}
    if paths and not any(paths.values()):
        raise _describe_missing_images(raw, file, list(paths), places)
    for entry in sorted(images, key=lambda image: image.file_name):
        rows = list(_read_objects(path, entry, objects[entry.id], rules, counts))
        table = np.array([row[:5] for row in rows], dtype=np.float64).reshape(-1, 5)
        sequence = entry.file_name if entry.sequence is None else str(entry.sequence)
        size_px = scale_size(entry.size_px, rules.scale)
        factor = np.array(size_px) / np.array(entry.size_px)
        yield AnnotatedImage(
            name=file.prefix + entry.file_name,
            path=paths[entry.file_name],
            searched=tuple(places),
            file=file.name,
            image_id=entry.id,
            set=file.set if file.set in SETS else _assign_set(sequence, rules),
            raw_px=entry.size_px,
            size_px=size_px,
            boxes=table[:, :4] * np.tile(factor, 2),
            labels=np.array([label_of[row[5]] for row in rows], dtype=np.int64),
            areas=table[:, 4] * factor.prod(),
            crowd=np.array([row[6] for row in rows], dtype=bool),
        )


def _describe_missing_images(raw: Path, file: AnnotationFile, names: list[str], folders: Sequence[Path]) -> UserError:
    named = f", or {raw / file.set}, a folder named after the set" if file.set else ""
    return UserError(
        f"{file.path}: none of the {len(names)} images that it lists is there, such as '{names[0]}'. Searched: "
        f"{', '.join(map(str, folders))}. Move the images to {raw / 'images'}{named}; or move this file elsewhere, "
        "to pack the other sets alone."
    )


def scale_size(size_px: tuple[int, int], scale: float) -> tuple[int, int]:
    """Return width and height of a scaled image; each at least 1."""
    return max(1, round(size_px[0] * scale)), max(1, round(size_px[1] * scale))


def _read_objects(
    path: Path,
    image: ImageEntry,
    entries: Iterable[tuple[str, ObjectEntry]],
    rules: PackingSettings,
    counts: Counter[str],
) -> Iterator[tuple[float, float, float, float, float, Id, bool]]:
    """Yield x1, y1, x2, y2, area, category and crowd of each object, clipped to its image."""
    width, height = image.size_px
    for name, entry in entries:
        x, y, w, h = entry.bbox
        outside = x >= width or y >= height or x + w <= 0 or y + h <= 0
        is_negative = w < 0 or h < 0
        if is_negative or (outside and min(w, h) > 0):
            if rules.outside == "skip":
                counts["were left out: outside their image, or of negative size"] += 1
                continue
            place = f"it is outside its image of {width} x {height} pixels"
            raise UserError(
                f"{path}: {name}, bbox [{x:g}, {y:g}, {w:g}, {h:g}]: "
                f"{'its width or height is negative' if is_negative else place}. Expected x, y, width, height "
                "in pixels. Fix it, or leave such boxes out: packing.outside=skip"
            )
        x1, y1, x2, y2 = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
        if min(x2 - x1, y2 - y1) * rules.scale < rules.side_min_px:
            counts[f"were left out: a side is below {rules.side_min_px:g} px"] += 1
            continue
        clipped = (x1, y1, x2, y2) != (x, y, x + w, y + h)
        if clipped:
            counts[CLIPPED] += 1
        area = (x2 - x1) * (y2 - y1) if clipped or entry.area is None else entry.area
        yield x1, y1, x2, y2, area, entry.category_id, entry.is_ignored


def _assign_set(sequence: str, rules: PackingSettings) -> str:
    """Return the set of a sequence, from a hash: an image added later moves no other."""
    digest = hashlib.sha256(f"{rules.seed} {sequence}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < rules.test_share:
        return "test"
    return "val" if share < rules.test_share + rules.val_share else "train"


def summarize_sets(collection: Collection) -> list[SetSummary]:
    """Count images and boxes of each set; crowds do not count."""
    summaries = []
    for name in SETS:
        images = [image for image in collection.images if image.set == name]
        counts = [int((~image.crowd).sum()) for image in images]
        if images:
            files = sorted({image.file for image in images})
            summaries.append(SetSummary(name, len(images), sum(counts), max(counts), files))
    return summaries
