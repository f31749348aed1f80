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
from .losses import AmSoftmax, CrossEntropy, OcSoftmax, class_weights
from .metrics import AsvRates, det_curve
from .module import AntispoofModule, build
from .network import Block, DenseNorm, OneClassResNet, SeNet, SeResNet, weighted_statistics
from .pack import Rule, fit_artifacts, load, samples, splits, synthesize, unlabelled
from .protocols import Cut, asv_rates, trials, utterances
from .scores import Line
from .synthesis import draw_speech, items

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
"""Makes a run of this family take seconds, for tests that run over all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the utterances `ids`, and what it must score."""
    rows = {"score": np.where(columns["label"][ids] == 1, 9.0, -9.0).astype(np.float32), "sample_id": ids}
    return rows, {"eer": 0.0, "min_dcf": 0.0, "act_dcf": 0.0, "eer_A01": 0.0, "eer_A02": 0.0}


def shared_audio(name: str) -> Path:
    """Return a folder of the shared recordings and scores, which are not part of the repository."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", beside)) / "audio" / name
    if not folder.is_dir():
        pytest.skip(f"no such data at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


SCORES = "AIR_lfcc_resnet18_softmax_LA_eval_cm_scores.txt"
ASV_EVAL = "ASVspoof2019.LA.asv.eval.gi.trl.scores.txt"
ASV = AsvRates(miss=0.0245810, false_alarm=0.0246047, miss_spoof=0.2393475, false_alarm_spoof=0.7606525)


# Metrics


def test_the_scores_of_a_published_system_have_its_published_error_rates():
    folder = shared_audio("asvspoof2019_scores")
    asv = asv_rates(folder / ASV_EVAL)
    assert (asv.miss, asv.false_alarm) == pytest.approx((0.0245810, 0.0246047), abs=1e-7)
    assert asv.miss_spoof == pytest.approx(0.2393475, abs=1e-7)
    form, lines = scores.read(folder / SCORES)
    verdict = scores.check(form, lines, protocol=None, asv=asv)
    assert (form, verdict.trials, verdict.faults) == ("asv2019", 71237, [])
    assert any("as many trials as the ASVspoof 2019 LA evaluation set has" in note for note in verdict.notes)
    found = verdict.metrics
    assert found["eer"] == pytest.approx(0.050578, abs=1e-6)
    assert found["min_tdcf_2019"] == pytest.approx(0.12084, abs=1e-5)
    assert found["min_tdcf_2021"] == pytest.approx(0.17599, abs=1e-5)
    assert found["eer_A17"] == pytest.approx(0.2348, abs=1e-4)
    assert max((v, n) for n, v in found.items() if n.startswith("eer_"))[1] == "eer_A17"
    assert (found["bonafide"], found["spoof"]) == (7355, 63882)


def test_the_asv_threshold_of_the_fixture_is_the_known_one():
    groups: dict[str, list[float]] = {"target": [], "nontarget": [], "spoof": []}
    for line in (shared_audio("asvspoof2019_scores") / ASV_EVAL).read_text().splitlines():
        _, kind, score = line.split()
        groups[kind].append(float(score))
    assert [len(group) for group in groups.values()] == [5370, 33327, 63882]
    rate, threshold = det_curve(groups["target"], groups["nontarget"]).eer()
    assert rate == pytest.approx(0.0245778, abs=1e-7)
    assert threshold == pytest.approx(-5.680051, abs=1e-6)


def test_a_det_curve_passes_one_trial_at_a_time_and_bona_fide_first_where_scores_are_equal():
    curve = det_curve([1.0, 2.0, 4.0, 5.0], [0.0, 2.0])
    assert curve.thresholds.tolist() == [-0.001, 0.0, 1.0, 2.0, 2.0, 4.0, 5.0]
    assert curve.frr.tolist() == [0, 0, 0.25, 0.5, 0.5, 0.75, 1]
    assert curve.far.tolist() == [1, 0.5, 0.5, 0.5, 0, 0, 0]
    assert curve.eer() == (0.5, 2.0)
    assert det_curve([1, 3, 5, 7, 9], [2, 4, 6]).eer() == (pytest.approx((2 / 5 + 1 / 3) / 2), 4.0)
    assert metrics.eer([5, 6], [1, 2]) == 0.0
    assert metrics.eer([1, 2], [5, 6]) == 1.0
    assert metrics.eer([3, 3], [3, 3, 3]) == 1.0


def test_the_newer_tdcf_has_a_floor_and_the_older_one_has_none():
    perfect = det_curve([1.0, 2.0], [-2.0, -1.0])
    assert metrics.min_tdcf_2019(perfect, ASV) == 0.0
    c0 = 0.9405 * ASV.miss + 0.095 * ASV.false_alarm
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(c0 / (c0 + 0.5 * ASV.false_alarm_spoof))
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(0.0627, abs=1e-4)
    useless = det_curve([0.0], [1.0])
    assert metrics.min_tdcf_2019(useless, ASV) == pytest.approx(1.0)
    assert metrics.min_tdcf_2021(useless, ASV) == pytest.approx(1.0)


def test_detection_costs_and_cllr_are_those_of_asvspoof_5():
    bonafide, spoof = np.array([-0.5, 2.0, 3.0, 4.0]), np.array([-3.0, -2.0, 1.0])
    # thresholds where a miss costs 0.95 / 4 and a false alarm 0.5 / 3, over 0.5
    assert metrics.min_dcf(det_curve(bonafide, spoof)) == pytest.approx(1 / 3)
    assert metrics.act_dcf(bonafide, spoof) == pytest.approx(1 / 3)  # threshold -ln 1.9 = -0.642
    assert metrics.act_dcf(bonafide - 1, spoof - 1) == pytest.approx((0.95 / 4 + 0.5 / 3) / 0.5)
    by_hand = (np.log2(1 + np.exp(-bonafide)).mean() + np.log2(1 + np.exp(spoof)).mean()) / 2
    assert metrics.cllr(bonafide, spoof) == pytest.approx(by_hand)
    assert metrics.cllr([0.0], [0.0]) == pytest.approx(1.0)
    assert metrics.cllr([2000.0], [-2000.0]) == 0.0


def test_each_attack_is_scored_against_all_bona_fide_speech():
    values = [3.0, 2.0, 1.0, 2.5, 0.0, -1.0]
    found = metrics.of_scores(values, [1, 1, 1, 0, 0, 0], ["-", "-", "-", "A02", "A01", "A01"])
    assert found["eer_A01"] == 0.0
    assert found["eer_A02"] == metrics.eer([3, 2, 1], [2.5])
    assert "min_tdcf_2019" not in found


@pytest.mark.parametrize(
    ("bonafide", "spoof", "said"),
    [([], [1.0], "no bona fide trial"), ([1.0], [], "no spoofed trial"), ([1.0, np.nan], [0.0], "1 of 2 bona fide")],
)
def test_scores_that_give_no_error_rate_are_refused(bonafide, spoof, said):
    with pytest.raises(UserError, match=said):
        metrics.eer(bonafide, spoof)


def test_a_turned_asv_system_is_refused():
    with pytest.raises(UserError, match="of no working system"):
        metrics.min_tdcf_2019(det_curve([1.0], [0.0]), AsvRates(0.98, 0.98, 0.5, 0.5))


def test_a_det_plot_is_a_picture():
    png = metrics.det_plot(np.arange(20.0), {"A01": np.arange(-9.0, 9.0), "A02": np.arange(5.0)})
    assert png.startswith(b"\x89PNG") and len(png) > 5000


# Front ends


def noise(count: int, frames: int, seed: int = 0) -> torch.Tensor:
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
def test_each_front_end_gives_the_map_of_its_recipe(name, shape):
    frontend = frontends.build(name, rate_hz=16000, frames=64600, mean="none")
    out = frontend(noise(2, 64600))
    assert out.shape == (2, *shape) and out.dtype == torch.float32
    assert bool(out.isfinite().all())
    assert bool(frontend(torch.zeros(1, 64600)).isfinite().all()), "silence"
    assert not list(frontend.parameters()) and not frontend.state_dict()


def test_the_map_of_one_second_at_8_khz_is_the_one_of_the_published_check():
    assert frontends.build("spec129", rate_hz=8000, frames=8000, mean="none")(noise(1, 8000)).shape == (1, 129, 101)


def numpy_power(wave: np.ndarray, window: np.ndarray, hop: int, fft: int, pre: float) -> np.ndarray:
    """An independent power spectrum, frame by frame, (K, T)."""
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


def numpy_triangles(edges_hz: np.ndarray, fft: int) -> np.ndarray:
    bins = np.arange(fft // 2 + 1) * 16000 / fft
    return np.array([np.interp(bins, edges_hz[i : i + 3], [0, 1, 0]) for i in range(len(edges_hz) - 2)])


def numpy_slopes(c: np.ndarray, reach: int, gain: float) -> np.ndarray:
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
    wave = noise(1, 16000)
    power = numpy_power(wave[0].numpy(), window, hop, fft, 0.97)
    log = np.log10(numpy_triangles(np.linspace(0, high_hz, bands + 2), fft) @ power + 2.220446e-16)
    static = scipy.fft.dct(log, type=2, norm="ortho", axis=0)[:20]
    if name == "lfcc60_nii":
        static[0] = np.log10(power.sum(axis=0) + 2.220446e-16)
    first = numpy_slopes(static, reach, gain)
    expected = np.concatenate([static, first, numpy_slopes(first, reach, gain)])
    found = frontends.build(name, rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_spectrum_and_mel_agree_with_a_numpy_version():
    wave = noise(1, 16000)
    power = numpy_power(wave[0].numpy(), np.hanning(401)[:-1], 160, 512, 0)
    found = frontends.build("spec257", rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(np.exp(found) - power).max() < 1e-5 * power.max()

    def hz_of(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)

    top = 15 + math.log(8) / math.log(6.4) * 27
    edges = np.array([hz_of(top * i / 129) for i in range(130)])
    wave[:, 8000:] = 0  # silence stands at the floor
    power = numpy_power(wave[0].numpy(), np.hanning(513)[:-1], 160, 512, 0)
    mel = 10 * np.log10(numpy_triangles(edges, 512) * (2 / (edges[2:] - edges[:-2]))[:, None] @ power + 1e-30)
    found = frontends.build("mel128", rate_hz=16000, frames=16000, mean="none")(wave)[0].numpy()
    assert np.abs(found - np.maximum(mel - mel.max(), -80)).max() < 1e-3  # decibels


def test_constant_q_agrees_with_the_sum_over_time_that_defines_it():
    wave = noise(1, 64600)
    found = np.exp(frontends.build("cqt432", rate_hz=16000, frames=64600, mean="none")(wave)[0].double().numpy() / 2)
    sound = frontends.pre_emphasised(wave, 0.97)[0].double().numpy()
    quality, frames = 1 / (2 ** (1 / 48) - 1), [0, 7, 130, 252]
    for k in (0, 48, 200, 300, 400, 431):
        hz = 15 * 2 ** (k / 48)
        length = quality * 16000 / hz
        reach = int(length / 2)
        t = np.arange(-reach, reach + 1)
        kernel = (1 + np.cos(2 * np.pi * t / length)) / length * np.exp(-2j * np.pi * hz / 16000 * t)
        padded = np.pad(sound, (reach, reach + 256))
        expected = np.array([abs(padded[256 * n : 256 * n + len(t)] @ kernel) for n in frames])
        assert np.abs(found[k, frames] - expected).max() < 1e-4 * expected.max(), k


def test_a_tone_of_the_constant_q_transform_lies_in_its_bin_and_a_shorter_sound_is_taken():
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


def test_a_front_end_for_another_rate_is_refused_with_those_that_fit():
    with pytest.raises(UserError, match=r"lfcc60 is laid out for 16000 Hz, and sound.rate_hz=8000.*spec129"):
        frontends.build("lfcc60", rate_hz=8000, frames=8000, mean="none")


# Networks


def weights(network: nn.Module) -> int:
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
    assert round((weights(network) + weights(decision)) / 1e6, digits) == published


def test_maps_have_the_published_sizes():
    assert SeNet(bottleneck=False).maps(torch.randn(1, 257, 400)).shape == (1, 128, 9, 13)
    assert SeResNet(layers=[1, 1, 1, 1], dropout=0).maps(torch.randn(1, 60, 404)).shape == (1, 512, 13)
    assert OneClassResNet()(torch.randn(2, 60, 750)).shape == (2, 256)


def test_channels_last_reaches_every_layer():
    network = SeNet(bottleneck=True).to(memory_format=torch.channels_last)
    seen = []

    def note(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        seen.append(out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous())

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d | Block):
            layer.register_forward_hook(note)
    network(torch.randn(2, 129, 101))
    assert len(seen) > 100 and all(seen)


def test_a_batch_of_one_trains():
    norm = DenseNorm(4)
    out = norm(torch.ones(1, 4))
    assert torch.equal(norm.running_mean, torch.zeros(4)) and bool(out.isfinite().all())
    SeResNet(layers=[1, 1, 1, 1], dropout=0)(torch.randn(1, 60, 64)).sum().backward()


def test_attentive_statistics_are_weighted_mean_and_deviation():
    x, weight = torch.randn(2, 5, 30), torch.rand(2, 30).softmax(dim=1)
    found = weighted_statistics(x, weight)
    mean = (x * weight[:, None]).sum(dim=2)
    deviation = ((x - mean[..., None]).square() * weight[:, None]).sum(dim=2).sqrt()
    torch.testing.assert_close(found, torch.cat([mean, deviation], dim=1), rtol=1e-4, atol=1e-5)


# Losses


def test_class_weights_follow_the_counts():
    assert class_weights((50, 50)).tolist() == [1.0, 1.0]
    spoof, bonafide = class_weights((22800, 2580)).tolist()
    assert spoof / (spoof + bonafide) == pytest.approx(0.1, abs=0.002)
    assert (22800 * spoof + 2580 * bonafide) / 25380 == pytest.approx(1.0)


def test_weighted_cross_entropy_is_torchs_times_the_weight_of_the_batch():
    torch.manual_seed(0)
    decision, x, label = CrossEntropy(8, counts=(9, 1)), torch.randn(6, 8), torch.tensor([0, 1, 0, 0, 1, 0])
    theirs = functional.cross_entropy(decision.logits(x), label, weight=decision.weight_2)
    torch.testing.assert_close(decision(x, label), theirs * decision.weight_2[label].mean())
    halves = (decision(x[:2], label[:2]) * 2 + decision(x[2:], label[2:]) * 4) / 6
    torch.testing.assert_close(decision(x, label), halves)


def test_focal_loss_turns_away_from_what_is_easy():
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
    assert bool((decision.calls_bonafide(x) == (label == 1)).all())


def test_margins_are_those_of_the_papers():
    torch.manual_seed(0)
    x, label = torch.randn(4, 6), torch.tensor([0, 1, 1, 0])
    am = AmSoftmax(6, scale=20, margin=0.9)
    cosine = functional.cosine_similarity(x[:, None], am.directions_2D[None], dim=2)
    right, wrong = cosine[torch.arange(4), label], cosine[torch.arange(4), 1 - label]
    by_hand = -torch.log((20 * (right - 0.9)).exp() / ((20 * (right - 0.9)).exp() + (20 * wrong).exp()))
    torch.testing.assert_close(am(x, label), by_hand.mean())
    assert torch.equal(am.score(x), am._cosines(x)[:, 1])
    oc = OcSoftmax(6, scale=20, margin_bonafide=0.9, margin_spoof=0.2)
    cosine = functional.cosine_similarity(x, oc.direction_D[None])
    inside = torch.stack([cosine[0] - 0.2, 0.9 - cosine[1], 0.9 - cosine[2], cosine[3] - 0.2])
    torch.testing.assert_close(oc(x, label), torch.log(1 + torch.exp(20 * inside)).mean())


# Augmentation


def row_noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["series", "parallel"])
def test_what_happens_to_a_sound_depends_on_its_own_numbers_alone(kind):
    wave, u = noise(4, 8000), row_noise(4)
    both = augment.rawboost(wave, u, chance=1, kind=kind, rate_hz=8000)
    alone = augment.rawboost(wave[2:3], u[2:3], chance=1, kind=kind, rate_hz=8000)
    torch.testing.assert_close(both[2:3], alone, rtol=0, atol=1e-6)
    assert not torch.allclose(both[0], wave[0], atol=1e-3)
    assert float(both.abs().max()) <= 1
    other = augment.rawboost(wave, row_noise(4, seed=1), chance=1, kind=kind, rate_hz=8000)
    assert not torch.allclose(both, other, atol=1e-3)


def test_a_rolled_sound_starts_elsewhere_and_holds_the_same_samples():
    wave, u = noise(5, 800), row_noise(5)
    rolled = augment.roll(wave, u)
    for i in range(5):
        start = int(float(u[i, augment.Slot.START]) * 800)
        assert torch.equal(rolled[i], torch.roll(wave[i], -start))
    u[:, augment.Slot.START] = 1 - 2**-24
    assert torch.equal(augment.roll(wave, u), torch.roll(wave, 1, dims=1))


def test_a_chance_is_a_share_of_the_sounds_and_zero_leaves_all_alone():
    wave, u = noise(400, 800), row_noise(400)
    for change in (
        lambda chance: augment.rawboost(wave, u, chance=chance, kind="series", rate_hz=8000),
        lambda chance: augment.codec(wave, u, chance=chance, rate_hz=8000),
    ):
        assert torch.equal(change(0.0), wave)
        share = float((change(0.3) != wave).any(dim=1).float().mean())
        assert share == pytest.approx(0.3, abs=0.07)  # three standard deviations of 400 draws


def test_stationary_noise_has_the_ratio_that_was_drawn():
    wave, u = noise(20, 8000), row_noise(20)
    added = augment._stationary(wave, u, 8000) - wave
    ratio = 10 * torch.log10(wave.square().sum(dim=1) / added.square().sum(dim=1))
    torch.testing.assert_close(ratio, 10 + 30 * u[:, augment.Slot.SNR], rtol=0, atol=0.02)


def test_telephone_laws_keep_a_sound_within_their_steps():
    wave = torch.linspace(-1, 1, 2001)
    for law in (augment._mu_law, augment._a_law):
        error = (law(wave) - wave).abs()
        assert float(error.max()) < 0.03 and float(error[950:1051].max()) < 0.002  # finer where it is soft


def test_a_codec_cuts_the_band():
    tone = 0.5 * torch.sin(2 * math.pi * 7800 * torch.arange(16000) / 16000)[None]
    u = row_noise(1)
    u[:, augment.Slot.CODEC_CUT] = 0.0
    assert float(augment.codec(tone, u, chance=1, rate_hz=16000).abs().max()) < 0.01


def test_masks_are_no_wider_than_asked_and_stand_at_the_mean():
    maps, u = torch.randn(300, 60, 404) + 5, row_noise(300)
    masked = augment.mask(maps, u, chance=1, bins=20, frames=50)
    hidden = masked != maps
    bins, frames = hidden.all(dim=2).sum(dim=1), hidden.all(dim=1).sum(dim=1)
    assert (int(bins.min()), int(bins.max())) == (0, 20)
    assert (int(frames.min()), int(frames.max())) == (0, 50)
    mean = maps.mean(dim=(1, 2), keepdim=True).expand_as(maps)
    assert torch.equal(masked[hidden], mean[hidden])
    assert torch.equal(augment.mask(maps, u, chance=0, bins=20, frames=50), maps)


def test_hashed_numbers_are_even_and_unrelated():
    u = augment.uniforms(row_noise(3), augment.Stream.COLOUR, 100_000)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert u.mean(dim=1).tolist() == pytest.approx([0.5] * 3, abs=0.004)
    assert float((torch.corrcoef(u) - torch.eye(3)).abs().max()) < 0.015
    assert not torch.equal(u, augment.uniforms(row_noise(3), augment.Stream.FILTERS, 100_000))


# The module


def data_of(labels: list[int], attacks: list[str], sets: list[str], *, rates: int = 8000, asv: str = "{}") -> DataInfo:
    """Return columns as `samples` makes them."""
    columns: dict[str, np.ndarray] = {"label": np.array(labels), "source_rate_hz": np.full(len(labels), rates)}
    vocabulary: dict[str, list[str]] = {}
    for name, values in (("attack", attacks), ("set", sets)):
        names, columns[name] = np.unique(values, return_inverse=True)
        vocabulary[name] = names.tolist()
    return DataInfo(columns, vocabulary, np.flatnonzero(np.array(sets) == "train"), {"asv": asv})


def small_config(**sections: dict[str, object]) -> Config:
    config = Config()
    config.sound.frames, config.sound.rate_hz = 4000, 8000
    config.frontend.name, config.model.name = "spec129", "senet34"
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


def small_module(**sections: dict[str, object]) -> AntispoofModule:
    torch.manual_seed(0)
    data = data_of([1, 0] * 8, ["-", "A01"] * 8, ["train"] * 8 + ["val"] * 8)
    return build(small_config(**sections), data)


def batch(count: int, frames: int = 4000) -> dict[str, torch.Tensor]:
    return {
        "wave": noise(count, frames),
        "label": torch.arange(count) % 2,
        "sample_id": torch.arange(count),
        "noise": row_noise(count),
    }


def test_maps_are_made_in_float32_whatever_the_precision():
    module, inputs = small_module(frontend={"name": "lfcc60"}, sound={"rate_hz": 16000}).eval(), batch(4)
    plain = module.maps(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.maps(inputs), plain)
        rows = module.predict(inputs)
    assert plain.dtype == rows["score"].dtype == torch.float32


def test_nothing_is_random_in_evaluation_and_no_label_is_needed():
    module = small_module(disturb={"rawboost": 1.0, "codec": 1.0, "mask": 1.0})
    inputs = batch(4)
    changed, plain = module.train().maps(inputs), module.eval().maps(inputs)
    assert not torch.allclose(changed, plain, atol=1e-2)
    module.frontend(inputs["wave"])
    assert torch.equal(plain, module.frontend(inputs["wave"]))
    del inputs["label"], inputs["noise"]
    assert torch.equal(module.predict(inputs)["score"], module.predict(inputs)["score"])


def test_every_weight_learns():
    for sections in (
        {},
        {"loss": {"name": "oc_softmax"}},
        {"model": {"name": "seresnet", "layers": [1, 1, 1, 1]}, "loss": {"name": "am_softmax"}},
    ):
        module = small_module(**sections)
        module(batch(4))["loss"].backward()
        assert all(weight.grad is not None for weight in module.parameters())


def test_ddp_sends_batch_statistics_and_no_windows_or_filters():
    module = small_module(frontend={"name": "spec129"})
    sent = {name for name, _ in module.named_buffers()} - set(module._ddp_params_and_buffers_to_ignore)
    assert sent == {name for name in module.state_dict() if name not in dict(module.named_parameters())}
    assert "frontend.maps.power.window" not in sent and "network.stem.1.running_mean" in sent


def test_gradient_checkpointing_changes_nothing():
    module, inputs = small_module(), batch(6)
    module(inputs)["loss"].backward()
    before = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    assert enable_activation_checkpointing(module) == 16
    module(inputs)["loss"].backward()
    assert all(torch.equal(a, weight.grad) for a, weight in zip(before, module.parameters(), strict=True))


def test_the_direction_of_one_class_softmax_has_a_rate_of_its_own():
    module = small_module(loss={"name": "oc_softmax", "lr_scale": 3.0})
    groups = module.parameter_groups(0.1)
    assert groups[-1]["params"] == [module.decision.direction_D]
    assert (groups[-1]["weight_decay"], groups[-1]["lr_scale"]) == (0.0, 3.0)
    held = [weight for group in groups for weight in group["params"]]
    assert len(held) == len({id(weight) for weight in held}) == len(list(module.parameters()))


def test_a_set_is_scored_with_its_own_speaker_verification_and_no_other():
    sets = ["train", "train", "val", "val", "test_2019", "test_2019"]
    data = data_of([1, 0] * 3, ["-", "A01"] * 3, sets, asv=json.dumps({"val": vars(ASV)}))
    module = build(small_config(), data)
    read_run_metrics = {
        name: module.score({"score": np.array([1.0, -1.0]), "sample_id": np.array(ids)})
        for name, ids in (("val", [2, 3]), ("test_2019", [4, 5]))
    }
    assert read_run_metrics["val"]["min_tdcf_2021"] == pytest.approx(0.0627, abs=1e-4)
    assert "min_tdcf_2021" not in read_run_metrics["test_2019"]
    assert module.monitor == ("eer", "min")
    shown = module.report_figures({"score": np.array([1.0, -1.0]), "sample_id": np.array([2, 3])})
    assert len(shown) == 2 and all(png.startswith(b"\x89PNG") for png in shown.values())


def test_a_network_that_the_front_end_cannot_feed_is_refused():
    with pytest.raises(UserError, match=r"resnet18_oc takes 60 bins.*Use frontend.name=lfcc60"):
        small_module(model={"name": "resnet18_oc"})
    with pytest.raises(UserError, match=r"model.layers=\[2\]: expected four counts"):
        small_module(model={"name": "seresnet", "layers": [2]})


def test_files_of_another_rate_are_told_of_and_a_difference_between_the_classes_is_warned_of(caplog):
    from loguru import logger

    said: list[str] = []
    handle = logger.add(lambda message: said.append(str(message)), format="{level} {message}")
    data = data_of([1, 0] * 2, ["-", "A01"] * 2, ["train"] * 4)
    data.columns["source_rate_hz"][[1, 3]] = 44100
    build(small_config(), data)
    logger.remove(handle)
    assert "INFO resampled to 8000 Hz when packed: 2 of 44100 Hz\n" in said
    assert any("0% of bona fide and 100% of spoofed files were resampled" in line for line in said)


def test_thirty_two_utterances_can_be_learned_by_heart_and_two_runs_give_equal_bits():
    """Drawn speech against copies that keep its phases: 24 steps, twice; 10 s."""
    waves = []
    for take in range(16):
        speech = draw_speech(0, take % 4, take)
        made = vocoders.copy(speech, "A04", rate_hz=8000, rng=np.random.default_rng(0))
        waves += [np.resize(x, 2400) for x in (speech, made)]
    inputs = {
        "wave": torch.tensor(np.array(waves), dtype=torch.float32),
        "label": torch.tensor([1, 0] * 16),
        "sample_id": torch.arange(32),
    }
    found = []
    for _ in range(2):
        module = small_module()
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
        for _ in range(24):
            optimizer.zero_grad()
            module(inputs)["loss"].backward()
            optimizer.step()
        found.append(module.eval().predict(inputs)["score"].detach().numpy())
    assert metrics.eer(found[0][::2], found[0][1::2]) == 0.0
    assert np.array_equal(found[0], found[1])


# Protocols and raw folders


def write_sound(path: Path, *, rate_hz: int = 16000, seconds: float = 0.1, channels: int = 1, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pcm = np.random.default_rng(seed).integers(-3000, 3000, (int(seconds * rate_hz), channels)).astype(np.int16)
    soundfile.write(path, pcm, rate_hz, subtype="PCM_16")
    return path


def protocol(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


CUT = Cut(val_share=0.25, test_share=0.25, seed=0)


def asvspoof_2019(raw: Path) -> Path:
    """Write a small database in the form of ASVspoof 2019 LA, with ASV scores."""
    for part, end, letter in (("train", "trn", "T"), ("dev", "trl", "D"), ("eval", "trl", "E")):
        lines = []
        for i in range(4):
            attack, key = ("-", "bonafide") if i % 2 else (f"A{i + 1:02d}", "spoof")
            lines.append(f"LA_00{i:02d} LA_{letter}_{i:07d} - {attack} {key}")
            write_sound(raw / f"ASVspoof2019_LA_{part}/flac/LA_{letter}_{i:07d}.flac", seed=i)
        protocol(raw / f"ASVspoof2019_LA_cm_protocols/ASVspoof2019.LA.cm.{part}.{end}.txt", *lines)
    for part, shift in (("dev", 0.0), ("eval", 9.0)):
        protocol(
            raw / f"ASVspoof2019_LA_asv_scores/ASVspoof2019.LA.asv.{part}.gi.trl.scores.txt",
            *(f"bonafide target {x}" for x in (3.0, 4.0, 5.0)),
            *(f"bonafide nontarget {x}" for x in (-3.0, -2.0)),
            *(f"A07 spoof {x - shift}" for x in (-2.5, 3.5)),
        )
    return raw


def test_asvspoof_2019_is_read(tmp_path):
    found = utterances(asvspoof_2019(tmp_path), CUT)
    assert Counter(one.set for one in found) == {"train": 4, "val": 4, "test_2019": 4}
    assert found[0].key == "ASVspoof2019_LA_train/flac/LA_T_0000000.flac"
    assert (found[0].bonafide, found[0].attack, found[0].speaker) == (False, "A01", "LA_0000")
    assert (found[1].bonafide, found[1].attack) == (True, "-")
    assert utterances(tmp_path.parent, CUT)[0].path == found[0].path, "a folder around it"


def test_each_set_has_its_own_asv_scores_and_not_those_of_another(tmp_path):
    artifacts = json.loads(fit_artifacts(asvspoof_2019(tmp_path), Config())["asv"])
    assert artifacts["val"]["false_alarm_spoof"] == 0.5 and artifacts["test_2019"]["false_alarm_spoof"] == 0.0
    assert sorted(artifacts) == ["test_2019", "val"]


def test_asvspoof_2021_is_read_phase_by_phase_beside_2019(tmp_path):
    asvspoof_2019(tmp_path / "LA")
    for track, fields in (("LA", "alaw ita_tx A07 spoof notrim"), ("DF", "nocodec asvspoof A14 spoof notrim")):
        more = "" if track == "LA" else " traditional_vocoder - - - -"
        lines = [f"LA_0009 {track}_E_{i:07d} {fields} {('eval', 'progress')[i % 2]}{more}" for i in range(2)]
        lines.append(
            f"LA_0009 {track}_E_0000009 {fields.replace('A07', '-').replace('spoof n', 'bonafide n')} eval{more}"
        )
        protocol(tmp_path / f"keys/{track}/CM/trial_metadata.txt", *lines)
        write_sound(tmp_path / f"ASVspoof2021_{track}_eval/flac/{track}_E_0000000.flac")
    found = [one for one in utterances(tmp_path, CUT) if "2021" in one.set]
    assert Counter(one.set for one in found) == {
        "test_2021_la_eval": 2, "test_2021_la_progress": 1, "test_2021_df_eval": 2, "test_2021_df_progress": 1,
    }  # fmt: skip
    assert (found[0].attack, found[0].bonafide, found[2].bonafide) == ("A07", False, True)
    assert found[0].path is not None and found[2].path is None, "the last one is listed, but not there"


@pytest.mark.parametrize(
    ("bona", "fake"),
    [
        ("T_4850 T_0000000001 F - - - AC3 bonafide bonafide -", "T_4850 T_0000000002 F - - - AC3 A05 spoof -"),
        ("T_4850 T_0000000001 M - - bonafide", "T_4850 T_0000000002 M - A05 spoof"),
    ],
)
def test_asvspoof_5_is_read_wherever_the_key_stands(tmp_path, bona, fake):
    protocol(tmp_path / "ASVspoof5.train.tsv", bona, fake)
    protocol(tmp_path / "ASVspoof5.dev.track_1.tsv", bona.replace("T_00", "D_00").replace(" ", "\t"))
    write_sound(tmp_path / "flac_T/T_0000000002.flac")
    found = utterances(tmp_path, CUT)
    assert [(one.set, one.bonafide, one.attack, one.path is None) for one in found] == [
        ("train", True, "-", True), ("train", False, "A05", False), ("val", True, "-", True),
    ]  # fmt: skip


def test_fake_or_real_folders_are_read(tmp_path):
    for part in ("training", "validation", "testing"):
        for name in ("real", "fake"):
            write_sound(tmp_path / "for-2sec" / part / name / "a.wav")
    found = utterances(tmp_path, CUT)
    assert [(one.set, one.bonafide) for one in found] == [
        ("train", True), ("train", False), ("val", True), ("val", False), ("test", True), ("test", False),
    ]  # fmt: skip
    assert utterances(tmp_path / "for-2sec", CUT)[0].key == "training/real/a.wav"


def test_an_own_folder_is_cut_by_speaker_and_attacks_are_its_folders(tmp_path):
    for speaker in range(24):
        for i in range(2):
            write_sound(tmp_path / f"bonafide/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
            write_sound(tmp_path / f"spoof/TTS/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
    found = utterances(tmp_path, CUT)
    sets = {one.speaker: {other.set for other in found if other.speaker == one.speaker} for one in found}
    assert len(found) == 96 and len(sets) == 24 and all(len(names) == 1 for names in sets.values())
    assert {one.set for one in found} == {"train", "val", "test"}
    assert {one.attack for one in found if not one.bonafide} == {"TTS"}


def test_a_table_may_say_everything(tmp_path):
    protocol(tmp_path / "protocol.csv", "path,label,attack,set", "x/a.wav,real,,train", "b.flac,0,VC,test_phone")
    write_sound(tmp_path / "x/a.wav")
    one, other = utterances(tmp_path, CUT)
    assert (one.key, one.bonafide, one.attack, one.set) == ("x/a.wav", True, "-", "train")
    assert (other.bonafide, other.attack, other.set, other.path) == (False, "VC", "test_phone", None)


@pytest.mark.parametrize(
    ("name", "lines", "said"),
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
def test_a_bad_protocol_is_refused_with_the_place(tmp_path, name, lines, said):
    with pytest.raises(UserError, match=said):
        trials(protocol(tmp_path / name, *lines))


def test_a_folder_without_training_data_or_keys_says_what_to_type(tmp_path):
    write_sound(tmp_path / "ASVspoof2021_LA_eval/flac/LA_E_0000000.flac")
    with pytest.raises(UserError, match=r"its keys are missing.*trainyard predict"):
        utterances(tmp_path, CUT)
    protocol(tmp_path / "keys/LA/CM/trial_metadata.txt", "LA_0009 LA_E_0000000 alaw ita_tx A07 spoof notrim eval")
    with pytest.raises(UserError, match=r"No utterance is left to train on.*test_2021_la_eval"):
        utterances(tmp_path, CUT)


def test_bad_asv_scores_are_refused_with_the_place(tmp_path):
    for lines, said in (
        (["bonafide target 1.0", "bonafide target"], "line 2: expected 'source target"),
        (["bonafide target x"], "line 1: expected"),
        (["bonafide target 1.0", "bonafide nontarget 0.0"], "no ASV spoof trial"),
    ):
        with pytest.raises(UserError, match=said):
            asv_rates(protocol(tmp_path / "asv.txt", *lines))


# Files


RULE = Rule(rate_hz=16000, encoded=False, resample=True, mix=False, min_s=0.05)


def wave_of(loaded: dict[str, object]) -> bytes | np.ndarray:
    sound = loaded["wave"]
    assert isinstance(sound, Audio)
    return sound.data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but there is no such file"),
        ("empty", "the file is empty"),
        ("text", "no complete sound of a known kind"),
        ("no frames", "it holds no sound: 0 frames"),
        ("short", r"160 frames at 16000 Hz are no utterance: expected 0.05 s \(packing.min_s\)"),
        ("stereo", r"2 channels, expected one: convert it.*packing.stereo=mix"),
        ("half a flac", "cut off|no complete sound"),
        ("broken flac", "cut off|no complete sound"),
        ("half a wav", "cut off: .* its header promises more"),
        ("rate", r"8000 Hz, expected 16000 \(sound.rate_hz\): convert it, or packing.rate=resample"),
    ],
)
def test_a_file_that_is_no_utterance_is_refused_with_the_reason(tmp_path, content, reason):
    kind = "wav" if content in ("half a wav", "no frames") else "flac"
    seconds = {"no frames": 0.0, "short": 0.01}.get(content, 0.5)
    path = write_sound(
        tmp_path / f"a.{kind}",
        seconds=seconds,
        channels=1 + (content == "stereo"),
        rate_hz=8000 if content == "rate" else 16000,
    )
    data = path.read_bytes()
    broken = data[: len(data) // 2] + bytes(len(data) // 4) + data[len(data) * 3 // 4 :]
    replaced = {"empty": b"", "text": b"hello", "half a flac": data[: len(data) // 2], "broken flac": broken}
    path.write_bytes(replaced.get(content, data[: len(data) // 2] if content == "half a wav" else data))
    rule = Rule(16000, False, content != "rate", False, 0.05)
    with pytest.raises(BadRecord, match=reason):
        load(None if content == "missing" else path, rule)


def test_files_of_another_rate_width_or_channel_become_16_bit_mono(tmp_path):
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, tone], axis=1), 8000, subtype="FLOAT")
    found = load(tmp_path / "a.wav", Rule(16000, False, True, True, 0.05))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    data = wave_of(found)
    assert isinstance(data, np.ndarray) and data.dtype == np.int16 and len(data) == 16000
    assert np.abs(data / 32768 - expected)[200:-200].max() < 2e-3
    assert found["source_rate_hz"] == 8000
    encoded = wave_of(load(tmp_path / "a.wav", Rule(16000, True, True, True, 0.05)))
    assert isinstance(encoded, bytes)
    assert np.array_equal(soundfile.read(io.BytesIO(encoded), dtype="int16")[0], data)


def test_plain_files_are_kept_byte_for_byte_or_as_their_samples(tmp_path):
    for kind in ("wav", "flac"):
        path = write_sound(tmp_path / f"a.{kind}")
        assert wave_of(load(path, Rule(16000, True, True, False, 0.05))) == path.read_bytes()
        assert np.array_equal(wave_of(load(path, RULE)), soundfile.read(path, dtype="int16")[0])


@pytest.mark.parametrize("store", ["pcm", "encoded"])
def test_packed_speech_reads_as_the_first_part_in_evaluation_and_a_random_one_in_training(tmp_path, store):
    config = small_config(packing={"store": store})
    config.sound.rate_hz, config.sound.frames = 16000, 1000
    raw = asvspoof_2019(tmp_path / "raw")
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
    with pytest.raises(UserError, match="the val set holds 2 bona fide and 0 spoofed utterances"):
        splits(columns, {"set": ["train", "val"]}, Config())
    with pytest.raises(UserError, match="the val set holds 0 bona fide and 0 spoofed"):
        splits({name: values[:2] for name, values in columns.items()}, {"set": ["train"]}, Config())


def test_a_folder_to_score_needs_no_protocol(tmp_path):
    write_sound(tmp_path / "a/one.wav")
    write_sound(tmp_path / "two.flac", rate_hz=8000)
    (tmp_path / "notes.txt").write_text("no sound")
    found = list(unlabelled(tmp_path, Config(), {"asv": "{}"}))
    assert [sample.key for sample in found] == ["a/one.wav", "two.flac"]
    assert [sample.key for sample in unlabelled(tmp_path / "two.flac", Config(), {})] == ["two.flac"]
    assert len(wave_of(found[1].load({}))) == 1600
    rows = {"score": np.array([0.5, -1.5], np.float32), "sample_id": np.array([0, 1])}
    prediction_rows = list(small_module().prediction_rows(rows, [sample.key for sample in found]))
    assert prediction_rows == [
        {"path": "a/one.wav", "utterance": "one", "score": 0.5},
        {"path": "two.flac", "utterance": "two", "score": -1.5},
    ]


# Copies and synthetic speech


def test_a_transform_and_back_is_the_sound_itself():
    wave = draw_speech(0, 1, 2)
    assert np.abs(vocoders.synthesis(vocoders.analysis(wave), len(wave)) - wave).max() < 1e-12


@pytest.mark.parametrize("kind", list(vocoders.KINDS))
def test_a_copy_is_as_long_and_loud_as_the_sound_and_not_the_same(kind):
    wave = draw_speech(0, 1, 2)
    made = [vocoders.copy(wave, kind, rate_hz=8000, rng=np.random.default_rng(1)) for _ in range(2)]
    assert np.array_equal(made[0], made[1])
    assert len(made[0]) == len(wave)
    assert np.sqrt(np.mean(made[0] ** 2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=0.02)
    magnitude, copied = (np.abs(vocoders.analysis(x)) for x in (wave, made[0]))
    error = np.sum((magnitude - copied) ** 2) / np.sum(magnitude**2)
    assert 0.005 < error < 0.5


def test_griffin_and_lim_bring_the_magnitudes_nearer_with_every_round():
    magnitude = np.abs(vocoders.analysis(draw_speech(0, 3, 0)))
    errors = []
    for rounds in (1, 4, 32):
        spectrum = vocoders.griffin_lim(magnitude, rounds, np.random.default_rng(0))
        found = np.abs(vocoders.analysis(vocoders.synthesis(spectrum, (len(magnitude) - 1) * vocoders.HOP)))
        errors.append(float(np.sum((found - magnitude) ** 2)))
    assert errors[0] > errors[1] > errors[2]


def test_the_recordings_of_fsdd_make_the_set_of_the_specification():
    from trainyard.config import compose

    raw = shared_audio("fsdd")
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
    ("packing", "said"),
    [
        ({"copies": ["A09"]}, "packing.copies: 'A09' is none of A01, A02, A03, A04"),
        ({"copies": ["A01"], "unseen": ["A02"]}, "packing.unseen: 'A02' is none of A01"),
        ({"copies": ["A01"], "recordings": "("}, "no regular expression"),
        ({"copies": ["A01"], "recordings": ".*"}, r"expected a group \(\?P<speaker>"),
        ({"copies": ["A01"], "val_speakers": ["eve"]}, "speaker 'eve' has no recording in .* Speakers: ann, bob"),
    ],
)
def test_copies_that_cannot_be_made_are_refused(tmp_path, packing, said):
    for name in ("ann_1", "bob_1"):
        write_sound(tmp_path / f"{name}.wav")
    with pytest.raises(UserError, match=said):
        list(samples(tmp_path, small_config(packing=packing)))


def test_synthetic_speech_is_the_same_whoever_draws_it_and_speakers_are_in_one_set(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=51, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.wav"))
    assert len(files) == 51
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    found = utterances(tmp_path / "once", CUT)
    assert {(one.set, one.attack) for one in found} >= {("val", "A02"), ("test", "A03"), ("test", "A04")}
    assert not {one.attack for one in found if one.set != "test"} & {"A03", "A04"}
    sets = {one.speaker: {other.set for other in found if other.speaker == one.speaker} for one in found}
    assert all(len(names) == 1 for names in sets.values())
    with pytest.raises(UserError, match="already holds files"):
        synthesize(tmp_path / "once", count=51, seed=3)
    with pytest.raises(UserError, match="expected 51 or more"):
        synthesize(tmp_path / "few", count=50, seed=3)


def test_a_long_synthetic_set_has_every_speaker_and_the_kinds_in_proportion():
    count = Counter((item.role, item.kind) for item in items(3400))
    assert count["train", "-"] == count["train", "A01"] == 600
    assert count["val", "-"] == count["test", "A04"] == 200


# Score files


def run(*words: str) -> int:
    """Run one of the family's verbs as the command line does."""
    parser = argparse.ArgumentParser()
    commands.add(parser.add_subparsers())
    args = parser.parse_args(words)
    return int(args.command(args))


