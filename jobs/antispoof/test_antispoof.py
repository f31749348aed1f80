"""The antispoof family: metrics, front ends, networks, losses, augmentation, protocols, packing, score files."""

import argparse
import csv
import io
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import soundfile
import torch
from torch import nn
from torch.nn import functional

from trainyard.data.loader import Loader
from trainyard.data.pack import pack
from trainyard.data.shards import Audio, BadRecord
from trainyard.errors import UserError
from trainyard.train.module import DataInfo
from trainyard.train.step import enable_activation_checkpointing

from . import augment, commands, frontends, metrics, scores, vocoders
from .config import Config
from .losses import AmSoftmax, CrossEntropy, OcSoftmax, compute_class_weights
from .metrics import AsvRates, compute_det_curve
from .module import AntispoofModule, build
from .network import Block, DenseNorm, OneClassResNet, SeNet, SeResNet, compute_weighted_statistics
from .pack import ConversionRule, fit_artifacts, load, samples, splits, synthesize, unlabelled
from .protocols import SplitRule, find_utterances, read_asv_rates, read_trials
from .scores import Line
from .synthesis import generate_speech, list_items

SMALL = (
    "data.synthetic=120",
    "sound.frames=2400",
    "sound.rate_hz=8000",
    "frontend.name=spec129",
    "model.name=senet34",
    "disturb.codec=0.5",
    "disturb.mask=0.5",
    "global_batch_size=16",
    "max_duration=8st",
    "schedule.warmup=0st",
    "eval_every=4st",
    "checkpoint.every=3st",
    "deterministic=true",
    "trackers=[]",
)
"""Options that make a run of this family take seconds, for tests over all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the utterances `ids`, and what it must score."""
    rows = {"score": np.where(columns["label"][ids] == 1, 9.0, -9.0).astype(np.float32), "sample_id": ids}
    return rows, {"eer": 0.0, "min_dcf": 0.0, "act_dcf": 0.0, "eer_A01": 0.0, "eer_A02": 0.0}


