"""Raw folders of speech into samples: decoded once, brought to one rate and one channel, given to sets."""

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from scipy.signal import resample_poly

from trainyard.data.shards import Audio, BadRecord, Loaded, Sample
from trainyard.errors import UserError

from . import vocoders
from .config import Config
from .protocols import TEST, TRAIN, VAL, Cut, Utterance, asv_files, asv_rates, dealt_out, sounds, utterances
from .synthesis import synthesize

__all__ = ["fit_artifacts", "samples", "splits", "synthesize", "unlabelled"]

WAVE = "wave"
Pcm = NDArray[np.int16]


@dataclass(frozen=True)
class Rule:
    """How a file becomes a record."""

    rate_hz: int
    encoded: bool
    resample: bool
    mix: bool
    min_s: float

    @classmethod
    def of(cls, config: Config) -> "Rule":
        rule = config.packing
        return cls(
            config.sound.rate_hz, rule.store == "encoded", rule.rate == "resample", rule.stereo == "mix", rule.min_s
        )


def samples(raw: Path, config: Config) -> Iterator[Sample]:
    """Yield every utterance of a raw folder; `protocols.utterances` says in which forms.

    Columns: `label` (1 bona fide, 0 spoofed), `attack`, `speaker` and `set` (text), `source_rate_hz` (of the file).
    With `packing.copies` the folder holds bona fide recordings alone, and each is followed by its copies.
    """
    rule = config.packing
    cut, how = Cut(rule.val_share, rule.test_share, rule.seed), Rule.of(config)
    if not rule.copies:
        for one in utterances(raw, cut):
            yield _sample(one, partial(load, one.path, how))
        return
    for one in _recordings(raw, config, cut):
        yield _sample(one, partial(load, one.path, how))
        for kind in rule.copies:
            if one.set != TRAIN or kind not in rule.unseen:
                made = replace(one, key=f"{one.key}:{kind}", bonafide=False, attack=kind)
                yield _sample(made, partial(load_copy, one.path, how, kind, f"{rule.seed}:{made.key}"))


def fit_artifacts(raw: Path, config: Config) -> Mapping[str, str]:
    """Return the error rates of the speaker verification behind the countermeasure, for the t-DCF, by set: `asv`."""
    files = {} if config.packing.copies else asv_files(raw)
    return {"asv": json.dumps({name: asdict(asv_rates(path)) for name, path in files.items()}, sort_keys=True)}


def unlabelled(raw: Path, config: Config, artifacts: Mapping[str, str]) -> Iterator[Sample]:
    """Yield every sound file in a folder and below it, or the one that `raw` is, for scoring."""
    for path in [raw] if raw.is_file() else sounds(raw):
        key = raw.name if path == raw else path.relative_to(raw).as_posix()
        yield Sample(key, partial(load, path, Rule.of(config)), source=path)


def load(path: Path | None, rule: Rule, artifacts: Mapping[str, str] | None = None) -> Loaded:
    """Read one file.

    Raises:
        BadRecord: it is not there, no complete sound of a known kind, too short, of several channels or another rate.
    """
    data, pcm, rate_hz, plain = _decoded(path, rule)
    kept: bytes | Pcm = pcm if not rule.encoded else data if plain else _flac(pcm, rule.rate_hz)
    return {WAVE: Audio(kept), "source_rate_hz": rate_hz}


def load_copy(
    path: Path | None, rule: Rule, kind: str, name: str, artifacts: Mapping[str, str] | None = None
) -> Loaded:
    """Read one file and make a machine copy of it; see `load`.

    Args:
        name: what the copy's random phases are drawn from.
    """
    _, pcm, rate_hz, _ = _decoded(path, rule)
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))
    made = _as_pcm(vocoders.copy(pcm / 32768, kind, rate_hz=rule.rate_hz, rng=rng))
    return {WAVE: Audio(_flac(made, rule.rate_hz) if rule.encoded else made), "source_rate_hz": rate_hz}


def splits(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, list[str]], config: Config
) -> dict[str, np.ndarray]:
    """Return the sample ids of "train", "val" and the tests, as packed.

    Raises:
        UserError: training or validation lacks bona fide or spoofed speech.
    """
    set_of = np.array(vocabulary["set"])[columns["set"]]
    names = [name for name in (TRAIN, VAL) if name in vocabulary["set"]]
    names += [name for name in vocabulary["set"] if name.startswith(TEST)]
    result = {name: np.flatnonzero(set_of == name) for name in names}
    for name in (TRAIN, VAL):
        labels = columns["label"][result.get(name, np.empty(0, dtype=np.int64))]
        if len(np.unique(labels)) < 2:
            raise UserError(
                f"the {name} set holds {int(labels.sum())} bona fide and {int((1 - labels).sum())} spoofed utterances; "
                "both must be there. Check the protocol, or packing.val_share where there is none."
            )
    return result


