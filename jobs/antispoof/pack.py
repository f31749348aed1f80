"""Turns raw folders of speech into samples: decodes, resamples and mixes to mono once, and assigns sets."""

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from tqdm import tqdm

from trainyard.data.decode_cpu import decode_recording
from trainyard.data.raw import SOUNDS, list_named
from trainyard.data.shards import Audio, BadRecord, Loaded, Sample
from trainyard.data.sounds import convert_to_pcm, read_sound
from trainyard.errors import UserError

from . import vocoders
from .config import Config, PackingSettings
from .protocols import (
    TEST,
    TRAIN,
    VAL,
    Utterance,
    assign_folds,
    assign_sets,
    find_asv_files,
    find_audio_files,
    find_utterances,
    list_utterances,
    read_asv_rates,
)
from .synthesis import synthesize as synthesize

RAW_FILES = "recordings in folders bonafide and spoof (or real and fake), a protocol.csv, or an ASVspoof database"
WAVE = "wave"
LOGISTIC = "pooled_logistic"
FOLDS = 5  # of the training utterances, for `pooled_logistic`
Pcm = NDArray[np.int16]


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every utterance of a raw folder; see `protocols.find_utterances` for its layouts.

    Columns: `label` (1 bona fide, 0 spoofed), `attack`, `speaker` and `set` (text), `source_rate_hz` (of the file),
    and with `packing.logistic` `fold` (of a training utterance, from 1; else 0).
    With `packing.copies` the folder contains only bona fide recordings, and each is followed by its copies.
    """
    rule = config.packing
    if not rule.copies:
        found = find_utterances(raw, rule)
    else:
        recordings = _list_recordings(raw, config)
        speakers = {utterance.speaker for utterance in recordings}
        if recordings and (missing := sorted({*rule.val_speakers, *rule.test_speakers} - speakers)):
            raise UserError(
                f"speaker '{missing[0]}' has no recording in {raw}. Speakers: {', '.join(sorted(speakers))}."
            )
        found = assign_sets(recordings, rule)
    if rule.logistic:
        found = assign_folds(found, count=FOLDS)
    yield from _make_copies(found, config) if rule.copies else (_make_sample(utterance, config) for utterance in found)


def list_labelled(
    raw: Path, config: Config, artifacts: Mapping[str, str]
) -> tuple[Iterator[Sample], Mapping[str, str]]:
    """Return the samples of a folder to evaluate, and the artifacts with which the run reads them: its own ASV rates.

    Recordings without a set are in "test". If nothing is labelled and the run was trained on copies, the recordings
    count as bona fide, and the copies of `packing.copies` as spoofed.
    """
    if not raw.is_dir():
        return iter(()), artifacts
    found = [
        replace(utterance, set=utterance.set or TEST)
        for utterance in list_utterances(raw, config.packing.bonafide_label)
    ]
    own = {**artifacts, "asv": _read_asv(raw)}
    if found or not config.packing.copies:
        return (_make_sample(utterance, config) for utterance in found), own
    recordings = [replace(utterance, set=utterance.set or TEST) for utterance in _list_recordings(raw, config)]
    return _make_copies(recordings, config), own


def join_artifacts(folder: Path, own: Mapping[str, str], packed: Mapping[str, str]) -> Mapping[str, str]:
    """Return the artifacts with which a run reads packed data: that data's, for its sets, and its own fit."""
    return {**packed, **{name: text for name, text in own.items() if name == LOGISTIC}}


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return `asv`, and `pooled_logistic` with `packing.logistic`.

    `asv`: by set, the error rates of the speaker verification behind the countermeasure, for the t-DCF.
    """
    artifacts = {"asv": json.dumps({}) if config.packing.copies else _read_asv(raw)}
    return artifacts | ({LOGISTIC: _fit_logistic(raw, config)} if config.packing.logistic else {})


def _fit_logistic(raw: Path, config: Config) -> str:
    """Return `baseline.PooledLogistic`'s state, fitted on whole recordings of the training set."""
    import torch

    from . import baseline

    model = baseline.PooledLogistic("{}", rate_hz=config.sound.rate_hz, frames=config.sound.frames)
    features, labels, folds = [], [], []
    training = [sample for sample in samples(raw, config) if sample.columns["set"] == TRAIN]
    for sample in tqdm(training, unit="utterance", desc="pooling", disable=None, leave=False):
        try:
            record = sample.load()[WAVE].data
        except BadRecord:
            continue  # packing names it
        recording = record if isinstance(record, np.ndarray) else decode_recording(np.frombuffer(record, np.uint8))
        wave_1N = torch.from_numpy(recording.astype(np.float32) / 2**15)[None]
        features.append(baseline.pool(model.maps(wave_1N))[0].double().numpy())
        labels.append(sample.columns["label"])
        folds.append(sample.columns["fold"])
    if len(set(labels)) < 2:
        return "{}"  # packing refuses these sets
    label_N, fold_N = np.array(labels), np.array(folds)
    if any(len(np.unique(fold_N[label_N == label])) < 2 for label in (0, 1)):
        raise UserError(
            f"packing.logistic=true needs two recordings of each class in the training set, found {label_N.sum()} bona "
            f"fide and {(1 - label_N).sum()} spoofed. Add recordings, or use packing.logistic=false."
        )
    return json.dumps(baseline.fit_folds(np.stack(features), label_N, fold_N))


