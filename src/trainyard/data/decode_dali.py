"""Decodes with NVIDIA DALI: on the GPU if there is one, with DALI's CPU operators otherwise.

The only file that imports nvidia.dali.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import backend as _untyped_backend
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.tensors import TensorCPU
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trainyard.choice import Choice
from trainyard.data.decode_cpu import AudioRequest, Request, crop, get_pool, resize_all
from trainyard.data.transfer import CopyStream

backend: Any = _untyped_backend  # its stubs lack the memory pools
_HOST_QUEUE = 3  # batches that DALI decodes ahead on the host
_GPU_QUEUE = 2
_GROUP_IMAGES = 128  # images per DALI batch; fewer are slower on two cores, more are not faster
_GROUP_BYTES = 32 << 20  # decoded bytes per DALI batch: limits the queue's memory if images are large


class ImageDecoder:
    """Decodes streams of requests, one after another, as `decode_cpu.decode` does.

    A pipeline costs memory and start-up, so a stream that is read to its end leaves its pipeline to the next one.

    Without a GPU, DALI decodes only the box (bit-equal to cropping the whole image) and torch resizes into the
    request's buffer, because DALI's antialiased CPU resize alone costs as much as the decoding. With a GPU, everything
    runs there (`_build_gpu_graph`), and the result is new memory on the device.
    """

    def __init__(self, *, channels: int, fill: int, threads: int, copies: CopyStream | None = None) -> None:
        """Build a decoder.

        Args:
            copies: the stream that copies on the GPU that decodes; None: decode on the host.
        """
        self._channels, self._fill, self._threads, self._copies = channels, fill, threads, copies
        self._idle: _ImagePipeline | None = None

    def decode(self, requests: Iterator[Request], *, max_batch_size: int) -> Iterator[tuple[Request, Tensor]]:
        """Decode, crop, resize and mirror, one micro-batch per request.

        Args:
            max_batch_size: the largest number of images in any request.

        Yields:
            request: in the order of `requests`.
            images: (B, H, W, C) uint8; on a GPU, for the stream `copies` to hand over.
        """
        pipeline, self._idle = self._idle, None
        if pipeline is None or pipeline.max_batch_size < max_batch_size:
            pipeline = _ImagePipeline(
                channels=self._channels,
                fill=self._fill,
                threads=self._threads,
                max_batch_size=max_batch_size,
                device_id=None if self._copies is None else self._copies.device.index,
            )
        pipeline.start(requests)
        yield from self._resize(pipeline) if self._copies is None else self._copy(pipeline, self._copies)
        pipeline.reset()
        self._idle = pipeline
        if self._copies is not None:
            backend.ReleaseUnusedMemory()  # torch's allocator cannot take what DALI's pools keep

    def _resize(self, pipeline: "_ImagePipeline") -> Iterator[tuple[Any, Tensor]]:
        with get_pool(self._threads) as pool:
            while (images := pipeline.run()) is not None:
                group = pipeline.pop_group()
                _, outer = split_box(_join_boxes(group), np.concatenate([request.shapes for request in group]))
                first = 0
                for request in group:

                    def crop_image(i: int, first: int = first, images: Any = images, outer: Any = outer) -> Tensor:
                        return crop(from_dlpack(images[first + i]), outer[first + i], self._fill)

                    resize_all(crop_image, request, pool, self._threads)
                    yield request, request.out
                    first += len(request.records)

    def _copy(self, pipeline: "_ImagePipeline", copies: CopyStream) -> Iterator[tuple[Any, Tensor]]:
        """Copy what DALI decoded into new memory: it takes its own back when the pipeline runs again."""

        def copy(images: Any) -> list[tuple[Any, Tensor]]:
            group = pipeline.pop_group()
            whole: Any = from_dlpack(images.as_tensor())
            parts = whole.split([len(request.records) for request in group])
            return [(request, part.clone()) for request, part in zip(group, parts, strict=True)]

        for decoded in copies.run_and_copy(pipeline.run, copy):
            yield from decoded


def choose_gpu_decoding() -> dict[str, Choice[str]]:
    """Let DALI's buffers grow no further than a batch needs; return how a GPU decodes within which memory, and why.

    DALI's pools have no upper limit, and torch's allocator cannot take the memory that they hold.
    """
    backend.SetDeviceBufferGrowthFactor(1.0)
    backend.SetHostBufferGrowthFactor(1.0)
    size = f"{_GROUP_BYTES >> 20} MiB"
    return {
        "decode_memory": Choice(
            f"{_GPU_QUEUE} batches of {size} decoded ahead, or one micro-batch each if that is larger",
            "DALI's pools grow alongside torch's allocator; unused memory is released after each evaluation",
        ),
        "decode_jpeg": Choice(
            "whole images by CUDA kernels; PNG, and inputs that packing has resized, on the host",
            "the GPU's JPEG engine gives other levels, and would take those samples that come first in a batch; "
            "regions fail in nvImageCodec 0.9.0",
        ),
    }


class _ImagePipeline:
    """A pipeline, and the requests that it decodes."""

    def __init__(self, *, channels: int, fill: int, threads: int, max_batch_size: int, device_id: int | None) -> None:
        most = -(-_GROUP_IMAGES // max_batch_size)
        self.max_batch_size = max_batch_size
        self._feed = feed = _Feed(most=most, channels=channels, on_gpu=device_id is not None)
        self._pipeline = pipeline = Pipeline(
            batch_size=most * max_batch_size,
            num_threads=threads,
            device_id=device_id,
            prefetch_queue_depth=_HOST_QUEUE if device_id is None else _GPU_QUEUE,
        )
        with pipeline:
            pipeline.set_outputs(
                _build_cpu_graph(feed.read_batch, channels=channels)
                if device_id is None
                else _build_gpu_graph(feed.read_batch, channels=channels, fill=fill)
            )
        pipeline.build()

    def start(self, requests: Iterator[Request]) -> None:
        """Set the requests that the pipeline decodes until its end."""
        self._feed.start(requests)

    def run(self) -> Any | None:
        """Return the next batch, None at the end; the pipeline's memory, until it runs again."""
        return _run_pipeline(self._pipeline)

    def pop_group(self) -> list[Any]:
        """Return the requests of the batch that `run` has just returned."""
        return self._feed.pending.popleft()

    def reset(self) -> None:
        """Make the pipeline ready for other requests, after its end."""
        self._pipeline.reset()


