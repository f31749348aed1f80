"""Checks that a loader on a GPU hands out the images of its labels, however late the model's kernels run."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainyard.data.index import IMAGE
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import EpochOrder


@dataclass(frozen=True)
class ImageCheck:
    """What `compare_with_synchronised_decode` found."""

    images: int  # compared
    wrong: list[int]  # sample ids whose image was another than a synchronised decode gives


def compare_with_synchronised_decode(
    loader: Loader,
    orders: Callable[[int], EpochOrder],
    *,
    steps: int,
    micro_batch_size: int,
    delay: Callable[[], object],
) -> ImageCheck:
    """Read optimizer steps as training with accumulation does, and compare each image's hash with a decode on its own.

    The comparison reads a stream of one micro-batch, to its end, with nothing else on the device: there is no later
    batch that could take its memory.

    Args:
        loader: without augmentation; images differ between training and evaluation otherwise.
        orders: as for `Loader.train`.
        delay: called before each micro-batch is taken; queues kernels that take longer than decoding one, so that the
            stream that computes is behind the loader. `delay_compute` returns one.
    """
    stream = loader.train(orders, epoch=0, start=0, micro_batch_size=micro_batch_size)
    found: list[tuple[np.ndarray, list[str]]] = []
    try:
        for _ in range(steps):
            step = list(_take_step(stream, delay))
            found += [(_read_ids(micro), hash_images(micro.batch[IMAGE])) for micro in step]
    finally:
        stream.close()
    wrong: list[int] = []
    for ids, hashes in found:
        (alone,) = loader.evaluate(ids, batch_size=len(ids))
        if loader.device.type == "cuda":
            torch.cuda.synchronize(loader.device)
        pairs = zip(ids.tolist(), hashes, hash_images(alone.batch[IMAGE]), strict=True)
        wrong += [number for number, ours, theirs in pairs if ours != theirs]
    return ImageCheck(sum(len(ids) for ids, _ in found), wrong)


def delay_compute(device: torch.device, *, cycles: int = 200_000_000) -> Callable[[], None]:
    """Return what keeps the current stream of a GPU busy for `cycles` of its clock; nothing on the host."""

    def delay() -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    return delay


def hash_images(images: Tensor) -> list[str]:
    """Return the SHA-256 of each image of a batch; waits for the device."""
    return [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images.contiguous().cpu()]


def _take_step(stream: Iterator[MicroBatch], delay: Callable[[], object]) -> Iterator[MicroBatch]:
    while True:
        delay()
        micro = next(stream)
        yield micro
        if micro.last:
            return


def _read_ids(micro: MicroBatch) -> np.ndarray:
    ids: np.ndarray = micro.batch["sample_id"].cpu().numpy()
    return ids
