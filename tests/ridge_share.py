"""Measures which share of the ridge in a pricing blend is best, by predictions for folds that training has not seen.

`python -m tests.ridge_share CATALOGUE RUN RUN ... --results benchmarks`, with a run for each fold, of a catalogue whose
ids are whole numbers, writes `ridge-share-DATE.jsonl`: for each fold, the share that is best on the other folds, its
SMAPE, and how much lower that is than with one half; and the mean SMAPE of each share.
"""

import argparse
from pathlib import Path

import numpy as np

from jobs.pricing.pack import RIDGE
from tests.checkout import ROOT
from trainyard.api import Run
from trainyard.config.compose import load_config
from trainyard.data.shards import ShardSet
from trainyard.measure import make_header, write_new

SHARES = np.linspace(0, 1, 101)


def compute_smape(run: Path, catalogue: Path) -> np.ndarray:
    """Return the SMAPE on a run's test fold for each of `SHARES`; the run blends equal parts of logarithms."""
    predicted = Run(run).predict(catalogue)
    keys = [f"{key:.0f}" for key in predicted["sample_id"]]
    price = dict(zip(keys, predicted["price"].tolist(), strict=True))
    data = ShardSet(Path(load_config(run / "config.yaml", ROOT / "jobs").data.path))
    assert RIDGE in data.artifacts, f"{run}: it has no ridge"
    test = np.flatnonzero(data.columns["set"] == data.vocabulary["set"].index("test"))
    blend = np.log([price[key] for key in data.read_keys(test)])
    ridge, true = data.columns["ridge"][test].astype(np.float64), np.log(data.columns["price"][test])
    network = 2 * blend - ridge
    errors = (1 - SHARES[:, None]) * network + SHARES[:, None] * ridge - true
    return np.asarray(100 * (2 * np.tanh(np.abs(errors) / 2)).mean(axis=1))


def main() -> None:
    """Predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("catalogue", type=Path)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    smape_FS = np.stack([compute_smape(run, args.catalogue) for run in args.runs])
    lines = []
    for fold, smape_S in enumerate(smape_FS):
        best = int(np.delete(smape_FS, fold, axis=0).mean(axis=0).argmin())
        line = {"fold": fold, "share": SHARES[best], "smape": smape_S[best], "gain": smape_S[50] - smape_S[best]}
        lines.append({"kind": "fold", **{name: round(float(value), 4) for name, value in line.items()}})
        print(lines[-1])
    for share, mean in zip(SHARES[::10], smape_FS.mean(axis=0)[::10], strict=True):
        lines.append({"kind": "share", "share": round(float(share), 2), "smape": round(float(mean), 4)})
        print(lines[-1])
    options = {"catalogue": args.catalogue, "runs": [str(run) for run in args.runs]}
    print(f"written: {write_new(args.results, 'ridge-share', [make_header('ridge-share', options), *lines])}")


if __name__ == "__main__":
    main()
