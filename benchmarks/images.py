"""Generate deterministic benchmark data once, into a cache folder: JPEG files, and HDF5 files built from them."""

import io
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from benchmarks.contract import SIZE_PX, Setting

QUALITY = 90
PER_FOLDER = 1000
GRAY_VARIANTS = 10  # images that share a ridge pattern, which is expensive to compute
TEXTURE_PX = 1024
NUM_TEXTURES = 24


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return `path`; if missing, `make` it under another name and rename it, so that it is always complete."""
    if not path.exists():
        print(f"generating {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name(f"{path.name}.partial")
        remove(partial_path)
        make(partial_path)
        partial_path.rename(path)
    return path


def remove(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_jpeg_files(setting: Setting, kind: str) -> Path:
    """Make the folder of JPEG files of `kind` "rgb" or "gray", named <thousand>/<number>.jpg; return its path."""
    count = getattr(setting, kind)
    write = {"rgb": _write_rgb, "gray": _write_gray}[kind]
    starts = range(0, count, {"rgb": 1, "gray": GRAY_VARIANTS}[kind])
    return make_once(setting.get_path(f"{kind}-files"), partial(_write_all, write, starts, count, setting.threads))


def list_files(folder: Path) -> list[Path]:
    """Return the JPEG files in a folder from `make_jpeg_files`, by number."""
    return sorted(folder.glob("*/*.jpg"))


def make_vlen_hdf5(setting: Setting, kind: str) -> Path:
    """Make an HDF5 file with one encoded image per element of the variable-length array `images`."""
    files = list_files(make_jpeg_files(setting, kind))
    return make_once(setting.get_path(f"{kind}-vlen"), partial(_write_vlen, files))


def make_flat_hdf5(setting: Setting, kind: str) -> Path:
    """Make an HDF5 file with all encoded images in one array `blob`, and their bounds in `offset` (N + 1,)."""
    files = list_files(make_jpeg_files(setting, kind))
    return make_once(setting.get_path(f"{kind}-flat"), partial(_write_flat, files))


def make_raw_hdf5(setting: Setting) -> Path:
    """Make an HDF5 file of the gray images, decoded and resized: `images` (N, 224, 224) uint8, contiguous."""
    files = list_files(make_jpeg_files(setting, "gray"))
    return make_once(setting.get_path("gray-raw"), partial(_write_raw, files))


def decode_gray(path: Path) -> np.ndarray:
    """Decode one image to gray at 224 x 224 pixels, (224, 224) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((SIZE_PX, SIZE_PX), Image.Resampling.BILINEAR))


def _write_vlen(files: Iterable[Path], out: Path) -> None:
    import h5py

    records = [np.fromfile(path, np.uint8) for path in files]
    with h5py.File(out, "w", libver="latest") as file:
        images = file.create_dataset("images", (len(records),), dtype=h5py.vlen_dtype(np.uint8))
        for index, record in enumerate(records):
            images[index] = record


def _write_flat(files: Iterable[Path], out: Path) -> None:
    import h5py

    records = [np.fromfile(path, np.uint8) for path in files]
    with h5py.File(out, "w", libver="latest") as file:
        file["blob"] = np.concatenate(records)
        file["offset"] = np.cumsum([0, *map(len, records)])


def _write_raw(files: Iterable[Path], out: Path) -> None:
    import h5py

    with h5py.File(out, "w", libver="latest") as file:
        file["images"] = np.stack([decode_gray(path) for path in files])


