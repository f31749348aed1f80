"""Minutia maps, and how minutiae move with their image."""

from math import pi

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainyard.config.settings import AugmentSettings
from trainyard.data import augment
from trainyard.data.decode_cpu import crop, resize
from trainyard.data.device import prepare_model_input

from .minutia_maps import draw_maps, draw_targets, invert_pose, move_minutiae
from .network import Aligner, build_rigid_matrix

SIDE, CELLS, AHEAD_PX = 299, 128, 40
DIRECTIONS = 2 * pi * torch.arange(8) / 8 + 0.2


def draw_arrow(direction: float) -> np.ndarray:
    """Return a (448, 400, 1) image with a soft dot at (210, 190), and a smaller one 40 px from it."""
    y, x = np.mgrid[:448, :400] + 0.5
    ahead = (210 + AHEAD_PX * np.cos(direction), 190 - AHEAD_PX * np.sin(direction))
    dot, tip = 180 * np.exp(-((x - 210) ** 2 + (y - 190) ** 2) / 50), 90 * np.exp(-np.hypot(x - ahead[0], y - ahead[1]))
    gray: np.ndarray = np.rint(dot + tip).astype(np.uint8)[..., None]
    return gray


def augment_arrows(settings: AugmentSettings) -> tuple[Tensor, Tensor]:
    """Return eight augmented arrows (8, 1, 299, 299), one for each direction, and the maps of their pixels."""
    regions = np.tile(np.array([[-3, 5, 400, 380]], dtype=np.int32), (8, 1))
    drawn = augment.draw(
        settings, seed=1, epoch=0, sample_ids=np.arange(8), regions=regions, height_px=SIDE, width_px=SIDE
    )
    image_BHWC = torch.empty(8, SIDE, SIDE, 1, dtype=torch.uint8)
    for i, direction in enumerate(DIRECTIONS.tolist()):
        arrow = torch.from_numpy(draw_arrow(direction))
        resize(crop(arrow, drawn.box[i], 0), image_BHWC[i], flip=bool(drawn.flip[i]))
    on_device = {name: torch.from_numpy(values) for name, values in drawn.select_for_device(resample=True).items()}
    on_device["theta"] = torch.from_numpy(drawn.theta)
    image = prepare_model_input(image_BHWC, on_device, fill=0, mean=0.0, std=1.0, channels_last=False)
    return image, torch.from_numpy(augment.compute_affine(drawn, height_px=SIDE, width_px=SIDE))


def find_centre(field_HW: Tensor, near: Tensor, reach: float) -> Tensor:
    """Return x, y of what is bright within `reach` of a point, in pixels with the corner at 0."""
    y, x = torch.meshgrid(*(torch.arange(n) + 0.5 for n in field_HW.shape), indexing="ij")
    weight = field_HW * (torch.hypot(x - near[0], y - near[1]) < reach)
    return torch.stack([(weight * x).sum(), (weight * y).sum()]) / weight.sum()