def find_shared_audio(name: str) -> Path:
    """Return a folder of shared recordings and scores, which are not in the repository; skip the test without it."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "audio" / name
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


SCORES = "AIR_lfcc_resnet18_softmax_LA_eval_cm_scores.txt"
ASV_EVAL = "ASVspoof2019.LA.asv.eval.gi.trl.scores.txt"
ASV = AsvRates(miss=0.0245810, false_alarm=0.0246047, miss_spoof=0.2393475, false_alarm_spoof=0.7606525)


# Metrics


def test_the_scores_of_a_published_system_have_its_published_error_rates():
    folder = find_shared_audio("asvspoof2019_scores")
    asv = read_asv_rates(folder / ASV_EVAL)
    assert (asv.miss, asv.false_alarm) == pytest.approx((0.0245810, 0.0246047), abs=1e-7)
    assert asv.miss_spoof == pytest.approx(0.2393475, abs=1e-7)
    form, lines = scores.read(folder / SCORES)
    verdict = scores.check(form, lines, protocol=None, asv=asv)
    assert (form, verdict.trials, verdict.faults) == ("asv2019", 71237, [])
    assert any("as many trials as the ASVspoof 2019 LA evaluation set: " in note for note in verdict.notes)
    found = verdict.metrics
    assert found["eer"] == pytest.approx(0.050578, abs=1e-6)
    assert found["min_tdcf_2019"] == pytest.approx(0.12084, abs=1e-5)
    assert found["min_tdcf_2021"] == pytest.approx(0.17599, abs=1e-5)
    assert found["eer_A17"] == pytest.approx(0.2348, abs=1e-4)
    assert max((v, n) for n, v in found.items() if n.startswith("eer_"))[1] == "eer_A17"
    assert (found["bonafide"], found["spoof"]) == (7355, 63882)


def test_the_asv_threshold_of_the_2019_scores_is_the_known_one():
    groups: dict[str, list[float]] = {"target": [], "nontarget": [], "spoof": []}
    for line in (find_shared_audio("asvspoof2019_scores") / ASV_EVAL).read_text().splitlines():
        _, kind, score = line.split()
        groups[kind].append(float(score))
    assert [len(group) for group in groups.values()] == [5370, 33327, 63882]
    rate, threshold = compute_det_curve(groups["target"], groups["nontarget"]).eer()
    assert rate == pytest.approx(0.0245778, abs=1e-7)
    assert threshold == pytest.approx(-5.680051, abs=1e-6)


def test_a_det_curve_passes_one_trial_at_a_time_and_bona_fide_first_among_equal_scores():
    curve = compute_det_curve([1.0, 2.0, 4.0, 5.0], [0.0, 2.0])
    assert curve.thresholds.tolist() == [-0.001, 0.0, 1.0, 2.0, 2.0, 4.0, 5.0]
    assert curve.frr.tolist() == [0, 0, 0.25, 0.5, 0.5, 0.75, 1]
    assert curve.far.tolist() == [1, 0.5, 0.5, 0.5, 0, 0, 0]
    assert curve.eer() == (0.5, 2.0)
    assert compute_det_curve([1, 3, 5, 7, 9], [2, 4, 6]).eer() == (pytest.approx((2 / 5 + 1 / 3) / 2), 4.0)
    assert metrics.eer([5, 6], [1, 2]) == 0.0
    assert metrics.eer([1, 2], [5, 6]) == 1.0
    assert metrics.eer([3, 3], [3, 3, 3]) == 1.0


def test_the_newer_tdcf_has_a_floor_and_the_older_one_does_not():
    perfect = compute_det_curve([1.0, 2.0], [-2.0, -1.0])
    assert metrics.min_tdcf_2019(perfect, ASV) == 0.0
    c0 = 0.9405 * ASV.miss + 0.095 * ASV.false_alarm
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(c0 / (c0 + 0.5 * ASV.false_alarm_spoof))
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(0.0627, abs=1e-4)
    useless = compute_det_curve([0.0], [1.0])
    assert metrics.min_tdcf_2019(useless, ASV) == pytest.approx(1.0)
    assert metrics.min_tdcf_2021(useless, ASV) == pytest.approx(1.0)


def test_detection_costs_and_cllr_are_those_of_asvspoof_5():
    bonafide, spoof = np.array([-0.5, 2.0, 3.0, 4.0]), np.array([-3.0, -2.0, 1.0])
    # thresholds where a miss costs 0.95 / 4 and a false alarm 0.5 / 3, over 0.5
    assert metrics.min_dcf(compute_det_curve(bonafide, spoof)) == pytest.approx(1 / 3)
    assert metrics.act_dcf(bonafide, spoof) == pytest.approx(1 / 3)  # threshold -ln 1.9 = -0.642
    assert metrics.act_dcf(bonafide - 1, spoof - 1) == pytest.approx((0.95 / 4 + 0.5 / 3) / 0.5)
    by_hand = (np.log2(1 + np.exp(-bonafide)).mean() + np.log2(1 + np.exp(spoof)).mean()) / 2
    assert metrics.cllr(bonafide, spoof) == pytest.approx(by_hand)
    assert metrics.cllr([0.0], [0.0]) == pytest.approx(1.0)
    assert metrics.cllr([2000.0], [-2000.0]) == 0.0


def test_each_attack_is_scored_against_all_bona_fide_speech():
    values = [3.0, 2.0, 1.0, 2.5, 0.0, -1.0]
    found = metrics.compute_metrics(values, [1, 1, 1, 0, 0, 0], ["-", "-", "-", "A02", "A01", "A01"])
    assert found["eer_A01"] == 0.0
    assert found["eer_A02"] == metrics.eer([3, 2, 1], [2.5])
    assert "min_tdcf_2019" not in found


@pytest.mark.parametrize(
    ("bonafide", "spoof", "message"),
    [([], [1.0], "no bona fide trial"), ([1.0], [], "no spoofed trial"), ([1.0, np.nan], [0.0], "1 of 2 bona fide")],
)
def test_scores_that_give_no_error_rate_are_refused(bonafide, spoof, message):
    with pytest.raises(UserError, match=message):
        metrics.eer(bonafide, spoof)


def test_inverted_asv_scores_are_refused():
    with pytest.raises(UserError, match="The ASV system does not work"):
        metrics.min_tdcf_2019(compute_det_curve([1.0], [0.0]), AsvRates(0.98, 0.98, 0.5, 0.5))


def test_a_det_plot_is_a_png():
    png = metrics.draw_det_plot(np.arange(20.0), {"A01": np.arange(-9.0, 9.0), "A02": np.arange(5.0)})
    assert png.startswith(b"\x89PNG") and len(png) > 5000


# Front ends


def make_noise(count: int, frames: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(count, frames, generator=torch.Generator().manual_seed(seed))


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
def test_each_front_end_returns_finite_maps_of_the_expected_shape(name, shape):
    frontend = frontends.build(name, rate_hz=16000, frames=64600, mean="none")
    out = frontend(make_noise(2, 64600))
    assert out.shape == (2, *shape) and out.dtype == torch.float32
    assert bool(out.isfinite().all())
    assert bool(frontend(torch.zeros(1, 64600)).isfinite().all()), "silence"
    assert not list(frontend.parameters()) and not frontend.state_dict()


def test_one_second_at_8_khz_gives_a_map_of_the_published_shape():
    assert frontends.build("spec129", rate_hz=8000, frames=8000, mean="none")(make_noise(1, 8000)).shape == (
        1,
        129,
        101,
    )


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
def test_lfcc_agrees_with_a_numpy_version_to_1e_4(name, window, hop, fft, bands, high_hz, reach, gain):
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


def test_spectrum_and_mel_agree_with_a_numpy_version():
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


def test_constant_q_agrees_with_the_sum_over_time_that_defines_it():
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


def test_constant_q_puts_a_tone_in_its_bin_and_accepts_a_shorter_waveform():
    frontend = frontends.build("cqt432", rate_hz=16000, frames=64600, mean="none")
    hz = 15 * 2 ** (250 / 48)
    tone = torch.sin(2 * math.pi * hz * torch.arange(32000) / 16000)[None]
    out = frontend(tone)
    assert out.shape == (1, 432, 126)
    assert out[0, :, 60].argmax() == 250


def test_means_are_removed_over_the_utterance_or_over_three_seconds():
    x = torch.randn(1, 3, 500)
    assert torch.equal(frontends.MeanRemoval("none")(x), x)
    assert float(frontends.MeanRemoval("utterance")(x).mean(dim=2).abs().max()) < 1e-6
    by_hand = torch.stack([x[..., max(0, t - 150) : t + 151].mean(dim=2) for t in range(500)], dim=2)
    torch.testing.assert_close(frontends.MeanRemoval("sliding")(x), x - by_hand, rtol=0, atol=1e-5)


def test_a_front_end_for_another_rate_is_refused_and_alternatives_are_named():
    with pytest.raises(UserError, match=r"lfcc60 needs 16000 Hz, but sound.rate_hz=8000.*spec129"):
        frontends.build("lfcc60", rate_hz=8000, frames=8000, mean="none")


# Networks


def count_weights(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize(
    ("network", "dims", "published"),
    [
        (SeNet(bottleneck=False), 128, 1.344),
        (SeNet(bottleneck=True), 256, 1.093),
        (SeResNet(layers=[2, 2, 2, 2], dropout=0.3), 256, 11.98),
        (SeResNet(layers=[3, 4, 6, 3], dropout=0.3), 256, 22.16),
    ],
)
def test_networks_have_as_many_weights_as_published(network, dims, published):
    assert network.dims == dims
    decision = CrossEntropy(dims, counts=(1, 1))
    digits = len(str(published).partition(".")[2])
    assert round((count_weights(network) + count_weights(decision)) / 1e6, digits) == published


def test_maps_have_the_published_sizes():
    assert SeNet(bottleneck=False).compute_maps(torch.randn(1, 257, 400)).shape == (1, 128, 9, 13)
    assert SeResNet(layers=[1, 1, 1, 1], dropout=0).compute_maps(torch.randn(1, 60, 404)).shape == (1, 512, 13)
    assert OneClassResNet()(torch.randn(2, 60, 750)).shape == (2, 256)


def test_channels_last_reaches_every_layer():
    network = SeNet(bottleneck=True).to(memory_format=torch.channels_last)
    is_channels_last = []

    def record_layout(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        is_channels_last.append(out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous())

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | Block):
            layer.register_forward_hook(record_layout)
    network(torch.randn(2, 129, 101))
    assert len(is_channels_last) > 100 and all(is_channels_last)


def test_a_batch_of_one_trains():
    norm = DenseNorm(4)
    out = norm(torch.ones(1, 4))
    assert torch.equal(norm.running_mean, torch.zeros(4)) and bool(out.isfinite().all())
    SeResNet(layers=[1, 1, 1, 1], dropout=0)(torch.randn(1, 60, 64)).sum().backward()


def test_attentive_statistics_are_weighted_mean_and_deviation():
    x, weight = torch.randn(2, 5, 30), torch.rand(2, 30).softmax(dim=1)
    found = compute_weighted_statistics(x, weight)
    mean = (x * weight[:, None]).sum(dim=2)
    deviation = ((x - mean[..., None]).square() * weight[:, None]).sum(dim=2).sqrt()
    torch.testing.assert_close(found, torch.cat([mean, deviation], dim=1), rtol=1e-4, atol=1e-5)


# Losses


def test_class_weights_follow_the_counts():
    assert compute_class_weights((50, 50)).tolist() == [1.0, 1.0]
    spoof, bonafide = compute_class_weights((22800, 2580)).tolist()
    assert spoof / (spoof + bonafide) == pytest.approx(0.1, abs=0.002)
    assert (22800 * spoof + 2580 * bonafide) / 25380 == pytest.approx(1.0)


def test_weighted_cross_entropy_is_that_of_torch_times_the_mean_weight_of_the_batch():
    torch.manual_seed(0)
    decision, x, label = CrossEntropy(8, counts=(9, 1)), torch.randn(6, 8), torch.tensor([0, 1, 0, 0, 1, 0])
    theirs = functional.cross_entropy(decision.logits(x), label, weight=decision.weight_2)
    torch.testing.assert_close(decision(x, label), theirs * decision.weight_2[label].mean())
    halves = (decision(x[:2], label[:2]) * 2 + decision(x[2:], label[2:]) * 4) / 6
    torch.testing.assert_close(decision(x, label), halves)


def test_focal_loss_down_weights_easy_samples():
    torch.manual_seed(0)
    plain, focal = CrossEntropy(8, counts=(1, 1)), CrossEntropy(8, counts=(1, 1), gamma=2.0)
    focal.load_state_dict(plain.state_dict())
    x, label = torch.randn(5, 8), torch.tensor([0, 1, 1, 0, 1])
    p = plain.logits(x).softmax(dim=1)[torch.arange(5), label]
    torch.testing.assert_close(focal(x, label), (-((1 - p) ** 2) * p.log()).mean())


def test_the_score_is_the_log_odds_and_high_for_bona_fide():
    decision, x = CrossEntropy(4, counts=(3, 1)), torch.randn(7, 4)
    p = decision.logits(x).softmax(dim=1)
    torch.testing.assert_close(decision.score(x), (p[:, 1] / p[:, 0]).log())


@pytest.mark.parametrize(
    "decision",
    [
        CrossEntropy(6, counts=(5, 5)),
        CrossEntropy(6, counts=(5, 5), gamma=2.0),
        AmSoftmax(6, scale=20, margin=0.9),
        OcSoftmax(6, scale=20, margin_bonafide=0.9, margin_spoof=0.2),
    ],
)
def test_every_loss_drives_bona_fide_scores_up_and_spoofed_ones_down(decision):
    torch.manual_seed(0)
    x = torch.randn(12, 6, requires_grad=True)
    label = torch.tensor([0, 1] * 6)
    optimizer = torch.optim.SGD([x], lr=10.0)
    for _ in range(100):
        optimizer.zero_grad()
        decision(x, label).backward()
        optimizer.step()
    score = decision.score(x).detach()
    assert metrics.eer(score[label == 1], score[label == 0]) == 0
    assert bool((decision.predict_bonafide(x) == (label == 1)).all())


def test_margins_are_those_of_the_papers():
    torch.manual_seed(0)
    x, label = torch.randn(4, 6), torch.tensor([0, 1, 1, 0])
    am = AmSoftmax(6, scale=20, margin=0.9)
    cosine = functional.cosine_similarity(x[:, None], am.directions_2D[None], dim=2)
    right, wrong = cosine[torch.arange(4), label], cosine[torch.arange(4), 1 - label]
    by_hand = -torch.log((20 * (right - 0.9)).exp() / ((20 * (right - 0.9)).exp() + (20 * wrong).exp()))
    torch.testing.assert_close(am(x, label), by_hand.mean())
    assert torch.equal(am.score(x), am._compute_cosines(x)[:, 1])
    oc = OcSoftmax(6, scale=20, margin_bonafide=0.9, margin_spoof=0.2)
    cosine = functional.cosine_similarity(x, oc.direction_D[None])
    violation = torch.stack([cosine[0] - 0.2, 0.9 - cosine[1], 0.9 - cosine[2], cosine[3] - 0.2])
    torch.testing.assert_close(oc(x, label), torch.log(1 + torch.exp(20 * violation)).mean())


# Augmentation


def make_row_noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["series", "parallel"])
def test_the_augmentation_of_an_utterance_depends_only_on_its_own_noise(kind):
    wave, u = make_noise(4, 8000), make_row_noise(4)
    both = augment.apply_rawboost(wave, u, chance=1, kind=kind, rate_hz=8000)
    alone = augment.apply_rawboost(wave[2:3], u[2:3], chance=1, kind=kind, rate_hz=8000)
    torch.testing.assert_close(both[2:3], alone, rtol=0, atol=1e-6)
    assert not torch.allclose(both[0], wave[0], atol=1e-3)
    assert float(both.abs().max()) <= 1
    other = augment.apply_rawboost(wave, make_row_noise(4, seed=1), chance=1, kind=kind, rate_hz=8000)
    assert not torch.allclose(both, other, atol=1e-3)


def test_a_rolled_utterance_starts_elsewhere_and_has_the_same_samples():
    wave, u = make_noise(5, 800), make_row_noise(5)
    rolled = augment.roll(wave, u)
    for i in range(5):
        start = int(float(u[i, augment.Slot.START]) * 800)
        assert torch.equal(rolled[i], torch.roll(wave[i], -start))
    u[:, augment.Slot.START] = 1 - 2**-24
    assert torch.equal(augment.roll(wave, u), torch.roll(wave, 1, dims=1))


def test_chance_is_the_share_of_utterances_changed_and_zero_changes_none():
    wave, u = make_noise(400, 800), make_row_noise(400)
    for change in (
        lambda chance: augment.apply_rawboost(wave, u, chance=chance, kind="series", rate_hz=8000),
        lambda chance: augment.apply_codec(wave, u, chance=chance, rate_hz=8000),
    ):
        assert torch.equal(change(0.0), wave)
        share = float((change(0.3) != wave).any(dim=1).float().mean())
        assert share == pytest.approx(0.3, abs=0.07)  # three standard deviations of 400 draws


def test_stationary_noise_has_the_drawn_signal_to_noise_ratio():
    wave, u = make_noise(20, 8000), make_row_noise(20)
    added = augment._add_stationary_noise(wave, u, 8000) - wave
    ratio = 10 * torch.log10(wave.square().sum(dim=1) / added.square().sum(dim=1))
    torch.testing.assert_close(ratio, 10 + 30 * u[:, augment.Slot.SNR], rtol=0, atol=0.02)


def test_telephone_laws_change_a_waveform_by_at_most_their_steps():
    wave = torch.linspace(-1, 1, 2001)
    for law in (augment._apply_mu_law, augment._apply_a_law):
        error = (law(wave) - wave).abs()
        assert float(error.max()) < 0.03 and float(error[950:1051].max()) < 0.002  # finer for quiet samples


def test_a_codec_removes_frequencies_above_its_cutoff():
    tone = 0.5 * torch.sin(2 * math.pi * 7800 * torch.arange(16000) / 16000)[None]
    u = make_row_noise(1)
    u[:, augment.Slot.CODEC_CUT] = 0.0
    assert float(augment.apply_codec(tone, u, chance=1, rate_hz=16000).abs().max()) < 0.01


def test_masks_are_no_wider_than_requested_and_are_filled_with_the_mean():
    maps, u = torch.randn(300, 60, 404) + 5, make_row_noise(300)
    masked = augment.apply_specaugment(maps, u, chance=1, bins=20, frames=50)
    mask = masked != maps
    bins, frames = mask.all(dim=2).sum(dim=1), mask.all(dim=1).sum(dim=1)
    assert (int(bins.min()), int(bins.max())) == (0, 20)
    assert (int(frames.min()), int(frames.max())) == (0, 50)
    mean = maps.mean(dim=(1, 2), keepdim=True).expand_as(maps)
    assert torch.equal(masked[mask], mean[mask])
    assert torch.equal(augment.apply_specaugment(maps, u, chance=0, bins=20, frames=50), maps)


def test_hashed_numbers_are_uniform_and_uncorrelated():
    u = augment.draw_uniforms(make_row_noise(3), augment.Stream.COLOUR, 100_000)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert u.mean(dim=1).tolist() == pytest.approx([0.5] * 3, abs=0.004)
    assert float((torch.corrcoef(u) - torch.eye(3)).abs().max()) < 0.015
    assert not torch.equal(u, augment.draw_uniforms(make_row_noise(3), augment.Stream.FILTERS, 100_000))


# The module


def make_data(
    labels: list[int], attacks: list[str], sets: list[str], *, rates: int = 8000, asv: str = "{}"
) -> DataInfo:
    """Make the columns that `samples` yields."""
    columns: dict[str, np.ndarray] = {"label": np.array(labels), "source_rate_hz": np.full(len(labels), rates)}
    vocabulary: dict[str, list[str]] = {}
    for name, values in (("attack", attacks), ("set", sets)):
        names, columns[name] = np.unique(values, return_inverse=True)
        vocabulary[name] = names.tolist()
    return DataInfo(columns, vocabulary, np.flatnonzero(np.array(sets) == "train"), {"asv": asv})


def make_config(**sections: dict[str, object]) -> Config:
    config = Config()
    config.sound.frames, config.sound.rate_hz = 4000, 8000
    config.frontend.name, config.model.name = "spec129", "senet34"
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


def make_module(**sections: dict[str, object]) -> AntispoofModule:
    torch.manual_seed(0)
    data = make_data([1, 0] * 8, ["-", "A01"] * 8, ["train"] * 8 + ["val"] * 8)
    return build(make_config(**sections), data)


def make_batch(count: int, frames: int = 4000) -> dict[str, torch.Tensor]:
    return {
        "wave": make_noise(count, frames),
        "label": torch.arange(count) % 2,
        "sample_id": torch.arange(count),
        "noise": make_row_noise(count),
    }


def test_maps_are_computed_in_float32_whatever_the_precision():
    module, inputs = make_module(frontend={"name": "lfcc60"}, sound={"rate_hz": 16000}).eval(), make_batch(4)
    plain = module.compute_maps(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.compute_maps(inputs), plain)
        rows = module.predict(inputs)
    assert plain.dtype == rows["score"].dtype == torch.float32


def test_evaluation_is_deterministic_and_needs_no_label():
    module = make_module(disturb={"rawboost": 1.0, "codec": 1.0, "mask": 1.0})
    inputs = make_batch(4)
    changed, plain = module.train().compute_maps(inputs), module.eval().compute_maps(inputs)
    assert not torch.allclose(changed, plain, atol=1e-2)
    module.frontend(inputs["wave"])
    assert torch.equal(plain, module.frontend(inputs["wave"]))
    del inputs["label"], inputs["noise"]
    assert torch.equal(module.predict(inputs)["score"], module.predict(inputs)["score"])


def test_every_weight_gets_a_gradient():
    for sections in (
        {},
        {"loss": {"name": "oc_softmax"}},
        {"model": {"name": "seresnet", "layers": [1, 1, 1, 1]}, "loss": {"name": "am_softmax"}},
    ):
        module = make_module(**sections)
        module(make_batch(4))["loss"].backward()
        assert all(weight.grad is not None for weight in module.parameters())


def test_ddp_broadcasts_batch_statistics_but_no_windows_or_filters():
    module = make_module(frontend={"name": "spec129"})
    sent = {name for name, _ in module.named_buffers()} - set(module._ddp_params_and_buffers_to_ignore)
    assert sent == {name for name in module.state_dict() if name not in dict(module.named_parameters())}
    assert "frontend.maps.power.window" not in sent and "network.stem.1.running_mean" in sent


def test_activation_checkpointing_changes_no_gradient():
    module, inputs = make_module(), make_batch(6)
    module(inputs)["loss"].backward()
    before = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    assert enable_activation_checkpointing(module) == 16
    module(inputs)["loss"].backward()
    assert all(torch.equal(a, weight.grad) for a, weight in zip(before, module.parameters(), strict=True))


def test_the_direction_of_one_class_softmax_has_its_own_learning_rate():
    module = make_module(loss={"name": "oc_softmax", "lr_scale": 3.0})
    groups = module.parameter_groups(0.1)
    assert groups[-1]["params"] == [module.decision.direction_D]
    assert (groups[-1]["weight_decay"], groups[-1]["lr_scale"]) == (0.0, 3.0)
    parameters = [weight for group in groups for weight in group["params"]]
    assert len(parameters) == len({id(weight) for weight in parameters}) == len(list(module.parameters()))


def test_a_set_is_scored_only_with_its_own_asv_rates():
    sets = ["train", "train", "val", "val", "test_2019", "test_2019"]
    data = make_data([1, 0] * 3, ["-", "A01"] * 3, sets, asv=json.dumps({"val": vars(ASV)}))
    module = build(make_config(), data)
    scored = {
        name: module.score({"score": np.array([1.0, -1.0]), "sample_id": np.array(ids)})
        for name, ids in (("val", [2, 3]), ("test_2019", [4, 5]))
    }
    assert scored["val"]["min_tdcf_2021"] == pytest.approx(0.0627, abs=1e-4)
    assert "min_tdcf_2021" not in scored["test_2019"]
    assert module.monitor == ("eer", "min")
    figures = module.report_figures({"score": np.array([1.0, -1.0]), "sample_id": np.array([2, 3])})
    assert len(figures) == 2 and all(png.startswith(b"\x89PNG") for png in figures.values())


def test_a_network_that_does_not_fit_the_front_end_is_refused():
    with pytest.raises(UserError, match=r"resnet18_oc takes 60 bins.*Use frontend.name=lfcc60"):
        make_module(model={"name": "resnet18_oc"})
    with pytest.raises(UserError, match=r"model.layers=\[2\]: expected four counts"):
        make_module(model={"name": "seresnet", "layers": [2]})


def test_resampled_files_are_logged_and_a_difference_between_the_classes_is_warned_about(caplog):
    from loguru import logger

    lines: list[str] = []
    handle = logger.add(lambda message: lines.append(str(message)), format="{level} {message}")
    data = make_data([1, 0] * 2, ["-", "A01"] * 2, ["train"] * 4)
    data.columns["source_rate_hz"][[1, 3]] = 44100
    build(make_config(), data)
    logger.remove(handle)
    assert "INFO resampled to 8000 Hz when packed: 2 of 44100 Hz\n" in lines
    assert any("0% of bona fide and 100% of spoofed files were resampled" in line for line in lines)


def test_the_network_memorises_thirty_two_utterances_and_two_runs_are_bitwise_equal():
    """Synthetic speech against copies with its phases: 24 steps, twice; 10 s."""
    waves = []
    for take in range(16):
        speech = generate_speech(0, take % 4, take)
        copy = vocoders.synthesize_copy(speech, "A04", rate_hz=8000, rng=np.random.default_rng(0))
        waves += [np.resize(x, 2400) for x in (speech, copy)]
    inputs = {
        "wave": torch.tensor(np.array(waves), dtype=torch.float32),
        "label": torch.tensor([1, 0] * 16),
        "sample_id": torch.arange(32),
    }
    found = []
    for _ in range(2):
        module = make_module()
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
        for _ in range(24):
            optimizer.zero_grad()
            module(inputs)["loss"].backward()
            optimizer.step()
        found.append(module.eval().predict(inputs)["score"].detach().numpy())
    assert metrics.eer(found[0][::2], found[0][1::2]) == 0.0
    assert np.array_equal(found[0], found[1])


# Protocols and raw folders


def write_recording(
    path: Path, *, rate_hz: int = 16000, seconds: float = 0.1, channels: int = 1, seed: int = 0
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pcm = np.random.default_rng(seed).integers(-3000, 3000, (int(seconds * rate_hz), channels)).astype(np.int16)
    soundfile.write(path, pcm, rate_hz, subtype="PCM_16")
    return path


def write_lines(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


SPLIT = SplitRule(val_share=0.25, test_share=0.25, seed=0)


def write_asvspoof_2019(raw: Path) -> Path:
    """Write a small database in the layout of ASVspoof 2019 LA, with ASV scores."""
    for part, end, letter in (("train", "trn", "T"), ("dev", "trl", "D"), ("eval", "trl", "E")):
        lines = []
        for i in range(4):
            attack, key = ("-", "bonafide") if i % 2 else (f"A{i + 1:02d}", "spoof")
            lines.append(f"LA_00{i:02d} LA_{letter}_{i:07d} - {attack} {key}")
            write_recording(raw / f"ASVspoof2019_LA_{part}/flac/LA_{letter}_{i:07d}.flac", seed=i)
        write_lines(raw / f"ASVspoof2019_LA_cm_protocols/ASVspoof2019.LA.cm.{part}.{end}.txt", *lines)
    for part, shift in (("dev", 0.0), ("eval", 9.0)):
        write_lines(
            raw / f"ASVspoof2019_LA_asv_scores/ASVspoof2019.LA.asv.{part}.gi.trl.scores.txt",
            *(f"bonafide target {x}" for x in (3.0, 4.0, 5.0)),
            *(f"bonafide nontarget {x}" for x in (-3.0, -2.0)),
            *(f"A07 spoof {x - shift}" for x in (-2.5, 3.5)),
        )
    return raw


def test_asvspoof_2019_is_read(tmp_path):
    found = find_utterances(write_asvspoof_2019(tmp_path), SPLIT)
    assert Counter(utterance.set for utterance in found) == {"train": 4, "val": 4, "test_2019": 4}
    assert found[0].key == "ASVspoof2019_LA_train/flac/LA_T_0000000.flac"
    assert (found[0].bonafide, found[0].attack, found[0].speaker) == (False, "A01", "LA_0000")
    assert (found[1].bonafide, found[1].attack) == (True, "-")
    assert find_utterances(tmp_path.parent, SPLIT)[0].path == found[0].path, "the parent folder gives the same"


def test_each_set_has_its_own_asv_rates(tmp_path):
    artifacts = json.loads(fit_artifacts(write_asvspoof_2019(tmp_path), Config())["asv"])
    assert artifacts["val"]["false_alarm_spoof"] == 0.5 and artifacts["test_2019"]["false_alarm_spoof"] == 0.0
    assert sorted(artifacts) == ["test_2019", "val"]


def test_asvspoof_2021_is_read_phase_by_phase_alongside_2019(tmp_path):
    write_asvspoof_2019(tmp_path / "LA")
    for track, fields in (("LA", "alaw ita_tx A07 spoof notrim"), ("DF", "nocodec asvspoof A14 spoof notrim")):
        more = "" if track == "LA" else " traditional_vocoder - - - -"
        lines = [f"LA_0009 {track}_E_{i:07d} {fields} {('eval', 'progress')[i % 2]}{more}" for i in range(2)]
        lines.append(
            f"LA_0009 {track}_E_0000009 {fields.replace('A07', '-').replace('spoof n', 'bonafide n')} eval{more}"
        )
        write_lines(tmp_path / f"keys/{track}/CM/trial_metadata.txt", *lines)
        write_recording(tmp_path / f"ASVspoof2021_{track}_eval/flac/{track}_E_0000000.flac")
    found = [utterance for utterance in find_utterances(tmp_path, SPLIT) if "2021" in utterance.set]
    assert Counter(utterance.set for utterance in found) == {
        "test_2021_la_eval": 2, "test_2021_la_progress": 1, "test_2021_df_eval": 2, "test_2021_df_progress": 1,
    }  # fmt: skip
    assert (found[0].attack, found[0].bonafide, found[2].bonafide) == ("A07", False, True)
    assert found[0].path is not None and found[2].path is None, "the last one is listed, but missing"


@pytest.mark.parametrize(
    ("bona", "fake"),
    [
        ("T_4850 T_0000000001 F - - - AC3 bonafide bonafide -", "T_4850 T_0000000002 F - - - AC3 A05 spoof -"),
        ("T_4850 T_0000000001 M - - bonafide", "T_4850 T_0000000002 M - A05 spoof"),
    ],
)
def test_asvspoof_5_is_read_with_the_key_in_any_place(tmp_path, bona, fake):
    write_lines(tmp_path / "ASVspoof5.train.tsv", bona, fake)
    write_lines(tmp_path / "ASVspoof5.dev.track_1.tsv", bona.replace("T_00", "D_00").replace(" ", "\t"))
    write_recording(tmp_path / "flac_T/T_0000000002.flac")
    found = find_utterances(tmp_path, SPLIT)
    assert [(utterance.set, utterance.bonafide, utterance.attack, utterance.path is None) for utterance in found] == [
        ("train", True, "-", True), ("train", False, "A05", False), ("val", True, "-", True),
    ]  # fmt: skip


def test_fake_or_real_folders_are_read(tmp_path):
    for part in ("training", "validation", "testing"):
        for name in ("real", "fake"):
            write_recording(tmp_path / "for-2sec" / part / name / "a.wav")
    found = find_utterances(tmp_path, SPLIT)
    assert [(utterance.set, utterance.bonafide) for utterance in found] == [
        ("train", True), ("train", False), ("val", True), ("val", False), ("test", True), ("test", False),
    ]  # fmt: skip
    assert find_utterances(tmp_path / "for-2sec", SPLIT)[0].key == "training/real/a.wav"


def test_an_own_folder_is_split_by_speaker_and_its_folders_name_the_attacks(tmp_path):
    for speaker in range(24):
        for i in range(2):
            write_recording(tmp_path / f"bonafide/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
            write_recording(tmp_path / f"spoof/TTS/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
    found = find_utterances(tmp_path, SPLIT)
    sets = {
        utterance.speaker: {other.set for other in found if other.speaker == utterance.speaker} for utterance in found
    }
    assert len(found) == 96 and len(sets) == 24 and all(len(names) == 1 for names in sets.values())
    assert {utterance.set for utterance in found} == {"train", "val", "test"}
    assert {utterance.attack for utterance in found if not utterance.bonafide} == {"TTS"}


def test_a_csv_protocol_can_give_every_column(tmp_path):
    write_lines(tmp_path / "protocol.csv", "path,label,attack,set", "x/a.wav,real,,train", "b.flac,0,VC,test_phone")
    write_recording(tmp_path / "x/a.wav")
    utterance, other = find_utterances(tmp_path, SPLIT)
    assert (utterance.key, utterance.bonafide, utterance.attack, utterance.set) == ("x/a.wav", True, "-", "train")
    assert (other.bonafide, other.attack, other.set, other.path) == (False, "VC", "test_phone", None)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_2 - A01"], r"p.txt, line 2: expected 5 fields.*found 4"),
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_2 - A01 fake"], "line 2: expected bonafide or spoof, found 'fake'"),
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_1 - A01 spoof"], "'U_1' is listed twice"),
        ("p.txt", ["LA_1 U_1 bonafide"], r"line 1: found 3 fields.*Expected 5 \(ASVspoof 2019"),
        ("p.txt", [], "the protocol is empty"),
        ("p.csv", ["file,label", "a.wav,1"], "expected a header with path and label"),
        ("p.csv", ["path,label", "a.wav,1,2"], r"line 2: expected 2 fields \(path,label\), found 3"),
        ("p.csv", ["path,label", "a.wav,maybe"], "label 'maybe': expected one of bonafide"),
        ("p.csv", ["path,label,set", "a.wav,1,dev"], "set 'dev': expected train, val, test or test_NAME"),
    ],
)
def test_a_bad_protocol_is_refused_with_the_place(tmp_path, name, lines, message):
    with pytest.raises(UserError, match=message):
        read_trials(write_lines(tmp_path / name, *lines))


def test_a_folder_without_training_data_or_keys_says_what_to_type(tmp_path):
    write_recording(tmp_path / "ASVspoof2021_LA_eval/flac/LA_E_0000000.flac")
    with pytest.raises(UserError, match=r"its keys are missing.*trainyard predict"):
        find_utterances(tmp_path, SPLIT)
    write_lines(tmp_path / "keys/LA/CM/trial_metadata.txt", "LA_0009 LA_E_0000000 alaw ita_tx A07 spoof notrim eval")
    with pytest.raises(UserError, match=r"No utterance is left to train on.*test_2021_la_eval"):
        find_utterances(tmp_path, SPLIT)


def test_bad_asv_scores_are_refused_with_the_place(tmp_path):
    for lines, message in (
        (["bonafide target 1.0", "bonafide target"], "line 2: expected 'source target"),
        (["bonafide target x"], "line 1: expected"),
        (["bonafide target 1.0", "bonafide nontarget 0.0"], "no ASV spoof trial"),
    ):
        with pytest.raises(UserError, match=message):
            read_asv_rates(write_lines(tmp_path / "asv.txt", *lines))


# Files


RULE = ConversionRule(rate_hz=16000, encoded=False, resample=True, mix=False, min_s=0.05)


def get_wave(loaded: dict[str, object]) -> bytes | np.ndarray:
    audio = loaded["wave"]
    assert isinstance(audio, Audio)
    return audio.data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but the file is missing"),
        ("empty", "the file is empty"),
        ("text", "not a complete audio file in a known format"),
        ("no frames", "no audio: 0 frames"),
        ("short", r"too short: 160 frames at 16000 Hz, expected at least 0.05 s \(packing.min_s\)"),
        ("stereo", r"2 channels, expected one: convert the file.*packing.stereo=mix"),
        ("half a flac", "truncated|not a complete audio file"),
        ("broken flac", "truncated|not a complete audio file"),
        ("half a wav", "truncated: .* the header announces more"),
        ("rate", r"8000 Hz, expected 16000 \(sound.rate_hz\): convert the file, or use packing.rate=resample"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path, content, reason):
    kind = "wav" if content in ("half a wav", "no frames") else "flac"
    seconds = {"no frames": 0.0, "short": 0.01}.get(content, 0.5)
    path = write_recording(
        tmp_path / f"a.{kind}",
        seconds=seconds,
        channels=1 + (content == "stereo"),
        rate_hz=8000 if content == "rate" else 16000,
    )
    data = path.read_bytes()
    broken = data[: len(data) // 2] + bytes(len(data) // 4) + data[len(data) * 3 // 4 :]
    replaced = {"empty": b"", "text": b"hello", "half a flac": data[: len(data) // 2], "broken flac": broken}
    path.write_bytes(replaced.get(content, data[: len(data) // 2] if content == "half a wav" else data))
    rule = ConversionRule(16000, False, content != "rate", False, 0.05)
    with pytest.raises(BadRecord, match=reason):
        load(None if content == "missing" else path, rule)


def test_files_of_another_rate_width_or_channel_become_16_bit_mono(tmp_path):
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, tone], axis=1), 8000, subtype="FLOAT")
    found = load(tmp_path / "a.wav", ConversionRule(16000, False, True, True, 0.05))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    data = get_wave(found)
    assert isinstance(data, np.ndarray) and data.dtype == np.int16 and len(data) == 16000
    assert np.abs(data / 32768 - expected)[200:-200].max() < 2e-3
    assert found["source_rate_hz"] == 8000
    encoded = get_wave(load(tmp_path / "a.wav", ConversionRule(16000, True, True, True, 0.05)))
    assert isinstance(encoded, bytes)
    assert np.array_equal(soundfile.read(io.BytesIO(encoded), dtype="int16")[0], data)


def test_plain_files_are_stored_byte_for_byte_or_as_their_samples(tmp_path):
    for kind in ("wav", "flac"):
        path = write_recording(tmp_path / f"a.{kind}")
        assert get_wave(load(path, ConversionRule(16000, True, True, False, 0.05))) == path.read_bytes()
        assert np.array_equal(get_wave(load(path, RULE)), soundfile.read(path, dtype="int16")[0])


@pytest.mark.parametrize("store", ["pcm", "encoded"])
def test_evaluation_reads_the_first_part_of_packed_speech_and_no_noise(tmp_path, store):
    config = make_config(packing={"store": store})
    config.sound.rate_hz, config.sound.frames = 16000, 1000
    raw = write_asvspoof_2019(tmp_path / "raw")
    packed_samples = list(samples(raw, config))
    data = pack(packed_samples, tmp_path / "packed", meta={}, workers=1, artifacts=fit_artifacts(raw, config))
    ids = splits(data.columns, data.vocabulary, config)["val"]
    loader = Loader.from_config(config, data, device=torch.device("cpu"), decode="cpu")
    (micro,) = loader.evaluate(ids, batch_size=8)
    for row, sample_id in zip(micro.batch["wave"], micro.batch["sample_id"].tolist(), strict=True):
        pcm = soundfile.read(packed_samples[sample_id].source, dtype="int16")[0]
        assert np.array_equal(row.numpy() * 32768, pcm[:1000])
    assert micro.batch["label"].tolist() == [0, 1, 0, 1]
    assert "noise" not in micro.batch
    data.close()


def test_a_set_without_both_classes_is_refused(tmp_path):
    columns = {"label": np.array([1, 0, 1, 1]), "set": np.array([0, 0, 1, 1])}
    with pytest.raises(UserError, match="the val set has 2 bona fide and 0 spoofed utterances"):
        splits(columns, {"set": ["train", "val"]}, Config())
    with pytest.raises(UserError, match="the val set has 0 bona fide and 0 spoofed"):
        splits({name: values[:2] for name, values in columns.items()}, {"set": ["train"]}, Config())


def test_a_folder_to_score_needs_no_protocol(tmp_path):
    write_recording(tmp_path / "a/one.wav")
    write_recording(tmp_path / "two.flac", rate_hz=8000)
    (tmp_path / "notes.txt").write_text("not audio")
    found = list(unlabelled(tmp_path, Config(), {"asv": "{}"}))
    assert [sample.key for sample in found] == ["a/one.wav", "two.flac"]
    assert [sample.key for sample in unlabelled(tmp_path / "two.flac", Config(), {})] == ["two.flac"]
    assert len(get_wave(found[1].load({}))) == 1600
    rows = {"score": np.array([0.5, -1.5], np.float32), "sample_id": np.array([0, 1])}
    prediction_rows = list(make_module().prediction_rows(rows, [sample.key for sample in found]))
    assert prediction_rows == [
        {"path": "a/one.wav", "utterance": "one", "score": 0.5},
        {"path": "two.flac", "utterance": "two", "score": -1.5},
    ]


# Copies and synthetic speech


def test_the_inverse_stft_restores_the_waveform():
    wave = generate_speech(0, 1, 2)
    assert np.abs(vocoders.invert_stft(vocoders.compute_stft(wave), len(wave)) - wave).max() < 1e-12


@pytest.mark.parametrize("kind", list(vocoders.KINDS))
def test_a_copy_has_the_length_and_loudness_of_the_original_but_differs(kind):
    wave = generate_speech(0, 1, 2)
    made = [vocoders.synthesize_copy(wave, kind, rate_hz=8000, rng=np.random.default_rng(1)) for _ in range(2)]
    assert np.array_equal(made[0], made[1])
    assert len(made[0]) == len(wave)
    assert np.sqrt(np.mean(made[0] ** 2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=0.02)
    magnitude, copied = (np.abs(vocoders.compute_stft(x)) for x in (wave, made[0]))
    error = np.sum((magnitude - copied) ** 2) / np.sum(magnitude**2)
    assert 0.005 < error < 0.5


def test_griffin_lim_gets_closer_to_the_magnitudes_with_more_rounds():
    magnitude = np.abs(vocoders.compute_stft(generate_speech(0, 3, 0)))
    errors = []
    for rounds in (1, 4, 32):
        spectrum = vocoders.griffin_lim(magnitude, rounds, np.random.default_rng(0))
        found = np.abs(vocoders.compute_stft(vocoders.invert_stft(spectrum, (len(magnitude) - 1) * vocoders.HOP)))
        errors.append(float(np.sum((found - magnitude) ** 2)))
    assert errors[0] > errors[1] > errors[2]


def test_fsdd_recordings_and_their_copies_make_the_specified_sets():
    from trainyard.config import compose

    raw = find_shared_audio("fsdd")
    config = compose("antispoof_fsdd", [], Path(__file__).resolve().parents[1])
    found = list(samples(raw, config))
    count = Counter((sample.columns["set"], sample.columns["attack"]) for sample in found)
    assert count == {
        ("train", "-"): 1000, ("train", "A01"): 1000, ("train", "A02"): 1000,
        ("val", "-"): 250, ("val", "A01"): 250, ("val", "A02"): 250, ("val", "A03"): 250, ("val", "A04"): 250,
        ("test", "-"): 250, ("test", "A01"): 250, ("test", "A02"): 250, ("test", "A03"): 250, ("test", "A04"): 250,
    }  # fmt: skip
    speakers = {(sample.columns["set"], sample.columns["speaker"]) for sample in found}
    assert speakers == {
        *(("train", s) for s in ("george", "jackson", "lucas", "nicolas")),
        ("val", "theo"),
        ("test", "yweweler"),
    }
    original, made = found[0].load({}), found[1].load({})
    assert made["wave"].data.shape == original["wave"].data.shape  # type: ignore[union-attr]
    assert np.array_equal(made["wave"].data, found[1].load({})["wave"].data)  # type: ignore[union-attr]
    assert not np.array_equal(made["wave"].data, original["wave"].data)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"copies": ["A09"]}, "packing.copies: 'A09' is not one of A01, A02, A03, A04"),
        ({"copies": ["A01"], "unseen": ["A02"]}, "packing.unseen: 'A02' is not one of A01"),
        ({"copies": ["A01"], "recordings": "("}, "not a regular expression"),
        ({"copies": ["A01"], "recordings": ".*"}, r"expected a group \(\?P<speaker>"),
        ({"copies": ["A01"], "val_speakers": ["eve"]}, "speaker 'eve' has no recording in .* Speakers: ann, bob"),
    ],
)
def test_copies_that_cannot_be_made_are_refused(tmp_path, packing, message):
    for name in ("ann_1", "bob_1"):
        write_recording(tmp_path / f"{name}.wav")
    with pytest.raises(UserError, match=message):
        list(samples(tmp_path, make_config(packing=packing)))


def test_synthetic_speech_is_reproducible_and_each_speaker_is_in_one_set(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=51, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.wav"))
    assert len(files) == 51
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    found = find_utterances(tmp_path / "once", SPLIT)
    assert {(utterance.set, utterance.attack) for utterance in found} >= {
        ("val", "A02"),
        ("test", "A03"),
        ("test", "A04"),
    }
    assert not {utterance.attack for utterance in found if utterance.set != "test"} & {"A03", "A04"}
    sets = {
        utterance.speaker: {other.set for other in found if other.speaker == utterance.speaker} for utterance in found
    }
    assert all(len(names) == 1 for names in sets.values())
    with pytest.raises(UserError, match="already contains files"):
        synthesize(tmp_path / "once", count=51, seed=3)
    with pytest.raises(UserError, match="expected 51 or more"):
        synthesize(tmp_path / "few", count=50, seed=3)


def test_a_long_synthetic_set_has_every_speaker_and_the_kinds_in_proportion():
    count = Counter((item.role, item.kind) for item in list_items(3400))
    assert count["train", "-"] == count["train", "A01"] == 600
    assert count["val", "-"] == count["test", "A04"] == 200


# Score files


def run_verb(*words: str) -> int:
    """Run one of the family's verbs as from the command line."""
    parser = argparse.ArgumentParser()
    commands.add(parser.add_subparsers())
    args = parser.parse_args(words)
    return int(args.command(args))


