"""Front ends, which turn waveforms into feature maps on the device: LFCC, log spectra, mel and constant-Q.

Legend: B utterances, N samples, L samples of a window, F bins or coefficients, T frames, Q bins per octave.

Everything here runs in float32, outside autocast: a power spectrum spans more decades than fp16 can represent, and
its logarithm in bf16 is noise. Front ends have no trainable weights, so no gradient flows through them. They use only
operators with deterministic kernels.
"""

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.errors import UserError
from trainyard.train.module import has_values

from .filters import (
    Floats,
    build_dct_matrix,
    build_linear_filters,
    build_mel_filters,
    compute_hann_spectrum,
    find_fft_length,
)

EPS = 2.220446e-16  # as in the MATLAB baseline; added before each logarithm
PRE_EMPHASIS = 0.97
REACH = 3  # frames on either side of a delta
SLIDING_FRAMES = 301  # three seconds around a frame, at a hop of 10 ms
RATES_HZ = {
    **dict.fromkeys(("lfcc60", "lfcc60_nii", "lfcc_hr", "spec257", "cqt432", "mel128"), (16000,)),
    **dict.fromkeys(("lfcc60_8k", "spec129"), (8000,)),
    "wave": (8000, 16000),
}


def build(name: str, *, rate_hz: int, frames: int, mean: str, slopes: str = "htk") -> "Frontend":
    """Return a front end that maps (B, N) float32 waveforms in [-1, 1) to (B, F, T) float32.

    Args:
        name: one of `RATES_HZ`, or "wave": the waveform as one bin, T = N.
        rate_hz: sampling rate of the waveforms.
        frames: N; a constant-Q front end is built for this length, and accepts shorter waveforms.
        mean: subtracted from each bin: "none", its mean over the "utterance", or over the "sliding" three
            seconds around a frame; "standard" also divides by its deviation over the utterance.
        slopes: "htk" or, of lfcc60 alone, "matlab", whose deltas are not divided by a sum of squares.

    Raises:
        UserError: the recipe is for another sampling rate, or has no such slopes.
    """
    if rate_hz not in RATES_HZ[name]:
        fitting = [frontend for frontend, rates_hz in RATES_HZ.items() if rate_hz in rates_hz]
        raise UserError(
            f"frontend.name={name} needs {RATES_HZ[name][-1]} Hz, but sound.rate_hz={rate_hz}. "
            f"Use sound.rate_hz={RATES_HZ[name][-1]}" + (f", or one of {', '.join(fitting)}." if fitting else ".")
        )
    if slopes != "htk" and name not in ("lfcc60", "lfcc60_8k"):
        raise UserError(f"frontend.slopes={slopes}: only lfcc60 and lfcc60_8k have them, not frontend.name={name}.")
    if name == "wave":
        if mean != "none":
            raise UserError(f"frontend.mean={mean}: frontend.name=wave has no bins. Use frontend.mean=none.")
        return Frontend(nn.Unflatten(1, (1, -1)), MeanRemoval(mean))
    gain = 1.0 if slopes == "htk" else 2.0 * sum(n * n for n in range(1, REACH + 1))
    return Frontend(_build_maps(name, frames, delta_gain=gain), MeanRemoval(mean))


def build_spectra(*, rate_hz: int, frames: int) -> "Frontend":
    """Return log-power spectra for recordings of 8 or 16 kHz, which keep their mean over the utterance."""
    return build("spec257" if rate_hz == 16000 else "spec129", rate_hz=rate_hz, frames=frames, mean="none")


