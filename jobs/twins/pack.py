"""Turn folders of twin faces into samples with evaluation pairs."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from trainyard.data.raw import IMAGES, list_named
from trainyard.data.shards import BadRecord, Loaded, Sample
from trainyard.data.write_shard import read_image

from . import protocol
from .config import Config, PackingSettings
from .listing import SETS, Person, read_people
from .synthesis import synthesize

__all__ = ["list_labelled", "samples", "splits", "synthesize", "unlabelled"]


RAW_FILES = (
    'images in a folder for each person, such as ann/1.jpg, and twin_pairs_infor.json with [["ann", "bea"], ...]'
)


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every image that a raw folder lists; `listing.read_people` describes the accepted layouts.

    Columns: `person`, `family` and `set` (text), `number` (the image's index in the listing) and `pairs`, its
    evaluation pairs in the format of `protocol.format_pairs`; empty in the training set.
    """
    yield from _make_samples(read_people(raw, config.packing), config.packing)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the samples of a folder to evaluate, all in "test", and the artifacts with which the run reads them."""
    return _make_samples(read_people(raw, config.packing, all_test=True), config.packing), artifacts


def _make_samples(people: Sequence[Person], rule: PackingSettings) -> Iterator[Sample]:
    rows = [(person, image) for person in people for image in person.images]
    pairs = [""] * len(rows)
    for name in SETS[1:]:
        numbers = [i for i, (person, _) in enumerate(rows) if person.set == name]
        pairs_by_image = protocol.draw_pairs(
            [rows[i][0].name for i in numbers],
            [rows[i][0].family for i in numbers],
            strangers=rule.strangers,
            seed=rule.seed,
        )
        for i, partners in zip(numbers, pairs_by_image, strict=True):
            pairs[i] = protocol.format_pairs([(kind, numbers[j]) for kind, j in partners])
    for i, (person, image) in enumerate(rows):
        yield Sample(
            key=image.name,
            load=partial(load, image.path, rule.min_side_px, rule.aspect_max),
            columns={
                "person": person.name,
                "family": person.family,
                "set": person.set,
                "number": i,
                "pairs": pairs[i],
            },
            source=image.path,
        )


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every image in a folder and below it, or the file `raw` itself, of whomever it is."""
    rule = config.packing
    for key, path in list_named(raw, IMAGES):
        yield Sample(key, partial(load, path, rule.min_side_px, rule.aspect_max), source=path)


def load(path: Path | None, min_side_px: int, aspect_max: float) -> Loaded:
    """Read one image.

    Raises:
        BadRecord: the file is missing, is not a complete image of a known format, or does not have the size of a face
            crop.
    """
    if path is None:
        raise BadRecord("listed, but there is no such file")
    data, image = read_image(path)
    short, long = sorted(image.size)
    if short < min_side_px or long > aspect_max * short:
        raise BadRecord(
            f"{image.width} x {image.height} pixels are not a face crop: expected sides of {min_side_px} or more, "
            f"the longer one at most {aspect_max:g} times the shorter (packing.min_side_px, packing.aspect_max)"
        )
    return {"image": data}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test" as packed; no family is in two of them."""
    set_names = np.array(vocabulary["set"])[columns["set"]]
    return {name: np.flatnonzero(set_names == name) for name in SETS if name in vocabulary["set"]}
