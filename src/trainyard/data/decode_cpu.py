"""The reference decoder: Pillow, torch and soundfile on the host. It defines decoding; DALI must agree with it."""

import io
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor

from trainyard.data.augment import Parameters
from trainyard.data.host_batch import HostBatch

_MODES = {1: "L", 3: "RGB"}
_GRAY_TOGETHER = 4  # channels of the operator that resizes
_upsample = torch.ops.aten._upsample_bilinear2d_aa


@dataclass(frozen=True)
class Request:
    """One micro-batch to decode."""

    records: list[np.ndarray]  # B encoded images, uint8
    shapes: np.ndarray  # (B, 3) int32: height, width, channels of each
    parameters: Parameters
    out: Tensor  # (B, H, W, C) uint8 on the host, the loader's buffer, which the decoder fills
    batch: Any = None  # the loader's
    to_stored: np.ndarray | None = None  # of masks: (B, 2, 3) from pixels of the input to pixels of the stored mask


OUTSIDE = 255
"""The class in a mask where the model's input shows nothing of the stored image."""

AudioRequest = tuple[HostBatch, list[np.ndarray]]
"""One micro-batch of audio: the loader's batch, and B WAV or FLAC files, uint8, or (frames,) int16 recordings."""


def decode(requests: Iterator[Request], *, channels: int, fill: int, threads: int) -> Iterator[tuple[Request, Tensor]]:
    """Decode, crop, resize and mirror, one micro-batch per request.

    A decoder may take requests ahead of those it has yielded, but fills `out` only just before it yields the request.

    Yields:
        request: in the order of `requests`.
        images: (B, H, W, C) uint8, the request's `out`. Resizing is bilinear with antialiasing (a triangle filter as
            wide as the scale), rounded to uint8, as in Pillow. Masks are not resized, but moved (`_move_mask`).
    """
    with get_pool(threads) as pool:
        for request in requests:

            def crop_image(i: int, request: Request = request) -> Tensor:
                return crop(_decode_record(request, i, channels=channels), request.parameters.box[i], fill)

            if request.to_stored is None:
                resize_all(crop_image, request, pool, max(1, threads))
            else:
                list(pool.map(partial(_move_mask, request), range(len(request.records))))
            yield request, request.out


def _decode_record(request: Request, i: int, *, channels: int) -> Tensor:
    image_HWC = decode_image(request.records[i], channels)
    if list(image_HWC.shape[:2]) != request.shapes[i, :2].tolist():
        raise ValueError("an image has another size than the index says")  # the loader names it
    return image_HWC


def _move_mask(request: Request, i: int) -> None:
    """Give each pixel of mask `i` of `out` the class at its centre; OUTSIDE beyond the box or the mask."""
    assert request.to_stored is not None
    mask_HW, out_HW = _decode_record(request, i, channels=1).numpy()[:, :, 0], request.out[i, :, :, 0].numpy()
    y, x = np.ogrid[: out_HW.shape[0], : out_HW.shape[1]]
    column, row = (
        np.floor(a * (x + 0.5) + b * (y + 0.5) + c).astype(np.int64) for a, b, c in request.to_stored[i].tolist()
    )
    corner, size = np.split(request.parameters.box[i], 2)
    (top, left), (bottom, right) = np.maximum(corner, 0), np.minimum(corner + size, mask_HW.shape)
    is_inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    out_HW[:] = OUTSIDE
    out_HW[is_inside] = mask_HW[row[is_inside], column[is_inside]]


def decode_audio(requests: Iterator[AudioRequest], *, threads: int) -> Iterator[AudioRequest]:
    """Decode the files of each request, in order."""
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") if threads else CallerThread() as pool:
        for batch, records in requests:
            yield batch, list(pool.map(decode_recording, records))


def decode_recording(record: np.ndarray) -> np.ndarray:
    """Return a mono recording, (frames,) int16."""
    samples: np.ndarray = soundfile.read(io.BytesIO(record.data), dtype="int16")[0]
    return samples


