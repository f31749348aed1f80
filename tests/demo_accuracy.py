"""Trains demos with several seeds, and says how good they become, and after how many steps they are good enough.

`python -m tests.demo_accuracy --work FOLDER [--only JOB] [--results benchmarks]` writes the distribution with which
`tests/test_demo_accuracy.py` compares one more run. A change that makes a family learn less, or more slowly, and breaks
nothing else, shows there.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tests.train_grid import train
from trainyard.measure import make_header, write_new
from trainyard.runs.events import read_metrics

LEAST_RUNS = 10
"""Fewer draw no distribution that one more run can be compared with."""

_OUTSIDE = 1e-3
"""Probability that a run of unchanged code is called worse, of each of its two numbers."""


@dataclass(frozen=True)
class Demo:
    """A demo, the metric that selects its weights, and a value of it that runs reach on the validation set."""

    job: str
    metric: str
    target: float
    eval_every: str  # more often than the preset's: evaluating changes no step
    higher_is_better: bool = False

    def is_reached(self, value: float) -> bool:
        return value >= self.target if self.higher_is_better else value <= self.target


DEMOS = (
    Demo("fingerprint_demo", "eer_all_pairs", 0.1, "20st"),
    Demo("pricing_demo", "smape", 30.0, "1ep"),
    Demo("antispoof_demo", "eer", 0.2, "1ep"),
    Demo("tinydet_demo", "ap", 0.4, "2ep", higher_is_better=True),
    Demo("twins_demo", "eer_twin", 0.3, "1ep"),
)


def train_demo(demo: Demo, seed: int, work: Path) -> dict[str, Any]:
    """Train a demo, and return what it reached; a run that is there already is read."""
    begin = time.monotonic()
    words = [f"seed={seed}", f"eval_every={demo.eval_every}", "score_baselines=false"]
    found = read_reached(demo, read_metrics(train(demo.job, words, str(seed), work)))
    return {"kind": "run", "job": demo.job, "seed": seed, **found, "seconds": round(time.monotonic() - begin, 1)}


def read_reached(demo: Demo, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the metric on the test set, the best on the validation set, and the first step at the target.

    A demo without a test set is tested by its last validation. A run that never reached the target counts with twice
    its steps.
    """
    curve = [(line["step"], line[demo.metric]) for line in lines if line.get("split") == "val" and line["step"] > 0]
    test = [line[demo.metric] for line in lines if line["kind"] == "eval"][-1]
    best = (max if demo.higher_is_better else min)(value for _, value in curve)
    steps = next((step for step, value in curve if demo.is_reached(value)), 2 * curve[-1][0])
    found = {"metric": demo.metric, "test": test, "val": best, "target": demo.target}
    return {**found, "steps_to_target": steps, "steps_between": curve[0][0]}


def find_worse(demo: Demo, known: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Return a sentence for each number of a run that is worse than the known runs' distribution lets expect.

    The limit is that of one more draw of a normal distribution, of which n are known: mean + t * s * sqrt(1 + 1/n), t
    of Student's distribution. Steps are compared by their logarithms, and may be those of one more evaluation.
    """
    worse = []
    for name in ("test", "steps_to_target"):
        higher = demo.higher_is_better and name == "test"
        values = [math.log(run[name]) if name != "test" else float(run[name]) for run in known]
        sign = -1 if higher else 1
        limit = fmean(values) + sign * compute_prediction_half_width(values)
        shown = limit if name == "test" else math.exp(limit) + found["steps_between"]
        if sign * (found[name] - shown) > 0:
            worse.append(
                f"{demo.job}, seed {found['seed']}: {name} {found[name]:.4g}, but {len(known)} known runs allow "
                f"{'at least' if higher else 'at most'} {shown:.4g}"
            )
    return worse


def compute_prediction_half_width(values: Sequence[float]) -> float:
    """Return how far from the mean of n normally distributed values one more lies, but for a share of `_OUTSIDE`."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    n = len(values)
    return float(stdtrit(n - 1, 1 - _OUTSIDE)) * stdev(values) * math.sqrt(1 + 1 / n)


def read_known(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of the newest result file of each demo, by job."""
    known: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("demo-accuracy-*.jsonl")):
        runs = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "run"]
        known |= {job: [run for run in runs if run["job"] == job] for job in {run["job"] for run in runs}}
    return known


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=LEAST_RUNS)
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=Path, required=True, help="folder for packed data and runs; kept")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    lines = []
    for demo in DEMOS:
        for seed in range(args.seeds if args.only in demo.job else 0):
            lines.append(train_demo(demo, seed, args.work))
            print(lines[-1], flush=True)
    if args.results:
        print(
            f"written: {write_new(args.results, 'demo-accuracy', [make_header('demo-accuracy', vars(args)), *lines])}"
        )


if __name__ == "__main__":
    main()
