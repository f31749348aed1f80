"""Closed-set and open-set identification."""

import numpy as np
import pytest

from .identification import FOLDS, compute_identification_metrics, draw_cmc


def compute(score_NN: np.ndarray, finger: np.ndarray) -> dict[str, float]:
    return compute_identification_metrics(lambda gallery: score_NN[:, gallery], finger, np.arange(len(finger)))


def test_a_perfect_matcher_finds_every_print() -> None:
    finger = np.repeat(np.arange(12), 8)
    found = compute((finger[:, None] == finger).astype(float), finger)
    assert found == {"rank1": 1.0, "rank10": 1.0, "fnir_at_fpir_1e-1": 0.0}, "96 strangers establish 10 %, not 1 %"


def test_equal_scores_are_no_hits() -> None:
    finger = np.repeat(np.arange(12), 8)
    found = compute(np.zeros((96, 96)), finger)
    assert (found["rank1"], found["rank10"], found["fnir_at_fpir_1e-1"]) == (0.0, 0.0, 1.0)


def test_rates_are_those_of_loops_over_galleries_and_folds() -> None:
    rng = np.random.default_rng(3)
    finger = rng.permutation(np.repeat(np.arange(20), [4, 2, 3, 1] * 5))
    vector = rng.normal(size=(20, 3))[finger] + rng.normal(size=(len(finger), 3))
    score = -np.linalg.norm(vector[:, None] - vector, axis=2)
    found = compute(score, finger)

    fold = np.random.default_rng(0).permutation(20) % FOLDS
    ranks: list[list[int]] = []
    rates = []
    for g in range(4):
        gallery = [np.flatnonzero(finger == f)[g % np.sum(finger == f)] for f in range(20)]
        probes = [p for p in range(len(finger)) if p not in gallery]
        ranks.append([1 + sum(score[p, gallery] > score[p, gallery[finger[p]]]) for p in probes])
        strangers = [max(score[p, row] for f, row in enumerate(gallery) if fold[f] != fold[finger[p]])
                     for p in range(len(finger))]  # fmt: skip
        threshold = sorted(strangers)[-int(0.1 * len(strangers)) - 1]
        rates.append(np.mean([score[p, gallery[finger[p]]] <= threshold for p in probes]))
    assert found["rank1"] == pytest.approx(np.mean([np.mean(np.array(rank) == 1) for rank in ranks]))
    assert found["rank10"] == pytest.approx(np.mean([np.mean(np.array(rank) <= 10) for rank in ranks]))
    assert found["fnir_at_fpir_1e-1"] == pytest.approx(np.mean(rates))
    assert 0.1 < found["rank1"] < 0.9
    assert draw_cmc(lambda gallery: score[:, gallery], finger, np.arange(len(finger))).startswith(b"\x89PNG")
