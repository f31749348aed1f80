"""Builders and data that the tests of this family share."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from jobs.antispoof.config import Config, PackingSettings
from jobs.antispoof.metrics import AsvRates
from jobs.antispoof.module import AntispoofModule, build
from trainyard.data.shards import Audio
from trainyard.train.module import DataInfo


def find_shared_audio(name: str) -> Path:
    """Return a folder of shared recordings and scores, which are not in the repository; skip the test without it."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "audio" / name
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


SCORES = "AIR_lfcc_resnet18_softmax_LA_eval_cm_scores.txt"
ASV_EVAL = "ASVspoof2019.LA.asv.eval.gi.trl.scores.txt"
ASV = AsvRates(miss=0.0245810, false_alarm=0.0246047, miss_spoof=0.2393475, false_alarm_spoof=0.7606525)


def make_noise(count: int, frames: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(count, frames, generator=torch.Generator().manual_seed(seed))


def make_row_noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 32, generator=torch.Generator().manual_seed(seed))


def make_data(
    labels: list[int],
    attacks: list[str],
    sets: list[str],
    *,
    speakers: list[str] | None = None,
    rates: int = 8000,
    asv: str = "{}",
) -> DataInfo:
    """Make the columns that `samples` yields."""
    columns: dict[str, np.ndarray] = {"label": np.array(labels), "source_rate_hz": np.full(len(labels), rates)}
    vocabulary: dict[str, list[str]] = {}
    for name, values in (("attack", attacks), ("set", sets), ("speaker", speakers or [""] * len(labels))):
        names, columns[name] = np.unique(values, return_inverse=True)
        vocabulary[name] = names.tolist()
    return DataInfo(columns, vocabulary, np.flatnonzero(np.array(sets) == "train"), {"asv": asv})


def make_config(**sections: dict[str, object]) -> Config:
    config = Config()
    config.sound.frames, config.sound.rate_hz = 4000, 8000
    config.frontend.name, config.model.name = "spec129", "senet34"
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


def make_module(**sections: dict[str, object]) -> AntispoofModule:
    torch.manual_seed(0)
    data = make_data([1, 0] * 8, ["-", "A01"] * 8, ["train"] * 8 + ["val"] * 8)
    return build(make_config(**sections), data)


def make_batch(count: int, frames: int = 4000) -> dict[str, torch.Tensor]:
    return {
        "wave": make_noise(count, frames),
        "label": torch.arange(count) % 2,
        "sample_id": torch.arange(count),
        "noise": make_row_noise(count),
    }


def write_recording(
    path: Path, *, rate_hz: int = 16000, seconds: float = 0.1, channels: int = 1, seed: int = 0
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pcm = np.random.default_rng(seed).integers(-3000, 3000, (int(seconds * rate_hz), channels)).astype(np.int16)
    soundfile.write(path, pcm, rate_hz, subtype="PCM_16")
    return path


def write_lines(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


SPLIT = PackingSettings(val_share=0.25, test_share=0.25, seed=0)


def write_asvspoof_2019(raw: Path) -> Path:
    """Write a small database in the layout of ASVspoof 2019 LA, with ASV scores."""
    for part, end, letter in (("train", "trn", "T"), ("dev", "trl", "D"), ("eval", "trl", "E")):
        lines = []
        for i in range(4):
            attack, key = ("-", "bonafide") if i % 2 else (f"A{i + 1:02d}", "spoof")
            lines.append(f"LA_00{i:02d} LA_{letter}_{i:07d} - {attack} {key}")
            write_recording(raw / f"ASVspoof2019_LA_{part}/flac/LA_{letter}_{i:07d}.flac", seed=i)
        write_lines(raw / f"ASVspoof2019_LA_cm_protocols/ASVspoof2019.LA.cm.{part}.{end}.txt", *lines)
    for part, shift in (("dev", 0.0), ("eval", 9.0)):
        write_lines(
            raw / f"ASVspoof2019_LA_asv_scores/ASVspoof2019.LA.asv.{part}.gi.trl.scores.txt",
            *(f"bonafide target {x}" for x in (3.0, 4.0, 5.0)),
            *(f"bonafide nontarget {x}" for x in (-3.0, -2.0)),
            *(f"A07 spoof {x - shift}" for x in (-2.5, 3.5)),
        )
    return raw


def get_wave(loaded: Mapping[str, object]) -> bytes | np.ndarray:
    audio = loaded["wave"]
    assert isinstance(audio, Audio)
    return audio.data
