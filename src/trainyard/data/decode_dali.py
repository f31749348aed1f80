"""Decodes with NVIDIA DALI: on the GPU if there is one, with DALI's CPU operators otherwise.

The only file that imports nvidia.dali.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.tensors import TensorCPU
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trainyard.data.decode_cpu import AnyAudioRequest, AnyRequest, crop, get_pool, resize_all

_QUEUE = 3  # batches that DALI decodes ahead on the host
_GROUP_IMAGES = 128  # images per DALI batch; fewer are slower on two cores, more are not faster
_GROUP_BYTES = 32 << 20  # decoded bytes per DALI batch: limits the queue's memory if images are large


def decode(
    requests: Iterator[AnyRequest],
    *,
    channels: int,
    fill: int,
    threads: int,
    max_batch_size: int,
    device_id: int | None,
) -> Iterator[tuple[AnyRequest, Tensor]]:
    """Decode, crop, resize and mirror, one micro-batch per request, as `decode_cpu.decode` does.

    Without a GPU, DALI decodes only the box (bit-equal to cropping the whole image) and torch resizes into the
    request's buffer, because DALI's antialiased CPU resize alone costs as much as the decoding. With a GPU, everything
    runs there, and the result is new memory on the device.

    Args:
        max_batch_size: the largest number of images in any request.
        device_id: CUDA device; None: decode on the host.

    Yields:
        request: in the order of `requests`.
        images: (B, H, W, C) uint8.
    """
    common = {"channels": channels, "fill": fill, "threads": threads, "max_batch_size": max_batch_size}
    if device_id is None:
        return _decode_on_host(requests, **common)
    return _decode_on_gpu(requests, **common, device_id=device_id)


def _decode_on_host(
    requests: Iterator[AnyRequest], *, channels: int, fill: int, threads: int, max_batch_size: int
) -> Iterator[tuple[AnyRequest, Tensor]]:
    """Give DALI several requests per batch, because its threads wait for each other at the end of each batch."""
    pending: deque[tuple[list[AnyRequest], np.ndarray]] = deque()  # requests that DALI took ahead, not yet decoded
    most = -(-_GROUP_IMAGES // max_batch_size)

    def feed() -> tuple[Any, ...]:
        group = _group_requests(requests, most, channels)
        box = np.concatenate([request.parameters.box for request in group])
        inner, outer = split_box(box, np.concatenate([request.shapes for request in group]))
        pending.append((group, outer))
        return _wrap_inputs([record for request in group for record in request.records], *np.hsplit(inner, 2))

    pipeline = Pipeline(
        batch_size=most * max_batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=_QUEUE
    )
    with pipeline:
        pipeline.set_outputs(_decode(*_declare_inputs(feed, 3), device="cpu", channels=channels))
    pipeline.build()
    with get_pool(threads) as pool:
        while (images := _run_pipeline(pipeline)) is not None:
            group, outer = pending.popleft()
            first = 0
            for request in group:

                def crop_image(i: int, first: int = first, images: Any = images, outer: Any = outer) -> Tensor:
                    return crop(from_dlpack(images[first + i]), outer[first + i], fill)

                resize_all(crop_image, request, pool, threads)
                yield request, request.out
                first += len(request.records)


def _group_requests(requests: Iterator[AnyRequest], most: int, channels: int) -> list[AnyRequest]:
    """Take one request, and more up to `most` while they decode to less than `_GROUP_BYTES`.

    Raises:
        StopIteration: no request is left; it ends the pipeline.
    """
    group = [next(requests)]
    decoded_bytes = 0
    while len(group) < most:
        decoded_bytes += int(group[-1].parameters.box[:, 2:].prod(axis=1).sum()) * channels
        request = next(requests, None) if decoded_bytes < _GROUP_BYTES else None
        if request is None:
            break
        group.append(request)
    return group


def _decode_on_gpu(
    requests: Iterator[AnyRequest], *, channels: int, fill: int, threads: int, max_batch_size: int, device_id: int
) -> Iterator[tuple[AnyRequest, Tensor]]:
    pending: deque[AnyRequest] = deque()  # requests that DALI took ahead, not yet decoded
    alive: deque[AnyRequest] = deque(maxlen=8)  # DALI reads records in place, and runs ahead by fewer than 8 requests

    def feed() -> tuple[Any, ...]:
        request = next(requests)  # its StopIteration ends the pipeline
        pending.append(request)
        alive.append(request)
        inner, outer = split_box(request.parameters.box, request.shapes)
        size = np.tile(np.array(request.out.shape[1:3], dtype=np.int32), (len(inner), 1))
        flip = request.parameters.flip.astype(np.int32)
        return _wrap_inputs(request.records, *np.hsplit(inner, 2), *np.hsplit(outer, 2), size, flip)

    pipeline = Pipeline(batch_size=max_batch_size, num_threads=threads, device_id=device_id, prefetch_queue_depth=2)
    with pipeline:
        pipeline.set_outputs(_build_gpu_graph(feed, channels=channels, fill=fill))
    pipeline.build()
    while (images := _run_pipeline(pipeline)) is not None:
        yield pending.popleft(), from_dlpack(images.as_tensor()).clone()  # DALI reuses its memory two runs later


def _wrap_inputs(records: list[np.ndarray], *more: np.ndarray) -> tuple[Any, ...]:
    """Return the inputs that `_declare_inputs` declares.

    Wrapping each record here halves the time that DALI spends on inspecting it.
    """
    return ([TensorCPU(record) for record in records], *map(np.ascontiguousarray, more))


def decode_audio(
    requests: Iterator[AnyAudioRequest], *, threads: int, max_batch_size: int
) -> Iterator[tuple[AnyAudioRequest, list[np.ndarray]]]:
    """Decode the audio of each request, as `decode_cpu.decode_audio` does; DALI decodes audio on the host only.

    Args:
        max_batch_size: the largest number of files in any request.
    """
    pending: deque[AnyAudioRequest] = deque()  # requests that DALI took ahead, not yet decoded

    def feed() -> list[np.ndarray]:
        request = next(requests)  # its StopIteration ends the pipeline
        pending.append(request)
        return request.records

    pipeline = Pipeline(batch_size=max_batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=2)
    with pipeline:
        records = fn.external_source(source=feed, batch=True, no_copy=True, dtype=types.UINT8, ndim=1)
        audio, _ = fn.decoders.audio(records, dtype=types.INT16, downmix=False)
        pipeline.set_outputs(fn.squeeze(audio, axes=[1]))
    pipeline.build()
    while (decoded := _run_pipeline(pipeline)) is not None:
        yield pending.popleft(), [np.array(decoded.at(i)) for i in range(len(decoded))]


def split_box(box: np.ndarray, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split boxes that may extend beyond their images, since the decoder only takes boxes inside.

    Args:
        box: (B, 4) int32 y, x, height, width.
        shapes: (B, 3) height, width, channels.

    Returns:
        inner: (B, 4) int32, the part inside the image; one pixel if there is none.
        outer: (B, 4) int32, the whole box relative to the inner one's corner.
    """
    low = np.maximum(box[:, :2], 0)
    high = np.minimum(box[:, :2] + box[:, 2:], shapes[:, :2])
    outside = (high <= low).any(axis=1, keepdims=True)
    low, high = np.where(outside, 0, low), np.where(outside, 1, high)
    inner = np.concatenate([low, high - low], axis=1).astype(np.int32)
    outer = np.concatenate([box[:, :2] - low, box[:, 2:]], axis=1).astype(np.int32)
    return inner, outer


