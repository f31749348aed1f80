"""Enhances prints: each tile of a print is filtered by its own spectrum, which ridges dominate.

Axes of tensors: N prints, S side of a print in px, F frequencies, C cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..baseline import BAND, BLUR_PX, DPI, SIDE_PX

Floats = NDArray[np.float32]

TILE_PX, TILE_STEP_PX = 32, 8
PERIODS_PX = (3.1, 8.5)  # of ridges: 6 to 17 px at 500 dpi
COARSE_PX = 2  # pitch of the maps of energy and cover
CELL_PX = 8  # of the coarse mask
SEARCH_SIDE = 192  # points of the grid on which poses are searched: enough for all frequencies of ridges


@dataclass(frozen=True, slots=True)
class Prints:
    """N enhanced prints and what comparing them needs, all float32 on one device; about 1 MB a print.

    Attributes:
        ridges_NSS: ridges with mean 0 and about equal local contrast, centred on the print; 0 outside of it.
        mask_NSS: 1 inside of the print, 0 outside.
        energy_NCC, cover_NCC: means of ridges squared and of the mask under the window of a block around every second
            pixel.
        phases_NGF: complex64, phases of the spectrum within the band on the grid of the search; 0 elsewhere.
        coarse_NCC: share of the mask in each cell of 8 px.
    """

    ridges_NSS: Tensor
    mask_NSS: Tensor
    energy_NCC: Tensor
    cover_NCC: Tensor
    phases_NGF: Tensor
    coarse_NCC: Tensor

    def __len__(self) -> int:
        return len(self.ridges_NSS)


def prepare_prints(
    images: Sequence[NDArray[np.uint8]], dpi: Sequence[float], *, device: torch.device | str = "cpu"
) -> Prints:
    """Enhance prints for `match_pairs`; about 0.05 to 0.1 s of one core each.

    Args:
        images: N gray images (H, W), ridges dark or light, of any size.
        dpi: the resolution of each.
    """
    assert len(images) == len(dpi) > 0
    bar = tqdm(
        zip(images, dpi, strict=True), total=len(images), unit="print", desc="enhance", disable=None, leave=False
    )
    ridges, masks = zip(*(enhance_print(image, dots) for image, dots in bar), strict=True)
    return index_prints(torch.from_numpy(np.stack(ridges)).to(device), torch.from_numpy(np.stack(masks)).to(device))


def index_prints(ridges_NSS: Tensor, mask_NSS: Tensor) -> Prints:
    """Return enhanced prints with what comparing them needs."""
    average = _make_averages().to(ridges_NSS.device)
    return Prints(
        ridges_NSS,
        mask_NSS,
        average @ ridges_NSS.square() @ average.T,
        average @ mask_NSS @ average.T,
        compute_phases(ridges_NSS),
        functional.avg_pool2d(mask_NSS[:, None], CELL_PX)[:, 0],
    )


def enhance_print(gray: NDArray[np.uint8], dpi: float) -> tuple[Floats, Floats]:
    """Return the ridges of a print and its mask, (256, 256) float32 each, as `enhance_image`, centred on the print."""
    ridges, mask, _ = centre_image(*enhance_image(gray, dpi))
    return ridges, mask


def centre_image(ridges: Floats, mask: Floats, centre: tuple[float, float]) -> tuple[Floats, Floats, tuple[int, int]]:
    """Return ridges and mask of (256, 256) px around a centre, and where in the image their corner is, y and x."""
    top, left = (round(at - SIDE_PX / 2) for at in centre)
    rows, columns = (slice(at + SIDE_PX, at + 2 * SIDE_PX) for at in (top, left))
    mask = np.pad(mask, SIDE_PX)[rows, columns]
    return np.pad(ridges, SIDE_PX)[rows, columns] * mask, mask, (top, left)


def enhance_image(gray: NDArray[np.uint8], dpi: float) -> tuple[Floats, Floats, tuple[float, float]]:
    """Return the ridges in an image and the mask of the print, float32 each, at 250 dpi, and the print's centre (y, x).

    The print is where local contrast exceeds half of its 90th percentile: the largest such region without its holes. An
    image without contrast has an empty mask.
    """
    height, width = (max(1, round(side * DPI / dpi)) for side in gray.shape)
    small = np.asarray(Image.fromarray(gray).resize((width, height), Image.Resampling.BOX), dtype=np.float32)
    detail = small - ndimage.gaussian_filter(small, BLUR_PX, mode="mirror")
    contrast = np.sqrt(np.maximum(ndimage.gaussian_filter(detail**2, BLUR_PX, mode="mirror"), 0))
    foreground = contrast > 0.5 * np.percentile(contrast, 90)
    ridges = filter_ridges(detail / (contrast + 5))
    strength = np.sqrt(np.maximum(ndimage.gaussian_filter(ridges**2, 6.0, mode="mirror"), 0))
    ridges /= strength + 0.15 * np.percentile(strength, 90) + 1e-6
    regions, _ = ndimage.label(ndimage.uniform_filter(foreground.astype(np.float32), 9) > 0.5)
    largest = 1 + np.argmax(np.bincount(regions.ravel(), minlength=2)[1:])
    mask = ndimage.binary_fill_holes(regions == largest).astype(np.float32)
    y, x = np.nonzero(foreground) if foreground.any() else (np.array([height / 2]), np.array([width / 2]))
    return ridges, mask, (float(y.mean()), float(x.mean()))


def filter_ridges(detail: Floats) -> Floats:
    """Return a print of any size, each 32 px tile of which is filtered by its own spectrum.

    A frequency is weighted by its magnitude, smoothed over 3 x 3 frequencies, over that of the tile's strongest one. So
    ridges, which are almost one frequency, remain, and noise between them goes; without smoothing, minutiae and bent
    ridges go too. After Watson et al., "Comparison of FFT fingerprint filtering methods for neural network
    classification" (NISTIR 5493, 1994), whose weight is a power of the magnitude.
    """
    height, width = detail.shape
    after = [TILE_PX + -side % TILE_STEP_PX for side in detail.shape]
    padded = np.pad(detail, ((TILE_PX, after[0]), (TILE_PX, after[1])), mode="symmetric")
    window = torch.from_numpy(make_window().sqrt().numpy())
    tiles = functional.unfold(torch.from_numpy(padded)[None, None], TILE_PX, stride=TILE_STEP_PX)[0]
    spectra = torch.fft.rfft2(tiles.T.reshape(-1, TILE_PX, TILE_PX) * window)
    magnitude = _smooth_spectra(spectra.abs()) * _make_tile_band()
    weight = magnitude / (magnitude.amax(dim=(1, 2), keepdim=True) + 1e-6)
    spectra *= _make_tile_band() * weight
    filtered = torch.fft.irfft2(spectra, s=(TILE_PX, TILE_PX)) * window
    joined = functional.fold(filtered.flatten(1).T[None], padded.shape, TILE_PX, stride=TILE_STEP_PX)[0, 0]
    return joined[TILE_PX : TILE_PX + height, TILE_PX : TILE_PX + width].numpy()


def _smooth_spectra(magnitude_NSF: Tensor) -> Tensor:
    """Return magnitudes of halves of spectra, averaged over 3 x 3 frequencies with binomial weights."""
    down_NSF = (magnitude_NSF.roll(1, 1) + 2 * magnitude_NSF + magnitude_NSF.roll(-1, 1)) / 4
    ends_NS2 = down_NSF[..., [1, -2]].flip(1).roll(1, 1)  # the other half mirrors this one
    wider = torch.cat([ends_NS2[..., :1], down_NSF, ends_NS2[..., 1:]], dim=2)
    smooth_NSF: Tensor = (wider[..., :-2] + 2 * wider[..., 1:-1] + wider[..., 2:]) / 4
    return smooth_NSF


def compute_phases(ridges_NSS: Tensor) -> Tensor:
    """Return the phases of the spectra (N, G, F) on the grid of the search: of length 1 within the band, else 0."""
    spectrum_NSF, half = torch.fft.rfft2(ridges_NSS), SEARCH_SIDE // 2
    spectrum_NGF = torch.cat([spectrum_NSF[:, :half], spectrum_NSF[:, -half:]], dim=1)[..., : half + 1]
    phases: Tensor = spectrum_NGF * (make_band().to(ridges_NSS.device) / (spectrum_NGF.abs() + 1e-6))
    return phases


@cache
def make_band() -> Tensor:
    """Return (G, F): 1 for the frequencies of ridges, 0 for others."""
    down, across = (make(SEARCH_SIDE, SIDE_PX / SEARCH_SIDE) for make in (torch.fft.fftfreq, torch.fft.rfftfreq))
    frequency = torch.hypot(down[:, None], across[None])
    return ((frequency > BAND[0]) & (frequency < BAND[1])).float()


@cache
def _make_tile_band() -> Tensor:
    """Return (32, 17) gains: 1 for the periods of ridges, with smooth edges."""
    frequency = torch.hypot(torch.fft.fftfreq(TILE_PX)[:, None], torch.fft.rfftfreq(TILE_PX)[None])
    return torch.sigmoid(120 * (frequency - 1 / PERIODS_PX[1])) * torch.sigmoid(120 * (1 / PERIODS_PX[0] - frequency))


@cache
def make_window() -> Tensor:
    """Return a Hann window (32, 32) without its zeros."""
    return _make_hann()[:, None] * _make_hann()


@cache
def _make_hann() -> Tensor:
    return torch.hann_window(TILE_PX + 2, periodic=False)[1:-1]


@cache
def _make_averages() -> Tensor:
    """Return (C, S): rows that average a column of pixels under the window of a block, one every 2 px.

    Row c is centred on the border before pixel 2 c; pixels outside the print count as 0.
    """
    averages = torch.zeros(SIDE_PX // COARSE_PX, SIDE_PX + TILE_PX)
    for row in range(len(averages)):
        averages[row, row * COARSE_PX : row * COARSE_PX + TILE_PX] = _make_hann() / _make_hann().sum()
    return averages[:, TILE_PX // 2 : -TILE_PX // 2]
