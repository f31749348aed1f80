"""`trainyard evaluate`: the metrics of a run's weights on labelled folders, next to those of its family's baselines."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from tqdm import tqdm

from trainyard import __version__
from trainyard.config.compose import apply_overrides
from trainyard.config.settings import TrainConfig
from trainyard.data.index import AUDIO, ENCODED_IMAGE, INDEX, INPUTS, PCM, VARYING_AXES
from trainyard.data.prepare import build_meta
from trainyard.data.shards import Sample, ShardSet
from trainyard.data.splits import find_splits
from trainyard.data.store import name_store
from trainyard.errors import UserError
from trainyard.files import EVALUATION, FORMATS, create_folder, restrict_umask, write_atomically, write_json
from trainyard.report.score_figures import draw_error_trade_off
from trainyard.runs.evaluations import (
    ABOUT_FILE,
    FIGURES,
    FOLDER,
    RUN,
    SAMPLES,
    Evaluation,
    describe_seen,
    name_pair_scores,
    read_evaluations,
)
from trainyard.runs.events import METRICS_FILE
from trainyard.runs.folder import find_free_name, read_env
from trainyard.runs.pair_scores import write_pair_scores
from trainyard.text import join_names, make_slug, quote_path
from trainyard.tools.trained_model import TrainedModel, describe_data, load_model, make_loader, pack_temporarily
from trainyard.train.evaluate import gather_rows, open_source, score_rows
from trainyard.train.module import DataInfo, SampleSource, Score
from trainyard.train.precision import make_autocast
from trainyard.train.recorder import encode_line

CHANGEABLE = ("packing.", "evaluation.", "report.", "data.on_error=", "eval_batch_size=")
"""Prefixes of the options that an evaluation may change: how raw files are read, and how rows are scored."""


@dataclass(frozen=True)
class _Training:
    """The training split of the run, if its packed data is still there."""

    data: ShardSet | None
    ids: np.ndarray
    missing: str  # why there is none


@dataclass(frozen=True)
class _Labelled:
    """A labelled data set, packed and open."""

    data: ShardSet
    artifacts: Mapping[str, str]  # with which the run's model reads it
    is_packed: bool  # whether the folder itself holds shards


def evaluate(
    run: Path,
    folders: Sequence[Path],
    jobs_dir: Path,
    *,
    split: str = "",
    overrides: Sequence[str] = (),
    with_baselines: bool = True,
) -> list[Evaluation]:
    """Score the run's final weights, and the baselines, on each folder; write each result into the run, and return it.

    Raw files are packed into a temporary folder in the run, with the run's options. All samples of a folder count.

    Args:
        split: only this split of packed data, or this set of raw files; "": all samples.
        overrides: options for reading and scoring these folders, which differ from the run's.

    Raises:
        UserError: a folder has no labels, or those of another family; the run has no weights; or a baseline needs its
            training data, which is gone.
    """
    for folder in folders:
        if not folder.exists():
            raise UserError(f"{folder}: no such folder. Expected labelled raw files, or packed data.")
    model = load_model(run, jobs_dir, lists="list_labelled")
    model = replace(model, config=_override(model.config, overrides))
    training = _open_training(model)
    written = [
        _evaluate_folder(
            model,
            folder,
            jobs_dir,
            training=training,
            split=split,
            overrides=overrides,
            with_baselines=with_baselines,
        )
        for folder in folders
    ]
    return [item for item in read_evaluations(run) if item.path in written]


def _override(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    wrong = [word for word in overrides if not word.startswith(CHANGEABLE)]
    if wrong:
        raise UserError(
            f"{wrong[0]}: the run's weights belong to its options. An evaluation may change how the folder is read and "
            f"scored: {', '.join(f'{start}...' for start in CHANGEABLE)}"
        )
    return apply_overrides(config, overrides)


def _evaluate_folder(
    model: TrainedModel,
    folder: Path,
    jobs_dir: Path,
    *,
    training: _Training,
    split: str,
    overrides: Sequence[str],
    with_baselines: bool,
) -> Path:
    begin = time.monotonic()
    name = make_slug(folder.resolve().name).lstrip(".") or "data"
    with restrict_umask(), _open_labelled(model, folder, jobs_dir) as labelled:
        data = labelled.data
        ids = np.arange(data.count) if not split else _select_split(model, labelled, split, folder)
        info = replace(DataInfo.from_shards(data, np.empty(0, np.int64)), artifacts=labelled.artifacts)
        model = replace(model, module=describe_data(model, info, jobs_dir))
        evaluated = open_source(make_loader(model, data), info, ids, batch_size=model.config.eval_batch_size)
        seen = _count_seen(model, data, ids, training)
        if seen.get("samples") or seen.get("names"):
            logger.warning("{}: seen in training: {}", folder, describe_seen(seen))
        systems, figures = _score(model, data, evaluated, folder, training=training, with_baselines=with_baselines)
        about = {
            "folder": str(folder.resolve()),
            "split": split,
            "data": {
                "fingerprint": data.fingerprint,
                "samples": len(ids),
                "samples_in_folder": data.count,
                "skipped": data.skipped,
                "packed": labelled.is_packed,
            },
            "checkpoint": {
                "file": model.checkpoint.path.name,
                "step": model.checkpoint.step,
                "sha256": model.checkpoint.sha256,
            },
            "seen_in_training": seen,
            "overrides": list(overrides),
            "packing": data.meta.get("packing") if labelled.is_packed else _list_packing(model.config),
            "device": model.device.type,
            "precision": model.precision.dtype,
            "trainyard": __version__,
            "created": datetime.now(UTC).isoformat(timespec="microseconds"),
            "seconds": round(time.monotonic() - begin, 3),
        }
        target = find_free_name(model.run / FOLDER / (f"{name}-{make_slug(split)}" if split else name))
        _write(target, about, systems, figures, model)
    return target


# Labelled data


@contextmanager
def _open_labelled(model: TrainedModel, folder: Path, jobs_dir: Path) -> Iterator[_Labelled]:
    config, pack = model.config, model.pack
    if (folder / INDEX).is_file():
        data = ShardSet(folder)
        packed_for = data.meta.get("family", config.family)
        if packed_for != config.family:
            raise UserError(
                f"{folder}: packed for the family {packed_for!a}, but {model.run} is a run of {config.family}. Name "
                f"another folder, or a run of {packed_for!a}: trainyard evaluate RUN {quote_path(folder)}"
            )
        own, packed = model.artifacts, data.artifacts
        with closing(data):
            artifacts = pack.join_artifacts(folder, own, packed) if hasattr(pack, "join_artifacts") else own
            _warn_of_other_packing(folder, data.meta.get("packing"), _list_packing(config))
            yield _Labelled(data, artifacts, True)
        return
    samples, artifacts = pack.list_labelled(folder, config, model.artifacts)
    listed: Iterator[Sample] = iter(samples)
    first = next(listed, None)
    if first is None:
        raise UserError(
            f"{folder}: contains no labelled sample that {config.family} knows. Expected: what "
            f"{jobs_dir / config.family}/README.md describes. Without labels there are predictions: trainyard predict "
            f"{quote_path(model.run)} {quote_path(folder)} OUT.csv"
        )
    skip_bad = config.data.on_error == "skip"
    near = model.run / FOLDER
    listed, meta = itertools.chain([first], listed), build_meta(config)
    with pack_temporarily(model, listed, near=near, skip_bad=skip_bad, meta=meta) as data:
        yield _Labelled(data, artifacts, False)


def _list_packing(config: TrainConfig) -> dict[str, Any]:
    return asdict(config.packing) if hasattr(config, "packing") else {}


def _warn_of_other_packing(folder: Path, packed: object, own: Mapping[str, Any]) -> None:
    """Warn of options that packed this data otherwise than the training data of the run."""
    if not isinstance(packed, dict):  # none if `pack` was called directly
        return
    names = [name for name in own if packed.get(name, own[name]) != own[name]]
    differing = [f"{name}={packed[name]} (run: {own[name]})" for name in names]
    if differing:
        logger.warning("{}: packed with other options than the run's: {}", folder, join_names(differing))


def _select_split(model: TrainedModel, labelled: _Labelled, split: str, folder: Path) -> np.ndarray:
    """Return the sample ids of a split, as the family splits packed data, or as raw files name it."""
    data = labelled.data
    if labelled.is_packed:
        splits: Mapping[str, np.ndarray] = find_splits(model.pack, data, model.config)
    else:
        names = np.array(data.vocabulary.get("set", []))[data.columns.get("set", np.empty(0, np.int64))]
        splits = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    if split not in splits:
        raise UserError(
            f"--split {split}: {folder} has no split of this name. It has: {join_names(list(splits)) or 'none'}. "
            "Leave it out to evaluate all samples."
        )
    return np.sort(splits[split])


# Training data


def _open_training(model: TrainedModel) -> _Training:
    """Open the packed data that the run was trained on, if it is still there and unchanged."""
    folder, none = Path(model.config.data.path), np.empty(0, dtype=np.int64)
    if not model.config.data.path or not (folder / INDEX).is_file():
        return _Training(None, none, f"{folder}: the packed data that {model.run} was trained on is not there")
    data = ShardSet(folder)
    if data.fingerprint != read_env(model.run).get("data", {}).get("fingerprint"):
        return _Training(None, none, f"{folder}: no longer the packed data that {model.run} was trained on")
    splits = find_splits(model.pack, data, model.config)
    return _Training(data, np.sort(splits["train"]), "")


def _count_seen(model: TrainedModel, data: ShardSet, ids: np.ndarray, training: _Training) -> dict[str, Any]:
    """Count the samples with the content of a training sample, and the names that also occur there."""
    if training.data is None:
        return {"unknown": training.missing}
    stored, trained_on = (name_store(each.records, each.meta) for each in (data, training.data))
    if stored != trained_on:
        return {
            "unknown": f"{data.folder} was packed with packing.store={stored}, the training data with {trained_on}, so "
            f"their images cannot be compared: evaluate raw files with packing.store={trained_on}"
        }
    compared = _list_compared(training.data, data)
    if not compared:
        return {"unknown": f"{data.folder} has no record that the training data has, so nothing can be compared"}
    trained = {row.tobytes() for row in _digest_records(training.data, compared, training.ids)}
    same = sum(row.tobytes() in trained for row in _digest_records(data, compared, ids))
    counts: dict[str, Any] = {"samples": same, "samples_of": len(ids)}
    column = model.module.identity_column
    if column in data.vocabulary and column in training.data.vocabulary:
        names, known = (
            {each.vocabulary[column][code] for code in np.unique(each.columns[column][rows]).tolist()} - {""}
            for each, rows in ((data, ids), (training.data, training.ids))
        )
        counts |= {"column": column, "names": len(names & known), "names_of": len(names)}
    return counts


def _list_compared(data: ShardSet, other: ShardSet) -> list[str]:
    """Return the records that say whether two samples are the same one: images, sounds and ragged arrays.

    Arrays of fixed shape count where there are no such records: features that packing computes may differ between a
    training sample and the same one elsewhere.
    """
    kinds = (ENCODED_IMAGE, *INPUTS, AUDIO, PCM, *VARYING_AXES)
    shared = sorted(data.records.keys() & other.records.keys())
    return [name for name in shared if data.records[name].kind in kinds] or shared


def _digest_records(data: ShardSet, names: Sequence[str], ids: np.ndarray) -> np.ndarray:
    """Return (n, 2 R) int64: size and CRC-32C of each sample's R records."""
    parts = [part for name in names for part in (data.records[name].size, data.records[name].crc)]
    return np.ascontiguousarray(np.stack([part[ids].astype(np.int64) for part in parts], axis=1))


