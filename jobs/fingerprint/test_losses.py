"""The losses, and training with them."""

from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.cases.fingerprint import make_batch, make_config, make_module

from .module import CentreLoss, FingerprintModule, compute_cosface_logits


def test_cosface_without_margin_is_the_softmax_over_scaled_cosines() -> None:
    cosine, target = torch.rand(5, 9) * 2 - 1, torch.tensor([0, 3, 8, 1, 1])
    logits = compute_cosface_logits(cosine, target, scale=32.0, margin=0.0)
    assert torch.equal(logits, 32.0 * cosine)
    with_margin = compute_cosface_logits(cosine, target, scale=32.0, margin=0.35)
    expected = 32.0 * (cosine - 0.35 * functional.one_hot(target, 9))
    torch.testing.assert_close(with_margin, expected)


def test_the_centre_loss_of_a_batch_is_the_mean_over_its_splits() -> None:
    torch.manual_seed(0)
    loss, embedding, target = CentreLoss(7, 16), torch.randn(12, 16), torch.randint(7, (12,))
    whole = loss(embedding, target)
    parts = torch.stack(
        [loss(e, t) for e, t in zip(torch.split(embedding, 3), torch.split(target, 3), strict=True)]
    ).mean()
    torch.testing.assert_close(whole, parts)
    distances = [(e - loss.weight[t]).square().sum().item() for e, t in zip(embedding, target, strict=True)]
    assert whole.item() == pytest.approx(sum(distances) / 12, rel=1e-5)


def test_the_margin_rises_with_the_samples_seen_and_needs_no_state() -> None:
    config = make_config()
    config.head.margin_warmup, config.global_batch_size = "10st", 8
    module, batch = make_module(config).eval(), make_batch(4)
    config.head.name = "ce"
    without_margin = make_module(config).eval()

    def softmax(model: FingerprintModule, seen: int | None) -> float:
        extra = {} if seen is None else {"samples_seen": torch.tensor(seen)}
        return float(model(batch | extra)["softmax"].item())

    assert softmax(module, 0) == softmax(without_margin, None)
    assert softmax(module, 0) < softmax(module, 40) < softmax(module, 80)
    assert softmax(module, 80) == softmax(module, 10**9) == softmax(module, None)


def test_only_training_fingers_become_classes() -> None:
    module = make_module()
    assert module.get_buffer("class_of_code").tolist() == [-1, -1, 0, 1, 2, 3]
    assert "class_of_code" in module.state_dict()


def test_every_parameter_has_a_gradient_and_is_in_one_optimizer_group() -> None:
    module = make_module()
    module(make_batch(4))["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())
    groups = [
        (group["weight_decay"], cast(list[nn.Parameter], group["params"])) for group in module.parameter_groups(0.1)
    ]
    grouped = [id(p) for _, parameters in groups for p in parameters]
    assert sorted(grouped) == sorted(id(p) for p in module.parameters())
    decayed = [id(p) for decay, parameters in groups if decay for p in parameters]
    assert module.centres is not None
    assert id(module.centres.weight) not in decayed
    assert id(module.directions) in decayed


@pytest.mark.slow
def test_a_small_model_memorises_its_prints() -> None:
    config = make_config()
    config.model.dropout = 0.0
    module, batch = make_module(config), make_batch(8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(30):
        losses = module(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    assert float(losses["accuracy"]) == 1.0
