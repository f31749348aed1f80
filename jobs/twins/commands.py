"""The family's own verb: `twins-compare`, one encoding per picture against the reference's list of pairs."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import header, write_new

WAYS = {"one encoding per picture": "twins_demo", "list of pairs": "twins_pairlist"}


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "twins-compare", help="train twins_demo and the reference's loop at once, on the same faces"
    )
    verb.add_argument("--minutes", type=float, default=8.0, help="of training, each on a core of its own: %(default)s")
    verb.add_argument("--pictures", type=int, default=4800, help="synthetic ones: %(default)s")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs: %(default)s")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of results: %(default)s")
    verb.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> int:
    """Run both at once, so that they meet the same state of the machine, and write what came out."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(WAYS):
        raise UserError(f"twins-compare needs {len(WAYS)} cores, one for each; this process may use {len(cores)}.")
    name = f"compare-{args.minutes:g}min-seed{args.seed}"
    _prepare(args)
    started = [
        subprocess.Popen(_command(args, preset, name), preexec_fn=_on_core(core), stdout=subprocess.DEVNULL)
        for preset, core in zip(WAYS.values(), cores, strict=False)
    ]
    codes = [process.wait() for process in started]
    runs = {way: args.runs / preset / name for way, preset in WAYS.items()}
    if any(codes):
        raise UserError(f"A run ended with exit code {max(codes)}: trainyard why {next(iter(runs.values()))}")
    lines = [_measured(way, run) for way, run in runs.items()]
    level = min(line["best_auc"] for line in lines)
    for line in lines:
        line["s_to_common_auc"] = next(s for s, auc in line["curve"] if auc >= level)
    ours, theirs = lines
    print(f"{'':26}{'pictures/s':>12}{'encodings of a picture':>24}{'pairs per encoding':>20}{'AUC':>8}{'s to it':>9}")
    for line in lines:
        print(
            f"{line['name']:26}{line['pictures_per_s']:12.1f}{line['encodings_per_pass']:24.0f}"
            f"{line['pairs_per_encoding']:20.2f}{line['best_auc']:8.3f}{line['s_to_common_auc']:9.0f}"
        )
    print(
        f"a pass over all pairs costs {theirs['encodings_per_pass'] / ours['encodings_per_pass']:.0f} x the encodings; "
        f"an AUC of {level:.3f} against twins in validation took {theirs['s_to_common_auc']:.0f} s and "
        f"{ours['s_to_common_auc']:.0f} s"
    )
    options = {"minutes": args.minutes, "pictures": args.pictures, "seed": args.seed, "common_auc": level}
    print(f"written: {write_new(args.results, 'twins-compare', [header('twins-compare', options), *lines])}")
    return 0


def _prepare(args: argparse.Namespace) -> None:
    """Draw and pack the faces once: a run of one step does both."""
    settings = [f"data.synthetic={args.pictures}", f"seed={args.seed}", "max_duration=1st", "eval_every=1ep"]
    command = [sys.executable, "-m", "trainyard", "run", "twins_demo", *settings, "--runs", str(args.runs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _command(args: argparse.Namespace, preset: str, name: str) -> list[str]:
    settings = [
        *(f"data.synthetic={args.pictures}", f"seed={args.seed}", f"max_duration={args.minutes:g}min"),
        *("eval_every=0.5min", "schedule.name=constant", "schedule.warmup=20st", "evaluation.bootstrap_draws=0"),
    ]
    return [sys.executable, "-m", "trainyard", "run", preset, *settings, "--runs", str(args.runs), "--name", name]


def _on_core(core: int) -> Any:
    return lambda: os.sched_setaffinity(0, {core})


def _measured(way: str, run: Path) -> dict[str, Any]:
    """Return what a run says of its speed, its pairs and its way to the best AUC."""
    from trainyard.data.shards import ShardSet
    from trainyard.runs.events import read_metrics

    lines = list(read_metrics(run))
    train = [line for line in lines if line["kind"] == "train"]
    curve = list(_curve(lines))
    data = ShardSet(Path(json.loads((run / "env.json").read_text())["data"]["path"]))
    per_person = _pictures_per_person(data)
    return {
        "kind": "result",
        "name": way,
        "run": str(run),
        "pictures_per_s": sum(line["samples_per_s"] for line in train) / len(train),
        "pairs_per_encoding": sum(line["pairs_per_picture"] for line in train) / len(train),
        # To see every pair of a family, a list of pairs encodes a picture with each of its 2n - 1 others.
        "encodings_per_pass": 1 if way.startswith("one") else 2 * per_person - 1,
        "best_auc": max(auc for _, auc in curve),
        "curve": curve,
    }


def _curve(lines: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield (seconds of training so far, AUC against twins) of each validation; evaluation itself is left out."""
    spent = 0.0
    for line in lines:
        if line["kind"] == "eval" and line["split"] == "val":
            spent += line["seconds"]
            yield line["elapsed_s"] - spent, line["auc_twin"]


def _pictures_per_person(data: Any) -> float:
    """Return the mean number of pictures of a training person."""
    import numpy as np

    trains = np.array(data.vocabulary["set"])[data.columns["set"]] == "train"
    counts = np.bincount(data.columns["person"][trains])
    return float(counts[counts > 0].mean())
