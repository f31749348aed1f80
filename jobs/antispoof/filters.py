"""Filter banks and transforms shared by front ends and vocoders: NumPy only, so that packing loads no torch."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def build_linear_filters(count: int, *, rate_hz: int, fft: int, high_hz: float) -> Floats:
    """Return (count, fft // 2 + 1) triangles of height 1, evenly spaced from 0 to `high_hz`, half overlapping."""
    return _build_triangles(np.linspace(0, high_hz, count + 2), rate_hz=rate_hz, fft=fft)


def build_mel_filters(count: int, *, rate_hz: int, fft: int) -> Floats:
    """Return (count, fft // 2 + 1) triangles of area 1 on Slaney's mel scale (Auditory Toolbox, 1998), from 0 Hz."""
    hz = _mel_to_hz(np.linspace(0, _hz_to_mel(rate_hz / 2), count + 2))
    return _build_triangles(hz, rate_hz=rate_hz, fft=fft) * (2 / (hz[2:] - hz[:-2]))[:, None]


def build_band_passes(count: int, taps: int, *, rate_hz: int) -> Floats:
    """Return (count, taps) impulse responses of band passes, evenly spaced on HTK's mel scale from 0 Hz to half the
    rate.

    Each is the difference of two ideal low passes through a Hamming window (Ravanelli and Bengio 2018,
    arXiv:1808.00158, equations 4 and 5).
    """
    hz = 700 * ((1 + rate_hz / 2 / 700) ** np.linspace(0, 1, count + 1) - 1)
    n = np.arange(taps) - taps // 2
    low_passes = 2 * hz[:, None] / rate_hz * np.sinc(2 * hz[:, None] * n / rate_hz)
    return np.diff(low_passes, axis=0) * np.hamming(taps)


def build_dct_matrix(size: int) -> Floats:
    """Return the orthonormal DCT-II, (size, size): row k is proportional to cos(pi k (n + 1/2) / size)."""
    k, n = np.arange(size)[:, None], np.arange(size)[None]
    matrix: Floats = np.cos(np.pi * k * (n + 0.5) / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def compute_hann_spectrum(offset_hz: Floats, length_s: float) -> Floats:
    """Return the Fourier transform of a centred Hann window of area 1, `offset_hz` from its centre frequency."""
    x = offset_hz * length_s
    near = np.abs(np.abs(x) - 1) < 1e-9
    return np.where(near, 0.5, np.sinc(x) / np.where(near, 1, 1 - x * x))


def find_fft_length(least: int) -> int:
    """Return the smallest multiple of 4, at least `least`, without prime factors above 7: FFTs of it are fast."""
    length = -(-least // 4) * 4
    while (2 * 3 * 5 * 7) ** 64 % length:  # it has another prime factor
        length += 4
    return length


def _build_triangles(hz: Floats, *, rate_hz: int, fft: int) -> Floats:
    bins_hz = np.arange(fft // 2 + 1) * rate_hz / fft
    rising = (bins_hz - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins_hz) / (hz[2:] - hz[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


_SLANEY_KNEE_HZ, _SLANEY_HZ_PER_MEL, _SLANEY_LOG_STEP = 1000.0, 200.0 / 3, math.log(6.4) / 27


def _hz_to_mel(hz: float) -> float:
    if hz < _SLANEY_KNEE_HZ:
        return hz / _SLANEY_HZ_PER_MEL
    return _SLANEY_KNEE_HZ / _SLANEY_HZ_PER_MEL + math.log(hz / _SLANEY_KNEE_HZ) / _SLANEY_LOG_STEP


def _mel_to_hz(mel: Floats) -> Floats:
    knee = _SLANEY_KNEE_HZ / _SLANEY_HZ_PER_MEL
    return np.where(mel < knee, mel * _SLANEY_HZ_PER_MEL, _SLANEY_KNEE_HZ * np.exp(_SLANEY_LOG_STEP * (mel - knee)))
