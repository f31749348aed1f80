"""Errors by print quality, and of probes that are turned or off centre."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import ndimage  # type: ignore[import-untyped]

from trainyard.train.module import Batch

from .conditions import compute_quality_metrics, compute_run_metrics, embed_moved, move_input, turn_image
from .methods import Trials
from .print_statistics import measure_quality
from .synthesis import generate_impressions


def make_trials(images: list[np.ndarray], *, fingers: int) -> Trials:
    """Return all pairs of prints, which belong to the fingers in turn."""
    identity = np.arange(len(images)) % fingers
    one, other = np.triu_indices(len(images), 1)
    same = identity[one] == identity[other]
    ids = np.arange(len(images))
    return Trials(ids, images, [500.0] * len(images), identity, ids, one, other, same)


def test_the_quality_of_a_print_falls_with_noise() -> None:
    gray = next(iter(generate_impressions(5, 0)))
    noisy = np.clip(gray + np.random.default_rng(0).normal(scale=80, size=gray.shape), 0, 255).astype(np.uint8)
    blank = np.full_like(gray, 255)
    assert measure_quality(gray, 500) > measure_quality(noisy, 500) + 0.1 > measure_quality(blank, 500) == 0


@pytest.mark.slow
def test_errors_of_bad_prints_are_counted_among_pairs_of_low_quality() -> None:
    gray = next(iter(generate_impressions(5, 0)))
    rng, fingers = np.random.default_rng(0), 8
    images = [ndimage.gaussian_filter(gray, 0.3 * (i // fingers)) for i in range(3 * fingers)]
    images = [np.clip(one + rng.normal(scale=15 * (i // fingers), size=one.shape), 0, 255).astype(np.uint8)
              for i, one in enumerate(images)]  # fmt: skip
    trials = make_trials(images, fingers=fingers)
    is_bad = trials.other >= 2 * fingers
    score = np.where(trials.is_genuine & ~is_bad, 1.0, np.linspace(0, 0.5, len(trials.one)))
    found = compute_quality_metrics(trials, {"a": score, "b": trials.is_genuine.astype(float)})
    assert found["b"] == dict.fromkeys(found["b"], 0.0)
    assert list(found["a"]) == ["fnmr_low_quality", "fnmr_middle_quality", "fnmr_high_quality"]
    assert found["a"]["fnmr_low_quality"] > 0.8 and found["a"]["fnmr_high_quality"] == 0


def test_an_input_is_turned_and_moved_by_what_was_asked() -> None:
    image = torch.zeros(2, 1, 101, 101)
    image[:, 0, 50, 80] = 1
    turned = move_input(image, torch.tensor([90.0, -90.0]), torch.zeros(2))
    assert [divmod(int(one.argmax()), 101) for one in turned] == [(20, 50), (80, 50)], "counter-clockwise, then back"
    moved = move_input(image, torch.zeros(2), torch.tensor([0.1, -0.1]))
    assert [divmod(int(one.argmax()), 101)[1] for one in moved] == [90, 70]


def test_a_turned_image_keeps_all_of_the_print_and_its_background() -> None:
    gray = np.full((200, 160), 250, np.uint8)
    gray[60:140, 40:120] = (128 + 120 * np.sin(np.arange(80) * 0.7)).astype(np.uint8)
    turned = turn_image(gray, 90)
    assert np.array_equal(turned, np.rot90(gray)), "counter-clockwise"
    assert turn_image(gray, 30)[0, 0] == 250


def test_the_pose_curve_of_a_model_rises_where_it_depends_on_pose() -> None:
    fingers = 16
    rng = np.random.default_rng(0)
    patterns = torch.from_numpy(rng.normal(size=(fingers, 1, 8, 8))).float()
    patterns = torch.nn.functional.interpolate(patterns, size=64, mode="bilinear").repeat(2, 1, 1, 1)

    def read_batches() -> Iterator[Batch]:
        yield from ({"image": part} for part in torch.split(patterns, 5))

    def embed(*, degrees: float, shift_px: float) -> np.ndarray:
        def network(image: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(image.flatten(1), dim=1)

        return embed_moved(network, read_batches(), degrees=degrees, shift=shift_px / 448)

    trials = make_trials([np.zeros((1, 1), np.uint8)] * (2 * fingers), fingers=fingers)
    embedding = embed(degrees=0, shift_px=0)
    score = (embedding[trials.one] * embedding[trials.other]).sum(axis=1).astype(np.float64)
    found = {name: value for _, name, value in compute_run_metrics(trials, "run", score, embedding, embed)}
    assert len(found) == 14 and found["fnmr_turn_7.5"] == 0 == found["fnmr_shift_20"]
    assert found["fnmr_turn_60"] > 0.5 and found["eer_turn_60"] > found["eer_turn_7.5"]
