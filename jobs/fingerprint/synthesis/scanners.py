"""Scanners: how the same touch looks on an optical scanner, one with a frame, a thermal sweep, and a gray one."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]

from .masters import Floats, draw_smooth_field, enlarge

SCANNERS = ("optical", "framed", "sweep", "gray")
COARSE_PX = 4
JPEG_SHARE = 0.3


def scan(rng: np.random.Generator, ink: Floats, firmness: Floats, scanner: str) -> NDArray[np.uint8]:
    """Return the image of a touch, uint8, ridges dark.

    Args:
        ink: 0..1, how dark each pixel is.
        firmness: positive where the finger touches.
    """
    paper, dark, ink = _DRAW[scanner](rng, ink, firmness)
    gray = paper - np.maximum(paper - dark, 0) * ink
    gray = ndimage.gaussian_filter(gray, rng.uniform(0.35, 0.9), truncate=3, mode="nearest")
    gray += rng.uniform(0.5, 3.5) * rng.standard_normal(gray.shape, dtype=np.float32)
    if scanner == "optical":
        gray = np.where(gray > 245, 255, gray)
    image = (255 * (np.clip(gray, 0, 255) / 255) ** rng.uniform(0.85, 1.2)).astype(np.uint8)
    if rng.random() < JPEG_SHARE:
        return _compress(image, int(rng.integers(55, 92)))
    return image & np.uint8(0xFC)  # 64 levels look the same and make the PNG a third smaller


def draw_row_shifts(rng: np.random.Generator, rows: int) -> Floats:
    """Return by how many px a sweep moves each row: it is stitched from strips of 12 to 40 rows."""
    shifts = np.zeros(rows, dtype=np.float32)
    row = 0
    while row < rows:
        height = int(rng.integers(12, 41))
        shifts[row : row + height] = rng.normal(0, 0.8)
        row += height
    return shifts


def _draw_optical(rng: np.random.Generator, ink: Floats, firmness: Floats) -> tuple[Floats, Floats, Floats]:
    """White paper, and ridges of a darkness that varies with the pressure."""
    paper = _draw_level(rng, ink.shape, rng.uniform(246, 258), 2, 90)
    dark = _draw_level(rng, ink.shape, rng.uniform(20, 90), 22, 60)
    return paper, dark, ink


def _draw_framed(rng: np.random.Generator, ink: Floats, firmness: Floats) -> tuple[Floats, Floats, Floats]:
    """A light trapezoid with a dark blob in its middle, grainy where the finger nearly touches, and white outside."""
    height, width = ink.shape
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None, :]
    paper = _draw_level(rng, ink.shape, rng.uniform(226, 244), 3, 90)
    middle_y, middle_x, size = height / 2 + rng.normal(0, 6), width / 2 + rng.normal(0, 6), rng.uniform(16, 24)
    distance = np.maximum(np.abs(y - middle_y), np.abs(x - middle_x)) - size
    blob = rng.uniform(0.1, 0.4) / (1 + np.exp(np.clip(distance / 2, -30, 30)))
    speckle = enlarge(rng.standard_normal((height // 2, width // 2), dtype=np.float32), ink.shape)
    ghost = 0.5 * np.clip(speckle - 1.2, 0, 1) * np.exp(-np.clip(0.25 * np.abs(firmness), 0, 30))
    ink = np.maximum(ink, ghost)
    margin = rng.uniform(0.05, 0.1) * (height - y) - 8
    outside = (x < margin) | (x > width - 1 - margin)
    paper = np.where(outside, 255, paper * (1 - blob))
    ink = np.where(outside, 0, ink)
    dark = _draw_level(rng, ink.shape, rng.uniform(15, 60), 15, 60)
    return paper, dark, ink


def _draw_sweep(rng: np.random.Generator, ink: Floats, firmness: Floats) -> tuple[Floats, Floats, Floats]:
    """Black and white inside of the touch, gray outside, with another level for each strip of rows."""
    strips = 1 + 0.03 * draw_row_shifts(rng, len(ink))[:, None]
    field = _draw_level(rng, ink.shape, rng.uniform(150, 205), 5, 50)
    inside = 1 / (1 + np.exp(-np.clip(1.2 * (firmness - 0.5), -30, 30)))
    paper = (field + (rng.uniform(232, 255) - field) * inside) * strips
    dark = _draw_level(rng, ink.shape, rng.uniform(5, 35), 6, 60)
    return paper, dark, ink


def _draw_gray(rng: np.random.Generator, ink: Floats, firmness: Floats) -> tuple[Floats, Floats, Floats]:
    """A gray pane that is darker towards its corners, with stains."""
    height, width = ink.shape
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    level = rng.uniform(165, 205)
    paper = _draw_level(rng, ink.shape, level, 3, 40)
    paper *= 1 - np.float32(rng.uniform(0.1, 0.35)) * ((y * y + x * x) / 2) ** np.float32(1.5)
    for _ in range(rng.integers(2, 9)):
        top, left = rng.uniform(-1, 1), rng.uniform(-1, 1)
        size_y, size_x = rng.uniform(0.02, 0.09), rng.uniform(0.02, 0.09)
        distance = ((y - top) / size_y) ** 2 + ((x - left) / size_x) ** 2
        paper += rng.normal(0, 12) / (1 + np.exp(np.clip(6 * (distance - 1), -30, 30)))
    dark = _draw_level(rng, ink.shape, rng.uniform(5, 40), 6, 60)
    return paper, dark, ink


def _draw_level(rng: np.random.Generator, shape: tuple[int, int], level: float, sd: float, scale_px: float) -> Floats:
    coarse = (shape[0] // COARSE_PX, shape[1] // COARSE_PX)
    return np.float32(level) + np.float32(sd / 0.7) * enlarge(
        draw_smooth_field(rng, coarse, scale_px / COARSE_PX), shape
    )


def _compress(image: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    """Return what JPEG leaves of an image."""
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "JPEG", quality=quality)
    decoded: NDArray[np.uint8] = np.asarray(Image.open(stored))
    return decoded


_DRAW = {"optical": _draw_optical, "framed": _draw_framed, "sweep": _draw_sweep, "gray": _draw_gray}
