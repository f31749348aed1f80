"""Metrics: DET curves, EER, t-DCF, DCF and CLLR."""

import numpy as np
import pytest

from tests.cases.antispoof import ASV, ASV_EVAL, SCORES, find_shared_audio
from trainyard.errors import UserError

from . import metrics, scores
from .metrics import AsvRates, compute_det_curve
from .protocols import read_asv_rates


@pytest.mark.slow
def test_the_scores_of_a_published_system_have_its_published_error_rates() -> None:
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


def test_the_asv_threshold_of_the_2019_scores_is_the_known_one() -> None:
    groups: dict[str, list[float]] = {"target": [], "nontarget": [], "spoof": []}
    for line in (find_shared_audio("asvspoof2019_scores") / ASV_EVAL).read_text().splitlines():
        _, kind, score = line.split()
        groups[kind].append(float(score))
    assert [len(group) for group in groups.values()] == [5370, 33327, 63882]
    rate, threshold = compute_det_curve(groups["target"], groups["nontarget"]).eer()
    assert rate == pytest.approx(0.0245778, abs=1e-7)
    assert threshold == pytest.approx(-5.680051, abs=1e-6)


def test_a_det_curve_passes_one_trial_at_a_time_and_bona_fide_first_among_equal_scores() -> None:
    curve = compute_det_curve([1.0, 2.0, 4.0, 5.0], [0.0, 2.0])
    assert curve.thresholds.tolist() == [-0.001, 0.0, 1.0, 2.0, 2.0, 4.0, 5.0]
    assert curve.frr.tolist() == [0, 0, 0.25, 0.5, 0.5, 0.75, 1]
    assert curve.far.tolist() == [1, 0.5, 0.5, 0.5, 0, 0, 0]
    assert curve.eer() == (0.5, 2.0)
    rate, threshold = compute_det_curve([1, 3, 5, 7, 9], [2, 4, 6]).eer()
    assert rate == pytest.approx((2 / 5 + 1 / 3) / 2) and threshold == 4.0
    assert metrics.eer([5, 6], [1, 2]) == 0.0
    assert metrics.eer([1, 2], [5, 6]) == 1.0
    assert metrics.eer([3, 3], [3, 3, 3]) == 1.0


def test_the_newer_tdcf_has_a_floor_and_the_older_one_does_not() -> None:
    perfect = compute_det_curve([1.0, 2.0], [-2.0, -1.0])
    assert metrics.min_tdcf_2019(perfect, ASV) == 0.0
    c0 = 0.9405 * ASV.miss + 0.095 * ASV.false_alarm
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(c0 / (c0 + 0.5 * ASV.false_alarm_spoof))
    assert metrics.min_tdcf_2021(perfect, ASV) == pytest.approx(0.0627, abs=1e-4)
    useless = compute_det_curve([0.0], [1.0])
    assert metrics.min_tdcf_2019(useless, ASV) == pytest.approx(1.0)
    assert metrics.min_tdcf_2021(useless, ASV) == pytest.approx(1.0)


def test_detection_costs_and_cllr_are_those_of_asvspoof_5() -> None:
    bonafide, spoof = np.array([-0.5, 2.0, 3.0, 4.0]), np.array([-3.0, -2.0, 1.0])
    # thresholds where a miss costs 0.95 / 4 and a false alarm 0.5 / 3, over 0.5
    assert metrics.min_dcf(compute_det_curve(bonafide, spoof)) == pytest.approx(1 / 3)
    assert metrics.act_dcf(bonafide, spoof) == pytest.approx(1 / 3)  # threshold -ln 1.9 = -0.642
    assert metrics.act_dcf(bonafide - 1, spoof - 1) == pytest.approx((0.95 / 4 + 0.5 / 3) / 0.5)
    by_hand = (np.log2(1 + np.exp(-bonafide)).mean() + np.log2(1 + np.exp(spoof)).mean()) / 2
    assert metrics.cllr(bonafide, spoof) == pytest.approx(by_hand)
    assert metrics.cllr([0.0], [0.0]) == pytest.approx(1.0)
    assert metrics.cllr([2000.0], [-2000.0]) == 0.0