# Scoring and writing


def _score(
    model: TrainedModel,
    data: ShardSet,
    evaluated: SampleSource,
    folder: Path,
    *,
    training: _Training,
    with_baselines: bool,
) -> tuple[dict[str, Score], dict[str, Mapping[str, bytes]]]:
    """Return the scores of the run and each baseline, by name, and the figures by folder."""
    module, config = model.module, model.config
    title = f"evaluating {folder.name}"
    with tqdm(total=len(evaluated.ids), unit="sample", desc=title, disable=None, leave=False) as bar:
        gathered = gather_rows(
            module,
            make_loader(model, data),
            evaluated.ids,
            batch_size=config.eval_batch_size,
            autocast=make_autocast(model.precision, model.device),
            progress=bar.update,
        )
    assert gathered is not None, "one process alone is rank 0"
    rows, _ = gathered

    def open_training() -> SampleSource:
        if training.data is None:
            raise UserError(f"{training.missing}, and the baseline is fitted on it. Leave it out: --no-baseline")
        info, loader = DataInfo.from_shards(training.data, training.ids), make_loader(model, training.data)
        return open_source(loader, info, training.ids, batch_size=config.eval_batch_size)

    try:
        metrics, _ = score_rows(module, rows, with_intervals=True)
        systems = {RUN: Score(metrics, module.select_pair_scores(rows) if model.scores_pairs else {})}
    except UserError as error:
        raise UserError(f"{folder}: cannot be scored: {error}") from None
    if with_baselines:
        logger.info("{}: computing the baselines on the same samples (--no-baseline leaves them out)", folder)
        baselines = dict(module.score_baselines(rows, evaluated, open_training))
        further = baselines.pop(RUN, Score({})).metrics
        systems[RUN] = replace(systems[RUN], metrics={**systems[RUN].metrics, **further})
        systems |= baselines
    samples = module.sample_figures(rows) if config.report.samples == "on" else {}
    return systems, {FIGURES: module.report_figures(rows) | _draw_systems(systems), SAMPLES: samples}


