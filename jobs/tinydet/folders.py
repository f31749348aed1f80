"""Reads folders with an annotation file for each image: YOLO's, Pascal VOC's and LabelMe's.

An image and its annotations have the same name, next to each other or in folders such as images/train and labels/train.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from xml.etree import ElementTree

from loguru import logger
from msgspec import Meta, Struct
from PIL import Image

from trainyard.config.yaml_text import load_yaml
from trainyard.data.coco import Annotations, CategoryEntry, ImageEntry, ObjectEntry
from trainyard.data.raw import IMAGES, find_listed, list_files
from trainyard.errors import UserError
from trainyard.foreign import note_read, read_json, read_lines, read_text

from .layout import BOTH, SETS, AnnotationFile, PairedFolder, find_sets, list_set_folders
from .visdrone import list_texts

YOLO, VOC, LABELME = "YOLO", "Pascal VOC", "LabelMe"
SUFFIXES = {YOLO: ".txt", VOC: ".xml", LABELME: ".json"}
ROLES = {"images", "jpegimages", "labels", "annotations", "json", "xml", "imagesets", "main"}
"""Folders named after their contents; they do not tell which images belong together."""
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright

Box = tuple[str | int, list[float], bool]  # category, x, y, width, height in px, and whether it is ignored


class Shape(Struct):
    """A shape of LabelMe."""

    label: str
    points: list[Annotated[list[float], Meta(min_length=2, max_length=2)]]
    shape_type: str = "polygon"


class LabelMe(Struct, rename="camel"):
    """A file of LabelMe; https://github.com/wkentaro/labelme. Newer tools add fields."""

    shapes: list[Shape]
    image_width: float | None = None
    image_height: float | None = None


def read_upright_px(path: Path) -> tuple[int, int]:
    """Return width and height of an image as tools show it, from its header.

    Raises:
        UserError: it is not an image.
    """
    try:
        with Image.open(path) as header:
            upright = header.getexif().get(ORIENTATION, 1) < 5
            return header.size if upright else header.size[::-1]
    except Exception as error:  # Pillow's readers raise struct.error, IndexError and others for broken files
        raise UserError(f"{path}: not an image ({error}). Remove it, or download it again.") from None


def find_folders(raw: Path) -> list[AnnotationFile]:
    """Return the sets of a folder of YOLO, Pascal VOC or LabelMe, sorted; none if it is none of these.

    The sets are those of `data.yaml`, else of the lists train.txt, val.txt and so on in the folder itself or in
    ImageSets/Main, else of the folders' names. Images that YOLO's files do not label have no objects.

    Raises:
        UserError: a file that is named is missing, an image has several annotation files or the other way round, or
            some images are in folders of sets and others are not.
    """
    if not (kind := _find_kind(raw)):
        return []
    images, files = (_index(raw, list_files(raw, suffixes)) for suffixes in (IMAGES, {SUFFIXES[kind]}))
    classes, tables, sets = _read_description(raw, images) if kind == YOLO else ((), [], {})
    if not sets:
        lists = {
            path: path.stem
            for path in list_files(raw, {".txt"})
            if path.stem in (*SETS, BOTH) and (path.parent == raw or path.parent.name == "Main")
        }
        lists = {path: name for path, name in lists.items() if name != BOTH or "train" not in lists.values()}
        sets = {key: name for path, name in lists.items() for key in _read_list(path, raw, images)}
        tables += lists
    if not sets:
        places = {PurePosixPath(key).parent for key in files}
        keys = [key for key in images if PurePosixPath(key).parent in places] if kind == YOLO else files
        sets = {key: _find_set(PurePosixPath(key).parent.parts) for key in keys}
    loose = next((key for key, name in sets.items() if not name), "")
    if loose and any(sets.values()):
        raise UserError(
            f"{raw}: the image '{loose}' is in no folder of a set, and others are, so it could be for validation. Move "
            "it into the folder train, val or test, or elsewhere."
        )
    pairs: dict[str, list[tuple[Path, Path | None]]] = {}
    for key, name in sets.items():
        image, annotations = _take(images, key), _take(files, key)
        if annotations is None and kind != YOLO:
            raise UserError(f"{raw}: '{key}' is listed, and has no {kind} file. Add it, or remove it from the list.")
        if image is None:
            raise UserError(
                f"{annotations}: {kind} annotations, and there is no image '{PurePosixPath(key).name}' next to them or "
                "in a folder images. Add it, or remove this file."
            )
        pairs.setdefault(name, []).append((image, annotations))
    named = tables[0] if tables else raw
    return [
        AnnotationFile(named, name, folder=PairedFolder(kind, raw, tuple(sorted(members)), tuple(tables), classes))
        for name, members in sorted(pairs.items())
    ]


