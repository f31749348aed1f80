"""Scores detections with COCO's evaluator, by the sizes and limits of COCO or AI-TOD."""

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pycocotools.coco import COCO  # type: ignore[import-untyped]
from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

from trainyard.scoring import Intervals, draw_groups, summarize_draws

from . import geometry

FAR = 1e10
SIZES: dict[str, dict[str, tuple[float, float]]] = {
    "coco": {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, FAR)},
    "aitod": {"verytiny": (0, 8**2), "tiny": (8**2, 16**2), "small": (16**2, 32**2), "medium": (32**2, FAR)},
}
"""Areas in square pixels of the whole image; those of AI-TOD are from its own evaluator, jwwangchn/cocoapi-aitod."""

LIMITS = {"coco": (1, 10, 100), "aitod": (1, 100, 1500)}
"""Numbers of detections per image and category that are scored, at most."""


@dataclass(frozen=True)
class GroundTruth:
    """The objects of one image."""

    boxes: np.ndarray  # (n, 4) x1, y1, x2, y2 px
    areas: np.ndarray  # (n,) px^2
    labels: np.ndarray  # (n,) in 0..K-1
    crowd: np.ndarray  # (n,) bool: a detection of it is neither right nor wrong


@dataclass(frozen=True)
class Detections:
    """The detections in one image."""

    boxes: np.ndarray  # (m, 4) x1, y1, x2, y2 px
    scores: np.ndarray  # (m,)
    labels: np.ndarray  # (m,)


def evaluate(
    truths: Sequence[GroundTruth], detections: Sequence[Detections], *, categories: Sequence[str], areas: str
) -> dict[str, float]:
    """Return average precisions and recalls in 0..1; a size or category without objects is left out.

    `ap` is the mean over IoU 0.50 : 0.05 : 0.95 and the categories that have objects, `ap50` and `ap75` at one IoU,
    `ap_<size>` covers objects of that size, `ar_<n>` is the recall with n detections per image and category, and
    `ap_category_<name>` is given for up to 20 categories. `olrp`, lower is better, is of all objects at IoU 0.50
    (`compute_olrp`). Images without objects count: every detection there is wrong.

    Args:
        truths, detections: of the same images, in the same order.
        areas: "coco" or "aitod", see `SIZES` and `LIMITS`.
    """
    limits = LIMITS[areas]
    ranges = {"all": (0.0, FAR), **SIZES[areas]}
    evaluator = _match(truths, detections, len(categories), limits, ranges)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator.accumulate()
    precision = evaluator.eval["precision"]  # IoU, recall, category, area, limit
    recall = evaluator.eval["recall"]  # IoU, category, area, limit
    overall = precision[..., 0, -1]
    parts = {"ap": overall, "ap50": overall[0], "ap75": overall[5]}
    parts |= {f"ap_{name}": precision[..., number, -1] for number, name in enumerate(SIZES[areas], start=1)}
    parts |= {f"ar_{limit}": recall[..., 0, number] for number, limit in enumerate(limits)}
    if 1 < len(categories) <= 20:
        parts |= {f"ap_category_{name}": overall[..., number] for number, name in enumerate(categories)}
    metrics = {}
    for name, values in parts.items():
        defined = values[values > -1]  # the evaluator writes -1 where there are no objects
        if defined.size or not name.startswith("ap_"):
            metrics[name] = float(defined.mean()) if defined.size else 0.0
    rates = [compute_olrp(*_list_overlaps(evaluator, label, len(truths))) for label in range(len(categories))]
    return metrics | {"olrp": float(np.mean([rate for rate in rates if rate is not None] or [1.0]))}


