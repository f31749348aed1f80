"""Pairs and verification metrics."""

import numpy as np
import pytest
import torch

from tests.cases.fingerprint import make_batch, make_module, make_rows
from trainyard.train.module import Rows

from . import pairs as family_pairs
from .pairs import (
    find_extreme_pairs,
    score_pairs,
    subsample_fingers,
)


def score_with_intervals(rows: Rows) -> dict[str, float]:
    module = make_module()
    return module.score(rows) | module.compute_intervals(rows)


def test_a_perfect_predictor_makes_no_errors() -> None:
    finger = np.repeat(np.arange(10), 8)
    metrics = score_with_intervals(make_rows(np.eye(10)[finger], finger))
    names = ("eer", "eer_low", "eer_high", "eer_all_pairs", "eer_all_pairs_high", "fmr1000_all_pairs", "zero_fmr")
    assert {name: metrics[name] for name in names} == dict.fromkeys(names, 0.0)
    assert (metrics["genuine"], metrics["impostors"], metrics["impostors_all_pairs"]) == (280, 45, 2880)
    assert "fmr1000" not in metrics  # 45 impostors say nothing about one in a thousand


def test_random_embeddings_are_wrong_about_half_the_time() -> None:
    finger = np.repeat(np.arange(30), 8)
    metrics = score_with_intervals(make_rows(np.random.default_rng(0).normal(size=(240, 32)), finger))
    assert 0.45 < metrics["eer_all_pairs"] < 0.55
    assert metrics["eer_all_pairs_low"] < metrics["eer_all_pairs"] < metrics["eer_all_pairs_high"]


def test_pairs_scored_in_blocks_equal_those_of_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_pairs, "BLOCK_ROWS", 7)
    rng = np.random.default_rng(0)
    finger = rng.permutation(np.repeat([3, 5, 8, 9], [4, 1, 6, 5]))
    impression = rng.permutation(len(finger))
    embedding = rng.normal(size=(len(finger), 6)).astype(np.float32)
    pairs, is_fvc = score_pairs(embedding, finger, impression)

    genuine: list[float] = []
    impostor: list[float] = []
    fvc: list[float] = []
    first = {f: impression[finger == f].min() for f in finger}
    for i in range(len(finger)):
        for j in range(i + 1, len(finger)):
            score = float(embedding[i] @ embedding[j])
            (genuine if finger[i] == finger[j] else impostor).append(score)
            if finger[i] != finger[j] and impression[i] == first[finger[i]] and impression[j] == first[finger[j]]:
                fvc.append(score)
    np.testing.assert_allclose(np.sort(pairs.genuine), np.sort(genuine), atol=1e-5)
    np.testing.assert_allclose(np.sort(pairs.impostor), np.sort(impostor), atol=1e-5)
    np.testing.assert_allclose(np.sort(pairs.impostor[is_fvc]), np.sort(fvc), atol=1e-5)
    assert len(fvc) == 4 * 3 // 2
    assert np.array_equal(np.bincount(pairs.genuine_identity), [6, 0, 15, 10])


def test_extreme_pairs_are_those_of_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_pairs, "BLOCK_ROWS", 7)
    rng = np.random.default_rng(5)
    finger = np.repeat(np.arange(6), 4)
    embedding = rng.normal(size=(24, 8)).astype(np.float32)
    pairs = [(float(embedding[i] @ embedding[j]), i, j) for i in range(24) for j in range(i + 1, 24)]
    for is_genuine, lowest, title in (
        (True, True, "One finger, lowest scores"),
        (False, False, "Two fingers, highest scores"),
        (True, False, "One finger, highest scores"),
    ):
        own = sorted(pair for pair in pairs if (finger[pair[1]] == finger[pair[2]]) == is_genuine)
        expected = own[:3] if lowest else own[::-1][:3]
        found = find_extreme_pairs(embedding, finger, count=3)[title]
        assert [pair[1:] for pair in found] == [pair[1:] for pair in expected]
        assert [pair[0] for pair in found] == pytest.approx([pair[0] for pair in expected], abs=1e-6)


def test_too_many_pairs_skip_whole_fingers_evenly() -> None:
    finger = np.repeat(np.arange(100), 8)
    rows = subsample_fingers(finger, 20_000)
    fingers, counts = np.unique(finger[rows], return_counts=True)
    assert set(counts) == {8}
    pairs = len(rows) ** 2 / 2
    assert 15_000 < pairs <= 20_000
    assert np.diff(fingers).max() <= 5
    assert (fingers[0], fingers[-1]) == (0, 99)
    assert np.array_equal(subsample_fingers(finger, 10**9), np.arange(800))


def test_prints_of_unseen_fingers_get_embeddings() -> None:
    module, batch = make_module().eval(), make_batch(4, codes=(0, 1))
    rows = module.predict(batch)
    assert rows["embedding"].shape == (4, 16)
    assert rows["embedding"].dtype == torch.float32
    assert torch.equal(rows["finger"], batch["finger"])
