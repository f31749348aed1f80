"""Synthetic speech and vocoded copies of it, to try, test and time the job without recordings of real people.

A synthetic voice is a pulse train with breath noise through moving formants, with noisy consonants, pauses, a room and
a microphone. Its copies go through `vocoders.py`: two kinds are in the training and validation sets, four in the test
set. Each speaker is in one set only. **Results on synthetic voices say nothing about real speech or real attacks.**
"""

import csv
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from trainyard.errors import UserError
from trainyard.files import create_folder

from .vocoders import KINDS, synthesize_copy

Floats = NDArray[np.float64]

RATE_HZ = 8000
TAKES = 10  # recordings per speaker
TRAIN_KINDS = ("A01", "A02")
ROLES = ("train", "train", "train", "val", "test")  # of every five speakers


VOWELS_HZ = (  # first three formants of a man's ten American vowels, Peterson and Barney 1952, table II
    (270, 2290, 3010),
    (390, 1990, 2550),
    (530, 1840, 2480),
    (660, 1720, 2410),
    (730, 1090, 2440),
    (570, 840, 2410),
    (440, 1020, 2240),
    (300, 870, 2240),
    (640, 1190, 2390),
    (490, 1350, 1690),
)
BLOCK = 80  # samples between changes of the formants: 10 ms


@dataclass(frozen=True)
class Recording:
    """One file to write."""

    name: str
    speaker: int
    take: int
    kind: str  # "-": bona fide
    role: str


