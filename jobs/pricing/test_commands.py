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