def read_folder(folder: PairedFolder) -> Annotations:
    """Read the annotations of a set.

    Raises:
        UserError: an annotation file is not as its format says; the message names it.
    """
    images: list[ImageEntry] = []
    objects: list[ObjectEntry] = []
    readers: dict[str, Callable[[Path, Path], tuple[tuple[int, int], Iterable[Box]]]] = {
        YOLO: lambda path, image: _read_yolo(path, image, folder.classes),
        VOC: _read_voc,
        LABELME: _read_labelme,
    }
    for number, (image, path) in enumerate(folder.pairs):
        size_px, boxes = readers[folder.kind](path, image) if path else (read_upright_px(image), ())
        images.append(ImageEntry(number, image.relative_to(folder.raw).as_posix(), *size_px))
        for place, (category, bbox, ignored) in enumerate(boxes, 1):
            objects.append(ObjectEntry(number, category, bbox, id=f"{path}, object {place}", ignore=ignored))
    if unlabelled := sum(path is None for _, path in folder.pairs):
        logger.info("{}: {} images without a file of labels have no objects", folder.raw, unlabelled)
    ids = {entry.category_id for entry in objects}
    names = enumerate(folder.classes) if folder.classes else ((key, key) for key in sorted(ids, key=str))
    return Annotations(images, objects, [CategoryEntry(number, name) for number, name in names])


def _find_kind(raw: Path) -> str:
    """Return which of these formats a folder has; "" if it has COCO's or VisDrone's files, or none."""
    near = [raw / "annotations", raw, *list_set_folders(raw)]
    tables = next((files for folder in near if (files := list_files(folder, {".json"}, depth=0))), [])
    if tables and _is_labelme(tables[0]):
        return LABELME
    if not tables or tables[0].parent != near[0]:  # COCO's annotations may be next to the same boxes as YOLO's
        if any(list_files(folder / "labels", {".txt"}) for folder in near[1:]) or _list_descriptions(raw):
            return YOLO
        if not tables and not any(list_texts(folder / "annotations") for folder in near[1:]):
            return _find_deep_kind(raw)
    return ""


def _find_deep_kind(raw: Path) -> str:
    if list_files(raw, {".xml"}):
        return VOC
    tables = list_files(raw, {".json"})
    if tables and _is_labelme(tables[0]):
        return LABELME
    return YOLO if _index(raw, list_files(raw, IMAGES)).keys() & _index(raw, list_files(raw, {".txt"})).keys() else ""


def _is_labelme(path: Path) -> bool:
    """Return whether a JSON file is LabelMe's, and not COCO's, from its first 64 KiB: some have gigabytes."""
    try:
        with path.open("rb") as file:
            return re.search(rb'"(shapes|imageData|imageHeight|imagePath)"\s*:', file.read(1 << 16)) is not None
    except OSError:  # the reader of the annotations reports it
        return False


def _index(raw: Path, paths: Iterable[Path]) -> dict[str, list[Path]]:
    index: dict[str, list[Path]] = {}
    for path in paths:
        index.setdefault(_make_key(path.relative_to(raw).with_suffix("").parts), []).append(path)
    return index


def _make_key(parts: Iterable[str]) -> str:
    """Return the key that an image and its annotations share: images/train/a and labels/train/a are train/a."""
    return "/".join(part for part in parts if part.lower() not in ROLES)


def _take(index: Mapping[str, Sequence[Path]], key: str) -> Path | None:
    paths = index.get(key, [])
    if len(paths) > 1:
        raise UserError(f"{paths[0]} and {paths[1]}: one of them belongs to '{key}'. Rename or remove the other.")
    return paths[0] if paths else None