def synthesize(raw: Path, *, count: int, seed: int) -> None:
    """Write `count` recordings as `raw/wav/*.wav` (8 kHz, 16 bit, 0.8 to 1.4 s) and `raw/protocol.csv`.

    Equal arguments give equal files, whatever the number of processes. Takes about 15 ms of one core per recording and
    uses all cores available to this process. The folder appears when complete: it is written elsewhere, then renamed.

    Raises:
        UserError: `raw` already contains files, or `count` is too small for three sets.
    """
    if raw.exists() and any(raw.iterdir()):
        raise UserError(
            f"{raw} already contains files: synthetic recordings need a folder of their own. Remove it first."
        )
    if count < 51:
        raise UserError(f"data.synthetic={count}: expected 51 or more: with fewer, a set lacks a kind. Use 4800.")
    listing = list_recordings(count)
    groups: dict[tuple[int, int], list[Recording]] = {}
    for recording in listing:
        groups.setdefault((recording.speaker, recording.take), []).append(recording)
    with create_folder(raw) as folder:
        (folder / "wav").mkdir()
        write = partial(_write_group, folder, seed)
        workers = min(len(os.sched_getaffinity(0)), -(-len(groups) // 64))
        if workers > 1:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                list(pool.map(write, groups.values(), chunksize=8))
        else:
            list(map(write, groups.values()))
        with (folder / "protocol.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "label", "attack", "speaker", "set"])
            for recording in listing:
                label = "bonafide" if recording.kind == "-" else "spoof"
                speaker = f"S{recording.speaker:03d}"
                table.writerow([f"wav/{recording.name}", label, recording.kind, speaker, recording.role])


def list_recordings(count: int) -> list[Recording]:
    """List the recordings, take by take, so that a short list still has every speaker."""
    per_take = sum(1 + len(_list_kinds(role)) for role in ROLES)
    speakers = len(ROLES) * -(-count // (per_take * TAKES))
    all_recordings = (
        Recording(f"S{speaker:03d}_{take}{'' if kind == '-' else '_' + kind}.wav", speaker, take, kind, role)
        for take in range(TAKES)
        for speaker in range(speakers)
        for role in (ROLES[speaker % len(ROLES)],)
        for kind in ("-", *_list_kinds(role))
    )
    return [recording for recording, _ in zip(all_recordings, range(count), strict=False)]


def generate_speech(seed: int, speaker: int, take: int) -> Floats:
    """Return (frames,) float64 in [-1, 1]; the voice depends on (seed, speaker), the words on all three."""
    voice, words = np.random.default_rng([seed, speaker]), np.random.default_rng([seed, speaker, take])
    tract = voice.uniform(0.95, 1.25)  # factor on formants: length of the vocal tract
    pitch_hz, breath = voice.uniform(85, 240), voice.uniform(0.03, 0.12)
    tilt, echo_s = voice.uniform(0.85, 0.96), voice.uniform(0.02, 0.08)
    frames = int(words.uniform(0.8, 1.4) * RATE_HZ)
    track_HzT, voiced_T, loud_T = _draw_tracks(words, frames, tract)
    source = _draw_source(words, frames, pitch_hz, voiced_T, breath, tilt)
    wave = _apply_formants(source, track_HzT) * loud_T
    room = words.standard_normal(int(echo_s * RATE_HZ)) * np.exp(-6.9 * np.linspace(0, 1, int(echo_s * RATE_HZ)))
    room[0] = 4.0
    wave = np.convolve(wave, room)[:frames]
    wave = _filter([1, -1], [1, -0.97], wave)  # a microphone passes no DC
    wave = wave / np.abs(wave).max() * words.uniform(0.3, 0.9)
    recorded: Floats = np.clip(wave + words.standard_normal(frames) * 10 ** (-words.uniform(50, 65) / 20), -1, 1)
    return recorded


def _list_kinds(role: str) -> tuple[str, ...]:
    return tuple(KINDS) if role == "test" else TRAIN_KINDS


def _write_group(folder: Path, seed: int, group: list[Recording]) -> None:
    """Write a synthetic recording and its copies, which are made from its 16-bit samples."""
    speaker, take = group[0].speaker, group[0].take
    original = np.round(generate_speech(seed, speaker, take) * 32767) / 32768
    for recording in group:
        wave = original
        if recording.kind != "-":
            rng = np.random.default_rng([seed, speaker, take, 1 + list(KINDS).index(recording.kind)])
            wave = synthesize_copy(original, recording.kind, rate_hz=RATE_HZ, rng=rng)
        pcm = np.clip(np.round(wave * 32768), -32768, 32767).astype(np.int16)
        soundfile.write(folder / "wav" / recording.name, pcm, RATE_HZ, subtype="PCM_16")


def _draw_tracks(rng: np.random.Generator, frames: int, tract: float) -> tuple[Floats, Floats, Floats]:
    """Draw random phones; return formants in Hz (3, blocks), and voicing and loudness of each sample."""
    targets: list[tuple[int, tuple[float, ...], float, float]] = []
    at = int(rng.uniform(0.02, 0.08) * RATE_HZ)
    while at < frames:
        kind = rng.random()
        vowel = VOWELS_HZ[rng.integers(len(VOWELS_HZ))]
        if kind < 0.62:
            targets.append((at, vowel, 1.0, rng.uniform(0.6, 1.0)))
            at += int(rng.uniform(0.07, 0.2) * RATE_HZ)
        elif kind < 0.9:  # a fricative
            targets.append((at, (1400, 2600, 3500), 0.0, rng.uniform(0.1, 0.35)))
            at += int(rng.uniform(0.04, 0.12) * RATE_HZ)
        else:  # a pause, as before a plosive
            targets.append((at, vowel, 0.0, 0.0))
            at += int(rng.uniform(0.03, 0.08) * RATE_HZ)
    starts = np.array([t[0] for t in targets], dtype=np.float64)
    blocks = np.arange(0, frames, BLOCK, dtype=np.float64)
    formants = np.stack([np.interp(blocks, starts, [t[1][i] * tract for t in targets]) for i in range(3)])
    index = np.clip(np.searchsorted(starts, np.arange(frames), side="right") - 1, 0, None)
    smooth = np.hanning(2 * BLOCK + 1)
    smooth /= smooth.sum()
    voiced, loud = (
        np.convolve(np.array([t[column] for t in targets])[index], smooth, mode="same") for column in (2, 3)
    )
    loud[: int(starts[0])] *= np.linspace(0, 1, int(starts[0]))
    return formants, voiced, loud


def _filter(numerator: list[float], denominator: list[float], wave: Floats, **options: Floats) -> Any:
    """Filter a wave as `scipy.signal.lfilter` does."""
    from scipy.signal import lfilter  # type: ignore[import-untyped]  # here: it loads for a second

    return lfilter(numerator, denominator, wave, **options)


def _draw_source(
    rng: np.random.Generator, frames: int, pitch_hz: float, voiced: Floats, breath: float, tilt: float
) -> Floats:
    """Draw a glottal source: low-pass filtered pulses with wandering pitch and jitter, plus breath noise."""
    seconds = np.arange(frames) / RATE_HZ
    knots = rng.normal(0, 0.08, 6).cumsum()
    contour = np.interp(seconds, np.linspace(0, seconds[-1], 6), knots) + 0.01 * np.sin(2 * np.pi * 5 * seconds)
    jitter = np.repeat(rng.normal(0, 0.012, frames // BLOCK + 1), BLOCK)[:frames]
    phase = np.cumsum(pitch_hz * np.exp(contour + jitter) / RATE_HZ)
    pulse_at = np.flatnonzero(np.diff(np.floor(phase), prepend=0) > 0)
    pulses = np.zeros(frames)
    pulses[pulse_at] = 1 + rng.normal(0, 0.05, len(pulse_at))
    voice = _filter([1.0], [1, -2 * tilt * 0.95, (tilt * 0.95) ** 2], pulses)
    noise = rng.standard_normal(frames) * (breath * voiced + 0.3 * (1 - voiced))
    source: Floats = voice / max(1e-9, float(np.abs(voice).max())) * voiced + noise
    return source


def _apply_formants(source: Floats, track_HzT: Floats) -> Floats:
    """Filter the source by three resonators in series, whose frequencies change every block."""
    out = source
    for formant, width_hz in zip(track_HzT, (70.0, 110.0, 160.0), strict=True):
        state, parts = np.zeros(2), []
        radius = np.exp(-np.pi * width_hz / RATE_HZ)
        for block, hz in enumerate(formant):
            turn = 2 * radius * np.cos(2 * np.pi * min(hz, 0.47 * RATE_HZ) / RATE_HZ)
            gain = 1 - turn + radius * radius
            part, state = _filter(
                [gain], [1, -turn, radius * radius], out[block * BLOCK : (block + 1) * BLOCK], zi=state
            )
            parts.append(part)
        out = np.concatenate(parts)
    return out
