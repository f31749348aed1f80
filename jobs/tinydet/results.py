"""Turns a table of predictions into the results file that COCO's evaluator and servers read."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainyard.data.coco import CategoryEntry, Id
from trainyard.errors import UserError
from trainyard.files import parse_json, write_atomically
from trainyard.foreign import read_json
from trainyard.tables import read_table
from trainyard.text import compose_letters, suggest_nearest


def write_results(table: Path, out: Path, annotations: Path) -> tuple[int, list[str]]:
    """Write `[{"image_id", "category_id", "bbox": [x, y, width, height], "score"}, ...]`.

    The format is https://cocodataset.org/#format-results, object detection with boxes; pixels of the image files.

    Args:
        table: of `trainyard predict`; its images are paths below the predicted folder.
        annotations: a COCO file whose `images` and `categories` have the ids.

    Returns:
        The number of detections, and the images of `annotations` that the table lacks.

    Raises:
        UserError: a file is missing or malformed, `out` exists, or an image or category of the table has no id.
    """
    if out.exists():
        raise UserError(f"{out}: exists already and is not overwritten. Choose another file, or delete it.")
    image_ids, category_ids = _read_ids(annotations)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for row in read_table(table, columns=("image_name", "detections")):
        name = compose_letters(row["image_name"])
        if name not in image_ids:
            raise UserError(
                f"{table}: the image '{name}' is not in {annotations}.{suggest_nearest(name, image_ids)} Predict the "
                "folder that its file_name entries start from."
            )
        seen.add(name)
        for label, score, x1, y1, x2, y2 in _read_detections(table, name, row["detections"]):
            if label not in category_ids:
                raise UserError(
                    f"{table}: the category '{label}' is not in {annotations}.{suggest_nearest(label, category_ids)} "
                    "Use the annotations of the data that the run was trained on."
                )
            box = [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)]
            rows.append({"image_id": image_ids[name], "category_id": category_ids[label], "bbox": box, "score": score})
    write_atomically(out, json.dumps(rows))
    return len(rows), [name for name in image_ids if name not in seen]


class _Image(Struct):
    id: Id
    file_name: str


class _Ids(Struct):
    images: list[_Image]
    categories: list[CategoryEntry]


def _read_ids(path: Path) -> tuple[dict[str, Id], dict[str, Id]]:
    """Return the id of each file name and of each category name."""
    expected = "COCO's `images` with id and file_name, and `categories` with id and name: --annotations FILE.json"
    content = read_json(path, _Ids, expected=expected)
    images = {compose_letters(entry.file_name): entry.id for entry in content.images}
    return images, {entry.name: entry.id for entry in content.categories}


def _read_detections(table: Path, name: str, text: str) -> list[tuple[str, float, float, float, float, float]]:
    try:
        return [_read_detection(*entry) for entry in parse_json(text.encode())]
    except (TypeError, ValueError):
        raise UserError(
            f"{table}: the detections of '{name}' are not [[category, score, x1, y1, x2, y2], ...]. Write the table "
            "again: trainyard predict RUN RAW OUT.csv"
        ) from None


def _read_detection(
    label: object, score: float, x1: float, y1: float, x2: float, y2: float
) -> tuple[str, float, float, float, float, float]:
    return str(label), float(score), float(x1), float(y1), float(x2), float(y2)
