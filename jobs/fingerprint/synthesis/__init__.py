"""Synthetic fingerprints: to train, try, test and time the job without real data.

A finger has a master, the ridges that it would show if nobody pressed or bent it (`masters`). Each impression shows a
part of it: turned, bent by a known displacement, dry or wet, worn, and as one of several scanners sees it
(`impressions`, `scanners`). The minutiae of a master, and where each impression shows them, are known (`minutiae`).
No real print is in it; `trainyard fingerprint-statistics` compares generated prints with real ones.
"""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count as count_from
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from trainyard.data.workers import exit_with_parent
from trainyard.files import write_atomically

from .impressions import Impression, draw_impression
from .masters import Master, grow_master
from .minutiae import Minutiae, find_minutiae, map_minutiae

__all__ = [
    "IMPRESSIONS",
    "Impression",
    "Master",
    "Minutiae",
    "draw_contact_sheet",
    "draw_impression",
    "find_minutiae",
    "generate_impressions",
    "grow_master",
    "map_minutiae",
    "number_synthetic",
    "synthesize",
]

IMPRESSIONS = 8


def synthesize(raw: Path, *, count: int, seed: int, hook: Callable[[], None] = lambda: None) -> None:
    """Write `count` prints, 8 impressions of each finger, as `raw/<finger>_<impression>.png`; those present are kept.

    Equal arguments give equal files for any number of processes and of interruptions. Uses all available cores, about
    0.4 s of one core per finger. Each file appears when it is complete.

    Args:
        raw: folder to create, or what an interrupted call with the same arguments left.
        count: number of images; if not a multiple of 8, the last finger has fewer.
        hook: called now and then; an exception it raises interrupts.
    """
    raw.mkdir(parents=True, exist_ok=True)
    present = {path.name for path in raw.glob("*.png") if path.stat().st_size}  # a power cut leaves empty files
    fingers = range(-(-count // IMPRESSIONS))
    missing = [finger for finger in fingers if not present.issuperset(_name_files(count, finger))]
    write = partial(_write_finger, raw, count, seed)
    workers = min(len(os.sched_getaffinity(0)), -(-len(missing) // 8))
    done = count - sum(len(_name_files(count, finger)) for finger in missing)
    with ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=count, initial=done, unit="print", desc="synthesize", disable=None, leave=False)
        )
        written: Iterator[int] = map(write, missing)
        if workers > 1:
            context = get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=exit_with_parent)
            written = stack.enter_context(pool).map(write, missing, chunksize=4)
        for number in written:
            bar.update(number)
            hook()


def _name_files(count: int, finger: int) -> list[str]:
    """Return the file of each impression of a finger, of `count` in all."""
    impressions = min(IMPRESSIONS, count - finger * IMPRESSIONS)
    return [f"{finger + 1:05d}_{number}.png" for number in range(1, impressions + 1)]


def _write_finger(folder: Path, count: int, seed: int, finger: int) -> int:
    """Write the impressions of a finger; return how many."""
    master, names = grow_master(seed, finger), _name_files(count, finger)
    for number, name in enumerate(names, start=1):
        png = io.BytesIO()
        Image.fromarray(draw_impression(master, seed, finger, number).image).save(png, "PNG", compress_level=1)
        write_atomically(folder / name, png.getvalue(), durable=False)
    return len(names)


def generate_impressions(seed: int, finger: int) -> Iterator[NDArray[np.uint8]]:
    """Yield endless impressions of one finger, (352, 320) uint8, ridges dark, 500 dpi."""
    master = grow_master(seed, finger)
    for number in count_from(1):
        yield draw_impression(master, seed, finger, number).image


def draw_contact_sheet(seed: int, fingers: Sequence[int], impressions: Sequence[int]) -> bytes:
    """Return a PNG with a row for each finger and a column for each impression, numbered from 1 on."""
    rows = []
    for finger in fingers:
        master = grow_master(seed, finger)
        rows.append(np.hstack([draw_impression(master, seed, finger, number).image for number in impressions]))
    png = io.BytesIO()
    Image.fromarray(np.vstack(rows)).save(png, "PNG")
    return png.getvalue()


def number_synthetic(path: Path) -> tuple[int, int]:
    """Return the finger, from 0 on, and the impression, from 1 on, of a file that `synthesize` wrote."""
    finger, _, number = path.stem.rpartition("_")
    return int(finger) - 1, int(number)
