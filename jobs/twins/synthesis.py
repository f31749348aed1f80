"""Draw synthetic twin faces, to try, test and time the job without real data.

Twins share a genome: shape, colours, skin texture and some moles. Each twin has individual marks: other moles, and
slightly different brows, hairline and asymmetry. Every image then differs in pose, light, expression, focus and noise.
These are drawings. They show that the code learns and let its parts be ranked; a result on them says nothing about
real twins.
"""

import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from trainyard.errors import UserError
from trainyard.files import create_folder

Floats = NDArray[np.floating]

IMAGES_PER_PERSON = 24
"""A list of all pairs then encodes each image 2 * 24 - 1 = 47 times, close to the 54 of ND-TWINS."""

IMAGES_PER_FAMILY = 2 * IMAGES_PER_PERSON
SIDE_PX = 96
DIFFICULTY = 0.1
DATASET, PAIRS = "dataset_infor.json", "twin_pairs_infor.json"

TRAITS: dict[str, tuple[float, float, float]] = {
    # mean, spread over families, spread between twins at difficulty 0; lengths in half image sides
    "face_width": (0.6, 0.06, 0.0),
    "face_height": (0.76, 0.06, 0.0),
    "jaw": (2.3, 0.35, 0.0),  # exponent of the outline: 2 is an ellipse, more is squarer
    "skin": (0.5, 0.35, 0.0),  # 0 pale, 1 dark
    "hair": (0.5, 0.45, 0.0),  # 0 black, 1 fair
    "hairline": (-0.42, 0.08, 0.03),
    "eye_apart": (0.25, 0.03, 0.0),
    "eye_y": (-0.08, 0.05, 0.0),
    "eye_width": (0.12, 0.02, 0.0),
    "eye_open": (0.055, 0.012, 0.0),
    "iris": (0.5, 0.45, 0.0),  # 0 brown, 1 blue
    "brow_y": (-0.24, 0.03, 0.015),
    "brow_thick": (0.035, 0.012, 0.008),
    "brow_tilt": (0.1, 0.15, 0.12),
    "nose_length": (0.25, 0.05, 0.0),
    "nose_width": (0.1, 0.025, 0.0),
    "mouth_y": (0.42, 0.035, 0.0),
    "mouth_width": (0.2, 0.04, 0.0),
    "lip": (0.045, 0.013, 0.0),
    "asymmetry": (0.0, 0.01, 0.02),  # how much higher the right brow and eye are
}
COLOURS = {  # RGB at 0 and at 1
    "skin": ((0.95, 0.8, 0.7), (0.42, 0.27, 0.2)),
    "hair": ((0.08, 0.06, 0.05), (0.75, 0.58, 0.35)),
    "iris": ((0.3, 0.18, 0.1), (0.35, 0.5, 0.7)),
}


