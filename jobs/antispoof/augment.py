"""Augmentation of waveforms and maps on the device: random starts, rooms, RawBoost-like noise, codecs, SpecAugment.

All randomness comes from `noise`, (B, 32) uniform in [0, 1), which the loader draws per (seed, epoch, sample): a
sample is augmented in the same way whatever the batch, the rank or the restart. Longer rows of random numbers are
hashed from it here. B utterances, N samples, F bins, T frames.
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

BANDS = 5  # stop bands of a random filter
ORDERS = 5  # powers of the waveform in non-linear filtering


class Slot(IntEnum):
    """Columns of `noise`, by what they decide."""

    RAWBOOST, CODEC, CODEC_KIND, CODEC_CUT, MASK_BINS, MASK_FRAMES, BINS, BINS_AT, FRAMES, FRAMES_AT = range(10)
    IMPULSES, SNR, START, REVERB, DECAY, DIRECT = range(10, 16)
    SEED_HIGH, SEED_LOW = 30, 31


class Stream(IntEnum):
    """Streams of hashed random numbers, by what they are for."""

    FILTERS, COLOUR, IMPULSE_AT, IMPULSE_A, IMPULSE_B, NORMAL_A, NORMAL_B, GAINS, ECHO_A, ECHO_B = range(10)


def roll(wave_BN: Tensor, noise_BK: Tensor) -> Tensor:
    """Rotate each waveform to start at a random sample.

    An utterance shorter than N repeats from its start, so without this it would be the same in every epoch.
    """
    count = wave_BN.shape[1]
    start_B1 = (noise_BK[:, Slot.START, None] * count).long().clamp(max=count - 1)
    return wave_BN.gather(1, (torch.arange(count, device=wave_BN.device) + start_B1) % count)


def apply_reverb(wave_BN: Tensor, noise_BK: Tensor, *, chance: float, rate_hz: int) -> Tensor:
    """Play a share of the waveforms in a drawn room, and scale each to the energy that it had.

    The impulse response is the direct sound and Gaussian noise that decays by 60 dB in T60 (Polack, thesis,
    Université du Maine, 1988). T60 is 0.1 to 0.8 s; the direct sound has 0 to 20 dB more energy than the echoes.
    """
    count, length = wave_BN.shape[1], round(0.8 * rate_hz)
    decay_s = 0.1 + 0.7 * noise_BK[:, Slot.DECAY, None]
    time_s = torch.arange(1, length + 1, device=wave_BN.device) / rate_hz
    echo_BN = _draw_normals(noise_BK, length, Stream.ECHO_A, Stream.ECHO_B) * 10 ** (-3 * time_s / decay_s)
    echo_BN = echo_BN / _norm(echo_BN) * 10 ** (-noise_BK[:, Slot.DIRECT, None])
    response_BN = torch.cat([torch.ones_like(echo_BN[:, :1]), echo_BN], dim=1)
    padded = count + length  # a transform of this length wraps no echo around
    spectrum = torch.fft.rfft(wave_BN, n=padded) * torch.fft.rfft(response_BN, n=padded)
    played = torch.fft.irfft(spectrum, n=padded)[:, :count]
    played = _limit_peak(played * _norm(wave_BN) / _norm(played).clamp(min=1e-9))
    return torch.where(noise_BK[:, Slot.REVERB, None] < chance, played, wave_BN)


def apply_rawboost(wave_BN: Tensor, noise_BK: Tensor, *, chance: float, kind: str, rate_hz: int) -> Tensor:
    """Add telephone-line noise to a share of the waveforms, after RawBoost (Tak et al. 2022, arXiv:2111.04433).

    Linear and non-linear filtering (sum of powers of the waveform, each through its own stop bands; equation 1),
    impulses proportional to the signal (equation 2), stationary coloured noise at 10 to 40 dB (equation 3). Bands,
    gains and ratios are theirs; filters are smooth and zero-phase instead of FIR filters of random length.

    Args:
        chance: share of waveforms changed.
        kind: "series", one after the other (their algorithm 4), or "parallel", filtering plus impulses (their 5).
    """
    filtered = _limit_peak(_add_convolutive_noise(wave_BN, noise_BK, rate_hz))
    if kind == "series":
        changed = _limit_peak(_add_impulses(filtered, noise_BK))
        changed = _limit_peak(_add_stationary_noise(changed, noise_BK, rate_hz))
    else:
        assert kind == "parallel", kind
        changed = _limit_peak(filtered + _limit_peak(_add_impulses(wave_BN, noise_BK)))
    return torch.where(noise_BK[:, Slot.RAWBOOST, None] < chance, changed, wave_BN)


def apply_codec(wave_BN: Tensor, noise_BK: Tensor, *, chance: float, rate_hz: int) -> Tensor:
    """Pass a share of the waveforms through a telephone codec: a low-pass and 8 bits (mu-law, A-law or uniform).

    The cut-off is between 3.4 kHz (or 0.42 of the rate, if that is lower) and half the rate. Laws as in ITU-T G.711.
    """
    spectrum = torch.fft.rfft(wave_BN)
    hz = torch.fft.rfftfreq(wave_BN.shape[1], 1 / rate_hz, device=wave_BN.device)
    lowest_hz = min(3400.0, 0.42 * rate_hz)
    cutoff_hz = lowest_hz + (rate_hz / 2 - lowest_hz) * noise_BK[:, Slot.CODEC_CUT, None]
    narrow = torch.fft.irfft(spectrum * torch.sigmoid((cutoff_hz - hz) / 50), n=wave_BN.shape[1]).clamp(-1, 1)
    kind = noise_BK[:, Slot.CODEC_KIND, None]
    coded = torch.where(
        kind < 0.4, _apply_mu_law(narrow), torch.where(kind < 0.8, _apply_a_law(narrow), _quantise(narrow))
    )
    return torch.where(noise_BK[:, Slot.CODEC, None] < chance, coded, wave_BN)


def apply_specaugment(map_BFT: Tensor, noise_BK: Tensor, *, chance: float, bins: int, frames: int) -> Tensor:
    """Replace up to `bins` bins and up to `frames` frames by the map's mean: SpecAugment (arXiv:1904.08779).

    Args:
        chance: probability of either mask.
        bins, frames: largest widths; widths are uniform from 0 up.
    """
    count_F, count_T = map_BFT.shape[1:]
    bins_BF = _draw_span(noise_BK, Slot.BINS, Slot.BINS_AT, count_F, bins) & (
        noise_BK[:, Slot.MASK_BINS, None] < chance
    )
    frames_BT = _draw_span(noise_BK, Slot.FRAMES, Slot.FRAMES_AT, count_T, frames) & (
        noise_BK[:, Slot.MASK_FRAMES, None] < chance
    )
    mask_BFT = bins_BF[:, :, None] | frames_BT[:, None, :]
    return torch.where(mask_BFT, map_BFT.mean(dim=(1, 2), keepdim=True), map_BFT)


def draw_uniforms(noise_BK: Tensor, stream: Stream, count: int) -> Tensor:
    """Return (B, count) float32 in [0, 1): a hash of two numbers from each row, the stream and the position.

    SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) over counters, in wrapping int64 arithmetic.
    """
    bits = (noise_BK[:, [Slot.SEED_HIGH, Slot.SEED_LOW]] * 2**24).long()
    seed_B = bits[:, 0] * 2**24 + bits[:, 1] + stream * 2**50
    position = torch.arange(1, count + 1, device=noise_BK.device)
    x = _mix_bits(_mix_bits(seed_B)[:, None] + position * _wrap_int64(0x9E3779B97F4A7C15))
    return _shift_right(x, 40).float() / 2**24


def _mix_bits(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _wrap_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _wrap_int64(0x94D049BB133111EB)
    mixed: Tensor = x ^ _shift_right(x, 31)
    return mixed


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts extend the sign bit


def _wrap_int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _draw_normals(noise_BK: Tensor, count: int, a: Stream, b: Stream) -> Tensor:
    radius = (-2 * torch.log1p(-draw_uniforms(noise_BK, a, count))).sqrt()
    return radius * torch.cos(2 * math.pi * draw_uniforms(noise_BK, b, count))


def _add_convolutive_noise(wave_BN: Tensor, noise_BK: Tensor, rate_hz: int) -> Tensor:
    gains_db = -5 - 15 * draw_uniforms(noise_BK, Stream.GAINS, ORDERS)
    responses = _draw_stop_bands(noise_BK, Stream.FILTERS, ORDERS, wave_BN.shape[1], rate_hz)
    total: Tensor | None = None
    for order, response in enumerate(responses):
        spectrum = torch.fft.rfft(wave_BN ** (order + 1)) * response
        total = spectrum if total is None else total + spectrum * 10 ** (gains_db[:, order, None] / 20)
    assert total is not None
    total[:, 0] = 0  # even powers have a mean, and a telephone line passes no DC
    filtered: Tensor = torch.fft.irfft(total, n=wave_BN.shape[1])
    return filtered


def _draw_stop_bands(noise_BK: Tensor, stream: Stream, count: int, samples: int, rate_hz: int) -> list[Tensor]:
    """Return `count` responses (B, samples // 2 + 1) in 0..1 with stop bands 100 to 1,000 Hz wide."""
    u = draw_uniforms(noise_BK, stream, count * BANDS * 2).view(-1, count, BANDS, 2)
    hz = torch.fft.rfftfreq(samples, 1 / rate_hz, device=noise_BK.device)
    responses = []
    for i in range(count):
        response = torch.ones(len(noise_BK), len(hz), device=noise_BK.device)
        for band in range(BANDS):
            centre = 20 + (rate_hz / 2 - 20) * u[:, i, band, 0, None]
            half_width = 50 + 450 * u[:, i, band, 1, None]
            response = response * (1 - torch.exp(-0.5 * ((hz - centre) / half_width).square()))
        responses.append(response)
    return responses


def _add_impulses(wave_BN: Tensor, noise_BK: Tensor) -> Tensor:
    """Change up to a tenth of the samples, each by up to twice its value."""
    count = wave_BN.shape[1]
    hit = draw_uniforms(noise_BK, Stream.IMPULSE_AT, count) < 0.1 * noise_BK[:, Slot.IMPULSES, None]
    a, b = (2 * draw_uniforms(noise_BK, stream, count) - 1 for stream in (Stream.IMPULSE_A, Stream.IMPULSE_B))
    return wave_BN + torch.where(hit, 2 * wave_BN * a * b, 0.0)


def _add_stationary_noise(wave_BN: Tensor, noise_BK: Tensor, rate_hz: int) -> Tensor:
    count = wave_BN.shape[1]
    (response,) = _draw_stop_bands(noise_BK, Stream.COLOUR, 1, count, rate_hz)
    white = _draw_normals(noise_BK, count, Stream.NORMAL_A, Stream.NORMAL_B)
    coloured = torch.fft.irfft(torch.fft.rfft(white) * response, n=count)
    ratio_db = 10 + 30 * noise_BK[:, Slot.SNR, None]
    level = _norm(wave_BN) / _norm(coloured).clamp(min=1e-9) / 10 ** (ratio_db / 20)
    noisy: Tensor = wave_BN + coloured * level
    return noisy


def _norm(wave_BN: Tensor) -> Tensor:
    return wave_BN.square().sum(dim=1, keepdim=True).sqrt()


def _limit_peak(wave_BN: Tensor) -> Tensor:
    """Scale down waveforms that exceed full scale."""
    return wave_BN / wave_BN.abs().amax(dim=1, keepdim=True).clamp(min=1.0)


def _quantise(wave: Tensor, levels: int = 127) -> Tensor:
    return (wave * levels).round() / levels


def _apply_mu_law(wave: Tensor) -> Tensor:
    mu = 255.0
    coded = _quantise(wave.sign() * torch.log1p(mu * wave.abs()) / math.log1p(mu))
    return coded.sign() * torch.expm1(coded.abs() * math.log1p(mu)) / mu


def _apply_a_law(wave: Tensor) -> Tensor:
    a = 87.6
    scale = 1 + math.log(a)
    size = wave.abs()
    compressed = torch.where(size < 1 / a, a * size, 1 + torch.log((a * size).clamp(min=1))) / scale
    coded = _quantise(wave.sign() * compressed)
    level = coded.abs() * scale
    return coded.sign() * torch.where(level < 1, level, torch.exp(level - 1)) / a


def _draw_span(noise_BK: Tensor, width_slot: Slot, start_slot: Slot, count: int, longest: int) -> Tensor:
    """Return (B, count) bool: a span of 0 to `longest` true values at a random position."""
    width = (noise_BK[:, width_slot, None] * (min(longest, count) + 1)).floor()
    first = (noise_BK[:, start_slot, None] * (count - width + 1)).floor()
    position = torch.arange(count, device=noise_BK.device)
    return (position >= first) & (position < first + width)