class CallerThread(Executor):
    """Does work at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that has the result."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def get_pool(threads: int) -> Iterator[Executor]:
    """Start threads that each process whole images without OpenMP's intra-op threads; 0: the caller's does.

    An image is just large enough for torch to spread the copying of its bytes over all cores. If every thread of the
    pool did so, they would wait for each other more than they copy.
    """
    if not threads:
        yield CallerThread()
        return
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


def resize_all(crop_image: Callable[[int], Tensor], request: Request, pool: Executor, threads: int) -> None:
    """Resize and mirror the images of a request into its buffer.

    Args:
        crop_image: returns the box of image 0 .. B - 1, (h, w, C) uint8.
    """
    out, flip = request.out.unbind(), request.parameters.flip.tolist()
    is_gray = request.out.shape[3] == 1
    most = min(_GRAY_TOGETHER, math.ceil(len(out) / threads)) if is_gray else 1
    groups = _group_by_size(request.parameters.box[:, 2:], most)

    def resize_stride(first: int) -> None:  # one task per image would cost as much as its work
        for group in groups[first::threads]:
            crops = [crop_image(i) for i in group]
            if is_gray:
                resize_gray(crops, [out[i] for i in group], flip=[flip[i] for i in group])
            else:
                resize(crops[0], out[group[0]], flip=flip[group[0]])

    list(pool.map(resize_stride, range(threads)))


def _group_by_size(sizes: np.ndarray, most: int) -> list[list[int]]:
    """Return the places of equal rows of `sizes`, up to `most` together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, size in enumerate(map(tuple, sizes.tolist())):
        alike.setdefault(size, []).append(i)
    return [places[i : i + most] for places in alike.values() for i in range(0, len(places), most)]


def crop(image_HWC: Tensor, box: np.ndarray, fill: int) -> Tensor:
    """Return the box (y, x, height, width) of an image as (h, w, C) uint8, with `fill` outside the image."""
    y, x, height, width = (int(v) for v in box)
    rows, columns, channels = image_HWC.shape
    if y >= 0 and x >= 0 and y + height <= rows and x + width <= columns:
        return image_HWC[y : y + height, x : x + width]
    padded = torch.full((height, width, channels), fill, dtype=torch.uint8)
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
    if channels == 1:
        resize_gray([image_HWC], [out_HWC], flip=[flip])
        return
    if image_HWC.shape == out_HWC.shape:
        out_HWC.copy_(image_HWC)
    else:
        source_1CHW, target_1CHW = (tensor.permute(2, 0, 1)[None] for tensor in (image_HWC, out_HWC))
        size = [height, width]
        _upsample.out(source_1CHW, size, False, None, None, out=target_1CHW)
    if flip:
        out_HWC.copy_(out_HWC.flip(1))


def resize_gray(images_HW1: list[Tensor], outs_HW1: list[Tensor], *, flip: list[bool]) -> None:
    """Resize up to four gray images of one size, each into its own of `outs_HW1`, mirrored where `flip`; all uint8.

    They are the channels of one image: the operator always computes four, each by itself, so four images take a third
    of the time that they take one after the other, and get the same levels.
    """
    source_1CHW = torch.stack([image.squeeze(2) for image in images_HW1])[None]
    size = list(outs_HW1[0].shape[:2])
    is_resized = list(source_1CHW.shape[2:]) == size
    resized_1CHW = source_1CHW if is_resized else _upsample(source_1CHW, size, False, None, None)
    for plane_HW, out_HW1, mirrored in zip(resized_1CHW[0], outs_HW1, flip, strict=True):
        out_HW1.squeeze(2).copy_(plane_HW.flip(1) if mirrored else plane_HW)


def decode_image(record: np.ndarray, channels: int) -> Tensor:
    """Return (H, W, C) uint8."""
    with Image.open(io.BytesIO(record.data)) as image:
        image.draft(_MODES[channels], image.size)  # gray of a colour JPEG is its luma as stored, as for DALI
        pixels = np.array(image.convert(_MODES[channels]))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels)
