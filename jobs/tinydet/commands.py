"""Commands of the family: write COCO results, and overfit a few tiles."""

import argparse
from pathlib import Path
from typing import Any

from trainyard.terminal import say


def add(verbs: Any) -> None:
    """Add `coco-results` and `tinydet-overfit` to trainyard's commands."""
    verb = verbs.add_parser(
        "coco-results", help="turn the table of `trainyard predict` into a JSON file of results for COCO's evaluator"
    )
    verb.add_argument("table", type=Path, help="CSV that `trainyard predict` wrote")
    verb.add_argument("out", type=Path, help="JSON file to write")
    verb.add_argument(
        "--annotations",
        type=Path,
        required=True,
        help="COCO file with the ids of images and categories; it needs no annotations: image_info_test-dev2017",
    )
    verb.set_defaults(command=_write_results)
    verb = verbs.add_parser(
        "tinydet-overfit", help="overfit a few tiles with each variant, and compare the learning curves"
    )
    verb.add_argument("raw", type=Path, help="folder of images with COCO annotations")
    verb.add_argument("--variants", default="ms,vanilla", help="which of ms, cond, vanilla (default: %(default)s)")
    verb.add_argument("--steps", type=int, default=600, help="optimizer steps per variant (default: %(default)s)")
    verb.add_argument(
        "--tiles", type=int, default=4, help="how many tiles: those with the most objects (default: %(default)s)"
    )
    verb.add_argument("--tile-px", type=int, default=256, help="side of a tile (default: %(default)s)")
    verb.add_argument(
        "--scale", type=float, default=0.5, help="factor on the image size before cutting (default: %(default)s)"
    )
    verb.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of the result file")
    verb.set_defaults(command=_overfit)


def _write_results(args: argparse.Namespace) -> int:
    from .results import write_results

    count, missing = write_results(args.table, args.out, args.annotations)
    say(f"{count:,} detections are in {args.out}")
    if missing:
        say(f"{len(missing):,} images of {args.annotations} are not in the table, such as {missing[0]}.")
    return 0


def _overfit(args: argparse.Namespace) -> int:
    from .overfit import overfit

    overfit(
        args.raw,
        variants=args.variants.split(","),
        steps=args.steps,
        tiles=args.tiles,
        tile_px=args.tile_px,
        scale=args.scale,
        results=args.results,
    )
    return 0
