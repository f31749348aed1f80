"""Reads predictions of the GPU memory of a job's steps, and checks whether they fit on a card. Loads no torch.

A prediction is a file in the user's cache, keyed by all that it depends on: the job's options, its data, the code and
the version of torch. `trainyard.plan.predict` makes and extends it, in a separate process.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trainyard.config.compose import list_kept_options, save_config
from trainyard.config.duration import Duration
from trainyard.config.settings import TrainConfig
from trainyard.environment import THIS_CODE
from trainyard.errors import UserError
from trainyard.files import load_json, write_json
from trainyard.hardware import GpuType, Precision, choose_precision, count_cores
from trainyard.split import BatchSplit, explain_micro_batch, split_batch
from trainyard.text import quote_path

DRIVER_SHARE = 0.08
"""Of a card's nominal memory: what ECC and the driver may take (`hardware.find_gpu_by_name`). Assumed."""

CONTEXT_GIB = 1.0
"""CUDA's context, the kernels of torch and its libraries, and their workspaces. Assumed, never observed here."""

FRAGMENTS_SHARE = 0.1
"""Of the predicted peak: what torch's allocator holds in pieces that fit no tensor. Assumed, never observed here."""

FITS, TIGHT, MISFIT = "fits", "may not fit", "does not fit"

_SCHEMA = 1
_GIB = 2**30
_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class StepConfig:
    """Settings that, besides the job, decide the memory of a step."""

    device: str  # "cuda" or "cpu"
    dtype: str  # of matrix products: "fp32", "fp16" or "bf16"
    channels_last: bool
    recompute: bool  # activation checkpointing
    micro_batch: int
    accumulates: bool  # several micro-batches a step, or several ranks: gradients are alive during the forward pass

    @classmethod
    def of(cls, split: BatchSplit, precision: Precision, *, device: str, recompute: bool) -> "StepConfig":
        """Return how a step with this split is computed on a device of this type."""
        return cls(device, precision.dtype, precision.channels_last, recompute, split.micro_batch, split.accumulates)


@dataclass(frozen=True)
class StepPrediction:
    """Bytes, as `train.step_memory.StepMemory` describes them; or why there can be no such step."""

    parameters: int = 0
    buffers: int = 0
    optimizer: int = 0
    averages: int = 0
    batch: int = 0
    gradients: int = 0
    activations: int = 0
    refused: str = ""

    @property
    def peak_gib(self) -> float:
        """Return the most that is alive at once, with the micro-batch that the loader copies to a GPU in advance."""
        return (self.checkpoint_bytes + 2 * self.batch + self.activations) / _GIB

    @property
    def reserve_gib(self) -> float:
        """Return the memory of a process besides tensors."""
        return CONTEXT_GIB + FRAGMENTS_SHARE * self.peak_gib

    @property
    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint: everything that stays from step to step."""
        return self.parameters + self.buffers + self.optimizer + self.averages


@dataclass(frozen=True)
class CardFit:
    """The split of the global batch on one card, and whether its memory is enough."""

    split: BatchSplit
    setting: StepConfig
    step: StepPrediction
    verdict: str  # FITS, TIGHT or MISFIT
    precision: Precision
    has_gib: float  # share of the card's memory that this process can get
    reason: str


Predict = Callable[[StepConfig], StepPrediction]


class NotPredicted(Exception):
    """The stored file has no prediction of this setting."""


class CannotPredict(UserError):
    """The process that predicts has failed."""


def count_disk_bytes(step: StepPrediction, config: TrainConfig, steps: int | None) -> int:
    """Return the most that a run's checkpoints take: the newest ones, the best, and those of checkpoint.keep_every.

    Args:
        steps: of the run; None, unknown: checkpoints that are kept once in a number of steps are not counted.
    """
    settings = config.checkpoint
    interval = Duration.parse(settings.keep_every) if settings.keep_every else None
    permanent = steps // int(interval.value) if interval is not None and interval.unit == "st" and steps else 0
    return step.checkpoint_bytes * (settings.keep_last + 1 + permanent)


def choose_fit(config: TrainConfig, card: GpuType, *, gpus: int, predict: Predict) -> CardFit:
    """Choose the largest micro-batch that fits on a card and divides the stated one, for the same global batch.

    Where results depend on the micro-batch, it stays as stated. Activations are recomputed only if nothing else fits.

    Args:
        predict: returns the prediction of a setting, or raises.

    Raises:
        UserError: the card cannot compute as the config says.
    """
    most = split_batch(config.global_batch_size, ranks=gpus, micro_batch=config.micro_batch_size).micro_batch
    divisors = [size for size in range(most, 0, -1) if most % size == 0]
    sizes = [most] if config.explain_batch_dependence() else divisors
    tried: list[CardFit] = []
    for recompute in sorted({config.gradient_checkpointing, True}):
        check = _FitCheck(config, card, _choose_precision(config, card), gpus, recompute, predict)
        tried.append(check(sizes[0]))
        if tried[-1].verdict != FITS and len(sizes) > 1 and not tried[-1].step.refused:
            tried.append(_search_size(sizes, tried[-1], check))
        if tried[-1].verdict == FITS:
            return tried[-1]
    possible = [fit for fit in tried if not fit.step.refused]
    return min(possible, key=lambda fit: fit.step.peak_gib) if possible else tried[0]


def check_fit(config: TrainConfig, card: GpuType, *, gpus: int, predict: Predict) -> CardFit:
    """Return how the config's own micro-batch fits on a card, with activation checkpointing as the config says.

    Raises:
        UserError: the card cannot compute as the config says.
    """
    check = _FitCheck(config, card, _choose_precision(config, card), gpus, config.gradient_checkpointing, predict)
    return check(config.micro_batch_size)


def _choose_precision(config: TrainConfig, card: GpuType) -> Precision:
    return choose_precision(
        card.sm, precision=config.precision, channels_last=config.channels_last, compile=config.compile
    )


@dataclass(frozen=True)
class _FitCheck:
    """Compares a step of a micro-batch size with a card's memory."""

    config: TrainConfig
    card: GpuType
    precision: Precision
    gpus: int
    recompute: bool
    predict: Predict

    def __call__(self, micro_batch: int) -> CardFit:
        split = split_batch(self.config.global_batch_size, ranks=self.gpus, micro_batch=micro_batch)
        setting = StepConfig.of(split, self.precision, device="cuda", recompute=self.recompute)
        step, has_gib = self.predict(setting), self.card.memory_gib * (1 - DRIVER_SHARE)
        verdict = FITS if step.peak_gib + step.reserve_gib <= has_gib else TIGHT
        if step.refused or step.peak_gib > has_gib:
            verdict = MISFIT
        return CardFit(split, setting, step, verdict, self.precision, has_gib, self._explain(split))

    def _explain(self, split: BatchSplit) -> str:
        reason = explain_micro_batch(self.config.micro_batch_size)
        most = split_batch(split.global_batch, ranks=split.ranks, micro_batch=self.config.micro_batch_size).micro_batch
        if split.micro_batch != most:
            reason = f"reduced from {most}: results do not depend on it"
        elif dependence := self.config.explain_batch_dependence():
            reason += f"; results depend on it: {dependence}"
        if self.recompute and not self.config.gradient_checkpointing:
            reason += "; with gradient_checkpointing=true, because memory binds"
        return reason


