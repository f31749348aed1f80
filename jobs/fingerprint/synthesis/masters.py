"""Masters: the ridges of a finger as nobody presses or bends them, grown along drawn orientations and periods.

The idea is SFinGe's (Cappelli, "Synthetic fingerprint generation", in Handbook of Fingerprint Recognition): loops and
deltas define the direction of the ridges, and a Gabor filter that follows direction and period grows them from sparse
seeds. Minutiae appear by themselves where ridges do not fit.
"""

from dataclasses import dataclass
from math import log, pi

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage  # type: ignore[import-untyped]

Floats = NDArray[np.float32]
Points = list[tuple[float, float]]

HEIGHT_PX, WIDTH_PX = 448, 384  # at 500 dpi: an impression of 352 x 320 that is rotated and shifted finds ridges
CELL_PX = 2  # pitch of the grid on which ridges grow: 4.5 cells per ridge are enough, at a sixteenth of the cost
ROWS, COLUMNS = HEIGHT_PX // CELL_PX, WIDTH_PX // CELL_PX
CLASS_SHARES = {"arch": 0.037, "tented": 0.029, "left": 0.338, "right": 0.317, "whorl": 0.279}  # SFinGe's manual
PERIOD_PX, PERIOD_SD_PX, PERIOD_RANGE_PX = 8.5, 0.9, (6.6, 10.8)  # 9.1 with what is added above loops, below deltas
SEED_SHARE = 0.0008  # of the cells; more seeds, more places where ridges from two of them do not fit: minutiae
GROWTH_STEPS = 24
FIRST_STEPS, FIRST_GAIN, GAIN = 5, 6.0, 2.0  # seeds are amplified until ridges are everywhere
FILTER_CELLS = 5  # radius of the filter: 2.7 standard deviations at the mean period
CONTROL_POINTS = 8
LOOP_SD, DELTA_SD, FIELD_SD = 0.12, 0.08, 0.05  # radians


@dataclass(frozen=True)
class Master:
    """The pattern of one finger. Positions are (row, column) of these arrays."""

    kind: str  # a key of CLASS_SHARES
    loops: Points  # (x, y) in px from the middle, y upwards
    deltas: Points
    angle: Floats  # (224, 192) direction of the ridges in radians, counter-clockwise from the x axis; 2 px apart
    period: Floats  # (224, 192) px
    ridges: Floats  # (448, 384) -1..1, ridges positive
    skin: Floats  # (448, 384) `ridges` with the pores and creases that every impression shows


def grow_master(seed: int, finger: int) -> Master:
    """Return the master of a finger, which depends on nothing but the arguments. About 0.12 s of one core."""
    rng = np.random.default_rng([seed, finger, 0])
    kind = str(rng.choice(list(CLASS_SHARES), p=list(CLASS_SHARES.values())))
    loops, deltas = draw_singular_points(rng, kind)
    angle = draw_orientation_field(rng, kind, loops, deltas)
    period = draw_period_field(rng, loops, deltas)
    ridges = enlarge(grow_ridges(rng, angle, period / np.float32(CELL_PX)), (HEIGHT_PX, WIDTH_PX))
    return Master(kind, loops, deltas, angle, period, ridges, _add_pores_and_creases(rng, ridges))


def draw_singular_points(rng: np.random.Generator, kind: str) -> tuple[Points, Points]:
    """Return the loops and the deltas of a class, (x, y) in px from the middle, y upwards."""
    if kind == "arch":
        return [], []
    if kind == "tented":
        x, y = rng.uniform(-10, 10), rng.uniform(-5, 15)
        return [(x, y)], [(x + rng.uniform(-6, 6), y - rng.uniform(45, 80))]
    if kind == "whorl":
        x, y = rng.uniform(-12, 12), rng.uniform(15, 40)
        loops = [(x, y), (x + rng.uniform(-18, 18), y - rng.uniform(18, 48))]
        return loops, [(x + side * rng.uniform(75, 115), y - rng.uniform(95, 130)) for side in (-1, 1)]
    x, y = rng.uniform(-12, 12), rng.uniform(0, 35)
    side = 1 if kind == "left" else -1  # a left loop has its delta on the right
    return [(x, y)], [(x + side * rng.uniform(60, 105), y - rng.uniform(75, 120))]