def synthesize(raw: Path, *, count: int, seed: int, difficulty: float = DIFFICULTY) -> None:
    """Write `count` images, 24 per person, with `dataset_infor.json` and `twin_pairs_infor.json`.

    Equal arguments give equal files, whatever the number of processes. Takes about 5 ms of one core per image, on all
    cores that this process may use. The folder is written under another name and renamed, so it is always complete.

    Args:
        raw: folder to create, with images `raw/<person>/<number>.jpg`.
        count: number of images, even; if not a multiple of 48, the last family has fewer.
        difficulty: 0: twins differ as much as these drawings allow; 1: they do not differ at all.

    Raises:
        UserError: `count` is odd.
    """
    if count < 2 or count % 2:
        raise UserError(f"data.synthetic={count}: expected an even number, because twins come in pairs. Use 4800.")
    with create_folder(raw) as folder:
        write = partial(_write_family, folder, count, seed, difficulty)
        families = range(-(-count // IMAGES_PER_FAMILY))
        workers = min(len(os.sched_getaffinity(0)), -(-len(families) // 8))
        if workers > 1:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                people = list(pool.map(write, families, chunksize=2))
        else:
            people = list(map(write, families))
        listing = {person: files for family in people for person, files in family.items()}
        (folder / DATASET).write_text(json.dumps(listing, indent=1))
        (folder / PAIRS).write_text(json.dumps([sorted(family) for family in people], indent=1))


def _write_family(folder: Path, count: int, seed: int, difficulty: float, family: int) -> dict[str, list[str]]:
    """Write the images of two twins; return the files of each."""
    number = min(IMAGES_PER_FAMILY, count - family * IMAGES_PER_FAMILY) // 2
    listing = {}
    for twin in range(2):
        person = f"{10 * (family + 1) + twin:05d}"
        (folder / person).mkdir()
        listing[person] = [f"{person}/{i:02d}.jpg" for i in range(number)]
        for name, image in zip(listing[person], draw_images(seed, family, twin, difficulty=difficulty), strict=False):
            (folder / name).write_bytes(image)
    return listing


def draw_images(seed: int, family: int, twin: int, *, difficulty: float = DIFFICULTY) -> Iterator[bytes]:
    """Yield images of one person without end: JPEG, 96 x 96 pixels, RGB."""
    face = draw_face(seed, family, twin, difficulty)
    rng = np.random.default_rng([seed, family, 2 + twin])
    while True:
        data = io.BytesIO()
        Image.fromarray(_draw_photo(rng, face)).save(data, "JPEG", quality=92)
        yield data.getvalue()


@dataclass(frozen=True)
class Mole:
    """A dark spot: position and radius in half image sides, darkness in 0..1."""

    x: float
    y: float
    radius: float
    darkness: float


@dataclass(frozen=True)
class Face:
    """Traits that all images of one person share."""

    traits: dict[str, float]
    moles: list[Mole]
    texture: Floats  # (12, 12), standard deviation 1: unevenness of the skin, the same for twins


def draw_face(seed: int, family: int, twin: int, difficulty: float) -> Face:
    """Draw the genome of a family and the individual marks of one twin."""
    shared = np.random.default_rng([seed, family, 0])
    own = np.random.default_rng([seed, family, 1, twin])
    strength = 1 - difficulty
    traits = {}
    for name, (mean, family_spread, twin_spread) in TRAITS.items():
        traits[name] = mean + family_spread * shared.normal() + strength * twin_spread * own.normal()
    texture = shared.standard_normal((12, 12), dtype=np.float32)
    moles = _draw_moles(shared, 2, 1.0) + _draw_moles(own, 6, strength)
    return Face(traits, moles, texture)


def _draw_moles(rng: np.random.Generator, number: int, strength: float) -> list[Mole]:
    return [
        Mole(
            x=0.44 * radius * np.cos(angle),
            y=0.1 + 0.5 * radius * np.sin(angle),
            radius=rng.uniform(0.05, 0.09),
            darkness=strength * rng.uniform(0.7, 1.0),
        )
        for radius, angle in zip(np.sqrt(rng.uniform(size=number)), rng.uniform(0, 2 * np.pi, number), strict=True)
    ]


def _draw_photo(rng: np.random.Generator, face: Face) -> NDArray[np.uint8]:
    """Draw one image (96, 96, 3) uint8 of a face with random pose, light and expression."""
    x, y = _draw_pose(rng)
    canvas = np.empty((SIDE_PX, SIDE_PX, 3), np.float32)
    canvas[:] = rng.uniform(0.2, 0.9) + rng.normal(0, 0.04, 3)
    _paint_head(canvas, face, x, y)
    yaw = rng.uniform(-1, 1)
    _paint_features(canvas, face, x + 0.06 * yaw * (1 - x**2 - y**2), y, smile=rng.uniform(-1, 1))
    light = 1 + rng.uniform(-0.3, 0.3) * x + rng.uniform(-0.2, 0.2) * y
    canvas *= light[..., None] * rng.uniform(0.8, 1.2) * (1 + rng.normal(0, 0.02, 3))
    blurred = Image.fromarray(_to_uint8(canvas)).filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.9)))
    return _to_uint8(np.asarray(blurred) / 255 + rng.normal(0, 0.02, canvas.shape))


def _draw_pose(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw a pose: (96, 96) x and y in face coordinates, (0, 0) between nose and eyes, 1 is half an image side."""
    row, column = (np.mgrid[0:SIDE_PX, 0:SIDE_PX].astype(np.float32) + 0.5) / (SIDE_PX / 2) - 1
    turn, scale = np.radians(rng.uniform(-6, 6)), rng.uniform(0.94, 1.06)
    shift_x, shift_y = rng.uniform(-0.05, 0.05, 2)
    column, row = (column - shift_x) / scale, (row - shift_y) / scale
    return np.cos(turn) * column + np.sin(turn) * row, np.cos(turn) * row - np.sin(turn) * column


def _paint_head(canvas: Floats, face: Face, x: Floats, y: Floats) -> None:
    t = face.traits
    width, height = t["face_width"], t["face_height"]
    hair, skin = _choose_colour(t, "hair"), _choose_colour(t, "skin")
    _paint(canvas, _cover_ellipse(x, y + 0.12, 1.16 * width, 1.02 * height), hair)
    for side in (-1, 1):
        _paint(canvas, _cover_ellipse(x - side * width, y - 0.02, 0.08, 0.16), 0.92 * skin)
    outline = (np.abs(x / width) ** t["jaw"] + np.abs(y / height) ** t["jaw"]) ** (1 / t["jaw"])
    resized = Image.fromarray(face.texture).resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC)
    texture = np.asarray(resized)[..., None]
    _paint(canvas, _antialias_edge(width * (1 - outline)), skin * (1 + 0.04 * texture))
    crown = _antialias_edge(width * (1 - outline)) * _antialias_edge(t["hairline"] - y - 0.25 * x**2)
    _paint(canvas, crown, hair)


def _paint_features(canvas: Floats, face: Face, x: Floats, y: Floats, *, smile: float) -> None:
    t = face.traits
    skin = _choose_colour(t, "skin")
    for mole in face.moles:
        distance = ((x - mole.x) ** 2 + (y - mole.y) ** 2) / mole.radius**2
        _paint(canvas, 0.75 * mole.darkness * np.exp(-(distance**2)), 0.35 * skin)
    for side in (-1, 1):
        rise = t["asymmetry"] * side
        eye_x, eye_y = x - side * t["eye_apart"], y - t["eye_y"] + rise
        _paint(canvas, _cover_ellipse(eye_x, eye_y, t["eye_width"], t["eye_open"] * (1 - 0.15 * smile)), 0.93)
        _paint(canvas, _cover_ellipse(eye_x, eye_y, 0.05, 0.05), _choose_colour(t, "iris"))
        _paint(canvas, _cover_ellipse(eye_x, eye_y, 0.02, 0.02), 0.05)
        tilted = y - t["brow_y"] + rise - t["brow_tilt"] * side * eye_x
        _paint(canvas, _cover_ellipse(eye_x, tilted, 0.15, t["brow_thick"]), 0.8 * _choose_colour(t, "hair"))
    tip = t["eye_y"] + t["nose_length"]
    _paint(canvas, 0.5 * _cover_ellipse(x - 0.03, y - tip + 0.1, 0.03, 0.14), 0.75 * skin)
    for side in (-1, 1):
        _paint(canvas, 0.8 * _cover_ellipse(x - side * t["nose_width"] / 2, y - tip, 0.03, 0.02), 0.4 * skin)
    curve = y - t["mouth_y"] + 0.8 * smile * x**2
    red = skin * np.array([0.95, 0.6, 0.6], np.float32)
    _paint(canvas, _cover_ellipse(x, curve, t["mouth_width"] * (1 + 0.1 * smile), t["lip"]), red)
    _paint(canvas, _cover_ellipse(x, curve, 0.95 * t["mouth_width"], 0.012), 0.5 * red)


def _paint(canvas: Floats, coverage: Floats, colour: Floats | float) -> None:
    canvas += coverage[..., None] * (colour - canvas)


def _cover_ellipse(x: Floats, y: Floats, width: float, height: float) -> Floats:
    """Return the share of each pixel covered by an ellipse around (0, 0)."""
    width, height = max(width, 1e-3), max(height, 1e-3)
    return _antialias_edge(min(width, height) * (1 - np.hypot(x / width, y / height)))


def _antialias_edge(inside: Floats) -> Floats:
    """Turn a distance from an edge, positive inside, into coverage in 0..1 that changes over about one pixel."""
    return np.clip(0.5 + inside * SIDE_PX / 2, 0, 1)


def _choose_colour(traits: dict[str, float], name: str) -> Floats:
    low, high = COLOURS[name]
    share = min(max(traits[name], 0.0), 1.0)
    return (1 - share) * np.array(low, np.float32) + share * np.array(high, np.float32)


def _to_uint8(image: Floats) -> NDArray[np.uint8]:
    return np.clip(255 * image, 0, 255).astype(np.uint8)
