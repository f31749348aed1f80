"""The family's command: score baselines on the same folds."""

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add `pricing-baseline`."""
    verb = verbs.add_parser("pricing-baseline", help="score TF-IDF and ridge on each fold of a catalogue")
    verb.add_argument("raw", type=Path, help="a CSV file, or a folder that contains one")
    verb.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the packing, such as packing.folds=5")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of results: %(default)s")
    verb.add_argument("--runs", nargs="*", type=Path, default=[], metavar="RUN", help="finished runs to compare with")
    verb.set_defaults(command=_run_baseline)


def _run_baseline(args: argparse.Namespace) -> int:
    from .comparison import compare_baselines

    return compare_baselines(args)