def draw_orientation_field(rng: np.random.Generator, kind: str, loops: Points, deltas: Points) -> Floats:
    """Return the direction of the ridges (224, 192) in radians, counter-clockwise from the x axis.

    Half of the sum of the angles seen from the loops minus those seen from the deltas (Sherlock and Monro, "A model
    for interpreting fingerprint topology", Pattern Recognition 26(7), 1993), each bent by a periodic piecewise linear
    function (Vizcaya and Gerhardt, "A nonlinear orientation model for global description of fingerprints", Pattern
    Recognition 29(7), 1996).
    """
    y, x = _make_grid()
    angle: Floats = FIELD_SD * draw_smooth_field(rng, (ROWS, COLUMNS), 90 / CELL_PX)
    if kind == "arch":
        bump = rng.uniform(0.7, 1.3) * np.exp(-(((y + rng.uniform(10, 40)) / rng.uniform(70, 100)) ** 2))
        angle -= np.arctan(bump * np.sin(np.pi * x / (WIDTH_PX * rng.uniform(0.7, 0.9))))
    for sign, sd, points in ((0.5, LOOP_SD, loops), (-0.5, DELTA_SD, deltas)):
        for point_x, point_y in points:
            angle += sign * _bend_angle(np.arctan2(y - point_y, x - point_x), sd * rng.standard_normal(CONTROL_POINTS))
    return angle


def _bend_angle(angle: Floats, offsets: NDArray[np.float64]) -> Floats:
    """Add offsets given at equally spaced angles from -pi on, linear between them."""
    position = (angle + pi) / (2 * pi) * len(offsets)
    added = np.interp(position, np.arange(len(offsets) + 1), [*offsets, offsets[0]])
    bent: Floats = angle + added.astype(np.float32)
    return bent


def draw_period_field(rng: np.random.Generator, loops: Points, deltas: Points) -> Floats:
    """Return the distance from ridge to ridge (224, 192) in px: larger above the loops and below the deltas."""
    y, _ = _make_grid()
    top = max((y for _, y in loops), default=20.0)
    bottom = min((y for _, y in deltas), default=-90.0)
    period = np.clip(rng.normal(PERIOD_PX, PERIOD_SD_PX), *PERIOD_RANGE_PX)
    larger = 0.16 / (1 + np.exp(-(y - top - 45) / 22)) + 0.12 / (1 + np.exp((y - bottom + 10) / 18))
    field: Floats = period * (1 + larger) * (1 + 0.05 * draw_smooth_field(rng, (ROWS, COLUMNS), 60 / CELL_PX))
    return field.astype(np.float32)


def _make_grid() -> tuple[Floats, Floats]:
    """Return y (224, 1) and x (1, 192) of the cells in px from the middle, y upwards."""
    y = (ROWS / 2 - 0.5 - np.arange(ROWS, dtype=np.float32)) * CELL_PX
    x = (np.arange(COLUMNS, dtype=np.float32) - COLUMNS / 2 + 0.5) * CELL_PX
    return y[:, None], x[None, :]


def grow_ridges(rng: np.random.Generator, angle: Floats, period_cells: Floats) -> Floats:
    """Return the ridges (224, 192) in -1..1: seeds, filtered again and again with the filter of each cell.

    The filters are even, so cells opposite each other share a weight: 48 products per cell and step. About 0.1 s.
    """
    offsets, weights, middle = _build_filters(angle, period_cells)
    r = FILTER_CELLS
    padded = np.zeros((ROWS + 2 * r, COLUMNS + 2 * r), dtype=np.float32)
    cells = padded[r : r + ROWS, r : r + COLUMNS]
    cells[:] = rng.random((ROWS, COLUMNS), dtype=np.float32) < SEED_SHARE
    views = [
        [padded[r + s * dy : r + s * dy + ROWS, r + s * dx : r + s * dx + COLUMNS] for s in (1, -1)]
        for dy, dx in offsets
    ]
    both = np.empty_like(middle)
    for step in range(GROWTH_STEPS):
        total = middle * cells
        for (one, other), weight in zip(views, weights, strict=True):
            np.add(one, other, out=both)
            both *= weight
            total += both
        cells[:] = np.tanh((FIRST_GAIN if step < FIRST_STEPS else GAIN) * total)
    return cells.copy()