def _draw_systems(systems: Mapping[str, Score]) -> dict[str, bytes]:
    """Return the error trade-off of all systems with scores of pairs, for the first kind of impostors."""
    scores = {name: list(score.pair_scores.values())[:2] for name, score in systems.items() if score.pair_scores}
    if len(scores) < 2:
        return {}
    pairs = {
        f"{name} ({len(impostor):,} impostors)": (genuine, impostor) for name, (genuine, impostor) in scores.items()
    }
    return {"Error trade-off of all systems": draw_error_trade_off(pairs)}


def _write(
    target: Path,
    about: Mapping[str, Any],
    systems: Mapping[str, Score],
    figures: Mapping[str, Mapping[str, bytes]],
    model: TrainedModel,
) -> None:
    """Write an evaluation, with its figures by folder; it is complete as soon as it is visible."""
    with create_folder(target) as folder:
        write_json(folder / ABOUT_FILE, {"format": FORMATS[EVALUATION], **about})
        step, precision = model.checkpoint.step, model.precision.dtype
        lines = []
        for system, score in systems.items():
            metrics = {name: float(value) for name, value in score.metrics.items()}
            lines.append(encode_line({"kind": "eval", "step": step, "split": target.name, "system": system, **metrics}))
            if score.pair_scores:
                path = folder / name_pair_scores(system)
                write_pair_scores(path, score.pair_scores, step=step, precision=precision)
        write_atomically(folder / METRICS_FILE, b"".join(lines))
        for name, images in figures.items():
            if images:
                (folder / name).mkdir()
            for title, png in images.items():
                write_atomically(folder / name / f"{title.replace('/', '_')}.png", png)
