"""Baselines: published classes with random weights, of the sizes of the run's model."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.cases.tinydet import TiledData, make_config
from trainyard.train.module import Batch, SampleSource

from .baseline import build_untrained
from .module import build


@pytest.mark.slow
def test_published_classes_with_random_weights_are_scored_on_the_same_samples(
    tiled_data: TiledData,
) -> None:
    data, _, _ = tiled_data
    config = make_config()
    config.evaluation.bootstrap_draws = 5
    module = build(config, data)
    ids = np.arange(len(data.columns["tile_x"]))

    def read_batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1)
        for part in np.array_split(ids, 2):
            count = len(part)
            yield {
                "image": torch.rand(count, 3, 64, 96, generator=generator),
                "affine": torch.eye(3)[:2].repeat(count, 1, 1) * 2,
                "image_px": torch.tensor([[32.0, 48.0]]).repeat(count, 1),
                "sample_id": torch.from_numpy(part),
            }

    def open_nothing() -> SampleSource:
        raise AssertionError("needs no training data")

    evaluated = SampleSource(data, ids, read_batches)
    state = torch.get_rng_state()
    found = module.score_baselines({}, evaluated, open_nothing)
    assert torch.equal(torch.get_rng_state(), state), "nothing random of the run moves"
    assert list(found) == ["untrained Deformable DETR (transformers)", "untrained FCOS (torchvision)"]
    assert all(0 <= one.metrics["ap"] < 0.5 and "ar_1500" in one.metrics for one in found.values())
    assert module.score_baselines({}, evaluated, open_nothing) == found, "the same weights each time"


@pytest.mark.parametrize("variant", ["vanilla", "cond"])
def test_detections_of_untrained_classes_are_inside_the_input_and_of_known_categories(variant: str) -> None:
    x_BCHW = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(2))
    model = make_config(variant).model
    for name, detect in build_untrained(model, categories=3, most=7, device=torch.device("cpu")).items():
        with torch.inference_mode():
            corners, scores, labels = detect(x_BCHW)
        assert corners.shape == (2, 7, 4) and scores.shape == labels.shape == (2, 7), name
        assert (corners >= 0).all() and (corners <= torch.tensor([96.0, 64, 96, 64])).all(), name
        assert (corners[..., 2:] >= corners[..., :2]).all() and (scores > 0).all(), name
        assert labels.min() >= 0 and labels.max() <= 2, name
