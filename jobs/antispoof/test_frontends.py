"""Front ends, compared with NumPy versions and definitions."""

import math

import numpy as np
import pytest
import scipy.fft  # type: ignore[import-untyped]
import torch

from tests.cases.antispoof import make_noise
from trainyard.errors import UserError

from . import frontends


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lfcc60", (60, 404)),
        ("lfcc60_nii", (60, 404)),
        ("lfcc_hr", (60, 270)),
        ("spec257", (257, 404)),
        ("cqt432", (432, 253)),
        ("mel128", (128, 404)),
    ],
)
def test_each_front_end_returns_finite_maps_of_the_expected_shape(name: str, shape: tuple[int, int]) -> None:
    frontend = frontends.build(name, rate_hz=16000, frames=64600, mean="none")
    out = frontend(make_noise(2, 64600))
    assert out.shape == (2, *shape) and out.dtype == torch.float32
    assert bool(out.isfinite().all())
    assert bool(frontend(torch.zeros(1, 64600)).isfinite().all()), "silence"
    assert not list(frontend.parameters()) and not frontend.state_dict()


@pytest.mark.parametrize(("name", "bins"), [("spec129", 129), ("lfcc60_8k", 60)])
def test_one_second_at_8_khz_has_101_frames(name: str, bins: int) -> None:
    frontend = frontends.build(name, rate_hz=8000, frames=8000, mean="none")
    assert frontend(make_noise(1, 8000)).shape == (1, bins, 101)


def test_slopes_of_matlab_are_28_and_784_times_those_of_htk() -> None:
    wave = make_noise(1, 8000)
    htk, matlab = (
        frontends.build("lfcc60", rate_hz=16000, frames=8000, mean="none", slopes=slopes)(wave)
        for slopes in ("htk", "matlab")
    )
    factors = torch.tensor([1.0, 28.0, 784.0]).repeat_interleave(20)[None, :, None]
    torch.testing.assert_close(matlab, htk * factors, rtol=1e-4, atol=1e-3)
    with pytest.raises(UserError, match="only lfcc60 and lfcc60_8k have them"):
        frontends.build("spec257", rate_hz=16000, frames=8000, mean="none", slopes="matlab")


