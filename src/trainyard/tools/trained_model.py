"""Runs the final weights of a run on raw files: what predict, embed, compare, search, evaluate and export share."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from trainyard.config.compose import load_config
from trainyard.config.families import load_family
from trainyard.config.settings import JPEG, TrainConfig
from trainyard.data.prepare import Seen, build_meta, explain_no_sample, log_unread
from trainyard.data.raw import list_once
from trainyard.errors import UserError
from trainyard.foreign import remember_reads
from trainyard.hardware import Precision, choose_precision, count_cores
from trainyard.runs.folder import CONFIG
from trainyard.runs.manifest import Entry
from trainyard.text import quote_path

if TYPE_CHECKING:
    import torch

    from trainyard.data.loader import Loader
    from trainyard.data.shards import Sample, ShardSet
    from trainyard.train.module import DataInfo, Rows, TrainModule


@dataclass(frozen=True)
class TrainedModel:
    """A run's final weights, ready to predict."""

    run: Path
    config: TrainConfig
    module: "TrainModule"
    checkpoint: Entry  # where the weights come from
    artifacts: dict[str, str]  # of packing
    provenance: dict[str, str]  # `checkpoint.describe_weights`
    pack: Any  # the family's pack.py
    device: "torch.device"
    precision: Precision

    @property
    def has_embeddings(self) -> bool:
        """Whether the model compares samples by embeddings."""
        return self._defines("select_embeddings")

    @property
    def scores_pairs(self) -> bool:
        """Whether the model compares samples, by embeddings or each pair by itself."""
        return self._defines("select_pair_scores")

    @property
    def predicts(self) -> bool:
        """Whether the model has something to say of one sample."""
        return self._defines("prediction_rows")

    def _defines(self, method: str) -> bool:
        from trainyard.train.module import TrainModule

        return getattr(type(self.module), method) is not getattr(TrainModule, method)

    def list_samples(self, raw: Path) -> Iterator["Sample"]:
        """Yield the samples of new raw files, a folder or one of them; at the end, log which files are not read.

        Raises:
            UserError: there is no such file or folder, or no sample in it.
        """
        if not raw.exists():
            raise UserError(f"{raw}: no such file or folder. Expected unlabelled raw files, as for {self.config.job}.")
        with list_once(), remember_reads() as read:
            seen = Seen(read)
            yield from seen.watch(self.pack.unlabelled(raw, self.config, self.artifacts))
            if not seen.count:
                raise UserError(f"{raw}: {explain_no_sample(raw, self.config, Path(self.pack.__file__).parents[1])}")
            log_unread(raw, seen)

    def require_matcher(self, command: str) -> None:
        """Raise a UserError if the family has no matcher of samples."""
        if not self.module.matcher:
            raise UserError(
                f"trainyard {command}: {self.config.family} has no matcher that reads the samples themselves. Leave "
                "the option out."
            )

    def require_comparison(self, command: str) -> None:
        """Raise a UserError if the model does not compare samples."""
        if not self.scores_pairs:
            self.require_embeddings(command)

    def require_embeddings(self, command: str) -> None:
        """Raise a UserError if the model does not compare samples by embeddings."""
        if self.has_embeddings:
            return
        if self.predicts:
            remedy = f"Its predictions: trainyard predict {quote_path(self.run)} RAW OUT.csv"
        elif self.scores_pairs:
            remedy = f"It compares two files: trainyard compare {quote_path(self.run)} A B"
        else:
            remedy = f"Its scores on labelled files: trainyard evaluate {quote_path(self.run)} FOLDER"
        family = self.config.family
        raise UserError(
            f"trainyard {command}: this model of {family} has no embeddings to compare samples by. {remedy}"
        )


def load_model(
    run: Path, jobs_dir: Path, *, lists: str = "unlabelled", entry: Entry | None = None, on_cpu: bool = False
) -> TrainedModel:
    """Load weights of a run without its packed data.

    Args:
        lists: the function of the family's pack.py that lists new raw files; "": none is needed.
        entry: the checkpoint; None: the one that the run's test sets are scored with.
        on_cpu: compute in float32 on the CPU in plain memory layout, whatever the machine has and the run used.

    Raises:
        UserError: the family has no such function, the run has no checkpoint, or the code at hand builds another model.
    """
    import torch

    from trainyard.train.checkpoint import choose_of_run, describe_weights, load, select_weights
    from trainyard.train.module import DataInfo
    from trainyard.train.precision import read_capability

    config = load_config(run / CONFIG, jobs_dir)
    pack = load_family(jobs_dir, config.family, "pack")
    if lists and not hasattr(pack, lists):
        what = "predictions for a table" if lists == "unlabelled" else "evaluation of new folders"
        raise UserError(f"{config.family} has no {what}: its pack.py has no '{lists}'.")
    entry = choose_of_run(run) if entry is None else entry
    saved = load(entry.path)
    if not isinstance(saved.get("artifacts"), dict):
        raise UserError(f"{entry.path}: has no artifacts of packing, which training always saves. Use another run.")
    device = torch.device("cuda" if torch.cuda.is_available() and not on_cpu else "cpu")
    requested = ("fp32", "off") if on_cpu else (config.precision, config.channels_last)
    precision = choose_precision(read_capability(device), precision=requested[0], channels_last=requested[1])
    info = DataInfo({}, {}, np.empty(0, dtype=np.int64), saved["artifacts"])
    module = _build_module(config, jobs_dir, select_weights(saved), info)
    provenance = describe_weights(entry, saved)
    model = TrainedModel(run, config, module, entry, saved["artifacts"], provenance, pack, device, precision)
    return replace(model, module=_place_module(model, module))


