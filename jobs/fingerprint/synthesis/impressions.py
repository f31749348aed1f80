"""Impressions: how a finger is laid, turned, pressed and bent onto a scanner, and what of its ridges becomes visible.

The displacement is known: each pixel of an impression remembers from where on the master it comes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage  # type: ignore[import-untyped]

from .masters import HEIGHT_PX as MASTER_HEIGHT_PX
from .masters import WIDTH_PX as MASTER_WIDTH_PX
from .masters import Floats, Master, draw_smooth_field, enlarge
from .scanners import SCANNERS, draw_row_shifts, scan

HEIGHT_PX, WIDTH_PX = 352, 320  # at 500 dpi
COARSE_PX = 4  # pitch at which smooth fields are computed before they are enlarged
COARSE = (HEIGHT_PX // COARSE_PX, WIDTH_PX // COARSE_PX)
TURN_SD_DEG, TURN_MOST_DEG = 8, 30  # BLPOC searches 24 degrees between two prints
SHIFT_SD_PX = (26, 18)  # down, right
BEND_SD_PX, BEND_SCALE_PX = (0.5, 2.0), 120  # from the weakest to the strongest impression
STRENGTH_POWER = 1.5  # of a uniform number: most impressions are bent little
STRETCH_SD, SLIP_SD_PX, SLIP_SD_DEG = 0.025, 2.5, 2.0
PARTIAL_SHARE = 0.2  # of the impressions, that show the tip or a side
OWN_SCANNER_SHARE = 0.7  # of the impressions of a finger that come from one scanner


@dataclass(frozen=True)
class Impression:
    """One print. All arrays are (352, 320)."""

    image: NDArray[np.uint8]  # ridges dark, 500 dpi
    source_y: Floats  # row of the master that the pixel shows
    source_x: Floats  # column
    contact: NDArray[np.bool_]  # where the finger touched the scanner
    scanner: str  # a key of SCANNERS

    def look_up_source(
        self, y: NDArray[np.float64], x: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (row, column) on the master of points of the impression; outside of it, of its border."""
        rows, columns = (
            ndimage.map_coordinates(part, (y, x), output=np.float64, order=1, mode="nearest")
            for part in (self.source_y, self.source_x)
        )
        return rows, columns


@dataclass(frozen=True)
class Touch:
    """How a finger touches a scanner, whatever its ridges are. All arrays are (352, 320)."""

    source_y: Floats  # as of `Impression`
    source_x: Floats
    firmness: Floats  # positive where the finger touched the scanner
    scanner: str
    wetness: float
    rng: np.random.Generator  # what the ink and the scanner are drawn from


@dataclass(frozen=True)
class _Habit:
    """Properties that all impressions of a finger share, besides its ridges."""

    half_width: float  # px, of the contact area
    aspect: float  # height of that area over its width
    wetness: float
    scanner: str


def draw_impression(master: Master, seed: int, finger: int, number: int) -> Impression:
    """Return impression `number`, from 1 on, of a finger; it depends on nothing but the arguments. About 30 ms."""
    touch = draw_touch(seed, finger, number)
    skin = sample(master.skin, touch.source_y, touch.source_x)
    ink = draw_ink(touch.rng, skin, touch.firmness, touch.wetness)
    image = scan(touch.rng, ink, touch.firmness, touch.scanner)
    return Impression(image, touch.source_y, touch.source_x, touch.firmness > 0, touch.scanner)


