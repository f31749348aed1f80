"""Augmentation parameters of each sample: a pure function of (seed, epoch, sample id)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from trainyard.config.settings import AugmentSettings, ImageSettings
from trainyard.errors import UserError

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, SplitMix64's increment
_DRAWS = 13
_TIE_PX = 1e-3
_NOISE = 32
_GEOMETRY, _JOB_NOISE, _AUDIO_START, _INPUT_SCALE = range(4)  # independent streams of random numbers


@dataclass(frozen=True)
class Parameters:
    """Augmentation of the B images of a micro-batch, the same for either decode back end.

    The back end crops `box` from the image, resizes it and mirrors it. The device then resamples through `theta`
    and applies gain and contrast (`data/device.py`).
    """

    box: np.ndarray  # (B, 4) int32: y, x, height, width in source pixels; may extend beyond the image
    flip: np.ndarray  # (B,) bool: mirror left-right
    theta: np.ndarray  # (B, 2, 3) float32: output to input coordinates in [-1, 1], as torch's affine_grid takes them
    gain: np.ndarray  # (B,) float32 factor
    contrast: np.ndarray  # (B,) float32 factor about mid-gray

    @classmethod
    def join(cls, parts: "Sequence[Parameters]") -> "Parameters":
        """Return the parameters of several micro-batches one after the other."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def select_for_device(self, *, resample: bool) -> dict[str, np.ndarray]:
        """Return what `prepare_model_input` applies, by name; without `theta` unless it resamples."""
        elsewhere = ("box", "flip") if resample else ("box", "flip", "theta")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in elsewhere}

    def split(self, ends: np.ndarray) -> "list[Parameters]":
        """Return the parameters of micro-batches that end at `ends`; views, not copies."""
        names = [field.name for field in fields(self)]
        columns = [np.split(getattr(self, name), ends[:-1]) for name in names]
        return [Parameters(**dict(zip(names, part, strict=True))) for part in zip(*columns, strict=True)]