KEYS = ["S1 U_1 - - bonafide", "S1 U_2 - A01 spoof", "S2 U_3 - - bonafide", "S2 U_4 - A02 spoof"]
RIGHT = ["U_1 - bonafide 2.0", "U_2 A01 spoof -1.0", "U_3 - bonafide 1.0", "U_4 A02 spoof -2.0"]


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (RIGHT, 0, "eer            0.0000 %"),
        (["U_1 2.0", "U_2 -1", "U_3 1e0", "U_4 -2"], 0, "4 scores in the form of asv2021"),
        (["filename\tcm-score", "U_1\t2", "U_2\t-1", "U_3\t1", "U_4\t-2"], 0, "in the form of asv5"),
        (RIGHT[:3], 1, "1 of 4 utterances have no score: U_4"),
        ([*RIGHT, RIGHT[1]], 1, "1 utterances have more than one score: U_2"),
        ([*RIGHT, "U_5 - bonafide 0"], 1, "1 utterances are not in the protocol: U_5"),
        ([line.replace("-1.0", "nan") for line in RIGHT], 1, "1 scores are not finite numbers: U_2"),
        ([RIGHT[0].replace("- bona", "A01 bona").replace("bonafide", "spoof"), *RIGHT[1:]], 1, "1 keys differ from"),
        (
            ["U_1 -2.0", "U_2 1.0", "U_3 -1.0", "U_4 2.0"],
            1,
            "turned round: high must mean bona fide. The EER is 100.00 %",
        ),
        (["U_1 3", "U_2 3", "U_3 3", "U_4 3"], 1, "all scores are 3"),
        (["U_1 0.9", "U_2 0.1", "U_3 0.8", "U_4 0.2"], 0, "probabilities and no log-odds"),
        (RIGHT[::-1], 0, "the order is not that of the protocol"),
    ],
)
def test_a_score_file_is_told_right_from_wrong(tmp_path, capsys, lines, code, said):
    path = protocol(tmp_path / "scores.txt", *lines)
    assert run("score-check", str(path), "--protocol", str(protocol(tmp_path / "keys.txt", *KEYS))) == code
    assert said in capsys.readouterr().out