def describe_data(model: TrainedModel, info: "DataInfo", jobs_dir: Path) -> "TrainModule":
    """Return a module with the model's weights that knows the labels of a data set, so that it can score them."""
    return _place_module(model, _build_module(model.config, jobs_dir, model.module.state_dict(), info))


def make_loader(model: TrainedModel, data: "ShardSet") -> "Loader":
    """Return a loader of a data set as the model reads it, in the memory layout of training."""
    from trainyard.data.loader import Loader

    return Loader(
        model.config,
        data,
        device=model.device,
        decode="cpu",
        threads=count_cores(),
        channels_last=model.precision.channels_last,
    )


@contextmanager
def pack_temporarily(
    model: TrainedModel,
    samples: "Iterable[Sample]",
    *,
    near: Path | None,
    skip_bad: bool = False,
    meta: dict[str, Any] | None = None,
) -> Iterator["ShardSet"]:
    """Pack samples into a temporary folder; delete it at the end.

    Args:
        near: the folder is created in this one, which has the space; None: where the system keeps temporary files.
        skip_bad: leave out raw files that cannot be read, instead of failing.
        meta: as of packed data that trains, to store images as there; None: their bytes are kept, to the same results,
            unless training images were encoded again with losses: then so are these.
    """
    from trainyard.data.pack import pack

    if near is not None:
        near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=near, prefix=".predict-") as folder:
        if meta is None:
            meta = {name: value for name, value in build_meta(model.config).items() if name in ("family", JPEG)}
        data = pack(samples, Path(folder) / "packed", meta=meta, workers=count_cores(), skip_bad=skip_bad)
        try:
            yield data
        finally:
            data.close()


def compute_rows(model: TrainedModel, data: "ShardSet") -> Iterator["Rows"]:
    """Yield the model's rows of all samples of a data set in their order, batch by batch, with a progress bar."""
    from trainyard.train import evaluate, precision

    loader = make_loader(model, data)
    with tqdm(total=data.count, unit="sample", desc="predicting", disable=None, leave=False) as bar:
        yield from evaluate.predict_batches(
            model.module,
            loader,
            np.arange(data.count),
            batch_size=model.config.eval_batch_size,
            autocast=precision.make_autocast(model.precision, model.device),
            progress=bar.update,
        )


def compute_embeddings(model: TrainedModel, data: "ShardSet") -> Iterator[np.ndarray]:
    """Yield the embeddings of all samples of a data set in their order, (b, D) float32 of unit length.

    Raises:
        UserError: one is not finite or not of unit length.
    """
    begin = 0
    for rows in compute_rows(model, data):
        embeddings = model.module.select_embeddings(rows)
        wrong = find_wrong_length(embeddings)
        if wrong is not None:
            raise UserError(
                f"The embedding of '{data.read_keys(np.array([begin + wrong]))[0]}' is not finite or not of unit "
                f"length: the model of {model.run} is broken. Look for a diverged loss: "
                f"trainyard report {quote_path(model.run)}"
            )
        begin += len(embeddings)
        yield embeddings


def find_wrong_length(embeddings_ND: np.ndarray) -> int | None:
    """Return the first row that is not finite or not of unit length; None if all are. Costs one pass."""
    squared_N = np.einsum("ij,ij->i", embeddings_ND, embeddings_ND)
    is_right_N = np.abs(squared_N - 1) < _LENGTH_TOLERANCE  # also false for NaN
    return None if is_right_N.all() else int(np.argmin(is_right_N))


_LENGTH_TOLERANCE = 1e-3
"""On the squared length: float32 sums of a few thousand terms are far closer to 1."""


def _place_module(model: TrainedModel, module: "TrainModule") -> "TrainModule":
    """Return the module on the device in the memory layout of training, so that results round alike."""
    import torch

    layout: Any = torch.channels_last if model.precision.channels_last else torch.contiguous_format
    module.to(model.device).to(memory_format=layout)  # type: ignore[call-overload]
    return module.eval()


def _build_module(
    config: TrainConfig, jobs_dir: Path, saved: "Mapping[str, torch.Tensor]", info: "DataInfo"
) -> "TrainModule":
    from trainyard.train.contract import build_module

    module = build_module(jobs_dir, config, info)
    left_out = module.training_only
    try:
        weights = {name: value for name, value in saved.items() if not name.startswith(left_out)}
        absent, unknown = module.load_state_dict(weights, strict=False)
        absent = [name for name in absent if not name.startswith(left_out)]
        if absent or unknown:
            raise LookupError(f"missing: {', '.join(absent) or 'none'}; unknown: {', '.join(unknown) or 'none'}")
    except (RuntimeError, LookupError, AttributeError, TypeError) as error:  # weights with another shape or name
        raise UserError(
            "The weights of this run do not fit the model that the code at hand builds. Use the code it was trained "
            f"with (`code` in the run's env.json), or train from scratch. {' '.join(str(error).split())[:300]}"
        ) from None
    return module
