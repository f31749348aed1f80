"""The commands that use a trained model: evaluate, predict, embed, compare and search."""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.request import recall_families
from trainyard.cli.verb import Verbs, add_trust_option, add_verb
from trainyard.errors import UserError
from trainyard.runs import folder as runs
from trainyard.terminal import say
from trainyard.text import align_columns, format_duration, quote_path

if TYPE_CHECKING:
    from trainyard.tools.search import SearchResult

SHOWN = 20
"""Candidates that `search` prints; more are only in the file that --out names."""


def add_commands(verbs: Verbs) -> None:
    doc = "score a run's weights, and its family's baselines, on labelled folders: metrics, intervals, figures"
    verb = _add_use_verb(verbs, "evaluate", _evaluate, doc)
    verb.add_argument("folders", nargs="+", metavar="FOLDER", help="labelled raw files as for training, or packed data")
    verb.add_argument("--split", default="", metavar="NAME", help="only this split of packed data, or set of raw files")
    verb.add_argument("--no-baseline", action="store_true", help="the run alone: baselines take longer than the run")
    verb.set_defaults(overrides=[])
    doc = "write a run's predictions for new raw files to a table; the scores of pairs, of a model that compares"
    verb = _add_use_verb(verbs, "predict", _predict, doc)
    verb.add_argument("raw", type=Path, help="new raw files of the job, unlabelled: a folder, or one of them")
    verb.add_argument(
        "out", type=Path, help=".csv, .json or .parquet file to write; the family's README has its columns"
    )
    pairs = "score these pairs: a table with columns one,other; default: all"
    verb.add_argument("--pairs", type=Path, metavar="CSV", help=pairs)
    verb = _add_use_verb(verbs, "embed", _embed, "write the embeddings of new raw files, with a CSV file of their keys")
    verb.add_argument("raw", type=Path, help="new raw files of the job, unlabelled")
    verb.add_argument("out", type=Path, help="file to write, .safetensors or .npz; the keys go to the .csv next to it")
    whose = "whose each sample is: the group in brackets, from the beginning of its key, such as '([^/]+)/'"
    verb.add_argument("--identity", metavar="REGEX", help=whose)
    doc = "compare two raw files: score, threshold and verdict at a false match rate"
    verb = _add_use_verb(verbs, "compare", _compare, doc)
    verb.add_argument("one", type=Path, help="raw file, such as an image")
    verb.add_argument("other", type=Path, help="raw file to compare it with")
    share = "share of the run's impostor pairs that the threshold may accept; default: %(default)s"
    verb.add_argument("--fmr", type=float, default=0.001, metavar="RATE", help=share)
    kind = "which impostors the rate is about; default: the family's first"
    verb.add_argument("--impostors", default="", metavar="KIND", help=kind)
    matcher = "score with the family's matcher, which reads both files; the rate is of the run's newest evaluation"
    verb.add_argument("--matcher", action="store_true", help=matcher)
    doc = "find the best gallery samples for each probe, exactly; with identities, how often they are right"
    verb = _add_use_verb(verbs, "search", _search, doc)
    verb.add_argument("probes", type=Path, help=".safetensors file of `trainyard embed`, or raw files")
    verb.add_argument("gallery", type=Path, help=".safetensors file of `trainyard embed`")
    verb.add_argument("--top", type=int, metavar="K", help="candidates of each probe; default: 10")
    verb.add_argument(
        "--out", type=Path, metavar="CSV", help="write all candidates to this .csv, .json or .parquet file"
    )
    rerank = "let the family's matcher order the K best of each probe, and print its scores"
    verb.add_argument("--rerank", type=int, metavar="K", help=rerank)
    files = "for --rerank: the raw files that GALLERY was embedded from"
    verb.add_argument("--files", type=Path, metavar="FOLDER", help=files)
    rate = "print FNIR at this FPIR; default: 0.1, 0.01, 0.001 if supported"
    verb.add_argument("--fpir", type=float, metavar="RATE", help=rate)


def _add_use_verb(
    verbs: Verbs, name: str, command: Callable[[argparse.Namespace], int], doc: str
) -> argparse.ArgumentParser:
    verb = add_verb(verbs, name, command, doc)
    verb.add_argument("run", help="its folder, or a job for that job's newest run with weights")
    add_trust_option(verb)
    return verb


def _find_run(args: argparse.Namespace) -> Path:
    """Return the run's folder, after choosing its families, and checking those that it names or contains."""
    run = runs.resolve_run(args.run, args.runs, trained=True)
    recall_families(run, args)
    return run