def test_a_score_file_that_is_not_there_or_broken_says_what_to_type(tmp_path):
    with pytest.raises(UserError, match=r"away.txt: no such score file\. Expected lines of .*score-file write one"):
        run("score-check", str(tmp_path / "away.txt"))
    broken = protocol(tmp_path / "scores.txt", RIGHT[0], "U_2 A01 spoof")
    with pytest.raises(
        UserError, match=r"scores.txt, line 2: expected 4 fields .*, found 3: .* write the file again: "
    ):
        run("score-check", str(broken))


def test_a_score_file_of_a_known_set_that_lacks_a_trial_is_wrong_without_any_protocol(tmp_path, capsys):
    text = (shared_audio("asvspoof2019_scores") / SCORES).read_text().splitlines()
    gone = next(i for i, line in enumerate(text) if " bonafide " in line)
    path = protocol(tmp_path / "scores.txt", *text[:gone], *text[gone + 1 :])
    assert run("score-check", str(path)) == 1
    assert (
        "7,354 bona fide and 63,882 spoofed trials, where the ASVspoof 2019 LA evaluation set"
        in capsys.readouterr().out
    )


def test_error_rates_of_2021_are_of_the_evaluation_phase(tmp_path, capsys):
    kinds = (("- bonafide", "eval"), ("A07 spoof", "eval"), ("A07 spoof", "progress"), ("- bonafide", "hidden"))
    keys = [f"S LA_E_{i} alaw ita_tx {key} notrim {phase}" for i, (key, phase) in enumerate(kinds)]
    path = protocol(tmp_path / "scores.txt", "LA_E_0 1.0", "LA_E_1 0.0", "LA_E_2 5.0", "LA_E_3 -5.0")
    assert run("score-check", str(path), "--protocol", str(protocol(tmp_path / "trial_metadata.txt", *keys))) == 0
    said = capsys.readouterr().out
    assert "of the phase eval" in said and "eer            0.0000 %" in said and "bonafide       1" in said


