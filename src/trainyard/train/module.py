"""The contract between a job and the training engine, which knows nothing else about a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from trainyard.config.settings import TrainConfig
from trainyard.data.shards import ShardSet
from trainyard.data.store import has_inputs

Batch = dict[str, Tensor]
"""One micro-batch on the device. The first axis of every entry is B, the samples.

It has `sample_id` (B,) int64, every column of the data set under its name (B,), and by kind of record:

- image: `image` (B, C, H, W) float32, normalised and augmented; `affine` (B, 2, 3) float32 maps (x, y, 1) in pixels
  of the stored image (left and upper edges at 0) to pixels of the input; `image_px` (B, 2) float32 is the stored
  image's height and width.
- image of another name: under it, as `image`, and moved with the sample's `image`, by the same part of its size.
- `Mask`: (B, H, W) int64, moved as the image, without interpolation: the class of the stored mask at each pixel's
  centre; 255 where the input shows nothing of the stored image.
- array of fixed shape: under its name, (B, ...).
- `Ragged`: (B, L, ...), padded with zeros to the longest of the batch, and `<name>_count` (B,) int64; with
  `varying_axes=2`, (B, L, M, ...) and (B, 2).
- `Audio`: (B, N) float32 in [-1, 1), and `<name>_count` (B,) int64, the frames of the whole recording. N is
  `sound.frames`, and may be more in evaluation with sound.segments=sliding: see `average_segments`.

In training it also has `epoch` () int64, from 0, `samples_seen` () int64, the samples that the run used before this
step, and, unless the module says `reads_noise = False`, `noise` (B, 32) float32 in [0, 1): a pure function of (seed,
epoch, sample id), for augmentation that a job does on the device.
"""

Rows = dict[str, np.ndarray]
"""Outputs of `predict` for a whole evaluation set, on the host: each sample once, sorted by `sample_id`."""


def _raise_no_record(name: str, ids: np.ndarray) -> list[np.ndarray]:
    raise KeyError(name)


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data set that a job may use when it builds its model."""

    columns: Mapping[str, np.ndarray]  # name -> (N,) numbers or codes, N samples of the whole data set
    vocabulary: Mapping[str, list[str]]  # text column -> the text of each code
    train_ids: np.ndarray  # (n,) int64, the samples that train
    artifacts: Mapping[str, str] = field(default_factory=dict)  # what `pack.fit_artifacts` fitted on the training split
    read: Callable[[str, np.ndarray], list[np.ndarray]] = _raise_no_record  # (record, ids) -> as packed; files as uint8
    has_inputs: bool = False  # whether packing resized the images to the model's input (packing.store)

    @classmethod
    def from_shards(cls, data: ShardSet, train_ids: np.ndarray) -> "DataInfo":
        """Describe an open data set."""
        inputs = has_inputs(data.records)
        return cls(data.columns, data.vocabulary, train_ids, data.artifacts, data.read_arrays, inputs)


@dataclass(frozen=True)
class SampleSource:
    """Some samples of a data set, as baselines read them."""

    data: DataInfo
    ids: np.ndarray  # (n,) int64, ascending
    read_batches: Callable[[], Iterator[Batch]]  # as the model gets them in evaluation, in the order of `ids`


@dataclass(frozen=True)
class Score:
    """Metrics of the run or of a baseline on an evaluated data set, and the scores of its pairs."""

    metrics: Mapping[str, float]
    pair_scores: Mapping[str, np.ndarray] = field(default_factory=dict)  # as `TrainModule.select_pair_scores`


@dataclass(frozen=True)
class Histogram:
    """Values that `score` returns to be drawn, such as the losses of all samples: an array of any shape."""

    values: np.ndarray


@dataclass(frozen=True)
class AdaptedWeights:
    """Weights of a file by the names of a module, and the differences allowed between the two."""

    tensors: Mapping[str, Tensor]
    layout: str = ""  # whose names the file has; "": the module's own
    new: tuple[str, ...] = ()  # patterns of the module's names that keep their initial values
    unused: tuple[str, ...] = ()  # patterns of `tensors` that the module does not need
    hint: str = ""  # the option to set if they do not fit

    def add_prefix(self, prefix: str) -> "AdaptedWeights":
        """Return the same for a module that has this one as a part."""
        tensors = {prefix + name: value for name, value in self.tensors.items()}
        new, unused = (tuple(prefix + name for name in names) for names in (self.new, self.unused))
        return replace(self, tensors=tensors, new=new, unused=unused)


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of `predict`, in words for those who use an exported model."""

    inputs: Mapping[str, str]  # entry of a batch that `predict` reads -> its meaning
    outputs: Mapping[str, str]  # row other than `sample_id` -> its meaning
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON values, such as a threshold or category names
    tolerance: float = 1e-4  # by which rounding in float32 may move a result: absolute up to 1, relative above


def average_segments(compute: Callable[[Batch], Tensor], batch: Batch, name: str, *, frames: int) -> Tensor:
    """Return the mean of `compute` over the segments of each recording `name`, (B, ...).

    There is one every `frames` // 2 frames, until one reaches the end. Its rest is filled from the beginning.

    Args:
        compute: takes the batch with one segment of each recording, (B, frames), and returns (B, ...).
    """
    wave_BN, hop = batch[name], max(1, frames // 2)
    total = compute({**batch, name: wave_BN[:, :frames]})
    if wave_BN.shape[1] <= frames:
        return total
    spare_B, shape = batch[f"{name}_count"] - frames, (-1, *[1] * (total.ndim - 1))
    used_B = torch.ones_like(spare_B)
    for start in range(hop, wave_BN.shape[1] - frames + 1, hop):
        is_new_B = spare_B > start - hop  # the segment before does not reach the end
        part = compute({**batch, name: wave_BN[:, start : start + frames]})
        total = total + torch.where(is_new_B.view(shape), part, 0)
        used_B = used_B + is_new_B
    return total / used_B.view(shape)


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values; it has none while memory is predicted (`step_memory`) or a model exported."""
    return not isinstance(tensor, FakeTensor)


