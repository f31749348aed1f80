"""Checks that images which are decoded while the device computes are those of a decoder that waits after each batch."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.data.index import ENCODED_IMAGE
from trainyard.data.loader import IMAGE, Loader
from trainyard.tools.gpu_checks.card import measure_device_rate, wait_for_device
from trainyard.tools.gpu_checks.check import CheckFailed, Figures, NotRun, Sizes
from trainyard.tools.gpu_checks.preset_steps import PresetSteps, count_samples, open_preset
from trainyard.train.run_context import TRAIN, RunContext, make_loader

LEVELS = 3
"""Of 255: nvJPEG's inverse transform and DALI's GPU resize round differently from the host's."""

_MICRO_BATCHES = 8  # read one after another, as by a step that accumulates: more than any decoder has in flight
_REFERENCE_IMAGES = 16
_BUSY_MATRIX = 4096
_BUSY_PRODUCTS = 20  # queued before each micro-batch is taken, so that the device is far behind the host


@dataclass(frozen=True)
class _Images:
    """What the device saw of one micro-batch."""

    ids: Tensor  # (B,) int64
    images: Tensor  # (B, C, H, W) float32


def compare_decoding(device: torch.device, sizes: Sizes, *, preset: str) -> Figures:
    """Read the same micro-batches on a busy device and one at a time; compare ids and images hash by hash.

    A decoder that reuses memory which the device has yet to read gives other images the first time. On the CPU the
    same code runs with the host's decoder, and nothing is queued. Then compare with the reference decoder, and time.

    Raises:
        CheckFailed: an image differs.
        NotRun: the preset's data has no encoded images.
    """
    with open_preset(preset, [], sizes) as steps:
        context = steps.context
        records = context.data.records
        if IMAGE not in records or records[IMAGE].kind != ENCODED_IMAGE:
            raise NotRun(f"the data of {preset} has no encoded images")
        late = _read_images(steps, _make_queue(device))
        single = _read_images(steps, lambda: wait_for_device(device))
        _compare_hashes(late, single)
        levels = _compare_with_reference(context)
        with closing(steps.open_stream()) as stream:
            next(stream)
            rate = measure_device_rate(lambda: count_samples(next(stream)), device, seconds=sizes.seconds)
        return {
            "preset": preset,
            "decode": context.decode,
            "threads": context.threads,
            "micro_batch_size": len(single[0].ids),
            "images": sum(len(batch.ids) for batch in single),
            "levels_from_reference": round(levels, 3),
            "images_per_s": round(rate, 1),
        }


def _make_queue(device: torch.device) -> Callable[[], None]:
    """Return a function that queues some tenths of a second of work on the device, and does not wait for it."""
    if device.type == "cpu":
        return lambda: None
    a = torch.randn(_BUSY_MATRIX, _BUSY_MATRIX, device=device)
    out = torch.empty_like(a)

    def queue() -> None:
        for _ in range(_BUSY_PRODUCTS):
            torch.mm(a, a, out=out)

    return queue


def _read_images(steps: PresetSteps, before_each: Callable[[], None]) -> list[_Images]:
    """Read micro-batches one after another; keep what the device reads of each, not the batch itself."""
    kept = []
    with closing(steps.open_stream()) as stream:
        for _ in range(_MICRO_BATCHES):
            before_each()
            batch = next(stream).batch
            kept.append(_Images(batch["sample_id"].clone(), batch[IMAGE].clone()))
    wait_for_device(steps.context.device)
    return kept


def _compare_hashes(late: list[_Images], single: list[_Images]) -> None:
    for number, (a, b) in enumerate(zip(late, single, strict=True)):
        if not torch.equal(a.ids, b.ids):
            raise CheckFailed(f"micro-batch {number} has other samples when the device is busy: their order changed")
        wrong = [i for i, (x, y) in enumerate(zip(_hash(a.images), _hash(b.images), strict=True)) if x != y]
        if wrong:
            raise CheckFailed(
                f"micro-batch {number}: {len(wrong)} of {len(b.ids)} images are others when the device is busy, the "
                f"first is sample {int(b.ids[wrong[0]])}: memory is overwritten before the device has read it"
            )


def _hash(images: Tensor) -> list[str]:
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in images.cpu()]


def _compare_with_reference(context: RunContext) -> float:
    """Return the largest difference from Pillow's images, without augmentation, in levels of 255."""
    ids = context.splits[TRAIN][:_REFERENCE_IMAGES]
    reference = Loader.from_config(
        context.config, context.data, device=torch.device("cpu"), decode="cpu", threads=context.threads
    )
    images = []
    for loader in (make_loader(context), reference):
        with closing(loader.evaluate(ids, batch_size=len(ids))) as stream:
            images.append(next(stream).batch[IMAGE].cpu())
    levels = float((images[0] - images[1]).abs().max()) * context.config.image.std * 255
    if not levels <= LEVELS:
        raise CheckFailed(
            f"images differ from the reference decoder's by {levels:.1f} of 255 levels, allowed: {LEVELS}"
        )
    return levels
