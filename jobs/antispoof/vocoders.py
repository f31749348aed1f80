"""Machine copies of recordings: what is lost between a spectrum and a sound again, as vocoders lose it.

Copy synthesis makes spoofed speech of which everything but the machine is bona fide: the words, the speaker, the
microphone and the room are those of the recording. Four kinds, after section 1.9 of the specification:

- A01: the true magnitudes, phases by 32 rounds of Griffin and Lim's algorithm (1984).
- A02: 80 mel bands, brought back by the pseudo-inverse, phases by 32 rounds.
- A03: 40 mel bands, phases by 16 rounds.
- A04: magnitudes smoothed by 64 mel bands, with the true phases.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from .filters import Floats, mel_filters

Complexes = NDArray[np.complex128]

FFT, HOP = 256, 64


def copy(wave: Floats, kind: str, *, rate_hz: int, rng: np.random.Generator) -> Floats:
    """Return a machine copy of a sound, as long and as loud.

    Args:
        wave: (frames,) float64 in [-1, 1].
        kind: one of `KINDS`.
        rng: draws the phases that the algorithm starts from.
    """
    spectrum = analysis(wave)
    made = synthesis(KINDS[kind](spectrum, rate_hz, rng), len(wave))
    loudness, of_copy = (float(np.sqrt(np.mean(x * x))) for x in (wave, made))
    return np.clip(made * (loudness / of_copy if of_copy else 1.0), -1, 1)


def analysis(wave: Floats) -> Complexes:
    """Return the short-time Fourier transform, (1 + frames // HOP, FFT // 2 + 1), mirrored at the ends."""
    padded = np.pad(wave, FFT // 2, mode="reflect" if len(wave) > FFT // 2 else "wrap")
    count = 1 + len(wave) // HOP
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[: count * HOP : HOP]
    return np.fft.rfft(frames * _window())


def synthesis(spectrum: Complexes, length: int) -> Floats:
    """Return the sound whose transform is nearest in least squares (Griffin and Lim 1984, equation 6)."""
    window = _window()
    frames = np.fft.irfft(spectrum, n=FFT) * window
    total = _overlapped(frames)
    weight = _overlapped(np.broadcast_to(window * window, frames.shape))
    sound: Floats = (total / np.maximum(weight, 1e-8))[FFT // 2 : FFT // 2 + length]
    return np.pad(sound, (0, length - len(sound)))


def griffin_lim(magnitude: Floats, rounds: int, rng: np.random.Generator) -> Complexes:
    """Return a transform of these magnitudes whose phases go together, from random ones."""
    phase = np.exp(2j * np.pi * rng.random(magnitude.shape))
    length = (len(magnitude) - 1) * HOP
    for _ in range(rounds):
        phase = _phase(analysis(synthesis(magnitude * phase, length)))
    spectrum: Complexes = magnitude * phase
    return spectrum


def _phase(spectrum: Complexes) -> Complexes:
    return spectrum / np.maximum(np.abs(spectrum), 1e-12)  # of magnitudes that are 0, it does not matter


def _overlapped(frames: Floats) -> Floats:
    count, parts = len(frames), FFT // HOP
    total = np.zeros((count + parts - 1, HOP))
    for part in range(parts):
        total[part : part + count] += frames[:, part * HOP : (part + 1) * HOP]
    return total.reshape(-1)


@cache
def _window() -> Floats:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)


@cache
def _bands(count: int, rate_hz: int) -> tuple[Floats, Floats]:
    filters = mel_filters(count, rate_hz=rate_hz, fft=FFT)
    inverse = np.asarray(np.linalg.pinv(filters), dtype=np.float64)
    return filters, inverse


def _smoothed(magnitude: Floats, count: int, rate_hz: int) -> Floats:
    filters, inverse = _bands(count, rate_hz)
    return np.maximum(0, magnitude @ filters.T @ inverse.T)


def _by_phases(spectrum: Complexes, rate_hz: int, rng: np.random.Generator, *, bands: int, rounds: int) -> Complexes:
    magnitude = np.abs(spectrum)
    return griffin_lim(_smoothed(magnitude, bands, rate_hz) if bands else magnitude, rounds, rng)


def _by_magnitudes(spectrum: Complexes, rate_hz: int, rng: np.random.Generator) -> Complexes:
    return _smoothed(np.abs(spectrum), 64, rate_hz) * _phase(spectrum)


KINDS: dict[str, Callable[[Complexes, int, np.random.Generator], Complexes]] = {
    "A01": partial(_by_phases, bands=0, rounds=32),
    "A02": partial(_by_phases, bands=80, rounds=32),
    "A03": partial(_by_phases, bands=40, rounds=16),
    "A04": _by_magnitudes,
}
