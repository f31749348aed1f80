"""Vocoded copies and synthetic speech."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.cases.antispoof import SPLIT
from trainyard.errors import UserError

from . import vocoders
from .pack import synthesize
from .protocols import find_utterances
from .synthesis import generate_speech, list_recordings


def test_the_inverse_stft_restores_the_waveform() -> None:
    wave = generate_speech(0, 1, 2)
    assert np.abs(vocoders.invert_stft(vocoders.compute_stft(wave), len(wave)) - wave).max() < 1e-12


@pytest.mark.parametrize("kind", list(vocoders.KINDS))
def test_a_copy_has_the_length_and_loudness_of_the_original_but_differs(kind: str) -> None:
    wave = generate_speech(0, 1, 2)
    copies = [vocoders.synthesize_copy(wave, kind, rate_hz=8000, rng=np.random.default_rng(1)) for _ in range(2)]
    assert np.array_equal(copies[0], copies[1])
    assert len(copies[0]) == len(wave)
    assert np.sqrt(np.mean(copies[0] ** 2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=0.02)
    magnitude, copied = (np.abs(vocoders.compute_stft(x)) for x in (wave, copies[0]))
    error = np.sum((magnitude - copied) ** 2) / np.sum(magnitude**2)
    assert 0.005 < error < 0.5


def test_griffin_lim_gets_closer_to_the_magnitudes_with_more_rounds() -> None:
    magnitude = np.abs(vocoders.compute_stft(generate_speech(0, 3, 0)))
    errors = []
    for rounds in (1, 4, 32):
        spectrum = vocoders.griffin_lim(magnitude, rounds, np.random.default_rng(0))
        found = np.abs(vocoders.compute_stft(vocoders.invert_stft(spectrum, (len(magnitude) - 1) * vocoders.HOP)))
        errors.append(float(np.sum((found - magnitude) ** 2)))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.slow
def test_synthetic_speech_is_reproducible_and_each_speaker_is_in_one_set(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=51, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.wav"))
    assert len(files) == 51
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    found = find_utterances(tmp_path / "once", SPLIT)
    assert {(utterance.set, utterance.attack) for utterance in found} >= {
        ("val", "A02"),
        ("test", "A03"),
        ("test", "A04"),
    }
    assert not {utterance.attack for utterance in found if utterance.set != "test"} & {"A03", "A04"}
    sets = {
        utterance.speaker: {other.set for other in found if other.speaker == utterance.speaker} for utterance in found
    }
    assert all(len(names) == 1 for names in sets.values())
    with pytest.raises(UserError, match="already contains files"):
        synthesize(tmp_path / "once", count=51, seed=3)
    with pytest.raises(UserError, match="expected 51 or more"):
        synthesize(tmp_path / "few", count=50, seed=3)


def test_a_long_synthetic_set_has_every_speaker_and_the_kinds_in_proportion() -> None:
    count = Counter((recording.role, recording.kind) for recording in list_recordings(3400))
    assert count["train", "-"] == count["train", "A01"] == 600
    assert count["val", "-"] == count["test", "A04"] == 200
