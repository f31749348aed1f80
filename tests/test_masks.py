"""Masks and further images follow the image of their sample, with either decoder."""

import io
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from tests.test_loader import AUGMENTATION, BACK_ENDS, COUNT, IMAGE, are_equal, make_loader, train
from trainyard.config.settings import AugmentSettings
from trainyard.data.index import read_index
from trainyard.data.pack import pack
from trainyard.data.shards import Loaded, Mask, Sample, ShardSet, verify

LEVELS = np.array([40, 160], dtype=np.uint8)
"""The gray level of each class. Pixels outside an image are 255, as in a mask."""

GEOMETRY = AugmentSettings(rotate_deg=20, shift=0.1, zoom=0.2, crop_area_min=0.4, crop_aspect_max=1.3, flip=0.5)


def draw_mask(number: int) -> np.ndarray:
    """Return classes that no mirroring or rotation leaves as they are, of another size in each sample."""
    mask = np.zeros((96 + number, 130 - number), dtype=np.uint8)
    mask[:60, : 30 + number] = 1
    mask[70:, 80:] = 1
    return mask


def load(number: int) -> Loaded:
    mask = draw_mask(number)
    return {
        "image": encode(LEVELS[mask]),
        "same": encode(LEVELS[mask]),
        "double": encode(LEVELS[mask.repeat(2, 0).repeat(2, 1)]),
        "mask": Mask(mask),
        "fine": Mask(mask.repeat(2, 0).repeat(3, 1)),
    }


def encode(pixels: np.ndarray) -> bytes:
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return png.getvalue()


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    out = tmp_path_factory.mktemp("masks") / "packed"
    samples = [Sample(f"{number:02}", partial(load, number)) for number in range(COUNT)]
    return pack(samples, out, meta={}, workers=1, shard_mib=0.02)


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_mask_and_further_images_follow_the_image_through_augmentation(masks, decode):
    gray = replace(IMAGE, height_px=48, width_px=64, mean=0, std=1 / 255)
    steps = train(masks, 4, decode=decode, micro=3, image=gray, augmentation=GEOMETRY)
    differing, pixels = 0, 0
    for batch in (micro.batch for micro in itertools.chain(*steps)):
        assert batch["mask"].dtype == torch.int64 and batch["mask"].shape == (len(batch["sample_id"]), 48, 64)
        assert torch.equal(batch["same"], batch["image"])
        assert torch.equal(batch["fine"], batch["mask"]), "the same classes in smaller pixels"
        levels = torch.tensor([*LEVELS.tolist(), 255.0])
        shown = (batch["image"] - levels.view(1, 3, 1, 1)).abs().argmin(1)  # between two classes lies none but an edge
        differing += int((shown != batch["mask"].clamp(max=2)).sum())
        pixels += shown.numel()
        assert (batch["double"] - batch["image"]).abs().mean() < 3, "gray levels: only the antialiasing differs"
    assert differing < 0.08 * pixels, "edges are blurred in the image, and not in the mask"


def test_an_evaluation_samples_masks_as_pillow_does_without_interpolation(masks):
    (micro,) = make_loader(masks, augmentation=AUGMENTATION).evaluate(np.arange(COUNT), batch_size=COUNT)
    for number in range(COUNT):
        expected = Image.fromarray(draw_mask(number)).resize((32, 24), Image.Resampling.NEAREST)
        assert np.array_equal(micro.batch["mask"][number].numpy(), np.asarray(expected))


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_a_letterboxed_mask_has_255_where_no_pixel_of_the_image_is(masks, decode):
    image = replace(IMAGE, height_px=64, width_px=40, fit="letterbox")
    loader = make_loader(masks, decode=decode, image=image, augmentation=AugmentSettings())
    (micro,) = loader.evaluate(np.arange(1), batch_size=1)
    (mask_HW,) = micro.batch["mask"]
    height = round(96 * 40 / 130)
    assert set(mask_HW[:height].unique().tolist()) == {0, 1}
    assert set(mask_HW[height + 1 :].unique().tolist()) == {255}


def test_both_decoders_give_bitwise_equal_masks_and_further_images(masks):
    pytest.importorskip("nvidia.dali")
    ours, theirs = (train(masks, 8, decode=decode, micro=3) for decode in ("cpu", "dali"))
    assert all(are_equal(a, b) for a, b in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))


def test_packed_masks_are_png_files_that_verify_compares_with_the_index(masks):
    records = read_index(masks.folder).records["mask"]
    assert (records.kind, records.shape[3].tolist()) == ("mask", [99, 127, 1])
    (png,) = masks.read_bytes("mask", np.array([3]))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png.tobytes()))), draw_mask(3))
    assert list(verify(masks.folder)) == []
