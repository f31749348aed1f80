"""How each sample is changed in an epoch: parameters as a pure function of (seed, epoch, sample id)."""

import math
from dataclasses import dataclass

import numpy as np

from trainyard.settings import AugmentSettings

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, SplitMix64's increment
_DRAWS = 11


@dataclass(frozen=True)
class Parameters:
    """What happens to the B pictures of a micro-batch, the same for either decode back end.

    The back end cuts `box` out of the picture, resizes it and mirrors it. The device then resamples through `theta`
    and applies gain and contrast (`data/device.py`).
    """

    box: np.ndarray  # (B, 4) int32: y, x, height, width in source pixels; may reach beyond the picture
    flip: np.ndarray  # (B,) bool: mirror left-right
    theta: np.ndarray  # (B, 2, 3) float32: output to input coordinates in [-1, 1], as torch's affine_grid takes them
    gain: np.ndarray  # (B,) float32 factor
    contrast: np.ndarray  # (B,) float32 factor about mid-gray


def uniforms(*, seed: int, epoch: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Return (B, count) float64 in [0, 1), each a hash of (seed, epoch, sample id, position) and of nothing else.

    The hash is SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) applied to counters, so any sample's
    numbers can be had without those before it, on any rank, after any restart.
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.array([seed], dtype=np.uint64) + _GAMMA) + np.uint64(epoch))
        key = _mix(key + sample_ids.astype(np.uint64) * _GAMMA)
        bits = _mix(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    settings: AugmentSettings, *, seed: int, epoch: int, sample_ids: np.ndarray, regions: np.ndarray, aspect: float
) -> Parameters:
    """Draw the parameters of a training micro-batch.

    Args:
        sample_ids: (B,) int64.
        regions: (B, 4) int32, the part of each picture that counts as the whole: y, x, height, width.
        aspect: width over height of the pictures that `theta` is applied to.
    """
    u = uniforms(seed=seed, epoch=epoch, sample_ids=sample_ids, count=_DRAWS).T
    angle = math.radians(settings.rotate_deg) * (2 * u[5] - 1)
    zoom = _log_uniform(u[6], 1 + settings.zoom)
    shift = 2 * settings.shift * (2 * u[7:9] - 1)  # the picture spans 2 units
    return Parameters(
        box=_crop(settings, regions, u[:4]),
        flip=u[4] < settings.flip,
        theta=_theta(angle, zoom, shift, aspect),
        gain=(1 + settings.gain * (2 * u[9] - 1)).astype(np.float32),
        contrast=_log_uniform(u[10], 1 + settings.contrast).astype(np.float32),
    )


def neutral(regions: np.ndarray) -> Parameters:
    """Return the parameters of evaluation: each region as it is."""
    count = len(regions)
    one, zero = np.ones(count), np.zeros(count)
    return Parameters(
        box=regions.astype(np.int32),
        flip=np.zeros(count, dtype=bool),
        theta=_theta(zero, one, np.zeros((2, count)), 1.0),
        gain=one.astype(np.float32),
        contrast=one.astype(np.float32),
    )


def warps(settings: AugmentSettings) -> bool:
    """Tell whether `theta` can differ from the identity, that is, whether resampling is worth its time."""
    return bool(settings.rotate_deg or settings.shift or settings.zoom)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _log_uniform(u: np.ndarray, high: float) -> np.ndarray:
    """Map [0, 1) to a factor between 1 / high and high, uniform in its logarithm."""
    factor: np.ndarray = np.exp(math.log(high) * (2 * u - 1))
    return factor


def _theta(angle: np.ndarray, zoom: np.ndarray, shift: np.ndarray, aspect: float) -> np.ndarray:
    """Return (B, 2, 3) float32: rotate by `angle`, enlarge by `zoom`, move by `shift` (2, B).

    Coordinates run over [-1, 1] along either side, whatever its length: without `aspect` (width over height) a
    rotation would shear a picture that is not square.
    """
    cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
    rows = np.stack([cos, -sin / aspect, shift[0], sin * aspect, cos, shift[1]], axis=1)
    return rows.reshape(-1, 2, 3).astype(np.float32)


def _crop(settings: AugmentSettings, regions: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return (B, 4) int32 random-resized crops of the regions; the regions themselves where cropping is off.

    Area and aspect ratio as in Szegedy et al. 2015 (arXiv:1409.4842, section 6): a share of the area uniform in
    [crop_area_min, 1], log-uniform aspect ratio; a side that would not fit is cut to the region's.
    """
    if settings.crop_area_min == 1 and settings.crop_aspect_max == 1:
        return regions.astype(np.int32)
    top, left, height, width = regions.T.astype(np.float64)
    area = height * width * (settings.crop_area_min + (1 - settings.crop_area_min) * u[0])
    ratio = _log_uniform(u[1], settings.crop_aspect_max)
    crop_height = np.clip(np.rint(np.sqrt(area / ratio)), 1, height)
    crop_width = np.clip(np.rint(np.sqrt(area * ratio)), 1, width)
    y = top + np.floor(u[2] * (height - crop_height + 1))
    x = left + np.floor(u[3] * (width - crop_width + 1))
    return np.stack([y, x, crop_height, crop_width], axis=1).astype(np.int32)
