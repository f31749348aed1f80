"""Verification metrics compared with their definition as loops, and the bootstrap with literal resampling."""

import numpy as np
import pytest

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.scoring import (
    ErrorRates,
    Pairs,
    bootstrap,
    compute_error_rates,
    compute_operating_points,
    d_prime,
    explain_missing_intervals,
    summarize_draws,
)


def count_by_definition(genuine: list[float], impostor: list[float]) -> list[tuple[float, float, float]]:
    """Return (threshold, FMR, FNMR) at each score and above all, counting pair by pair."""
    return [
        (t, sum(s >= t for s in impostor) / len(impostor), sum(s < t for s in genuine) / len(genuine))
        for t in [*sorted({*genuine, *impostor}), np.inf]
    ]


def draw_scores(seed: int) -> tuple[list[float], list[float]]:
    """Draw a random number of scores, with few to many ties: from all distinct to nearly all equal."""
    rng = np.random.default_rng(seed)
    levels = rng.choice([2, 5, 50, 10**9])
    genuine, impostor = rng.normal(rng.uniform(-1, 3), 1, rng.integers(1, 40)), rng.normal(0, 1, rng.integers(1, 60))
    return [(np.round(x * levels) / levels).tolist() for x in (genuine, impostor)]


@pytest.mark.parametrize("seed", range(200))
def test_every_metric_equals_its_definition_counted_pair_by_pair(seed):
    genuine, impostor = draw_scores(seed)
    rates, table = compute_error_rates(genuine, impostor), count_by_definition(genuine, impostor)
    assert list(zip(rates.thresholds, rates.fmr, rates.fnmr, strict=True)) == table

    t, fmr, fnmr = min(table, key=lambda row: (abs(row[1] - row[2]), row[0]))
    eer = rates.equal_error_rate()
    assert (eer.rate, eer.low, eer.high, eer.threshold) == ((fmr + fnmr) / 2, min(fmr, fnmr), max(fmr, fnmr), t)
    for limit in (0.0, 0.001, 0.01, 0.3, 1.0):
        assert rates.fnmr_at_fmr(limit) == min(fnmr for _, fmr, fnmr in table if fmr <= limit)
        assert rates.tar_at_far(limit) == 1 - rates.fnmr_at_fmr(limit)


def test_separated_scores_have_no_errors_and_swapped_ones_only_errors():
    assert compute_error_rates([0.8, 0.9], [0.1, 0.2]).equal_error_rate().rate == 0.0
    assert compute_error_rates([0.1, 0.2], [0.8, 0.9]).equal_error_rate().rate == 1.0
    assert compute_error_rates([0.8, 0.9], [0.1, 0.2]).fnmr_at_fmr(0.0) == 0.0


def test_a_score_equal_to_the_threshold_is_accepted():
    rates = compute_error_rates([0.5], [0.5])
    assert rates.thresholds[0] == 0.5
    assert rates.fmr[0] == 1.0
    assert rates.fnmr[0] == 0.0


def test_one_impostor_above_all_genuine_costs_every_genuine_pair_at_zero_fmr():
    rates = compute_error_rates([0.5, 0.6, 0.7], [0.1] * 99 + [0.9])
    assert rates.fnmr_at_fmr(0.0) == 1.0
    assert rates.fnmr_at_fmr(0.01) == 0.0


def test_rates_that_jump_past_each_other_give_the_mean_and_both_ends():
    eer = compute_error_rates([1.0, 3.0, 4.0], [0.0, 2.0]).equal_error_rate()
    # at threshold 2: FMR 1/2 and FNMR 1/3; at 3: 0 and 1/3
    assert eer.threshold == 2.0
    assert (eer.low, eer.high) == (1 / 3, 1 / 2)
    assert eer.rate == pytest.approx(5 / 12)


def test_metrics_that_need_more_impostors_than_there_are_are_left_out():
    rates = compute_error_rates([1.0], [0.0])
    assert set(compute_operating_points(rates, impostors=45)) == {"eer", "zero_fmr"}
    assert set(compute_operating_points(rates, impostors=999)) == {"eer", "zero_fmr", "fmr100"}
    assert "fmr1000" in compute_operating_points(rates, impostors=1_000)
    assert "tar_at_far_1e-4" not in compute_operating_points(rates, impostors=99_999)
    assert "tar_at_far_1e-4" in compute_operating_points(rates, impostors=100_000)


def test_d_prime_is_the_distance_of_the_means_in_pooled_standard_deviations():
    assert d_prime([1.0, 3.0], [-1.0, 1.0]) == pytest.approx(2.0)
    assert d_prime([1.0], [0.0]) == np.inf
    assert d_prime([1.0], [1.0]) == 0.0


@pytest.mark.parametrize(
    ("genuine", "impostor", "message"),
    [
        ([], [0.1], "no genuine pair"),
        ([0.1], [], "no impostor pair"),
        ([0.1, np.nan], [0.1], "1 of 2 genuine scores are not finite"),
        ([0.1], [np.inf], "1 of 1 impostor scores are not finite"),
    ],
)
def test_missing_scores_and_those_that_are_not_finite_are_refused_by_name(genuine, impostor, message):
    with pytest.raises(UserError, match=message):
        compute_error_rates(genuine, impostor)


