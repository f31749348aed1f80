"""From waveforms to the maps that networks read: LFCC, log spectra, mel and constant-Q, made on the device.

Legend: B utterances, N samples of sound, L samples of a window, F bins or coefficients, T frames, Q octaves' bins.

Everything here runs in float32, outside autocast: a power spectrum spans more decades than fp16 has, and the logarithm
of what bf16 leaves of it is noise. No front end has weights to learn, so no gradient passes through. All of it is made
of operators with deterministic kernels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.errors import UserError

from .filters import Floats, dct_matrix, good_length, hann_spectrum, linear_filters, mel_filters

EPS = 2.220446e-16  # that of the MATLAB baseline, added before each logarithm
PRE_EMPHASIS = 0.97
SLIDING_FRAMES = 301  # three seconds around a frame, at a hop of 10 ms


def build(name: str, *, rate_hz: int, frames: int, mean: str) -> "Frontend":
    """Return a front end, (B, N) float32 waveforms in [-1, 1) to (B, F, T) float32.

    Args:
        name: one of `RECIPES`.
        rate_hz: sampling rate of what it will be given.
        frames: N; a constant-Q front end is laid out for a length, and takes shorter ones.
        mean: what is subtracted from each bin: "none", its mean over the "utterance", or over the "sliding" three
            seconds around a frame.

    Raises:
        UserError: the recipe is for another sampling rate.
    """
    recipe = RECIPES[name]
    if rate_hz != recipe.rate_hz:
        fitting = [other for other, r in RECIPES.items() if r.rate_hz == rate_hz]
        raise UserError(
            f"frontend.name={name} is laid out for {recipe.rate_hz} Hz, and sound.rate_hz={rate_hz}. "
            f"Use sound.rate_hz={recipe.rate_hz}" + (f", or one of {', '.join(fitting)}." if fitting else ".")
        )
    return Frontend(recipe.make(frames), MeanRemoval(mean))


@dataclass(frozen=True)
class Recipe:
    """A named front end."""

    rate_hz: int
    make: Callable[[int], nn.Module]  # from N


class Frontend(nn.Module):
    """A map with its mean removed. The CPU makes a few at a time: what these need stays in its caches."""

    AT_ONCE_ON_CPU = 4  # of 1, 2, 4 and 32 the fastest

    def __init__(self, maps: nn.Module, mean: "MeanRemoval") -> None:
        super().__init__()
        self.maps, self.mean = maps, mean

    @torch.no_grad()  # maps are made in place
    def forward(self, wave_BN: Tensor) -> Tensor:
        parts = wave_BN.split(self.AT_ONCE_ON_CPU if wave_BN.device.type == "cpu" else len(wave_BN))
        first_BFT = self.mean(self.maps(parts[0]))
        if len(parts) == 1:
            return first_BFT.contiguous()  # type: ignore[no-any-return]
        map_BFT = first_BFT.new_empty((len(wave_BN), *first_BFT.shape[1:]))
        for out_BFT, part in zip(map_BFT.split(self.AT_ONCE_ON_CPU), parts, strict=True):
            out_BFT.copy_(first_BFT if part is parts[0] else self.mean(self.maps(part)))
        return map_BFT


class PowerSpectrum(nn.Module):
    """Power of the short-time Fourier transform, (B, N) to (B, fft // 2 + 1, 1 + N // hop).

    Frames are centred on multiples of `hop`, with zeros beyond the ends; a window shorter than `fft` stands in its
    middle. In memory the bins of a frame lie side by side.
    """

    def __init__(self, *, window: Tensor, hop: int, fft: int, pre_emphasis: float = 0.0) -> None:
        super().__init__()
        self.hop, self.fft, self.pre_emphasis = hop, fft, pre_emphasis
        self.register_buffer("window", window, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        real, imaginary = self.squares(wave_BN)
        return real + imaginary

    def squares(self, wave_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squares of the real and the imaginary part, which add up to the power."""
        if self.pre_emphasis:
            wave_BN = pre_emphasised(wave_BN, self.pre_emphasis)
        window = cast(Tensor, self.window)
        spectrum = torch.stft(
            wave_BN, self.fft, self.hop, len(window), window, center=True, pad_mode="constant", return_complex=True
        )
        squared = torch.view_as_real(spectrum).square_()
        return squared[..., 0], squared[..., 1]


class Bands(nn.Module):
    """Weighted sums of neighbouring bins, (B, K, T) to (B, F, T): a filter bank, without the products with zero.

    Args:
        filters_FK: each row of its own few bins, in rising order. A group of rows is multiplied with the bins that
            any of them needs.
    """

    ROWS = 8  # of 8, 16 and 32 the fastest on a CPU for 20 linear bands over 257 bins; 128 mel bands do not care

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
    """Natural logarithm of the power, every bin of the transform."""

    def __init__(self, power: PowerSpectrum) -> None:
        super().__init__()
        self.power = power

    def forward(self, wave_BN: Tensor) -> Tensor:
        real, imaginary = self.power.squares(wave_BN)
        power_BKT = torch.empty(real.shape, device=real.device)  # a bin's frames side by side: adding turns them round
        return logarithm_(torch.add(real, imaginary, out=power_BKT).add_(EPS))


class LogMel(nn.Module):
    """Mel power in decibels below the utterance's loudest value, down to -80 dB."""

    def __init__(self, power: PowerSpectrum, filters_FK: Floats) -> None:
        super().__init__()
        self.power, self.bands = power, Bands(filters_FK)

    def forward(self, wave_BN: Tensor) -> Tensor:
        decibel_BFT = logarithm_(self.bands(self.power(wave_BN)).clamp_(min=1e-10)).mul_(10 / math.log(10))
        return decibel_BFT.sub_(decibel_BFT.amax(dim=(1, 2), keepdim=True)).clamp_(min=-80.0)


class Lfcc(nn.Module):
    """Linear-frequency cepstra with slopes and slopes of slopes, (B, N) to (B, 3 * cepstra, T).

    Args:
        filters_FK: filter bank over the K bins of `power`.
        cepstra: first coefficients of the DCT-II (orthonormal) that are kept.
        reach: frames on either side that a slope looks at; see `slope`.
        slope_gain: factor on slopes, and squared on slopes of slopes.
        energy: the first coefficient is replaced by the logarithm of the frame's energy.
    """

    def __init__(
        self,
        power: PowerSpectrum,
        filters_FK: Floats,
        *,
        cepstra: int,
        reach: int = 3,
        slope_gain: float = 1.0,
        energy: bool = False,
    ) -> None:
        super().__init__()
        self.power, self.reach, self.slope_gain, self.energy = power, reach, slope_gain, energy
        self.bands = Bands(filters_FK)
        dct = torch.tensor(dct_matrix(len(filters_FK))[:cepstra], dtype=torch.float32)
        self.register_buffer("dct", dct, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        power_BKT = self.power(wave_BN)
        bands_BFT = logarithm_(self.bands(power_BKT).add_(EPS)).mul_(1 / math.log(10))
        cepstra_BCT = cast(Tensor, self.dct) @ bands_BFT
        if self.energy:
            energy_B1T = torch.log10(power_BKT.sum(dim=1, keepdim=True) + EPS)
            cepstra_BCT = torch.cat([energy_B1T, cepstra_BCT[:, 1:]], dim=1)
        first = self.slope_gain * slope(cepstra_BCT, self.reach)
        return torch.cat([cepstra_BCT, first, self.slope_gain * slope(first, self.reach)], dim=1)


class ConstantQ(nn.Module):
    """Log power of the constant-Q transform (Brown 1991), exact up to spectral tails below 1e-4 of a bin's peak.

    Bin k is the inner product of the sound with a Hann window of L_k = Q rate / f_k samples times a complex exponential
    of frequency f_k, centred on each multiple of `hop`; windows are scaled to a sum of 1. One Fourier transform of the
    whole sound is taken; multiplying it with the spectra of the windows, folding it modulo T and transforming back
    gives every hop-th value of each filtered sound. Windows of an octave share a band of the spectrum, so that this is
    one batched matrix product per octave: about 15 million multiplications for 4 s, where sums over time take 2,600.

    Args:
        frames: longest sound, N.
        bins_per_octave, octaves, low_hz: from `low_hz` upwards.
    """

    LOBES = 16  # of a window's spectrum kept on either side; a Hann window has fallen to 1 / (pi 16**3) there

    def __init__(
        self, *, frames: int, rate_hz: int, hop: int, bins_per_octave: int, octaves: int, low_hz: float
    ) -> None:
        super().__init__()
        self.hop, self.frames = hop, frames
        quality = 1 / (2 ** (1 / bins_per_octave) - 1)
        longest = quality * rate_hz / low_hz
        self.steps = good_length(-(-(frames + math.ceil(longest / 2) + hop) // hop))
        self.starts: list[int] = []
        size = self.steps * hop  # of the padded sound
        for octave in range(octaves):
            kernels = []
            hz = low_hz * 2 ** (octave + np.arange(bins_per_octave) / bins_per_octave)
            margin = self.LOBES * hz[-1] / quality
            first = max(0, math.floor((hz[0] - margin) / rate_hz * size) // self.steps)
            last = (
                math.ceil((hz[-1] + margin) / rate_hz * size) // self.steps
            )  # beyond rate / 2 lie negative frequencies
            bins = np.arange(first * self.steps, (last + 1) * self.steps)
            for centre in hz:
                kernels.append(hann_spectrum(bins / size * rate_hz - centre, quality / centre))
            self.starts.append(int(bins[0]))
            kernel_QJM = np.stack(kernels).reshape(bins_per_octave, -1, self.steps) / hop
            kernel_MJQ = torch.tensor(kernel_QJM.transpose(2, 1, 0).copy(), dtype=torch.complex64)
            self.register_buffer(f"kernel_{octave}", kernel_MJQ, persistent=False)

    def forward(self, wave_BN: Tensor) -> Tensor:
        assert wave_BN.shape[1] <= self.frames, (wave_BN.shape, self.frames)
        emphasised_BN = pre_emphasised(wave_BN, PRE_EMPHASIS)
        spectrum_BS = torch.fft.fft(emphasised_BN, n=self.steps * self.hop)
        rows = [self._octave(spectrum_BS, octave, start) for octave, start in enumerate(self.starts)]
        kept = 1 + wave_BN.shape[1] // self.hop
        coefficients_BFT = torch.fft.ifft(torch.cat(rows, dim=2), dim=0)[:kept].permute(1, 2, 0)
        power_BFT = coefficients_BFT.real.square() + coefficients_BFT.imag.square()
        return logarithm_(power_BFT.add_(EPS)).contiguous()

    def _octave(self, spectrum_BS: Tensor, octave: int, start: int) -> Tensor:
        """Return (M, B, Q): the octave's filtered spectra, folded modulo M."""
        kernel_MJQ = cast(Tensor, getattr(self, f"kernel_{octave}"))
        steps, parts, _ = kernel_MJQ.shape
        band_BS = spectrum_BS[:, start : start + parts * steps]
        band_MBJ = band_BS.reshape(len(band_BS), parts, steps).permute(2, 0, 1)
        return torch.bmm(band_MBJ.contiguous(), kernel_MJQ)


class MeanRemoval(nn.Module):
    """Subtracts from each bin its mean over time: channel and loudness, which are not what tells speech from copies."""

    def __init__(self, over: str) -> None:
        super().__init__()
        assert over in ("none", "utterance", "sliding"), over
        self.over = over

    def forward(self, map_BFT: Tensor) -> Tensor:
        if self.over == "utterance":
            return map_BFT - map_BFT.mean(dim=2, keepdim=True)
        if self.over == "sliding":  # near the ends, over the part of the three seconds that there is
            return map_BFT - functional.avg_pool1d(
                map_BFT, SLIDING_FRAMES, stride=1, padding=SLIDING_FRAMES // 2, count_include_pad=False
            )
        return map_BFT


def logarithm_(x: Tensor) -> Tensor:
    """Replace float32 values by their natural logarithms, with AVX-512 by NumPy, whose loop is the faster one there."""
    if x.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return x.log_()
    values = x.numpy()
    np.log(values, out=values)
    return x


def pre_emphasised(wave_BN: Tensor, factor: float) -> Tensor:
    """Return x[t] - factor x[t - 1], the first sample as it is."""
    out_BN = wave_BN.clone()
    out_BN[:, 1:].sub_(wave_BN[:, :-1], alpha=factor)
    return out_BN


def slope(map_BFT: Tensor, reach: int) -> Tensor:
    """Return the regression slope over 2 * reach + 1 frames, the edges repeated (Young et al., HTK Book, 5.16).

    A baseline without the division by 2 sum n**2 has slopes 28 times and second slopes 784 times as large, for a
    reach of 3: `slope_gain` of `Lfcc` makes them.
    """
    frames = map_BFT.shape[2]
    padded = functional.pad(map_BFT, (reach, reach), mode="replicate")
    total = torch.zeros_like(map_BFT)
    for n in range(1, reach + 1):
        total.add_(padded[:, :, reach + n : reach + n + frames], alpha=n)
        total.sub_(padded[:, :, reach - n : reach - n + frames], alpha=n)
    return total.div_(2 * sum(n * n for n in range(1, reach + 1)))


def _lfcc60(_: int) -> nn.Module:
    """The ASVspoof 2019 baseline: 20 ms Hamming windows every 10 ms, 20 filters up to 8 kHz, 20 cepstra."""
    power = PowerSpectrum(window=torch.hamming_window(320, periodic=False), hop=160, fft=512, pre_emphasis=PRE_EMPHASIS)
    return Lfcc(power, linear_filters(20, rate_hz=16000, fft=512, high_hz=8000), cepstra=20)


def _lfcc60_nii(_: int) -> nn.Module:
    """The LFCC-LCNN baseline of 2021: up to 4 kHz, log energy in place of C0, slopes x[t + 1] - x[t - 1]."""
    power = PowerSpectrum(window=torch.hamming_window(320), hop=160, fft=1024, pre_emphasis=PRE_EMPHASIS)
    filters = linear_filters(20, rate_hz=16000, fft=1024, high_hz=4000)
    return Lfcc(power, filters, cepstra=20, reach=1, slope_gain=2.0, energy=True)


def _lfcc_hr(_: int) -> nn.Module:
    """The LFCC-GMM baseline of 2021: 30 ms windows every 15 ms, 70 filters up to 4 kHz, 20 cepstra."""
    power = PowerSpectrum(window=torch.hamming_window(480), hop=240, fft=1024, pre_emphasis=PRE_EMPHASIS)
    return Lfcc(power, linear_filters(70, rate_hz=16000, fft=1024, high_hz=4000), cepstra=20)


def _spec257(_: int) -> nn.Module:
    """ASSERT (Lai et al. 2019, arXiv:1904.01120): 25 ms windows every 10 ms."""
    return LogPower(PowerSpectrum(window=torch.hann_window(400), hop=160, fft=512))


def _spec129(_: int) -> nn.Module:
    """The same for 8 kHz."""
    return LogPower(PowerSpectrum(window=torch.hann_window(200), hop=80, fft=256))


def _cqt432(frames: int) -> nn.Module:
    """Res2Net (Li et al. 2021, arXiv:2010.15006): nine octaves from 15 Hz, 48 bins each, every 16 ms."""
    return ConstantQ(frames=frames, rate_hz=16000, hop=256, bins_per_octave=48, octaves=9, low_hz=15.0)


def _mel128(_: int) -> nn.Module:
    """128 mel bands of 32 ms windows every 10 ms."""
    return LogMel(
        PowerSpectrum(window=torch.hann_window(512), hop=160, fft=512), mel_filters(128, rate_hz=16000, fft=512)
    )


RECIPES = {
    "lfcc60": Recipe(16000, _lfcc60),
    "lfcc60_nii": Recipe(16000, _lfcc60_nii),
    "lfcc_hr": Recipe(16000, _lfcc_hr),
    "spec257": Recipe(16000, _spec257),
    "cqt432": Recipe(16000, _cqt432),
    "mel128": Recipe(16000, _mel128),
    "spec129": Recipe(8000, _spec129),
}