def draw_touch(seed: int, finger: int, number: int) -> "Touch":
    """Return how impression `number`, from 1 on, of a finger was made, for which its master need not be grown."""
    assert number >= 1  # 0 is the master's
    habit = _draw_habit(np.random.default_rng([seed, finger, 0, 1]))
    rng = np.random.default_rng([seed, finger, number])
    scanner = habit.scanner if rng.random() < OWN_SCANNER_SHARE else str(rng.choice(SCANNERS))
    y, x = draw_placement(rng)
    if scanner == "sweep":
        x = x + draw_row_shifts(rng, HEIGHT_PX)[:, None]
    firmness = draw_contact(rng, y, x, habit)
    source_y, source_x = draw_displacement(rng, y, x)
    within = np.minimum(MASTER_HEIGHT_PX / 2 - np.abs(source_y), MASTER_WIDTH_PX / 2 - np.abs(source_x))
    firmness = np.minimum(firmness, (within - 10) / 4)  # no finger where the master ends
    source_y += (MASTER_HEIGHT_PX - 1) / 2
    source_x += (MASTER_WIDTH_PX - 1) / 2
    return Touch(source_y, source_x, firmness, scanner, habit.wetness, rng)


def _draw_habit(rng: np.random.Generator) -> _Habit:
    return _Habit(
        half_width=float(np.clip(rng.normal(137, 12), 105, 165)),
        aspect=float(rng.uniform(1.2, 1.5)),
        wetness=float(rng.normal(0, 0.2)),
        scanner=str(rng.choice(SCANNERS)),
    )