def draw_uniforms(
    *, seed: int, epoch: int | np.ndarray, sample_ids: np.ndarray, count: int, stream: int = 0
) -> np.ndarray:
    """Return (B, count) float64 in [0, 1), each a hash of (seed, epoch, sample id, position, stream) and nothing else.

    The hash is SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) applied to counters, so any rank can
    compute any sample's numbers directly, also after a restart.

    Args:
        epoch: of all samples, or (B,) of each.
    """
    with np.errstate(over="ignore"):
        key = _mix_bits(_mix_bits(np.array([seed], dtype=np.uint64) + _GAMMA) + np.asarray(epoch).astype(np.uint64))
        key = _mix_bits(key + sample_ids.astype(np.uint64) * _GAMMA) + np.uint64(stream << 32) * _GAMMA
        bits = _mix_bits(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    bits >>= np.uint64(11)
    uniforms = bits.view(np.int64).astype(np.float64)  # signed numbers convert faster, and these are below 2**53
    uniforms *= 2.0**-53
    return uniforms


def draw_noise(*, seed: int, epoch: int | np.ndarray, sample_ids: np.ndarray) -> np.ndarray:
    """Return (B, 32) float32 in [0, 1): random numbers for a job's own augmentation; `epoch` as in `draw_uniforms`."""
    u = draw_uniforms(seed=seed, epoch=epoch, sample_ids=sample_ids, count=_NOISE, stream=_JOB_NOISE)
    below_one: np.ndarray = np.minimum(u.astype(np.float32), np.float32(1 - 2**-24))
    return below_one


def draw_starts(*, seed: int, epoch: int, sample_ids: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """Return (B,) int64, the first frame of each audio crop: uniform in 0 .. `spare`.

    Args:
        spare: (B,) frames of the recording minus frames of the crop; negative counts as 0.
    """
    u = draw_uniforms(seed=seed, epoch=epoch, sample_ids=sample_ids, count=1, stream=_AUDIO_START)[:, 0]
    start: np.ndarray = np.floor(u * (np.maximum(spare, 0) + 1)).astype(np.int64)
    return start


def choose_scale(scales: list[float], *, seed: int, epoch: int, batch: int) -> float:
    """Return the factor on the model's input size for one global batch."""
    if len(scales) == 1:
        return scales[0]  # whatever is drawn
    return float(_draw_scales(scales, seed=seed, epoch=epoch, batches=np.array([batch]))[0])


def list_scales(scales: list[float], *, seed: int, epoch: int, count: int) -> np.ndarray:
    """Return (count,) the factors of an epoch's first global batches."""
    return _draw_scales(scales, seed=seed, epoch=epoch, batches=np.arange(count))


def _draw_scales(scales: list[float], *, seed: int, epoch: int, batches: np.ndarray) -> np.ndarray:
    u = draw_uniforms(seed=seed, epoch=epoch, sample_ids=batches, count=1, stream=_INPUT_SCALE)[:, 0]
    chosen: np.ndarray = np.array(scales)[(u * len(scales)).astype(np.int64)]
    return chosen


def draw(
    settings: AugmentSettings,
    *,
    seed: int,
    epoch: int | np.ndarray,
    sample_ids: np.ndarray,
    regions: np.ndarray,
    height_px: int,
    width_px: int,
    letterbox: bool = False,
    keep_boxes: Sequence[np.ndarray] = (),
) -> Parameters:
    """Draw the parameters of a training micro-batch, or of several.

    Args:
        epoch: as in `draw_uniforms`.
        sample_ids: (B,) int64.
        regions: (B, 4) int32, the part of each image that counts as the whole: y, x, height, width.
        height_px, width_px: of the model's input.
        letterbox: keep the aspect ratio, and scale between `scale_min` and `scale_max` instead of cropping.
        keep_boxes: with letterbox, B arrays (L, 4) of boxes x0, y0, x1, y1 in pixels; a crop keeps one of its image.
    """
    u = draw_uniforms(seed=seed, epoch=epoch, sample_ids=sample_ids, count=_DRAWS).T
    angle = math.radians(settings.rotate_deg) * (2 * u[5] - 1)
    zoom = _map_to_log_uniform(u[6], 1 + settings.zoom)
    shift = 2 * settings.shift * (2 * u[7:9] - 1)  # the image spans 2 units
    box = _draw_crop(settings, regions, u[:4])
    if letterbox:
        low, high = math.log(settings.scale_min), math.log(settings.scale_max)
        scale = np.exp(low + (high - low) * u[0])
        box = _fit_letterbox(regions, height_px, width_px, scale, place=u[1:3] if low or high else None)
        box = _shift_to_keep_a_box(box, regions, keep_boxes, u[11], u[1:3]) if len(keep_boxes) else box
    return Parameters(
        box=box,
        flip=u[4] < settings.flip,
        theta=_compute_theta(angle, zoom, shift, width_px / height_px),
        gain=(1 + settings.gain * (2 * u[9] - 1)).astype(np.float32),
        contrast=_map_to_log_uniform(u[10], 1 + settings.contrast).astype(np.float32),
    )


def build_neutral(regions: np.ndarray, *, letterbox: tuple[int, int] | None = None) -> Parameters:
    """Return the parameters for evaluation, which augment nothing.

    Args:
        letterbox: height and width of the model's input to fit each region into; None: stretch the region.
    """
    count = len(regions)
    ones, zero = np.ones(count), np.zeros(count)
    return Parameters(
        box=_fit_letterbox(regions, *letterbox, ones, place=None) if letterbox else regions.astype(np.int32),
        flip=np.zeros(count, dtype=bool),
        theta=_compute_theta(zero, ones, np.zeros((2, count)), 1.0),
        gain=ones.astype(np.float32),
        contrast=ones.astype(np.float32),
    )


def compute_affine(p: Parameters, *, height_px: int, width_px: int) -> np.ndarray:
    """Return (B, 2, 3) float32, which maps (x, y, 1) in pixels of the stored image to pixels of the model's input.

    Pixels are areas here: the upper left corner of an image is (0, 0), that of its second pixel (1, 0).
    """
    y, x, height, width = p.box.T.astype(np.float64)
    mirror = np.where(p.flip, -1.0, 1.0)
    # Each axis of the decoded image spans [-1, 1]; theta maps output coordinates to these.
    decoded = np.zeros((len(y), 3, 3))
    decoded[:, 0, 0], decoded[:, 0, 2] = mirror * 2 / width, mirror * (-2 * x / width - 1)
    decoded[:, 1, 1], decoded[:, 1, 2] = 2 / height, -2 * y / height - 1
    decoded[:, 2, 2] = 1
    warp = np.zeros_like(decoded)
    warp[:, :2], warp[:, 2, 2] = p.theta, 1
    pixels = np.array([[width_px / 2, 0, width_px / 2], [0, height_px / 2, height_px / 2]])
    whole: np.ndarray = pixels @ np.linalg.inv(warp) @ decoded
    return whole.astype(np.float32)


def invert_affine(affine: np.ndarray, *, stored_scale: np.ndarray) -> np.ndarray:
    """Return (B, 2, 3) float64, which maps (x, y, 1) in pixels of the model's input to pixels of a stored mask.

    A point on the edge of two pixels of the image is moved into the later one, whatever float32 lost in `affine`.

    Args:
        affine: (B, 2, 3), what `compute_affine` returned.
        stored_scale: (B, 2) height and width of the mask, divided by those of the stored image.
    """
    square = np.concatenate([affine, np.tile([[[0.0, 0.0, 1.0]]], (len(affine), 1, 1))], axis=1)
    inverse: np.ndarray = np.linalg.inv(square)[:, :2]
    inverse[:, :, 2] += _TIE_PX
    scaled: np.ndarray = inverse * stored_scale[:, ::-1, None]
    return scaled


def scale_boxes(box: np.ndarray, stored_scale: np.ndarray) -> np.ndarray:
    """Return (B, 4) int32 boxes of the same part of images of other sizes; edges are rounded.

    Args:
        box: (B, 4) y, x, height, width.
        stored_scale: (B, 2) height and width of each other image, divided by those of the image with the box.
    """
    low = np.rint(box[:, :2] * stored_scale)
    sides = np.maximum(np.rint((box[:, :2] + box[:, 2:]) * stored_scale) - low, 1)
    return np.concatenate([low, sides], axis=1).astype(np.int32)


def needs_resampling(settings: AugmentSettings) -> bool:
    """Return whether `theta` can differ from the identity."""
    return bool(settings.rotate_deg or settings.shift or settings.zoom)


def check_options(image: ImageSettings, augmentation: AugmentSettings) -> None:
    """Refuse options that exclude each other.

    Raises:
        UserError: two do.
    """
    if image.fit != "letterbox" and (
        augmentation.crop_keeps or (augmentation.scale_min, augmentation.scale_max) != (1, 1)
    ):
        raise UserError("augment.scale_min, scale_max and crop_keeps need image.fit=letterbox. Set that too.")
    if image.fit == "letterbox" and (augmentation.crop_area_min, augmentation.crop_aspect_max) != (1, 1):
        raise UserError(
            "augment.crop_area_min and crop_aspect_max stretch the image. With image.fit=letterbox, use "
            "augment.scale_min instead."
        )
    if augmentation.scale_min > augmentation.scale_max:
        raise UserError(f"augment.scale_min={augmentation.scale_min} is above scale_max={augmentation.scale_max}.")


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Hash each number in place, which takes two thirds of the time that new arrays take; return the array."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _map_to_log_uniform(u: np.ndarray, high: float) -> np.ndarray:
    """Map [0, 1) to a factor between 1 / high and high, uniform in its logarithm."""
    factor: np.ndarray = np.exp(math.log(high) * (2 * u - 1))
    return factor


def _compute_theta(angle: np.ndarray, zoom: np.ndarray, shift: np.ndarray, aspect: float) -> np.ndarray:
    """Return (B, 2, 3) float32: rotate by `angle`, enlarge by `zoom`, move by `shift` (2, B).

    Coordinates span [-1, 1] along either side, whatever its length: without `aspect` (width over height) a rotation
    would shear an image that is not square.
    """
    cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
    rows = np.stack([cos, -sin / aspect, shift[0], sin * aspect, cos, shift[1]], axis=1)
    return rows.reshape(-1, 2, 3).astype(np.float32)


def _draw_crop(settings: AugmentSettings, regions: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return (B, 4) int32 random-resized crops of the regions; the regions themselves if cropping is off.

    Area and aspect ratio follow Szegedy et al. 2015 (arXiv:1409.4842, section 6): a share of the area uniform in
    [crop_area_min, 1], a log-uniform aspect ratio; a side longer than the region's is shortened to it.
    """
    if settings.crop_area_min == 1 and settings.crop_aspect_max == 1:
        return regions.astype(np.int32)
    top, left, height, width = regions.T.astype(np.float64)
    area = height * width * (settings.crop_area_min + (1 - settings.crop_area_min) * u[0])
    ratio = _map_to_log_uniform(u[1], settings.crop_aspect_max)
    crop_height = np.clip(np.rint(np.sqrt(area / ratio)), 1, height)
    crop_width = np.clip(np.rint(np.sqrt(area * ratio)), 1, width)
    y = top + np.floor(u[2] * (height - crop_height + 1))
    x = left + np.floor(u[3] * (width - crop_width + 1))
    return np.stack([y, x, crop_height, crop_width], axis=1).astype(np.int32)


def _fit_letterbox(
    regions: np.ndarray, height_px: int, width_px: int, scale: np.ndarray, *, place: np.ndarray | None
) -> np.ndarray:
    """Return (B, 4) int32 windows of the input's aspect ratio, rounded to whole pixels of the image.

    Args:
        scale: (B,) relative to the fit, at which the region just fills the input in one direction.
        place: (2, B) in [0, 1), the window's position between its extremes; None: the region's upper left corner.
    """
    corner, sides = regions[:, :2].astype(np.float64), regions[:, 2:].astype(np.float64)
    fit = np.minimum(height_px / sides[:, 0], width_px / sides[:, 1]) * scale
    window = np.maximum(np.rint(np.array([height_px, width_px]) / fit[:, None]), 1)
    if place is not None:
        spare = sides - window  # negative where the window is larger: the region then moves within it
        corner = corner + np.where(spare >= 0, np.floor(place.T * (spare + 1)), np.ceil(place.T * (spare - 1)))
    return np.concatenate([corner, window], axis=1).astype(np.int32)


def _shift_to_keep_a_box(
    box: np.ndarray, regions: np.ndarray, keep_boxes: Sequence[np.ndarray], choice: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """Move each window so that it contains one of the image's boxes: all of it if it fits, else its centre."""
    moved = box.copy()
    for i, boxes in enumerate(keep_boxes):
        if not len(boxes):
            continue
        x0, y0, x1, y1 = boxes[int(choice[i] * len(boxes))].astype(np.float64)
        for axis, (low, high) in enumerate(((y0, y1), (x0, x1))):
            start, side, window = regions[i, axis], regions[i, 2 + axis], box[i, 2 + axis]
            first, last = sorted((start, start + side - window))
            first, last = max(first, math.ceil(high) - window), min(last, math.floor(low))
            if first <= last:
                moved[i, axis] = first + math.floor(place[axis, i] * (last - first + 1))
            else:
                moved[i, axis] = round((low + high - window) / 2)
    return moved
