import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainyard.config.settings import AugmentSettings
from trainyard.data.augment import Parameters, build_neutral, draw, draw_uniforms, needs_resampling
from trainyard.data.device import prepare_model_input

EVERYTHING = AugmentSettings(
    rotate_deg=30, shift=0.1, zoom=0.5, crop_area_min=0.3, crop_aspect_max=1.5, flip=0.3, gain=0.4, contrast=0.6
)


def draw_parameters(settings: AugmentSettings, ids: np.ndarray, **changes) -> Parameters:
    regions = np.tile(np.array([-5, 7, 120, 90], dtype=np.int32), (len(ids), 1))
    return draw(
        settings,
        **{"seed": 1, "epoch": 4, "sample_ids": ids, "regions": regions, "height_px": 32, "width_px": 32} | changes,
    )


def list_fields(p: Parameters) -> list[np.ndarray]:
    return [getattr(p, field.name) for field in fields(p)]


def test_the_parameters_of_a_sample_do_not_depend_on_its_batch():
    whole = list_fields(draw_parameters(EVERYTHING, np.arange(50)))
    picked = np.array([44, 3, 17])
    for part, expected in zip(list_fields(draw_parameters(EVERYTHING, picked)), whole, strict=True):
        assert np.array_equal(part, expected[picked])


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 5}])
def test_another_seed_or_epoch_changes_every_parameter(change):
    ids = np.arange(50)
    before, after = (
        list_fields(draw_parameters(EVERYTHING, ids)),
        list_fields(draw_parameters(EVERYTHING, ids, **change)),
    )
    assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def mix_bits(x: int) -> int:
    """Return SplitMix64's output function of x in Python integers (Steele, Lea and Flood 2014, figure 17)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32), sample=st.integers(0, 2**62))
def test_the_vectorised_hash_is_splitmix64_of_counters(seed, epoch, sample):
    gamma = 0x9E3779B97F4A7C15
    key = mix_bits((mix_bits((seed + gamma) % 2**64) + epoch) % 2**64)
    key = mix_bits((key + sample * gamma) % 2**64)
    expected = [(mix_bits((key + i * gamma) % 2**64) >> 11) / 2**53 for i in (1, 2, 3)]
    assert draw_uniforms(seed=seed, epoch=epoch, sample_ids=np.array([sample]), count=3).tolist() == [expected]


def test_old_runs_keep_their_random_numbers():
    """A change here means that runs do not resume across the commit: say so in the change log."""
    numbers = draw_uniforms(seed=3, epoch=2, sample_ids=np.array([0, 7, 10**12]), count=3)
    assert numbers.tolist() == [
        [0.5221409790384225, 0.005187708617301667, 0.2504194298926178],
        [0.34677076087075054, 0.24722893215594421, 0.32383796660695974],
        [0.36355454227548634, 0.88326744832876, 0.8457409763533179],
    ]


def test_the_random_numbers_are_uniform_and_independent():
    u = draw_uniforms(seed=0, epoch=0, sample_ids=np.arange(40_000), count=11)
    assert u.min() >= 0 and u.max() < 1
    bins, expected = 64, len(u) / 64
    for column in u.T:
        chi_square = ((np.bincount((column * bins).astype(int), minlength=bins) - expected) ** 2 / expected).sum()
        assert chi_square < 63 + 6 * math.sqrt(2 * 63)  # mean plus six standard deviations, 63 degrees of freedom
    next_epoch = draw_uniforms(seed=0, epoch=1, sample_ids=np.arange(40_000), count=11)
    next_seed = draw_uniforms(seed=1, epoch=0, sample_ids=np.arange(40_000), count=11)
    columns = np.concatenate(
        [u[1:], u[:-1], next_epoch[1:], next_seed[1:]], axis=1
    )  # each sample next to its neighbours
    correlation = np.corrcoef(columns.T) - np.eye(44)
    assert np.abs(correlation).max() < 6 / math.sqrt(len(u))


def test_parameters_cover_the_ranges_in_the_settings():
    p = draw_parameters(EVERYTHING, np.arange(20_000))
    linear = p.theta[:, :, :2].astype(np.float64)
    zoom = 1 / np.sqrt(np.linalg.det(linear))
    angle_deg = np.degrees(np.arctan2(linear[:, 1, 0], linear[:, 0, 0]))
    for values, low, high in (
        (angle_deg, -30, 30),
        (p.theta[:, :, 2] / 2, -0.1, 0.1),  # the image spans 2 units
        (np.log(zoom), -math.log(1.5), math.log(1.5)),
        (p.gain, 0.6, 1.4),
        (np.log(p.contrast), -math.log(1.6), math.log(1.6)),
    ):
        span = high - low
        assert low - 1e-6 * span <= values.min() < low + 0.01 * span
        assert high - 0.01 * span < values.max() <= high + 1e-6 * span
        assert abs(values.mean() - (low + high) / 2) < 6 * span / math.sqrt(12 * 20_000)
    assert abs(p.flip.mean() - 0.3) < 6 * math.sqrt(0.3 * 0.7 / 20_000)


def test_augmentation_that_is_off_changes_nothing():
    ids = np.arange(100)
    off, neutral = draw_parameters(AugmentSettings(), ids), build_neutral(draw_parameters(AugmentSettings(), ids).box)
    for a, b in zip(list_fields(off), list_fields(neutral), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert np.array_equal(neutral.box, np.tile([-5, 7, 120, 90], (100, 1)))
    assert np.array_equal(neutral.theta, np.tile(np.eye(2, 3, dtype=np.float32), (100, 1, 1)))
    assert not neutral.flip.any() and (neutral.gain == 1).all() and (neutral.contrast == 1).all()


@pytest.mark.parametrize("name", ["rotate_deg", "shift", "zoom"])
def test_only_geometry_needs_resampling(name):
    assert needs_resampling(AugmentSettings(**{name: 0.5}))
    assert not needs_resampling(AugmentSettings(flip=0.5, gain=0.5, contrast=0.5, crop_area_min=0.5))


regions = st.tuples(st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 600), st.integers(1, 600))


@given(region=regions, area_min=st.floats(0.01, 1), aspect_max=st.floats(1, 4), seed=st.integers(0, 99))
def test_crops_stay_inside_their_region(region, area_min, aspect_max, seed):
    settings = AugmentSettings(crop_area_min=area_min, crop_aspect_max=aspect_max)
    box = draw_parameters(
        settings, np.arange(50), regions=np.tile(np.array(region, dtype=np.int32), (50, 1)), seed=seed
    ).box
    y, x, height, width = box.T
    assert (height >= 1).all() and (width >= 1).all()
    assert (y >= region[0]).all() and (y + height <= region[0] + region[2]).all()
    assert (x >= region[1]).all() and (x + width <= region[1] + region[3]).all()


def test_crops_have_the_requested_area_and_aspect_ratio():
    region = np.tile(np.array([0, 0, 1000, 1000], dtype=np.int32), (5000, 1))
    settings = AugmentSettings(crop_area_min=0.2, crop_aspect_max=1.25)
    _, _, height, width = draw_parameters(settings, np.arange(5000), regions=region).box.T.astype(np.float64)
    share, aspect = height * width / 1e6, width / height
    fits = (height < 1000) & (width < 1000)
    assert fits.mean() > 0.8
    assert 0.199 < share.min() < 0.21 and share[fits].max() > 0.9
    assert 0.795 < aspect.min() < 0.81 and 1.24 < aspect.max() < 1.257  # sides are whole pixels, 400 and more


def draw_dot(y: float, x: float, height: int, width: int) -> np.ndarray:
    """Return a soft dot, standard deviation 2 px, on black: (1, height, width, 1) uint8."""
    rows, columns = np.mgrid[:height, :width]
    return (255 * np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 8)).astype(np.uint8)[None, :, :, None]


def make_model_input(
    image: np.ndarray,
    theta: np.ndarray | None = None,
    *,
    fill: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    channels_last: bool = False,
    **levels: np.ndarray,
) -> torch.Tensor:
    changes = levels if theta is None else {"theta": theta, **levels}
    p = replace(build_neutral(np.zeros((len(image), 4), dtype=np.int32)), **changes)
    arrays = p.select_for_device(resample=theta is not None)
    augmentation = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return prepare_model_input(
        torch.from_numpy(image), augmentation, fill=fill, mean=mean, std=std, channels_last=channels_last
    )


def find_centre(image: torch.Tensor) -> np.ndarray:
    """Return the centre of mass (y, x) in pixels."""
    weight = image[0, 0].double().numpy()
    rows, columns = np.mgrid[: weight.shape[0], : weight.shape[1]]
    return np.array([(weight * rows).sum(), (weight * columns).sum()]) / weight.sum()


WARPS = AugmentSettings(rotate_deg=40, shift=0.1, zoom=0.3)


@pytest.mark.parametrize("sample", range(8))
def test_theta_maps_a_dot_to_its_new_position(sample):
    height, width = 100, 160
    theta = draw_parameters(WARPS, np.array([sample]), width_px=width, height_px=height).theta
    there = np.array([35.0, 60.0])
    x, y = np.linalg.solve(
        theta[0, :, :2], [(2 * there[1] + 1) / width - 1, (2 * there[0] + 1) / height - 1] - theta[0, :, 2]
    )
    expected = [((y + 1) * height - 1) / 2, ((x + 1) * width - 1) / 2]
    assert np.abs(find_centre(make_model_input(draw_dot(*there, height, width), theta)) - expected).max() < 0.05


@pytest.mark.parametrize("sample", range(8))
def test_distances_scale_equally_in_all_directions_whatever_the_shape_of_the_image(sample):
    height, width = 100, 160
    theta = draw_parameters(WARPS, np.array([sample]), width_px=width, height_px=height).theta
    zoom = 1 / math.sqrt(np.linalg.det(theta[0, :, :2].astype(np.float64)))
    middle, right, below = (
        find_centre(make_model_input(draw_dot(y, x, height, width), theta)) for y, x in ((50, 80), (50, 95), (65, 80))
    )
    for other in (right, below):
        assert math.dist(middle, other) == pytest.approx(15 * zoom, abs=0.5)
    assert np.dot(right - middle, below - middle) == pytest.approx(0, abs=15)  # cosine under 0.06


def test_zoom_enlarges_and_shift_moves_by_a_share_of_the_image():
    larger, moved = np.eye(2, 3, dtype=np.float32)[None] / 2, np.eye(2, 3, dtype=np.float32)[None]
    moved[0, 0, 2] = 2 * 0.1
    assert find_centre(make_model_input(draw_dot(50, 90, 100, 160), larger))[1] == pytest.approx(
        79.5 + 2 * 10.5, abs=0.5
    )
    assert find_centre(make_model_input(draw_dot(50, 90, 100, 160), moved))[1] == pytest.approx(90 - 0.1 * 160, abs=0.5)


def test_pixels_from_outside_the_image_have_the_fill_level():
    half_away = np.eye(2, 3, dtype=np.float32)[None].copy()
    half_away[0, 0, 2] = 1
    dark = np.full((1, 8, 8, 1), 51, dtype=np.uint8)
    found = make_model_input(dark, half_away, fill=204)
    assert torch.allclose(found[..., :4], torch.tensor(0.2)) and torch.allclose(found[..., 4:], torch.tensor(0.8))


def test_levels_get_gain_contrast_clamping_and_normalisation():
    image = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3) * 2
    gain, contrast = np.array([1.2, 0.5], dtype=np.float32), np.array([1.5, 0.8], dtype=np.float32)
    found = make_model_input(image, gain=gain, contrast=contrast, mean=0.4, std=0.25)
    x = image.transpose(0, 3, 1, 2) / 255 * gain.astype(np.float64)[:, None, None, None]
    x = (x - 0.5) * contrast.astype(np.float64)[:, None, None, None] + 0.5
    assert found.shape == (2, 3, 4, 4) and found.dtype == torch.float32
    assert np.allclose(found.numpy(), (np.clip(x, 0, 1) - 0.4) / 0.25, atol=1e-5)


def test_without_augmentation_images_are_those_of_neutral_parameters_bit_by_bit():
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    how = {"fill": 0, "mean": 0.3, "std": 0.7, "channels_last": False}
    assert torch.equal(
        prepare_model_input(torch.from_numpy(image), {}, **how), make_model_input(image, mean=0.3, std=0.7)
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("theta", [None, np.eye(2, 3, dtype=np.float32)[None]])
def test_the_result_has_the_requested_layout_and_new_memory(channels_last, theta):
    image = np.full((1, 6, 5, 3), 7, dtype=np.uint8)
    found = make_model_input(image, theta, channels_last=channels_last)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    before = found.clone()
    image[:] = 200
    assert torch.equal(found, before)