def compute_power(wave: np.ndarray, window: np.ndarray, hop: int, fft: int, pre: float) -> np.ndarray:
    """Compute a power spectrum, (K, T), frame by frame, independently of the front ends."""
    wave = wave.astype(np.float64)
    if pre:
        wave = np.append(wave[0], wave[1:] - pre * wave[:-1])
    padded = np.concatenate([np.zeros(fft // 2), wave, np.zeros(fft // 2)])
    lead = (fft - len(window)) // 2
    columns = []
    for t in range(1 + len(wave) // hop):
        frame = np.zeros(fft)
        frame[lead : lead + len(window)] = padded[t * hop + lead : t * hop + lead + len(window)] * window
        columns.append(np.abs(np.fft.rfft(frame)) ** 2)
    return np.array(columns).T


def build_triangles(edges_hz: np.ndarray, fft: int) -> np.ndarray:
    bins = np.arange(fft // 2 + 1) * 16000 / fft
    return np.array([np.interp(bins, edges_hz[i : i + 3], [0, 1, 0]) for i in range(len(edges_hz) - 2)])


def compute_deltas_in_numpy(c: np.ndarray, reach: int, gain: float) -> np.ndarray:
    out = np.zeros_like(c)
    for t in range(c.shape[1]):
        for n in range(1, reach + 1):
            out[:, t] += n * (c[:, min(t + n, c.shape[1] - 1)] - c[:, max(t - n, 0)])
    return gain * out / (2 * sum(n * n for n in range(1, reach + 1)))


@pytest.mark.parametrize(
    ("name", "window", "hop", "fft", "bands", "high_hz", "reach", "gain"),
    [
        ("lfcc60", np.hamming(320), 160, 512, 20, 8000, 3, 1.0),
        ("lfcc60_nii", np.hamming(321)[:-1], 160, 1024, 20, 4000, 1, 2.0),
        ("lfcc_hr", np.hamming(481)[:-1], 240, 1024, 70, 4000, 3, 1.0),
    ],
)
def test_lfcc_agrees_with_a_numpy_version_to_1e_4(
    name: str, window: np.ndarray, hop: int, fft: int, bands: int, high_hz: int, reach: int, gain: float
) -> None:
    wave = make_noise(1, 16000)
    power = compute_power(wave[0].numpy(), window, hop, fft, 0.97)
    log = np.log10(build_triangles(np.linspace(0, high_hz, bands + 2), fft) @ power + 2.220446e-16)
    static = scipy.fft.dct(log, type=2, norm="ortho", axis=0)[:20]
    if name == "lfcc60_nii":
        static[0] = np.log10(power.sum(axis=0) + 2.220446e-16)
    first = compute_deltas_in_numpy(static, reach, gain)
    expected = np.concatenate([static, first, compute_deltas_in_numpy(first, reach, gain)])
    found = frontends.build(name, rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_spectrum_and_mel_agree_with_a_numpy_version() -> None:
    wave = make_noise(1, 16000)
    power = compute_power(wave[0].numpy(), np.hanning(401)[:-1], 160, 512, 0)
    found = frontends.build("spec257", rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(np.exp(found) - power).max() < 1e-5 * power.max()

    def mel_to_hz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)

    top = 15 + math.log(8) / math.log(6.4) * 27
    edges = np.array([mel_to_hz(top * i / 129) for i in range(130)])
    wave[:, 8000:] = 0  # silence is at the floor
    power = compute_power(wave[0].numpy(), np.hanning(513)[:-1], 160, 512, 0)
    mel = 10 * np.log10(build_triangles(edges, 512) * (2 / (edges[2:] - edges[:-2]))[:, None] @ power + 1e-30)
    found = frontends.build("mel128", rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(found - np.maximum(mel - mel.max(), -80)).max() < 1e-3  # decibels


def test_constant_q_agrees_with_the_sum_over_time_that_defines_it() -> None:
    wave = make_noise(1, 64600)
    found = np.exp(frontends.build("cqt432", rate_hz=16000, frames=64600, mean="none")(wave)[0].double().numpy() / 2)
    emphasised = frontends.apply_pre_emphasis(wave, 0.97)[0].double().numpy()
    quality, frames = 1 / (2 ** (1 / 48) - 1), [0, 7, 130, 252]
    for k in (0, 48, 200, 300, 400, 431):
        hz = 15 * 2 ** (k / 48)
        length = quality * 16000 / hz
        reach = int(length / 2)
        t = np.arange(-reach, reach + 1)
        kernel = (1 + np.cos(2 * np.pi * t / length)) / length * np.exp(-2j * np.pi * hz / 16000 * t)
        padded = np.pad(emphasised, (reach, reach + 256))
        expected = np.array([abs(padded[256 * n : 256 * n + len(t)] @ kernel) for n in frames])
        assert np.abs(found[k, frames] - expected).max() < 1e-4 * expected.max(), k


def test_constant_q_puts_a_tone_in_its_bin_and_accepts_a_shorter_waveform() -> None:
    frontend = frontends.build("cqt432", rate_hz=16000, frames=64600, mean="none")
    hz = 15 * 2 ** (250 / 48)
    tone = torch.sin(2 * math.pi * hz * torch.arange(32000) / 16000)[None]
    out = frontend(tone)
    assert out.shape == (1, 432, 126)
    assert out[0, :, 60].argmax() == 250


def test_means_are_removed_over_the_utterance_or_over_three_seconds() -> None:
    x = torch.randn(1, 3, 500)
    assert torch.equal(frontends.MeanRemoval("none")(x), x)
    assert float(frontends.MeanRemoval("utterance")(x).mean(dim=2).abs().max()) < 1e-6
    by_hand = torch.stack([x[..., max(0, t - 150) : t + 151].mean(dim=2) for t in range(500)], dim=2)
    torch.testing.assert_close(frontends.MeanRemoval("sliding")(x), x - by_hand, rtol=0, atol=1e-5)
    standard = frontends.MeanRemoval("standard")(7 * x + 3)
    torch.testing.assert_close(standard.std(dim=2, correction=0), torch.ones(1, 3))
    assert not frontends.MeanRemoval("standard")(torch.ones(1, 3, 5)).any(), "a silent bin"


def test_a_front_end_for_another_rate_is_refused_and_alternatives_are_named() -> None:
    with pytest.raises(UserError, match=r"lfcc60 needs 16000 Hz, but sound.rate_hz=8000.*lfcc60_8k, spec129"):
        frontends.build("lfcc60", rate_hz=8000, frames=8000, mean="none")