class TrainModule(nn.Module):
    """A model with its loss and its score.

    A job's `module.py` defines one subclass and `build(config, data: DataInfo) -> TrainModule`. `build` is called
    after the host's random generator is seeded, with the same seed on every rank.

    With deterministic=true, the first attempt tries `forward` and its backward pass once, on a deep copy of the module
    (`determinism.choose_determinism`).

    On several ranks, BatchNorm's running statistics are the only buffers that a step may change: each rank updates its
    own, and rank 0's are scored and saved. All other buffers count as constant while training; `score` may set some.
    """

    monitor: tuple[str, str] = ("loss", "min")
    """The metric of `score` that decides the best checkpoint, and whether "min" or "max" is better."""

    tie_breaks: tuple[tuple[str, str], ...] = ()
    """Further ones, which decide in their order where the monitor is equal; after them the first evaluation wins."""

    baseline: tuple[str, float | str] | None = None
    """A method that learns nothing, in words, and its value of the monitor: a number, or a metric of `score`.

    Only what costs nothing, such as ("chance", 0.5); `score_baselines` computes others.
    """

    rivals: tuple[str, ...] = ()
    """Methods of `score_baselines` without a network whose monitor is of the same trials as that of `score`."""

    identity_column: str = ""
    """The text column of a sample's identity: `trainyard evaluate` also counts the names that are in training."""

    reads_noise: bool = True
    """Whether `forward` reads the batch's `noise`; else none is drawn, which costs as much as copying small arrays."""

    samples_maps: bool = False
    """Whether `forward` samples maps that need a gradient, as `precision.can_use_grid_sample` says; recorded."""

    matcher: str = ""
    """Which of `score_baselines` is `match_samples`; "": the family has none."""

    training_only: tuple[str, ...] = ()
    """Prefixes of the weights that only training uses and whose sizes depend on the training samples.

    Predictions for new files build the model without a data set, and leave these weights out.
    """

    start_file: tuple[str, str] = ("", "")
    """An option of the family that names weights to start from, as typed ("model.weights=FILE"), and their file."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return {"loss": () float32, ...}; every other scalar is logged under its name.

        `loss` is a mean over the samples of the batch: the engine weights micro-batches and ranks by their number of
        samples, so that one step equals the mean over the whole global batch.
        """
        raise NotImplementedError

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one row per sample, first axis B, including `sample_id` (B,) int64. Runs in inference mode.

        Default: the loss of `forward`, for families whose validation loss decides; the batch has no `noise` here.
        """
        sample_id = batch["sample_id"]
        return {"loss": self(batch)["loss"].expand(len(sample_id)), "sample_id": sample_id}

    def score(self, rows: Rows) -> Mapping[str, float | str | Histogram]:
        """Turn the rows of one whole evaluation set into metrics. Runs once, on rank 0, on the host.

        Text and histograms are metrics that decide nothing: the run's report and TensorBoard show them.
        Default: the mean loss, of the rows of the default `predict`.
        """
        return {"loss": float(rows["loss"].mean())}

    def compute_intervals(self, rows: Rows) -> dict[str, float]:
        """Return the ends of the 95 % intervals of the metrics, as `scoring.Intervals.to_metrics` names them.

        Called at the end of training and by `trainyard evaluate` only, after `score` of the same rows: resampling takes
        long.
        """
        return {}

    def score_baselines(
        self, rows: Rows, evaluated: SampleSource, open_training: Callable[[], SampleSource]
    ) -> dict[str, Score]:
        """Return what `trainyard evaluate` compares with: a method -> its metrics and intervals on the same samples.

        Under `runs.evaluations.RUN`, further metrics of the run itself, such as those on the methods' own trials.
        Methods are fitted on the training split alone, or on nothing.

        Args:
            rows: the model's own of these samples.
            open_training: returns the training split; raises a UserError if it is no longer there.
        """
        return {}

    def report_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return plots of a whole scored set for the report: title -> PNG. Called at the end, on rank 0.

        They show no sample, and no name of one.
        """
        return {}

    def sample_figures(self, rows: Rows) -> dict[str, bytes]:
        """Return images of a few samples of a scored set, such as the best and the worst: title -> PNG.

        Called after `report_figures`, of the same rows, and only with report.samples=on: off is the default, because
        pages are shared. A family whose samples others may see declares `report` in its Config with samples="on".
        """
        return {}

    @staticmethod
    def on_metrics(kind: str, step: int, values: Mapping[str, object]) -> None:
        """See what a run measured, such as to send it somewhere. Called on rank 0, while training waits.

        It gets neither the module nor the run's own values, so it changes nothing but by an exception, which ends the
        run. After a resume it sees the steps since the checkpoint again.

        Args:
            kind: "train", for every `log_every` steps, or "eval", for a scored set.
            step: optimizer steps done.
            values: a copy of a line of `metrics.jsonl`: `loss` and `lr`, or `split` and what `score` returned.
        """

    def prediction_rows(self, rows: Rows, keys: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield a line of `trainyard predict`'s table for each row, in order; `keys` are the samples' names."""
        raise NotImplementedError

    def describe_predict(self) -> Signature:
        """Return what `predict` takes and returns; for families that can be exported as a program.

        Then `predict` has no Python control flow that depends on values, sizes of the first axis (`x.shape[0]`, and not
        `len(x)`) or, of padded arrays, the second one, and uses operators of torch alone.
        """
        raise NotImplementedError

    def select_embeddings(self, rows: Rows) -> np.ndarray:
        """Return the embedding of each row, (N, D) float32 of unit length: the inner product of two is their score.

        For families that compare samples: `trainyard embed`, `compare`, `search`, and pairs in `trainyard predict`.
        """
        raise NotImplementedError

    def select_pair_scores(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return the scores of the pairs of a set, (n,) each: of "genuine" pairs, and of each kind of impostor pairs.

        The first kind of impostor is the one that counts unless a person names another. For families that compare
        samples: thresholds come from these scores of the validation set.
        """
        raise NotImplementedError

    def match_samples(self, data: DataInfo, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the scores of P pairs by the family's `matcher`, which reads the samples, not embeddings.

        Higher means more alike. It decides between the few candidates that embeddings find. Of a model without
        embeddings, the scores are the model's own, as those of `select_pair_scores`.

        Args:
            one, other: (P,) sample ids.

        Returns:
            (P,) float64.
        """
        raise NotImplementedError

    def adapt_weights(self, tensors: Mapping[str, Tensor]) -> AdaptedWeights:
        """Return the weights of a file by the names of this module, which a new run starts from.

        Default: they have the names already, and what depends on the training samples is not taken over.

        Raises:
            UserError: they are of a model that is known, but is not this one.
        """
        samples_only = tuple(f"{prefix}*" for prefix in self.training_only)
        return AdaptedWeights(tensors, new=samples_only, unused=samples_only)

    def repeated_layers(self) -> Iterable[nn.Module]:
        """Return the layers whose activations are recomputed in the backward pass (activation checkpointing)."""
        return ()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return the optimizer's parameter groups; a group's "lr_scale" multiplies its learning rate.

        Default: no weight decay on vectors and scalars (biases, normalisation).
        """
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]

    def build_optimizer(self, groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
        """Return the optimizer, for families that bring their own: `optimizer.name` then decides nothing.

        Gradients are clipped before its step. With `fused=True`, the device skips a step whose gradient is not finite;
        of an optimizer without such kernels, the host waits for the gradient's norm in each step. Anything random in
        its step would differ between ranks.

        Values that change from step to step belong into its `state` and its groups, as tensors, numbers and text: a
        checkpoint has these alone.

        Args:
            groups: those of `parameter_groups`; pass the optimizer all of them, and lr=config.optimizer.lr. Each step
                sets a group's "lr" to that, times the schedule, times the group's "lr_scale".
            config: an option `optimizer.*` that is not read from it, and is not at its default, is refused. Of
                weight_decay, which the groups have, it is enough that it is among the optimizer's defaults.
        """
        raise NotImplementedError

    def build_schedule(
        self, config: TrainConfig, *, total_steps: int | None, steps_per_epoch: int
    ) -> Callable[[int], float]:
        """Return the learning rate of a step, from 0, divided by its peak: for families that bring their own schedule.

        It is a function of the step alone, so a resume needs nothing else. `schedule.name` then decides nothing.

        Args:
            config: an option `schedule.*` that is not read from it, and is not at its default, is refused.
            total_steps: of the run; None if max_duration is a time, which needs schedule.name=constant.
        """
        raise NotImplementedError

    def sparse_gradients(self) -> dict[str, int]:
        """Return parameters whose gradient is 0 in most rows: name -> a bound on the other rows of a global batch.

        Ranks exchange these rows alone (`distributed.average_rows`), and not the whole gradient. The optimizer still
        updates every row, so checkpoints, averages of weights and a change of the number of ranks need nothing else.
        """
        return {}
