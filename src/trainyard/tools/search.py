"""`trainyard search`: the best gallery samples for each probe, and how often they are right."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from trainyard.data.shards import Sample
from trainyard.errors import UserError
from trainyard.scoring import Identification
from trainyard.text import quote_path
from trainyard.tools.embeddings import MAPPED, EmbeddingFile, open_embeddings
from trainyard.tools.nearest import Nearest, find_nearest_rows
from trainyard.tools.predict import check_table_path, write_lines
from trainyard.tools.trained_model import TrainedModel, compute_embeddings, load_model, pack_temporarily
from trainyard.train.module import DataInfo

TOP = 10


@dataclass(frozen=True)
class SearchResult:
    """The candidates of each probe."""

    probes: list[str]  # keys
    gallery: EmbeddingFile
    probe_identities: list[str] | None
    leaves_out_self: bool  # the probes are the gallery
    nearest: Nearest

    def identify(self) -> Identification | None:
        """Compute identification metrics of the candidates; None if identities of probes or gallery are unknown."""
        if self.probe_identities is None or self.gallery.identities is None:
            return None
        return compute_identification(
            self.nearest, self.probe_identities, self.gallery.identities, leave_out_self=self.leaves_out_self
        )

    def list_candidates(self) -> Iterator[dict[str, object]]:
        """Yield a line for each candidate: probe, rank from 1, gallery key, score, and identities where known."""
        for i, probe in enumerate(self.probes):
            for rank, (row, score) in enumerate(
                zip(self.nearest.rows[i].tolist(), self.nearest.scores[i].tolist(), strict=True), 1
            ):
                line: dict[str, object] = {"probe": probe, "rank": rank, "gallery": self.gallery.keys[row]}
                line["score"] = score
                if self.probe_identities is not None:
                    line["probe_identity"] = self.probe_identities[i]
                if self.gallery.identities is not None:
                    line["gallery_identity"] = self.gallery.identities[row]
                yield line


def search(
    run: Path,
    probes: Path,
    gallery: Path,
    jobs_dir: Path,
    *,
    top: int | None = None,
    rerank: int | None = None,
    files: Path | None = None,
    out: Path | None = None,
) -> SearchResult:
    """Find the best gallery samples for each probe, exactly: `nearest.find_nearest_rows`.

    Args:
        probes: a .safetensors file of `trainyard embed`; or raw files, which are embedded first.
        gallery: a .safetensors file of `trainyard embed`; if the probes are the same file, no row finds itself.
        top: candidates of each probe; None: 10, or as many as there are.
        rerank: let the family's matcher order so many candidates of each probe; the probes are raw files.
        files: of the gallery, for `rerank`: the raw files that were embedded.
        out: a CSV file to write the candidates to.

    Raises:
        UserError: a file is missing, damaged, or of other weights than the run's final ones; `out` exists; or the
            family has no matcher.
    """
    if (rerank is None) != (files is None):
        raise UserError("--rerank K and --files FOLDER belong together: the matcher reads the gallery's raw files.")
    if out is not None:
        check_table_path(out)
    if rerank is not None and top is not None and not 0 < top <= rerank:
        raise UserError(f"--top {top}: expected 1 to {rerank}, the candidates that --rerank orders.")
    rows = open_embeddings(gallery)
    _check_same_weights(rows, run)
    if rerank is not None and probes.suffix == MAPPED:
        raise UserError(f"{probes}: --rerank reads the probes themselves. Name their raw files instead of embeddings.")
    model = None if probes.suffix == MAPPED else load_model(run, jobs_dir)
    if model is not None and rerank is not None:
        model.require_matcher("search --rerank")
    keys, vectors, identities, is_same = _read_probes(run, model, probes, gallery)
    shown = min(TOP, len(rows.keys) - is_same) if top is None else top
    with tqdm(total=len(rows.keys), unit="row", unit_scale=True, desc="searching", disable=None, leave=False) as bar:
        nearest = find_nearest_rows(
            vectors,
            rows.vectors,
            k=shown if rerank is None else rerank,
            leave_out_self=is_same,
            names=(str(probes), str(gallery)),
            progress=bar.update,
        )
    if model is not None and files is not None:
        nearest = _order_by_matcher(model, probes, rows, files, nearest)
        nearest = replace(nearest, rows=nearest.rows[:, :shown], scores=nearest.scores[:, :shown])
    result = SearchResult(keys, rows, identities, is_same, nearest)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = list(result.list_candidates())
        write_lines(out, list(lines[0]), lines)
    return result


def compute_identification(
    nearest: Nearest, probe_identity: Sequence[str], gallery_identity: Sequence[str], *, leave_out_self: bool
) -> Identification:
    """Compute identification metrics of the k candidates of each probe.

    Args:
        leave_out_self: the probes are the gallery: a probe is mated if another row has its identity.
    """
    count = Counter(gallery_identity)
    is_mated = np.array([count[name] > leave_out_self for name in probe_identity], dtype=bool)
    codes = {name: code for code, name in enumerate(sorted({*probe_identity, *gallery_identity}))}
    probe = np.array([codes[name] for name in probe_identity])
    gallery = np.array([codes[name] for name in gallery_identity])
    is_own_PK = gallery[nearest.rows] == probe[:, None]
    mate_score_P = np.where(is_own_PK, nearest.scores, -np.inf).max(axis=1)
    return Identification(
        mated=int(is_mated.sum()),
        non_mated=int((~is_mated).sum()),
        rank1=float(is_own_PK[is_mated, 0].mean()) if is_mated.any() else None,
        mate_score_M=mate_score_P[is_mated],
        top_score_U=nearest.scores[~is_mated, 0],
    )


def _read_probes(
    run: Path, model: TrainedModel | None, probes: Path, gallery: Path
) -> tuple[list[str], NDArray[np.float32], list[str] | None, bool]:
    """Return keys, embeddings and identities of the probes, and whether they are the gallery.

    Args:
        model: embeds raw files; None: the probes are embeddings.
    """
    if model is None:
        stored = open_embeddings(probes)
        _check_same_weights(stored, run)
        return stored.keys, stored.vectors, stored.identities, probes.samefile(gallery)
    model.require_embeddings("search")
    with pack_temporarily(model, model.list_samples(probes), near=None) as data:
        vectors = np.concatenate(list(compute_embeddings(model, data)))
        return data.read_keys(np.arange(data.count)), vectors, None, False


def _order_by_matcher(
    model: TrainedModel, probes: Path, gallery: EmbeddingFile, files: Path, nearest: Nearest
) -> Nearest:
    """Return the candidates ordered by the family's matcher, with its scores.

    Raises:
        UserError: a candidate is not among the files.
    """
    begin = time.monotonic()
    rows, candidate_PK = np.unique(nearest.rows, return_inverse=True)
    wanted = {gallery.keys[row]: place for place, row in enumerate(rows.tolist())}
    samples = {sample.key: sample for sample in model.list_samples(files) if sample.key in wanted}
    missing = next((key for key in wanted if key not in samples), None)
    if missing is not None:
        raise UserError(
            f"--files {files}: has no '{missing}', which {gallery.path} names. Name the folder that was embedded, or "
            f"embed this one: trainyard embed {quote_path(model.run)} {quote_path(files)} OUT{MAPPED}"
        )
    count, k = nearest.rows.shape
    listed = itertools.chain(model.list_samples(probes), (samples[key] for key in wanted))
    with pack_temporarily(model, _number_samples(listed), near=None) as data:
        info = DataInfo.from_shards(data, np.empty(0, np.int64))
        one, other = np.repeat(np.arange(count), k), count + candidate_PK.ravel()
        score_PK = model.module.match_samples(info, one, other).reshape(count, k)
    order_PK = np.argsort(-score_PK, axis=1, kind="stable")
    rows_PK = np.take_along_axis(nearest.rows, order_PK, axis=1)
    score_PK = np.take_along_axis(score_PK, order_PK, axis=1)
    return Nearest(rows_PK, score_PK.astype(np.float32), nearest.seconds + time.monotonic() - begin)


def _number_samples(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Yield the samples with numbers before their keys: a probe and a candidate may have one name."""
    return (replace(sample, key=f"{number}: {sample.source or sample.key}") for number, sample in enumerate(samples, 1))


def _check_same_weights(stored: EmbeddingFile, run: Path) -> None:
    """Refuse embeddings that the run's final weights did not compute: their inner products mean nothing."""
    from trainyard.train.checkpoint import choose_of_run

    entry = choose_of_run(run)
    if stored.checkpoint_sha256 != entry.sha256:
        raise UserError(
            f"{stored.path}: not computed with {entry.path}, the final weights of this run, so its embeddings cannot "
            f"be compared with theirs. Embed the files again: trainyard embed {quote_path(run)} FOLDER OUT{MAPPED}"
        )
