"""Images of stripes: `<direction>-<number>.png`."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from families.stripes.config import Config
from PIL import Image

from trainyard.data.raw import IMAGES, list_named
from trainyard.data.shards import BadRecord, Loaded, Sample
from trainyard.files import create_folder

DIRECTIONS = 4


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every PNG or JPEG of the folder."""
    for path in sorted(raw.iterdir()):
        yield Sample(path.name, partial(load, path), source=path)


def fit_artifacts(raw: Path, config: Config) -> dict[str, str]:
    """Return the directions in the data."""
    return {"directions": " ".join(sorted({path.name.split("-")[0] for path in raw.iterdir()}))}


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image of the folder, whatever its name, or the file `raw` itself."""
    assert artifacts["directions"]
    for key, path in list_named(raw, IMAGES):
        yield Sample(key, partial(load_image, path), source=path)


def load_image(path: Path) -> Loaded:
    """Read an image without its label."""
    return {"image": path.read_bytes()}


def load(path: Path, artifacts: Mapping[str, str]) -> Loaded:
    """Read one image.

    Raises:
        BadRecord: the file is not an image.
    """
    try:
        with Image.open(path) as image:
            image.load()
    except OSError as error:
        raise BadRecord(str(error)) from None
    direction = path.name.split("-")[0]
    assert direction in artifacts["directions"].split()
    return {"image": path.read_bytes(), "direction": direction}


def synthesize(raw: Path, *, count: int, seed: int) -> None:
    """Draw `count` images of 24 x 24 px, cycling through the directions."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:24, :24]
    with create_folder(raw) as folder:
        for i in range(count):
            angle = np.pi * (i % DIRECTIONS) / DIRECTIONS
            wave = np.sin(0.9 * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 6))
            pixels = np.clip(128 + 80 * wave + rng.normal(0, 20, wave.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"d{i % DIRECTIONS}-{i:04d}.png")


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Use every fifth sample for validation and every fifth for testing."""
    ids = np.arange(len(columns["direction"]))
    return {"train": ids[ids % 5 > 1], "val": ids[ids % 5 == 0], "test": ids[ids % 5 == 1]}
