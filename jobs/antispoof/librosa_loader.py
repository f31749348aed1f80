"""Computes features with librosa in a data loader, as the reference does: the baseline of `bench-frontends`.

Runs in its own environment, with librosa, torch and soundfile but without Trainyard:
`python librosa_loader.py FOLDER FRAMES`. Each line of its input is a request as JSON, which names a feature and what
to do; each line of its output is the response, as JSON.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import librosa  # type: ignore[import-not-found]  # only in the environment of the benchmark
import numpy as np
import scipy.fft  # type: ignore[import-untyped]
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset

RATE_HZ, BATCH = 16000, 32


def compute_mel128(wave: np.ndarray) -> np.ndarray:
    mel = librosa.feature.melspectrogram(
        y=wave, sr=RATE_HZ, n_fft=512, win_length=512, hop_length=160, n_mels=128, pad_mode="constant"
    )
    decibel: np.ndarray = librosa.power_to_db(mel, ref=np.max)
    return decibel


def compute_spec257(wave: np.ndarray) -> np.ndarray:
    spectrum = librosa.stft(wave, n_fft=512, win_length=400, hop_length=160, pad_mode="constant")
    log_power: np.ndarray = np.log(np.abs(spectrum) ** 2 + 2.220446e-16)
    return log_power


def compute_lfcc60(wave: np.ndarray) -> np.ndarray:
    wave = librosa.effects.preemphasis(wave, coef=0.97, zi=[0.0])
    window = np.hamming(320)
    spectrum = librosa.stft(wave, n_fft=512, win_length=320, hop_length=160, window=window, pad_mode="constant")
    bands = np.log10(_FILTERS @ (np.abs(spectrum) ** 2) + 2.220446e-16)
    cepstra = scipy.fft.dct(bands, type=2, norm="ortho", axis=0)[:20]
    first = librosa.feature.delta(cepstra, width=7, mode="nearest")
    return np.concatenate([cepstra, first, librosa.feature.delta(first, width=7, mode="nearest")])


def compute_cqt432(wave: np.ndarray) -> np.ndarray:
    wave = librosa.effects.preemphasis(wave, coef=0.97, zi=[0.0])
    transform = librosa.cqt(
        wave, sr=RATE_HZ, hop_length=256, fmin=15.0, n_bins=432, bins_per_octave=48, pad_mode="constant"
    )
    log_power: np.ndarray = np.log(np.abs(transform) ** 2 + 2.220446e-16)
    return log_power


FEATURES = {"mel128": compute_mel128, "spec257": compute_spec257, "lfcc60": compute_lfcc60, "cqt432": compute_cqt432}
_EDGES_HZ = np.linspace(0, 8000, 22)
_FILTERS = np.array([np.interp(np.arange(257) * 31.25, _EDGES_HZ[i : i + 3], [0, 1, 0]) for i in range(20)])


class Utterances(Dataset[torch.Tensor]):
    """Reads files, cuts them to length and computes their features, one by one and again in every epoch."""

    def __init__(self, folder: Path, frames: int, feature: str) -> None:
        self.paths, self.frames, self.feature = sorted(folder.glob("*.flac")), frames, FEATURES[feature]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        wave = soundfile.read(self.paths[i], dtype="float32")[0]
        return torch.from_numpy(np.asarray(self.feature(np.resize(wave, self.frames)), dtype=np.float32))


def load_batches(data: Utterances) -> Iterator[int]:
    """Iterate over a DataLoader forever; yield the size of each batch."""
    while True:
        for batch in DataLoader(data, BATCH):
            yield len(batch)


def compute_features(data: Utterances) -> Iterator[int]:
    """Compute only the features, from waveforms in memory, forever; yield 1 per utterance."""
    waves = [np.resize(soundfile.read(path, dtype="float32")[0], data.frames) for path in data.paths[:BATCH]]
    while True:
        for wave in waves:
            data.feature(wave)
            yield 1


def measure_rate(work: Iterator[int], seconds: float) -> float:
    """Return utterances per second of CPU time, without the first ones, which fill librosa's caches."""
    next(work)
    begin, cpu_begin, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin < seconds:
        done += next(work)
    return done / (time.process_time() - cpu_begin)


def main() -> None:
    folder, frames = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # librosa's recursion warns about its own short inputs
    print(json.dumps({"librosa": librosa.__version__, "torch": torch.__version__, "numpy": np.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        data = Utterances(folder, frames, request["feature"])
        if request["what"] == "features":
            print(json.dumps(data[0].tolist()), flush=True)
        else:
            work = load_batches(data) if request["what"] == "loaded" else compute_features(data)
            print(json.dumps(measure_rate(work, request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