class _Feed:
    """Source of a pipeline's inputs: several requests per batch, because its threads wait for each other at its end.

    Apart from the pipeline, which refers to it: a cycle would keep both, and the memory on the device, until collected.
    """

    def __init__(self, *, most: int, channels: int, on_gpu: bool) -> None:
        self._most, self._channels, self._on_gpu = most, channels, on_gpu
        self._groups: Iterator[list[Any]] = iter(())
        self.pending: deque[list[Any]] = deque()  # what DALI took ahead; it reads these requests' records in place

    def start(self, requests: Iterator[Request]) -> None:
        assert not self.pending
        self._groups = _group_requests(requests, self._most, self._count_decoded_bytes)

    def read_batch(self) -> tuple[Any, ...]:
        """Return the inputs that `_declare_inputs` declares.

        Raises:
            StopIteration: no request is left; it ends the pipeline.
        """
        group = next(self._groups)
        self.pending.append(group)
        # wrapping each record here halves the time that DALI spends on inspecting it
        records = [TensorCPU(record) for request in group for record in request.records]
        box = _join_boxes(group)
        if self._on_gpu:
            size = np.tile(np.array(group[0].out.shape[1:3], dtype=np.int32), (len(box), 1))
            flip = np.concatenate([request.parameters.flip for request in group]).astype(np.int32)
            numbers = [*np.hsplit(box, 2), size, flip]
        else:
            inner, _ = split_box(box, np.concatenate([request.shapes for request in group]))
            numbers = np.hsplit(inner, 2)
        return (records, *map(np.ascontiguousarray, numbers))

    def _count_decoded_bytes(self, request: Request) -> int:
        """Return the bytes that the decoder writes for a request: on the host its boxes only, on a GPU whole images."""
        sides = request.shapes[:, :2] if self._on_gpu else request.parameters.box[:, 2:]
        return int(sides.prod(axis=1).sum()) * self._channels


def _join_boxes(group: list[Any]) -> np.ndarray:
    return np.concatenate([request.parameters.box for request in group])


