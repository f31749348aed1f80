"""Compares runs of the family with baselines on the same folds."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.config.compose import apply_overrides
from trainyard.errors import UserError
from trainyard.measure import make_header, write_new
from trainyard.terminal import say
from trainyard.text import quote_path

from .config import NO_PRICES, Config

METHODS = ("median", "geometric mean", "tfidf ridge", "tfidf ridge with numbers", "run")


def compare_baselines(args: argparse.Namespace) -> int:
    """Print and write the score of each method on each fold."""
    from . import pack

    runs = {_read_fold(run): run for run in args.runs}
    rows = []
    config = _build_config(args.options)
    pack.log_reading(args.raw, config)
    for fold in range(config.packing.folds):
        rows.append(_score_fold(args, fold, runs.get(fold)))
        say("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    say("SMAPE, mean +- standard deviation over the folds")
    for name in METHODS:
        values = [row[name] for row in rows if name in row]
        if len(values) == len(rows):
            say(f"  {name:<28} {np.mean(values):6.2f} +- {np.std(values):.2f}")
    result = [make_header("pricing-baseline", _serialize_arguments(args)), *rows]
    say(f"written: {write_new(args.results, 'pricing-baseline', result)}")
    return 0


def _score_fold(args: argparse.Namespace, fold: int, run: Path | None) -> dict[str, float]:
    """Return the SMAPE of each method on the test rows of one fold.

    A ridge's penalty is chosen on the validation rows; the ridge is then fitted on training and validation rows. A run
    trained on whatever rows its own packing.val_share left.
    """
    from . import baseline, metrics, pack

    table = pack.read_table(args.raw, _build_config([*args.options, f"packing.fold={fold}"]))
    train, val, test = (np.flatnonzero(table.parts == part) for part in ("train", "val", "test"))
    train_val, true = np.concatenate([train, val]), table.prices[test]

    def fit_and_predict(alpha: float, fit_rows: np.ndarray, rows: np.ndarray, *, numbers: bool) -> np.ndarray:
        fit_numbers, row_numbers = (table.numbers[fit_rows], table.numbers[rows]) if numbers else (None, None)
        ridge = baseline.TfidfRidge(alpha).fit(table.texts[fit_rows], table.prices[fit_rows], fit_numbers)
        return ridge.predict(table.texts[rows], row_numbers)

    def tune_and_predict(*, numbers: bool) -> np.ndarray:
        val_smape = {
            alpha: metrics.smape(fit_and_predict(alpha, train, val, numbers=numbers), table.prices[val])
            for alpha in baseline.ALPHAS
        }
        best_alpha = min(val_smape, key=lambda alpha: val_smape[alpha])
        return fit_and_predict(best_alpha, train_val, test, numbers=numbers)

    train_prices = table.prices[train_val]
    predicted = {
        "median": np.full(len(test), np.median(train_prices)),
        "geometric mean": np.full(len(test), np.exp(np.log(train_prices).mean())),
        "tfidf ridge": tune_and_predict(numbers=False),
        "tfidf ridge with numbers": tune_and_predict(numbers=True),
    }
    scores = {name: metrics.smape(prices, true) for name, prices in predicted.items()}
    if run is not None:
        scores["run"] = _read_test_smape(run)
    return {"fold": fold, "rows": len(test), **scores}


def _read_fold(run: Path) -> int:
    """Return the fold that a run is tested on."""
    config = run / "config.yaml"
    lines = config.read_text().splitlines() if config.is_file() else []
    folds = [line.split(":")[1] for line in lines if line.strip().startswith("fold:")]
    if not folds:
        raise UserError(f"{run}: not a pricing run: expected a config.yaml there that names a fold.")
    return int(folds[0])


def _read_test_smape(run: Path) -> float:
    """Return a finished run's SMAPE on its test fold."""
    from trainyard.runs.events import read_metrics

    lines = [line for line in read_metrics(run) if line.get("split") == "test"]
    if not lines:
        raise UserError(f"{run}: the test fold has no score yet. Finish the run: trainyard resume {quote_path(run)}")
    if "smape" not in lines[-1]:
        raise UserError(f"{run}: {NO_PRICES}")
    return float(lines[-1]["smape"])


def _build_config(options: Sequence[str]) -> Config:
    config = apply_overrides(Config(), options)
    assert isinstance(config, Config)
    return config


def _serialize_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments as JSON types."""
    kept = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | list | Path)}
    return {name: [str(part) for part in value] if isinstance(value, list) else value for name, value in kept.items()}
