"""Reading VisDrone as it is published."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases.tinydet import load_samples
from trainyard.errors import UserError

from .coco import read_collection
from .config import PackingSettings
from .evaluation import Detections, GroundTruth, evaluate

REGION, CAR, UNSCORED, OTHERS = "40,20,20,20,0,0,0,0", "4,5,10,8,1,4,0,1", "30,5,6,6,0,1,0,0", "1,30,5,5,1,11,0,0"


def write_set(raw: Path, name: str, texts: dict[str, str]) -> None:
    for folder in ("images", "annotations"):
        (raw / name / folder).mkdir(parents=True)
    for stem, text in texts.items():
        Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(raw / name / "images" / f"{stem}.jpg")
        (raw / name / "annotations" / f"{stem}.txt").write_text(text)


def write_visdrone(raw: Path) -> Path:
    first = {"000_1": f"{REGION}\n{CAR}\n{UNSCORED},\r\n{OTHERS}\n", "000_2": "", "000_3": CAR}
    write_set(raw, "VisDrone2019-DET-train", first)
    write_set(raw, "VisDrone2019-DET-val", {"000_1": CAR})
    return raw


def test_sets_are_read_as_published_and_what_is_ignored_absorbs_any_category(tmp_path: Path) -> None:
    found = read_collection(write_visdrone(tmp_path), PackingSettings(side_min_px=0))
    assert [(image.set, image.name, image.file) for image in found.images] == [
        *(("train", f"VisDrone2019-DET-train/000_{n}.jpg", "VisDrone2019-DET-train") for n in (1, 2, 3)),
        ("val", "VisDrone2019-DET-val/000_1.jpg", "VisDrone2019-DET-val"),
    ]
    assert found.categories[3] == "car" and len(found.categories) == 10
    image = found.images[0]
    assert image.path == tmp_path / "VisDrone2019-DET-train/images/000_1.jpg" and image.size_px == (60, 40)
    assert image.crowd.sum() == 10 + 1 + 10 and image.labels[~image.crowd].tolist() == [3]
    assert image.boxes[~image.crowd].tolist() == [[4, 5, 14, 13]]
    truth = GroundTruth(image.boxes, image.areas, image.labels, image.crowd)
    found_boxes = np.array([[4, 5, 14, 13], [42, 22, 50, 30], [45, 25, 55, 35]], dtype=float)
    detected = Detections(found_boxes, np.array([0.5, 0.9, 0.8]), np.array([3, 3, 7]))  # two of them in the region
    assert evaluate([truth], [detected], categories=found.categories, areas="coco")["ap"] == pytest.approx(1.0)
    samples = load_samples(tmp_path)
    assert [len(one["boxes"].values) for one in samples] == [1, 0, 1, 1]


def test_one_set_alone_is_divided_and_a_changed_text_is_read_again(tmp_path: Path) -> None:
    write_set(tmp_path, "VisDrone2019-DET-train", {"1": CAR})
    raw = tmp_path / "VisDrone2019-DET-train"
    assert len(read_collection(raw, PackingSettings()).images[0].boxes) == 1
    (raw / "annotations" / "1.txt").write_text(f"{CAR}\n20,5,10,8,1,4,0,1\n")
    assert len(read_collection(raw, PackingSettings()).images[0].boxes) == 2


@pytest.mark.parametrize(
    "line", ["1,2,3", "1,2,3,4,1,12,0,0", "1,2,3,4,1,-1,0,0", "x,2,3,4,1,4,0,0", "1;2;3;4;1;4;0;0"]
)
def test_a_line_of_another_format_is_refused_with_its_file_and_number(line: str, tmp_path: Path) -> None:
    write_set(tmp_path, "train", {"1": f"{CAR}\n{line}\n"})
    with pytest.raises(UserError, match=r"train/annotations/1.txt: line 2: '.*': expected x,y,width,height,"):
        read_collection(tmp_path, PackingSettings())


def test_a_text_without_an_image_and_a_broken_image_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, "train", {"1": CAR, "2": CAR})
    (tmp_path / "train/images/2.jpg").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"train/images/2.jpg: .*\. Download it again, or remove it and .*2.txt"):
        read_collection(tmp_path, PackingSettings())
    (tmp_path / "train/images/2.jpg").unlink()
    with pytest.raises(UserError, match=r"annotations/2.txt: there is no image '2' in .*train/images"):
        read_collection(tmp_path, PackingSettings())
