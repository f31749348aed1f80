"""The evaluation pairs and their metrics."""

import numpy as np
import pytest

from tests.cases.twins import make_data, select_ids
from trainyard.scoring import ErrorRates, Pairs, bootstrap, compute_error_rates

from . import protocol


def make_scores(rng: np.random.Generator, count: int, kind: int, families_count: int) -> protocol.Scores:
    score = np.round(rng.normal(kind == 0, 1, count), 1)  # with ties
    one = rng.integers(families_count, size=count)
    other = one if kind < 2 else (one + rng.integers(1, families_count, size=count)) % families_count
    return protocol.Scores(score, np.full(count, kind), np.stack([one, other], axis=1))


def test_metrics_match_their_definitions() -> None:
    rng = np.random.default_rng(0)
    genuine, impostor = make_scores(rng, 300, 0, 10), make_scores(rng, 1200, 2, 10)
    found = protocol.compute_metrics(genuine, impostor, suffix="random")
    rates = compute_error_rates(genuine.score, impostor.score)
    assert found["eer_random"] == rates.equal_error_rate().rate
    assert found["tar_at_far_1e-3_random"] == rates.tar_at_far(0.001)
    wins = (genuine.score[:, None] > impostor.score) + 0.5 * (genuine.score[:, None] == impostor.score)
    assert found["auc_random"] == pytest.approx(wins.mean(), abs=1e-12)
    few = protocol.compute_metrics(genuine, make_scores(rng, 99, 1, 10), suffix="twin")
    assert set(few) == {"eer_twin", "auc_twin", "d_prime_twin"}  # 99 impostors cannot measure a FAR of 1 %


def test_the_bootstrap_resamples_families_and_weights_their_pairs_accordingly() -> None:
    families_of_impostors = np.array([[0, 0], [0, 1], [1, 2], [2, 2]])
    pairs = Pairs(np.arange(3.0), np.arange(4.0), np.arange(3), families_of_impostors)  # one genuine pair per family
    drawn: list[ErrorRates] = []

    def keep(rates: ErrorRates) -> dict[str, float]:
        drawn.append(rates)
        return {}

    bootstrap(pairs, keep, draws=20)
    assert len(drawn) > 10
    for rates in drawn:
        counts = np.rint(3 * np.diff(rates.fnmr[:4]))
        assert counts.sum() == 3
        weight = np.array([counts[0], counts[0] * counts[1], counts[1] * counts[2], counts[2]])
        assert -np.diff(rates.fmr[:5]) == pytest.approx(weight / weight.sum())


@pytest.mark.parametrize(("families", "lost"), [(1, 1.0), (2, 0.5)])
def test_few_families_have_no_interval_instead_of_one_without_width(families: int, lost: float) -> None:
    rng = np.random.default_rng(0)
    impostor = make_scores(rng, 50, 1 if families == 1 else 2, families)
    found = protocol.compute_intervals(make_scores(rng, 20, 0, families), impostor, suffix="twin", draws=400)
    assert found["draws_lost_twin"] == pytest.approx(lost, abs=0.1)
    assert not [name for name in found if name.endswith(("_low", "_high"))]


def test_each_pair_is_listed_once_with_its_kind_and_strangers_are_spread_evenly() -> None:
    person = [f"{i // 4}" for i in range(80)]
    family = [f"{i // 8}" for i in range(80)]
    pairs_by_image = protocol.draw_pairs(person, family, strangers=6, seed=1)
    listed = [(i, j, kind) for i, found in enumerate(pairs_by_image) for kind, j in found]
    assert all(i < j for i, j, _ in listed) and len({(i, j) for i, j, _ in listed}) == len(listed)
    for i, j, kind in listed:
        assert kind == (0 if person[i] == person[j] else 1 if family[i] == family[j] else 2)
    kinds = [kind for _, _, kind in listed]
    assert kinds.count(protocol.SAME) == 20 * 6 and kinds.count(protocol.TWIN) == 10 * 16
    assert kinds.count(protocol.RANDOM) == pytest.approx(80 * 6, rel=0.05)
    in_strangers = np.bincount([k for i, j, kind in listed if kind == 2 for k in (i, j)], minlength=80)
    assert in_strangers.min() >= 4
    assert pairs_by_image == protocol.draw_pairs(person, family, strangers=6, seed=1)
    assert pairs_by_image != protocol.draw_pairs(person, family, strangers=6, seed=2)


def test_pairs_survive_packing_and_those_of_an_image_left_out_are_dropped() -> None:
    data = make_data()
    whole = protocol.PairList.read(data.columns, data.vocabulary)
    removed = int(whole.one[0])
    kept = np.delete(np.arange(len(data.columns["number"])), removed)
    columns = {name: values[kept] for name, values in data.columns.items()}
    rest = protocol.PairList.read(columns, data.vocabulary)
    dropped = int(((whole.one == removed) | (whole.other == removed)).sum())
    assert len(rest.one) == len(whole.one) - dropped < len(whole.one)
    before = {(int(i), int(j)) for i, j in zip(whole.one, whole.other, strict=True)}
    assert {(int(kept[i]), int(kept[j])) for i, j in zip(rest.one, rest.other, strict=True)} <= before
    assert (
        whole.compute_sha256()
        == protocol.PairList.read(data.columns, data.vocabulary).compute_sha256()
        != rest.compute_sha256()
    )


def test_pairs_never_cross_sets() -> None:
    data = make_data()
    pairs = protocol.PairList.read(data.columns, data.vocabulary)
    sets = data.columns["set"]
    assert np.array_equal(sets[pairs.one], sets[pairs.other])
    assert not np.isin(pairs.one, data.train_ids).any()
    counted = sum(len(pairs.restrict_to(select_ids(data, name)).one) for name in ("val", "test"))
    assert counted == len(pairs.one) > 500
