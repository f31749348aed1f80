"""The loader on prints as `fingerprint_1m` reads them, with each `packing.store`: the suite prints."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from benchmarks import images
from benchmarks.contract import Configuration, Setting
from benchmarks.ours import iterate_host_batches

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.settings import TrainConfig
    from trainyard.data.shards import ShardSet

JOBS = Path(__file__).resolve().parents[1] / "jobs"
JOB = "fingerprint_1m"
QUALITY = 90  # of JPEG
VERSIONS = ("trainyard", "torch", "numpy", "pillow", "nvidia-dali-cuda130", "nvidia-dali-cuda120")


def make_files(setting: Setting) -> Path:
    """Make the folder of synthetic prints as PNG; return its path. Other prints in its place are read as well."""
    return images.make_once(setting.get_path("prints-files"), partial(_synthesize, setting))


def _synthesize(setting: Setting, out: Path) -> None:
    from trainyard.config.families import load_family

    load_family(JOBS, "fingerprint", "pack").synthesize(out, count=setting.prints, seed=0)


def make_jpeg_files(setting: Setting) -> Path:
    """Make the folder of the same prints as JPEG; return its path."""
    return images.make_once(setting.get_path("prints-jpeg"), partial(_write_jpeg, make_files(setting)))


def _write_jpeg(raw: Path, out: Path) -> None:
    for path in sorted(path for path in raw.rglob("*") if path.is_file()):
        target = (out / path.relative_to(raw)).with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.convert("L").save(target, quality=QUALITY)


def pack_prints(setting: Setting, *, store: str, jpeg: bool) -> Path:
    """Pack the prints as the job does with this store; return the folder."""
    raw = make_jpeg_files(setting) if jpeg else make_files(setting)
    kind = "jpeg" if jpeg else "png"
    return images.make_once(setting.get_path(f"prints-{kind}-{store}"), partial(_pack, raw, setting.threads, store))


def _pack(raw: Path, workers: int, store: str, out: Path) -> None:
    from trainyard.data.prepare import pack_raw

    pack_raw(_compose(store), raw, out, JOBS, workers=workers)


def pack_as_pillow_writes(setting: Setting) -> Path:
    """Pack the same 299 x 299 pixels as input-png stores, as PNG with the row filters that Pillow chooses."""
    resized = pack_prints(setting, store="input-raw", jpeg=False)
    return images.make_once(setting.get_path("prints-pillow"), partial(_pack_pixels, resized, setting.threads))


def _pack_pixels(resized: Path, workers: int, out: Path) -> None:
    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample, ShardSet

    count = ShardSet(resized).count
    pack((Sample(str(i), partial(_encode, resized, i)) for i in range(count)), out, meta={}, workers=workers).close()


def _encode(resized: Path, i: int) -> dict[str, bytes]:
    png = io.BytesIO()
    Image.fromarray(_open(resized).read_arrays("image", np.array([i]))[0][..., 0]).save(png, "PNG", compress_level=1)
    return {"image": png.getvalue()}


@cache
def _open(folder: Path) -> ShardSet:
    from trainyard.data.shards import ShardSet

    return ShardSet(folder)


def _compose(store: str) -> TrainConfig:
    from trainyard.config.compose import compose

    return compose(JOB, [f"packing.store={store}"], JOBS)


def iterate_batches(folder: Path, setting: Setting, *, store: str) -> Iterator[Tensor]:
    """Yield what the loader copies to the device, with the job's augmentation, which draws no noise."""
    return iterate_host_batches(folder, setting, config=partial(_compose, store))


def list_configurations() -> list[Configuration]:
    pillow = "the pixels of input_png, with the row filters that Pillow chooses"
    jpeg = f"packing.store=keep, the same prints as JPEG of quality {QUALITY}"
    found = [
        ("ours", "input-raw", _pack_as("input-raw"), "packing.store=input-raw, as the preset says"),
        ("input_png", "input-png", _pack_as("input-png"), "packing.store=input-png"),
        ("pillow_png", "keep", pack_as_pillow_writes, pillow),
        ("keep_png", "keep", _pack_as("keep"), "packing.store=keep, PNG files"),
        ("keep_jpeg", "keep", _pack_as("keep", jpeg=True), jpeg),
    ]
    return [
        Configuration("prints", name, data, partial(iterate_batches, store=store), VERSIONS, note)
        for name, store, data, note in found
    ]


def _pack_as(store: str, *, jpeg: bool = False) -> Callable[[Setting], Path]:
    return partial(pack_prints, store=store, jpeg=jpeg)
