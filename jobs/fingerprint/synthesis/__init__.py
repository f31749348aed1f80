"""Synthetic fingerprints: to train, try, test and time the job without real data.

A finger has a master, the ridges that it would show if nobody pressed or bent it (`masters`). Each impression shows a
part of it: turned, bent by a known displacement, dry or wet, worn, and as one of several scanners sees it
(`impressions`, `scanners`). The minutiae of a master, and where each impression shows them, are known (`minutiae`).
No real print is in it; `trainyard fingerprint-statistics` compares generated prints with real ones.
"""

import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count as count_from
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from trainyard.files import create_folder

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
    "synthesize",
]

IMPRESSIONS = 8


def synthesize(raw: Path, *, count: int, seed: int) -> None:
    """Write `count` prints, 8 impressions of each finger, as `raw/<finger>_<impression>.png`.

    Equal arguments give equal files for any number of processes. Uses all available cores, about 0.4 s of one core
    per finger. The folder appears only when complete: it is written under another name and renamed.

    Args:
        raw: folder to create.
        count: number of images; if not a multiple of 8, the last finger has fewer.
    """
    with create_folder(raw) as folder:
        write = partial(_write_finger, folder, count, seed)
        fingers = range(-(-count // IMPRESSIONS))
        workers = min(len(os.sched_getaffinity(0)), -(-len(fingers) // 8))
        with tqdm(total=count, unit="print", desc="synthesize", disable=None, leave=False) as bar:
            if workers > 1:
                with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                    for written in pool.map(write, fingers, chunksize=4):
                        bar.update(written)
            else:
                for written in map(write, fingers):
                    bar.update(written)


def _write_finger(folder: Path, count: int, seed: int, finger: int) -> int:
    """Write the impressions of a finger; return how many."""
    master = grow_master(seed, finger)
    impressions = min(IMPRESSIONS, count - finger * IMPRESSIONS)
    for number in range(1, impressions + 1):
        image = draw_impression(master, seed, finger, number).image
        Image.fromarray(image).save(folder / f"{finger + 1:05d}_{number}.png", compress_level=1)
    return impressions


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
