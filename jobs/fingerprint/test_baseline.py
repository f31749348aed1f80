"""Band-limited phase-only correlation, the baseline that learns nothing."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage  # type: ignore[import-untyped]

from trainyard.data.pack import pack
from trainyard.train.module import DataInfo, SampleSource

from .baseline import correlate_pairs, normalise_print
from .config import Config
from .methods import choose_trials, score_methods
from .pack import samples
from .pairs import choose_pairs, compute_pair_metrics, number_fingers


def draw_ridges(seed: int) -> np.ndarray:
    """Return (400, 360) uint8 with noise at the scale of ridges at 500 dpi, on a white background."""
    noise = np.random.default_rng(seed).normal(size=(400, 360))
    ridges = ndimage.gaussian_filter(noise, 2.5) - ndimage.gaussian_filter(noise, 5)
    ridges[:40] = ridges[:, :40] = 0
    gray: np.ndarray = np.clip(200 + 165 * ridges / np.abs(ridges).max(), 0, 255).astype(np.uint8)
    return gray


def test_a_moved_and_rotated_print_correlates_more_than_another_one() -> None:
    one = draw_ridges(0)
    moved = ndimage.shift(ndimage.rotate(one, 11, reshape=False, mode="nearest"), (24, -18), mode="nearest")
    prints = torch.from_numpy(np.stack([normalise_print(gray, 500) for gray in (one, moved, draw_ridges(1))]))
    own, same, other = correlate_pairs(prints, np.array([0, 0, 0]), np.array([0, 1, 2]))
    assert own == pytest.approx(1, abs=0.05)
    assert own > same > 2 * other


def test_pairs_are_drawn_up_to_a_number_of_each_kind_and_else_all_are_taken() -> None:
    identity, is_first = number_fingers(np.repeat(np.arange(10), 8), np.tile(np.arange(8), 10))
    one, other = choose_pairs(identity, is_first, most=10_000)
    assert len(one) == 80 * 79 // 2 and (one < other).all()
    one, other = choose_pairs(identity, is_first, most=20)
    same = identity[one] == identity[other]
    assert same.sum() == 20 <= (is_first[one] & is_first[other]).sum() and 20 < (~same).sum() <= 40
    assert np.array_equal(one, choose_pairs(identity, is_first, most=20)[0])


@pytest.mark.long
def test_its_errors_on_a_real_set_are_those_of_the_prototype(tmp_path: Path) -> None:
    """FVC2004 DB4_B: the prototype has an EER of 4.4 % by the FVC protocol, and of 8.2 % over all pairs."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    raw = Path(os.environ.get("TRAINYARD_SHARED_DATA", default)) / "fingerprint" / "FVC2004_DB4_B"
    if not raw.is_dir():
        pytest.skip(f"no data at {raw}: set TRAINYARD_SHARED_DATA")
    data = pack(samples(raw, Config()), tmp_path / "packed", meta={}, workers=1)
    none = np.empty(0, dtype=np.int64)
    info = DataInfo(data.columns, data.vocabulary, none, {}, data.read_arrays)
    source = SampleSource(info, np.arange(data.count), lambda: iter(()))
    trials = choose_trials(source, most=4000)
    scored = score_methods(trials.images, trials.dpi, trials.one, trials.other, device=torch.device("cpu"))
    metrics, matched = (compute_pair_metrics(*trials.select_pairs(scored[name])) for name in ("BLPOC", "matcher"))
    assert (metrics["genuine"], metrics["impostors"], metrics["impostors_all_pairs"]) == (280, 45, 2880)
    assert metrics["eer_all_pairs"] == pytest.approx(0.082, abs=0.02), "another resizing, and shifts by whole pixels"
    assert matched["eer_all_pairs"] < 0.025
