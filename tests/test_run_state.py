"""A checkpoint fits other hardware than that which wrote it: another precision, another memory layout."""

from pathlib import Path

import pytest
import torch

from tests.test_step import make_batch, make_classifier, make_state, split_batch, step
from trainyard.runs.manifest import CheckpointError
from trainyard.train import checkpoint
from trainyard.train.run_state import encode_state, restore_state
from trainyard.train.step import TrainState

ROUNDING = 1e-4
"""Between layouts, whose convolutions sum in another order; Adam's division by a small root magnifies that."""


def save_and_restore(saved: TrainState, restored: TrainState, folder: Path) -> None:
    content = encode_state(saved, fingerprint="data", metrics_position=0, artifacts={})
    path = checkpoint.save(folder, content, step=1, meta={})
    restore_state(restored, checkpoint.load(path), fingerprint="data", path=path)


@pytest.mark.parametrize(
    ("before", "after", "scale"), [(False, True, 2.0**16), (True, False, 1.0), (True, True, 2.0**15)]
)
def test_a_run_resumes_with_and_without_loss_scaling(before, after, scale, tmp_path):
    saved, restored = (make_state(make_classifier(seed), scaling=on) for seed, on in ((0, before), (1, after)))
    step(saved, split_batch(make_batch(12) | {"factor": torch.full((12,), 1e38)}, 12))  # halves the scale, if any
    step(saved, split_batch(make_batch(12), 12))
    save_and_restore(saved, restored, tmp_path)
    assert restored.scaler.get_scale() == scale
    step(saved, split_batch(make_batch(12), 12))
    assert step(restored, split_batch(make_batch(12), 12)).skipped == 0
    for a, b in zip(saved.module.parameters(), restored.module.parameters(), strict=True):
        assert torch.allclose(a, b, atol=ROUNDING)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("nhwc_first", [True, False])
def test_a_run_resumes_with_another_memory_layout(name, nhwc_first, tmp_path):
    layouts = [torch.channels_last, torch.contiguous_format]
    saved, restored = (
        make_state(make_classifier(seed).to(memory_format=layout), name=name)
        for seed, layout in enumerate(layouts if nhwc_first else reversed(layouts))
    )
    for _ in range(2):
        step(saved, split_batch(make_batch(12), 12))
    save_and_restore(saved, restored, tmp_path)
    for parameter, statistics in restored.optimizer.state.items():
        assert all(value.stride() == parameter.stride() for value in statistics.values() if value.ndim)
    for _ in range(2):
        step(saved, split_batch(make_batch(12), 12))
        step(restored, split_batch(make_batch(12), 12))
    for a, b in zip(saved.module.parameters(), restored.module.parameters(), strict=True):
        assert torch.allclose(a, b, atol=ROUNDING)


@pytest.mark.parametrize("plateau", [{"value": "0.1", "evaluations": 0}, {"value": 0.1, "evaluations": -1}])
def test_a_damaged_count_of_evaluations_is_refused(plateau, tmp_path):
    state = make_state(make_classifier(0))
    saved = encode_state(state, fingerprint="data", metrics_position=0, artifacts={}) | {"plateau": plateau}
    with pytest.raises(CheckpointError, match=r"'plateau' has the value '0\.1'|'evaluations' is -1, expected a number"):
        restore_state(state, saved, fingerprint="data", path=tmp_path)
