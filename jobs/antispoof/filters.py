"""Filter banks and transforms that front ends and vocoders share: numpy alone, so that packing loads no torch."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def linear_filters(count: int, *, rate_hz: int, fft: int, high_hz: float) -> Floats:
    """Return (count, fft // 2 + 1) triangles of height 1, evenly spaced from 0 to `high_hz`, half overlapping."""
    return _triangles(np.linspace(0, high_hz, count + 2), rate_hz=rate_hz, fft=fft)


def mel_filters(count: int, *, rate_hz: int, fft: int) -> Floats:
    """Return (count, fft // 2 + 1) triangles of area 1 over Slaney's mel scale (Auditory Toolbox, 1998), 0 Hz up."""
    hz = _slaney_hz(np.linspace(0, _slaney_mel(rate_hz / 2), count + 2))
    return _triangles(hz, rate_hz=rate_hz, fft=fft) * (2 / (hz[2:] - hz[:-2]))[:, None]


def dct_matrix(size: int) -> Floats:
    """Return the orthonormal DCT-II, (size, size): row k holds cos(pi k (n + 1/2) / size)."""
    k, n = np.arange(size)[:, None], np.arange(size)[None]
    matrix: Floats = np.cos(np.pi * k * (n + 0.5) / size) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def hann_spectrum(offset_hz: Floats, length_s: float) -> Floats:
    """Return the Fourier transform of a centred Hann window of area 1, `offset_hz` away from its middle."""
    x = offset_hz * length_s
    near = np.abs(np.abs(x) - 1) < 1e-9
    return np.where(near, 0.5, np.sinc(x) / np.where(near, 1, 1 - x * x))


def good_length(least: int) -> int:
    """Return the smallest multiple of 4 from `least` on that has no prime factor above 7: what FFTs are fast at."""

    def smooth(n: int) -> bool:
        for prime in (2, 3, 5, 7):
            while n % prime == 0:
                n //= prime
        return n == 1

    length = -(-least // 4) * 4
    while not smooth(length):
        length += 4
    return length


def _triangles(hz: Floats, *, rate_hz: int, fft: int) -> Floats:
    bins_hz = np.arange(fft // 2 + 1) * rate_hz / fft
    rising = (bins_hz - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins_hz) / (hz[2:] - hz[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


_SLANEY_KNEE_HZ, _SLANEY_HZ_PER_MEL, _SLANEY_LOG_STEP = 1000.0, 200.0 / 3, math.log(6.4) / 27


def _slaney_mel(hz: float) -> float:
    if hz < _SLANEY_KNEE_HZ:
        return hz / _SLANEY_HZ_PER_MEL
    return _SLANEY_KNEE_HZ / _SLANEY_HZ_PER_MEL + math.log(hz / _SLANEY_KNEE_HZ) / _SLANEY_LOG_STEP


def _slaney_hz(mel: Floats) -> Floats:
    knee = _SLANEY_KNEE_HZ / _SLANEY_HZ_PER_MEL
    return np.where(mel < knee, mel * _SLANEY_HZ_PER_MEL, _SLANEY_KNEE_HZ * np.exp(_SLANEY_LOG_STEP * (mel - knee)))
