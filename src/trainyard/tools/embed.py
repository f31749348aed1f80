"""`trainyard embed` and `compare`: the embeddings of new raw files, and the verdict on two of them."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from loguru import logger

from trainyard import scoring
from trainyard.config.settings import KEEP
from trainyard.data.shards import Sample
from trainyard.errors import UserError
from trainyard.runs.evaluations import name_pair_scores, read_evaluations
from trainyard.runs.pair_scores import PairScores, read_pair_scores, read_validation_scores
from trainyard.text import quote_path
from trainyard.tools.embeddings import CHECKPOINT, COMPRESSED, MAPPED, find_table, write_embeddings
from trainyard.tools.predict import check_absent
from trainyard.tools.trained_model import TrainedModel, compute_embeddings, load_model, pack_temporarily
from trainyard.train.module import DataInfo


def embed(run: Path, raw: Path, out: Path, jobs_dir: Path, *, identity: str | None = None) -> int:
    """Write the embeddings of all raw files to `out`, and their keys to the CSV file next to it; return how many.

    Each is of unit length, as the family compares them. Needs the disk space of the packed files for a while.

    Args:
        out: ends in .safetensors or .npz.
        identity: a regular expression that matches the beginning of each key; its first group is whose the sample is.

    Raises:
        UserError: the family does not compare samples, or a file exists or cannot be read.
    """
    if out.suffix not in (MAPPED, COMPRESSED):
        raise UserError(f"{out}: expected a name that ends in {MAPPED} or {COMPRESSED}, such as {out.stem}{MAPPED}.")
    check_absent(out, find_table(out))
    model = load_model(run, jobs_dir)
    model.require_embeddings("embed")
    with pack_temporarily(model, model.list_samples(raw), near=out.parent) as data:
        keys = data.read_keys(np.arange(data.count))
        identities = None if identity is None else read_identities(keys, identity)
        metadata = {"family": model.config.family, "job": model.config.job, CHECKPOINT: model.checkpoint.sha256}
        metadata["step"] = str(model.checkpoint.step)
        write_embeddings(out, compute_embeddings(model, data), keys, identities=identities, metadata=metadata)
        return len(keys)


def read_identities(keys: Sequence[str], pattern: str) -> list[str]:
    """Return the first group of a regular expression in each key.

    Raises:
        UserError: it is no such expression, or it does not match a key.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--identity '{pattern}': not a regular expression ({error}). {_PATTERNS}") from None
    if expression.groups != 1:
        raise UserError(
            f"--identity '{pattern}': expected one group in brackets, found {expression.groups}. {_PATTERNS}"
        )
    matches = [expression.match(key) for key in keys]
    wrong = next((key for key, match in zip(keys, matches, strict=True) if not (match and match[1])), None)
    if wrong is not None:
        raise UserError(f"--identity '{pattern}': finds nothing in the key '{wrong}'. {_PATTERNS}")
    return [match[1] for match in matches if match]


_PATTERNS = "For anna/01.png: --identity '([^/]+)/'. For 101_3.tif: --identity '(.+)_'"


@dataclass(frozen=True)
class Comparison:
    """The verdict on two samples."""

    score: float  # inner product of the two embeddings, or of `TrainModule.match_samples`
    point: scoring.OperatingPoint  # with the stated FMR
    recorded: PairScores  # the trials behind it


def compare(
    run: Path, one: Path, other: Path, jobs_dir: Path, *, fmr: float, kind: str, command: str, by_matcher: bool = False
) -> Comparison:
    """Compare two raw files with the weights of a run, at a false match rate that its validation set supports.

    Args:
        kind: of impostors that the rate is about; "": the first that the family names.
        command: as typed, without the rate, for an error about it.
        by_matcher: score with the family's matcher instead; the rate is of its scores in the run's newest evaluation.

    Raises:
        UserError: the family does not compare samples, or not so; nothing holds the scores that a threshold needs;
            there are too few impostor trials for the rate; or a file cannot be read.
    """
    model = load_model(run, jobs_dir)
    model.require_comparison("compare")
    if by_matcher:
        model.require_matcher("compare --matcher")
        recorded = _read_matcher_scores(run, model.module.matcher, kind)
        point = recorded.find_point(fmr, command=f"{command} --matcher")
    else:
        recorded = read_validation_scores(run, step=model.checkpoint.step, kind=kind)
        point = recorded.find_point(fmr, command=command)
    if not by_matcher and recorded.precision != model.precision.dtype:
        logger.warning(
            "The threshold is from scores in {}, and this machine computes in {}: they may differ in the third digit.",
            recorded.precision,
            model.precision.dtype,
        )
    with pack_temporarily(model, _list_two(model, one, other), near=None) as data:
        if model.has_embeddings and not by_matcher:
            embeddings_2D = np.concatenate(list(compute_embeddings(model, data)))
            scores = scoring.compare_embeddings(embeddings_2D[:1], embeddings_2D[1:])
        else:
            info = DataInfo.from_shards(data, np.empty(0, np.int64))
            scores = model.module.match_samples(info, np.array([0]), np.array([1]))
    (score,) = scores.tolist()
    return Comparison(score, point, recorded)


def _read_matcher_scores(run: Path, matcher: str, kind: str) -> PairScores:
    """Return the matcher's scores from the newest evaluation that has them."""
    again = f"trainyard evaluate {quote_path(run)} FOLDER"
    for evaluation in reversed(read_evaluations(run)):
        path = evaluation.path / name_pair_scores(matcher)
        store = (evaluation.about.get("packing") or {}).get("store", KEEP)
        if path.exists() and store != KEEP:
            raise UserError(
                f"{evaluation.path}: its {matcher} read images as packing.store={store} left them, but reads these "
                f"files as they are, so its threshold does not hold. Type: {again} packing.store={KEEP}"
            )
        if path.exists():
            scores, _ = read_pair_scores(path, kind=kind, remedy=again)
            return replace(scores, source=f"the evaluation {evaluation.name}", more="Evaluate a larger folder")
    raise UserError(
        f"{run}: no evaluation of it has scores of the {matcher}, from which a threshold comes. Score labelled files "
        f"like those to compare: {again}"
    )


def _list_two(model: TrainedModel, one: Path, other: Path) -> Iterator[Sample]:
    """Yield the sample of each file, with a number before its key, because both files may have one name."""
    for number, path in enumerate((one, other), 1):
        samples = list(itertools.islice(model.list_samples(path), 2))
        if path.is_dir() or len(samples) != 1:
            raise UserError(f"{path}: expected one raw file, as for {model.config.job}. Type: trainyard compare --help")
        yield replace(samples[0], key=f"{number}: {path}")