def _search_size(sizes: list[int], largest: CardFit, check: Callable[[int], CardFit]) -> CardFit:
    """Return the largest size that fits between two predictions, or the smallest size if not even that fits.

    The peak is the largest of many sums, each proportional to the size: a convex function. So it lies below the line
    between two of its values, and a size that fits by that line does fit.
    """
    smallest = check(sizes[-1])
    if smallest.verdict != FITS:
        return smallest
    low, high = (fit.split.micro_batch for fit in (smallest, largest))
    slope = (largest.step.peak_gib - smallest.step.peak_gib) / (high - low)
    room = (smallest.has_gib - CONTEXT_GIB) / (1 + FRAGMENTS_SHARE) - smallest.step.peak_gib
    fitting = [size for size in sizes if size == low or (size - low) * slope <= room]
    return smallest if fitting[0] == low else check(fitting[0])


# The stored file


@dataclass
class PredictionCache:
    """The stored predictions of one job."""

    path: Path
    steps: dict[StepConfig, StepPrediction]
    about: dict[str, Any]  # their sources, for people

    def read(self, setting: StepConfig) -> StepPrediction:
        """Return a stored prediction.

        Raises:
            NotPredicted: there is none.
        """
        if setting not in self.steps:
            raise NotPredicted
        return self.steps[setting]

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        steps = [{**asdict(setting), **asdict(step)} for setting, step in self.steps.items()]
        write_json(self.path, {"schema": _SCHEMA, **self.about, "steps": steps})


def open_cache(config: TrainConfig, jobs_dir: Path, environ: Mapping[str, str]) -> PredictionCache:
    """Return the predictions for this job, code, data and version of torch; without any if there is no file.

    Raises:
        UserError: the file is damaged.
    """
    return read_cache(config.job, compute_key(config, jobs_dir), environ)


def read_cache(job: str, key: str, environ: Mapping[str, str]) -> PredictionCache:
    """Return the predictions stored under this key, as `compute_key` returned it; raises as `open_cache`."""
    path = find_cache(environ) / f"{job}-{key}.json"
    if not path.is_file():
        return PredictionCache(path, {}, {"job": job})
    predictions = PredictionCache(path, {}, {})
    _extend(predictions, path)
    return predictions


