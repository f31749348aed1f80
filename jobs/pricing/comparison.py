"""Compares the family with other ways to do the same: baselines on the same folds, tokenising once, length buckets."""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.errors import UserError
from trainyard.measure import Candidate, format_table, make_header, measure_candidates, measure_rate, write_new
from trainyard.tables import read_table

from .config import Config

METHODS = (
    *("median", "geometric mean", "tfidf ridge", "tfidf ridge with numbers"),
    *("network", "network and ridge, blended"),
)
PRICES = "prices.csv"


# Baseline


def compare_baselines(args: argparse.Namespace) -> int:
    """Print and write the score of each method on each fold."""
    runs = {_read_fold(run): run for run in args.runs}
    rows = []
    for fold in range(args.folds):
        rows.append(_score_fold(args, fold, runs.get(fold)))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print("SMAPE, mean +- standard deviation over the folds")
    for name in METHODS:
        values = [row[name] for row in rows if name in row]
        if len(values) == len(rows):
            print(f"  {name:<28} {np.mean(values):6.2f} +- {np.std(values):.2f}")
    result = [make_header("pricing-baseline", _serialize_arguments(args)), *rows]
    print(f"written: {write_new(args.results, 'pricing-baseline', result)}")
    return 0


def _score_fold(args: argparse.Namespace, fold: int, run: Path | None) -> dict[str, float]:
    """Return the SMAPE of each method on the test rows of one fold.

    A ridge's penalty is chosen on the validation rows; the ridge is then fitted on training and validation rows. The
    network trained on whatever rows its own packing.val_share left. The blend is the geometric mean of the network
    and the ridge with numbers; nothing in it is fitted.
    """
    from . import baseline, metrics, pack

    table = pack.read_table(args.raw, _build_config(args, fold))
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
    if run is not None and (run / PRICES).is_file():
        network = _read_prices(run / PRICES, [table.keys[i] for i in test.tolist()])
        predicted["network"] = network
        predicted["network and ridge, blended"] = np.sqrt(network * predicted["tfidf ridge with numbers"])
    scores = {name: metrics.smape(prices, true) for name, prices in predicted.items()}
    if run is not None:
        scores["network"] = _read_test_smape(run)
    return {"fold": fold, "rows": len(test), **scores}


def _read_prices(path: Path, keys: Sequence[str]) -> np.ndarray:
    """Return the prices of these ids from a file that `trainyard predict` wrote."""
    prices = {}
    for row in read_table(path):
        key, price = row.values()
        prices[key] = float(price)
    missing = [key for key in keys if key not in prices]
    if missing:
        raise UserError(
            f"{path}: no price for id '{missing[0]}'. Predict the same catalogue: trainyard predict RUN FILE"
        )
    return np.array([prices[key] for key in keys])


def _read_fold(run: Path) -> int:
    """Return the fold that a run is tested on."""
    config = run / "config.yaml"
    lines = config.read_text().splitlines() if config.is_file() else []
    found = [line.split(":")[1] for line in lines if line.strip().startswith("fold:")]
    if not found:
        raise UserError(f"{run}: not a pricing run: expected a config.yaml there that names a fold.")
    return int(found[0])


def _read_test_smape(run: Path) -> float:
    """Return a finished run's SMAPE on its test fold."""
    from trainyard.runs.events import read_metrics

    found = [line["smape"] for line in read_metrics(run) if line.get("split") == "test"]
    if not found:
        raise UserError(f"{run}: the test fold has no score yet. Finish the run: trainyard resume {run}")
    return float(found[-1])


# Bench


def compare_loading(args: argparse.Namespace) -> int:
    """Print and write how fast rows come from shards, and tokenised per item."""
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the seed's forked workers would warn and disable it
    with tempfile.TemporaryDirectory() as folder:
        candidates, waste = _prepare_candidates(args, Path(folder))
        lines = measure_candidates(candidates, rounds=args.rounds, warm_up=True)
    print(format_table(lines))
    for name, share in waste.items():
        print(f"padding, {name:<20}{share:6.1%} of what the encoder computes")
    result = [make_header("pricing-bench", _serialize_arguments(args)), *lines, {"kind": "padding", **waste}]
    print(f"one thread; written: {write_new(args.results, 'pricing-bench', result)}")
    return 0