def _run_pipeline(pipeline: Any) -> Any | None:
    """Return the next batch, None at the end."""
    try:
        return pipeline.run()[0]
    except StopIteration:
        return None


def _declare_inputs(feed: Any, count: int) -> list[Any]:
    """Declare what `feed` returns: records (uint8), then `count` - 1 int32 inputs; the seventh, flip, is scalar."""
    return list(
        fn.external_source(
            source=feed,
            num_outputs=count,
            batch=True,
            no_copy=True,
            dtype=[types.UINT8, *[types.INT32] * (count - 1)],
            ndim=[1, 1, 1, 1, 1, 1, 0][:count],
        )
    )


def _decode(records: Any, start: Any, size: Any, *, device: str, channels: int) -> Any:
    return fn.decoders.image_slice(
        records,
        start=start,
        shape=size,
        axes=[0, 1],
        device=device,
        output_type=types.GRAY if channels == 1 else types.RGB,  # explicit: ANY_DATA corrupts memory on gray JPEG
        adjust_orientation=False,  # packing has applied it
    )


def _build_gpu_graph(feed: Any, *, channels: int, fill: int) -> Any:
    records, start, shape, outer_start, outer_shape, size, flip = _declare_inputs(feed, 7)
    images = _decode(records, start, shape, device="mixed", channels=channels)
    images = fn.slice(
        images, outer_start, outer_shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=[float(fill)]
    )
    size = fn.cast(size, dtype=types.FLOAT)
    images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.flip(images, horizontal=flip)
