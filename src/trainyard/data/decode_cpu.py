"""The reference decoder: Pillow, torch and soundfile on the host. Says what decoding means; DALI must agree with it."""

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor

from trainyard.data.augment import Parameters

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Request:
    """One micro-batch to decode."""

    records: list[np.ndarray]  # B encoded pictures, uint8
    shapes: np.ndarray  # (B, 3) int32: height, width, channels of each
    parameters: Parameters
    out: Tensor  # (B, H, W, C) uint8 on the host, the loader's buffer; the decoder fills it


def decode(requests: Iterator[Request], *, channels: int, fill: int, threads: int) -> Iterator[Tensor]:
    """Decode, cut, resize and mirror, one micro-batch per request.

    Yields:
        (B, H, W, C) uint8: the request's `out`. Resizing is bilinear with antialiasing (a triangle filter as wide as
        the scale), rounded to uint8, as in Pillow.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for request in requests:
            p = request.parameters

            def one(i: int, request: Request = request, p: Parameters = p) -> None:
                picture = _decode_one(request.records[i], channels)
                place(cut(picture, p.box[i], fill), request.out[i], flip=bool(p.flip[i]))

            on_threads(pool, threads, one, len(request.records))
            yield request.out


def decode_sound(batches: Iterator[list[np.ndarray]], *, threads: int) -> Iterator[list[np.ndarray]]:
    """Decode the WAV or FLAC files of each batch, uint8, to (frames,) int16."""
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for records in batches:
            yield list(pool.map(_decode_sound, records))


def _decode_sound(record: np.ndarray) -> np.ndarray:
    samples: np.ndarray = soundfile.read(io.BytesIO(record.data), dtype="int16")[0]
    return samples


def on_threads(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None], count: int) -> None:
    """Call `work` with 0 .. count - 1, each thread every so-manieth: a task of its own for each would cost as much."""

    def stride(first: int) -> None:
        for i in range(first, count, threads):
            work(i)

    list(pool.map(stride, range(threads)))


def cut(picture_HWC: Tensor, box: np.ndarray, fill: int) -> Tensor:
    """Return the box (y, x, height, width) of a picture as (h, w, C) uint8; `fill` where it reaches outside."""
    y, x, height, width = (int(v) for v in box)
    rows, columns, channels = picture_HWC.shape
    if y >= 0 and x >= 0 and y + height <= rows and x + width <= columns:
        return picture_HWC[y : y + height, x : x + width]
    padded = torch.full((height, width, channels), fill, dtype=torch.uint8)
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + height, rows), min(x + width, columns)
    if y1 > y0 and x1 > x0:
        padded[y0 - y : y1 - y, x0 - x : x1 - x] = picture_HWC[y0:y1, x0:x1]
    return padded


def place(picture_HWC: Tensor, out_HWC: Tensor, *, flip: bool) -> None:
    """Resize a picture into its place in the batch, mirrored if asked; both uint8.

    Calls the operator behind `interpolate(..., antialias=True)` with its `out` argument: writing in place saves an
    allocation and a copy, two fifths of the time. Mirroring rows of whole pixels afterwards is a sixth of the rest.
    """
    height, width, channels = out_HWC.shape
    target_1CHW = out_HWC.permute(2, 0, 1)[None]
    source_1CHW = picture_HWC.permute(2, 0, 1)[None]
    if channels == 1:  # a single channel is dense in either layout; say so, or the operator takes a slow path
        source_1CHW, target_1CHW = source_1CHW.contiguous(), out_HWC.view(1, 1, height, width)
    if source_1CHW.shape == target_1CHW.shape:
        target_1CHW.copy_(source_1CHW)
    else:
        size = [height, width]
        torch.ops.aten._upsample_bilinear2d_aa.out(source_1CHW, size, False, None, None, out=target_1CHW)
    if flip:
        out_HWC.copy_(out_HWC.flip(1))


def _decode_one(record: np.ndarray, channels: int) -> Tensor:
    """Return (H, W, C) uint8."""
    with Image.open(io.BytesIO(record.data)) as picture:
        picture.draft(_MODES[channels], picture.size)  # gray of a colour JPEG is its luma as stored, as for DALI
        pixels = np.array(picture.convert(_MODES[channels]))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels)
