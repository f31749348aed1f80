"""Checks who decodes images, and that those decoded while the device computes are those of a decoder that waits."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.card import measure_device_rate
from tests.gpu.check import Figures, Sizes, cannot_answer
from tests.gpu.check_images import compare_with_synchronised_decode, delay_compute
from tests.gpu.preset_steps import count_samples, open_preset, prepare_preset
from trainyard.config import compose as configs
from trainyard.config.settings import AugmentSettings
from trainyard.data.device import shape_channels
from trainyard.data.index import ENCODED_IMAGE, IMAGE, INPUTS
from trainyard.data.loader import Loader
from trainyard.data.shards import ShardSet
from trainyard.data.store import has_inputs
from trainyard.text import join_names
from trainyard.train.run_context import TRAIN, RunContext, make_loader

LEVELS = 3
"""Of 255: nvJPEG's inverse transform and DALI's GPU resize round differently from the host's."""

_STEPS = 2
_ACCUMULATED = 4  # micro-batches of a step: with two steps more than any decoder has in flight
_REFERENCE_IMAGES = 16
_JPEG = b"\xff\xd8"  # how a file of it begins
_DECODER = rb"decoders?__Image\w*.*?\x06device\x12\x06string\*.(\w+)"  # in a graph's protobuf


def compare_decoding(device: torch.device, sizes: Sizes, *, preset: str) -> Figures:
    """Read steps that accumulate micro-batches on a busy device; compare each image's hash with a decode on its own.

    A decoder that reuses memory which the device has yet to read hands out another image under a label. On the CPU the
    same code runs with the host's decoder, and nothing delays the device. Then compare with the reference decoder, and
    time.

    Raises:
        AssertionError: an image differs.
    """
    if not _has_images(preset, sizes):
        cannot_answer(f"the data of {preset} has no images")
    with _record_decoders() as decoders, open_preset(preset, [], sizes) as steps:
        context = steps.context
        if device.type == "cuda" and context.decode != "dali":
            pytest.skip("nvidia.dali is missing here, which decodes on the GPU")
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
            images_on = next(stream).batch[IMAGE].device.type
            rate = measure_device_rate(lambda: count_samples(next(stream)), device, seconds=sizes.seconds)
        records = context.data.records
        (record,) = context.data.read_bytes(IMAGE, context.splits[TRAIN][:1])
        return {
            "preset": preset,
            "decode": context.decode,
            "decoders": " ".join(sorted(decoders)),
            "format": "jpeg" if record[:2].tobytes() == _JPEG else "png" if record[1:4].tobytes() == b"PNG" else "raw",
            "resized_when_packed": has_inputs(records),
            "images_on": images_on,
            "threads": context.threads,
            "images": found.images,
            "micro_batches_per_step": _ACCUMULATED,
            "levels_from_reference": round(levels, 3),
            "images_per_s": round(rate, 1),
        }


def _has_images(preset: str, sizes: Sizes) -> bool:
    """Return whether a family packs images. Draws the data of its smoke preset, which takes a moment."""
    family = configs.compose(preset, [], sizes.jobs).family
    config = prepare_preset(f"{family}_smoke", [], sizes)
    with closing(ShardSet(Path(config.data.path))) as data:
        return IMAGE in data.records and data.records[IMAGE].kind in (ENCODED_IMAGE, *INPUTS)


def judge_decoder(figures: Figures, device: torch.device) -> None:
    """Check that DALI decodes on the GPU, where there is one, and that images lie there.

    On the host stay PNG, which nvImageCodec decodes there within the same operator, and images that packing resized.
    """
    if device.type == "cpu":
        return
    expected = "cpu" if figures["resized_when_packed"] else "mixed"
    assert figures["decode"] == "dali" and figures["decoders"] == expected, (
        f"DALI's image decoder has the device '{figures['decoders']}', not '{expected}' (decode={figures['decode']})"
    )
    assert figures["images_on"] == device.type, f"images lie on the {figures['images_on']}, not on the {device.type}"


@contextmanager
def _record_decoders() -> Iterator[set[str]]:
    """Yield a set that gets the device of the image decoder in each graph of DALI: cpu, or mixed for a GPU."""
    found: set[str] = set()
    try:
        from trainyard.data import decode_dali
    except ImportError:  # without DALI
        yield found
        return

    class RecordedPipeline(decode_dali.Pipeline):  # type: ignore[misc]  # DALI has no types
        def build(self) -> None:
            super().build()
            found.update(name.decode() for name in re.findall(_DECODER, self.serialize(), re.DOTALL))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_dali, "Pipeline", RecordedPipeline)
        yield found


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
    # at the edges DALI's resize on a GPU repeats pixels where torch and Pillow leave them out
    levels = round(
        float(((images[0] - images[1]) * std)[..., 1:-1, 1:-1].abs().max()) * 255, 2
    )  # whole, but for float32
    assert levels <= LEVELS, f"images differ from the reference decoder's by {levels:.1f} of 255 levels, not {LEVELS}"
    return levels
