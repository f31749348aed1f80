"""Commands of the family: the baseline on the same folds, and what tokenising once and bucketing are worth."""

import argparse
import csv
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.errors import UserError
from trainyard.measure import Candidate, for_at_least, header, side_by_side, write_new
from trainyard.measure import table as as_table

from .config import Config

WAYS = (
    *("median", "geometric mean", "tfidf ridge", "tfidf ridge with numbers"),
    *("network", "network and ridge, blended"),
)
PRICES = "prices.csv"


def add(verbs: Any) -> None:
    """Add `pricing-baseline` and `pricing-bench`."""
    verb = verbs.add_parser("pricing-baseline", help="price a catalogue by TF-IDF and ridge, fold by fold")
    _add_catalogue(verb)
    verb.add_argument(
        "--runs", nargs="*", type=Path, default=[], metavar="RUN", help="finished runs, to stand beside it"
    )
    verb.set_defaults(command=_baseline)
    verb = verbs.add_parser("pricing-bench", help="tokenise once or per item, in buckets or not, side by side")
    _add_catalogue(verb)
    verb.add_argument("--rows", type=int, default=20_000, help="of the catalogue, at most: %(default)s")
    verb.add_argument("--max-tokens", type=int, default=384, help="the seed's length: %(default)s")
    verb.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    verb.set_defaults(command=_bench)


def _add_catalogue(verb: argparse.ArgumentParser) -> None:
    rule = Config().packing
    verb.add_argument("raw", type=Path, help="a CSV file, or the folder of one")
    verb.add_argument("--file", default=rule.file, help="of the folder: %(default)s")
    verb.add_argument("--val-share", type=float, default=rule.val_share, help="default: %(default)s")
    verb.add_argument("--id-column", default=rule.id_column)
    verb.add_argument("--text-column", default=rule.text_column)
    verb.add_argument("--price-column", default=rule.price_column)
    verb.add_argument("--numeric-columns", nargs="*", default=[], metavar="COLUMN")
    verb.add_argument("--group", choices=("title", "text"), default=rule.group, help="what near-duplicates share")
    verb.add_argument("--folds", type=int, default=rule.folds)
    verb.add_argument("--seed", type=int, default=rule.seed, help="of the cut into folds")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of results: %(default)s")


def _config(args: argparse.Namespace, fold: int) -> Config:
    config = Config()
    rule = config.packing
    rule.id_column, rule.text_column, rule.price_column = args.id_column, args.text_column, args.price_column
    rule.numeric_columns, rule.group, rule.folds, rule.seed = args.numeric_columns, args.group, args.folds, args.seed
    rule.fold, rule.file, rule.val_share = fold, args.file, args.val_share
    return config


# Baseline


def _baseline(args: argparse.Namespace) -> int:
    runs = {_fold_of(run): run for run in args.runs}
    rows = []
    for fold in range(args.folds):
        rows.append(_fold_scores(args, fold, runs.get(fold)))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print("SMAPE, mean +- standard deviation over the folds")
    for name in WAYS:
        values = [row[name] for row in rows if name in row]
        if len(values) == len(rows):
            print(f"  {name:<28} {np.mean(values):6.2f} +- {np.std(values):.2f}")
    print(f"written: {write_new(args.results, 'pricing-baseline', [header('pricing-baseline', _typed(args)), *rows])}")
    return 0


def _fold_scores(args: argparse.Namespace, fold: int, run: Path | None) -> dict[str, float]:
    """Score everything on one fold: what learns from its training and validation rows, on its test rows.

    The strength of a ridge's penalty is chosen by the validation rows; then it is fitted on both. A network has learned
    from what its own packing.val_share left it. The blend is the geometric mean of the network and of the ridge with
    numbers: nothing in it is fitted.
    """
    from . import baseline, metrics, pack

    table = pack.table(args.raw, _config(args, fold))
    fit, val, test = (np.flatnonzero(table.parts == part) for part in ("train", "val", "test"))
    both, true = np.concatenate([fit, val]), table.prices[test]

    def ridge(alpha: float, rows: np.ndarray, of: np.ndarray, *, numbers: bool) -> np.ndarray:
        beside = (table.numbers[rows], table.numbers[of]) if numbers else (None, None)
        made = baseline.TfidfRidge(alpha).fit(table.texts[rows], table.prices[rows], beside[0])
        return made.predict(table.texts[of], beside[1])

    def tuned(*, numbers: bool) -> np.ndarray:
        tried = {
            alpha: metrics.smape(ridge(alpha, fit, val, numbers=numbers), table.prices[val])
            for alpha in baseline.ALPHAS
        }
        return ridge(min(tried, key=lambda alpha: tried[alpha]), both, test, numbers=numbers)

    known = table.prices[both]
    predicted = {
        "median": np.full(len(test), np.median(known)),
        "geometric mean": np.full(len(test), np.exp(np.log(known).mean())),
        "tfidf ridge": tuned(numbers=False),
        "tfidf ridge with numbers": tuned(numbers=True),
    }
    if run is not None and (run / PRICES).is_file():
        network = _priced(run / PRICES, [table.keys[i] for i in test.tolist()])
        predicted["network"] = network
        predicted["network and ridge, blended"] = np.sqrt(network * predicted["tfidf ridge with numbers"])
    scores = {name: metrics.smape(prices, true) for name, prices in predicted.items()}
    if run is not None:
        scores["network"] = _tested(run)
    return {"fold": fold, "rows": len(test), **scores}


