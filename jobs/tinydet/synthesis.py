"""Draws synthetic scenes with tiny cars and balls, to try, test and time the job without real data.

A scene has textured ground with lines, cars of 5 to 20 px at any angle, balls of 4 to 10 px, both with soft shadows,
and patches of similar size that are neither. These are drawings: they show that the machinery learns; a result on them
says nothing about real images.
"""

import io
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.errors import UserError
from trainyard.files import create_folder

Floats = NDArray[np.float64]

WIDTH_PX, HEIGHT_PX = 160, 128  # size of a scene
CATEGORIES = ((3, "car"), (7, "ball"))  # ids with gaps, as in real files
VAL_EVERY = 6
"""Every sixth scene is in the validation set."""

_SUPERSAMPLING = 3  # supersampling factor, for soft edges


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Write `count` scenes as PNG files with COCO annotations; leaves nothing behind if interrupted.

    Args:
        raw: a new or empty folder.
        seed: a scene depends on this and its number alone; a larger set begins with the smaller one.

    Raises:
        UserError: `count` is too small for two sets, or the folder is not empty.
    """
    if count < VAL_EVERY:
        raise UserError(
            f"data.synthetic={count}: expected {VAL_EVERY} or more: every {VAL_EVERY}th scene is for validation."
        )
    if raw.exists() and any(raw.iterdir()):
        raise UserError(f"{raw}: already contains files. Choose a new folder.")
    with create_folder(raw) as folder:
        (folder / "images").mkdir()
        (folder / "annotations").mkdir()
        categories: list[dict[str, object]] = [{"id": i, "name": name} for i, name in CATEGORIES]
        content = {name: {"images": [], "annotations": [], "categories": categories} for name in ("train", "val")}
        for number in range(count):
            name = "val" if number % VAL_EVERY == VAL_EVERY - 1 else "train"
            _add_scene(content[name], folder / "images", number, seed)
        for name, entries in content.items():
            (folder / "annotations" / f"instances_{name}.json").write_text(json.dumps(entries))


def _add_scene(content: dict[str, list[dict[str, object]]], folder: Path, number: int, seed: int) -> None:
    pixels, boxes, labels = draw_scene(number, seed)
    file = f"{number:06d}.png"
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG", compress_level=1)
    (folder / file).write_bytes(png.getvalue())
    height, width = pixels.shape[:2]
    content["images"].append({"id": 10 * number + 1, "file_name": file, "width": width, "height": height})
    for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
        x1, y1, x2, y2 = (round(value, 2) for value in box)
        content["annotations"].append(
            {
                "id": len(content["annotations"]) + 1,
                "image_id": 10 * number + 1,
                "category_id": CATEGORIES[label][0],
                "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)],
                "area": round((x2 - x1) * (y2 - y1), 2),
                "iscrowd": 0,
            }
        )


def draw_scene(number: int, seed: int) -> tuple[NDArray[np.uint8], Floats, NDArray[np.int64]]:
    """Draw one scene.

    Returns:
        pixels (H, W, 3) uint8; boxes (n, 4) float64 x1, y1, x2, y2 px; labels (n,) int64, 0 car and 1 ball.
    """
    rng = np.random.default_rng([seed, number])
    height, width = HEIGHT_PX * _SUPERSAMPLING, WIDTH_PX * _SUPERSAMPLING
    canvas = _draw_ground(rng, height, width)
    boxes: list[tuple[float, ...]] = []
    labels: list[int] = []
    placed: list[tuple[float, ...]] = []
    for kind in rng.permutation([0] * rng.integers(2, 9) + [1] * rng.integers(1, 5) + [2] * rng.integers(2, 7)):
        length, broad = _draw_size(rng, int(kind))
        angle = rng.uniform(0, math.pi) if kind != 1 else 0.0
        half_x, half_y = _compute_extent(length, broad, angle) if kind != 1 else (length / 2, length / 2)
        x, y = rng.uniform(half_x + 1, WIDTH_PX - half_x - 1), rng.uniform(half_y + 1, HEIGHT_PX - half_y - 1)
        box = (x - half_x, y - half_y, x + half_x, y + half_y)
        if any(_is_overlapping(box, placed_box) for placed_box in placed):
            continue
        placed.append(box)
        _draw_item(canvas, rng, int(kind), x, y, length, broad, angle)
        if kind < 2:
            boxes.append(box)
            labels.append(int(kind))
    small = canvas.reshape(HEIGHT_PX, _SUPERSAMPLING, WIDTH_PX, _SUPERSAMPLING, 3).mean(axis=(1, 3))
    small += rng.normal(0, 3, small.shape)
    pixels = np.clip(np.rint(small), 0, 255).astype(np.uint8)
    return pixels, np.array(boxes, dtype=np.float64).reshape(-1, 4), np.array(labels, dtype=np.int64)


def _draw_size(rng: np.random.Generator, kind: int) -> tuple[float, float]:
    """Draw length and width, px."""
    if kind == 1:
        side = rng.uniform(4, 10)
        return side, side
    length = rng.uniform(9, 20) if kind == 0 else rng.uniform(4, 14)
    return length, length * (rng.uniform(0.42, 0.5) if kind == 0 else rng.uniform(0.6, 1.0))


def _compute_extent(length: float, broad: float, angle: float) -> tuple[float, float]:
    """Return how far a rotated rectangle extends from its centre to the right and down."""
    cos, sin = abs(math.cos(angle)), abs(math.sin(angle))
    return (length * cos + broad * sin) / 2, (length * sin + broad * cos) / 2


def _is_overlapping(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return not (box[2] < other[0] or other[2] < box[0] or box[3] < other[1] or other[3] < box[1])


def _draw_ground(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Draw the ground, (H, W, 3) float64 in 0..255: noise of several wavelengths in one hue, with straight lines."""
    gray = np.zeros((height, width))
    for cells, strength in ((4, 18.0), (12, 10.0), (40, 6.0)):
        coarse = rng.normal(0, strength, (cells, cells))
        image = Image.fromarray(coarse.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
        gray += np.asarray(image, dtype=np.float64)
    ys, xs = np.mgrid[:height, :width]
    for _ in range(rng.integers(1, 4)):
        angle, offset = rng.uniform(0, math.pi), rng.uniform(0.2, 0.8)
        distance = (xs - offset * width) * math.sin(angle) - (ys - offset * height) * math.cos(angle)
        gray += np.where(np.abs(distance) < _SUPERSAMPLING * rng.uniform(0.6, 2), rng.uniform(-30, 40), 0)
    tint = rng.uniform(70, 130) * np.array([1.0, 1.0, 1.0]) + rng.uniform(-25, 25, 3)
    ground: Floats = gray[:, :, None] + tint
    return ground


def _draw_item(
    canvas: Floats, rng: np.random.Generator, kind: int, x: float, y: float, length: float, broad: float, angle: float
) -> None:
    """Draw a car (0), a ball (1) or a distractor (2) at x, y px of the scene."""
    reach = length * 0.75 + 3
    left, top = max(0, int((x - reach) * _SUPERSAMPLING)), max(0, int((y - reach) * _SUPERSAMPLING))
    part = canvas[top : int((y + reach) * _SUPERSAMPLING), left : int((x + reach) * _SUPERSAMPLING)]
    ys, xs = np.mgrid[: part.shape[0], : part.shape[1]]
    dx, dy = (xs + left + 0.5) / _SUPERSAMPLING - x, (ys + top + 0.5) / _SUPERSAMPLING - y
    along = dx * math.cos(angle) + dy * math.sin(angle)
    across = -dx * math.sin(angle) + dy * math.cos(angle)
    if kind == 1:
        inside = np.hypot(dx, dy) < length / 2
        part[(np.hypot(dx - 1, dy - 1) < length / 2) & ~inside] *= 0.65
        light = 1 - 0.35 * np.hypot(dx + length / 6, dy + length / 6) / length
        colour = rng.uniform(200, 250) * np.array([1.0, rng.uniform(0.7, 1), rng.uniform(0.2, 0.9)])
        part[inside] = (colour * light[:, :, None])[inside]
        return
    inside = (np.abs(along) < length / 2) & (np.abs(across) < broad / 2)
    colour = rng.uniform(20, 235) + rng.uniform(-40, 40, 3)
    if kind == 2:  # a patch of one colour, without details or shadow
        part[inside] = colour * 0.5 + part[inside] * 0.5
        return
    shadow = (np.abs(along - 0.8) < length / 2) & (np.abs(across - 0.8) < broad / 2)
    part[shadow & ~inside] *= 0.6
    part[inside] = colour
    glass = inside & (np.abs(across) < broad * 0.38) & ((along > length * 0.1) & (along < length * 0.27))
    rear = inside & (np.abs(across) < broad * 0.36) & ((along < -length * 0.25) & (along > -length * 0.36))
    part[glass | rear] = 25 if colour.mean() > 90 else 150