def test_each_attack_is_scored_against_all_bona_fide_speech() -> None:
    values = [3.0, 2.0, 1.0, 2.5, 0.0, -1.0]
    found = metrics.compute_metrics(values, [1, 1, 1, 0, 0, 0], ["-", "-", "-", "A02", "A01", "A01"])
    assert found["eer_A01"] == 0.0
    assert found["eer_A02"] == metrics.eer([3, 2, 1], [2.5])
    assert "min_tdcf_2019" not in found


def test_intervals_resample_speakers_exactly_as_copying_their_trials_does() -> None:
    rng, draws = np.random.default_rng(3), 40
    genuine = rng.random(60) < 0.4
    values = np.round(rng.normal(size=60) + genuine, 1)  # with equal scores of both classes
    speaker = [("", "ann", "bob", "cy", "dee", "eve")[code] for code in rng.integers(6, size=60)]
    names = [name or f" {number}" for number, name in enumerate(speaker)]
    groups = [[i for i, name in enumerate(names) if name == one] for one in sorted(set(names))]
    found = metrics.compute_intervals(values, genuine, speaker, asv=ASV, draws=draws, seed=5)
    assert found == metrics.compute_intervals(values, genuine, speaker, asv=ASV, draws=draws, seed=5)
    slow: dict[str, list[float]] = {"eer": [], "min_dcf": [], "min_tdcf_2019": [], "min_tdcf_2021": []}
    draw = np.random.default_rng(5)
    for _ in range(draws):
        copies = [i for one in draw.integers(len(groups), size=len(groups)) for i in groups[one]]
        trials = metrics.compute_metrics(values[copies], genuine[copies], ["A"] * len(copies), asv=ASV)
        for name, drawn in slow.items():
            drawn.append(trials[name])
    for name, drawn in slow.items():  # equal but for the rounding of 0.025
        assert found.ends[name] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), rel=1e-12)
    assert set(found.ends) == set(slow) and found.draws_lost == 0
    assert metrics.compute_intervals(values, genuine, speaker, draws=0).to_metrics() == {}


def test_too_few_speakers_or_trials_have_no_interval_and_that_is_said() -> None:
    values, genuine = np.arange(40.0), np.arange(40) % 3 == 0

    def resample(speakers: int) -> dict[str, float]:
        names = [f"s{number % speakers}" for number in range(40)]
        return metrics.compute_intervals(values, genuine, names, draws=200).to_metrics()

    assert resample(1) == {"draws_lost": 1.0}
    assert set(resample(2)) == set(resample(3)) == {"draws_lost"}, "these draws are too much alike"
    assert {"eer_low", "eer_high", "min_dcf_low", "min_dcf_high"} == set(resample(8))
    one_bonafide = metrics.compute_intervals(values, np.arange(40) == 5, [""] * 40, draws=200)
    assert one_bonafide.ends == {} and 0.2 < one_bonafide.draws_lost < 0.5, "a third lacks the one bona fide trial"


@pytest.mark.parametrize(
    ("bonafide", "spoof", "message"),
    [([], [1.0], "no bona fide trial"), ([1.0], [], "no spoofed trial"), ([1.0, np.nan], [0.0], "1 of 2 bona fide")],
)
def test_scores_that_give_no_error_rate_are_refused(bonafide: list[float], spoof: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        metrics.eer(bonafide, spoof)


def test_inverted_asv_scores_are_refused() -> None:
    with pytest.raises(UserError, match="The ASV system does not work"):
        metrics.min_tdcf_2019(compute_det_curve([1.0], [0.0]), AsvRates(0.98, 0.98, 0.5, 0.5))


def test_a_det_plot_is_a_png() -> None:
    png = metrics.draw_det_plot(np.arange(20.0), {"A01": np.arange(-9.0, 9.0), "A02": np.arange(5.0)})
    assert png.startswith(b"\x89PNG") and len(png) > 5000