def _find_set(folders: Sequence[str]) -> str:
    """Return the set that the names of folders say; "" if they say none, or several."""
    names = set(chain.from_iterable(map(find_sets, folders)))
    return names.pop() if len(names) == 1 else ""


def _read_list(path: Path, raw: Path, images: Mapping[str, Any], base: Path | None = None) -> Iterator[str]:
    """Yield the keys of the images that a list names, relative to it, to `raw`, or as on another machine."""
    folder = (base or path.parent).relative_to(raw).parts
    for line, text in read_lines(path):
        parts = [part for part in re.split(r"[\\/]", text.strip()) if part not in ("", ".", "..")]
        name = PurePosixPath(parts[-1] if parts else "")
        parts[-1:] = [name.stem if name.suffix.lower() in IMAGES else name.name]
        tails = [parts[start:] for start in range(len(parts))]
        keys = [_make_key(place) for tail in tails for place in ([*folder, *tail], tail)]
        if (key := next((key for key in keys if key in images), None)) is None:
            raise UserError(
                f"{path}, line {line}: there is no image '{text.strip()}' in {raw}. Add it, or remove the line."
            )
        yield key


def _list_descriptions(raw: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return YOLO's data.yaml, whatever it is called: what names classes."""
    descriptions = []
    for path in list_files(raw, {".yaml", ".yml"}, depth=0):
        content = load_yaml(path.read_bytes(), path, error=UserError, plain=True)
        if isinstance(content, dict) and isinstance(content.get("names"), list | dict):
            descriptions.append((path, content))
    return descriptions


def _read_description(
    raw: Path, images: Mapping[str, list[Path]]
) -> tuple[tuple[str, ...], list[Path], dict[str, str]]:
    """Return the names of YOLO's classes, the files that say them and the sets, and the set of each image.

    Raises:
        UserError: several files could be meant, or one names a folder or a list that is missing.
    """
    descriptions = _list_descriptions(raw)
    if len(descriptions) > 1:
        raise UserError(f"{descriptions[0][0]} and {descriptions[1][0]}: both name classes. Move one of them away.")
    if not descriptions:
        lists = [raw / "classes.txt", raw / "labels" / "classes.txt", *list_files(raw, {".names"}, depth=0)]
        table = next((path for path in lists if path.is_file()), None)
        return (tuple(text.strip() for _, text in read_lines(table)), [table], {}) if table else ((), [], {})
    [(path, content)] = descriptions
    note_read(path)
    names = content["names"]
    names = [names[number] for number in sorted(names)] if isinstance(names, dict) else names
    sets: dict[str, str] = {}
    tables = [path]
    for word in ("train", "val", "valid", "test"):
        stated = content.get(word) or []
        for place in stated if isinstance(stated, list) else [stated]:
            keys = _find_place(raw, str(content.get("path") or ""), str(place), images, tables)
            if keys is None and word != "test":  # test sets are often named, and not handed out
                raise UserError(f"{path}: {word}: there is no '{place}' in {raw}. Add it, or correct the line.")
            for key in keys or ():
                if sets.setdefault(key, word) != word:
                    raise UserError(
                        f"{path}: the image '{key}' is in {sets[key]} and in {word}, and a set that shares an image "
                        "with another measures nothing. Give each set its own folder or list."
                    )
    return (
        tuple(map(str, names)),
        tables,
        {key: "val" if name == "valid" else name for key, name in sets.items()},
    )


def _find_place(
    raw: Path, root: str, place: str, images: Mapping[str, list[Path]], tables: list[Path]
) -> list[str] | None:
    """Return the images of a folder or a list that `data.yaml` names; None if it is missing. Adds lists to `tables`."""
    if place.endswith(".txt"):
        listed = find_listed(raw, place, where="data.yaml", tails=True)
        if listed is None:
            return None
        tables.append(listed)
        return list(_read_list(listed, raw, images))
    parts = [part for part in re.split(r"[\\/]", f"{root}/{place}") if part not in ("", ".", "..")]
    tails = [raw.joinpath(*parts[start:]) for start in range(len(parts))] or [raw]
    folder = next((path for path in tails if path.is_dir()), None)
    if folder is None:
        return None
    return [key for key, paths in images.items() if any(path.is_relative_to(folder) for path in paths)]


def _read_yolo(path: Path, image: Path, classes: Sequence[str]) -> tuple[tuple[int, int], list[Box]]:
    """Read lines of a class and x and y of the centre, width, height, or a polygon: in shares of the image."""
    size_px, boxes = read_upright_px(image), list[Box]()
    for line, text in read_lines(path):
        try:
            number, *values = [float(word) for word in text.split()]
        except ValueError:
            values = []
        if not (len(values) == 4 or (len(values) > 5 and len(values) % 2 == 0)) or not all(
            -0.01 <= v <= 1.01 for v in values
        ):
            raise UserError(
                f"{path}, line {line}: '{text.strip()[:60]}': expected the number of a class, and x and y of the "
                "centre, width and height, or a polygon x y x y ..., in shares of the image 0 to 1, as in YOLO."
            )
        if not (number.is_integer() and 0 <= number < (len(classes) or 1e6)):
            raise UserError(
                f"{path}, line {line}: class {number:g}, expected 0 to {len(classes) - 1}, which are "
                f"{', '.join(classes)}. Correct it, or name the class in data.yaml."
            )
        if len(values) == 4:
            x, y, width, height = values
            corners = [x - width / 2, y - height / 2, width, height]
        else:
            corners = _bound(values[::2], values[1::2])
        boxes.append((int(number), [value * size_px[i % 2] for i, value in enumerate(corners)], False))
    return size_px, boxes


def _bound(x: Sequence[float], y: Sequence[float]) -> list[float]:
    return [min(x), min(y), max(x) - min(x), max(y) - min(y)]


def _read_voc(path: Path, image: Path) -> tuple[tuple[int, int], list[Box]]:
    """Read a file of Pascal VOC.

    VOC's own number pixels from 1, and include the last (devkit, section 5.1); those of other tools have edges from 0.
    """
    text = read_text(path)
    expected = "expected Pascal VOC annotations: objects, each with a name and a bndbox of xmin, ymin, xmax, ymax"
    try:
        if "<!DOCTYPE" in text:
            raise ValueError("it has a document type")
        root = ElementTree.fromstring(text)
        first = 1 if "VOC2" in root.findtext("source/database", "") else 0
        size = [int(float(root.findtext(f"size/{name}") or 0)) for name in ("width", "height")]
        boxes: list[Box] = []
        for element in root.findall("object"):
            x0, y0, x1, y1 = (
                float(element.findtext(f"bndbox/{name}") or "nan") for name in ("xmin", "ymin", "xmax", "ymax")
            )
            name = element.findtext("name", "").strip()
            if not name or not all(abs(value) < 1e9 for value in (x0, y0, x1, y1)):
                raise ValueError(f"object {len(boxes) + 1} has no name, or no number for a side")
            bbox = [x0 - first, y0 - first, x1 - x0 + first, y1 - y0 + first]
            boxes.append((name, bbox, element.findtext("difficult", "0").strip() == "1"))
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path}: {error}: {expected}.") from None
    return (size[0], size[1]) if all(size) else read_upright_px(image), boxes


def _read_labelme(path: Path, image: Path) -> tuple[tuple[int, int], list[Box]]:
    """Read a file of LabelMe: shapes become the boxes around them; points and lines have none, and are left out."""
    content = read_json(path, LabelMe, expected="LabelMe annotations: shapes, each with a label and points")
    boxes, left_out = list[Box](), Counter[str]()
    for shape in content.shapes:
        x, y = [point[0] for point in shape.points], [point[1] for point in shape.points]
        if shape.shape_type == "circle" and len(x) == 2:  # the centre, and a point on it
            radius = ((x[1] - x[0]) ** 2 + (y[1] - y[0]) ** 2) ** 0.5
            boxes.append((shape.label, [x[0] - radius, y[0] - radius, 2 * radius, 2 * radius], False))
        elif len(x) < 2 or shape.shape_type in ("point", "points", "line", "linestrip"):
            left_out[shape.shape_type] += 1
        else:
            boxes.append((shape.label, _bound(x, y), False))
    if left_out:
        logger.info(
            "{}: left out, as they have no box: {}", path, ", ".join(f"{n} {kind}" for kind, n in left_out.items())
        )
    if content.image_width and content.image_height:
        return (int(content.image_width), int(content.image_height)), boxes
    return read_upright_px(image), boxes
