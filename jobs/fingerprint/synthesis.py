"""Simple synthetic fingerprints, to try, test and time the job without real data.

The idea is SFinGe's (Cappelli, "Synthetic fingerprint generation", in Handbook of Fingerprint Recognition): loops and
deltas define an orientation field, filters along it grow ridges from noise, and each impression of that pattern differs
in placement, pressure, distortion and wear. There are no pores, scratches, sensor styles, or ridge periods that vary
over the finger. This does not replace real data: a model trained on it alone performs poorly on real prints.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainyard.files import create_folder

Floats = NDArray[np.float32]

IMPRESSIONS = 8
HEIGHT_PX, WIDTH_PX = 352, 320  # of an impression, at 500 dpi
CELL_PX = 2  # pitch of the grid on which the pattern grows: 4.5 cells per ridge are enough, at a quarter of the cost
ROWS, COLUMNS = 216, 192  # of that grid: 432 x 384 px, products of small primes for the FFT
COARSE_PX = 4  # pitch at which smooth fields are computed before they are enlarged
ORIENTATIONS = 16
GROWTH_STEPS = 6
CLASS_SHARES = {"arch": 0.037, "tented": 0.029, "left": 0.338, "right": 0.317, "whorl": 0.279}  # SFinGe's manual


def synthesize(raw: Path, *, count: int, seed: int) -> None:
    """Write `count` prints, 8 impressions of each finger, as `raw/<finger>_<impression>.png`.

    Equal arguments give equal files for any number of processes. Uses all available cores, about 0.25 s of one core
    per finger. The folder appears only when complete: it is written under another name and renamed.

    Args:
        raw: folder to create.
        count: number of images; if not a multiple of 8, the last finger has fewer.
    """
    with create_folder(raw) as folder:
        write = partial(_write_finger, folder, count, seed)
        fingers = range(-(-count // IMPRESSIONS))
        workers = min(len(os.sched_getaffinity(0)), -(-len(fingers) // 8))
        if workers > 1:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                list(pool.map(write, fingers, chunksize=4))
        else:
            list(map(write, fingers))


def _write_finger(folder: Path, count: int, seed: int, finger: int) -> None:
    impressions = min(IMPRESSIONS, count - finger * IMPRESSIONS)
    for number, image in zip(range(1, impressions + 1), generate_impressions(seed, finger), strict=False):
        path = folder / f"{finger + 1:05d}_{number}.png"
        Image.fromarray(image).save(path, compress_level=1)


def generate_impressions(seed: int, number: int) -> Iterator[NDArray[np.uint8]]:
    """Yield endless impressions of one finger, (352, 320) uint8, ridges dark, 500 dpi."""
    rng = np.random.default_rng([seed, number])
    pattern = grow_ridge_pattern(rng)
    bend_x, bend_y = 3 * draw_smooth_field(rng, 90), 3 * draw_smooth_field(rng, 90)
    finger = _Finger(pattern, bend_x, bend_y, aspect=rng.uniform(1.15, 1.5))
    while True:
        yield _draw_impression(rng, finger)


@dataclass(frozen=True)
class _Finger:
    """What all impressions of a finger share."""

    pattern: Floats  # (216, 192)
    bend_x: Floats  # (88, 80) px, varies the ridge period over the finger
    bend_y: Floats
    aspect: float  # height of the contact area over its width


def grow_ridge_pattern(rng: np.random.Generator) -> Floats:
    """Return (216, 192) float32 in -1..1, ridges positive: noise filtered repeatedly along the ridges.

    Applies one filter per orientation bin to the whole grid by FFT; each cell blends the two bins nearest to its
    orientation. Minutiae appear by themselves where ridges do not fit.
    """
    angle = draw_orientation_field(rng)
    period_cells = np.clip(rng.normal(9.1, 0.9), 7.5, 11.0) / CELL_PX
    bank = _build_filter_bank(period_cells)
    position = (angle / np.pi * ORIENTATIONS) % ORIENTATIONS
    lower = position.astype(np.int64) % ORIENTATIONS
    upper = (lower + 1) % ORIENTATIONS
    share = (position - np.floor(position)).astype(np.float32)
    pattern = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    for _ in range(GROWTH_STEPS):
        filtered = np.fft.irfft2(np.fft.rfft2(pattern) * bank, s=(ROWS, COLUMNS), axes=(1, 2))
        below = np.take_along_axis(filtered, lower[None], axis=0)[0]
        above = np.take_along_axis(filtered, upper[None], axis=0)[0]
        mixed = below + share * (above - below)
        pattern = np.tanh(1.5 * mixed / mixed.std()).astype(np.float32)
    return pattern


def _build_filter_bank(period_cells: float) -> Floats:
    """Return (16, 216, 97) gains: a Gaussian around the ridge frequency times one around the ridge normal."""
    fx, fy = np.fft.rfftfreq(COLUMNS)[None, :], -np.fft.fftfreq(ROWS)[:, None]  # y up
    radial = np.exp(-((np.hypot(fx, fy) * period_cells - 1) ** 2) / (2 * 0.2**2))
    normal = np.arctan2(fy, fx) - np.pi / 2  # the orientation of ridges with this frequency
    bins = np.arange(ORIENTATIONS)[:, None, None] * np.pi / ORIENTATIONS
    apart = (normal - bins + np.pi / 2) % np.pi - np.pi / 2
    bank: Floats = (radial * np.exp(-(apart**2) / (2 * np.radians(9) ** 2))).astype(np.float32)
    return bank


def draw_orientation_field(rng: np.random.Generator) -> Floats:
    """Return the ridge direction (216, 192) in radians, counter-clockwise from the x axis.

    Zero-pole model of Sherlock and Monro, "A model for interpreting fingerprint topology" (Pattern Recognition 26(7),
    1993): half of the sum of the angles seen from the loops minus those seen from the deltas.
    """
    y, x = np.mgrid[ROWS / 2 : -ROWS / 2 : -1, -COLUMNS / 2 : COLUMNS / 2] * CELL_PX
    kind = rng.choice(list(CLASS_SHARES), p=list(CLASS_SHARES.values()))
    angle: Floats = 0.05 * _enlarge(_draw_coarse_noise(rng, 90), COLUMNS, ROWS)
    if kind == "arch":
        bump = rng.uniform(0.7, 1.3) * np.exp(-(((y + rng.uniform(10, 40)) / rng.uniform(70, 100)) ** 2))
        angle -= np.arctan(bump * np.sin(np.pi * x / (COLUMNS * CELL_PX * rng.uniform(0.75, 0.95))))
        return angle
    loops, deltas = _draw_singular_points(rng, kind)
    for sign, points in ((0.5, loops), (-0.5, deltas)):
        for point_x, point_y in points:
            angle += sign * np.arctan2(y - point_y, x - point_x)
    return angle


Points = list[tuple[float, float]]


def _draw_singular_points(rng: np.random.Generator, kind: str) -> tuple[Points, Points]:
    """Return the loops and the deltas, (x, y) in px from the middle, y upwards."""
    x, y = rng.uniform(-12, 12), rng.uniform(5, 40)
    if kind == "tented":
        return [(x, y)], [(x + rng.uniform(-6, 6), y - rng.uniform(45, 80))]
    if kind == "whorl":
        loops = [(x, y), (x + rng.uniform(-18, 18), y - rng.uniform(18, 48))]
        return loops, [(x + side * rng.uniform(75, 115), y - rng.uniform(95, 130)) for side in (-1, 1)]
    side = 1 if kind == "left" else -1  # a left loop has its delta on the right
    return [(x, y)], [(x + side * rng.uniform(60, 105), y - rng.uniform(75, 120))]


def _draw_impression(rng: np.random.Generator, finger: _Finger) -> NDArray[np.uint8]:
    along, down = _draw_placement(rng)
    bent_x = along + finger.bend_x + 2 * draw_smooth_field(rng, 70)
    bent_y = down + finger.bend_y + 2 * draw_smooth_field(rng, 70)
    ridges = _sample_pattern(finger.pattern, _resize_to_full(bent_x), _resize_to_full(bent_y))
    contact = _resize_to_full(_draw_contact(rng, along, down, finger.aspect))
    wetness = _resize_to_full(rng.normal(0, 0.2) + 0.25 * draw_smooth_field(rng, 60))
    grain = _resize_to_full(rng.standard_normal((HEIGHT_PX // 3, WIDTH_PX // 3), dtype=np.float32))
    dryness = rng.uniform(0.1, 0.4)
    ink = _sigmoid(5 * (ridges + wetness + dryness * grain)) * _sigmoid(contact + 1.2 * grain)
    dark = rng.uniform(15, 70)
    paper = rng.uniform(190, 250) + 5 * _resize_to_full(draw_smooth_field(rng, 80))
    gray = np.clip(paper - (paper - dark) * ink, 0, 255).astype(np.uint8)
    image: NDArray[np.uint8] = gray & 0xFC  # 64 levels look the same and make the PNG a third smaller
    return image


def _draw_placement(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return (88, 80) coordinates along and down the finger, in px from its middle, for a random placement."""
    y, x = np.mgrid[0:HEIGHT_PX:COARSE_PX, 0:WIDTH_PX:COARSE_PX].astype(np.float32)
    turn, (shift_y, shift_x) = np.radians(rng.uniform(-20, 20)), rng.normal(0, 12, 2)
    y, x = y - HEIGHT_PX / 2 - shift_y, x - WIDTH_PX / 2 - shift_x
    return np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x


