"""Draws the report's figures: samples with their objects and detections, and precision by size."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from trainyard.report.figures import draw_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRUTH_COLOUR, DETECTION_COLOUR = (40, 200, 60), (235, 60, 40)
_SIDE_PX = 720  # approximate longer side of a drawn sample


def draw_detections(
    file: np.ndarray, *, truth: np.ndarray, boxes: np.ndarray, scores: np.ndarray, names: Sequence[str]
) -> bytes:
    """Draw a sample as PNG, enlarged by an integer factor: objects green, detections red with name and score.

    Args:
        file: uint8, an encoded image.
        truth, boxes: (n, 4) and (m, 4), x1, y1, x2, y2 px of the sample.
        names: category name of each detection.
    """
    with Image.open(io.BytesIO(file.tobytes())) as image:
        factor = max(1, _SIDE_PX // max(image.size))
        size = (image.width * factor, image.height * factor)
        canvas = image.convert("RGB").resize(size, Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(canvas)
    for box in truth.tolist():
        pen.rectangle(_scale_box(box, factor, 2), outline=TRUTH_COLOUR)
    for box, score, name in zip(boxes.tolist(), scores.tolist(), names, strict=True):
        pen.rectangle(_scale_box(box, factor, 0), outline=DETECTION_COLOUR)
        pen.text((box[0] * factor, box[3] * factor + 1), f"{name} {score:.2f}", fill=DETECTION_COLOUR)
    target = io.BytesIO()
    canvas.save(target, "PNG")
    return target.getvalue()


def plot_precision_by_size(metrics: Mapping[str, float], sizes: Mapping[str, tuple[float, float]]) -> bytes:
    """Plot the average precision of all objects, and of each size that has any, as a PNG bar chart."""
    bars_by_name = {"all": metrics["ap"], "IoU 0.5": metrics["ap50"]}
    for name, (low, high) in sizes.items():
        if f"ap_{name}" in metrics:
            size_range = f"{low**0.5:.0f}-{high**0.5:.0f} px" if high < 1e9 else f"from {low**0.5:.0f} px"
            bars_by_name[f"{name}\n{size_range}"] = metrics[f"ap_{name}"]

    def draw(axes: "Axes") -> None:
        bars = axes.bar(list(bars_by_name), list(bars_by_name.values()), color="#4878a8")
        axes.bar_label(bars, fmt="%.3f")
        axes.set_ylim(0, max(0.05, 1.15 * max(bars_by_name.values())))
        axes.set_ylabel("average precision")

    return draw_figure("Average precision by size", draw, x_label="")


def _scale_box(box: list[float], factor: int, wider_px: int) -> list[float]:
    x1, y1, x2, y2 = (value * factor for value in box)
    x2, y2 = max(x1, x2), max(y1, y2)
    return [x1 - wider_px, y1 - wider_px, x2 + wider_px, y2 + wider_px]
