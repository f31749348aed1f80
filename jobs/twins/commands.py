"""`trainyard twins-compare`: one encoding per image compared with the reference's list of pairs."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import make_header, write_new

CANDIDATES = {"one encoding per picture": "twins_demo", "list of pairs": "twins_pairlist"}


def add(verbs: Any) -> None:
    """Add the `twins-compare` verb to the command line."""
    verb = verbs.add_parser(
        "twins-compare", help="train twins_demo and the reference's training loop side by side, on the same faces"
    )
    verb.add_argument("--minutes", type=float, default=8.0, help="of training, each on its own core: %(default)s")
    verb.add_argument("--pictures", type=int, default=4800, help="number of synthetic images: %(default)s")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs: %(default)s")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of results: %(default)s")
    verb.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> int:
    """Train both at once, so that both see the same machine load, and write the results."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(CANDIDATES):
        raise UserError(f"twins-compare needs {len(CANDIDATES)} cores, one per run; this process may use {len(cores)}.")
    name = f"compare-{args.minutes:g}min-seed{args.seed}"
    _prepare_data(args)
    processes = [
        subprocess.Popen(_build_command(args, preset, name), preexec_fn=_pin_to_core(core), stdout=subprocess.DEVNULL)
        for preset, core in zip(CANDIDATES.values(), cores, strict=False)
    ]
    codes = [process.wait() for process in processes]
    runs = {candidate: args.runs / preset / name for candidate, preset in CANDIDATES.items()}
    if any(codes):
        raise UserError(f"A run ended with exit code {max(codes)}: trainyard why {next(iter(runs.values()))}")
    lines = [_summarise_run(candidate, run) for candidate, run in runs.items()]
    common_auc = min(line["best_auc"] for line in lines)
    for line in lines:
        line["s_to_common_auc"] = next(s for s, auc in line["curve"] if auc >= common_auc)
    ours, pair_list = lines
    cost = pair_list["encodings_per_pass"] / ours["encodings_per_pass"]
    print(f"{'':26}{'images/s':>12}{'encodings of an image':>24}{'pairs per encoding':>20}{'AUC':>8}{'s to it':>9}")
    for line in lines:
        print(
            f"{line['name']:26}{line['pictures_per_s']:12.1f}{line['encodings_per_pass']:24.0f}"
            f"{line['pairs_per_encoding']:20.2f}{line['best_auc']:8.3f}{line['s_to_common_auc']:9.0f}"
        )
    print(
        f"a pass over all pairs costs {cost:.0f} x the encodings; "
        f"a validation AUC of {common_auc:.3f} against twins took {pair_list['s_to_common_auc']:.0f} s and "
        f"{ours['s_to_common_auc']:.0f} s"
    )
    options = {"minutes": args.minutes, "pictures": args.pictures, "seed": args.seed, "common_auc": common_auc}
    print(f"written: {write_new(args.results, 'twins-compare', [make_header('twins-compare', options), *lines])}")
    return 0


def _prepare_data(args: argparse.Namespace) -> None:
    """Draw and pack the faces once, with a run of one step."""
    settings = [f"data.synthetic={args.pictures}", f"seed={args.seed}", "max_duration=1st", "eval_every=1ep"]
    command = [sys.executable, "-m", "trainyard", "run", "twins_demo", *settings, "--runs", str(args.runs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _build_command(args: argparse.Namespace, preset: str, name: str) -> list[str]:
    settings = [
        *(f"data.synthetic={args.pictures}", f"seed={args.seed}", f"max_duration={args.minutes:g}min"),
        *("eval_every=0.5min", "schedule.name=constant", "schedule.warmup=20st", "evaluation.bootstrap_draws=0"),
    ]
    return [sys.executable, "-m", "trainyard", "run", preset, *settings, "--runs", str(args.runs), "--name", name]


def _pin_to_core(core: int) -> Any:
    return lambda: os.sched_setaffinity(0, {core})


def _summarise_run(candidate: str, run: Path) -> dict[str, Any]:
    """Return a run's speed, its pairs per encoding and its AUC over time."""
    from trainyard.data.shards import ShardSet
    from trainyard.runs.events import read_metrics

    lines = list(read_metrics(run))
    train = [line for line in lines if line["kind"] == "train"]
    curve = list(_read_curve(lines))
    data = ShardSet(Path(json.loads((run / "env.json").read_text())["data"]["path"]))
    per_person = _count_images_per_person(data)
    return {
        "kind": "result",
        "name": candidate,
        "run": str(run),
        "pictures_per_s": sum(line["samples_per_s"] for line in train) / len(train),
        "pairs_per_encoding": sum(line["pairs_per_picture"] for line in train) / len(train),
        # To visit every pair of a family, a list of pairs encodes an image once for each of the 2n - 1 others.
        "encodings_per_pass": 1 if candidate.startswith("one") else 2 * per_person - 1,
        "best_auc": max(auc for _, auc in curve),
        "curve": curve,
    }


def _read_curve(lines: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield (training seconds so far, AUC against twins) for each validation; excludes evaluation time."""
    spent = 0.0
    for line in lines:
        if line["kind"] == "eval" and line["split"] == "val":
            spent += line["seconds"]
            yield line["elapsed_s"] - spent, line["auc_twin"]


def _count_images_per_person(data: Any) -> float:
    """Return the mean number of images per person in the training set."""
    import numpy as np

    is_train = np.array(data.vocabulary["set"])[data.columns["set"]] == "train"
    counts = np.bincount(data.columns["person"][is_train])
    return float(counts[counts > 0].mean())
