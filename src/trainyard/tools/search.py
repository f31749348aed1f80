"""`trainyard search`: the best gallery samples for each probe, and how often they are right."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from trainyard.errors import UserError
from trainyard.tools.embeddings import MAPPED, EmbeddingFile, open_embeddings
from trainyard.tools.identification import Identification, compute_identification
from trainyard.tools.nearest import Nearest, find_nearest_rows
from trainyard.tools.predict import refuse_existing, write_csv
from trainyard.tools.trained_model import compute_embeddings, load_model, pack_temporarily

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
        """Return what the candidates say about identities; None if those of the probes or the gallery are unknown."""
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
    run: Path, probes: Path, gallery: Path, jobs_dir: Path, *, top: int | None = None, out: Path | None = None
) -> SearchResult:
    """Find the best gallery samples for each probe, exactly: `nearest.find_nearest_rows`.

    Args:
        probes: a .safetensors file of `trainyard embed`; or raw files, which are embedded first.
        gallery: a .safetensors file of `trainyard embed`; if the probes are the same file, no row finds itself.
        top: candidates of each probe; None: 10, or as many as there are.
        out: a CSV file to write the candidates to.

    Raises:
        UserError: a file is missing, damaged, or of other weights than the run's final ones, or `out` exists.
    """
    if out is not None:
        refuse_existing(out)
    found = open_embeddings(gallery)
    _refuse_other_weights(found, run)
    keys, vectors, identities, is_same = _read_probes(run, probes, gallery, jobs_dir)
    with tqdm(total=len(found.keys), unit="row", unit_scale=True, desc="searching", disable=None, leave=False) as bar:
        nearest = find_nearest_rows(
            vectors,
            found.vectors,
            k=min(TOP, len(found.keys) - is_same) if top is None else top,
            leave_out_self=is_same,
            names=(str(probes), str(gallery)),
            progress=bar.update,
        )
    result = SearchResult(keys, found, identities, is_same, nearest)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = list(result.list_candidates())
        write_csv(out, list(lines[0]), lines)
    return result


def _read_probes(
    run: Path, probes: Path, gallery: Path, jobs_dir: Path
) -> tuple[list[str], NDArray[np.float32], list[str] | None, bool]:
    """Return keys, embeddings and identities of the probes, and whether they are the gallery."""
    if probes.suffix == MAPPED:
        found = open_embeddings(probes)
        _refuse_other_weights(found, run)
        return found.keys, found.vectors, found.identities, probes.samefile(gallery)
    model = load_model(run, jobs_dir)
    model.require_embeddings("search")
    with pack_temporarily(model, model.list_samples(probes), near=None) as data:
        vectors = np.concatenate(list(compute_embeddings(model, data)))
        return data.read_keys(np.arange(data.count)), vectors, None, False


def _refuse_other_weights(found: EmbeddingFile, run: Path) -> None:
    """Refuse embeddings that the run's final weights did not compute: their inner products mean nothing."""
    from trainyard.train.checkpoint import choose_of_run

    entry = choose_of_run(run)
    if found.checkpoint_sha256 != entry.sha256:
        raise UserError(
            f"{found.path}: not computed with {entry.path}, the final weights of this run, so its embeddings cannot be "
            f"compared with theirs. Embed the files again: trainyard embed {run} FOLDER OUT{MAPPED}"
        )
