"""Folders of YOLO, LabelMe and Pascal VOC are read as they are: the same boxes, sets and AP as of COCO's file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loguru import logger
from PIL import Image

from tests.cases.tinydet import load_samples, write_rectangles
from trainyard.errors import UserError

from .coco import Collection, read_collection
from .config import Config, PackingSettings
from .evaluation import Detections, GroundTruth, evaluate
from .pack import log_reading

Listed = dict[str, list[tuple[str, list[float]]]]
"""Names and x, y, width, height of the objects of each image."""
SIZE = (120, 90)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def paint(path: Path, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 90, 90)).save(path)


def list_objects(coco: Path) -> Listed:
    content = json.loads((coco / "instances_train.json").read_text())
    names = {one["id"]: one["name"] for one in content["categories"]}
    listed: Listed = {one["file_name"]: [] for one in content["images"]}
    by_id = {one["id"]: one["file_name"] for one in content["images"]}
    for one in content["annotations"]:
        listed[by_id[one["image_id"]]].append((names[one["category_id"]], one["bbox"]))
    return listed


def format_yolo(objects: list[tuple[str, list[float]]]) -> str:
    lines = []
    for name, (x, y, w, h) in objects:
        shares = [(x + w / 2) / SIZE[0], (y + h / 2) / SIZE[1], w / SIZE[0], h / SIZE[1]]
        lines.append(f"{('green', 'red').index(name)} " + " ".join(f"{share:.6f}" for share in shares))
    return "\n".join(lines)


def format_voc(objects: list[tuple[str, list[float]]], *, database: str = "Unknown") -> str:
    first = 1 if "VOC" in database else 0
    entries = "".join(
        f"<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>{x + first}</xmin><ymin>{y + first}</ymin>"
        f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
        for name, (x, y, w, h) in objects
    )
    size = f"<size><width>{SIZE[0]}</width><height>{SIZE[1]}</height><depth>3</depth></size>"
    return f"<annotation><source><database>{database}</database></source>{size}{entries}</annotation>"


def format_labelme(objects: list[tuple[str, list[float]]], name: str) -> str:
    def list_points(x: float, y: float, w: float, h: float) -> list[list[float]]:
        return [[x, y], [x + w, y + h]] if name == "red" else [[x, y], [x + w, y], [x + w, y + h], [x, y + h]]

    shapes: list[dict[str, Any]] = [
        {"label": name, "points": list_points(*box), "shape_type": "rectangle" if name == "red" else "polygon"}
        for name, box in objects
    ]
    content: dict[str, Any] = {
        "version": "5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": f"../images/{name}.png",
        "imageData": None,
    }
    return json.dumps({**content, "imageHeight": SIZE[1], "imageWidth": SIZE[0]})


def write_yolo(raw: Path, listed: Listed) -> None:
    for number, (name, objects) in enumerate(listed.items()):
        part = "val" if number % 4 == 3 else "train"
        paint(raw / "images" / part / name)
        write(raw / "labels" / part / f"{Path(name).stem}.txt", format_yolo(objects))
    write(raw / "data.yaml", "path: ../sets/mine\ntrain: images/train\nval: images/val\nnames: {0: green, 1: red}\n")


def write_roboflow_yolo(raw: Path, listed: Listed) -> None:
    for number, (name, objects) in enumerate(listed.items()):
        part = "valid" if number % 4 == 3 else "train"
        paint(raw / part / "images" / name)
        write(raw / part / "labels" / f"{Path(name).stem}.txt", format_yolo(objects))
    write(
        raw / "data.yaml",
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 2\nnames: ['green', 'red']\n",
    )


def write_yolo_lists(raw: Path, listed: Listed) -> None:
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for number, (name, objects) in enumerate(listed.items()):
        paint(raw / "images" / name)
        write(raw / "labels" / f"{Path(name).stem}.txt", format_yolo(objects))
        parts["val" if number % 4 == 3 else "train"].append(
            f"./images/{name}" if number % 2 else f"/home/me/images/{name}"
        )
    for part, lines in parts.items():
        write(raw / f"{part}.txt", "\n".join(lines))
    write(raw / "data.yaml", "train: train.txt\nval: val.txt\nnames: [green, red]\n")


def write_flat_yolo(raw: Path, listed: Listed) -> None:
    write_yolo_lists(raw, listed)
    for path in [*(raw / "images").iterdir(), *(raw / "labels").iterdir()]:
        path.rename(raw / path.name)
    (raw / "images").rmdir()
    (raw / "labels").rmdir()
    (raw / "data.yaml").unlink()
    write(raw / "classes.txt", "green\nred\n")


def write_voc(raw: Path, listed: Listed) -> None:
    parts: dict[str, list[str]] = {"train": [], "val": [], "trainval": []}
    for number, (name, objects) in enumerate(listed.items()):
        paint(raw / "VOC2007" / "JPEGImages" / name)
        stem = Path(name).stem
        write(raw / f"VOC2007/Annotations/{stem}.xml", format_voc(objects, database="The VOC2007 Database"))
        for part in ("val" if number % 4 == 3 else "train", "trainval"):
            parts[part].append(stem)
    for part, stems in parts.items():
        write(raw / "VOC2007/ImageSets/Main" / f"{part}.txt", "\n".join(stems))
        write(raw / "VOC2007/ImageSets/Main" / f"red_{part}.txt", "\n".join(f"{stem} -1" for stem in stems))


def write_roboflow_voc(raw: Path, listed: Listed) -> None:
    for number, (name, objects) in enumerate(listed.items()):
        folder = raw / ("valid" if number % 4 == 3 else "train")
        paint(folder / name)
        write(folder / f"{Path(name).stem}.xml", format_voc(objects))


def write_labelme(raw: Path, listed: Listed) -> None:
    for number, (name, objects) in enumerate(listed.items()):
        folder = raw / ("val" if number % 4 == 3 else "train")
        paint(folder / name)
        write(folder / f"{Path(name).stem}.json", format_labelme(objects, Path(name).stem))


WRITERS: dict[str, tuple[str, Callable[[Path, Listed], None]]] = {
    "YOLO with data.yaml": ("YOLO", write_yolo),
    "YOLO of Roboflow": ("YOLO", write_roboflow_yolo),
    "YOLO with lists": ("YOLO", write_yolo_lists),
    "YOLO with files next to images": ("YOLO", write_flat_yolo),
    "Pascal VOC": ("Pascal VOC", write_voc),
    "Pascal VOC of Roboflow": ("Pascal VOC", write_roboflow_voc),
    "LabelMe": ("LabelMe", write_labelme),
}


def score(found: Collection, truth: Collection) -> dict[str, float]:
    """Score shifted boxes of `truth` against the objects of `found`, in the order of the images' names."""
    rng = np.random.default_rng(0)
    order = {Path(image.name).name: image for image in found.images}
    truths, detections = [], []
    for image in truth.images:
        mine = order[image.name]
        truths.append(GroundTruth(mine.boxes, mine.areas, mine.labels, mine.crowd))
        shifted = image.boxes + rng.normal(0, 1.5, image.boxes.shape)
        names = [found.categories.index(truth.categories[label]) for label in image.labels]
        detections.append(Detections(shifted, rng.uniform(size=len(shifted)), np.array(names)))
    return evaluate(truths, detections, categories=found.categories, areas="aitod")


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same boxes as the other folders have; no test may modify it."""
    return write_rectangles(tmp_path_factory.mktemp("coco") / "raw")


@pytest.mark.parametrize("case", WRITERS)
def test_boxes_sets_and_ap_are_those_of_the_same_boxes_as_coco(case: str, coco: Path, tmp_path: Path) -> None:
    kind, writer = WRITERS[case]
    listed, truth = list_objects(coco), read_collection(coco, PackingSettings(val_share=0))
    writer(tmp_path / "raw", listed)
    found = read_collection(tmp_path / "raw", PackingSettings(val_share=0))
    assert sorted(found.categories) == sorted(truth.categories) and len(found.images) == 12
    assert {Path(image.name).name: image.set for image in found.images} == {
        name: "val" if number % 4 == 3 else "train" for number, name in enumerate(listed)
    }
    for image in found.images:
        assert image.path == tmp_path / "raw" / image.name and image.size_px == SIZE
        names = [found.categories[label] for label in image.labels]
        assert names == [name for name, _ in listed[Path(image.name).name]]
        boxes = np.array([[x, y, x + w, y + h] for _, (x, y, w, h) in listed[Path(image.name).name]], dtype=float)
        np.testing.assert_allclose(image.boxes, boxes, atol=1e-4)  # YOLO has six digits of a share of 120 px
    expected, got = score(truth, truth), score(found, truth)
    assert 0.1 < expected["ap"] < 0.99 and got["ap"] == expected["ap"]
    assert {name: got[name] for name in expected} == pytest.approx(
        expected, abs=1e-6
    )  # oLRP is an IoU, with its digits
    assert found.images[0].file == f"the {kind} folder"
    assert len(load_samples(tmp_path / "raw")) == 12


@pytest.mark.parametrize("case", WRITERS)
def test_five_images_are_printed_as_they_are_read(case: str, coco: Path, tmp_path: Path) -> None:
    kind, writer = WRITERS[case]
    writer(tmp_path, list_objects(coco))
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    log_reading(tmp_path, Config())
    logger.remove(sink)
    assert f"12 images, as the {kind} folder says. For example:" in "".join(lines)
    assert len([line for line in lines if re.search(r" (red|green) at \d", line)]) == 5


def test_images_without_labels_have_no_objects_in_yolo_and_polygons_become_boxes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        paint(tmp_path / "images" / f"{name}.jpg")
    write(tmp_path / "labels/a.txt", "3 0.1 0.2 0.3 0.2 0.3 0.6\n")
    write(tmp_path / "notes.json", '{"categories": []}')  # as Label Studio adds
    found = read_collection(tmp_path, PackingSettings(val_share=0))
    assert [len(image.boxes) for image in found.images] == [1, 0] and found.categories == ["3"]
    np.testing.assert_allclose(found.images[0].boxes, [[12, 18, 36, 54]])


def test_a_difficult_object_of_voc_is_ignored_and_a_circle_of_labelme_is_its_box(tmp_path: Path) -> None:
    paint(tmp_path / "voc/a.png")
    write(tmp_path / "voc/a.xml", format_voc([("red", [4, 5, 10, 8])]).replace("<difficult>0", "<difficult>1"))
    assert read_collection(tmp_path / "voc", PackingSettings(val_share=0)).images[0].crowd.tolist() == [True]
    paint(tmp_path / "circles/a.png")
    shapes = [
        {"label": "red", "points": [[20, 30], [26, 38]], "shape_type": "circle"},
        {"label": "red", "points": [[20, 30]], "shape_type": "point"},
    ]
    write(tmp_path / "circles/a.json", json.dumps({"shapes": shapes, "imagePath": "a.png"}))
    (image,) = read_collection(tmp_path / "circles", PackingSettings(val_share=0)).images
    assert image.boxes.tolist() == [[10, 20, 30, 40]]


def fail(raw: Path) -> str:
    with pytest.raises(UserError) as error:
        read_collection(raw, PackingSettings())
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 0.5 0.5 0.1", r"expected the number of a class, and x and y of the centre"),
        ("0 60 45 10 10", r"in shares of the image 0 to 1"),
        ("red 0.5 0.5 0.1 0.1", r"expected the number of a class"),
        ("2 0.5 0.5 0.1 0.1", r"class 2, expected 0 to 1, which are green, red"),
    ],
)
def test_a_wrong_line_of_yolo_is_named_with_its_number(line: str, said: str, coco: Path, tmp_path: Path) -> None:
    write_yolo(tmp_path, list_objects(coco))
    path = tmp_path / "labels/train/00.txt"
    write(path, f"0 0.5 0.5 0.1 0.1\n{line}\n")
    assert fail(tmp_path).startswith(f"{path}, line 2: ") and said in fail(tmp_path)


def test_what_is_named_and_missing_and_what_is_in_two_sets_is_refused(coco: Path, tmp_path: Path) -> None:
    listed = list_objects(coco)
    write_yolo(tmp_path / "yolo", listed)
    yaml = tmp_path / "yolo/data.yaml"
    write(yaml, yaml.read_text().replace("val: images/val", "val: images/train"))
    assert "is in train and in val" in fail(tmp_path / "yolo")
    write(yaml, yaml.read_text().replace("val: images/train", "val: images/gone"))
    assert fail(tmp_path / "yolo").startswith(f"{yaml}: val: there is no 'images/gone' in {tmp_path}/yolo.")
    write_yolo_lists(tmp_path / "lists", listed)
    (tmp_path / "lists/images/00.png").unlink()
    assert fail(tmp_path / "lists").startswith(f"{tmp_path}/lists/train.txt, line 1: there is no image ")
    write_labelme(tmp_path / "labelme", listed)
    (tmp_path / "labelme/train/00.png").unlink()
    assert fail(tmp_path / "labelme").startswith(
        f"{tmp_path}/labelme/train/00.json: LabelMe annotations, and there is no image '00' next to them"
    )
    write_voc(tmp_path / "voc", listed)
    write(tmp_path / "voc/VOC2007/Annotations/00.xml", "<annotation><object><name>red</name></object></annotation>")
    assert "00.xml: object 1 has no name, or no number for a side: expected Pascal VOC" in fail(tmp_path / "voc")
    (tmp_path / "voc/VOC2007/Annotations/00.xml").unlink()
    assert fail(tmp_path / "voc") == (
        f"{tmp_path}/voc: 'VOC2007/00' is listed, and has no Pascal VOC file. Add it, or remove it from the list."
    )


def test_an_image_outside_of_the_folders_of_sets_is_not_divided(coco: Path, tmp_path: Path) -> None:
    write_roboflow_voc(tmp_path, list_objects(coco))
    paint(tmp_path / "loose.png")
    write(tmp_path / "loose.xml", format_voc([]))
    assert "the image 'loose' is in no folder of a set, and others are" in fail(tmp_path)
