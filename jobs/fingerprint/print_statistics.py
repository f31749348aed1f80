"""Statistics of sets of prints, which show whether generated prints are as varied and as difficult as real ones."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]
from tqdm import tqdm

from trainyard import scoring
from trainyard.data.shards import BadRecord, Sample
from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.terminal import say
from trainyard.text import align_columns

from .baseline import correlate_pairs, normalise_print
from .config import Config, PackingSettings
from .matching import enhance_print
from .pack import samples
from .synthesis import IMPRESSIONS, draw_contact_sheet, generate_impressions
from .synthesis.masters import enlarge
from .synthesis.minutiae import find_crossings, thin

DPI = 500
BLOCK_PX, BLOCK_STEP_PX, SPECTRUM = 48, 24, 128
PERIODS_PX = (4.5, 16)
NEAR_PEAK = 0.03  # cycles per px around the strongest frequency of a block: its ridges
COHERENT = 0.55  # share of the energy there from which a block's period counts
GENUINE, IMPOSTORS = 200, 300  # most pairs that are compared
SHEET_FINGERS, SHEET_IMPRESSIONS = 6, 6

COLUMNS = (
    *("set", "prints", "fingers", "period px", "sd between", "sd within", "area kpx", "coherence", "minutiae"),
    *("centroid sd px", "background", "BLPOC EER", "near-duplicates"),
)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PrintFigures:
    """Measurements of one print; lengths in px at 500 dpi."""

    period: float  # mean over coherent blocks; NaN if there are fewer than six
    area: int
    coherence: float  # mean share of a block's energy that is in its ridges; NaN without a block
    minutiae: int
    centroid: tuple[float, float]
    background: float  # median gray level outside of the print; NaN if it fills the image
    normalised: Floats  # as BLPOC compares it


def print_statistics(folders: Sequence[Path], *, synthetic: int, seed: int, dpi: int, sheet: Path | None) -> None:
    """Print a line of statistics for each folder, and for `synthetic` generated prints.

    About 0.2 s of one core for each print, and 10 s for the pairs of each set.

    Raises:
        UserError: nothing is to be measured, or a folder has too few prints that can be read.
    """
    if synthetic < 0 or seed < 0:
        raise UserError("--synthetic and --seed are numbers from 0 on. Type --synthetic 240 --seed 0")
    if not folders and not synthetic and sheet is None:
        raise UserError("Nothing to measure. Name folders of prints, or type --synthetic 240")
    if sheet is not None and sheet.exists():
        raise UserError(f"{sheet}: exists already and is not overwritten. Choose another file, or delete it.")
    sets = [(folder.name or str(folder), *_open_folder(folder, dpi)) for folder in folders]
    if synthetic:
        sets.append((f"synthetic, seed {seed}", *_open_synthetic(synthetic, seed)))
    if sheet is not None:
        write_atomically(sheet, draw_contact_sheet(seed, range(SHEET_FINGERS), range(1, SHEET_IMPRESSIONS + 1)))
        say(f"written: {sheet}")
    rows = [_describe_set(name, labels, _measure(images, len(labels))) for name, labels, images in sets]
    if rows:
        say("\n".join(align_columns([COLUMNS, *rows])))


Labels = list[tuple[str, int]]
Images = Iterator[NDArray[np.uint8]]


def _open_folder(folder: Path, dpi: int) -> tuple[Labels, Images]:
    """Return finger and impression of each print of a folder, as packing reads it, and the images at 500 dpi."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Name a folder of images such as 101_1.tif")
    config = Config(packing=PackingSettings(layout="sets", dpi=dpi))
    prints = [sample for sample in samples(folder, config) if sample.columns]
    labels = [(str(item.columns["finger"]), int(item.columns["impression"])) for item in prints]
    fingers = len({finger for finger, _ in labels})
    if fingers < 2 or fingers == len(labels):
        raise UserError(
            f"{folder}: expected prints of two fingers at least, and two of one of them, found {len(labels)} prints of "
            f"{fingers} fingers. Name a folder of images such as 101_1.tif"
        )
    return labels, map(_read_print, prints)