KEYS = ["S1 U_1 - - bonafide", "S1 U_2 - A01 spoof", "S2 U_3 - - bonafide", "S2 U_4 - A02 spoof"]
RIGHT = ["U_1 - bonafide 2.0", "U_2 A01 spoof -1.0", "U_3 - bonafide 1.0", "U_4 A02 spoof -2.0"]


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (RIGHT, 0, "eer            0.0000 %"),
        (["U_1 2.0", "U_2 -1", "U_3 1e0", "U_4 -2"], 0, "4 scores in the asv2021 format"),
        (["filename\tcm-score", "U_1\t2", "U_2\t-1", "U_3\t1", "U_4\t-2"], 0, "in the asv5 format"),
        (RIGHT[:3], 1, "1 of 4 utterances have no score: U_4"),
        ([*RIGHT, RIGHT[1]], 1, "1 utterances have more than one score: U_2"),
        ([*RIGHT, "U_5 - bonafide 0"], 1, "1 utterances are not in the protocol: U_5"),
        ([line.replace("-1.0", "nan") for line in RIGHT], 1, "1 scores are not finite numbers: U_2"),
        ([RIGHT[0].replace("- bona", "A01 bona").replace("bonafide", "spoof"), *RIGHT[1:]], 1, "1 keys differ from"),
        (
            ["U_1 -2.0", "U_2 1.0", "U_3 -1.0", "U_4 2.0"],
            1,
            "inverted: high must mean bona fide. The EER is 100.00 %",
        ),
        (["U_1 3", "U_2 3", "U_3 3", "U_4 3"], 1, "all scores are 3"),
        (["U_1 0.9", "U_2 0.1", "U_3 0.8", "U_4 0.2"], 0, "probabilities, not log-odds"),
        (RIGHT[::-1], 0, "the order differs from the protocol's"),
    ],
)
def test_score_check_tells_valid_files_from_invalid_ones(tmp_path, capsys, lines, code, message):
    path = write_lines(tmp_path / "scores.txt", *lines)
    assert run_verb("score-check", str(path), "--protocol", str(write_lines(tmp_path / "keys.txt", *KEYS))) == code
    assert message in capsys.readouterr().out


