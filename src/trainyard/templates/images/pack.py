"""Turns a folder of images, with a sub-folder for each class, into samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from trainyard.data.labelled import LabelledFile, assign_sets, find_class, find_sets, list_labelled_files
from trainyard.data.raw import IMAGES, list_named
from trainyard.data.shards import Loaded, Sample
from trainyard.data.write_shard import read_image

from .config import Config

CLASSES = "classes"


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return the names of the classes, a JSON list: the model needs them where no data set is at hand."""
    return {CLASSES: json.dumps(sorted({file.label for file in list_labelled_files(raw, IMAGES)}))}


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every image of `raw/CLASS/`, or of `raw/train/CLASS/`, `raw/val/CLASS/` and `raw/test/CLASS/`.

    Record: `image`. Columns: `label`, the number of its class, and `set` (text).
    """
    files = list_labelled_files(raw, IMAGES)
    labels, stated = {file.key: file.label for file in files}, {file.key: file.set for file in files}
    sets = assign_sets(labels, config.packing, stated=stated)
    yield from _make_samples(files, sorted({file.label for file in files}), sets)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the samples of a labelled folder to evaluate, all in "test", and the artifacts of the run."""
    files = list_labelled_files(raw, IMAGES)
    return _make_samples(files, json.loads(artifacts[CLASSES]), {file.key: "test" for file in files}), artifacts


def _make_samples(files: Sequence[LabelledFile], classes: Sequence[str], sets: Mapping[str, str]) -> Iterator[Sample]:
    for file in files:
        yield Sample(
            key=file.key,
            load=partial(load, file.path),
            columns={"label": find_class(file, classes), "set": sets[file.key]},
            source=file.path,
        )


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image in a folder and below it, or the file `raw` itself."""
    for key, path in list_named(raw, IMAGES):
        yield Sample(key, partial(load, path), source=path)


def load(path: Path, artifacts: Mapping[str, str] | None = None) -> Loaded:
    """Read one image file.

    Raises:
        BadRecord: it is not a complete image.
    """
    return {"image": read_image(path)[0]}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test", as packed."""
    return find_sets(columns, vocabulary)


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Draw `count` images of rings, crosses and bars: the smoke test trains on them."""
    rng = np.random.default_rng(seed)
    names = ("bar", "cross", "ring")
    y, x = np.mgrid[-1:1:40j, -1:1:40j]
    for i in range(count):
        name = names[i % len(names)]
        across, along = x - rng.uniform(-0.3, 0.3), y - rng.uniform(-0.3, 0.3)
        bars = np.abs(across) < 0.15, np.abs(along) < 0.15
        ring = np.abs(np.hypot(across, along) - 0.45) < 0.15
        shape = {"bar": bars[0], "cross": bars[0] | bars[1], "ring": ring}[name]
        pixels = rng.normal(90, 20, shape.shape) + 110 * shape
        path = raw / name / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
