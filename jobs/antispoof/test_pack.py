"""Packing: conversion of files, copies, splits, unlabelled folders."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.cases.antispoof import find_shared_audio, get_wave, make_config, make_module, write_recording
from trainyard.config.compose import compose
from trainyard.data.loader import Loader
from trainyard.data.pack import pack
from trainyard.data.shards import BadRecord
from trainyard.errors import UserError

from .baseline import PooledLogistic, fit_folds
from .config import Config, PackingSettings
from .pack import LOGISTIC, fit_artifacts, join_artifacts, load, samples, splits, unlabelled


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but the file is missing"),
        ("empty", "the file is empty"),
        ("text", "not a complete audio file in a known format"),
        ("no frames", "no audio: 0 frames"),
        ("short", r"too short: 160 frames at 16000 Hz, expected at least 0.05 s \(packing.min_s\)"),
        ("stereo", r"2 channels, expected one: convert the file.*packing.stereo=mix"),
        ("half a flac", "truncated|not a complete audio file"),
        ("broken flac", "truncated|not a complete audio file"),
        ("half a wav", "truncated: .* there should be more"),
        ("rate", r"8000 Hz, expected 16000 \(sound.rate_hz\): convert the file, or use packing.rate=resample"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    kind = "wav" if content in ("half a wav", "no frames") else "flac"
    seconds = {"no frames": 0.0, "short": 0.01}.get(content, 0.5)
    path = write_recording(
        tmp_path / f"a.{kind}",
        seconds=seconds,
        channels=1 + (content == "stereo"),
        rate_hz=8000 if content == "rate" else 16000,
    )
    data = path.read_bytes()
    broken = data[: len(data) // 2] + bytes(len(data) // 4) + data[len(data) * 3 // 4 :]
    replaced = {"empty": b"", "text": b"hello", "half a flac": data[: len(data) // 2], "broken flac": broken}
    path.write_bytes(replaced.get(content, data[: len(data) // 2] if content == "half a wav" else data))
    rule = PackingSettings(rate="refuse" if content == "rate" else "resample")
    with pytest.raises(BadRecord, match=reason):
        load(None if content == "missing" else path, 16000, rule)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (np.nan, "1 of 8000 samples are NaN or infinite"),
        (-np.inf, "1 of 8000 samples are NaN or infinite"),
        (12_000.0, "its floats reach 12000, but 1 is full scale: if they are 16-bit numbers, divide them"),
        (1.5, ""),
    ],
)
def test_samples_that_are_no_levels_are_refused_and_overshoot_is_clipped(
    tmp_path: Path, change: float, reason: str
) -> None:
    wave = np.zeros(8000)
    wave[100] = change
    soundfile.write(tmp_path / "a.wav", wave, 16000, subtype="FLOAT")
    if reason:
        with pytest.raises(BadRecord, match=reason):
            load(tmp_path / "a.wav", 16000, PackingSettings())
    else:
        assert get_wave(load(tmp_path / "a.wav", 16000, PackingSettings()))[100] == 32767


@pytest.mark.parametrize("kind", ["WAV", "AIFF", "AU", "CAF", "W64", "RF64", "NIST", "FLAC", "OGG", "MP3"])
def test_a_file_of_any_format_is_read_whole_and_refused_without_its_end(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.sound"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 100_000), 16000, format=kind)
    assert len(get_wave(load(path, 16000, PackingSettings()))) == 100_000
    for share in (0.9, 0.5):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        with pytest.raises(BadRecord, match=r"truncated|not a complete audio file"):
            load(path, 16000, PackingSettings())


@pytest.mark.parametrize("store", ["pcm", "encoded"])
def test_a_file_that_does_not_know_its_length_is_read_to_its_end(tmp_path: Path, store: str) -> None:
    tone = np.round(8000 * np.sin(np.arange(100_000) / 9)).astype(np.int16)
    buffer = io.BytesIO()
    soundfile.write(buffer, tone, 16000, format="FLAC", subtype="PCM_16")
    data = bytearray(buffer.getvalue())
    data[21] &= 0xF0  # what ffmpeg and flac write to a pipe: 0 frames in all, which means unknown
    data[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(data)
    found = load(tmp_path / "a.flac", 16000, PackingSettings(store=store))
    wave: Any = get_wave(found)
    assert np.array_equal(soundfile.read(io.BytesIO(wave), dtype="int16")[0] if store == "encoded" else wave, tone)
    soundfile.write(tmp_path / "b.wav", tone / 32768, 8000, subtype="GSM610")  # cannot be searched
    assert len(get_wave(load(tmp_path / "b.wav", 8000, PackingSettings()))) >= len(tone)


def test_files_of_another_rate_width_or_channel_become_16_bit_mono(tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, tone], axis=1), 8000, subtype="FLOAT")
    found = load(tmp_path / "a.wav", 16000, PackingSettings(stereo="mix"))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    data = get_wave(found)
    assert isinstance(data, np.ndarray) and data.dtype == np.int16 and len(data) == 16000
    assert np.abs(data / 32768 - expected)[200:-200].max() < 2e-3
    assert found["source_rate_hz"] == 8000
    encoded = get_wave(load(tmp_path / "a.wav", 16000, PackingSettings(store="encoded", stereo="mix")))
    assert isinstance(encoded, bytes)
    assert np.array_equal(soundfile.read(io.BytesIO(encoded), dtype="int16")[0], data)


def test_plain_files_are_stored_byte_for_byte_or_as_their_samples(tmp_path: Path) -> None:
    for kind in ("wav", "flac"):
        path = write_recording(tmp_path / f"a.{kind}")
        assert get_wave(load(path, 16000, PackingSettings(store="encoded"))) == path.read_bytes()
        assert np.array_equal(get_wave(load(path, 16000, PackingSettings())), soundfile.read(path, dtype="int16")[0])


@pytest.mark.slow
@pytest.mark.parametrize("store", ["pcm", "encoded"])
def test_evaluation_reads_the_first_part_of_packed_speech_and_no_noise(
    asvspoof_2019: Path, tmp_path: Path, store: str
) -> None:
    config = make_config(packing={"store": store})
    config.sound.rate_hz, config.sound.frames = 16000, 1000
    packed_samples = list(samples(asvspoof_2019, config))
    data = pack(packed_samples, tmp_path / "packed", meta={}, workers=1, artifacts=fit_artifacts(asvspoof_2019, config))
    ids = splits(data.columns, data.vocabulary, config)["val"]
    loader = Loader(config, data, device=torch.device("cpu"), decode="cpu")
    (micro,) = loader.evaluate(ids, batch_size=8)
    for row, sample_id in zip(micro.batch["wave"], micro.batch["sample_id"].tolist(), strict=True):
        pcm = soundfile.read(packed_samples[sample_id].source, dtype="int16")[0]
        assert np.array_equal(row.numpy() * 32768, pcm[:1000])
    assert micro.batch["label"].tolist() == [0, 1, 0, 1]
    assert "noise" not in micro.batch
    data.close()


def test_a_set_without_both_classes_is_refused(tmp_path: Path) -> None:
    columns = {"label": np.array([1, 0, 1, 1]), "set": np.array([0, 0, 1, 1])}
    with pytest.raises(UserError, match="the val set has 2 bona fide and 0 spoofed utterances"):
        splits(columns, {"set": ["train", "val"]}, Config())
    with pytest.raises(UserError, match="the val set has 0 bona fide and 0 spoofed"):
        splits({name: values[:2] for name, values in columns.items()}, {"set": ["train"]}, Config())
    config = Config()
    config.packing.copies, config.packing.recordings = ["A01"], "(?P<speaker>[0-9])_.*"
    with pytest.raises(UserError, match=r"one speaker, '0' by packing\.recordings=.*, and a speaker is in one set"):
        splits(columns, {"set": ["train", "val"], "speaker": ["0"]}, config)


def test_a_folder_to_score_needs_no_protocol(tmp_path: Path) -> None:
    write_recording(tmp_path / "a/one.wav")
    write_recording(tmp_path / "two.flac", rate_hz=8000)
    (tmp_path / "notes.txt").write_text("not audio")
    found = list(unlabelled(tmp_path, Config(), {"asv": "{}"}))
    assert [sample.key for sample in found] == ["a/one.wav", "two.flac"]
    assert [sample.key for sample in unlabelled(tmp_path / "two.flac", Config(), {})] == ["two.flac"]
    assert len(get_wave(found[1].load({}))) == 1600
    rows = {"score": np.array([0.5, -1.5], np.float32), "sample_id": np.array([0, 1])}
    prediction_rows = list(make_module().prediction_rows(rows, [sample.key for sample in found]))
    assert prediction_rows == [
        {"path": "a/one.wav", "utterance": "one", "score": 0.5},
        {"path": "two.flac", "utterance": "two", "score": -1.5},
    ]


def test_fsdd_recordings_and_their_copies_make_the_specified_sets() -> None:

    raw = find_shared_audio("fsdd")
    config = compose("antispoof_fsdd", [], Path(__file__).resolve().parents[1])
    assert isinstance(config, Config)
    found = list(samples(raw, config))
    count = Counter((sample.columns["set"], sample.columns["attack"]) for sample in found)
    assert count == {
        ("train", "-"): 1000, ("train", "A01"): 1000, ("train", "A02"): 1000,
        ("val", "-"): 250, ("val", "A01"): 250, ("val", "A02"): 250, ("val", "A03"): 250, ("val", "A04"): 250,
        ("test", "-"): 250, ("test", "A01"): 250, ("test", "A02"): 250, ("test", "A03"): 250, ("test", "A04"): 250,
    }  # fmt: skip
    speakers = {(sample.columns["set"], sample.columns["speaker"]) for sample in found}
    assert speakers == {
        *(("train", s) for s in ("george", "jackson", "lucas", "nicolas")),
        ("val", "theo"),
        ("test", "yweweler"),
    }
    original, copy = found[0].load({}), found[1].load({})
    assert copy["wave"].data.shape == original["wave"].data.shape  # type: ignore[union-attr]
    assert np.array_equal(copy["wave"].data, found[1].load({})["wave"].data)  # type: ignore[union-attr]
    assert not np.array_equal(copy["wave"].data, original["wave"].data)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"copies": ["A09"]}, "packing.copies: 'A09' is not one of A01, A02, A03, A04"),
        ({"copies": ["A01"], "unseen": ["A02"]}, "packing.unseen: 'A02' is not one of A01"),
        ({"copies": ["A01"], "recordings": "("}, "not a regular expression"),
        ({"copies": ["A01"], "recordings": ".*"}, r"expected a group \(\?P<speaker>"),
        ({"copies": ["A01"], "val_speakers": ["eve"]}, "speaker 'eve' has no recording in .* Speakers: ann, bob"),
    ],
)
def test_copies_that_cannot_be_made_are_refused(tmp_path: Path, packing: dict[str, object], message: str) -> None:
    for name in ("ann_1", "bob_1"):
        write_recording(tmp_path / f"{name}.wav")
    with pytest.raises(UserError, match=message):
        list(samples(tmp_path, make_config(packing=packing)))


@pytest.mark.parametrize("store", ["pcm", "encoded"])
def test_logistic_regression_is_fitted_on_the_training_recordings_alone(tmp_path: Path, store: str) -> None:
    lines = ["path,label,set"]
    for i in range(16):
        name, part = f"{i}.wav", "train" if i < 8 else "val"
        path = write_recording(tmp_path / name, rate_hz=8000, seconds=0.5, seed=i)
        if i % 2:  # louder
            wave, rate_hz = soundfile.read(path)
            soundfile.write(path, 4 * wave, rate_hz, subtype="PCM_16")
        lines.append(f"{name},{'spoof' if i % 2 else 'bonafide'},{part}")
    (tmp_path / "protocol.csv").write_text("\n".join(lines))
    (tmp_path / "1.wav").write_bytes(b"")  # a bad file is left out here, and named by packing
    config = make_config(packing={"logistic": True, "store": store})
    artifacts = fit_artifacts(tmp_path, config)
    model = PooledLogistic(artifacts[LOGISTIC], rate_hz=8000, frames=4000)
    waves = torch.stack([torch.from_numpy(soundfile.read(tmp_path / f"{i}.wav")[0]).float() for i in range(8, 16)])
    assert ((model(waves) > 0) == (torch.arange(8) % 2 == 0)).all()
    (tmp_path / "9.wav").write_bytes((tmp_path / "8.wav").read_bytes())  # of validation
    assert fit_artifacts(tmp_path, config) == artifacts
    assert join_artifacts(tmp_path, artifacts, {"asv": "other"}) == {"asv": "other", LOGISTIC: artifacts[LOGISTIC]}
    assert LOGISTIC not in fit_artifacts(tmp_path, make_config())


def test_a_regression_of_a_fold_has_not_seen_its_recordings_nor_their_copies(tmp_path: Path) -> None:
    for speaker in ("ann", "bob", "eve", "val"):
        for take in range(3):
            write_recording(tmp_path / f"{speaker}_{take}.wav", rate_hz=8000, seed=ord(speaker[0]) + take)
    packing = {"logistic": True, "copies": ["A01"], "val_speakers": ["val"]}
    config = make_config(packing=packing)
    fold = {(one.columns["speaker"], one.columns["fold"]) for one in samples(tmp_path, config)}
    assert fold == {("ann", 1), ("bob", 2), ("eve", 3), ("val", 0)}, "a copy is in the fold of its recording"

    def fit_directions() -> np.ndarray:
        weight_RK = np.array(json.loads(fit_artifacts(tmp_path, config)[LOGISTIC])["weights"])
        directions: np.ndarray = weight_RK / np.linalg.norm(weight_RK, axis=1, keepdims=True)  # all rows have one scale
        return directions

    before = fit_directions()
    write_recording(tmp_path / "bob_1.wav", rate_hz=8000, seed=1000)
    changed = np.abs(fit_directions() - before).max(axis=1) > 1e-6
    assert changed.tolist() == [True, True, False, True]


def test_log_odds_are_no_surer_than_they_are_right_on_the_folds_left_out() -> None:
    rng = np.random.default_rng(0)
    features_NK, label_N, fold_N = rng.normal(size=(60, 200)), np.arange(60) % 2, 1 + np.arange(60) // 12
    fitted = fit_folds(features_NK, label_N, fold_N)
    log_odds_N = (features_NK * np.array(fitted["weights"])[fold_N]).sum(axis=1) + np.array(fitted["bias"])[fold_N]
    cost = np.logaddexp(0, np.where(label_N == 1, -log_odds_N, log_odds_N)).mean()
    assert cost < 1.05 * np.log(2), "features of noise: chance"


def test_a_regression_needs_two_recordings_of_each_class(tmp_path: Path) -> None:
    lines = [f"{i}.wav,{'spoof' if i else 'bonafide'},train" for i in range(4)]
    (tmp_path / "protocol.csv").write_text("\n".join(["path,label,set", *lines]))
    for i in range(4):
        write_recording(tmp_path / f"{i}.wav", rate_hz=8000, seed=i)
    with pytest.raises(UserError, match=r"two recordings of each class .* found 1 bona fide and 3 spoofed\. Add"):
        fit_artifacts(tmp_path, make_config(packing={"logistic": True}))


def test_sliding_segments_are_averaged_up_to_the_end_of_each_recording(tmp_path: Path) -> None:
    lengths = [704, 1000, 1008, 1504, 2600]
    for i, length in enumerate(lengths):
        write_recording(tmp_path / f"raw/{i}.wav", rate_hz=8000, seconds=length / 8000, seed=i)
    config = make_config(sound={"frames": 1000, "segments": "sliding"})
    module = make_module(sound={"frames": 1000}).eval()
    data = pack(list(unlabelled(tmp_path / "raw", config, {})), tmp_path / "packed", meta={}, workers=1)

    def score(segments: str) -> torch.Tensor:
        config.sound.segments = segments
        (micro,) = Loader(config, data, device=torch.device("cpu"), decode="cpu").evaluate(np.arange(5), batch_size=8)
        return module.predict(micro.batch)["score"]

    scored = {name: score(name) for name in ("first", "sliding")}
    for i, length in enumerate(lengths):
        recording = soundfile.read(tmp_path / f"raw/{i}.wav", dtype="float32")[0]
        assert len(recording) == length
        wave = np.resize(recording, 3000)
        starts = [0, *range(500, length - 500, 500)]  # another one while the last ends before the recording
        waves = torch.from_numpy(np.stack([wave[start : start + 1000] for start in starts]))
        expected = module.predict({"wave": waves, "sample_id": torch.arange(len(starts))})["score"]
        torch.testing.assert_close(scored["first"][i], expected[0])
        torch.testing.assert_close(scored["sliding"][i], expected.mean())
    data.close()
