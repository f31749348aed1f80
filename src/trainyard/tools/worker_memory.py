"""Measures the memory of the processes that pack: `trainyard bench scale --only workers`."""

import io
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

STORES = ("keep", "input-png", "input-raw")
_FILES = 64  # raw images, as many as the size of a shard is estimated from
_RAW_PX, _INPUT_PX = 448, 299  # of a print's file, and of what `fingerprint_1m` stores of it


def write_prints(folder: Path) -> None:
    """Write raw images of the size of a print, gray and random, so that PNG is as large as its pixels."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(_FILES):
        Image.fromarray(rng.integers(0, 256, (_RAW_PX, _RAW_PX), np.uint8)).save(file := io.BytesIO(), "PNG")
        (folder / f"{number}.png").write_bytes(file.getvalue())


def measure_worker(folder: Path, store: str, *, images: int) -> float:
    """Pack images with one worker as `packing.store` says; return the private memory that it had at most, in MiB.

    Looked at whenever packing reports, several times a second. What the worker shares with the process that forked it
    is not counted: that process is there once, however many workers there are.
    """
    from trainyard.data.pack import pack
    from trainyard.data.store import InputStore

    how = InputStore(store, _INPUT_PX, _INPUT_PX, channels=1, fill=255)
    meta: dict[str, Any] = {} if store == "keep" else {"input": vars(how)}
    most = 0.0

    def look(done: int) -> None:
        nonlocal most
        forker = list_children(os.getpid())[-1]
        most = max([most, *map(read_private_mib, list_children(forker))])

    out = folder / "packed"
    pack(_list_prints(folder, images), out, meta=meta, workers=1, progress=look)
    shutil.rmtree(out)
    return most


def _list_prints(folder: Path, images: int) -> Iterator[Any]:
    from trainyard.data.shards import Sample

    for number in range(images):
        path = folder / f"{number % _FILES}.png"
        yield Sample(str(number), partial(load_print, path), source=path)


def load_print(path: Path) -> dict[str, Any]:
    """Read an image as families do."""
    from trainyard.data.write_shard import read_image

    return {"image": read_image(path)[0]}


def read_private_mib(process: int) -> float:
    """Return the memory that a process shares with no other (proc(5): smaps_rollup); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def list_children(process: int) -> list[int]:
    """Return the processes that another one started, in that order; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
