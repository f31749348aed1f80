"""Scores: COCO's fixture, the limits of AI-TOD, crowds and images without objects."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .cases import find_shared_data
from .evaluation import Detections, GroundTruth, evaluate


def score_fixture(areas: str) -> dict[str, float]:
    folder = find_shared_data("coco_eval_fixture")
    truth, found = (json.loads((folder / name).read_text()) for name in ("gt.json", "dt.json"))
    labels = {entry["id"]: i for i, entry in enumerate(truth["categories"])}

    def select(entries: list[dict[str, Any]], image: int, name: str) -> np.ndarray:
        chosen = [entry for entry in entries if entry["image_id"] == image]
        if name == "bbox":
            rows = np.array([entry["bbox"] for entry in chosen], dtype=float).reshape(-1, 4)
            return np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:]], axis=1)
        return np.array([labels[e[name]] if name == "category_id" else e[name] for e in chosen])

    truths, detections = [], []
    for image in [entry["id"] for entry in truth["images"]]:
        t, d = truth["annotations"], found
        crowd = select(t, image, "iscrowd") > 0
        truths.append(
            GroundTruth(select(t, image, "bbox"), select(t, image, "area"), select(t, image, "category_id"), crowd)
        )
        detections.append(
            Detections(select(d, image, "bbox"), select(d, image, "score"), select(d, image, "category_id"))
        )
    return evaluate(truths, detections, categories=[e["name"] for e in truth["categories"]], areas=areas)


def test_the_fixture_gets_the_scores_of_pycocotools() -> None:
    metrics = score_fixture("coco")
    expected = {
        "ap": 0.071954, "ap50": 0.184978, "ap75": 0.069383, "ap_large": 0.077099,
        "ar_1": 0.011876, "ar_10": 0.032862, "ar_100": 0.075788,
    }  # fmt: skip
    assert {name: round(metrics[name], 6) for name in expected} == expected
    assert "ap_small" not in metrics, "the fixture has no object of that size"


def test_the_fixture_has_the_same_ap_with_the_sizes_and_limits_of_aitod() -> None:
    metrics = score_fixture("aitod")
    assert [round(metrics[name], 6) for name in ("ap", "ap50", "ap75", "ar_1500")] == [
        0.071954,
        0.184978,
        0.069383,
        0.075788,
    ]
    assert {"ap_medium", "ar_1", "ar_100", "ar_1500"} <= set(metrics) and "ap_large" not in metrics


def make_grid_of_boxes(count: int, side: float) -> np.ndarray:
    corner = np.stack(np.divmod(np.arange(count), 40), axis=1) * 20.0
    return np.concatenate([corner, corner + side], axis=1)


def make_one_image(count: int, found: int) -> tuple[list[GroundTruth], list[Detections]]:
    boxes, zeros = make_grid_of_boxes(count, 10), np.zeros(count, dtype=np.int64)
    truth = GroundTruth(boxes, np.full(count, 100.0), zeros, zeros > 0)
    return [truth], [Detections(boxes[:found], np.linspace(1, 0.5, found), zeros[:found])]


@pytest.mark.slow
def test_more_than_100_objects_need_the_limits_of_aitod() -> None:
    truths, detections = make_one_image(300, 300)
    assert evaluate(truths, detections, categories=["a"], areas="aitod")["ap"] == pytest.approx(1.0)
    assert evaluate(truths, detections, categories=["a"], areas="coco")["ap"] == pytest.approx(34 / 101)


@pytest.mark.parametrize("found", [1, 2])
def test_a_crowd_is_neither_right_nor_wrong(found: int) -> None:
    truths, detections = make_one_image(2, found)
    with_crowd = [replace(truths[0], crowd=np.array([False, True]))]
    assert evaluate(with_crowd, detections, categories=["a"], areas="aitod")["ap"] == pytest.approx(1.0)


def test_a_detection_in_an_image_without_objects_is_wrong() -> None:
    truths, detections = make_one_image(1, 1)
    empty = GroundTruth(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    sure = Detections(np.array([[0.0, 0, 5, 5]]), np.array([2.0]), np.array([0]))
    assert evaluate([*truths, empty], [*detections, sure], categories=["a"], areas="aitod")["ap50"] == pytest.approx(
        0.5
    )


def test_no_detections_score_0(capsys: pytest.CaptureFixture[str]) -> None:
    truths, _ = make_one_image(2, 2)
    nothing = [Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64))]
    assert evaluate(truths, nothing, categories=["a"], areas="aitod")["ap"] == 0
    assert capsys.readouterr().out == "", "the evaluator prints nothing"