def _draw_contact(rng: np.random.Generator, along: Floats, down: Floats, aspect: float) -> Floats:
    """Return the contact pressure at each point, positive inside a ragged ellipse."""
    half_width = rng.uniform(95, 125)
    off_x, off_y = rng.normal(0, 8, 2)
    radius = np.hypot((along - off_x) / half_width, (down - off_y) / (half_width * aspect))
    firmness: Floats = 14 * (1 - radius) + 1.5 * draw_smooth_field(rng, 24)
    return firmness


def _sample_pattern(pattern: Floats, x_px: Floats, y_px: Floats) -> Floats:
    """Sample the pattern bilinearly at points in px from its middle, with its border repeated outside."""
    x = np.clip(x_px / CELL_PX + COLUMNS / 2, 0, COLUMNS - 1.001)
    y = np.clip(y_px / CELL_PX + ROWS / 2, 0, ROWS - 1.001)
    column, row = x.astype(np.int32), y.astype(np.int32)
    right, down = x - column, y - row
    flat, at = pattern.ravel(), row * COLUMNS + column
    upper: Floats = flat[at] * (1 - right) + flat[at + 1] * right
    lower: Floats = flat[at + COLUMNS] * (1 - right) + flat[at + COLUMNS + 1] * right
    return upper + down * (lower - upper)


def draw_smooth_field(rng: np.random.Generator, scale_px: float) -> Floats:
    """Return (88, 80) float32 with a standard deviation of about 0.7, one value per 4 px, smooth over `scale_px`."""
    return _enlarge(_draw_coarse_noise(rng, scale_px), WIDTH_PX // COARSE_PX, HEIGHT_PX // COARSE_PX)


def _draw_coarse_noise(rng: np.random.Generator, scale_px: float) -> Floats:
    shape = (round(HEIGHT_PX / scale_px) + 2, round(WIDTH_PX / scale_px) + 2)
    return rng.standard_normal(shape, dtype=np.float32)


def _enlarge(field: Floats, width: int, height: int) -> Floats:
    return np.array(Image.fromarray(field.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC))


def _resize_to_full(field: Floats) -> Floats:
    return _enlarge(field, WIDTH_PX, HEIGHT_PX)


def _sigmoid(x: Floats) -> Floats:
    y: Floats = 0.5 + 0.5 * np.tanh(0.5 * x)
    return y
