"""The command `export`: a run's weights, or its network with its preprocessing, in one file for other programs."""

import argparse
import time
from pathlib import Path

from loguru import logger

from trainyard.cli.request import recall_families
from trainyard.cli.verb import Verbs, add_trust_option, add_verb
from trainyard.errors import UserError
from trainyard.runs import folder as runs
from trainyard.runs.manifest import Entry, list_checkpoints
from trainyard.terminal import say
from trainyard.text import format_duration, format_size

SUFFIXES = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""Formats, and how the names of their files end."""


def add_commands(verbs: Verbs) -> None:
    doc = "write a run's weights, or its network with its preprocessing, to one file for other programs"
    verb = add_verb(verbs, "export", _export, doc)
    verb.add_argument("run", help="its folder, or a job for that job's newest run with weights")
    verb.add_argument("out", type=Path, nargs="?", help="file to write; default: the job's name, here")
    verb.add_argument(
        "--format",
        choices=tuple(SUFFIXES),
        default="safetensors",
        help="safetensors: weights alone; torch-export, onnx: a program that needs no Trainyard; default: %(default)s",
    )
    verb.add_argument("--step", type=int, help="checkpoint of this step; default: the best, else the newest")
    verb.add_argument(
        "--samples",
        type=Path,
        metavar="RAW",
        help="raw files to compare a program with the run on; default: 32 samples of the run's own data",
    )
    add_trust_option(verb)


def _export(args: argparse.Namespace) -> int:
    from trainyard.tools.export import export_program, export_weights

    run = runs.resolve_run(args.run, args.runs, trained=True)
    recall_families(run, args)
    suffix = SUFFIXES[args.format]
    out: Path = args.out or Path(run.resolve().parent.name + suffix)
    if out.suffix != suffix:
        raise UserError(f"{out}: expected a name that ends in {suffix} for --format {args.format}: {out.stem}{suffix}")
    entry, started = _choose_checkpoint(run, args.step), time.monotonic()
    if args.format == "safetensors":
        export_weights(run, entry, out, args.jobs)
        say(f"step {entry.step} -> {out}")
        return 0
    check = export_program(run, entry, out, args.jobs, onnx=args.format == "onnx", samples=args.samples)
    say(
        f"step {entry.step} -> {out} ({format_size(out.stat().st_size)}, {format_duration(time.monotonic() - started)})"
    )
    differences = ", ".join(f"{name} {value:.1e}" for name, value in check.differences.items())
    say(f"{check.runtime} computes the same as the run on {check.samples} samples of {check.source}.")
    say(f"Largest difference, relative above 1: {differences}; {check.tolerance:g} is allowed.")
    return 0


def _choose_checkpoint(run: Path, step: int | None) -> Entry:
    from trainyard.train.checkpoint import choose_undamaged

    entries = list_checkpoints(run / "checkpoints")
    if not entries:
        raise UserError(f"{run}: no checkpoints yet.")
    if step is not None:
        chosen = [entry for entry in entries if entry.step == step]
        if not chosen:
            steps = ", ".join(str(entry.step) for entry in entries)
            raise UserError(f"{run}: no checkpoint of step {step}. There are: {steps}.")
        return chosen[0]
    entry, problem = choose_undamaged(run / "checkpoints")
    if problem:
        logger.warning("{}: {}.", run, problem)
    return entry
