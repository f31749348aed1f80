"""`trainyard predict`: run the final weights of a run on new raw files, and write a table."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.files import open_atomically
from trainyard.tables import check_ending, read_table, write_rows
from trainyard.text import quote_path, suggest_nearest
from trainyard.tools.trained_model import TrainedModel, compute_embeddings, compute_rows, load_model, pack_temporarily

if TYPE_CHECKING:
    from trainyard.data.shards import ShardSet

MOST_PAIRS = 1_000_000
"""Pairs of a folder that are all written; more are a search, which keeps the best of each sample."""

_PAIRS_AT_ONCE = 4096


def predict(run: Path, raw: Path, out: Path, jobs_dir: Path, *, pairs: Path | None = None) -> tuple[int, str]:
    """Write a table to `out`, as `tables.write_rows` does: a line per sample, or per pair in families that compare.

    Args:
        pairs: a table of the pairs to score, with the columns `one` and `other`; None: all pairs of `raw`.

    Returns:
        The number of lines, and the kind of each: "prediction" or "pair".

    Raises:
        UserError: the family has no predictions, the run has no checkpoint, `raw` or `pairs` cannot be read, or `out`
            exists or has another ending than tables have.
    """
    check_table_path(out)
    model = load_model(run, jobs_dir)
    if pairs is not None or not model.predicts:
        model.require_embeddings("predict --pairs" if pairs is not None else "predict")
    with pack_temporarily(model, model.list_samples(raw), near=out.parent) as data:
        if model.has_embeddings:
            return _write_pairs(model, data, out, pairs), "pair"
        rows = list(compute_rows(model, data))
        joined = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
        lines = list(model.module.prediction_rows(joined, data.read_keys(np.arange(data.count))))
        write_lines(out, list(lines[0]) if lines else [], lines)  # a detector may find nothing
        return data.count, "prediction"


def check_absent(*paths: Path) -> None:
    """Raise a UserError if one of these files exists."""
    for path in paths:
        if os.path.lexists(path):
            raise UserError(f"{path}: exists already and is not overwritten. Choose another file, or delete it.")


def check_table_path(out: Path) -> None:
    """Raise a UserError if this file exists, or no table can be written to it."""
    check_absent(out)
    check_ending(out)


def write_lines(out: Path, columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    """Write the table to a temporary file and rename it, so that no incomplete table is ever visible."""
    with open_atomically(out) as file:
        write_rows(file, out.suffix, columns, lines)


def _write_pairs(model: TrainedModel, data: "ShardSet", out: Path, listed: Path | None) -> int:
    keys = data.read_keys(np.arange(data.count))
    if listed is None:
        count = data.count * (data.count - 1) // 2
        if not 0 < count <= MOST_PAIRS:
            raise UserError(
                f"{data.count:,} samples have {count:,} pairs; expected 1 to {MOST_PAIRS:,}. Name the pairs: "
                f"trainyard predict {quote_path(model.run)} RAW {quote_path(out)} --pairs PAIRS.csv, or search: "
                "trainyard search --help"
            )
        pairs: Iterable[tuple[int, int]] = itertools.combinations(range(data.count), 2)
    else:
        pairs = list(_read_pairs(listed, keys))
        count = len(pairs)
        if not pairs:
            raise UserError(f"{listed}: lists no pair. Write a line for each pair under the header one,other.")
    embeddings_ND = np.concatenate(list(compute_embeddings(model, data)))
    write_lines(out, ["one", "other", "score"], _score_pairs(embeddings_ND, pairs, keys))
    return count


def _score_pairs(
    embeddings_ND: np.ndarray, pairs: Iterable[tuple[int, int]], keys: Sequence[str]
) -> Iterator[dict[str, object]]:
    stream = iter(pairs)
    while part := list(itertools.islice(stream, _PAIRS_AT_ONCE)):
        one, other = np.array(part).T
        scores = scoring.compare_embeddings(embeddings_ND[one], embeddings_ND[other])
        for (i, j), score in zip(part, scores.tolist(), strict=True):
            yield {"one": keys[i], "other": keys[j], "score": score}


def _read_pairs(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, int]]:
    index = {key: i for i, key in enumerate(keys)}
    remedy = "Write a CSV table in UTF-8 with the header one,other and a line for each pair."
    for row in read_table(path, columns=("one", "other"), remedy=remedy):
        for name in (row["one"], row["other"]):
            if name not in index:
                raise UserError(
                    f"{path}: '{name}' is no sample of the raw folder.{suggest_nearest(name, keys)} Name files as "
                    "paths below it."
                )
        yield index[row["one"]], index[row["other"]]