def make_pairs(fingers: int, impressions: int, *, seed: int) -> Pairs:
    """Return all pairs of a random score matrix."""
    rng = np.random.default_rng(seed)
    finger = np.repeat(np.arange(fingers), impressions)
    one, other = np.triu_indices(len(finger), 1)
    same = finger[one] == finger[other]
    score = np.round(rng.normal(size=(len(finger), len(finger))) + 2 * (finger[:, None] == finger), 1)
    both = np.stack([finger[one], finger[other]], axis=1)
    chosen = score[one, other]
    return Pairs(chosen[same], chosen[~same], finger[one][same], both[~same])


def resample(pairs: Pairs, drawn: np.ndarray) -> ErrorRates:
    """Copy the drawn identities, pair by pair."""
    genuine = [s for copy in drawn for s, own in zip(pairs.genuine, pairs.genuine_identity, strict=True) if own == copy]
    impostor = [
        s
        for i, a in enumerate(drawn)
        for b in drawn[i + 1 :]
        for s, (one, other) in zip(pairs.impostor, pairs.impostor_identities, strict=True)
        if {a, b} == {one, other}
    ]
    return compute_error_rates(genuine, impostor)


def test_weighted_pairs_equal_literal_copies_of_the_drawn_identities():
    pairs = make_pairs(6, 3, seed=3)
    draws = 25
    rng = np.random.default_rng(11)
    literal = [resample(pairs, rng.integers(6, size=6)) for _ in range(draws)]

    weighted_rates: list[ErrorRates] = []
    bootstrap(pairs, lambda rates: weighted_rates.append(rates) or {}, draws=draws, seed=11)

    assert len(weighted_rates) == draws
    for weighted, copied in zip(weighted_rates, literal, strict=True):
        assert weighted.equal_error_rate().rate == copied.equal_error_rate().rate
        for limit in (0.0, 0.01, 0.1):
            assert weighted.fnmr_at_fmr(limit) == copied.fnmr_at_fmr(limit)


def test_the_interval_contains_the_estimate_and_shrinks_with_more_identities():
    widths = []
    for fingers in (8, 60):
        pairs = make_pairs(fingers, 4, seed=1)
        low, high = pairs.compute_intervals(draws=200).ends["eer"]
        assert low <= pairs.compute_metrics()["eer"] <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_equal_seeds_draw_equal_intervals():
    pairs = make_pairs(8, 3, seed=0)
    assert pairs.compute_intervals(draws=50, seed=1) == pairs.compute_intervals(draws=50, seed=1)
    assert pairs.compute_intervals(draws=50, seed=1) != pairs.compute_intervals(draws=50, seed=2)


def test_with_few_identities_the_interval_is_left_out_and_a_metric_says_how_many_draws_were_of_no_use():
    two = Pairs(np.array([0.9, 0.8]), np.array([0.1]), np.array([0, 1]), np.array([[0, 1]]))
    found = two.compute_intervals(draws=400)
    assert found.ends == {} and found.draws_lost == pytest.approx(0.5, abs=0.1)  # both drawn: 2 of 4 ways
    assert found.to_metrics("_all") == {"draws_lost_all": found.draws_lost}
    assert explain_missing_intervals(found.to_metrics("_all")) == (
        "No 95 % interval where bootstrap draws were of no use (draws_lost_all): too few groups."
    )
    assert bootstrap(two, lambda rates: {}, draws=0).to_metrics() == {} == summarize_draws([], draws=0).to_metrics()


def test_an_interval_is_left_out_once_more_draws_are_lost_than_lie_outside_it():
    values = [{"eer": float(i)} for i in range(95)]
    assert summarize_draws(values, draws=100).to_metrics() == {
        "eer_low": pytest.approx(2.35),
        "eer_high": pytest.approx(91.65),
    }
    assert summarize_draws(values[1:], draws=100).to_metrics() == {"draws_lost": pytest.approx(0.06)}
    assert explain_missing_intervals(["eer", "eer_low", "eer_high"]) == ""


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 9])
def test_fewer_than_four_groups_have_no_interval(groups):
    rng = np.random.default_rng(0)
    identity = np.arange(groups).repeat(8)
    ends = scoring.bootstrap(
        scoring.Pairs(
            rng.normal(1, 1, 8 * groups), rng.normal(0, 1, 8 * groups), identity, np.stack([identity] * 2, 1)
        ),
        lambda rates: {"eer": rates.equal_error_rate().rate},
        draws=200,
    ).ends
    assert bool(ends) == (groups > 3)
    values = rng.normal(size=(groups, 2))
    assert bool(scoring.bootstrap_error_metrics(*values.T, draws=200).ends) == (groups > 3)
    assert bool(scoring.bootstrap_class_metrics(values, np.arange(groups) % 2, draws=200).ends) == (groups > 3)
