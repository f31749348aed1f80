"""A run's evaluations on labelled folders: `evaluations/<name>/`, which `trainyard evaluate` writes. Loads no torch.

`evaluation.json` names the data and the weights; `metrics.jsonl` has a line of metrics for the run,
then one for each baseline on the same samples; `scores-<system>.safetensors` has the scores of pairs, in families that
compare samples; `figures/*.png` are the family's figures, `samples/*.png` its images of samples, if they may be shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.files import EVALUATION, check_format, load_json
from trainyard.runs.events import METRICS_FILE, Line, read_lines
from trainyard.text import make_slug

FOLDER, ABOUT_FILE, FIGURES, SAMPLES = "evaluations", "evaluation.json", "figures", "samples"
RUN = "run"
"""The system of the first line: the run's own weights. Those of the others are baselines."""

_MOST_BYTES = 2**24


@dataclass(frozen=True)
class Evaluation:
    """One folder that was evaluated."""

    path: Path
    about: Mapping[str, Any]
    lines: Sequence[Line]  # each with its `system`

    @property
    def name(self) -> str:
        return self.path.name

    def describe(self) -> str:
        """Describe the evaluated data in one sentence, with its overlap with training."""
        data, checkpoint, seen = (self.about.get(name) or {} for name in ("data", "checkpoint", "seen_in_training"))
        part = f", split {self.about['split']}" if self.about.get("split") else ""
        return (
            f"{self.name}: {data.get('samples')} samples of {self.about.get('folder')}{part} (digest "
            f"{str(data.get('fingerprint'))[:12]}), weights of step {checkpoint.get('step')}. "
            f"Seen in training: {describe_seen(seen)}."
        )


def name_pair_scores(system: str) -> str:
    """Return the file in an evaluation that has a system's scores of pairs."""
    return f"scores-{make_slug(system)}.safetensors"


def describe_seen(seen: Mapping[str, Any]) -> str:
    """Describe the overlap of a data set with training: the same content, and the same names."""
    if "unknown" in seen:
        return f"unknown, because {seen['unknown']}"
    overlap = f"{seen.get('samples')} of {seen.get('samples_of')} samples (by their content)"
    if "names" in seen:
        overlap += f", {seen['names']} of {seen.get('names_of')} names in '{seen.get('column')}'"
    return overlap


def read_evaluations(run: Path) -> list[Evaluation]:
    """Return a run's evaluations, oldest first.

    Raises:
        UserError: a file is damaged.
    """
    root = run / FOLDER
    if root.is_symlink():  # a link may lead out of the run
        return []
    folders = [path for path in sorted(root.glob("[!.]*")) if path.is_dir() and not path.is_symlink()]
    items = [Evaluation(path, _read_about(path / ABOUT_FILE), read_lines(path / METRICS_FILE)) for path in folders]
    return sorted(items, key=lambda evaluation: str(evaluation.about.get("created")))


def _read_about(path: Path) -> Mapping[str, Any]:
    try:
        about = load_json(path, most_bytes=_MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Delete its folder, and evaluate again.") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}. Delete its folder, and evaluate again.") from None
    nested = ("data", "checkpoint", "seen_in_training")
    if not isinstance(about, dict) or any(not isinstance(about.get(name, {}), dict) for name in nested):
        raise UserError(f"{path}: does not name the evaluated data. Delete its folder, and evaluate again.")
    check_format(path, about.get("format"), kind=EVALUATION)
    return about
