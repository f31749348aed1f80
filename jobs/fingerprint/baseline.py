"""The baseline without training: band-limited phase-only correlation (BLPOC) of every two prints.

Ito et al., "A fingerprint matching algorithm using phase-only correlation" (IEICE Trans. E87-A(3), 2004): where two
prints agree, the phases of their spectra differ by a shift alone, so the correlation of the phases has one high peak.
Only the frequencies of ridges count. Rotation is searched.
"""

from math import radians

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

DPI, SIDE_PX = 250, 256  # half of the usual resolution: a ridge has about 4.5 px
BAND = (1 / 12, 1 / 3)  # cycles per pixel
ANGLES_DEG = tuple(range(-24, 25, 4))
BLUR_PX = 8.0  # of the local mean and contrast
PAIRS_AT_ONCE = 8

Floats = NDArray[np.float32]


def normalise_print(gray: NDArray[np.uint8], dpi: float) -> Floats:
    """Return a print at 250 dpi with local mean 0 and about equal local contrast, centred in (256, 256) float32.

    The background is 0: pixels whose local contrast is below half of the 90th percentile.
    """
    height, width = (max(1, round(side * DPI / dpi)) for side in gray.shape)
    small = np.asarray(Image.fromarray(gray).resize((width, height), Image.Resampling.BOX), dtype=np.float32)
    detail = small - ndimage.gaussian_filter(small, BLUR_PX, mode="mirror")
    contrast = np.sqrt(np.maximum(ndimage.gaussian_filter(detail**2, BLUR_PX, mode="mirror"), 0))
    foreground = contrast > 0.5 * np.percentile(contrast, 90)
    detail = detail / (contrast + 5) * ndimage.gaussian_filter(foreground.astype(np.float32), 2.0, mode="mirror")
    y, x = np.nonzero(foreground) if foreground.any() else (np.array([height / 2]), np.array([width / 2]))
    top, left = round(y.mean() - SIDE_PX / 2), round(x.mean() - SIDE_PX / 2)
    rows, columns = (slice(at + SIDE_PX, at + 2 * SIDE_PX) for at in (top, left))
    return np.pad(detail, SIDE_PX)[rows, columns]


def correlate_pairs(prints_NHW: Tensor, one: np.ndarray, other: np.ndarray) -> NDArray[np.float64]:
    """Return the highest peak of each pair of prints, one of which is rotated by each of the angles, (P,)."""
    band = _make_band(prints_NHW.device)
    spectra = torch.cat([_whiten(prints_NHW[i : i + 64], band) for i in range(0, len(prints_NHW), 64)])
    scale = SIDE_PX**2 / (2 * float(band.sum()))  # a print with itself: about 1
    score = np.empty(len(one))
    order = np.argsort(one, kind="stable")
    with tqdm(total=len(one), unit="pair", desc="phase correlation", disable=None, leave=False) as bar:
        for rows in np.split(order, np.flatnonzero(np.diff(one[order])) + 1):
            rotated_RHF = _whiten(_rotate(prints_NHW[one[rows[0]]]), band)
            for start in range(0, len(rows), PAIRS_AT_ONCE):
                part = rows[start : start + PAIRS_AT_ONCE]
                conjugate_PHF = spectra[torch.from_numpy(other[part]).to(spectra.device)].conj()
                surface = torch.fft.irfft2(rotated_RHF * conjugate_PHF[:, None], s=(SIDE_PX, SIDE_PX))
                score[part] = (surface.amax(dim=(1, 2, 3)) * scale).double().cpu().numpy()
                bar.update(len(part))
    return score


def _make_band(device: torch.device) -> Tensor:
    frequency = torch.hypot(torch.fft.fftfreq(SIDE_PX)[:, None], torch.fft.rfftfreq(SIDE_PX)[None])
    return ((frequency > BAND[0]) & (frequency < BAND[1])).float().to(device)


def _whiten(prints_NHW: Tensor, band: Tensor) -> Tensor:
    """Return the phases of the spectra, complex of length 1 within the band and 0 elsewhere."""
    spectrum = torch.fft.rfft2(prints_NHW)
    phases: Tensor = spectrum / (spectrum.abs() + 1e-6) * band
    return phases


def _rotate(print_HW: Tensor) -> Tensor:
    """Return (R, H, W): a print rotated by each of the angles about its middle."""
    angle = torch.tensor([radians(degrees) for degrees in ANGLES_DEG], device=print_HW.device)
    zero = torch.zeros_like(angle)
    affine = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], dim=1).view(-1, 2, 3)
    size = (len(angle), 1, SIDE_PX, SIDE_PX)
    grid = functional.affine_grid(affine, list(size), align_corners=False)
    rotated: Tensor = functional.grid_sample(print_HW.expand(size), grid, align_corners=False)
    return rotated[:, 0]