def _group_requests(
    requests: Iterator[Request], most: int, count_bytes: Callable[[Request], int]
) -> Iterator[list[Request]]:
    """Yield up to `most` requests at a time that decode to no more than `_GROUP_BYTES` but for the last of them.

    All requests of a group have results of one size, so that a pipeline can return them as one tensor.
    """
    group: list[Request] = []
    decoded_bytes = 0
    for request in requests:
        if group and request.out.shape[1:] != group[0].out.shape[1:]:
            yield group
            group, decoded_bytes = [], 0
        group.append(request)
        decoded_bytes += count_bytes(request)
        if len(group) == most or decoded_bytes >= _GROUP_BYTES:
            yield group
            group, decoded_bytes = [], 0
    if group:
        yield group


def decode_audio(requests: Iterator[AudioRequest], *, threads: int, max_batch_size: int) -> Iterator[AudioRequest]:
    """Decode the audio of each request, as `decode_cpu.decode_audio` does; DALI decodes audio on the host only.

    Args:
        max_batch_size: the largest number of files in any request.
    """
    pending: deque[AudioRequest] = deque()  # requests that DALI took ahead, not yet decoded; it reads their records

    def feed() -> list[np.ndarray]:
        request = next(requests)  # its StopIteration ends the pipeline
        pending.append(request)
        return request[1]

    pipeline = Pipeline(batch_size=max_batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=2)
    with pipeline:
        records = fn.external_source(source=feed, batch=True, no_copy=True, dtype=types.UINT8, ndim=1)
        audio, _ = fn.decoders.audio(records, dtype=types.INT16, downmix=False)
        pipeline.set_outputs(fn.squeeze(audio, axes=[1]))
    pipeline.build()
    while (decoded := _run_pipeline(pipeline)) is not None:
        yield pending.popleft()[0], [np.array(decoded.at(i)) for i in range(len(decoded))]


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
    """Declare what `feed` returns: records (uint8), then `count` - 1 int32 inputs; the fifth, flip, is scalar."""
    return list(
        fn.external_source(
            source=feed,
            num_outputs=count,
            batch=True,
            no_copy=True,
            dtype=[types.UINT8, *[types.INT32] * (count - 1)],
            ndim=[1, 1, 1, 1, 0][:count],
        )
    )


def _list_decoder_options(channels: int) -> dict[str, Any]:
    return {
        "output_type": types.GRAY if channels == 1 else types.RGB,  # explicit: ANY_DATA corrupts memory on gray JPEG
        "adjust_orientation": False,  # packing has applied it
        "jpeg_fancy_upsampling": True,  # of nvJPEG: interpolates chroma as libjpeg does, here and in Pillow
    }


def _build_cpu_graph(feed: Any, *, channels: int) -> Any:
    """Declare how the host decodes a batch: boxes only, which takes less time than whole images."""
    records, start, shape = _declare_inputs(feed, 3)
    return fn.decoders.image_slice(records, start=start, shape=shape, axes=[0, 1], **_list_decoder_options(channels))


def _build_gpu_graph(feed: Any, *, channels: int, fill: int, device: str = "mixed") -> Any:
    """Declare how a GPU makes the images of a batch.

    Whole images are decoded, then cropped. nvImageCodec 0.9.0 fails on regions: with an error on an A100 and a
    segmentation fault on an H100 (its issue 55); and with nvJPEG before 13.2 it decodes regions of subsampled colour on
    the host. The GPU's own JPEG engine stays unused: it would take the first 65 % of each batch by default, its levels
    differ from those of CUDA's kernels (DALI's pull request 2232), and a resumed run begins its batches elsewhere.
    Reported for an A100 in DALI's issue 5362: about 7,000 images a second with the engine, 6,000 without. Not measured.

    The result is the host's to the rounding, but for its edges: there DALI repeats the last pixel for the part of the
    filter that lies outside, where torch and Pillow leave that part out of the mean.

    Args:
        feed: returns records, the boxes' corners and shapes, the sizes of the results, and which to mirror.
        device: where the decoder runs; "cpu" runs the same graph without a GPU.
    """
    records, start, shape, size, flip = _declare_inputs(feed, 5)
    images = fn.decoders.image(records, device=device, hw_decoder_load=0.0, **_list_decoder_options(channels))
    images = fn.slice(images, start, shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=[float(fill)])
    size = fn.cast(size, dtype=types.FLOAT)
    images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.flip(images, horizontal=flip)
