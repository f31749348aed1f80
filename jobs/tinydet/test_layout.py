"""Public folder layouts: which file names which set, where images lie, and what is refused."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from loguru import logger
from PIL import Image

from tests.cases.tinydet import list_image, make_config
from trainyard.data.prepare import pack_raw
from trainyard.data.shards import BadRecord, ShardSet
from trainyard.errors import UserError
from trainyard.train.module import DataInfo

from .coco import Collection, read_collection, summarize_sets
from .config import Config, PackingSettings
from .layout import find_sets
from .module import build
from .pack import samples

JOBS = Path(__file__).resolve().parents[1]


def write_annotations(path: Path, images: list[str], *, folder: str = "") -> None:
    """Write annotations of some images with an object each, and the images into a folder, if one is given."""
    content = {
        "images": [list_image(number, name) for number, name in enumerate(images)],
        "annotations": [{"id": n, "image_id": n, "category_id": 7, "bbox": [4, 5, 10, 8]} for n in range(len(images))],
        "categories": [{"id": 7, "name": "ball"}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    for name in images if folder else []:
        image = path.parent.parent / folder / name
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40), (90, 90, 90)).save(image)


def make_packing_config() -> Config:
    config = make_config()
    config.family = "tinydet"
    return config


def get_sets(collection: Collection) -> dict[str, set[str]]:
    names = {image.set for image in collection.images}
    return {name: {image.name for image in collection.images if image.set == name} for name in names}


@contextmanager
def collect_log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    try:
        yield lines
    finally:
        logger.remove(sink)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("instances_train2017", "train"),
        ("instances_val2017", "val"),
        ("instances_minitrain2017", "train"),
        ("instances_valminusminival2014", "val"),
        ("image_info_test-dev2017", "test"),
        ("aitod_trainval_v1", "trainval"),
        ("aitod_trainval_v1_1.0", "trainval"),
        ("aitodv2_test", "test"),
        ("aitod_val_v1", "val"),
        ("tiny_set_train_sw640_sh512_all", "train"),
        ("tiny_set_test_with_dense", "test"),
        ("VisDrone2019-DET_train_coco", "train"),
        ("VisDrone2019-DET-test-challenge", "test"),
        ("testdev2019", "test"),
        ("annotations_VisDroneVal", "val"),
        ("TRAIN", "train"),
        ("train_val2014", "trainval"),
        ("validation", "val"),
        ("latest_trained_values", ""),
        ("flight3", ""),
    ],
)
def test_public_names_name_their_sets(name: str, found: str) -> None:
    assert "".join(find_sets(name)) == found


def test_coco_is_read_as_published(tmp_path: Path) -> None:
    for year, images in (("train2017", ["1.png", "2.png"]), ("val2017", ["3.png"])):
        write_annotations(tmp_path / f"annotations/instances_{year}.json", images, folder=year)
        write_annotations(tmp_path / f"annotations/person_keypoints_{year}.json", images)
        (tmp_path / f"annotations/captions_{year}.json").write_text('{"images": [], "annotations": []}')
    (tmp_path / "annotations/image_info_test-dev2017.json").write_text('{"images": [], "categories": []}')
    with collect_log() as lines:
        found = read_collection(tmp_path, PackingSettings())
        read_collection(tmp_path, PackingSettings())
    assert get_sets(found) == {"train": {"1.png", "2.png"}, "val": {"3.png"}}
    assert [image.path for image in found.images] == [
        tmp_path / "train2017/1.png",
        tmp_path / "train2017/2.png",
        tmp_path / "val2017/3.png",
    ]
    (line,) = lines
    assert line.strip() == (
        "boxes are read from instances_train2017.json, instances_val2017.json; not read, because they annotate the "
        "same images: captions_train2017.json, captions_val2017.json, image_info_test-dev2017.json, "
        "person_keypoints_train2017.json, person_keypoints_val2017.json"
    )


def test_keypoints_alone_are_boxes_of_persons(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/person_keypoints_train2017.json", ["1.png"], folder="images")
    assert get_sets(read_collection(tmp_path, PackingSettings(val_share=0))) == {"train": {"1.png"}}


def test_official_test_images_never_train(tmp_path: Path) -> None:
    known, unknown = [f"{n}.png" for n in range(40)], [f"{n}.png" for n in range(40, 80)]
    write_annotations(tmp_path / "annotations/aitod_trainval_v1.json", known, folder="trainval/Images")
    write_annotations(tmp_path / "annotations/aitod_test_v1.json", unknown, folder="test/images")
    with collect_log() as lines:
        found = read_collection(tmp_path, PackingSettings(val_share=0.3, test_share=0.3))
    sets = get_sets(found)
    assert sets["test"] == set(unknown) and sets["train"] | sets["val"] == set(known) and len(sets["val"]) > 4
    assert all(image.path for image in found.images)
    assert "aitod_trainval_v1.json names no single set: its images are divided, 30% to val, 0% to test" in lines[0]


def test_a_complete_set_of_files_leaves_nothing_to_divide(tmp_path: Path) -> None:
    for name, images in (("train", "a"), ("val", "b"), ("test", "c"), ("trainval", "ab")):
        write_annotations(tmp_path / f"annotations/aitod_{name}_v2.json", [f"{i}.png" for i in images])
    for name in "abc":
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (60, 40)).save(tmp_path / "images" / f"{name}.png")
    with collect_log() as lines:
        found = read_collection(tmp_path, PackingSettings(val_share=0.5, test_share=0.4))
    assert get_sets(found) == {"train": {"a.png"}, "val": {"b.png"}, "test": {"c.png"}}
    assert len(lines) == 1 and lines[0].strip().endswith("annotate the same images: aitod_trainval_v2.json")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train2017", "test2017"),
        ("images/train2017", "images/test-dev2017"),
        ("train/images", "test/Images"),
        ("VisDrone2019-DET-train/images", "VisDrone2019-DET-test-dev/images"),
        ("trainval", "test"),
        ("images/train", "images"),
        ("images", "images"),
        (".", "."),
    ],
)
def test_images_are_found_in_folders_named_after_their_set(tmp_path: Path, train: str, test: str) -> None:
    write_annotations(tmp_path / "annotations/instances_train.json", ["1.png"], folder=train)
    write_annotations(tmp_path / "annotations/instances_test.json", ["2.png"], folder=test)
    Image.new("RGB", (9, 9)).save(tmp_path / "1.png") if train == "train2017" else None  # another image of that name
    paths = {image.name: image.path for image in read_collection(tmp_path, PackingSettings()).images}
    assert paths == {"1.png": tmp_path / train / "1.png", "2.png": tmp_path / test / "2.png"}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["all.json", "instances_val.json"], "all.json: its name mentions no set, and there are 2 annotation files"),
        (["part1.json", "part2.json"], "part1.json: its name mentions no set, and there are 2 annotation files"),
        (["train_and_test.json"], "train_and_test.json: its name mentions several sets"),
        (
            ["a.json", "a_train.json", "a_val.json"],
            "a.json: its name mentions no set, and there are 3 annotation files",
        ),
    ],
)
def test_files_that_cannot_be_told_apart_are_refused_and_the_printed_line_helps(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    for number, name in enumerate(names):
        write_annotations(tmp_path / "my data" / "annotations" / name, [f"{number}.png"], folder="images")
    raw = tmp_path / "my data"
    for _ in names:
        try:
            found = read_collection(raw, PackingSettings(val_share=0))
        except UserError as error:
            assert "exactly one of the words train, val, test or trainval" in str(error)
            assert reason in str(error) or "part2" in str(error)
            (line,) = re.findall(r"for example: (mv .*);", str(error))
            subprocess.run(shlex.split(line), check=True)
    assert len(list((raw / "annotations").iterdir())) == len(names), "no file replaced another"
    found = read_collection(raw, PackingSettings(val_share=0))
    assert len(found.images) == len(names)


def test_an_image_of_two_sets_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/instances_train2017.json", ["1.png", "2.png"], folder="images")
    write_annotations(tmp_path / "annotations/instances_minitrain2017.json", ["1.png"])
    with pytest.raises(UserError, match=r"minitrain2017.json.*move one of them elsewhere.*such as 'train/1.png'"):
        read_collection(tmp_path, PackingSettings())


def test_a_set_without_its_images_is_refused_and_the_places_are_named(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/instances_train2017.json", ["1.png"], folder="train2017")
    write_annotations(tmp_path / "annotations/instances_val2017.json", ["2.png", "3.png"])
    (tmp_path / "val2017").mkdir()
    with pytest.raises(UserError) as error:
        read_collection(tmp_path, PackingSettings())
    assert str(error.value) == (
        f"{tmp_path}/annotations/instances_val2017.json: none of the 2 images that it lists is there, such as '2.png'. "
        f"Searched: {tmp_path}/val2017, {tmp_path}. Move the images to {tmp_path}/images, or {tmp_path}/val, a folder "
        "named after the set; or move this file elsewhere, to pack the other sets alone."
    )
    assert "on_error" not in str(error.value)


def test_a_missing_image_is_named_with_the_places_searched(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/instances_train.json", ["1.png", "2.png"], folder="train")
    (tmp_path / "train/2.png").unlink()
    with pytest.raises(BadRecord, match=rf"the file is missing; searched: {tmp_path}/train, {tmp_path}$"):
        [sample.load() for sample in samples(tmp_path, make_config())]


def test_a_name_that_leads_outside_the_folder_reads_nothing_there(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    Image.new("RGB", (60, 40)).save(tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png"), "sub/../../secret.png"):
        write_annotations(raw / "annotations/instances_train.json", ["1.png"], folder="images")
        write_annotations(raw / "annotations/instances_train.json", ["1.png", name])
        is_outside = name == str(tmp_path / "secret.png")  # the others could be next to the folder of images
        missing = f"the file is missing; searched: {raw}/images, {raw}$"
        match = f"is outside of {raw}. Move the file" if is_outside else missing
        with pytest.raises(UserError if is_outside else BadRecord, match=match):
            [sample.load() for sample in samples(raw, make_config())]


def test_a_name_with_the_folders_of_another_machine_is_found_by_its_last_part(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/instances_train.json", ["1.png"], folder="images")
    write_annotations(tmp_path / "annotations/instances_train.json", ["/data/of/somebody/1.png"])
    assert [sample.source for sample in samples(tmp_path, make_config())] == [tmp_path / "images/1.png"]


def test_annotations_next_to_the_images_of_each_set_are_read_at_once(tmp_path: Path) -> None:
    for folder in ("train", "valid", "test"):
        write_annotations(tmp_path / folder / "_annotations.coco.json", ["1_jpg.rf.0a1b.png"], folder=folder)
    found = {image.name: (image.set, image.path) for image in read_collection(tmp_path, PackingSettings()).images}
    assert found == {
        f"{folder}/1_jpg.rf.0a1b.png": (name, tmp_path / folder / "1_jpg.rf.0a1b.png")
        for folder, name in (("train", "train"), ("valid", "val"), ("test", "test"))
    }
    (tmp_path / "train/notes.json").write_text("{}")
    with pytest.raises(UserError, match=r"train: several JSON files. Keep its annotations"):
        read_collection(tmp_path, PackingSettings())


def test_no_advice_leaves_everything_out(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations/instances_train.json", ["1.png", "2.png"], folder="images")
    for name in ("1.png", "2.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 2 raw samples cannot be read") as error:
        pack_raw(make_packing_config(), tmp_path, tmp_path / "out", JOBS, workers=1)
    assert "on_error=skip" not in str(error.value) and str(error.value).endswith("Repair them.")


def test_the_split_is_logged_when_packing_and_when_training(tmp_path: Path) -> None:
    config = make_packing_config()
    write_annotations(tmp_path / "annotations/instances_train2017.json", ["1.png", "2.png"], folder="train2017")
    write_annotations(tmp_path / "annotations/instances_val2017.json", ["3.png"], folder="val2017")
    expected = [
        "train: 2 images, 2 boxes, at most 1 in an image (from instances_train2017.json)",
        "val: 1 image, 1 box, at most 1 in an image (from instances_val2017.json)",
    ]
    with collect_log() as lines:
        pack_raw(config, tmp_path, tmp_path / "out", JOBS, workers=1)
    assert [line.strip() for line in lines][5:7] == expected
    assert [str(summary) for summary in summarize_sets(read_collection(tmp_path, PackingSettings()))] == expected
    data = ShardSet(tmp_path / "out")
    with collect_log() as lines:
        build(config, DataInfo.from_shards(data, np.arange(2)))
    assert [line.strip() for line in lines][:2] == expected
    data.close()