def _read_asv(raw: Path) -> str:
    files = find_asv_files(raw)
    return json.dumps({name: asdict(read_asv_rates(path)) for name, path in files.items()}, sort_keys=True)


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every audio file in a folder and below it, or the file `raw` itself, for scoring."""
    for key, path in list_named(raw, SOUNDS):
        yield Sample(key, partial(load, path, config.sound.rate_hz, config.packing), source=path)


def load(path: Path | None, rate_hz: int, rule: PackingSettings, artifacts: Mapping[str, str] | None = None) -> Loaded:
    """Read one file, at `rate_hz`.

    Raises:
        BadRecord: the file is missing, incomplete, of an unknown format or too short, or has several channels or
            another rate.
    """
    data, pcm, source_rate_hz, is_plain = _decode(path, rate_hz, rule)
    if rule.store == "encoded":
        return {WAVE: Audio(data if is_plain else _encode_flac(pcm, rate_hz)), "source_rate_hz": source_rate_hz}
    return {WAVE: Audio(pcm), "source_rate_hz": source_rate_hz}


def load_copy(
    path: Path | None,
    rate_hz: int,
    rule: PackingSettings,
    kind: str,
    name: str,
    artifacts: Mapping[str, str] | None = None,
) -> Loaded:
    """Read one file and make a vocoded copy of it; see `load`.

    Args:
        name: seeds the copy's random phases.
    """
    _, pcm, source_rate_hz, _ = _decode(path, rate_hz, rule)
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))
    copy = convert_to_pcm(vocoders.synthesize_copy(pcm / 32768, kind, rate_hz=rate_hz, rng=rng))
    stored = _encode_flac(copy, rate_hz) if rule.store == "encoded" else copy
    return {WAVE: Audio(stored), "source_rate_hz": source_rate_hz}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and the test sets, as packed.

    Raises:
        UserError: training or validation lacks bona fide or spoofed speech.
    """
    set_names = np.array(vocabulary["set"])[columns["set"]]
    names = [name for name in (TRAIN, VAL) if name in vocabulary["set"]]
    names += [name for name in vocabulary["set"] if name.startswith(TEST)]
    result = {name: np.flatnonzero(set_names == name) for name in names}
    for name in (TRAIN, VAL):
        labels = columns["label"][result.get(name, np.empty(0, dtype=np.int64))]
        if len(np.unique(labels)) < 2:
            raise UserError(
                f"the {name} set has {int(labels.sum())} bona fide and {int((1 - labels).sum())} spoofed utterances, "
                f"but needs both. {_explain_lack(vocabulary.get('speaker', []), config)}"
            )
    return result


def _explain_lack(speakers: Sequence[str], config: Config) -> str:
    """Say why a set may lack a class, and what to change."""
    if len(speakers) != 1 or not speakers[0]:
        return "Check the protocol, or packing.val_share if there is none."
    where = f"packing.recordings={config.packing.recordings}" if config.packing.copies else "the folder or protocol"
    return f"All utterances are of one speaker, '{speakers[0]}' by {where}, and a speaker is in one set only."


