"""Reading COCO annotations: categories, crowds, errors, sets."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loguru import logger
from PIL import Image

from tests.cases.tinydet import find_shared_data, list_image, load_samples, make_entry, write_coco
from trainyard.data.shards import BadRecord
from trainyard.errors import UserError

from .coco import read_collection
from .config import Config, PackingSettings
from .pack import fit_artifacts, samples


def test_sparse_category_ids_become_0_to_k(tmp_path: Path) -> None:
    raw = write_coco(tmp_path, annotations=[make_entry(4, 5, 10, 8), make_entry(20, 5, 6, 6, id=2, category_id=3)])
    artifacts = fit_artifacts(raw, Config())
    assert json.loads(artifacts["categories"]) == [{"id": 3, "name": "car"}, {"id": 7, "name": "ball"}]
    first = load_samples(raw)[0]
    assert first["labels"].values.tolist() == [1, 0] and first["boxes"].values.tolist() == [
        [4, 5, 14, 13],
        [20, 5, 26, 11],
    ]
    assert first["boxes"].values.dtype == np.float32 and first["labels"].values.dtype == np.int64
    objects = json.loads(artifacts["objects"])
    assert objects["images"] == 3 and objects["most"] == 2 and objects["per_sample"] == pytest.approx(2 / 3)
    assert objects["side_px"] == pytest.approx((math.sqrt(80) + 6) / 2)


def test_images_without_objects_are_kept(tmp_path: Path) -> None:
    found = load_samples(write_coco(tmp_path, annotations=[]))
    assert len(found) == 3 and all(
        one["boxes"].values.shape == (0, 4) and one["truth"].values.shape == (0, 7) for one in found
    )


def test_a_crowd_is_kept_for_evaluation_and_not_trained_on(tmp_path: Path) -> None:
    raw = write_coco(tmp_path, annotations=[make_entry(4, 5, 10, 8), make_entry(0, 0, 50, 30, id=2, iscrowd=1)])
    first = load_samples(raw)[0]
    assert len(first["boxes"].values) == 1 and first["truth"].values[:, 6].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"annotations": [make_entry(70, 5, 10, 8)]},
            r"1, bbox \[70, 5, 10, 8\]: it is outside its image.* 60 x 40.*outside=skip",
        ),
        (
            {"annotations": [make_entry(4, 5, -10, 8)]},
            r"annotation 1.*width or height is negative.*packing.outside=skip",
        ),
        ({"annotations": [make_entry(4, math.nan, 10, 8)]}, r"annotation 1.*not finite"),
        ({"annotations": [make_entry(4, 5, 10)]}, r"annotations\[0\].bbox: expected array of length >= 4"),
        ({"annotations": [{"id": 1, "image_id": 5}]}, r"annotations\[0\]: has no category_id. Expected"),
        ({"images": [{"id": 5, "file_name": "0.png"}]}, r"images\[0\]: has no width"),
        ({"images": ["0.png"]}, r"images\[0\]: expected object, found str"),
        (
            {"annotations": [make_entry(4, 5, 10, 8, category_id=2)]},
            r"category 2, which is unknown. Known: 3 car, 7 ball",
        ),
        (
            {"annotations": [make_entry(4, 5, 10, 8, image_id=9)]},
            r"annotation 1 refers to image 9, which is not listed",
        ),
        ({"annotations": [make_entry(4, 5, 10, 8), make_entry(4, 5, 9, 9)]}, r"annotation id 1 is used more than once"),
        ({"categories": [{"id": 7, "name": "a"}, {"id": 7, "name": "b"}]}, r"category id 7 is used more than once"),
        ({"images": [list_image(5, "0.png"), list_image(5, "1.png")]}, r"image id 5 is used more than once"),
        ({"images": [list_image(number, "0.png") for number in (5, 15, 25)]}, r"'0.png' is listed twice"),
    ],
)  # fmt: skip
def test_an_error_about_annotations_names_file_and_entry(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    raw = write_coco(tmp_path, **change)
    with pytest.raises(UserError, match=message) as error:
        list(samples(raw, Config()))
    assert "instances_train.json" in str(error.value)


def test_unusable_boxes_are_left_out_and_counted(tmp_path: Path) -> None:
    annotations = [
        make_entry(4, 5, 10, 8),
        make_entry(4, 5, 0, 8, id=2),
        make_entry(4, 5, 6, 0.5, id=3),
        make_entry(55, 30, 20, 20, id=4),
        make_entry(90, 5, 4, 4, id=5),
    ]
    raw = write_coco(tmp_path, annotations=annotations)
    config = Config()
    config.packing.outside = "skip"
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}")
    try:
        first = load_samples(raw, config)[0]
    finally:
        logger.remove(sink)
    assert first["boxes"].values.tolist() == [[4, 5, 14, 13], [55, 30, 60, 40]]
    assert [line.split(" boxes ")[0] for line in messages] == ["2 of 5", "1 of 5", "1 of 5"]
    assert (
        "left out: a side is below 1 px" in messages[0]
        and "clipped" in messages[1]
        and "outside their image" in messages[2]
    )


def test_any_number_of_objects_is_packed_unless_a_limit_is_set(tmp_path: Path) -> None:
    many = [make_entry(n % 50, n % 30, 4, 4, id=n) for n in range(2100)]  # AI-TOD-v2 has images with more than 2,000
    raw = write_coco(tmp_path, annotations=many)
    assert len(load_samples(raw)[0]["boxes"].values) == 2100
    assert json.loads(fit_artifacts(raw, Config())["objects"])["most"] == 2100
    config = Config()
    config.packing.objects_max = 1500
    with pytest.raises(
        UserError, match=r"0.png has 2100 objects, expected 1500 at most. Cut images into tiles: packing.tile_px=512"
    ):
        list(samples(raw, config))
    config.packing.objects_max = 2100
    assert len(load_samples(raw, config)[0]["boxes"].values) == 2100


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "the annotations list it, but the file is missing"),
        ("empty", "the file is empty"),
        ("text", "not an image"),
        ("half", "cannot be decoded"),
        ("other size", "it is 50 x 40 pixels, but the annotations say 60 x 40"),
        ("16 bits", "mode I;16 of unknown range"),
    ],
)
def test_a_missing_or_broken_image_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    raw = write_coco(tmp_path)
    path = raw / "images" / "0.png"
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    if content == "missing":
        path.unlink()
    elif content == "other size":
        Image.new("RGB", (50, 40)).save(path)
    elif content == "16 bits":
        Image.fromarray(np.zeros((40, 60), dtype=np.uint16)).save(path)
    else:
        path.write_bytes({"empty": b"", "text": b"a car", "half": data[: len(data) // 2]}[content])
    (sample,) = [sample for sample in samples(raw, Config()) if sample.columns["image_name"] == "0.png"]
    with pytest.raises(BadRecord, match=reason):
        sample.load()


def test_a_folder_without_annotations_or_with_other_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no annotations. Expected COCO JSON"):
        list(samples(tmp_path, Config()))
    (tmp_path / "notes.json").write_text('{"images": []}')
    with pytest.raises(UserError, match=r"notes.json: the content: has no annotations"):
        list(samples(tmp_path, Config()))
    (tmp_path / "notes.json").write_text("5")
    with pytest.raises(UserError, match=r"notes.json: the content: expected object, found int"):
        list(samples(tmp_path, Config()))
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(UserError, match=r"notes.json: not JSON"):
        list(samples(tmp_path, Config()))


def test_files_name_their_sets_and_other_images_are_assigned_by_sequence(tmp_path: Path) -> None:
    images = [{"id": n, "file_name": f"{n}.png", "width": 60, "height": 40, "sequence": n // 4} for n in range(80)]
    raw = write_coco(tmp_path, images=images, annotations=[])
    (raw / "instances_train.json").rename(raw / "all.json")
    found = read_collection(raw, PackingSettings(val_share=0.3, test_share=0.2))
    sets = {name: {int(p.image_id) // 4 for p in found.images if p.set == name} for name in ("train", "val", "test")}
    assert all(sets.values()) and sum(len(s) for s in sets.values()) == 20, "a sequence is in one set"
    (raw / "all.json").rename(raw / "instances_val.json")
    with pytest.raises(UserError, match="none of the 80 images is left to train on"):
        read_collection(raw, PackingSettings())


def test_a_union_of_sets_is_not_read_in_addition_to_them() -> None:
    found = read_collection(find_shared_data("bccd"), PackingSettings())
    assert [sum(p.set == name for p in found.images) for name in ("train", "val", "test")] == [205, 87, 72]
    assert sum(len(p.boxes) for p in found.images) == 4886