def _priced(path: Path, keys: Sequence[str]) -> np.ndarray:
    """Return the prices of these ids in a table that `trainyard predict` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        next(reader)
        price_of = {key: float(price) for key, price in reader}
    missing = [key for key in keys if key not in price_of]
    if missing:
        raise UserError(
            f"{path}: no price for id '{missing[0]}'. Predict the same catalogue: trainyard predict RUN FILE"
        )
    return np.array([price_of[key] for key in keys])


def _fold_of(run: Path) -> int:
    """Return the fold that a run was tested on."""
    config = run / "config.yaml"
    lines = config.read_text().splitlines() if config.is_file() else []
    found = [line.split(":")[1] for line in lines if line.strip().startswith("fold:")]
    if not found:
        raise UserError(f"{run}: no run of this family, for no config.yaml there names a fold.")
    return int(found[0])


def _tested(run: Path) -> float:
    """Return a finished run's SMAPE on its test fold."""
    from trainyard.runs.events import read_metrics

    found = [line["smape"] for line in read_metrics(run) if line.get("split") == "test"]
    if not found:
        raise UserError(f"{run}: its test fold has no score yet. Finish it: trainyard resume {run}")
    return float(found[-1])


# Bench


def _bench(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # forked workers of the seed's loop would warn and turn it off
    with tempfile.TemporaryDirectory() as folder:
        ways, waste = _ways(args, Path(folder))
        lines = side_by_side(ways, rounds=args.rounds, warm_up=True)
    print(as_table(lines))
    for name, share in waste.items():
        print(f"padding, {name:<20}{share:6.1%} of what the encoder computes")
    found = [header("pricing-bench", _typed(args)), *lines, {"kind": "padding", **waste}]
    print(f"one thread; written: {write_new(args.results, 'pricing-bench', found)}")
    return 0


def _ways(args: argparse.Namespace, folder: Path) -> tuple[list[Candidate], dict[str, float]]:
    """Pack the catalogue once; return what is measured, and how much of a batch is padding."""
    from torch.utils.data import DataLoader

    from trainyard.data import order
    from trainyard.data.pack import pack as write
    from trainyard.settings import DataSettings

    from . import catalog, pack, reference

    config = _config(args, -1)
    config.packing.max_tokens = args.max_tokens
    raw = reference.head(catalog.find(args.raw, prefer=config.packing.file), folder / "head.csv", rows=args.rows)
    artifacts = pack.fit_artifacts(raw, config)
    samples = list(pack.samples(raw, config))
    data = write(samples, folder / "packed", meta={}, workers=1, artifacts=artifacts)
    ids, length = np.arange(data.count), data.columns["length"]
    texts = pack.table(raw, config).texts.tolist()
    seed = reference.PerItem(
        texts,
        np.stack(data.read_arrays("numbers", ids)),
        data.columns["price"],
        tokenizer_text=artifacts[pack.TOKENIZER],
        max_tokens=args.max_tokens,
    )
    loader = reference.loader(data, DataSettings(order="buckets", order_by="length"))

    def tokenise() -> int:
        return sum(bool(sample.load(artifacts)) for sample in samples)

    def read() -> int:
        return min(len(data.read_arrays("tokens", ids)), len(data.read_arrays("numbers", ids)))

    def per_item() -> int:
        return sum(len(batch["price"]) for batch in DataLoader(seed, batch_size=8, shuffle=True, num_workers=2))

    def batches(made: order.EpochOrder) -> Callable[[], int]:
        def over() -> int:
            stream = loader.train(lambda epoch: made, epoch=0, start=0, micro_batch_size=0)
            rows = sum(len(next(stream).batch["price"]) for _ in range(len(made)))
            stream.close()
            return rows

        return over

    def way(name: str, work: Callable[[], int], note: str, beside: str = "") -> Candidate:
        return Candidate(name, lambda: for_at_least(1.0, work), "rows/s", note, beside)

    _require_equal([sample.load(artifacts) for sample in samples], data)
    buckets = order.buckets(ids, length, seed=0, epoch=0, global_batch_size=32)
    mixed = order.shuffle(ids, seed=0, epoch=0, global_batch_size=32)
    waste = {
        "to max_tokens": 1 - float(length.mean()) / args.max_tokens,
        "random batches": padding([length[mixed.batch(i)] for i in range(len(mixed))]),
        "bucketed batches": padding([length[buckets.batch(i)] for i in range(len(buckets))]),
    }
    ways = [
        way("tokenise", tokenise, "parse, tokenise and compute the numbers of every row, in memory"),
        way("read", read, "the same rows from shards, bit-identical", "tokenise"),
        way("seed's loop", per_item, f"DataLoader, batch 8, 2 workers, per item, padded to {args.max_tokens}"),
        way("random batches", batches(mixed), "ours, batch 32, padded to the longest", "seed's loop"),
        way("bucketed batches", batches(buckets), "ours, batch 32 of like length", "seed's loop"),
    ]
    return ways, waste


def padding(lengths: Sequence[np.ndarray]) -> float:
    """Return the share of padding in batches whose texts have these lengths, each padded to its longest."""
    computed = sum(len(batch) * int(batch.max()) for batch in lengths)
    return 1 - sum(int(batch.sum()) for batch in lengths) / computed


def _require_equal(fresh: Sequence[Mapping[str, Any]], data: Any) -> None:
    """Make sure that what is read is bit for bit what tokenising gives."""
    ids = np.arange(data.count)
    for row, tokens, numbers in zip(
        fresh, data.read_arrays("tokens", ids), data.read_arrays("numbers", ids), strict=True
    ):
        assert np.array_equal(row["tokens"].values, tokens) and row["numbers"].tobytes() == numbers.tobytes()


def _typed(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments as they can be written down."""
    kept = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | list | Path)}
    return {name: [str(part) for part in value] if isinstance(value, list) else value for name, value in kept.items()}
