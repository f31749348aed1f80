"""Reads annotation files in COCO's format, and checks every value that a model will see.

The format: https://cocodataset.org/#format-data. Ids may be whole numbers or texts, as in pycocotools.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from trainyard.errors import UserError
from trainyard.foreign import read_json
from trainyard.text import join_names

EXPECTED = (
    "COCO annotations: images with id, file_name, width and height; annotations with image_id, category_id and bbox "
    "[x, y, width, height] in pixels; categories with id and name"
)
Id = int | str
Flag = Literal[0, 1] | bool | None


class ImageEntry(Struct):
    """An entry of `images`."""

    id: Id
    file_name: str
    width: Annotated[float, Meta(ge=1)]
    height: Annotated[float, Meta(ge=1)]
    sequence: Id | None = None  # not COCO's: images that belong together

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return int(self.width), int(self.height)


class ObjectEntry(Struct):
    """An entry of `annotations`."""

    image_id: Id
    category_id: Id
    bbox: Annotated[list[float], Meta(min_length=4, max_length=4)]  # x, y, width, height, px
    id: Id | None = None  # unique
    area: float | None = None  # px^2; None: that of the box
    iscrowd: Flag = 0
    ignore: Flag = 0  # TinyPerson, CrowdHuman, SODA: not to be found, and no fault if it is

    @property
    def is_ignored(self) -> bool:
        """Return whether it is neither trained on nor scored."""
        return bool(self.iscrowd or self.ignore)


class CategoryEntry(Struct):
    """An entry of `categories`."""

    id: Id
    name: Any  # a text or a whole number, as which digits are named; a text, once read

    def __post_init__(self) -> None:
        """Check the name."""
        if not isinstance(self.name, int | str) or isinstance(self.name, bool):
            raise ValueError(f"name: expected a text, found {self.name!r}")
        self.name = str(self.name)


class Annotations(Struct):
    """An annotation file."""

    images: list[ImageEntry]
    annotations: list[ObjectEntry]
    categories: list[CategoryEntry]

    def group_objects(self) -> dict[Id, list[tuple[str, ObjectEntry]]]:
        """Return the objects of each image, each with its name for errors."""
        objects: dict[Id, list[tuple[str, ObjectEntry]]] = {image.id: [] for image in self.images}
        for number, entry in enumerate(self.annotations):
            objects[entry.image_id].append((_name_object(number, entry), entry))
        return objects


def read_annotations(path: Path) -> Annotations:
    """Read and check an annotation file.

    Raises:
        UserError: a value has another type or range than the format says, an id is used twice, an entry refers to
            nothing, or two categories have one name; the message names the file and the entry.
    """
    content = read_json(path, Annotations, expected=EXPECTED)
    _check_unique(path, "image", (image.id for image in content.images))
    _check_unique(path, "annotation", (entry.id for entry in content.annotations if entry.id is not None))
    _check_unique(path, "category", (category.id for category in content.categories))
    images, categories = {image.id for image in content.images}, {kind.id: kind.name for kind in content.categories}
    check_category_ids(path, categories)
    for name, count in Counter(categories.values()).items():
        if count > 1:
            ids = ", ".join(repr(number) for number, category in categories.items() if category == name)
            raise UserError(
                f"{path}: the categories {ids} are all called '{name}', so their objects would train as {count} "
                "classes and be scored as one. Give them one id, or different names."
            )
    for number, entry in enumerate(content.annotations):
        where = f"{path}: {_name_object(number, entry)}"
        if entry.image_id not in images:
            raise UserError(
                f"{where} refers to image {entry.image_id!r}, which is not listed. Add the image, or remove the "
                "annotation."
            )
        if entry.category_id not in categories:
            known = join_names([f"{kind!r} {name}" for kind, name in sorted(categories.items())])
            raise UserError(
                f"{where} has category {entry.category_id!r}, which is unknown. Known: {known}. Add it to the "
                "categories, or remove the annotation."
            )
        if not all(map(math.isfinite, [*entry.bbox, entry.area or 0])):
            raise UserError(f"{where}: bbox {entry.bbox} or area {entry.area} is not finite. Expected pixels.")
    return content


def check_category_ids(path: Path, ids: Iterable[Id]) -> None:
    """Refuse category ids of which some are numbers and some are texts: they have no common order."""
    by_type = {type(key): key for key in ids}
    if len(by_type) > 1:
        raise UserError(
            f"{path}: the category ids {' and '.join(map(repr, by_type.values()))} are a number and a text. Write all "
            "as numbers, or all as texts."
        )


def _name_object(number: int, entry: ObjectEntry) -> str:
    return f"annotations[{number}]" if entry.id is None else f"annotation {entry.id}"


def _check_unique(path: Path, what: str, ids: Iterable[Id]) -> None:
    repeated = [str(number) for number, count in Counter(ids).items() if count > 1]
    if repeated:
        raise UserError(
            f"{path}: {what} id {join_names(repeated, most=5)} is used more than once. An id must name one {what}: "
            "renumber them."
        )


def explain_lost_boxes(boxes: Collection[Iterable[float]]) -> str:
    """Return a sentence with the likely meaning of boxes that do not fit; "" if it is unclear."""
    rows = [tuple(box) for box in boxes]
    if rows and all(0 <= value <= 1 for box in rows for value in box):
        return " All numbers are in 0..1, so they are shares of the image, as in YOLO: multiply them by its size."
    if rows and all(box[2] > box[0] and box[3] > box[1] for box in rows):
        return (
            " Each third number exceeds the first and each fourth the second, so they may be corners [x1, y1, x2, y2]: "
            "subtract the first two from the last two."
        )
    return ""
