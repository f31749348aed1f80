"""Files of embeddings: the vectors in one file, and next to it a CSV table with the key of each."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import UserError
from trainyard.files import open_atomically
from trainyard.runs.tensor_file import create_tensor_file, map_tensor_file
from trainyard.tables import read_table
from trainyard.tools.predict import write_lines

MAPPED, COMPRESSED = ".safetensors", ".npz"
EMBEDDING = "embedding"
CHECKPOINT = "checkpoint_sha256"
_AGAIN = "trainyard embed RUN FOLDER OUT.safetensors"


@dataclass(frozen=True)
class EmbeddingFile:
    """An open file of N embeddings of D numbers."""

    path: Path
    vectors: NDArray[np.float32]  # (N, D), mapped: read-only, and read from disk when it is used
    keys: list[str]
    identities: list[str] | None  # whose each sample is; None if the table does not say
    checkpoint_sha256: str  # of the checkpoint whose weights computed them


def find_table(path: Path) -> Path:
    """Return the table of keys that belongs to a file of embeddings."""
    return path.with_suffix(".csv")


def write_embeddings(
    path: Path,
    batches: Iterable[np.ndarray],
    keys: Sequence[str],
    *,
    identities: Sequence[str] | None,
    metadata: Mapping[str, str],
) -> None:
    """Write embeddings as they come, and the table of their keys.

    Args:
        path: ends in .safetensors, which is written in place, or .npz, which is collected in memory.
        batches: (b, D) float32 each, in the order of the keys.
        identities: whose each sample is; None: unknown.
    """
    stream = iter(batches)
    first = next(stream)
    with _create(path, (len(keys), first.shape[1]), metadata) as vectors:
        end = 0
        for batch in itertools.chain([first], stream):
            begin, end = end, end + len(batch)
            vectors[begin:end] = batch
        assert end == len(keys), (end, len(keys))
        columns = ["key"] if identities is None else ["key", "identity"]
        rows = [keys] if identities is None else [keys, identities]
        lines = (dict(zip(columns, row, strict=True)) for row in zip(*rows, strict=True))
        write_lines(find_table(path), columns, lines)


def open_embeddings(path: Path) -> EmbeddingFile:
    """Open what `write_embeddings` wrote to a .safetensors file; the file and its table may be a stranger's.

    Raises:
        UserError: a file is missing, damaged or of another kind, or the table has not a line for each embedding.
    """
    if path.suffix != MAPPED:
        raise UserError(f"{path}: expected a {MAPPED} file, which can be mapped into memory. Write one: {_AGAIN}")
    mapped = map_tensor_file(path, remedy=_AGAIN)
    vectors = mapped.arrays.get(EMBEDDING)
    if vectors is None or vectors.ndim != 2 or len(mapped.arrays) != 1 or CHECKPOINT not in mapped.metadata:
        raise UserError(f"{path}: is no file of embeddings that trainyard embed wrote. Write one: {_AGAIN}")
    table = find_table(path)
    rows = list(read_table(table, columns=("key",), remedy=f"Write both files again: {_AGAIN}"))
    if len(rows) != len(vectors):
        raise UserError(
            f"{table}: {len(rows):,} lines for the {len(vectors):,} embeddings of {path}. Copy both files again, or "
            f"write them again: {_AGAIN}"
        )
    keys = [row["key"] for row in rows]
    identities = [row["identity"] for row in rows] if "identity" in rows[0] else None
    if identities is not None and not all(identities):
        raise UserError(
            f"{table}: the identity of '{keys[identities.index('')]}' is empty. Write it, or drop the column."
        )
    return EmbeddingFile(path, vectors, keys, identities, mapped.metadata[CHECKPOINT])


@contextlib.contextmanager
def _create(path: Path, shape: tuple[int, int], metadata: Mapping[str, str]) -> Iterator[np.ndarray]:
    if path.suffix == MAPPED:
        with create_tensor_file(path, {EMBEDDING: shape}, metadata=metadata) as arrays:
            yield arrays[EMBEDDING]
        return
    vectors = np.empty(shape, dtype=np.float32)
    yield vectors
    contents: dict[str, Any] = {EMBEDDING: vectors, **metadata}
    with open_atomically(path) as file:
        np.savez(file, **contents)
