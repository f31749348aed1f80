"""Detections against objects, by COCO's evaluator, with the sizes and limits of COCO or of AI-TOD."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

FAR = 1e10
SIZES: dict[str, dict[str, tuple[float, float]]] = {
    "coco": {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, FAR)},
    "aitod": {"verytiny": (0, 8**2), "tiny": (8**2, 16**2), "small": (16**2, 32**2), "medium": (32**2, FAR)},
}
"""Areas in square pixels of the whole picture; those of AI-TOD are of its own evaluator, jwwangchn/cocoapi-aitod."""

LIMITS = {"coco": (1, 10, 100), "aitod": (1, 100, 1500)}
"""Detections of a picture and category that count, at most."""


@dataclass(frozen=True)
class Truth:
    """The objects of one picture."""

    boxes: np.ndarray  # (n, 4) x1, y1, x2, y2 px
    areas: np.ndarray  # (n,) px^2
    labels: np.ndarray  # (n,) in 0..K-1
    crowd: np.ndarray  # (n,) bool: neither right nor wrong


@dataclass(frozen=True)
class Found:
    """The detections of one picture."""

    boxes: np.ndarray  # (m, 4) x1, y1, x2, y2 px
    scores: np.ndarray  # (m,)
    labels: np.ndarray  # (m,)


def evaluate(
    truths: Sequence[Truth], founds: Sequence[Found], *, categories: Sequence[str], areas: str
) -> dict[str, float]:
    """Return average precisions and recalls in 0..1; a size or category without objects has none.

    `ap` is the mean over IoU 0.50 : 0.05 : 0.95 and the categories that have objects, `ap50` and `ap75` at one IoU,
    `ap_<size>` of objects of that size, `ar_<n>` the recall with n detections of each picture and category, and
    `ap_<category>`, of up to 20 of them. Pictures without objects count: what is found there is wrong.

    Args:
        truths, founds: of the same pictures, in the same order.
        areas: "coco" or "aitod", see `SIZES` and `LIMITS`.
    """
    limits = LIMITS[areas]
    ranges = {"all": (0.0, FAR), **SIZES[areas]}
    judge = _judged(truths, founds, len(categories), limits, ranges)
    precision = judge.eval["precision"]  # IoU, recall, category, area, limit
    recall = judge.eval["recall"]  # IoU, category, area, limit
    metrics = {"ap": _mean(precision[:, :, :, 0, -1]) or 0.0, "ap50": 0.0, "ap75": 0.0}
    for name, iou in (("ap50", 0), ("ap75", 5)):
        metrics[name] = _mean(precision[iou, :, :, 0, -1]) or 0.0
    for number, name in enumerate(ranges):
        value = _mean(precision[:, :, :, number, -1])
        if number and value is not None:
            metrics[f"ap_{name}"] = value
    for number, limit in enumerate(limits):
        metrics[f"ar_{limit}"] = _mean(recall[:, :, 0, number]) or 0.0
    for number, name in enumerate(categories if 1 < len(categories) <= 20 else ()):
        value = _mean(precision[:, :, number, 0, -1])
        if value is not None:
            metrics[f"ap_{name}"] = value
    return metrics


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of what is defined: -1 stands for no objects."""
    real = values[values > -1]
    return float(real.mean()) if real.size else None


def _judged(
    truths: Sequence[Truth],
    founds: Sequence[Found],
    categories: int,
    limits: tuple[int, ...],
    ranges: dict[str, tuple[float, float]],
) -> COCOeval:
    with contextlib.redirect_stdout(io.StringIO()):  # the evaluator prints each of its steps
        truth, found = COCO(), COCO()
        images = [{"id": number} for number in range(len(truths))]
        names = [{"id": label} for label in range(categories)]
        truth.dataset = {"images": images, "categories": names, "annotations": list(_true_entries(truths))}
        found.dataset = {"images": images, "categories": names, "annotations": list(_found_entries(founds))}
        truth.createIndex()
        found.createIndex()
        judge = COCOeval(truth, found, "bbox")
        judge.params.maxDets = list(limits)
        judge.params.areaRng = [list(pair) for pair in ranges.values()]
        judge.params.areaRngLbl = list(ranges)
        judge.evaluate()
        judge.accumulate()
    return judge


def _true_entries(truths: Sequence[Truth]) -> Iterator[dict[str, object]]:
    number = 0
    for image, truth in enumerate(truths):
        rows = zip(_bbox(truth.boxes), truth.areas.tolist(), truth.labels.tolist(), truth.crowd.tolist(), strict=True)
        for box, area, label, crowd in rows:
            number += 1
            yield {
                "id": number,
                "image_id": image,
                "category_id": int(label),
                "bbox": box,
                "area": area,
                "iscrowd": int(crowd),
            }


def _found_entries(founds: Sequence[Found]) -> Iterator[dict[str, object]]:
    number = 0
    for image, found in enumerate(founds):
        for box, score, label in zip(_bbox(found.boxes), found.scores.tolist(), found.labels.tolist(), strict=True):
            number += 1
            area = box[2] * box[3]
            yield {
                "id": number,
                "image_id": image,
                "category_id": int(label),
                "bbox": box,
                "area": area,
                "score": score,
                "iscrowd": 0,
            }


def _bbox(boxes: np.ndarray) -> list[list[float]]:
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    sides: list[list[float]] = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()
    return sides
