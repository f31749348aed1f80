"""The twins family as a whole: a perfect model, used by the tests over all families."""

import numpy as np
import pytest
import torch

from tests.cases.twins import make_batch, make_data, make_module

from .module import Relation


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return a perfect model's predictions for the samples `ids`, and the scores expected of them."""
    rows = {
        "embedding": np.eye(columns["person"].max() + 1, dtype=np.float32)[columns["person"][ids]],
        "sample_id": ids,
    }
    expected = {"eer_twin": 0.0, "auc_twin": 1.0, "eer_random": 0.0, "tar_at_far_1e-2_mixed": 1.0, "accuracy_twin": 1.0}
    return rows, expected


@pytest.mark.slow
def test_a_small_model_overfits_four_pairs_of_twins() -> None:
    data = make_data()
    module, batch = make_module(data=data), make_batch(data, data.train_ids[:32])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(60):
        losses = module(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    embedding = module.eval().predict(batch)["embedding"].detach()
    cosine, relation = embedding @ embedding.T, Relation(batch["person"], batch["family"], batch["sample_id"])
    ranked = cosine[relation.same][:, None] > cosine[relation.different]
    assert float(ranked.float().mean()) > 0.99, "area under the curve; chance is 0.5"
