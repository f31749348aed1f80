"""What a packing worker takes in memory."""

import io
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scale.contract import Case, Number, Sizes, list_children, read_private_mib

_FILES = 64  # raw images, as many as the size of a shard is estimated from
_RAW_PX, _INPUT_PX = 448, 299  # of a print's file, and of what `fingerprint_1m` stores of it


def _prepare_prints(folder: Path, sizes: Sizes) -> None:
    """Write raw images of the size of a print, gray and random, so that PNG is as large as its pixels."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(_FILES):
        Image.fromarray(rng.integers(0, 256, (_RAW_PX, _RAW_PX), np.uint8)).save(file := io.BytesIO(), "PNG")
        (folder / f"{number}.png").write_bytes(file.getvalue())


def _measure_workers(folder: Path, sizes: Sizes) -> list[Number]:
    note = f"{sizes.prints:,} prints, shards of 128 MiB; what it shares with others is not counted"
    kept = Number("packing worker, keep", _measure_worker(folder, sizes, {}), "MiB", note)
    try:
        from trainyard.data.store import InputStore
    except ImportError:  # an earlier commit resizes nothing
        return [kept]
    resized = []
    for kind in ("input-png", "input-raw"):
        meta = {"input": vars(InputStore(kind, _INPUT_PX, _INPUT_PX, channels=1, fill=255))}
        resized.append(Number(f"packing worker, {kind}", _measure_worker(folder, sizes, meta), "MiB", note))
    return [kept, *resized]


def _measure_worker(folder: Path, sizes: Sizes, meta: dict[str, Any]) -> float:
    """Pack with one worker; return the private memory that it had at most, in MiB.

    Looked at whenever packing reports, several times a second, from the first sample on: before, the process that forks
    the workers shares nothing yet. A process that only starts others is no worker.
    """
    from trainyard.data.pack import pack

    most, has_begun = 0.0, False

    def look(done: int) -> None:
        nonlocal most, has_begun
        has_begun |= done > 0
        if has_begun:
            most = max([most, *map(read_private_mib, _list_leaves(os.getpid()))])

    out = folder / "packed"
    pack(_list_prints(folder, sizes.prints), out, meta=meta, workers=1, progress=look)
    shutil.rmtree(out)
    return most


def _list_leaves(process: int) -> Iterator[int]:
    for child in list_children(process):
        if list_children(child):
            yield from _list_leaves(child)
        else:
            yield child


def _list_prints(folder: Path, images: int) -> Iterator[Any]:
    from trainyard.data.shards import Sample

    for number in range(images):
        path = folder / f"{number % _FILES}.png"
        yield Sample(str(number), partial(_load_print, path), source=path)


def _load_print(path: Path) -> dict[str, Any]:
    from trainyard.data.write_shard import open_image

    data = path.read_bytes()
    open_image(data)  # refuses what cannot be decoded, as a family does
    return {"image": data}


CASES = (Case("workers", _prepare_prints, _measure_workers),)
