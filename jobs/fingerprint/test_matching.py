"""The matcher that needs no training: poses, displacement fields and scores of synthetic prints."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy import ndimage  # type: ignore[import-untyped]

from .baseline import SIDE_PX
from .matching import Prints, enhance_print, index_prints, match_ridges, prepare_prints
from .matching.fields import BLOCK_PX, BLOCKS, STEP_PX, FieldGrower
from .matching.poses import POSES, find_poses
from .synthesis import generate_impressions

DPI = 500
TURN_DEG, SHIFT_PX = 13, (14.0, -20.0)  # of the moved print, at 500 dpi
BEND_PX = 4.0  # amplitude of the displacement of the bent print


def draw_finger(number: int) -> np.ndarray:
    """Return one impression of a synthetic finger, (352, 320) uint8."""
    return next(iter(generate_impressions(5, number)))


def bend(gray: np.ndarray) -> np.ndarray:
    """Return a print each pixel of which is taken from where `compute_bend` says."""
    y, x = np.mgrid[: gray.shape[0], : gray.shape[1]].astype(np.float64)
    bent: np.ndarray = ndimage.map_coordinates(gray, np.stack([y, x]) + compute_bend(y, x), order=1, mode="nearest")
    return bent


def compute_bend(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a smooth displacement (2, ...) in px, which no rotation and shift can replace."""
    return BEND_PX * np.stack([np.sin(x / 60), np.sin(y / 65)])


def move(gray: np.ndarray) -> np.ndarray:
    """Return a print that is rotated and shifted."""
    rotated = ndimage.rotate(gray, TURN_DEG, reshape=False, mode="nearest", order=1)
    moved: np.ndarray = ndimage.shift(rotated, SHIFT_PX, mode="nearest", order=1)
    return moved


@cache
def prepare_examples() -> Prints:
    """Return 0, 1: two fingers; 2, 3: finger 0 moved, and bent and moved; 4: a blank image."""
    one, other = draw_finger(0), draw_finger(1)
    images = [one, other, move(one), move(bend(one)), np.full((352, 320), 255, dtype=np.uint8)]
    return prepare_prints(images, [DPI] * len(images))


@pytest.mark.slow
def test_a_finger_that_is_moved_and_bent_is_more_alike_than_other_fingers() -> None:
    score = match_ridges(prepare_examples(), np.array([0, 0, 0, 2, 3]), np.array([2, 3, 1, 1, 1]))
    assert score[:2].min() > score[2:].max() + 3, "three standard deviations of impostors"


@pytest.mark.slow
def test_the_rotation_of_a_moved_print_is_found() -> None:
    poses = find_poses(prepare_examples(), np.array([0]), np.array([2]))
    assert abs(np.degrees(abs(poses.angle_B[0].item())) - TURN_DEG) <= 2, "angles are 4 degrees apart"


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [-80, 61])
def test_a_print_that_is_turned_far_is_recognised(degrees: int) -> None:
    one, other = draw_finger(0), draw_finger(1)
    turned = ndimage.rotate(move(one), degrees - TURN_DEG, mode="nearest", order=1)
    prints = prepare_prints([turned, one, other], [DPI] * 3)
    poses = find_poses(prints, np.array([0]), np.array([1]))
    assert abs(np.degrees(abs(poses.angle_B[0].item())) - abs(degrees)) <= 2
    same, different = match_ridges(prints, np.array([0, 0]), np.array([1, 2]))
    assert same > different + 3


@pytest.mark.slow
def test_the_field_follows_a_smooth_distortion() -> None:
    ridges, mask = enhance_print(draw_finger(0), DPI)
    bent = np.stack([ridges, bend(ridges)]), np.stack([mask, bend(mask).round()])
    prints = index_prints(*map(torch.from_numpy, bent))
    poses = find_poses(prints, np.array([0]), np.array([1]))
    one, other = torch.zeros(POSES, dtype=torch.int64), torch.ones(POSES, dtype=torch.int64)
    field = FieldGrower(prints, one, other, poses).grow(torch.ones(POSES, dtype=torch.bool))
    best = int(field.sum_agreement().argmax())
    accepted = field.accepted_BIJ[best].numpy()
    assert accepted.sum() > 200, "a print of this size has about 350 blocks"

    middle = np.arange(BLOCKS) * STEP_PX + (BLOCK_PX - 1) / 2
    i, j = np.nonzero(accepted)
    place = np.stack([middle[i], middle[j]])
    found = place + poses.shift_B2[best].numpy()[:, None] + field.moved_BIJ2[best].numpy()[i, j].T
    angle, centre = poses.angle_B[best].item(), SIDE_PX / 2 - 0.5
    y, x = found - centre
    found = centre + np.stack([np.sin(angle) * x + np.cos(angle) * y, np.cos(angle) * x - np.sin(angle) * y])
    true = place + compute_bend(*place)
    error = np.hypot(*(found - true))
    assert np.median(error) < 1 and np.mean(error < 1.5) > 0.8, "whole pixels; along a ridge they are vague"
    assert np.ptp(true - place, axis=1).min() > 3, "no single shift would do"


@pytest.mark.slow
def test_scores_are_equal_in_a_second_call_and_in_any_batch() -> None:
    prints, one, other = prepare_examples(), np.array([0, 0, 3]), np.array([1, 3, 0])
    together = match_ridges(prints, one, other)
    assert np.array_equal(together, match_ridges(prints, one, other))
    alone = np.concatenate([match_ridges(prints, one[i : i + 1], other[i : i + 1]) for i in range(len(one))])
    assert np.array_equal(together, alone)
    assert np.array_equal(together[::-1], match_ridges(prints, one[::-1], other[::-1], batch=2))


@pytest.mark.slow
def test_a_blank_image_has_a_finite_low_score() -> None:
    prints = prepare_examples()
    score = match_ridges(prints, np.array([0, 4, 4, 0]), np.array([4, 0, 4, 2]))
    assert np.isfinite(score).all() and (score[:3] < score[3] - 3).all()


@pytest.mark.parametrize("shape", [(20, 30), (97, 701)])
def test_prints_of_any_size_are_enhanced(shape: tuple[int, int]) -> None:
    gray = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    ridges, mask = enhance_print(gray, DPI)
    assert ridges.shape == mask.shape == (SIDE_PX, SIDE_PX) and np.isfinite(ridges).all()
    assert set(np.unique(mask)) <= {0, 1} and not ridges[mask == 0].any()
