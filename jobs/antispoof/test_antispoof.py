"""The antispoof family as a whole; `perfect_rows` is for tests over all families."""

import numpy as np
import pytest
import torch

from tests.cases.antispoof import make_module

from . import metrics, vocoders
from .synthesis import generate_speech


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the utterances `ids`, and what it must score."""
    rows = {"score": np.where(columns["label"][ids] == 1, 9.0, -9.0).astype(np.float32), "sample_id": ids}
    return rows, {"eer": 0.0, "min_dcf": 0.0, "act_dcf": 0.0, "eer_A01": 0.0, "eer_A02": 0.0}


@pytest.mark.slow
def test_the_network_memorises_thirty_two_utterances_and_two_runs_are_bitwise_equal() -> None:
    """Synthetic speech against copies with its phases: 24 steps, twice; 6 s."""
    waves = []
    for take in range(16):
        speech = generate_speech(0, take % 4, take)
        copy = vocoders.synthesize_copy(speech, "A04", rate_hz=8000, rng=np.random.default_rng(0))
        waves += [np.resize(x, 1200) for x in (speech, copy)]
    inputs = {
        "wave": torch.tensor(np.array(waves), dtype=torch.float32),
        "label": torch.tensor([1, 0] * 16),
        "sample_id": torch.arange(32),
    }
    found = []
    for _ in range(2):
        module = make_module()
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
        for _ in range(24):
            optimizer.zero_grad()
            module(inputs)["loss"].backward()
            optimizer.step()
        found.append(module.eval().predict(inputs)["score"].detach().numpy())
    assert metrics.eer(found[0][::2], found[0][1::2]) == 0.0
    assert np.array_equal(found[0], found[1])
