"""Copy synthesis: vocoded copies of recordings, which lose what vocoders lose between spectrum and waveform.

In such spoofed speech only the vocoder is fake: the words, the speaker, the microphone and the room are those of the
recording. There are four kinds:

- A01: the true magnitudes, phases from 32 rounds of Griffin-Lim (1984).
- A02: 80 mel bands inverted by the pseudo-inverse, phases from 32 rounds.
- A03: 40 mel bands, phases from 16 rounds.
- A04: magnitudes smoothed by 64 mel bands, with the true phases.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from .filters import Floats, build_mel_filters

Complexes = NDArray[np.complex128]

FFT, HOP = 256, 64
WINDOW = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)


def synthesize_copy(wave: Floats, kind: str, *, rate_hz: int, rng: np.random.Generator) -> Floats:
    """Return a vocoded copy of a recording, with the same length and loudness.

    Args:
        wave: (frames,) float64 in [-1, 1].
        kind: one of `KINDS`.
        rng: draws the initial phases.
    """
    spectrum = compute_stft(wave)
    copied = invert_stft(KINDS[kind](spectrum, rate_hz, rng), len(wave))
    rms, copied_rms = (float(np.sqrt(np.mean(x * x))) for x in (wave, copied))
    return np.clip(copied * (rms / copied_rms if copied_rms else 1.0), -1, 1)


def compute_stft(wave: Floats) -> Complexes:
    """Return the short-time Fourier transform, (1 + frames // HOP, FFT // 2 + 1), with reflection at the ends."""
    padded = np.pad(wave, FFT // 2, mode="reflect" if len(wave) > FFT // 2 else "wrap")
    count = 1 + len(wave) // HOP
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[: count * HOP : HOP]
    return np.fft.rfft(frames * WINDOW)


def invert_stft(spectrum: Complexes, length: int) -> Floats:
    """Return the waveform whose STFT is closest in least squares (Griffin and Lim 1984, equation 6)."""
    frames = np.fft.irfft(spectrum, n=FFT) * WINDOW
    total = _overlap_add(frames)
    weight = _overlap_add(np.broadcast_to(WINDOW * WINDOW, frames.shape))
    wave: Floats = (total / np.maximum(weight, 1e-8))[FFT // 2 : FFT // 2 + length]
    return np.pad(wave, (0, length - len(wave)))


def griffin_lim(magnitude: Floats, rounds: int, rng: np.random.Generator) -> Complexes:
    """Return a spectrum with these magnitudes and consistent phases, starting from random ones."""
    phase = np.exp(2j * np.pi * rng.random(magnitude.shape))
    length = (len(magnitude) - 1) * HOP
    for _ in range(rounds):
        phase = _extract_phase(compute_stft(invert_stft(magnitude * phase, length)))
    spectrum: Complexes = magnitude * phase
    return spectrum


def _extract_phase(spectrum: Complexes) -> Complexes:
    return spectrum / np.maximum(np.abs(spectrum), 1e-12)  # where a magnitude is 0, the phase does not matter


def _overlap_add(frames: Floats) -> Floats:
    count, parts = len(frames), FFT // HOP
    total = np.zeros((count + parts - 1, HOP))
    for part in range(parts):
        total[part : part + count] += frames[:, part * HOP : (part + 1) * HOP]
    return total.reshape(-1)


@cache
def _build_mel_bands(count: int, rate_hz: int) -> tuple[Floats, Floats]:
    filters = build_mel_filters(count, rate_hz=rate_hz, fft=FFT)
    inverse = np.asarray(np.linalg.pinv(filters), dtype=np.float64)
    return filters, inverse


def _smooth(magnitude: Floats, count: int, rate_hz: int) -> Floats:
    filters, inverse = _build_mel_bands(count, rate_hz)
    return np.maximum(0, magnitude @ filters.T @ inverse.T)


def _estimate_phases(
    spectrum: Complexes, rate_hz: int, rng: np.random.Generator, *, bands: int, rounds: int
) -> Complexes:
    magnitude = np.abs(spectrum)
    return griffin_lim(_smooth(magnitude, bands, rate_hz) if bands else magnitude, rounds, rng)


def _smooth_magnitudes(spectrum: Complexes, rate_hz: int, rng: np.random.Generator) -> Complexes:
    return _smooth(np.abs(spectrum), 64, rate_hz) * _extract_phase(spectrum)


KINDS: dict[str, Callable[[Complexes, int, np.random.Generator], Complexes]] = {
    "A01": partial(_estimate_phases, bands=0, rounds=32),
    "A02": partial(_estimate_phases, bands=80, rounds=32),
    "A03": partial(_estimate_phases, bands=40, rounds=16),
    "A04": _smooth_magnitudes,
}
