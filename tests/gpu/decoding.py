"""Checks that images which are decoded while the device computes are those of a decoder that waits after each batch."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.gpu.card import measure_device_rate
from tests.gpu.check import Figures, Sizes
from tests.gpu.check_images import compare_with_synchronised_decode, delay_compute
from tests.gpu.preset_steps import count_samples, open_preset
from trainyard.config.settings import AugmentSettings
from trainyard.data.device import shape_channels
from trainyard.data.index import ENCODED_IMAGE, IMAGE, INPUTS
from trainyard.data.loader import Loader
from trainyard.text import join_names
from trainyard.train.run_context import TRAIN, RunContext, make_loader

LEVELS = 3
"""Of 255: nvJPEG's inverse transform and DALI's GPU resize round differently from the host's."""

_STEPS = 2
_ACCUMULATED = 4  # micro-batches of a step: with two steps more than any decoder has in flight
_REFERENCE_IMAGES = 16


def compare_decoding(device: torch.device, sizes: Sizes, *, preset: str) -> Figures:
    """Read steps that accumulate micro-batches on a busy device; compare each image's hash with a decode on its own.

    A decoder that reuses memory which the device has yet to read hands out another image under a label. On the CPU the
    same code runs with the host's decoder, and nothing delays the device. Then compare with the reference decoder, and
    time.

    Raises:
        AssertionError: an image differs.
    """
    with open_preset(preset, [], sizes) as steps:
        context = steps.context
        records = context.data.records
        if IMAGE not in records or records[IMAGE].kind not in (ENCODED_IMAGE, *INPUTS):
            pytest.skip(f"the data of {preset} has no images")
        found = compare_with_synchronised_decode(
            make_loader(_without_augmentation(context)),
            context.orders,
            steps=_STEPS,
            micro_batch_size=-(-context.config.global_batch_size // _ACCUMULATED),
            delay=delay_compute(device),
        )
        names = join_names([str(number) for number in found.wrong], most=4)
        assert not found.wrong, (
            f"{len(found.wrong)} of {found.images} images change when the device is busy, of samples {names}: "
            "memory is overwritten before the device has read it"
        )
        levels = _compare_with_reference(context)
        with closing(steps.open_stream()) as stream:
            next(stream)
            rate = measure_device_rate(lambda: count_samples(next(stream)), device, seconds=sizes.seconds)
        return {
            "preset": preset,
            "decode": context.decode,
            "threads": context.threads,
            "images": found.images,
            "micro_batches_per_step": _ACCUMULATED,
            "levels_from_reference": round(levels, 3),
            "images_per_s": round(rate, 1),
        }


def _without_augmentation(context: RunContext) -> RunContext:
    """Return a context whose training images are those of an evaluation."""
    config = context.config
    image = replace(config.image, scales=[1.0])
    return replace(context, config=replace(config, image=image, augment=AugmentSettings()))


def _compare_with_reference(context: RunContext) -> float:
    """Return the largest difference from Pillow's images, without augmentation, in levels of 255."""
    ids = context.splits[TRAIN][:_REFERENCE_IMAGES]
    reference = Loader(context.config, context.data, device=torch.device("cpu"), decode="cpu", threads=context.threads)
    images = []
    for loader in (make_loader(context), reference):
        with closing(loader.evaluate(ids, batch_size=len(ids))) as stream:
            images.append(next(stream).batch[IMAGE].cpu())
    std = shape_channels(context.config.image.std, torch.device("cpu"))
    levels = float(((images[0] - images[1]) * std).abs().max()) * 255
    assert levels <= LEVELS, f"images differ from the reference decoder's by {levels:.1f} of 255 levels, not {LEVELS}"
    return levels