def compute_olrp(scores: np.ndarray, overlaps: np.ndarray, objects: int) -> float | None:
    """Return the optimal LRP error of one category, 0..1: of the best score threshold; None without an object.

    LRP = (sum over right detections of (1 - IoU) / (1 - t) + wrong + missed) / (right + wrong + missed), with t = 0.5,
    the least overlap of a right one (Oksuz, Cam, Akbas and Kalkan, "Localization Recall Precision", ECCV 2018,
    equations 3 and 8).

    Args:
        scores: (m,) of the detections that count.
        overlaps: (m,) IoU of a right detection with its object; 0: it is wrong.
        objects: how many there are.
    """
    if not objects:
        return None
    order = np.argsort(-scores, kind="mergesort")
    right, cost = overlaps[order] > 0, np.where(overlaps > 0, (1 - overlaps) / 0.5, 1.0)[order]
    missed = objects - np.cumsum(right)
    errors = (np.cumsum(cost) + missed) / (objects + np.cumsum(~right))
    last_of_equals = np.append(np.diff(scores[order]) != 0, True)[: len(errors)]
    return float(min(1.0, errors[last_of_equals].min(initial=1.0)))


def _list_overlaps(evaluator: COCOeval, label: int, images: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return scores and overlaps of a category's detections at IoU 0.50, and the number of its objects."""
    scores, overlaps, objects = [np.empty(0)], [np.empty(0)], 0
    matched = evaluator.evalImgs[label * len(evaluator.params.areaRng) * images :][:images]  # the first range: all
    for image, match in enumerate(matched):
        if match is None:
            continue
        objects += int(np.count_nonzero(match["gtIgnore"] == 0))
        counts = match["dtIgnore"][0] == 0
        scores.append(np.array(match["dtScores"])[counts])
        own = (truth["id"] for truth in evaluator.cocoGt.imgToAnns[image] if truth["category_id"] == label)
        numbers = {truth: i for i, truth in enumerate(own)}
        pairs = [
            evaluator.ious[image, label][d, numbers[int(truth)]] if truth else 0.0
            for d, truth in enumerate(match["dtMatches"][0])
        ]
        overlaps.append(np.array(pairs)[counts])
    return np.concatenate(scores), np.concatenate(overlaps), objects


def compute_intervals(
    truths: Sequence[GroundTruth],
    detections: Sequence[Detections],
    *,
    categories: int,
    areas: str,
    draws: int,
    seed: int = 0,
) -> Intervals:
    """Return the 95 % intervals of `ap`, `ap50` and `ap75` over resampled images.

    Objects are matched once; a draw only counts each image's detections and objects as often as it was drawn, which
    equals copying images. A draw without an object is of no use, and fewer than four images have no interval
    (`scoring.draw_groups`). Images count as independent, so frames of one video give too narrow a one.

    Args:
        truths, detections, areas: as for `evaluate`.
        draws: resamples; 0: no intervals.
    """
    if not draws:
        return summarize_draws([], draws=0)
    evaluator = _match(truths, detections, categories, LIMITS[areas], {"all": (0.0, FAR)})
    images, thresholds = len(truths), evaluator.params.recThrs
    matched = [_MatchedCategory(evaluator.evalImgs[k * images : (k + 1) * images]) for k in range(categories)]
    resampled = []
    for drawn in draw_groups(images, draws, seed=seed):
        copies = np.bincount(drawn, minlength=images)
        rows = [row for category in matched if (row := category.compute_ap(copies, thresholds)) is not None]
        if rows:
            ap = np.mean(rows, axis=0)  # by IoU
            resampled.append({"ap": float(ap.mean()), "ap50": float(ap[0]), "ap75": float(ap[5])})
    return summarize_draws(resampled, draws=draws)


def compute_f1(
    objects: np.ndarray, object_labels: np.ndarray, boxes: np.ndarray, labels: np.ndarray, *, above: float = 0.5
) -> float:
    """Return the F1 score of a sample's detections, 0..1; 1 if there is nothing, and nothing was found.

    Each detection, best first, finds the object of its category that it overlaps most, if that is at least `above`
    and no other has found it.

    Args:
        objects, boxes: (n, 4) and (m, 4), x1, y1, x2, y2; `boxes` best first.
        object_labels, labels: (n,) and (m,) categories.
        above: intersection over union.
    """
    if not len(objects) + len(boxes):
        return 1.0
    overlap, _ = geometry.iou(torch.from_numpy(boxes)[:, None].double(), torch.from_numpy(objects)[None].double())
    overlap_mn = np.where(labels[:, None] == object_labels[None], overlap.numpy(), 0)
    hits = 0
    for own in overlap_mn:
        if own.size and own.max() >= above:
            hits += 1
            overlap_mn[:, own.argmax()] = 0
    return 2 * hits / (len(objects) + len(boxes))


class _MatchedCategory:
    """The detections of one category in all images, best first, and which of them are right at each IoU.

    Recall rises at right detections only, so a curve needs the others just as counts.
    """

    def __init__(self, images: Sequence[dict[str, Any] | None]) -> None:
        self.objects = np.array([0 if match is None else np.count_nonzero(match["gtIgnore"] == 0) for match in images])
        known = [(number, match) for number, match in enumerate(images) if match is not None]
        empty = np.zeros((10, 0), dtype=bool)
        scores = np.concatenate([[], *(match["dtScores"] for _, match in known)])
        matched, ignored = (
            np.concatenate([empty, *(match[name] != 0 for _, match in known)], axis=1)
            for name in ("dtMatches", "dtIgnore")
        )
        order = np.argsort(-scores, kind="mergesort")  # as the evaluator breaks ties
        self.image = np.repeat([number for number, _ in known], [len(match["dtScores"]) for _, match in known])[order]
        self.right = [np.flatnonzero(row) for row in (matched & ~ignored)[:, order]]
        self.ignored = [np.flatnonzero(row) for row in ignored[:, order]]

    def compute_ap(self, copies: np.ndarray, thresholds: np.ndarray) -> np.ndarray | None:
        """Return the average precision at each IoU if image i counts copies[i] times; None without an object."""
        objects = int(self.objects @ copies)
        if not objects:
            return None
        weight = copies[self.image]
        before = np.cumsum(weight)
        averages = []
        for right, ignored in zip(self.right, self.ignored, strict=True):
            hits = np.cumsum(weight[right])
            counted = before[right] - np.append(0, np.cumsum(weight[ignored]))[np.searchsorted(ignored, right)]
            precision = hits / (counted + np.spacing(1))
            best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
            averages.append(best[np.searchsorted(hits / objects, thresholds, side="left")].mean())
        return np.array(averages)


def _match(
    truths: Sequence[GroundTruth],
    detections: Sequence[Detections],
    categories: int,
    limits: tuple[int, ...],
    ranges: dict[str, tuple[float, float]],
) -> COCOeval:
    """Return the evaluator after it has matched detections with objects, image by image."""
    with contextlib.redirect_stdout(io.StringIO()):  # the evaluator prints each of its steps
        coco_truth, coco_detections = COCO(), COCO()
        images = [{"id": number} for number in range(len(truths))]
        names = [{"id": label} for label in range(categories)]
        objects = _make_entries(
            (item.boxes, item.labels, {"area": item.areas, "iscrowd": item.crowd.astype(np.int64)}) for item in truths
        )
        detected = _make_entries((item.boxes, item.labels, {"score": item.scores}) for item in detections)
        for coco, entries in ((coco_truth, objects), (coco_detections, detected)):
            coco.dataset = {"images": images, "categories": names, "annotations": list(entries)}
            coco.createIndex()
        evaluator = COCOeval(coco_truth, coco_detections, "bbox")
        evaluator.params.maxDets = list(limits)
        evaluator.params.areaRng = [list(pair) for pair in ranges.values()]
        evaluator.params.areaRngLbl = list(ranges)
        evaluator.evaluate()
    return evaluator


def _make_entries(
    images: Iterable[tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
) -> Iterator[dict[str, object]]:
    """Yield COCO's entry of each box from boxes, labels and further fields of each image."""
    numbers = itertools.count(1)
    for image, (boxes, labels, fields) in enumerate(images):
        for i, (x1, y1, x2, y2) in enumerate(boxes.astype(np.float64).tolist()):
            box = [x1, y1, x2 - x1, y2 - y1]
            entry = {"id": next(numbers), "image_id": image, "category_id": int(labels[i]), "bbox": box}
            yield {**entry, "area": box[2] * box[3], "iscrowd": 0, **{n: v[i].item() for n, v in fields.items()}}
