"""Scores: COCO's fixture, the limits of AI-TOD, crowds and images without objects."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases.tinydet import find_shared_data

from .evaluation import Detections, GroundTruth, compute_f1, compute_intervals, compute_olrp, evaluate


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


def test_the_lrp_error_is_that_of_the_best_threshold() -> None:
    scores, overlaps = np.array([0.9, 0.8, 0.7]), np.array([0.75, 0.0, 1.0])
    # of two objects: one found half-way and one missed; then one wrong; then both found
    errors = [(0.5 + 1) / 2, (0.5 + 1 + 1) / 3, (0.5 + 1 + 0) / 3]
    assert compute_olrp(scores, overlaps, 2) == pytest.approx(min(errors)) == 0.5
    assert compute_olrp(scores[::-1], overlaps[::-1], 2) == 0.5
    assert compute_olrp(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1) == 0.5, "equal scores pass a threshold together"
    assert compute_olrp(np.empty(0), np.empty(0), 3) == 1.0 and compute_olrp(scores, overlaps, 0) is None


def test_the_lrp_error_takes_each_matched_overlap_and_no_crowd() -> None:
    square = np.array([[0.0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 60, 60]])
    truth = GroundTruth(square, np.array([100.0, 100, 400]), np.array([0, 0, 0]), np.array([False, False, True]))
    boxes = np.array([[0.0, 0, 10, 8], [20, 20, 30, 30], [45, 45, 55, 55], [70, 70, 80, 80]])
    found = Detections(boxes, np.array([0.9, 0.8, 0.7, 0.1]), np.array([0, 0, 0, 0]))
    metrics = evaluate([truth], [found], categories=["a", "b"], areas="coco")
    assert metrics["olrp"] == pytest.approx((0.2 / 0.5 + 0) / 2)


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


def make_random_images(count: int) -> tuple[list[GroundTruth], list[Detections]]:
    """Make images of two categories with crowds, empty images, misses and false alarms; no two scores are equal."""
    rng = np.random.default_rng(1)
    truths, detections = [], []
    for number in range(count):
        objects = 0 if number % 5 == 4 else int(rng.integers(1, 6))
        corner = rng.uniform(0, 200, (objects, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(10, 60, (objects, 2))], axis=1)
        labels = rng.integers(0, 2 if number else 1, objects)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        truths.append(GroundTruth(boxes, area, labels, rng.random(objects) < 0.2))
        extra = np.tile(rng.uniform(0, 100, (2, 2)), 2) + [0, 0, 30, 20]
        found = np.concatenate([boxes + rng.normal(0, 4, boxes.shape), boxes + rng.normal(0, 9, boxes.shape), extra])
        detections.append(
            Detections(found, rng.random(len(found)), np.concatenate([labels, labels, [0, 1]]).astype(np.int64))
        )
    return truths, detections


def test_intervals_resample_images_exactly_as_copying_them_does() -> None:
    truths, detections = make_random_images(8)
    draws = 12
    found = compute_intervals(truths, detections, categories=2, areas="coco", draws=draws, seed=4)
    slow = []
    rng = np.random.default_rng(4)
    for _ in range(draws):
        copies = np.sort(rng.integers(8, size=8))
        drawn = [truths[i] for i in copies], [detections[i] for i in copies]
        slow.append(evaluate(*drawn, categories=["a", "b"], areas="coco"))
    assert set(found.ends) == {"ap", "ap50", "ap75"} and found.draws_lost == 0
    for name, ends in found.ends.items():
        values = [one[name] for one in slow]
        assert len(set(values)) == draws, "the images differ"
        assert ends == pytest.approx(np.quantile(values, [0.025, 0.975]), rel=1e-12)
    again = compute_intervals(truths, detections, categories=2, areas="coco", draws=draws, seed=4)
    assert again == found and compute_intervals(*make_one_image(2, 1), categories=1, areas="coco", draws=0).ends == {}


def test_too_few_images_have_no_interval_and_that_is_said() -> None:
    truths, detections = make_random_images(4)
    for count in (1, 2, 3):
        found = compute_intervals(truths[:count], detections[:count], categories=2, areas="coco", draws=100)
        assert set(found.to_metrics()) == {"draws_lost"}
    nothing = [Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64))] * 4
    found = compute_intervals(truths, nothing, categories=2, areas="coco", draws=50)
    assert found.ends == {"ap": (0, 0), "ap50": (0, 0), "ap75": (0, 0)}


def test_f1_counts_each_object_once_and_only_in_its_category() -> None:
    objects, labels = np.array([[0, 0, 10, 10], [20, 20, 30, 30]]), np.array([0, 1])
    near = objects + 1  # overlaps by 81 / 119 = 0.68
    assert compute_f1(objects, labels, near, labels) == 1
    assert compute_f1(objects, labels, near, labels[::-1]) == 0, "other categories"
    assert compute_f1(objects, labels, near[[0, 0]], labels[[0, 0]]) == 0.5, "the second finds nothing"
    assert compute_f1(objects, labels, near[:1], labels[:1]) == pytest.approx(2 / 3)
    assert compute_f1(objects, labels, objects + 4, labels) == 0, "overlaps by 36 / 164"
    nothing = np.empty((0, 4)), np.empty(0, dtype=np.int64)
    assert compute_f1(objects, labels, *nothing) == compute_f1(*nothing, objects, labels) == 0
    assert compute_f1(*nothing, *nothing) == 1
