"""The module: building, training step, gradients and scores."""

from typing import cast

import numpy as np
import pytest
import torch
from loguru import logger

from tests.cases.twins import make_batch, make_config, make_data, make_module, make_network, select_ids
from trainyard.errors import UserError
from trainyard.train.module import DataInfo
from trainyard.train.step import enable_activation_checkpointing

from . import protocol
from .module import Neck
from .network import DualCrossAttention


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("patch_px", 7, "expected multiples of model.patch_px=7, such as 28"),
        ("patch_px", 12, "expected a power of 2 for model.stem=conv"),
        ("heads", 5, "model.dims=24: expected a multiple of model.heads=5"),
        ("pwca_layers", 3, r"model.pwca_layers=3: expected 0 .. model.layers=2"),
    ],
)
def test_an_impossible_shape_is_refused(option: str, value: int, message: str) -> None:
    config = make_config()
    if value == 12:
        config.model.stem, config.image.height_px, config.image.width_px = "conv", 36, 36
    setattr(config.model, option, value)
    with pytest.raises(UserError, match=message):
        make_module(config)


def test_a_transformer_that_begins_with_random_weights_is_warned_of() -> None:
    said: list[str] = []
    sink = logger.add(said.append, format="{message}", level="WARNING")
    config = make_config()
    for config.model.stem in ("patch", "conv"):
        make_module(config)
    logger.remove(sink)
    assert len(said) == 1 and "is meant for a pretrained ViT" in said[0] and "model.stem=conv" in said[0]


def test_the_embedding_uses_only_the_weights_of_self_attention_and_global_local_attention() -> None:
    def shapes(network: DualCrossAttention) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in network.state_dict().items()}

    assert shapes(make_network(pwca_layers=3)) == shapes(make_network(pwca_layers=0))
    data = make_data()
    module = make_module(data=data).eval()
    module.predict(make_batch(data, select_ids(data, "val")))["embedding"][:, 0].sum().backward()  # type: ignore[no-untyped-call]
    used = {name for name, weight in module.named_parameters() if weight.grad is not None}
    assert used == {f"network.{name}" for name, _ in module.network.named_parameters()}


@pytest.mark.parametrize(
    "head", [{"pair_weight": 0.4}, {"arcface_weight": 0.0, "pair_weight": 1.0, "weighting": "fixed"}]
)
@pytest.mark.parametrize("glca", [True, False])
def test_every_parameter_has_a_gradient_and_every_branch_a_loss(head: dict[str, float | str], glca: bool) -> None:
    config, data = make_config(**head), make_data()
    config.model.glca = glca
    module = make_module(config, data)
    losses = module(make_batch(data, data.train_ids[:24]))
    losses["loss"].backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None] == []
    assert {"sa", "pwca"} <= set(losses) and ("glca" in losses) == glca


def test_recomputing_activations_changes_no_gradient() -> None:
    data = make_data()
    gradients = []
    for recompute in (False, True):
        module = make_module(data=data)
        assert not recompute or enable_activation_checkpointing(module) == 2
        torch.manual_seed(3)  # for the distractors
        module(make_batch(data, data.train_ids[:16]))["loss"].backward()
        gradients.append([weight.grad for weight in module.parameters()])
    for kept, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, computed)


def test_a_batch_of_one_image_neither_fails_nor_changes_the_statistics() -> None:
    data = make_data()
    module = make_module(data=data)
    neck = cast(Neck, module.necks["sa"])
    assert neck.running_var is not None
    before = neck.running_var.clone()
    assert torch.isfinite(module(make_batch(data, data.train_ids[:1]))["loss"])
    assert torch.equal(neck.running_var, before)


def make_rows(data: DataInfo, embedding: np.ndarray, name: str) -> dict[str, np.ndarray]:
    ids = select_ids(data, name)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return {"embedding": unit[ids].astype(np.float32), "sample_id": ids}


def test_a_model_that_tells_only_families_apart_fails_only_on_twins() -> None:
    data = make_data(family_counts={"train": 4, "val": 12}, per_person=6)
    rng = np.random.default_rng(0)
    embedding = np.eye(data.columns["family"].max() + 1)[data.columns["family"]]
    embedding = embedding + 0.05 * rng.normal(size=embedding.shape)
    module, rows = make_module(data=data), make_rows(data, embedding, "val")
    metrics = module.score(rows)
    metrics |= module.compute_intervals(rows)
    assert metrics["eer_random"] == 0.0
    assert 0.42 < metrics["eer_twin"] < 0.58
    assert metrics["eer_twin_low"] < metrics["eer_twin"] < metrics["eer_twin_high"]
    assert 0.42 < metrics["auc_twin"] < 0.58
    assert 0.0 < metrics["eer_mixed"] < metrics["eer_twin"] < metrics["eer_hard_twin"]
    assert metrics["accuracy_random"] > 0.7 and metrics["accuracy_twin"] == pytest.approx(0.5, abs=0.1)
    assert (metrics["pairs_same"], metrics["pairs_twin"]) == (12 * 2 * 15, 12 * 36)


def test_the_threshold_comes_from_validation_is_saved_with_the_weights_and_is_used_on_the_test_set() -> None:
    data = make_data(per_person=6)
    embedding = np.random.default_rng(0).normal(size=(len(data.columns["person"]), 8))
    module = make_module(data=data)
    assert "accuracy_twin" not in module.score(make_rows(data, embedding, "test"))  # not validated yet
    module.score(make_rows(data, embedding, "val"))
    copy = make_module(data=data)
    copy.load_state_dict(module.state_dict())
    found = copy.score(make_rows(data, embedding, "test"))
    rows = make_rows(data, embedding, "test")
    scores = copy.evaluation_set.score_pairs(rows["embedding"], rows["sample_id"])
    same, twin = scores.select_kinds(protocol.SAME).score, scores.select_kinds(protocol.TWIN).score
    threshold = float(module.threshold)
    assert found["accuracy_twin"] == pytest.approx(((same >= threshold).mean() + (twin < threshold).mean()) / 2)
    assert float(copy.threshold) == threshold


def test_a_set_without_twins_is_scored_on_strangers() -> None:
    data = make_data()
    alone = DataInfo({**data.columns, "family": data.columns["person"]}, data.vocabulary, data.train_ids)
    columns = {**alone.columns}
    texts = [" ".join(w for w in text.split() if w[0] != "t") for text in data.vocabulary["pairs"]]
    module = make_module(data=DataInfo(columns, {**data.vocabulary, "pairs": texts}, data.train_ids))
    assert module.monitor == ("auc_random", "max")
    embedding = np.eye(columns["person"].max() + 1)[columns["person"]]
    metrics = module.score(make_rows(data, embedding, "val"))
    assert metrics["auc_random"] == 1.0 and "auc_twin" not in metrics


@torch.inference_mode()
def test_the_score_of_two_faces_is_the_stated_share_of_both_likenesses() -> None:
    data = make_data(family_counts={"train": 4, "val": 2, "test": 2}, per_person=2)
    module, mixed = (make_module(make_config(pixels=share), data).eval() for share in (0.0, 0.25))
    mixed.load_state_dict(module.state_dict())
    batch = make_batch(data, data.train_ids)
    alone, both = (one.predict(batch)["embedding"] for one in (module, mixed))
    gray = batch["image"].float().mean(dim=1).flatten(1)  # 32 x 32 px: none are joined
    pixels = torch.nn.functional.normalize(gray - gray.mean(dim=1, keepdim=True), dim=1)
    torch.testing.assert_close(both @ both.T, 0.75 * alone @ alone.T + 0.25 * pixels @ pixels.T)