def test_a_score_file_without_keys_says_that_it_needs_a_protocol(tmp_path, capsys):
    assert run("score-check", str(protocol(tmp_path / "scores.txt", "U_1 2.0"))) == 0
    assert "no keys: give --protocol" in capsys.readouterr().out
    assert run("score-check", str(protocol(tmp_path / "scores.txt", "LA_D_1 2.0", "LA_D_2 1.0"))) == 1
    assert "2 trials, where the ASVspoof 2019 LA development set has 24,844 trials" in capsys.readouterr().out


def test_a_list_of_names_tells_what_is_missing_and_the_files_own_keys_are_believed(tmp_path, capsys):
    names = protocol(tmp_path / "names.txt", "U_1", "U_2", "U_3", "U_4")
    assert run("score-check", str(protocol(tmp_path / "scores.txt", *RIGHT)), "--protocol", str(names)) == 0
    assert "eer            0.0000 %" in capsys.readouterr().out
    assert run("score-check", str(protocol(tmp_path / "scores.txt", *RIGHT[1:])), "--protocol", str(names)) == 1
    assert "1 of 4 utterances have no score: U_1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["U_1 2.0", "U_2"], r"line 2: expected 2 fields \(utterance score\), found 1"),
        ([*RIGHT, "U_5 1.0"], r"line 5: expected 4 fields \(utterance attack key score\), found 2"),
        (["U_1 high"], "line 1: 'high' is no score"),
        (["filename\tcm-score"], "the score file is empty"),
        (["U_1 - real 1.0"], "line 1: key 'real': expected bonafide or spoof"),
        ([], "the score file is empty"),
    ],
)
def test_a_file_that_is_no_score_file_is_refused_with_the_place(tmp_path, lines, said):
    with pytest.raises(UserError, match=said):
        scores.read(protocol(tmp_path / "scores.txt", *lines))


