"""Turns a folder of recordings, with a sub-folder for each class, into samples."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

from trainyard.data.labelled import LabelledFile, assign_sets, find_class, find_sets, list_labelled_files
from trainyard.data.raw import SOUNDS, list_named
from trainyard.data.shards import Audio, BadRecord, Loaded, Sample
from trainyard.data.sounds import convert_to_pcm, read_sound

from .config import Config

CLASSES = "classes"


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return the names of the classes, a JSON list: the model needs them where no data set is at hand."""
    return {CLASSES: json.dumps(sorted({file.label for file in list_labelled_files(raw, SOUNDS)}))}


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every recording of `raw/CLASS/`, or of `raw/train/CLASS/`, `raw/val/CLASS/` and `raw/test/CLASS/`.

    Record: `wave`. Columns: `label`, the number of its class, and `set` (text).
    """
    files = list_labelled_files(raw, SOUNDS)
    labels, stated = {file.key: file.label for file in files}, {file.key: file.set for file in files}
    sets = assign_sets(labels, config.packing, stated=stated)
    yield from _make_samples(files, sorted({file.label for file in files}), sets, config)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the samples of a labelled folder to evaluate, all in "test", and the artifacts of the run."""
    files = list_labelled_files(raw, SOUNDS)
    classes, sets = json.loads(artifacts[CLASSES]), {file.key: "test" for file in files}
    return _make_samples(files, classes, sets, config), artifacts


def _make_samples(
    files: Sequence[LabelledFile], classes: Sequence[str], sets: Mapping[str, str], config: Config
) -> Iterator[Sample]:
    for file in files:
        yield Sample(
            key=file.key,
            load=_choose_loader(file.path, config),
            columns={"label": find_class(file, classes), "set": sets[file.key]},
            source=file.path,
        )


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every recording in a folder and below it, or the file `raw` itself."""
    for key, path in list_named(raw, SOUNDS):
        yield Sample(key, _choose_loader(path, config), source=path)


def _choose_loader(path: Path, config: Config) -> "partial[Loaded]":
    return partial(load, path, rate_hz=config.sound.rate_hz, mix=config.packing.stereo == "mix")


def load(path: Path, artifacts: Mapping[str, str] | None = None, *, rate_hz: int, mix: bool) -> Loaded:
    """Read one recording, at `rate_hz`.

    Raises:
        BadRecord: it is not a complete recording, or has several channels, unless they are to be mixed.
    """
    sound = read_sound(path)
    frames, own_hz = sound.frames / 32768 if sound.frames.dtype == np.int16 else sound.frames, sound.rate_hz
    if frames.shape[1] > 1 and not mix:
        raise BadRecord(f"{frames.shape[1]} channels, expected one. Mix them: packing.stereo=mix")
    divisor = math.gcd(own_hz, rate_hz)
    wave = frames.mean(axis=1)
    if own_hz != rate_hz:
        from scipy.signal import resample_poly  # type: ignore[import-untyped]  # here: it loads for seconds

        wave = resample_poly(wave, rate_hz // divisor, own_hz // divisor)
    return {"wave": Audio(convert_to_pcm(wave))}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and "test", as packed."""
    return find_sets(columns, vocabulary)


def synthesize(raw: Path, count: int, seed: int) -> None:
    """Write `count` recordings of half a second of hums, chirps and clicks: the smoke test trains on them."""
    rng, rate_hz = np.random.default_rng(seed), 8000
    names, time_s = ("chirp", "click", "hum"), np.arange(rate_hz // 2) / rate_hz
    for i in range(count):
        name, base_hz = names[i % len(names)], rng.uniform(200, 600)
        sweep_hz = 4 * base_hz * time_s if name == "chirp" else 0
        tone = np.sin(2 * np.pi * (base_hz + sweep_hz) * time_s)
        clicks = (rng.random(len(time_s)) < 0.01) * 1.0
        wave = 0.4 * (clicks if name == "click" else tone) + rng.normal(0, 0.02, len(time_s))
        path = raw / name / f"{i:05d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, wave.clip(-1, 1), rate_hz, subtype="PCM_16")