def _build_maps(name: str, frames: int, *, delta_gain: float) -> nn.Module:
    if name == "cqt432":  # Res2Net (Li et al. 2021, arXiv:2010.15006): nine octaves from 15 Hz, every 16 ms
        return ConstantQ(frames=frames, rate_hz=16000, hop=256, bins_per_octave=48, octaves=9, low_hz=15.0)
    if name == "spec257":  # ASSERT (Lai et al. 2019, arXiv:1904.01120): 25 ms windows every 10 ms
        return LogPower(PowerSpectrum(window=torch.hann_window(400), hop=160, fft=512))
    if name == "spec129":  # the same for 8 kHz
        return LogPower(PowerSpectrum(window=torch.hann_window(200), hop=80, fft=256))
    if name == "mel128":  # 32 ms windows every 10 ms
        power = PowerSpectrum(window=torch.hann_window(512), hop=160, fft=512)
        return LogMel(power, build_mel_filters(128, rate_hz=16000, fft=512))
    if name == "lfcc60":  # the ASVspoof 2019 baseline: 20 ms windows every 10 ms, 20 filters up to 8 kHz
        window = torch.hamming_window(320, periodic=False)
        power = PowerSpectrum(window=window, hop=160, fft=512, pre_emphasis=PRE_EMPHASIS)
        bands = build_linear_filters(20, rate_hz=16000, fft=512, high_hz=8000)
        return Lfcc(power, bands, cepstra=20, delta_gain=delta_gain)
    if name == "lfcc60_8k":  # the same for 8 kHz: filters up to 4 kHz
        power = PowerSpectrum(
            window=torch.hamming_window(160, periodic=False), hop=80, fft=256, pre_emphasis=PRE_EMPHASIS
        )
        bands = build_linear_filters(20, rate_hz=8000, fft=256, high_hz=4000)
        return Lfcc(power, bands, cepstra=20, delta_gain=delta_gain)
    if name == "lfcc_hr":  # the LFCC-GMM baseline of 2021: 30 ms windows every 15 ms, 70 filters up to 4 kHz
        power = PowerSpectrum(window=torch.hamming_window(480), hop=240, fft=1024, pre_emphasis=PRE_EMPHASIS)
        return Lfcc(power, build_linear_filters(70, rate_hz=16000, fft=1024, high_hz=4000), cepstra=20)
    assert name == "lfcc60_nii", name  # the LFCC-LCNN baseline of 2021: up to 4 kHz, deltas x[t + 1] - x[t - 1]
    power = PowerSpectrum(window=torch.hamming_window(320), hop=160, fft=1024, pre_emphasis=PRE_EMPHASIS)
    filters = build_linear_filters(20, rate_hz=16000, fft=1024, high_hz=4000)
    return Lfcc(power, filters, cepstra=20, reach=1, delta_gain=2.0, energy=True)


class Frontend(nn.Module):
    """Computes maps and removes their mean. The CPU takes a few utterances at a time, which fit in its caches."""

    CPU_CHUNK = 4  # the fastest of 1, 2, 4 and 32

    def __init__(self, maps: nn.Module, mean: "MeanRemoval") -> None:
        super().__init__()
        self.maps, self.mean = maps, mean

    @torch.no_grad()  # maps are computed in place
    def forward(self, wave_BN: Tensor) -> Tensor:
        if torch.compiler.is_exporting():  # an exported program takes any number of utterances
            return self.mean(self.maps(wave_BN))  # type: ignore[no-any-return]
        if wave_BN.device.type != "cpu":
            return self.mean(self.maps(wave_BN)).contiguous()  # type: ignore[no-any-return]
        return torch.cat([self.mean(self.maps(part)) for part in torch.split(wave_BN, self.CPU_CHUNK)])


