"""The command fingerprint-statistics: measures the realism of generated prints."""

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add `fingerprint-statistics`."""
    verb = verbs.add_parser(
        "fingerprint-statistics", help="compare sets of prints, real or generated: ridges, area, minutiae, difficulty"
    )
    verb.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="images named FINGER_IMPRESSION")
    verb.add_argument("--synthetic", type=int, default=0, metavar="N", help="also generate N prints, 8 of each finger")
    verb.add_argument("--seed", type=int, default=0, help="of the generated prints (default: %(default)s)")
    verb.add_argument("--dpi", type=int, default=500, help="of the folders (default: %(default)s)")
    verb.add_argument("--sheet", type=Path, metavar="OUT.png", help="also write an image of some generated prints")
    verb.set_defaults(command=_print_statistics)


def _print_statistics(args: argparse.Namespace) -> int:
    from .print_statistics import print_statistics

    print_statistics(args.folders, synthetic=args.synthetic, seed=args.seed, dpi=args.dpi, sheet=args.sheet)
    return 0