def _prepare_candidates(args: argparse.Namespace, folder: Path) -> tuple[list[Candidate], dict[str, float]]:
    """Pack the catalogue; return what to measure, and the share of padding by kind of batch."""
    from torch.utils.data import DataLoader

    from trainyard.data import order
    from trainyard.data.pack import pack as write
    from trainyard.settings import DataSettings

    from . import catalog, pack, reference

    config = _build_config(args, -1)
    config.packing.max_tokens = args.max_tokens
    found, columns = catalog.find(args.raw, prefer=config.packing.file), pack.select_columns(config.packing)
    raw = reference.copy_head(found, folder / "head.csv", columns, rows=args.rows)
    artifacts = pack.fit_artifacts(raw, config)
    samples = list(pack.samples(raw, config))
    data = write(samples, folder / "packed", meta={}, workers=1, artifacts=artifacts)
    ids, length = np.arange(data.count), data.columns["length"]
    texts = pack.read_table(raw, config).texts.tolist()
    seed_dataset = reference.PerItemDataset(
        texts,
        np.stack(data.read_arrays("numbers", ids)),
        data.columns["price"],
        tokenizer_json=artifacts[pack.TOKENIZER],
        max_tokens=args.max_tokens,
    )
    loader = reference.build_loader(data, DataSettings(order="buckets", order_by="length"))

    def tokenise() -> int:
        return sum(bool(sample.load(artifacts)) for sample in samples)

    def read() -> int:
        return min(len(data.read_arrays("tokens", ids)), len(data.read_arrays("numbers", ids)))

    def run_seed_loop() -> int:
        return sum(len(batch["price"]) for batch in DataLoader(seed_dataset, batch_size=8, shuffle=True, num_workers=2))

    def read_batches(epoch_order: order.EpochOrder) -> Callable[[], int]:
        def read_epoch() -> int:
            stream = loader.train(lambda epoch: epoch_order, epoch=0, start=0, micro_batch_size=0)
            rows = sum(len(next(stream).batch["price"]) for _ in range(len(epoch_order)))
            stream.close()
            return rows

        return read_epoch

    def make_candidate(name: str, work: Callable[[], int], note: str, baseline: str = "") -> Candidate:
        return Candidate(name, lambda: measure_rate(1.0, work), "rows/s", note, baseline)

    _check_equal([sample.load(artifacts) for sample in samples], data)
    buckets = order.bucket_by_length(ids, length, seed=0, epoch=0, global_batch_size=32)
    shuffled = order.shuffle(ids, seed=0, epoch=0, global_batch_size=32)
    waste = {
        "to max_tokens": 1 - float(length.mean()) / args.max_tokens,
        "random batches": compute_padding([length[shuffled.batch(i)] for i in range(len(shuffled))]),
        "bucketed batches": compute_padding([length[buckets.batch(i)] for i in range(len(buckets))]),
    }
    seed_note = f"DataLoader, batch 8, 2 workers, per item, padded to {args.max_tokens}"
    candidates = [
        make_candidate("tokenise", tokenise, "parse, tokenise and compute the numbers of every row, in memory"),
        make_candidate("read", read, "the same rows from shards, bit-identical", "tokenise"),
        make_candidate("seed's loop", run_seed_loop, seed_note),
        make_candidate(
            "random batches", read_batches(shuffled), "ours, batch 32, padded to the longest", "seed's loop"
        ),
        make_candidate("bucketed batches", read_batches(buckets), "ours, batch 32 of similar length", "seed's loop"),
    ]
    return candidates, waste


def compute_padding(lengths: Sequence[np.ndarray]) -> float:
    """Return the share of padding in batches whose texts have these lengths, each padded to its longest."""
    computed = sum(len(batch) * int(batch.max()) for batch in lengths)
    return 1 - sum(int(batch.sum()) for batch in lengths) / computed


def _check_equal(loaded: Sequence[Mapping[str, Any]], data: Any) -> None:
    """Assert that reading and tokenising give bit-identical rows."""
    ids = np.arange(data.count)
    for row, tokens, numbers in zip(
        loaded, data.read_arrays("tokens", ids), data.read_arrays("numbers", ids), strict=True
    ):
        assert np.array_equal(row["tokens"].values, tokens) and row["numbers"].tobytes() == numbers.tobytes()


def _build_config(args: argparse.Namespace, fold: int) -> Config:
    config = Config()
    rule = config.packing
    rule.id_column, rule.text_column, rule.price_column = args.id_column, args.text_column, args.price_column
    rule.numeric_columns, rule.group, rule.folds, rule.seed = args.numeric_columns, args.group, args.folds, args.seed
    rule.fold, rule.file, rule.val_share = fold, args.file, args.val_share
    rule.further_text_columns, rule.decimal_mark = args.further_text_columns, args.decimal_mark
    return config


def _serialize_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments as JSON types."""
    kept = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | list | Path)}
    return {name: [str(part) for part in value] if isinstance(value, list) else value for name, value in kept.items()}