def draw_placement(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return where on the finger each pixel is, (352, 320) px down and right of its middle, for a stiff finger."""
    turn = np.radians(np.clip(rng.normal(0, TURN_SD_DEG), -TURN_MOST_DEG, TURN_MOST_DEG))
    shift_y, shift_x = rng.normal(0, SHIFT_SD_PX[0]), rng.normal(0, SHIFT_SD_PX[1])
    y = (np.arange(HEIGHT_PX) - (HEIGHT_PX - 1) / 2 - shift_y).astype(np.float32)[:, None]
    x = (np.arange(WIDTH_PX) - (WIDTH_PX - 1) / 2 - shift_x).astype(np.float32)[None, :]
    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
    return cos * y - sin * x, sin * y + cos * x


def draw_displacement(rng: np.random.Generator, y: Floats, x: Floats) -> tuple[Floats, Floats]:
    """Return the points of the finger that a pressed finger shows instead of (y, x), in px from its middle.

    A smooth random field; a stretch, as of more or less pressure; and a finger that sticks in its middle and slips
    around it (Cappelli, Maio and Maltoni, "Modelling plastic distortion in fingerprint images", ICAPR 2001): outside
    of an ellipse it is moved and turned as a whole, and between there and the middle ever less.
    """
    strength = rng.uniform() ** STRENGTH_POWER
    stretch = 1 + rng.normal(0, STRETCH_SD)
    sd = BEND_SD_PX[0] + strength * (BEND_SD_PX[1] - BEND_SD_PX[0])
    bend_y, bend_x = (
        sd / 0.7 * enlarge(draw_smooth_field(rng, COARSE, BEND_SCALE_PX / COARSE_PX), y.shape) for _ in "yx"
    )
    slip_y, slip_x = strength * rng.normal(0, SLIP_SD_PX), strength * rng.normal(0, SLIP_SD_PX)
    turn = strength * float(np.radians(rng.normal(0, SLIP_SD_DEG)))
    radius = np.hypot((y - rng.normal(0, 20)) / 1.3, x - rng.normal(0, 20))
    brake = 0.5 - 0.5 * np.cos(np.pi * np.clip((radius - 35) / 90, 0, 1))
    moved_y = stretch * y + bend_y + brake * (slip_y + turn * x)
    moved_x = stretch * x + bend_x + brake * (slip_x - turn * y)
    return moved_y.astype(np.float32), moved_x.astype(np.float32)


def draw_contact(rng: np.random.Generator, y: Floats, x: Floats, habit: _Habit) -> Floats:
    """Return how firmly each pixel is touched: positive inside of a ragged ellipse, about 14 in its middle."""
    half_width = habit.half_width * rng.uniform(0.85, 1.08)
    aspect = habit.aspect * rng.uniform(0.92, 1.05)
    off_y, off_x = rng.normal(6, 12), rng.normal(0, 8)
    if rng.random() < PARTIAL_SHARE:  # the tip, or a side of the finger alone
        off_y, off_x = off_y + rng.normal(0, 60), off_x + rng.normal(0, 35)
    radius = np.sqrt(((x - off_x) / half_width) ** 2 + ((y - off_y) / (half_width * aspect)) ** 2)
    ragged = enlarge(draw_smooth_field(rng, COARSE, 24 / COARSE_PX), y.shape)
    firmness: Floats = (14 * (1 - radius) + ragged).astype(np.float32)
    return firmness


def draw_ink(rng: np.random.Generator, skin: Floats, firmness: Floats, wetness: float) -> Floats:
    """Return how dark each pixel is, 0..1: a soft threshold of the ridges, lower where the finger is wet.

    Around it the finger touches less, so ridges are thin there and break up. Noise at the scale of ridges makes them
    granular, the more so the drier the finger; a few impressions have a patch that is wet or worn.
    """
    wet = (wetness + rng.normal(0, 0.25)) + 0.4 * draw_smooth_field(rng, COARSE, 60 / COARSE_PX)
    for chance, low, high in ((0.25, -2.5, -0.8), (0.2, 0.5, 1.3)):
        if rng.random() < chance:
            wet += rng.uniform(low, high) * _draw_bump(rng)
    grain = enlarge(rng.standard_normal((HEIGHT_PX // 3, WIDTH_PX // 3), dtype=np.float32), skin.shape)
    grain += 0.5 * enlarge(rng.standard_normal((HEIGHT_PX // 7, WIDTH_PX // 7), dtype=np.float32), skin.shape)
    dryness = rng.uniform(0.25, 0.85)
    level = skin + enlarge(wet.astype(np.float32), skin.shape) + dryness * grain
    level += np.clip(0.15 * (firmness - 4), -1, 0)
    for _ in range(rng.integers(0, 3)):
        level -= _draw_scratch(rng)
    return _sigmoid(5 * level) * _sigmoid(2 * firmness + 1.5 * grain)


def _draw_bump(rng: np.random.Generator) -> Floats:
    """Return a smooth patch, 1 in its middle, on the coarse grid."""
    y, x = (np.arange(side, dtype=np.float32) * COARSE_PX for side in COARSE)
    middle_y, middle_x = rng.uniform(0.25, 0.75) * HEIGHT_PX, rng.uniform(0.25, 0.75) * WIDTH_PX
    height, width = rng.uniform(20, 60), rng.uniform(20, 60)
    bump: Floats = np.exp(-(((y - middle_y) / height) ** 2))[:, None] * np.exp(-(((x - middle_x) / width) ** 2))
    return bump.astype(np.float32)


def _draw_scratch(rng: np.random.Generator) -> Floats:
    """Return a straight bright line across the whole image, 2 in its middle."""
    turn = rng.uniform(0, np.pi)
    y = (np.arange(HEIGHT_PX) - rng.uniform(0.2, 0.8) * HEIGHT_PX) * np.cos(turn)
    x = (np.arange(WIDTH_PX) - rng.uniform(0.2, 0.8) * WIDTH_PX) * np.sin(turn)
    scratch: Floats = np.maximum(2 - 1.3 * np.abs(y.astype(np.float32)[:, None] + x.astype(np.float32)[None, :]), 0)
    return scratch


def sample(field: Floats, y: Floats, x: Floats) -> Floats:
    """Return a field at (row, column), bilinearly, with its border repeated outside."""
    height, width = field.shape
    y, x = np.clip(y, 0, height - 1.001), np.clip(x, 0, width - 1.001)
    row, column = y.astype(np.int32), x.astype(np.int32)
    down, right = y - row.astype(np.float32), x - column.astype(np.float32)
    flat, at = field.ravel(), row * width + column
    upper, lower = flat[at], flat[at + width]
    upper += right * (flat[at + 1] - upper)
    lower += right * (flat[at + width + 1] - lower)
    sampled: Floats = upper + down * (lower - upper)
    return sampled


def _sigmoid(x: Floats) -> Floats:
    y: Floats = 0.5 + 0.5 * np.tanh(0.5 * x)
    return y
