"""Synthetic prints."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases.fingerprint import make_module, make_rows

from .pack import synthesize
from .synthesis import generate_impressions


def test_synthetic_prints_are_reproducible_and_complete_when_they_appear(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=19, seed=3)
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == [f"{f:05d}_{i}.png" for f in (1, 2) for i in range(1, 9)] + [f"00003_{i}.png" for i in (1, 2, 3)]
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(OSError, match="not empty"):
        synthesize(tmp_path / "once", count=8, seed=3)


@pytest.mark.slow
def test_several_processes_generate_the_same_prints(tmp_path: Path) -> None:
    synthesize(tmp_path / "all", count=8 * 8 + 1, seed=0)  # nine fingers: two processes
    assert len(list((tmp_path / "all").iterdir())) == 65
    first = next(generate_impressions(0, 8))
    with Image.open(tmp_path / "all" / "00009_1.png") as image:
        assert np.array_equal(np.asarray(image), first)


def test_synthetic_prints_have_a_realistic_ridge_period() -> None:
    period_px = []
    for number in range(6):
        image = next(generate_impressions(0, number))[112:240, 96:224].astype(float)
        spectrum = np.abs(np.fft.fft2((image - image.mean()) * np.outer(np.hanning(128), np.hanning(128))))
        frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(128), np.fft.fftfreq(128)))
        spectrum[frequency < 1 / 20] = 0
        period_px.append(1 / frequency.flat[spectrum.argmax()])
    assert 7.0 < np.median(period_px) < 11.5  # 9.1 +- 0.9 px at 500 dpi in real prints


def test_impressions_of_one_finger_are_more_alike_than_those_of_two() -> None:
    prints, finger = [], []
    for number in range(12):
        stream = generate_impressions(0, number)
        for _ in range(3):
            prints.append(compute_orientation_map(next(stream)))
            finger.append(number)
    metrics = make_module().score(make_rows(np.stack(prints), np.array(finger)))
    assert metrics["eer_all_pairs"] < 0.35


def compute_orientation_map(image: np.ndarray) -> np.ndarray:
    """Return the doubled-angle orientation of 11 x 10 cells, as one vector."""
    dy, dx = np.gradient(image.astype(float))
    cells = [v.reshape(11, 32, 10, 32).mean(axis=(1, 3)) for v in (dx * dx - dy * dy, 2 * dx * dy)]
    return np.concatenate([v.ravel() for v in cells])
