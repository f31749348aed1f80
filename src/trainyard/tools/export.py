"""`trainyard export`: a run's weights, or its network with its preprocessing, in one file for other programs."""

import importlib.util
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainyard import scoring
from trainyard.config.compose import load_config
from trainyard.config.settings import TrainConfig
from trainyard.data.prepare import is_packed
from trainyard.data.shards import ShardSet
from trainyard.data.splits import find_splits
from trainyard.errors import UserError
from trainyard.files import name_full_disk, rename
from trainyard.runs import pair_scores
from trainyard.runs.folder import CONFIG
from trainyard.runs.manifest import Entry
from trainyard.text import quote_path
from trainyard.tools import program
from trainyard.tools.predict import check_absent
from trainyard.tools.trained_model import TrainedModel, load_model, pack_temporarily
from trainyard.train import checkpoint
from trainyard.train.module import TrainModule
from trainyard.train.run_context import VALIDATION

SAMPLES = 32
"""Samples on which a program is compared with the network that it was made from."""

FMRS = (0.1, 0.01, 0.001, 0.0001)
"""False match rates whose thresholds are stated, as far as the run's impostor trials establish them."""

DESCRIPTION = "model"
"""Key of the description among the texts in a file."""

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Check:
    """Comparison of a program with the network that it was made from."""

    samples: int
    source: str  # of the samples
    runtime: str  # what ran the program
    differences: Mapping[str, float]  # result -> the largest difference: absolute up to 1, relative above
    tolerance: float  # the difference that is allowed


def export_weights(run: Path, entry: Entry, out: Path, jobs_dir: Path) -> None:
    """Write the weights of a checkpoint to a safetensors file; its metadata describe the run's inputs.

    Raises:
        UserError: `out` exists or cannot be written, or the checkpoint is damaged.
    """
    description = describe_run(run, load_config(run / CONFIG, jobs_dir), entry)
    checkpoint.export(entry.path, out, texts={DESCRIPTION: json.dumps(description)})


def export_program(
    run: Path, entry: Entry, out: Path, jobs_dir: Path, *, onnx: bool, samples: Path | None = None
) -> Check:
    """Write preprocessing and `predict` of a checkpoint as one program, and return how it compares with the network.

    It computes in float32 on any number of samples at a time. The file gets its name only after it was read again and
    all its results were within the family's tolerance of the network's.

    Args:
        onnx: whether to write ONNX; else what torch.export writes.
        samples: raw files of the job to compare with; None: the run's own data, validation first.

    Raises:
        UserError: `out` exists, the format cannot express the network or computes something else, or there are no
            samples.
    """
    check_absent(out)
    if onnx:
        _require_packages()
    model = load_model(run, jobs_dir, entry=entry, on_cpu=True)
    if type(model.module).describe_predict is TrainModule.describe_predict:
        raise UserError(
            f"{model.config.family} cannot be exported as a program: its module has no describe_predict. Its weights: "
            f"trainyard export {quote_path(run)} --format safetensors"
        )
    signature = model.module.describe_predict()
    with open_samples(model, samples) as (data, ids, source):
        batches = list(program.read_batches(model, data, ids, signature.inputs))
        traced = program.trace(model, data, batches[1].inputs, signature)
    description = describe_run(run, model.config, entry) | program.describe(traced, signature)
    texts = model.provenance | {DESCRIPTION: json.dumps(description)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        partial = Path(folder) / out.name
        with name_full_disk(out.parent):
            (program.write_onnx if onnx else program.write_torch_export)(traced, partial, texts)
        runtime, compute = (program.open_onnx if onnx else program.open_torch_export)(partial)
        check = Check(len(ids), source, runtime, program.compare(compute, batches), signature.tolerance)
        _check_difference(run, check)
        rename(partial, out)
    return check


def describe_run(run: Path, config: TrainConfig, entry: Entry) -> dict[str, Any]:
    """Describe the weights for their user, as JSON values: the run's options, and thresholds where it has some.

    Options about the data are left out: they name folders of this machine.
    """
    options = {name: value for name, value in asdict(config).items() if name != "data"}
    description = {"job": config.job, "family": config.family, "options": options}
    if (run / pair_scores.FILE).exists():
        description["decision"] = _describe_decision(pair_scores.read_validation_scores(run, step=entry.step, kind=""))
    return description


def _describe_decision(scores: pair_scores.PairScores) -> dict[str, Any]:
    """Return the thresholds that the run's validation pairs establish; a score that reaches one is a match."""
    rates = scoring.compute_error_rates(scores.genuine, scores.impostor)
    least = scoring.compute_smallest_rate(len(scores.impostor))
    points = [asdict(rates.find_point_at_fmr(fmr)) for fmr in FMRS if fmr >= least]
    return {
        "score": "inner product of two embeddings",
        "impostors": scores.kind,
        "trials": len(scores.impostor),
        "equal_error_rate": asdict(rates.equal_error_rate()),
        "at_false_match_rates": [point for point in points if np.isfinite(point["threshold"])],
    }


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx: {', '.join(missing)} cannot be imported here. Type: pip install {' '.join(missing)}; or "
            "use --format torch-export, which needs nothing more."
        )


@contextmanager
def open_samples(model: TrainedModel, raw: Path | None) -> Iterator[tuple[ShardSet, np.ndarray, str]]:
    """Yield packed samples, which of them to use, and where they come from."""
    if raw is not None:
        samples = itertools.islice(model.list_samples(raw), SAMPLES)
        with pack_temporarily(model, samples, near=None) as data:
            yield data, _require_three(np.arange(data.count), raw), str(raw)
        return
    if not is_packed(model.config):
        raise UserError(
            f"{model.config.data.path or model.run}: the run's data is not there, and an export is compared with the "
            f"run on {SAMPLES} samples. Name some raw files of {model.config.job}: add --samples FOLDER"
        )
    with closing(ShardSet(Path(model.config.data.path))) as data:
        splits = find_splits(model.pack, data, model.config)
        names = sorted(splits, key=lambda name: name != VALIDATION)
        ids = np.concatenate([splits[name] for name in names])[:SAMPLES]
        yield data, _require_three(ids, Path(model.config.data.path)), "the run's data"


def _require_three(ids: np.ndarray, where: Path) -> np.ndarray:
    if len(ids) < 3:  # batches of one and of several
        raise UserError(f"{where}: {len(ids)} samples; expected 3 or more to compare an export with the run.")
    return ids


def _check_difference(run: Path, check: Check) -> None:
    wrong = {name: value for name, value in check.differences.items() if not value <= check.tolerance}
    if wrong:
        gaps = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        raise UserError(
            f"{run}: not exported: in {check.runtime}, on {check.samples} samples of {check.source}, {gaps} differ "
            f"from the run's; {check.tolerance:g} is allowed. Use another --format."
        )
