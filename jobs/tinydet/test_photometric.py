"""Photometric augmentation: colour, CLAHE, motion blur, pasting."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from . import photometric
from .config import PhotometricSettings


def make_noise(images: int, **columns: float) -> torch.Tensor:
    noise = torch.full((images, 32), 0.5)
    for name, value in columns.items():
        noise[:, getattr(photometric, name)] = value
    return noise


def test_lab_has_its_known_values_and_converts_back() -> None:
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0.5, 0.5, 0.5]]).T.view(1, 3, 1, 5)
    known = [[53.24, 80.09, 67.20], [87.73, -86.18, 83.18], [32.30, 79.19, -107.86], [100, 0, 0], [53.39, 0, 0]]
    lab = photometric.rgb_to_lab(colours)
    assert torch.allclose(lab[0, :, 0].T, torch.tensor(known), atol=0.02)
    image = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(photometric.lab_to_rgb(photometric.rgb_to_lab(image)), image, atol=1e-5)


def equalise(level: np.ndarray, *, clip: float, tiles: int) -> np.ndarray:
    """Apply CLAHE to integer levels 0..255 by its definition, pixel by pixel; sides are multiples of `tiles`."""
    tall, wide = level.shape[0] // tiles, level.shape[1] // tiles
    curves = np.zeros((tiles, tiles, 256))
    for i, j in itertools.product(range(tiles), range(tiles)):
        counts = np.bincount(level[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide].ravel(), minlength=256).astype(
            float
        )
        limit = max(1.0, clip * tall * wide / 256)
        counts = np.minimum(counts, limit) + np.maximum(counts - limit, 0).sum() / 256
        curves[i, j] = np.minimum(255, np.cumsum(counts) * 255 / (tall * wide))
    out = np.zeros(level.shape)
    for y, x in np.ndindex(*level.shape):
        at_y, at_x = (y + 0.5) / tall - 0.5, (x + 0.5) / wide - 0.5
        for i, j in itertools.product(
            (math.floor(at_y), math.floor(at_y) + 1), (math.floor(at_x), math.floor(at_x) + 1)
        ):
            share = (1 - abs(at_y - i)) * (1 - abs(at_x - j))
            out[y, x] += share * curves[min(max(i, 0), tiles - 1), min(max(j, 0), tiles - 1), level[y, x]]
    return out


def test_clahe_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    gray = np.clip(rng.normal(0.4, 0.05, (24, 32)), 0, 1) ** 2
    image = torch.from_numpy(gray).float().expand(1, 3, -1, -1)
    level = (photometric.rgb_to_lab(image)[0, 0] * 2.55).clamp(0, 255)
    expected = equalise(level.round().numpy().astype(int), clip=2.0, tiles=4)
    found = photometric.rgb_to_lab(photometric.apply_clahe(image, clip=2.0, tiles=4))[0, 0] * 2.55
    assert np.abs(found.numpy() - expected).max() < 0.05
    assert found.std() > 1.5 * level.std(), "CLAHE raises local contrast"


def test_clahe_keeps_colour_and_accepts_any_size() -> None:
    image = 0.3 + 0.3 * torch.rand(1, 3, 37, 50, generator=torch.Generator().manual_seed(0))
    changed = photometric.apply_clahe(image, clip=1.5, tiles=8)
    assert changed.shape == image.shape and not torch.allclose(changed, image)
    inside = ((changed > 0.001) & (changed < 0.999)).all(dim=1)  # colours outside the gamut are clamped
    difference = (photometric.rgb_to_lab(changed) - photometric.rgb_to_lab(image))[:, 1:].abs().amax(dim=1)
    assert inside.float().mean() > 0.5 and difference[inside].max() < 0.01


def test_motion_blur_draws_a_line_and_moves_nothing() -> None:
    point = torch.zeros(3, 3, 31, 31)
    point[:, :, 15, 15] = 1
    length = torch.tensor([1.0, 5.0, 9.0])
    found = photometric.apply_motion_blur(point, length, torch.tensor([0.0, 0.0, math.pi / 4]), longest=15)
    assert torch.allclose(found[0], point[0], atol=1e-6)
    assert found[1, 0, 15, 12:19].tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.2, 0.2, 0], abs=1e-6)
    assert torch.allclose(found.sum(dim=(2, 3)), torch.ones(3, 3), atol=1e-5)
    assert torch.allclose(found, found.flip(2, 3), atol=1e-6), "symmetric, so that boxes stay valid"
    assert found[2, 0].diagonal().sum() > 0.6 and found[2, 0].diagonal().count_nonzero() > 5
    flat = torch.full((1, 3, 16, 16), 0.7)
    assert torch.allclose(photometric.apply_motion_blur(flat, length[2:], length[:1], longest=15), flat, atol=1e-6)


def test_colour_jitter_at_the_middle_of_its_range_changes_nothing_and_hue_keeps_gray() -> None:
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = PhotometricSettings()
    assert torch.allclose(photometric.jitter_colour(image, make_noise(2), settings), image, atol=1e-3)
    brighter = photometric.jitter_colour(image * 0.5, make_noise(2, BRIGHTNESS=1.0), settings)
    assert torch.allclose(brighter, image * 0.5 * 1.2, atol=1e-3)
    gray = image[:, :1].expand(-1, 3, -1, -1)
    assert torch.allclose(
        photometric.jitter_colour(gray, make_noise(2, HUE=1.0, SATURATION=0.0), settings), gray, atol=1e-3
    )


def test_each_change_happens_with_its_probability_and_otherwise_not_at_all() -> None:
    image = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(64, 32, generator=torch.Generator().manual_seed(1))
    assert photometric.augment(image, noise, PhotometricSettings()) is image
    for name, column in (("colour_p", "COLOUR"), ("clahe_p", "CLAHE"), ("blur_p", "BLUR")):
        settings = PhotometricSettings(clahe_tiles=4)
        setattr(settings, name, 0.5)
        changed = photometric.augment(image, noise, settings)
        same = (changed == image).flatten(1).all(dim=1)
        assert torch.equal(~same, noise[:, getattr(photometric, column)] < 0.5), name
        assert ((changed >= 0) & (changed <= 1)).all()


def make_paste_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    image = torch.zeros(2, 3, 64, 64)
    image[1, 0, 10:16, 20:28] = 1.0  # copied from the second image to the first
    image[1, 1, 30:60, 4:44] = 1.0  # too large to be copied
    boxes = torch.tensor([[[40.0, 40, 50, 50], [0, 0, 0, 0]], [[20, 10, 28, 16], [4, 30, 44, 60]]])
    return image, boxes, torch.tensor([[0, 0], [1, 0]]), torch.tensor([[True, False], [True, True]])


def test_pasted_objects_are_pixel_for_pixel_the_small_ones_of_the_neighbour() -> None:
    image, boxes, labels, valid = make_paste_case()
    settings = PhotometricSettings(paste_p=1.0, paste_count=1, paste_px=16)
    noise = make_noise(2)
    noise[:, photometric.PASTED + 1], noise[:, photometric.PASTED + 2] = 0.137, 0.41  # not whole pixels
    found, new_boxes, new_labels, new_valid = photometric.paste(image, boxes, labels, valid, noise, settings)
    assert new_boxes.shape == (2, 3, 4) and new_valid[0].tolist() == [True, False, True] and int(new_labels[0, 2]) == 1
    x1, y1, x2, y2 = new_boxes[0, 2].int().tolist()
    assert (x2 - x1, y2 - y1) == (8, 6)
    assert torch.equal(found[0, :, y1:y2, x1:x2], image[1, :, 10:16, 20:28])
    rest = found[0].clone()
    rest[:, y1 - 2 : y2 + 2, x1 - 2 : x2 + 2] = 0
    assert not rest.any() and torch.equal(new_boxes[:, :2], boxes)
    assert new_valid[1].tolist() == [True, True, True] or not new_valid[1, 2]


def test_nothing_is_pasted_onto_an_object_or_without_a_donor() -> None:
    image, boxes, labels, valid = make_paste_case()
    settings = PhotometricSettings(paste_p=1.0, paste_count=4, paste_px=16)
    everywhere = boxes.clone()
    everywhere[0, 0] = torch.tensor([0.0, 0, 64, 64])
    found, _, _, good = photometric.paste(image, everywhere, labels, valid, make_noise(2), settings)
    assert not good[0, 2:].any() and torch.equal(found[0], image[0])
    none = valid & torch.tensor([[True], [False]])
    found, _, _, good = photometric.paste(image, boxes, labels, none, make_noise(2), settings)
    assert not good[0, 2:].any() and torch.equal(found[0], image[0])
    rare = replace(settings, paste_p=0.4)
    assert torch.equal(photometric.paste(image, boxes, labels, valid, make_noise(2), rare)[0], image)