def test_a_missing_or_broken_score_file_says_what_to_type(tmp_path):
    with pytest.raises(UserError, match=r"away.txt: no such score file\. Expected lines of .*score-file write one"):
        run_verb("score-check", str(tmp_path / "away.txt"))
    broken = write_lines(tmp_path / "scores.txt", RIGHT[0], "U_2 A01 spoof")
    with pytest.raises(
        UserError, match=r"scores.txt, line 2: expected 4 fields .*, found 3: .* write the file again: "
    ):
        run_verb("score-check", str(broken))


def test_a_score_file_of_a_known_set_without_a_trial_is_invalid_even_without_a_protocol(tmp_path, capsys):
    text = (find_shared_audio("asvspoof2019_scores") / SCORES).read_text().splitlines()
    removed = next(i for i, line in enumerate(text) if " bonafide " in line)
    path = write_lines(tmp_path / "scores.txt", *text[:removed], *text[removed + 1 :])
    assert run_verb("score-check", str(path)) == 1
    assert (
        "7,354 bona fide and 63,882 spoofed trials, but the ASVspoof 2019 LA evaluation set" in capsys.readouterr().out
    )


def test_error_rates_for_2021_use_the_evaluation_phase(tmp_path, capsys):
    kinds = (("- bonafide", "eval"), ("A07 spoof", "eval"), ("A07 spoof", "progress"), ("- bonafide", "hidden"))
    keys = [f"S LA_E_{i} alaw ita_tx {key} notrim {phase}" for i, (key, phase) in enumerate(kinds)]
    path = write_lines(tmp_path / "scores.txt", "LA_E_0 1.0", "LA_E_1 0.0", "LA_E_2 5.0", "LA_E_3 -5.0")
    assert (
        run_verb("score-check", str(path), "--protocol", str(write_lines(tmp_path / "trial_metadata.txt", *keys))) == 0
    )
    output = capsys.readouterr().out
    assert "for the eval phase" in output and "eer            0.0000 %" in output and "bonafide       1" in output


