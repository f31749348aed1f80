"""The reference decoder: Pillow, torch and soundfile on the host. It defines decoding; DALI must agree with it."""

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

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

    records: list[np.ndarray]  # B encoded images, uint8
    shapes: np.ndarray  # (B, 3) int32: height, width, channels of each
    parameters: Parameters
    out: Tensor  # (B, H, W, C) uint8 on the host, the loader's buffer, which the decoder fills


@dataclass(frozen=True)
class AudioRequest:
    """One micro-batch of audio to decode."""

    records: list[np.ndarray]  # B WAV or FLAC files, uint8


AnyRequest = TypeVar("AnyRequest", bound=Request)
AnyAudioRequest = TypeVar("AnyAudioRequest", bound=AudioRequest)


def decode(
    requests: Iterator[AnyRequest], *, channels: int, fill: int, threads: int
) -> Iterator[tuple[AnyRequest, Tensor]]:
    """Decode, crop, resize and mirror, one micro-batch per request.

    A decoder may take requests ahead of those it has yielded, but fills `out` only just before it yields the request.

    Yields:
        request: in the order of `requests`.
        images: (B, H, W, C) uint8, the request's `out`. Resizing is bilinear with antialiasing (a triangle filter as
            wide as the scale), rounded to uint8, as in Pillow.
    """
    with get_pool(threads) as pool:
        for request in requests:

            def crop_image(i: int, request: Request = request) -> Tensor:
                return crop(decode_image(request.records[i], channels), request.parameters.box[i], fill)

            resize_all(crop_image, request, pool, threads)
            yield request, request.out


def decode_audio(
    requests: Iterator[AnyAudioRequest], *, threads: int
) -> Iterator[tuple[AnyAudioRequest, list[np.ndarray]]]:
    """Decode the audio of each request.

    Yields:
        request: in the order of `requests`.
        recordings: B arrays (frames,) int16.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for request in requests:
            yield request, list(pool.map(_decode_audio_record, request.records))


def _decode_audio_record(record: np.ndarray) -> np.ndarray:
    samples: np.ndarray = soundfile.read(io.BytesIO(record.data), dtype="int16")[0]
    return samples


@contextmanager
def get_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads that each process whole images without OpenMP's intra-op threads.

    An image is just large enough for torch to spread the copying of its bytes over all cores. If every thread of the
    pool did so, they would wait for each other more than they copy.
    """
    process_threads, started = torch.get_num_threads(), threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread inherits the process's number
        torch.set_num_threads(1)  # for this thread, and for all threads that start from now on
        started.wait()

    with ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=start) as pool:
        for _ in range(threads):
            pool.submit(int)
        started.wait()
        torch.set_num_threads(process_threads)  # for threads that start from now on
        yield pool


def resize_all(crop_image: Callable[[int], Tensor], request: Request, pool: ThreadPoolExecutor, threads: int) -> None:
    """Resize and mirror the images of a request into its buffer.

    Args:
        crop_image: returns the box of image 0 .. B - 1, (h, w, C) uint8.
    """
    out, flip = request.out.unbind(), request.parameters.flip.tolist()

    def resize_stride(first: int) -> None:  # one task per image would cost as much as its work
        for i in range(first, len(out), threads):
            resize(crop_image(i), out[i], flip=flip[i])

    list(pool.map(resize_stride, range(threads)))


def crop(image_HWC: Tensor, box: np.ndarray, fill: int) -> Tensor:
    """Return the box (y, x, height, width) of an image as (h, w, C) uint8, with `fill` outside the image."""
    y, x, height, width = (int(v) for v in box)
    rows, columns, channels = image_HWC.shape
    if y >= 0 and x >= 0 and y + height <= rows and x + width <= columns:
        return image_HWC[y : y + height, x : x + width]
    padded = torch.full((height, width, channels), fill, dtype=torch.uint8, device=image_HWC.device)
    y0, x0, y1, x1 = max(y, 0), max(x, 0), min(y + height, rows), min(x + width, columns)
    if y1 > y0 and x1 > x0:
        padded[y0 - y : y1 - y, x0 - x : x1 - x] = image_HWC[y0:y1, x0:x1]
    return padded


def resize(image_HWC: Tensor, out_HWC: Tensor, *, flip: bool) -> None:
    """Resize an image into `out_HWC`, mirrored if `flip`; both uint8.

    Calls the operator behind `interpolate(..., antialias=True)` with its `out` argument: writing in place saves an
    allocation and a copy, two fifths of the time. Mirroring rows of whole pixels afterwards is a sixth of the rest.
    """
    height, width, channels = out_HWC.shape
    target_1CHW = out_HWC.permute(2, 0, 1)[None]
    source_1CHW = image_HWC.permute(2, 0, 1)[None]
    if channels == 1:  # dense in either layout, but the operator takes a slow path unless the strides are NCHW's
        source_1CHW, target_1CHW = source_1CHW.contiguous(), out_HWC.view(1, 1, height, width)
    if source_1CHW.shape == target_1CHW.shape:
        target_1CHW.copy_(source_1CHW)
    else:
        size = [height, width]
        torch.ops.aten._upsample_bilinear2d_aa.out(source_1CHW, size, False, None, None, out=target_1CHW)
    if flip:
        out_HWC.copy_(out_HWC.flip(1))


def decode_image(record: np.ndarray, channels: int) -> Tensor:
    """Return (H, W, C) uint8."""
    with Image.open(io.BytesIO(record.data)) as image:
        image.draft(_MODES[channels], image.size)  # gray of a colour JPEG is its luma as stored, as for DALI
        pixels = np.array(image.convert(_MODES[channels]))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels)