def _make_copies(recordings: Sequence[Utterance], config: Config) -> Iterator[Sample]:
    """Yield each bona fide recording and its copies."""
    rule = config.packing
    for original in recordings:
        yield _make_sample(original, config)
        for kind in rule.copies:
            if original.set != TRAIN or kind not in rule.unseen:
                copy = replace(original, key=f"{original.key}:{kind}", bonafide=False, attack=kind)
                name = f"{rule.seed}:{copy.key}"
                load_record = partial(load_copy, copy.path, config.sound.rate_hz, rule, kind, name)
                yield replace(_make_sample(copy, config), load=load_record)


def _list_recordings(raw: Path, config: Config) -> list[Utterance]:
    """List the bona fide recordings whose names match `packing.recordings`, with the sets of their speakers.

    Raises:
        UserError: an unknown kind of copy, or a bad pattern.
    """
    rule = config.packing
    for option, kinds, known in (("copies", rule.copies, list(vocoders.KINDS)), ("unseen", rule.unseen, rule.copies)):
        if unknown := sorted(set(kinds) - set(known)):
            raise UserError(f"packing.{option}: '{unknown[0]}' is not one of {', '.join(known)}.")
    try:
        pattern = re.compile(rule.recordings)
    except re.error as error:
        raise UserError(f"packing.recordings={rule.recordings}: not a regular expression: {error}.") from None
    if "speaker" not in pattern.groupindex:
        raise UserError(f"packing.recordings={rule.recordings}: expected a group (?P<speaker>...) in it.")
    found: list[Utterance] = []
    for path in find_audio_files(raw):
        if match := pattern.fullmatch(path.stem):
            speaker = match["speaker"]
            part = VAL if speaker in rule.val_speakers else TEST if speaker in rule.test_speakers else ""
            part = part or (TRAIN if rule.val_speakers or rule.test_speakers else "")
            found.append(Utterance(path.relative_to(raw).as_posix(), path, True, "-", speaker, part))
    return found


def _make_sample(utterance: Utterance, config: Config) -> Sample:
    columns: dict[str, int | float | str] = {
        "label": int(utterance.bonafide),
        "attack": utterance.attack,
        "speaker": utterance.speaker,
        "set": utterance.set,
    }
    if config.packing.logistic:
        columns["fold"] = utterance.fold
    load_record = partial(load, utterance.path, config.sound.rate_hz, config.packing)
    return Sample(utterance.key, load_record, columns, source=utterance.path)


def _decode(path: Path | None, expected_hz: int, rule: PackingSettings) -> tuple[bytes, Pcm, int, bool]:
    """Return a file's bytes, its samples (mono, at the expected rate), its own rate, and whether it is plain.

    Plain: the bytes are a WAV or FLAC file of exactly these samples, so they can be stored as they are.
    """
    if path is None:
        raise BadRecord("listed, but the file is missing")
    data, wave, rate_hz, is_plain = read_sound(path)
    if len(wave) < rule.min_s * rate_hz:
        raise BadRecord(
            f"too short: {len(wave)} frames at {rate_hz} Hz, expected at least {rule.min_s:g} s (packing.min_s)"
        )
    channels = wave.shape[1]
    if channels > 1 and rule.stereo != "mix":
        raise BadRecord(
            f"{channels} channels, expected one: convert the file, or average the channels with packing.stereo=mix"
        )
    if rate_hz != expected_hz and rule.rate != "resample":
        raise BadRecord(
            f"{rate_hz} Hz, expected {expected_hz} (sound.rate_hz): convert the file, or use packing.rate=resample"
        )
    if channels == 1 and rate_hz == expected_hz and wave.dtype == np.int16:
        return data, wave[:, 0].astype(np.int16, copy=False), rate_hz, is_plain
    mono = (wave / 32768 if wave.dtype == np.int16 else wave).mean(axis=1)
    if rate_hz != expected_hz:
        from scipy.signal import resample_poly  # type: ignore[import-untyped]  # here: it loads for a second

        divisor = math.gcd(rate_hz, expected_hz)
        mono = resample_poly(mono, expected_hz // divisor, rate_hz // divisor)
    return data, convert_to_pcm(mono), rate_hz, False


def _encode_flac(pcm: Pcm, rate_hz: int) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, pcm, rate_hz, format="FLAC", subtype="PCM_16")
    return target.getvalue()