def _build_filters(angle: Floats, period: Floats) -> tuple[list[tuple[int, int]], Floats, Floats]:
    """Return the offsets of half of the filter, their weights (K, 224, 192), and the middle's weight.

    A Gabor filter with zero mean, and with gain 1 at its own period and direction. Its envelope falls to 0.001 at 1.5
    periods from the middle, as SFinGe's does.
    """
    reach = range(-FILTER_CELLS, FILTER_CELLS + 1)
    offsets = [(dy, dx) for dy in reach for dx in reach if (dy, dx) > (0, 0) and np.hypot(dy, dx) < FILTER_CELLS + 0.5]
    inverse_variance = (8 * log(1000) / 9 / period**2).astype(np.float32)
    across_y = (2 * pi * np.cos(angle) / period).astype(np.float32)  # phase per cell; rows count downwards
    across_x = (2 * pi * np.sin(angle) / period).astype(np.float32)
    envelope = {d: np.exp(-d / 2 * inverse_variance) for d in {dy * dy + dx * dx for dy, dx in offsets}}
    windows = [envelope[dy * dy + dx * dx] for dy, dx in offsets]
    waves = np.stack([np.cos(dy * across_y + dx * across_x) for dy, dx in offsets])
    mass, mean = np.ones_like(period), np.ones_like(period)
    for window, wave in zip(windows, waves, strict=True):
        mass += 2 * window
        mean += 2 * window * wave
    mean /= mass
    weights = np.empty_like(waves)
    middle: Floats = np.float32(1) - mean
    gain = middle.copy()
    for weight, window, wave in zip(weights, windows, waves, strict=True):
        np.multiply(window, wave - mean, out=weight)
        gain += 2 * weight * wave
    weights /= gain
    middle /= gain
    return offsets, weights, middle


def _add_pores_and_creases(rng: np.random.Generator, ridges: Floats) -> Floats:
    """Return the ridges with sweat pores on their crests and up to five lines without ridges."""
    marks = Image.new("F", (WIDTH_PX, HEIGHT_PX))
    pen = ImageDraw.Draw(marks)
    for _ in range(rng.integers(0, 6)):
        start = rng.uniform((60, 60), (WIDTH_PX - 60, HEIGHT_PX - 60))
        turns = rng.uniform(0, pi) + np.cumsum(rng.normal(0, 0.2, size=rng.integers(3, 9)))
        line = start + 16 * np.cumsum(np.stack([np.cos(turns), np.sin(turns)], axis=1), axis=0)
        points = [(float(x), float(y)) for x, y in line]
        pen.line(points, fill=rng.uniform(1, 3), width=int(rng.integers(1, 4)))
    holes = np.array(marks)
    y, x = rng.integers(0, HEIGHT_PX, 3500), rng.integers(0, WIDTH_PX, 3500)
    holes[y, x] += np.where(ridges[y, x] > 0.6, rng.uniform(2, 9), 0)
    skin: Floats = ridges - ndimage.gaussian_filter(holes, 0.8, truncate=3)
    return skin


def draw_smooth_field(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> Floats:
    """Return a field of this shape with a standard deviation of about 0.7, smooth over `scale` rows or columns."""
    noise = rng.standard_normal((round(shape[0] / scale) + 3, round(shape[1] / scale) + 3), dtype=np.float32)
    return enlarge(noise, shape)


def enlarge(field: Floats, shape: tuple[int, int]) -> Floats:
    """Return the field with this shape, interpolated cubically."""
    return np.array(Image.fromarray(field).resize(shape[::-1], Image.Resampling.BICUBIC))