def _extend(predictions: PredictionCache, path: Path) -> None:
    """Add the predictions in a file to those of a cache."""
    try:
        content = load_json(path, most_bytes=_MOST_BYTES)
        names = [{field.name for field in fields(kind)} for kind in (StepConfig, StepPrediction)]
        steps = {
            StepConfig(**{name: line[name] for name in names[0]}): StepPrediction(
                **{name: line[name] for name in names[1]}
            )
            for line in content.pop("steps")
        }
        assert content.pop("schema") == _SCHEMA
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise UserError(
            f"{path}: expected predictions of trainyard plan, found something else ({error!r:.80}). Remove the file, "
            f"and it is made again: rm {quote_path(path)}"
        ) from None
    predictions.steps |= steps
    predictions.about |= content


def find_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of predictions, which may not exist."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard" / "plans"


_WITHOUT_EFFECT = (
    "schedule.",
    "optimizer.lr",
    "optimizer.weight_decay",
    "clip_grad_norm",
    "max_duration",
    "monitor",
    "min_delta",
    "log_every",
    "seed",
)
"""Options with which a step takes as much whatever their value: the runs of a sweep over them share a prediction.

A seed decides which samples train, and so may leave out the longest: a difference far below the reserve.
"""


def compute_key(config: TrainConfig, jobs_dir: Path) -> str:
    """Return a digest of all that a prediction depends on, except its setting."""
    every, _ = list_kept_options(replace(config, micro_batch_size=0, gradient_checkpointing=False))
    kept = {name: value for name, value in every.items() if not name.startswith(_WITHOUT_EFFECT)}
    index = Path(config.data.path) / "index.h5" if config.data.path else None
    stat = index.stat() if index is not None and index.is_file() else None
    data = [config.data.path, stat and stat.st_size, stat and stat.st_mtime_ns]
    digest = hashlib.sha256()
    digest.update(json.dumps([kept, data, metadata.version("torch"), sys.version_info[:2]], default=str).encode())
    digest.update(_hash_code(jobs_dir / config.family))
    return digest.hexdigest()[:16]


@cache
def _hash_code(family: Path) -> bytes:
    digest = hashlib.sha256()
    for folder in (family, THIS_CODE / "train", THIS_CODE / "data"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    digest.update((THIS_CODE / "plan" / "predict.py").read_bytes())
    return digest.digest()


def complete_cache(
    config: TrainConfig,
    jobs_dir: Path,
    cards: Sequence[GpuType],
    *,
    gpus: int,
    environ: Mapping[str, str],
    announce: Callable[[], None] | None,
) -> PredictionCache:
    """Return all predictions that fitting this job on these cards needs; those that are missing are made now.

    Args:
        announce: called before that begins, because it takes seconds.

    Raises:
        CannotPredict: the job cannot be built; with the words of the process that tried.
    """
    predictions = open_cache(config, jobs_dir, environ)
    missing = [card for card in cards if not _has_fit(config, card, gpus, predictions)]
    if not missing:
        return predictions
    if announce is not None:
        announce()
    with tempfile.TemporaryDirectory() as folder:
        file, outs, processes = Path(folder) / "config.yaml", [], []
        save_config(config, file)
        for i, keys in enumerate(_share_out(config, missing)):
            outs.append(Path(folder) / f"steps{i}.json")
            command = [sys.executable, "-c", _PREDICT, str(file), str(jobs_dir), str(outs[i]), str(gpus), *keys]
            environment = {**environ, "CUDA_VISIBLE_DEVICES": ""}
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            )
        outputs = [process.communicate()[0].strip().splitlines() for process in processes]
        for process, lines in zip(processes, outputs, strict=True):
            if process.returncode:
                raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
                reason = (raised or lines or ["the process ended without a message"])[-1]
                raise CannotPredict(f"its memory cannot be predicted: {reason}")
        predictions = open_cache(config, jobs_dir, environ)
        for out in outs:
            _extend(predictions, out)
    predictions.save()
    return predictions


# Importing torch makes a million objects and drops hardly any: looking for garbage among them takes half a second.
_PREDICT = "import gc, sys; gc.disable(); from trainyard.plan.predict import main; sys.exit(main(*sys.argv[1:]))"


def _share_out(config: TrainConfig, cards: Sequence[GpuType]) -> list[list[str]]:
    """Return the cards of each process that predicts: steps of different types are predicted at the same time."""
    parts: dict[tuple[bool, bool], list[str]] = {}
    for card in cards:
        precision = _choose_precision(config, card)
        parts.setdefault((precision.dtype == "fp32", precision.channels_last), []).append(card.key)
    return list(parts.values()) if count_cores() > 1 else [[card.key for card in cards]]


def _has_fit(config: TrainConfig, card: GpuType, gpus: int, predictions: PredictionCache) -> bool:
    try:
        choose_fit(config, card, gpus=gpus, predict=predictions.read)
    except NotPredicted:
        return False
    except UserError:  # this card cannot compute as the config says: nothing to predict
        return True
    return True
