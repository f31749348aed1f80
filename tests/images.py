"""Makes and packs small deterministic images. Importable by the worker processes of packing."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from trainyard.data.index import HEADER_BYTES, INDEX, seal_index
from trainyard.data.pack import pack
from trainyard.data.shards import BadRecord, Loaded, Sample, ShardSet

META = {"job": "images"}


def make_texture(seed: int, height: int, width: int, channels: int = 1) -> np.ndarray:
    """Return waves plus noise, (height, width, channels) uint8: every pixel differs from its neighbours."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    planes = []
    for _ in range(channels):
        fy, fx, phase = rng.uniform(0.05, 0.4, 3)
        planes.append(128 + 90 * np.sin(fy * y + fx * x + 9 * phase) + rng.normal(0, 8, (height, width)))
    texture: np.ndarray = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    return texture


def encode_image(image_HWC: np.ndarray, format: str) -> bytes:
    """Encode a gray or RGB image as "jpg" or "png"."""
    target = io.BytesIO()
    image = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)
    image.save(target, {"jpg": "JPEG", "png": "PNG"}[format])
    return target.getvalue()


def write_folder(folder: Path, count: int, *, channels: int = 1) -> Path:
    """Write `count` images of 40..90 px, four per identity, every third as PNG: `<identity>-<number>.<format>`."""
    folder.mkdir(parents=True)
    for i in range(count):
        height, width = 40 + 7 * i % 50, 40 + 11 * i % 50
        format = "png" if i % 3 == 0 else "jpg"
        data = encode_image(make_texture(i, height, width, channels), format)
        (folder / f"anna{i // 4:03d}-{i}.{format}").write_bytes(data)
    return folder


def samples(raw: Path, pause_s: float = 0.0) -> Iterator[Sample]:
    """List a folder that `write_folder` wrote, sorted by name."""
    for path in sorted(raw.iterdir()):
        yield Sample(path.name, partial(load, path, pause_s), {"listed": len(path.name)}, source=path)


def load(path: Path, pause_s: float) -> Loaded:
    """Load one image with a text, an int, a number that is an int or a float, and an array.

    Raises:
        BadRecord: the image cannot be decoded.
    """
    time.sleep(pause_s)
    who, _, number = path.stem.partition("-")
    data, i = path.read_bytes(), int(number)
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except OSError:
        raise BadRecord("the image cannot be decoded") from None
    weight = i / 2 if i % 2 else i
    return {"image": data, "who": who, "number": i, "weight": weight, "points": make_points(i)}


def load_bytes(path: Path) -> Loaded:
    """Load a file as an array of its bytes."""
    return {"bytes": np.fromfile(path, dtype=np.uint8)}


def make_points(number: int) -> np.ndarray:
    """Return the array that belongs to an image: (3, 2) float32."""
    return np.arange(6, dtype=np.float32).reshape(3, 2) + number


def pack_folder(
    raw: Path, out: Path, *, workers: int = 1, skip_bad: bool = False, shard_mib: float = 0.01, pause_s: float = 0.0
) -> ShardSet:
    """Pack a folder that `write_folder` wrote into shards of a few images each."""
    listed = samples(raw, pause_s)
    return pack(listed, out, meta=META, workers=workers, skip_bad=skip_bad, shard_mib=shard_mib)


@contextmanager
def edit_index(folder: Path) -> Iterator[h5py.File]:
    """Open an index for a change, and seal it again: what a stranger could have written."""
    index = folder / INDEX
    with h5py.File(index, "r+") as file:
        yield file
    index.write_bytes(seal_index(index.read_bytes()[HEADER_BYTES:]))


def make_unmeasured_environ() -> dict[str, str]:
    """Return this environment for a process that coverage leaves alone: its time, files, signal handlers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}


def make_import_environ() -> dict[str, str]:
    """Return the environment for a Python process that imports from the same places as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def list_descendants(process: int) -> list[int]:
    """Return the processes below another one."""
    try:
        children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []
    return [one for child in children for one in (child, *list_descendants(child))]


def is_running(process: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
