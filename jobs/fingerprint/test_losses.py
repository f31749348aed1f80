"""The losses, and training with them."""

from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.cases.fingerprint import make_batch, make_config, make_minutia_config, make_module
from trainyard.errors import UserError

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


def make_minutia_batch(count: int) -> dict[str, torch.Tensor]:
    minutiae = torch.tensor([[20.0, 30.0, 1.0], [50.0, 40.0, 4.0]]).repeat(count, 1, 1)
    affine = torch.eye(2, 3).repeat(count, 1, 1)
    return make_batch(count) | {
        "minutiae": minutiae,
        "minutiae_count": torch.full((count,), 2),
        "affine": affine,
    }


@pytest.mark.parametrize("sampled_classes", [0, 3])
def test_two_branches_and_their_maps_are_trained_together(sampled_classes: int) -> None:
    config = make_minutia_config("deepprint_texminu")
    config.head.sampled_classes, config.model.stn = sampled_classes, True
    module = make_module(config)
    losses = module(make_minutia_batch(4))
    parts = ("softmax_texture", "softmax_minutia", "centre", "map", "accuracy_texture", "accuracy_minutia")
    assert set(losses) == {"loss", *parts}
    expected = losses["softmax_texture"] + losses["softmax_minutia"] + 2.0 * losses["centre"] + 0.3 * losses["map"]
    torch.testing.assert_close(losses["loss"], expected)
    losses["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())
    assert len(list(module.repeated_layers())) == 5 + 6


def test_the_map_head_only_trains() -> None:
    module = make_module(make_minutia_config("deepprint_minu"))
    assert set(module(make_minutia_batch(2))) == {"loss", "softmax", "centre", "map", "accuracy"}
    left = {name for name in module.state_dict() if not name.startswith(module.training_only)}
    assert left == {f"network.{name}" for name in module.network.state_dict()}
    assert module.eval().predict(make_batch(3))["embedding"].shape == (3, 16)


def test_a_minutia_branch_without_minutiae_is_refused() -> None:
    config = make_minutia_config("deepprint_texminu")
    with pytest.raises(UserError, match="this packed data has no minutiae"):
        make_module(config, records=())
    config.model.embedding_dims = 15
    with pytest.raises(UserError, match=r"Type model\.embedding_dims=16"):
        make_module(config)