def _read_print(sample: Sample) -> NDArray[np.uint8]:
    try:
        loaded = sample.load()
    except BadRecord as error:
        raise UserError(f"{sample.source}: {error}. Remove it, or convert it to 8-bit gray PNG.") from error
    data, dpi = loaded["image"], loaded["dpi"]
    assert isinstance(data, bytes) and isinstance(dpi, int)
    return _scale_print(Image.open(io.BytesIO(data)), dpi)


def _scale_print(image: Image.Image, dpi: float) -> NDArray[np.uint8]:
    """Return an image at 500 dpi."""
    if dpi != DPI:
        size = round(image.width * DPI / dpi), round(image.height * DPI / dpi)
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


def _open_synthetic(count: int, seed: int) -> tuple[Labels, Images]:
    if count <= IMPRESSIONS:
        raise UserError(f"--synthetic {count}: two fingers are needed at least. Type --synthetic {2 * IMPRESSIONS}")
    labels = [(str(i // IMPRESSIONS), i % IMPRESSIONS + 1) for i in range(count)]
    return labels, _generate(count, seed)


def _generate(count: int, seed: int) -> Images:
    for finger in range(-(-count // IMPRESSIONS)):
        some = range(min(IMPRESSIONS, count - finger * IMPRESSIONS))
        yield from (image for _, image in zip(some, generate_impressions(seed, finger), strict=False))


def _measure(images: Images, count: int) -> list[PrintFigures]:
    with tqdm(images, total=count, unit="print", desc="measure", disable=None, leave=False) as bar:
        return [measure_print(gray) for gray in bar]


def measure_print(gray: NDArray[np.uint8]) -> PrintFigures:
    """Measure a print at 500 dpi; about 0.15 s."""
    foreground = find_foreground(gray)
    period, coherence = _measure_blocks(gray, foreground)
    y, x = np.nonzero(foreground) if foreground.any() else (np.array([np.nan]), np.array([np.nan]))
    ridges, mask = enhance_print(gray, DPI)
    twice = (2 * len(ridges), 2 * len(ridges))
    row, _, _ = find_crossings(thin(enlarge(-ridges, twice) > 0), enlarge(mask, twice) > 0.5)
    return PrintFigures(
        period=period,
        area=int(foreground.sum()),
        coherence=coherence,
        minutiae=len(row),
        centroid=(float(y.mean()), float(x.mean())),
        background=float(np.median(gray[~foreground])) if not foreground.all() else np.nan,
        normalised=normalise_print(gray, DPI),
    )


def measure_quality(gray: NDArray[np.uint8], dpi: float) -> float:
    """Return the coherence of a print, 0..1: the mean share of a block's energy that is in its ridges."""
    scaled = _scale_print(Image.fromarray(gray), dpi)
    return float(np.nan_to_num(_measure_blocks(scaled, find_foreground(scaled))[1]))


def find_foreground(gray: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return where the local contrast within 12 px exceeds 0.35 of its 95th percentile, without small patches."""
    fine = gray.astype(np.float32)
    detail = fine - ndimage.gaussian_filter(fine, 12, truncate=3)
    contrast = np.sqrt(ndimage.gaussian_filter(detail**2, 12, truncate=3))
    is_ridged = contrast > max(0.35 * np.percentile(contrast, 95), 6)
    eroded = ndimage.minimum_filter(is_ridged.astype(np.uint8), 25)
    opened: NDArray[np.bool_] = ndimage.maximum_filter(eroded, 25) > 0
    return opened


def _measure_blocks(gray: NDArray[np.uint8], foreground: NDArray[np.bool_]) -> tuple[float, float]:
    """Return mean period and coherence of the blocks of 48 x 48 px inside of the foreground."""
    blocks = [
        gray[y : y + BLOCK_PX, x : x + BLOCK_PX]
        for y in range(0, len(gray) - BLOCK_PX, BLOCK_STEP_PX)
        for x in range(0, gray.shape[1] - BLOCK_PX, BLOCK_STEP_PX)
        if foreground[y : y + BLOCK_PX, x : x + BLOCK_PX].mean() >= 0.95
    ]
    if not blocks:
        return np.nan, np.nan
    frequency, in_band, window = _make_spectrum()
    stack = np.stack(blocks).astype(np.float32)
    stack = (stack - stack.mean(axis=(1, 2), keepdims=True)) * window
    energy = np.abs(np.fft.rfft2(stack, (SPECTRUM, SPECTRUM))) ** 2 * in_band
    fy, fx = frequency
    periods, shares = [], []
    for block in energy:
        peak = np.unravel_index(block.argmax(), block.shape)
        peak_y, peak_x = fy[peak], fx[peak]
        near = np.zeros_like(in_band)
        for sign in (1, -1):
            near |= np.hypot(fy - sign * peak_y, fx - sign * peak_x) < NEAR_PEAK
        shares.append(float(block[near].sum() / max(block.sum(), 1e-9)))
        if shares[-1] > COHERENT:
            periods.append(1 / float(np.hypot(peak_y, peak_x)))
    return float(np.mean(periods)) if len(periods) > 5 else np.nan, float(np.mean(shares))


@cache
def _make_spectrum() -> tuple[tuple[Floats, Floats], NDArray[np.bool_], Floats]:
    """Return the frequencies (y, x) of half of a spectrum, which of them are of ridges, and the window of a block."""
    fy, fx = np.meshgrid(np.fft.fftfreq(SPECTRUM), np.fft.rfftfreq(SPECTRUM), indexing="ij")
    radius = np.hypot(fy, fx)
    window = np.hanning(BLOCK_PX).astype(np.float32)
    return (fy, fx), (radius > 1 / PERIODS_PX[1]) & (radius < 1 / PERIODS_PX[0]), np.outer(window, window)


def _describe_set(name: str, labels: Labels, figures: Sequence[PrintFigures]) -> list[str]:
    """Return the cells of a set's line."""
    fingers = np.unique([finger for finger, _ in labels], return_inverse=True)[1]
    period = np.array([figure.period for figure in figures])
    centroid = np.array([figure.centroid for figure in figures])
    means, within = _summarize_fingers(period, fingers)
    eer, duplicates = _compare_prints(np.stack([figure.normalised for figure in figures]), fingers)
    return [
        name,
        str(len(figures)),
        str(fingers.max() + 1),
        f"{np.nanmean(period):.2f}",
        f"{np.std(means):.2f}",
        f"{within:.2f}",
        f"{np.median([figure.area for figure in figures]) / 1000:.0f}",
        f"{np.nanmean([figure.coherence for figure in figures]):.2f}",
        f"{np.median([figure.minutiae for figure in figures]):.0f}",
        f"{np.mean([_summarize_fingers(axis, fingers)[1] for axis in centroid.T]):.1f}",
        f"{np.nanmedian([figure.background for figure in figures]):.0f}",
        f"{eer:.1%}",
        str(duplicates),
    ]


def _summarize_fingers(values: NDArray[np.float64], fingers: NDArray[np.int64]) -> tuple[list[float], float]:
    """Return the mean of each finger, and the mean standard deviation within a finger of more than two prints."""
    groups = [values[(fingers == finger) & np.isfinite(values)] for finger in range(fingers.max() + 1)]
    within = [float(group.std()) for group in groups if len(group) > 2]
    return [float(group.mean()) for group in groups if len(group)], float(np.mean(within)) if within else np.nan


def _compare_prints(prints: Floats, fingers: NDArray[np.int64]) -> tuple[float, int]:
    """Return the EER of BLPOC over a fixed sample of pairs, and how many impostors exceed the median genuine pair."""
    one, other = np.triu_indices(len(fingers), 1)
    is_genuine = fingers[one] == fingers[other]
    rng = np.random.default_rng(0)
    drawn = [
        rng.permutation(np.flatnonzero(kind))[:most] for kind, most in ((is_genuine, GENUINE), (~is_genuine, IMPOSTORS))
    ]
    chosen = np.sort(np.concatenate(drawn))
    score = correlate_pairs(torch.from_numpy(prints), one[chosen], other[chosen])
    genuine, impostor = score[is_genuine[chosen]], score[~is_genuine[chosen]]
    rates = scoring.compute_error_rates(genuine, impostor)
    return rates.equal_error_rate().rate, int((impostor > np.median(genuine)).sum())