@pytest.mark.parametrize("aligned", [False, True])
def test_maps_agree_with_augmented_and_aligned_images_to_half_a_pixel(aligned: bool) -> None:
    image, affine = augment_arrows(AugmentSettings(rotate_deg=40, shift=0.08, zoom=0.2, flip=0.5))
    pose = None
    if aligned:
        generator = torch.Generator().manual_seed(2)
        angle, shift = torch.rand(8, generator=generator) - 0.5, 0.2 * torch.rand(8, 2, generator=generator) - 0.1
        pose = build_rigid_matrix(angle, shift)
        image = Aligner(1).align(image, pose)
    minutiae = torch.stack([torch.full((8,), 210.0), torch.full((8,), 190.0), DIRECTIONS], dim=1)[:, None]
    batch = {"image": image, "affine": affine, "minutiae": minutiae, "minutiae_count": torch.ones(8, dtype=torch.long)}
    maps = draw_targets(batch, pose, (CELLS, CELLS))
    turns = []
    for arrow, drawn in zip(image[:, 0], maps, strict=True):
        peak = drawn.sum(dim=0).flatten().argmax()
        near = torch.tensor([float(peak % CELLS), float(peak // CELLS)]) + 0.5
        place = find_centre(drawn.sum(dim=0), near, 6) * SIDE / CELLS
        dot = find_centre(arrow, place, 13)
        assert float((place - dot).norm()) < 0.5
        rest = arrow * (torch.hypot(*(find_offsets(arrow.shape, dot))) > 16)
        tip = find_centre(rest, find_centre(rest, dot, 1000), 1000)
        shown = torch.atan2(dot[1] - tip[1], tip[0] - dot[0])
        nearest = (torch.remainder(shown - pi / 3 * torch.arange(6) + pi, 2 * pi) - pi).abs().argmin()
        turns.append(int(drawn.sum(dim=(1, 2)).argmax() == nearest))
    assert turns == [1] * 8, "the strongest channel is the one of the direction that the image shows"


def find_offsets(shape: torch.Size, place: Tensor) -> tuple[Tensor, Tensor]:
    y, x = torch.meshgrid(*(torch.arange(n) + 0.5 for n in shape), indexing="ij")
    return x - place[0], y - place[1]


def test_a_pose_is_inverted_in_pixels_of_an_image_that_is_not_square() -> None:
    pose = build_rigid_matrix(torch.tensor([0.7]), torch.tensor([[0.3, -0.2]]))
    grid = functional.affine_grid(pose, [1, 1, 20, 50], align_corners=False)[0]
    source = (grid + 1) / 2 * torch.tensor([50.0, 20.0])
    points = torch.cat([source, torch.zeros(20, 50, 1)], dim=-1).view(1, -1, 3)
    y, x = torch.meshgrid(torch.arange(20) + 0.5, torch.arange(50) + 0.5, indexing="ij")
    moved = move_minutiae(points, invert_pose(pose, (20, 50)))[0, :, :2]
    torch.testing.assert_close(moved, torch.stack([x, y], dim=-1).view(-1, 2), rtol=0, atol=1e-4)


def test_directions_turn_with_the_image_and_are_mirrored_with_it() -> None:
    minutia = torch.tensor([[[10.0, 20.0, pi / 6]]])
    quarter = torch.tensor([[[0.0, 1.0, 5.0], [-1.0, 0.0, 7.0]]])  # counter-clockwise, where y points down
    torch.testing.assert_close(move_minutiae(minutia, quarter), torch.tensor([[[25.0, -3.0, pi / 6 + pi / 2]]]))
    mirror = torch.tensor([[[-2.0, 0.0, 100.0], [0.0, 2.0, 0.0]]])
    torch.testing.assert_close(move_minutiae(minutia, mirror), torch.tensor([[[80.0, 40.0, pi - pi / 6]]]))


def test_a_minutia_is_shared_among_channels_by_its_direction_and_padding_is_not_drawn() -> None:
    minutia = torch.tensor([16.25, 8.75, pi / 3])  # in the middle of cell (17, 32) of two cells for each pixel
    minutiae = torch.stack([minutia, minutia, minutia + 5])[None].repeat(3, 1, 1)
    maps = draw_maps(minutiae, torch.tensor([1, 2, 0]), (16, 32), (32, 64))
    share = torch.softmax(-torch.tensor([1.0, 0, 1, 2, 3, 2]) * pi / 3, dim=0)
    torch.testing.assert_close(maps[0, :, 17, 32], share)
    next_cell = float(torch.exp(torch.tensor(-1 / (2 * 1.5**2))))
    torch.testing.assert_close(maps[0, :, 17, 33], share * next_cell)
    assert float(maps[1].max()) == 1.0, "two of them would add up to 1.004"
    assert not maps[2].any()
    assert not draw_maps(minutiae[:, :0], torch.zeros(3, dtype=torch.long), (16, 32), (32, 64)).any()
