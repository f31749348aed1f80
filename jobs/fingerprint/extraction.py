"""Finds the minutiae of a print: its ridges are enhanced and thinned, and minutiae are where a line ends or forks."""

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

from .matching.prints import Floats, enhance_image
from .synthesis.impressions import sample
from .synthesis.masters import enlarge
from .synthesis.minutiae import choose_directions, find_crossings, thin

AROUND_PX = 6.0  # at 500 dpi, over which the direction of ridges is averaged
ALONG_PX, REACH_PX = 4.0, 8  # standard deviation and end of the average along a ridge


def extract_minutiae(gray: NDArray[np.uint8], dpi: float) -> Floats:
    """Return x, y and direction (N, 3) of the minutiae of a print with dark ridges; about 0.3 s of one core.

    Pixels are of the image, the upper left corner at (0, 0). Directions are as of `synthesis.find_minutiae`. Left out
    are those within 14 px (at 500 dpi) of the border of the print, where ridges only seem to end, and those within 6 px
    of another one: spurs, gaps and bridges.
    """
    ridges, mask, _ = enhance_image(gray, dpi)
    shape = 2 * ridges.shape[0], 2 * ridges.shape[1]  # 500 dpi: lines of a pixel keep apart
    dark = smooth_along(enlarge(-ridges * mask, shape))
    row, column, is_bifurcation = find_crossings(thin(dark > 0), enlarge(mask, shape) > 0.5)
    angle = measure_directions(dark)[row, column].astype(np.float64)
    direction = choose_directions(dark, row, column, angle, is_bifurcation)
    scale_y, scale_x = gray.shape[0] / shape[0], gray.shape[1] / shape[1]
    return np.stack([(column + 0.5) * scale_x, (row + 0.5) * scale_y, direction], axis=1).astype(np.float32)


def smooth_along(ridges: Floats) -> Floats:
    """Return the ridges averaged along their direction, which closes gaps and cuts bridges."""
    angle = measure_directions(ridges)
    row, column = np.indices(ridges.shape, dtype=np.float32)
    steps = np.arange(-REACH_PX, REACH_PX + 1, 2, dtype=np.float32)
    weights = np.exp(-(steps**2) / (2 * ALONG_PX**2))
    smooth = np.zeros_like(ridges)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        smooth += weight * sample(ridges, row - step * np.sin(angle), column + step * np.cos(angle))
    return smooth


def measure_directions(ridges: Floats) -> Floats:
    """Return in which direction the ridges run at each pixel, in radians counter-clockwise from the x axis.

    They run across the main direction of the squared gradient, averaged around the pixel (Kass and Witkin, "Analyzing
    oriented patterns", Computer Vision, Graphics, and Image Processing 37(3), 1987).
    """
    down, right = np.gradient(ridges)
    xx, yy, xy = (ndimage.gaussian_filter(product, AROUND_PX) for product in (right**2, down**2, right * down))
    angle: Floats = np.pi / 2 - np.arctan2(2 * xy, xx - yy) / 2  # y points down
    return angle