def _write_all(
    write: Callable[[Path, int, int], None], starts: Iterable[int], count: int, workers: int, out: Path
) -> None:
    from tqdm import tqdm

    for thousand in range(-(-count // PER_FOLDER)):
        (out / f"{thousand:03d}").mkdir(parents=True)
    with ProcessPoolExecutor(workers) as pool:
        tasks = [pool.submit(write, out, start, count) for start in starts]
        for task in tqdm(tasks, desc=out.name, unit="task"):
            task.result()


def _save(out: Path, index: int, values: np.ndarray, **encoding: Any) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).save(buffer, "jpeg", quality=QUALITY, **encoding)
    (out / f"{index // PER_FOLDER:03d}" / f"{index:06d}.jpg").write_bytes(buffer.getvalue())


def _write_rgb(out: Path, index: int, count: int) -> None:
    """Write one image with the statistics of a photograph: 1/f textures, sharp-edged objects, sensor noise.

    About 500 x 375 pixels, and about 70 KB at quality 90 with 4:2:0 chroma.
    """
    random = np.random.default_rng([1, index])
    width, height = _draw_photo_size(random)
    shared = _draw_texture(random, height, width) * 45
    planes = [shared + _draw_texture(random, height, width) * 10 + random.uniform(70, 180) for _ in range(3)]
    image = np.stack(planes, axis=-1)
    for _ in range(random.integers(6, 20)):
        mask = _draw_object(random, height, width)[..., None] * random.uniform(0.4, 0.95)
        surface = random.uniform(0, 255, 3) + _draw_texture(random, height, width)[..., None] * random.uniform(3, 25)
        image += mask * (surface - image)
    noise = _draw_texture(random, height, width) * random.uniform(2, 9)
    noise += random.standard_normal((height, width), dtype=np.float32) * random.uniform(1, 4)
    _save(out, index, image + noise[..., None], subsampling="4:2:0")


def _draw_photo_size(random: np.random.Generator) -> tuple[int, int]:
    kind = random.random()
    if kind < 0.6:
        return 500, 375
    if kind < 0.8:
        return 375, 500
    return int(random.integers(400, 641)), int(random.integers(333, 501))


def _draw_object(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draw a (height, width) float32 mask in 0..1: a filled ellipse or polygon."""
    canvas = Image.new("L", (width, height))
    draw = ImageDraw.Draw(canvas)
    x, y = random.uniform(0, width), random.uniform(0, height)
    if random.random() < 0.5:
        rx, ry = random.uniform(8, width / 3), random.uniform(8, height / 3)
        draw.ellipse((x - rx, y - ry, x + rx, y + ry), fill=255)
    else:
        corners = random.uniform(-0.4, 0.4, (random.integers(3, 6), 2)) * [width, height] + [x, y]
        draw.polygon([tuple(corner) for corner in corners], fill=255)
    return np.asarray(canvas, dtype=np.float32) / 255


def _draw_texture(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draw a random window of a random texture, (height, width) float32, standard deviation about 1."""
    texture = _build_textures()[random.integers(NUM_TEXTURES)]
    top, left = random.integers(TEXTURE_PX - height), random.integers(TEXTURE_PX - width)
    return texture[top : top + height, left : left + width]


@cache
def _build_textures() -> list[np.ndarray]:
    """Build noise with the 1/f^a amplitude spectrum of natural scenes, a = 1.0 .. 1.5.

    Field 1987, J. Opt. Soc. Am. A 4.
    """
    random = np.random.default_rng(7)
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_PX)[:, None], np.fft.rfftfreq(TEXTURE_PX)[None])
    frequency[0, 0] = np.inf
    return [_draw_shaped_noise(random, frequency) for _ in range(NUM_TEXTURES)]


def _draw_shaped_noise(random: np.random.Generator, frequency: np.ndarray) -> np.ndarray:
    phases = random.standard_normal(frequency.shape) + 1j * random.standard_normal(frequency.shape)
    noise = np.fft.irfft2(phases / frequency ** random.uniform(1.0, 1.5), (TEXTURE_PX, TEXTURE_PX))
    return (noise / noise.std()).astype(np.float32)


def _write_gray(out: Path, start: int, count: int) -> None:
    """Write up to 10 gray images of ridges, 299..512 pixels a side, about 37 KB each at quality 90."""
    random = np.random.default_rng([2, start])
    height, width = (int(side) for side in random.integers(299, 513, 2))
    margin = 24
    phase = _draw_ridge_phase(random, height + margin, width + margin)
    for index in range(start, min(start + GRAY_VARIANTS, count)):
        top, left = random.integers(margin, size=2)
        _save(out, index, _draw_ridges(random, phase[top : top + height, left : left + width]))


def _draw_ridge_phase(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draw the phase of a ridge pattern in radians, (height, width) float32: waves 8..11 px long, with minutiae.

    A term +-atan2 around a point starts or ends one ridge there (Larkin and Fletcher 2007, Optics Express 15).
    """
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    centre_y, centre_x = height * random.uniform(0.3, 0.7), width * random.uniform(0.3, 0.7)
    direction, roundness = random.uniform(0, np.pi), random.uniform()
    rings = np.hypot(x - centre_x, y - centre_y)
    lines = (x - centre_x) * np.cos(direction) + (y - centre_y) * np.sin(direction)
    phase = 2 * np.pi / random.uniform(8, 11) * (roundness * rings + (1 - roundness) * lines)
    phase += _draw_smooth_noise(random, height, width, nodes=6) * 6
    for _ in range(random.integers(15, 40)):
        py, px = random.uniform(0, height), random.uniform(0, width)
        phase += random.choice([-1, 1]) * np.arctan2(y - np.float32(py), x - np.float32(px))
    return phase


def _draw_ridges(random: np.random.Generator, phase: np.ndarray) -> np.ndarray:
    """Draw a ridge pattern as an inked print seen by a sensor: gray levels of about 0..255."""
    height, width = phase.shape
    ink = np.tanh(2 * np.cos(phase) + random.uniform(-0.4, 0.4))
    contrast = 0.65 + 0.2 * _draw_smooth_noise(random, height, width, nodes=5)
    grain = random.standard_normal((height, width), dtype=np.float32) * random.uniform(4, 10)
    blotches = _draw_smooth_noise(random, height, width, nodes=height // 6) * 12
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    edge = np.clip((1 - np.hypot(x / 0.96, y / 0.98)) * 12 + 0.5, 0, 1).astype(np.float32)
    finger = 140 + 80 * ink * contrast + grain + blotches
    image = edge * finger + (1 - edge) * (245 + 0.15 * grain)
    blurred = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.7))
    return np.asarray(blurred)


def _draw_smooth_noise(random: np.random.Generator, height: int, width: int, *, nodes: int) -> np.ndarray:
    """Draw cubically interpolated noise of `nodes` x `nodes` values, standard deviation about 1."""
    coarse = Image.fromarray(random.standard_normal((nodes, nodes), dtype=np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
