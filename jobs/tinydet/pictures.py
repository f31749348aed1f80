"""Pictures for the report: samples with their objects and detections, and precision by size."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

TRUE, FOUND = (40, 200, 60), (235, 60, 40)
_SIDE_PX = 720  # of a drawn sample, about


def drawn(
    file: np.ndarray,
    *,
    truth: np.ndarray,
    boxes: np.ndarray,
    scores: np.ndarray,
    names: Sequence[str],
) -> bytes:
    """Return a PNG of a sample, enlarged by a whole number: objects green, detections red with name and score.

    Args:
        file: uint8, an encoded picture.
        truth, boxes: (n, 4) and (m, 4), x1, y1, x2, y2 px of the sample.
        names: of each detection's category.
    """
    with Image.open(io.BytesIO(file.tobytes())) as picture:
        factor = max(1, _SIDE_PX // max(picture.size))
        size = (picture.width * factor, picture.height * factor)
        canvas = picture.convert("RGB").resize(size, Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(canvas)
    for box in truth.tolist():
        pen.rectangle(_placed(box, factor, 2), outline=TRUE)
    for box, score, name in zip(boxes.tolist(), scores.tolist(), names, strict=True):
        pen.rectangle(_placed(box, factor, 0), outline=FOUND)
        pen.text((box[0] * factor, box[3] * factor + 1), f"{name} {score:.2f}", fill=FOUND)
    return _png(canvas)


def precision_by_size(metrics: Mapping[str, float], sizes: Mapping[str, tuple[float, float]]) -> bytes:
    """Return a PNG with a bar for the average precision of all objects and of each size that has any."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    shown = {"all": metrics["ap"], "IoU 0.5": metrics["ap50"]}
    for name, (low, high) in sizes.items():
        if f"ap_{name}" in metrics:
            reach = f"{low**0.5:.0f}-{high**0.5:.0f} px" if high < 1e9 else f"from {low**0.5:.0f} px"
            shown[f"{name}\n{reach}"] = metrics[f"ap_{name}"]
    bars = axes.bar(list(shown), list(shown.values()), color="#4878a8")
    axes.bar_label(bars, fmt="%.3f")
    axes.set_ylim(0, max(0.05, 1.15 * max(shown.values())))
    axes.set_ylabel("average precision")
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()


def _placed(box: list[float], factor: int, wider_px: int) -> list[float]:
    x1, y1, x2, y2 = (value * factor for value in box)
    x2, y2 = max(x1, x2), max(y1, y2)
    return [x1 - wider_px, y1 - wider_px, x2 + wider_px, y2 + wider_px]


def _png(picture: Image.Image) -> bytes:
    target = io.BytesIO()
    picture.save(target, "PNG")
    return target.getvalue()