def test_a_score_file_without_keys_says_that_it_needs_a_protocol(tmp_path, capsys):
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", "U_1 2.0"))) == 0
    assert "no keys: pass --protocol" in capsys.readouterr().out
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", "LA_D_1 2.0", "LA_D_2 1.0"))) == 1
    assert "2 trials, but the ASVspoof 2019 LA development set has 24,844 trials" in capsys.readouterr().out


def test_a_list_of_names_reveals_missing_scores_and_the_files_own_keys_are_used(tmp_path, capsys):
    names = write_lines(tmp_path / "names.txt", "U_1", "U_2", "U_3", "U_4")
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", *RIGHT)), "--protocol", str(names)) == 0
    assert "eer            0.0000 %" in capsys.readouterr().out
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", *RIGHT[1:])), "--protocol", str(names)) == 1
    assert "1 of 4 utterances have no score: U_1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["U_1 2.0", "U_2"], r"line 2: expected 2 fields \(utterance score\), found 1"),
        ([*RIGHT, "U_5 1.0"], r"line 5: expected 4 fields \(utterance attack key score\), found 2"),
        (["U_1 high"], "line 1: 'high' is not a score"),
        (["filename\tcm-score"], "the score file is empty"),
        (["U_1 - real 1.0"], "line 1: key 'real': expected bonafide or spoof"),
        ([], "the score file is empty"),
    ],
)
def test_an_invalid_score_file_is_refused_with_the_place(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        scores.read(write_lines(tmp_path / "scores.txt", *lines))


@pytest.mark.parametrize("form", scores.FORMATS)
def test_a_written_score_file_reads_back_equal(tmp_path, form):
    lines = [Line("U_1", 2.25, True), Line("U_2", -0.1, False, "A01")]
    scores.write(tmp_path / "scores.txt", lines, form=form)
    found_form, found_lines = scores.read(tmp_path / "scores.txt")
    assert found_form == form
    assert found_lines == (lines if form == "asv2019" else [Line(line.utterance, line.score) for line in lines])


def test_predictions_become_an_official_score_file_in_the_order_of_the_protocol(tmp_path, capsys):
    table, keys = tmp_path / "out.csv", write_lines(tmp_path / "keys.txt", *KEYS)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "utterance", "score"])
        writer.writeheader()
        for i in (4, 2, 3, 1):
            writer.writerow({"path": f"x/U_{i}.flac", "utterance": f"U_{i}", "score": i % 2})
    out = tmp_path / "scores.txt"
    assert run_verb("score-file", str(table), str(out), "--form", "asv2019", "--protocol", str(keys)) == 0
    assert out.read_text().splitlines()[:2] == ["U_1 - bonafide 1.0", "U_2 A01 spoof 0.0"]
    assert run_verb("score-check", str(out), "--protocol", str(keys)) == 0
    capsys.readouterr()
    with pytest.raises(UserError, match=r"needs a key on every line. Pass --protocol"):
        run_verb("score-file", str(table), str(out), "--form", "asv2019")
    write_lines(keys, *KEYS, "S3 U_9 - - bonafide")
    with pytest.raises(UserError, match=r"1 of the 5 utterances of .* have no score, for example U_9"):
        run_verb("score-file", str(table), str(out), "--protocol", str(keys))


def test_the_librosa_benchmark_without_librosa_says_how_to_install_it(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"not an environment with librosa\. Create one: python3 -m venv \.venv-librosa"
    ):
        run_verb("bench-frontends", "--peers", str(tmp_path), "--results", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