class PowerSpectrum(nn.Module):
    """Power of the short-time Fourier transform, (B, N) to (B, fft // 2 + 1, 1 + N // hop).

    Frames are centred on multiples of `hop`, with zeros beyond the ends; a window shorter than `fft` is centred in it.
    In memory, the bins of a frame are contiguous.
    """

    def __init__(self, *, window: Tensor, hop: int, fft: int, pre_emphasis: float = 0.0) -> None:
        super().__init__()
        self.hop, self.fft, self.pre_emphasis = hop, fft, pre_emphasis
        self.register_buffer("window", window, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        real, imaginary = self.compute_squares(wave_BN)
        return real + imaginary

    def compute_squares(self, wave_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squares of the real and imaginary parts; their sum is the power."""
        if self.pre_emphasis:
            wave_BN = apply_pre_emphasis(wave_BN, self.pre_emphasis)
        window = cast(Tensor, self.window)
        spectrum = torch.stft(
            wave_BN, self.fft, self.hop, len(window), window, center=True, pad_mode="constant", return_complex=True
        )
        squared = torch.view_as_real(spectrum).square_()
        return squared[..., 0], squared[..., 1]


class Bands(nn.Module):
    """A filter bank that skips the products with zero, (B, K, T) to (B, F, T).

    Args:
        filters_FK: each row covers a few bins, in rising order. A group of rows is multiplied with the bins that any
            of them needs.
    """

    ROWS = 8  # the fastest of 8, 16 and 32 on a CPU for 20 linear bands over 257 bins; no matter for 128 mel bands

    def __init__(self, filters_FK: Floats) -> None:
        super().__init__()
        self.spans: list[tuple[int, int]] = []
        for number, first in enumerate(range(0, len(filters_FK), self.ROWS)):
            rows = filters_FK[first : first + self.ROWS]
            used = np.flatnonzero(rows.any(axis=0))
            low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
            self.spans.append((low, high))
            self.register_buffer(
                f"weights_{number}", torch.tensor(rows[:, low:high], dtype=torch.float32), persistent=False
            )

    def forward(self, power_BKT: Tensor) -> Tensor:
        groups = [getattr(self, f"weights_{i}") @ power_BKT[:, low:high] for i, (low, high) in enumerate(self.spans)]
        return torch.cat(groups, dim=1)


class LogPower(nn.Module):
    """Natural logarithm of the power in every bin."""

    def __init__(self, power: PowerSpectrum) -> None:
        super().__init__()
        self.power = power

    def forward(self, wave_BN: Tensor) -> Tensor:
        real, imaginary = self.power.compute_squares(wave_BN)
        power_BKT = torch.empty(real.shape, device=real.device)  # frames contiguous: the sum transposes
        return log_(torch.add(real, imaginary, out=power_BKT).add_(EPS))


class LogMel(nn.Module):
    """Mel power in decibels below the utterance's loudest value, down to -80 dB."""

    def __init__(self, power: PowerSpectrum, filters_FK: Floats) -> None:
        super().__init__()
        self.power, self.bands = power, Bands(filters_FK)

    def forward(self, wave_BN: Tensor) -> Tensor:
        decibel_BFT = log_(self.bands(self.power(wave_BN)).clamp_(min=1e-10)).mul_(10 / math.log(10))
        return decibel_BFT.sub_(decibel_BFT.amax(dim=(1, 2), keepdim=True)).clamp_(min=-80.0)


class Lfcc(nn.Module):
    """Linear-frequency cepstra with deltas and double deltas, (B, N) to (B, 3 * cepstra, T).

    Args:
        filters_FK: filter bank over the K bins of `power`.
        cepstra: number of coefficients of the orthonormal DCT-II to keep.
        reach: frames on either side of a delta; see `compute_deltas`.
        delta_gain: factor on deltas; squared on double deltas.
        energy: replace the first coefficient by the logarithm of the frame's energy.
    """

    def __init__(
        self,
        power: PowerSpectrum,
        filters_FK: Floats,
        *,
        cepstra: int,
        reach: int = REACH,
        delta_gain: float = 1.0,
        energy: bool = False,
    ) -> None:
        super().__init__()
        self.power, self.reach, self.delta_gain, self.energy = power, reach, delta_gain, energy
        self.bands = Bands(filters_FK)
        dct = torch.tensor(build_dct_matrix(len(filters_FK))[:cepstra], dtype=torch.float32)
        self.register_buffer("dct", dct, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        power_BKT = self.power(wave_BN)
        bands_BFT = log_(self.bands(power_BKT).add_(EPS)).mul_(1 / math.log(10))
        cepstra_BCT = cast(Tensor, self.dct) @ bands_BFT
        if self.energy:
            energy_B1T = torch.log10(power_BKT.sum(dim=1, keepdim=True) + EPS)
            cepstra_BCT = torch.cat([energy_B1T, cepstra_BCT[:, 1:]], dim=1)
        deltas = self.delta_gain * compute_deltas(cepstra_BCT, self.reach)
        return torch.cat([cepstra_BCT, deltas, self.delta_gain * compute_deltas(deltas, self.reach)], dim=1)


class ConstantQ(nn.Module):
    """Log power of the constant-Q transform (Brown 1991), exact up to spectral tails below 1e-4 of a bin's peak.

    Bin k is the inner product of the waveform with a Hann window of L_k = Q rate / f_k samples times a complex
    exponential of frequency f_k, centred on each multiple of `hop`; windows are scaled to a sum of 1. The Fourier
    transform of the whole waveform is multiplied with the spectra of the windows, folded modulo T and transformed
    back, which gives every hop-th value of each filtered waveform. The windows of an octave share a band of the
    spectrum, so each octave is one batched matrix product: for 4 s, about 15 million multiplications in all instead of
    2,600 million for sums over time.

    Args:
        frames: length of the longest waveform, N.
        bins_per_octave, octaves, low_hz: from `low_hz` up.
    """

    LOBES = 16  # of a window's spectrum kept on either side; a Hann window falls to 1 / (pi 16**3) there

    def __init__(
        self, *, frames: int, rate_hz: int, hop: int, bins_per_octave: int, octaves: int, low_hz: float
    ) -> None:
        super().__init__()
        self.hop, self.frames = hop, frames
        quality = 1 / (2 ** (1 / bins_per_octave) - 1)
        longest = quality * rate_hz / low_hz
        self.steps = find_fft_length(-(-(frames + math.ceil(longest / 2) + hop) // hop))
        self.starts: list[int] = []
        size = self.steps * hop  # of the padded waveform
        for octave in range(octaves):
            kernels = []
            hz = low_hz * 2 ** (octave + np.arange(bins_per_octave) / bins_per_octave)
            margin = self.LOBES * hz[-1] / quality
            first = max(0, math.floor((hz[0] - margin) / rate_hz * size) // self.steps)
            # beyond rate / 2 are negative frequencies
            last = math.ceil((hz[-1] + margin) / rate_hz * size) // self.steps
            bins = np.arange(first * self.steps, (last + 1) * self.steps)
            for centre in hz:
                kernels.append(compute_hann_spectrum(bins / size * rate_hz - centre, quality / centre))
            self.starts.append(int(bins[0]))
            kernel_QJM = np.stack(kernels).reshape(bins_per_octave, -1, self.steps) / hop
            kernel_MJQ = torch.tensor(kernel_QJM.transpose(2, 1, 0).copy(), dtype=torch.complex64)
            self.register_buffer(f"kernel_{octave}", kernel_MJQ, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        assert wave_BN.shape[1] <= self.frames, (wave_BN.shape, self.frames)
        emphasised_BN = apply_pre_emphasis(wave_BN, PRE_EMPHASIS)
        spectrum_BS = torch.fft.fft(emphasised_BN, n=self.steps * self.hop)
        rows = [self._filter_octave(spectrum_BS, octave, start) for octave, start in enumerate(self.starts)]
        count = 1 + wave_BN.shape[1] // self.hop
        coefficients_BFT = torch.fft.ifft(torch.cat(rows, dim=2), dim=0)[:count].permute(1, 2, 0)
        power_BFT = coefficients_BFT.real.square() + coefficients_BFT.imag.square()
        return log_(power_BFT.add_(EPS)).contiguous()

    def _filter_octave(self, spectrum_BS: Tensor, octave: int, start: int) -> Tensor:
        """Return (M, B, Q): the octave's filtered spectra, folded modulo M."""
        kernel_MJQ = cast(Tensor, getattr(self, f"kernel_{octave}"))
        steps, parts, _ = kernel_MJQ.shape
        band_BS = spectrum_BS[:, start : start + parts * steps]
        band_MBJ = band_BS.reshape(len(band_BS), parts, steps).permute(2, 0, 1)
        return torch.bmm(band_MBJ.contiguous(), kernel_MJQ)


class MeanRemoval(nn.Module):
    """Subtracts from each bin its mean over time, and so channel and loudness, which do not reveal spoofing."""

    def __init__(self, over: str) -> None:
        super().__init__()
        assert over in ("none", "utterance", "sliding", "standard"), over
        self.over = over

    def forward(self, map_BFT: Tensor) -> Tensor:
        if self.over in ("utterance", "standard"):
            centred_BFT = map_BFT - map_BFT.mean(dim=2, keepdim=True)
            if self.over == "utterance":
                return centred_BFT
            return centred_BFT / centred_BFT.square().mean(dim=2, keepdim=True).sqrt().clamp(min=1e-5)
        if self.over == "sliding":  # at the ends, over the available part of the window
            return map_BFT - functional.avg_pool1d(
                map_BFT, SLIDING_FRAMES, stride=1, padding=SLIDING_FRAMES // 2, count_include_pad=False
            )
        return map_BFT


def log_(x: Tensor) -> Tensor:
    """Take the natural logarithm of a float32 tensor in place; with AVX-512 by NumPy, which is faster there."""
    if x.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_values(x):
        return x.log_()
    values = x.numpy()
    np.log(values, out=values)
    return x


def apply_pre_emphasis(wave_BN: Tensor, factor: float) -> Tensor:
    """Return x[t] - factor x[t - 1]; the first sample is unchanged."""
    out_BN = wave_BN.clone()
    out_BN[:, 1:].sub_(wave_BN[:, :-1], alpha=factor)
    return out_BN


def compute_deltas(map_BFT: Tensor, reach: int) -> Tensor:
    """Return the regression slope over 2 * reach + 1 frames, with repeated edges (Young et al., HTK Book, 5.16).

    For a reach of 3, baselines that do not divide by 2 sum n**2 have deltas 28 times and double deltas 784 times as
    large; `delta_gain` of `Lfcc` reproduces them.
    """
    frames = map_BFT.shape[2]
    padded = functional.pad(map_BFT, (reach, reach), mode="replicate")
    total = torch.zeros_like(map_BFT)
    for n in range(1, reach + 1):
        total.add_(padded[:, :, reach + n : reach + n + frames], alpha=n)
        total.sub_(padded[:, :, reach - n : reach - n + frames], alpha=n)
    return total.div_(2 * sum(n * n for n in range(1, reach + 1)))