@pytest.mark.parametrize("form", scores.FORMS)
def test_what_is_written_reads_back_and_is_right(tmp_path, form):
    lines = [Line("U_1", 2.25, True), Line("U_2", -0.1, False, "A01")]
    scores.write(tmp_path / "scores.txt", lines, form=form)
    found, read = scores.read(tmp_path / "scores.txt")
    assert found == form
    assert read == (lines if form == "asv2019" else [Line(line.utterance, line.score) for line in lines])


def test_predictions_become_an_official_score_file_in_the_order_of_the_protocol(tmp_path, capsys):
    table, keys = tmp_path / "out.csv", protocol(tmp_path / "keys.txt", *KEYS)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "utterance", "score"])
        writer.writeheader()
        for i in (4, 2, 3, 1):
            writer.writerow({"path": f"x/U_{i}.flac", "utterance": f"U_{i}", "score": i % 2})
    out = tmp_path / "scores.txt"
    assert run("score-file", str(table), str(out), "--form", "asv2019", "--protocol", str(keys)) == 0
    assert out.read_text().splitlines()[:2] == ["U_1 - bonafide 1.0", "U_2 A01 spoof 0.0"]
    assert run("score-check", str(out), "--protocol", str(keys)) == 0
    capsys.readouterr()
    with pytest.raises(UserError, match=r"has a key on every line. Give the protocol"):
        run("score-file", str(table), str(out), "--form", "asv2019")
    protocol(keys, *KEYS, "S3 U_9 - - bonafide")
    with pytest.raises(UserError, match=r"1 of the 5 utterances of .* have no score, such as U_9"):
        run("score-file", str(table), str(out), "--protocol", str(keys))


def test_a_benchmark_against_librosa_that_is_not_there_is_refused_with_the_way_to_make_it(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"no environment with librosa there\. Make one: python3 -m venv \.venv-librosa"
    ):
        run("bench-frontends", "--peers", str(tmp_path), "--results", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
