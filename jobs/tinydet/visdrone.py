"""Reads the annotations that VisDrone publishes: a text for each image, a line for each object.

The format: Zhu et al., "Detection and Tracking Meet Drones Challenge" (2021, arXiv:2001.06303), and the README of its
toolkit: x, y, width, height, score, category, truncation, occlusion. A score of 0 means that the toolkit ignores it.
"""

from collections.abc import Iterator
from pathlib import Path

from trainyard.data.coco import Annotations, CategoryEntry, ImageEntry, ObjectEntry
from trainyard.data.headers import BadRecord, read_image_shape
from trainyard.data.raw import IMAGES, list_files
from trainyard.errors import UserError
from trainyard.foreign import read_lines

NAMES = (
    *("pedestrian", "people", "bicycle", "car", "van", "truck", "tricycle", "awning-tricycle", "bus"),
    "motor",
)
"""Of the categories 1 to 10."""
REGION, OTHERS = 0, 11
"""A region whose objects nobody marked, and an object of none of the categories: ignored, whatever their score."""
EXPECTED = "x,y,width,height,score,category,truncation,occlusion in whole numbers, the category 0 to 11"


def list_texts(folder: Path) -> list[Path]:
    """List the annotation files of a folder `annotations`."""
    return list_files(folder, {".txt"}, depth=0)


def read_annotations(folder: Path) -> Annotations:
    """Read the folder `annotations` of a set, whose images are in the folder `images` next to it.

    An ignored region becomes an ignored box of each category, so it absorbs detections of any.

    Raises:
        UserError: a line is not as the format says, or a text has no image that can be read; the message names it.
    """
    images: list[ImageEntry] = []
    objects: list[ObjectEntry] = []
    by_stem = {path.stem: path for path in list_files(folder.parent / "images", IMAGES, depth=0)}
    for number, path in enumerate(list_texts(folder), 1):
        if path.stem not in by_stem:
            raise UserError(
                f"{path}: there is no image '{path.stem}' in {folder.parent / 'images'}. Add it, or remove this file."
            )
        image = by_stem[path.stem]
        try:
            height, width, _ = read_image_shape(image.read_bytes())
        except BadRecord as error:
            raise UserError(f"{image}: {error}. Download it again, or remove it and {path}.") from None
        images.append(ImageEntry(number, image.name, width, height))
        objects += _read_objects(path, number)
    return Annotations(images, objects, [CategoryEntry(number, name) for number, name in enumerate(NAMES, 1)])


def _read_objects(path: Path, image: int) -> Iterator[ObjectEntry]:
    for line, text in read_lines(path):
        try:
            values = [int(word) for word in text.strip().rstrip(",").split(",")]
        except ValueError:
            values = []
        if len(values) != 8 or not REGION <= values[5] <= OTHERS:
            raise UserError(f"{path}: line {line}: '{text.strip()[:60]}': expected {EXPECTED}.")
        *box, score, category, _, _ = values
        is_ignored = score == 0 or category in (REGION, OTHERS)
        numbers = range(1, len(NAMES) + 1) if category in (REGION, OTHERS) else [category]
        for label in numbers:
            yield ObjectEntry(image, label, [float(value) for value in box], ignore=is_ignored)
