"""The baseline and its command."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from trainyard.errors import UserError

from . import baseline, metrics
from .commands import add


def test_the_ridge_learns_from_words_and_predicts_positive_prices() -> None:
    texts = np.array([f"{'gold' if i % 2 else 'tin'} ring {i % 5}" for i in range(100)], dtype=object)
    prices = np.where(np.arange(100) % 2, 100.0, 1.0)
    ridge = baseline.TfidfRidge(0.1).fit(texts[:80], prices[:80])
    assert metrics.smape(ridge.predict(texts[80:]), prices[80:]) < 5
    assert (ridge.predict(np.array(["", "tin tin tin ring 9 zzz"], dtype=object)) > 0).all()


def test_a_ridge_is_the_same_after_it_was_written_and_its_penalty_fits_folds_that_it_has_not_seen() -> None:
    random = np.random.default_rng(0)
    texts = np.array([" ".join(f"t{n}" for n in random.integers(0, 200, 12)) for _ in range(300)], dtype=object)
    numbers = random.normal(size=(300, 3)).astype(np.float32)
    prices = np.exp(3 + numbers[:, 0] + random.normal(size=300))  # words say nothing: the largest penalty is best
    ridge = baseline.tune_ridge(texts.tolist(), numbers, prices, np.arange(300) % 5)
    again = baseline.TfidfRidge.from_json(ridge.to_json())
    np.testing.assert_allclose(again.predict(texts, numbers), ridge.predict(texts, numbers), rtol=1e-5)
    one, largest = (baseline.TfidfRidge(alpha).fit(texts, prices, numbers) for alpha in (1.0, baseline.ALPHAS[-1]))
    assert ridge.to_json() == largest.to_json() != one.to_json()
    assert baseline.tune_ridge(texts.tolist(), numbers, prices, np.zeros(300)).to_json() == one.to_json()


def test_the_command_scores_the_baseline_on_every_fold_and_writes_the_results(
    catalogue_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    words = ["pricing-baseline", str(catalogue_folder), "packing.folds=2", "--results", str(tmp_path)]
    args = parser.parse_args(words)
    assert args.command(args) == 0
    lines = [json.loads(line) for line in next(tmp_path.glob("pricing-baseline-*.jsonl")).read_text().splitlines()]
    assert lines[0]["kind"] == "header" and [line["fold"] for line in lines[1:]] == [0, 1]
    assert sum(line["rows"] for line in lines[1:]) == 400
    assert all(line["tfidf ridge with numbers"] < line["tfidf ridge"] < line["median"] for line in lines[1:])
    assert "tfidf ridge with numbers" in capsys.readouterr().out
    args = parser.parse_args(["pricing-baseline", str(catalogue_folder), "--runs", str(tmp_path)])
    with pytest.raises(UserError, match=r"not a pricing run: expected a config.yaml"):
        args.command(args)
