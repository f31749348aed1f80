"""The family's command: score baselines on the same folds."""

import argparse
from pathlib import Path
from typing import Any

from .amounts import MARKS
from .config import Config


def add(verbs: Any) -> None:
    """Add `pricing-baseline`."""
    rule = Config().packing
    verb = verbs.add_parser("pricing-baseline", help="score TF-IDF and ridge on each fold of a catalogue")
    verb.add_argument("raw", type=Path, help="a CSV file, or a folder that contains one")
    verb.add_argument("--file", default=rule.file, help="CSV file in the folder: %(default)s")
    verb.add_argument("--val-share", type=float, default=rule.val_share, help="default: %(default)s")
    verb.add_argument("--id-column", default=rule.id_column)
    verb.add_argument("--text-column", default=rule.text_column)
    verb.add_argument("--further-text-columns", nargs="*", default=[], metavar="COLUMN")
    verb.add_argument("--price-column", default=rule.price_column)
    verb.add_argument("--numeric-columns", nargs="*", default=[], metavar="COLUMN")
    verb.add_argument("--decimal-mark", choices=MARKS, default=rule.decimal_mark)
    verb.add_argument("--group", choices=("title", "text"), default=rule.group, help="what near-duplicates share")
    verb.add_argument("--folds", type=int, default=rule.folds)
    verb.add_argument("--seed", type=int, default=rule.seed, help="seed of the split into folds")
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of results: %(default)s")
    verb.add_argument("--runs", nargs="*", type=Path, default=[], metavar="RUN", help="finished runs to compare with")
    verb.set_defaults(command=_run_baseline)


def _run_baseline(args: argparse.Namespace) -> int:
    from .comparison import compare_baselines

    return compare_baselines(args)