def _evaluate(args: argparse.Namespace) -> int:
    from trainyard.report.evaluation_table import format_evaluations
    from trainyard.tools.evaluate import evaluate

    run = _find_run(args)
    words = args.folders + args.overrides  # both may come after a flag
    options = [word for word in words if _is_option(word)]
    folders = [Path(word) for word in words if not _is_option(word)]
    if not folders:
        command = f"trainyard evaluate {quote_path(args.run)} FOLDER {shlex.join(options)}"
        raise UserError(f"Name a folder to evaluate: {command}")
    evals = evaluate(run, folders, args.jobs, split=args.split, overrides=options, with_baselines=not args.no_baseline)
    say(format_evaluations(evals))
    for item in evals:
        say(f"{item.describe()} Written: {item.path}")
    say(f"next: trainyard report {quote_path(args.run)}")
    return 0


def _is_option(word: str) -> bool:
    return re.match(r"[a-z][\w.]*=", word) is not None and not Path(word).exists()


def _predict(args: argparse.Namespace) -> int:
    from trainyard.tools.predict import predict

    count, what = predict(_find_run(args), args.raw, args.out, args.jobs, pairs=args.pairs)
    say(f"{count:,} {what}{'s are' if count != 1 else ' is'} in {args.out}")
    return 0


def _embed(args: argparse.Namespace) -> int:
    from trainyard.tools.embed import embed
    from trainyard.tools.embeddings import MAPPED, find_table

    run = _find_run(args)
    count = embed(run, args.raw, args.out, args.jobs, identity=args.identity)
    say(f"{count:,} embedding{'s are' if count != 1 else ' is'} in {args.out}, the keys in {find_table(args.out)}")
    if args.out.suffix == MAPPED:
        say(f"next: trainyard search {quote_path(args.run)} PROBES {quote_path(args.out)}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from trainyard.tools.embed import compare

    typed = shlex.join(["trainyard", "compare", args.run, str(args.one), str(args.other)])
    asked = {"fmr": args.fmr, "kind": args.impostors, "by_matcher": args.matcher, "command": typed}
    comparison = compare(_find_run(args), args.one, args.other, args.jobs, **asked)
    say(f"score      {comparison.score:.6f}")
    say(f"threshold  {comparison.point.threshold:.6f}  at FMR {args.fmr:g}")
    say(f"verdict    {'match' if comparison.score >= comparison.point.threshold else 'no match'}")
    recorded = comparison.recorded
    accepted = round(comparison.point.fmr * len(recorded.impostor))
    say(
        f"{accepted:,} of {len(recorded.impostor):,} impostor trials ({recorded.kind}) of {recorded.source} score that "
        f"high, and {comparison.point.fnmr:.2%} of its genuine pairs do not."
    )
    if accepted < 30:
        say("Fewer than 30 errors: the true rate may differ by more than 30 % (rule of 30, ISO/IEC 19795-1).")
    return 0


def _search(args: argparse.Namespace) -> int:
    from trainyard.tools.search import search

    asked = {"top": args.top, "out": args.out, "rerank": args.rerank, "files": args.files}
    result = search(_find_run(args), args.probes, args.gallery, args.jobs, **asked)
    probes, rows, top = len(result.probes), len(result.gallery.keys), result.nearest.rows.shape[1]
    rate = probes * rows / max(result.nearest.seconds, 1e-9)  # reading included
    say(
        f"{probes:,} probes in {rows:,} gallery rows, the best {top} of each, in "
        f"{format_duration(result.nearest.seconds)}: {rate / 1e6:,.1f} million comparisons/s"
    )
    if args.out is not None:
        say(f"{probes * top:,} candidates are in {args.out}")
    elif probes * top <= SHOWN:
        lines = list(result.list_candidates())
        cells = [[f"{v:.6f}" if isinstance(v, float) else str(v) for v in line.values()] for line in lines]
        say("\n".join(align_columns([list(lines[0]), *cells])))
    else:
        say("All candidates: add --out candidates.csv")
    _print_identification(result, args.fpir)
    return 0


def _print_identification(result: "SearchResult", fpir: float | None) -> None:
    identified = result.identify()
    if identified is None:
        say("No identities: rank-1 and FNIR need embeddings of `trainyard embed ... --identity REGEX` on both sides.")
        return
    if identified.rank1 is not None:
        say(f"rank-1 identification rate {identified.rank1:.2%} of {identified.mated:,} mated probes")
    rates = identified.list_supported() if fpir is None else [fpir]
    for rate in rates:
        fnir, threshold = identified.find_fnir(rate)
        say(f"FNIR {fnir:.2%} at FPIR {rate:g} (threshold {threshold:.6f}, {identified.non_mated:,} non-mated probes)")
    if not rates:
        say(
            f"No FNIR: {identified.non_mated:,} probes are of nobody in the gallery; FPIR 0.1 needs 30 "
            "(rule of 3, ISO/IEC 19795-1)."
        )
