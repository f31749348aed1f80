"""Turns a folder of images and one of masks, with the same file names, into samples."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from trainyard.data.labelled import assign_sets
from trainyard.data.raw import IMAGES, list_named
from trainyard.data.shards import BadRecord, Loaded, Mask, Sample
from trainyard.data.write_shard import read_image

from .config import Config


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every image of `raw/images`, with the mask of this name in `raw/masks`, which is a PNG file.

    Records: `image`, and `mask`, the class of each pixel. Column: `set` (text).
    """
    images = dict(list_named(raw / "images", IMAGES))
    sets = assign_sets(dict.fromkeys(images, ""), config.packing)
    for key, path in images.items():
        mask = (raw / "masks" / key).with_suffix(".png")
        read = partial(load, path, mask, len(config.packing.classes))
        yield Sample(key, read, {"set": sets[key]}, source=path)


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image in a folder and below it, or the file `raw` itself."""
    for key, path in list_named(raw, IMAGES):
        yield Sample(key, partial(load, path), source=path)


def load(path: Path, mask: Path | None = None, classes: int = 0) -> Loaded:
    """Read one image and its mask.

    Raises:
        BadRecord: one of them is not a complete image, or the mask has other values than those of the classes.
    """
    if mask is None:
        return {"image": read_image(path)[0]}
    found = np.asarray(read_image(mask)[1])
    if found.ndim != 2 or found.max() >= classes:
        raise BadRecord(f"{mask}: {found.shape} up to {found.max()}; expected one of {classes} classes for each pixel.")
    return {"image": read_image(path)[0], "mask": Mask(found.astype(np.uint8))}


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Draw `count` noisy images of a disc and a bar, with their masks."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:48, :64]
    for i in range(count):
        across, down, radius, row = rng.integers((12, 12, 5, 4), (52, 36, 11, 44))
        mask = np.where(abs(y - row) < 3, 2, 0)
        mask[np.hypot(x - across, y - down) < radius] = 1
        pixels = rng.normal(np.array([70, 170, 120])[mask], 25).clip(0, 255)
        for folder, values in (("images", pixels), ("masks", mask)):
            (raw / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(raw / folder / f"{i:05d}.png")