def _recordings(raw: Path, config: Config, cut: Cut) -> list[Utterance]:
    """List bona fide recordings by the pattern of their names.

    Raises:
        UserError: an unknown kind of copy, a bad pattern, a speaker that is not there, or nobody left to train.
    """
    rule = config.packing
    for option, kinds, known in (
        ("copies", rule.copies, list(vocoders.KINDS)),
        ("unseen", rule.unseen, rule.copies),
    ):
        if unknown := sorted(set(kinds) - set(known)):
            raise UserError(f"packing.{option}: '{unknown[0]}' is none of {', '.join(known)}.")
    try:
        pattern = re.compile(rule.recordings)
    except re.error as error:
        raise UserError(f"packing.recordings={rule.recordings}: no regular expression: {error}.") from None
    if "speaker" not in pattern.groupindex:
        raise UserError(f"packing.recordings={rule.recordings}: expected a group (?P<speaker>...) in it.")
    found: list[Utterance] = []
    for path in sounds(raw):
        if match := pattern.fullmatch(path.stem):
            speaker = match["speaker"]
            part = VAL if speaker in rule.val_speakers else TEST if speaker in rule.test_speakers else ""
            part = part or (TRAIN if rule.val_speakers or rule.test_speakers else "")
            found.append(Utterance(path.relative_to(raw).as_posix(), path, True, "-", speaker, part))
    speakers = {one.speaker for one in found}
    if found and (missing := sorted({*rule.val_speakers, *rule.test_speakers} - speakers)):
        raise UserError(f"speaker '{missing[0]}' has no recording in {raw}. Speakers: {', '.join(sorted(speakers))}.")
    return dealt_out(found, cut)


def _sample(one: Utterance, load_it: "partial[Loaded]") -> Sample:
    columns: dict[str, int | float | str] = {
        "label": int(one.bonafide),
        "attack": one.attack,
        "speaker": one.speaker,
        "set": one.set,
    }
    return Sample(one.key, load_it, columns, source=one.path)


def _decoded(path: Path | None, rule: Rule) -> tuple[bytes, Pcm, int, bool]:
    """Return a file's bytes, its samples as one channel at the rule's rate, its own rate, and whether it is plain.

    Plain: the bytes are a WAV or FLAC file of just these samples, and can be kept.
    """
    if path is None:
        raise BadRecord("listed, but there is no such file")
    data = path.read_bytes()
    if not data:
        raise BadRecord("the file is empty")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames, rate_hz, kind, width = file.frames, file.samplerate, file.format, file.subtype
            wave = file.read(dtype="int16" if width == "PCM_16" else "float64", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise BadRecord(f"no complete sound of a known kind ({error.error_string})") from None
    if len(wave) < frames or _wav_is_cut(data):
        raise BadRecord(f"cut off: {len(wave)} frames can be decoded, its header promises more")
    if not len(wave):
        raise BadRecord("it holds no sound: 0 frames")
    if len(wave) < rule.min_s * rate_hz:
        raise BadRecord(
            f"{len(wave)} frames at {rate_hz} Hz are no utterance: expected {rule.min_s:g} s (packing.min_s)"
        )
    channels = wave.shape[1]
    if channels > 1 and not rule.mix:
        raise BadRecord(f"{channels} channels, expected one: convert it, or take their mean: packing.stereo=mix")
    if rate_hz != rule.rate_hz and not rule.resample:
        raise BadRecord(f"{rate_hz} Hz, expected {rule.rate_hz} (sound.rate_hz): convert it, or packing.rate=resample")
    if channels == 1 and rate_hz == rule.rate_hz and width == "PCM_16":
        return data, wave[:, 0], rate_hz, kind in ("WAV", "WAVEX", "FLAC")
    mono = (wave / 32768 if wave.dtype == np.int16 else wave).mean(axis=1)
    if rate_hz != rule.rate_hz:
        shared = math.gcd(rate_hz, rule.rate_hz)
        mono = resample_poly(mono, rule.rate_hz // shared, rate_hz // shared)
    return data, _as_pcm(mono), rate_hz, False


def _wav_is_cut(data: bytes) -> bool:
    """Tell whether a RIFF header promises more bytes than there are; writers of streams leave 0 or all ones there."""
    promised = int.from_bytes(data[4:8], "little")
    return data[:4] == b"RIFF" and promised not in (0, 0xFFFFFFFF) and promised + 8 > len(data) + 1


def _as_pcm(wave: NDArray[np.float64]) -> Pcm:
    return np.clip(np.round(wave * 32768), -32768, 32767).astype(np.int16)


def _flac(pcm: Pcm, rate_hz: int) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, pcm, rate_hz, format="FLAC", subtype="PCM_16")
    return target.getvalue()
