"""The networks of all variants: parameters, precision, checkpointing, compilation."""

import pytest
import torch

from tests.cases.tinydet import make_batch, make_config, make_module
from trainyard.train.step import enable_activation_checkpointing

from . import geometry
from .config import Config
from .module import build_network
from .network import Backbone


def test_vanilla_trains_as_many_parameters_as_detr() -> None:
    config = Config()
    model = config.model
    model.variant, model.queries, model.feedforward, model.encoder_layers, model.dropout = "vanilla", 100, 2048, 6, 0.1
    backbone = Backbone("resnet50", norm="frozen", width=32, dilated=False)
    network = build_network(model, backbone, categories=91)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == 41_302_368
    assert sum(p.numel() for p in network.parameters()) == 41_302_368 + 222_400  # stem and first stage are frozen


def test_a_dilated_backbone_ends_at_stride_16() -> None:
    for dilated, side in ((False, 2), (True, 4)):
        backbone = Backbone("resnet50", norm="frozen", width=32, dilated=dilated).eval()
        with torch.no_grad():
            assert backbone(torch.zeros(1, 3, 64, 64))[-1].shape == (1, 2048, side, side)


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms", "fcos"])
def test_the_smallest_network_of_every_variant_has_no_parameter_without_a_gradient(variant: str) -> None:
    module = make_module(make_config(variant, encoder_layers=0, decoder_layers=1, denoising=0))
    module(make_batch())["loss"].backward()
    untrained = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert untrained == [], "ranks would wait for them forever"


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms", "fcos"])
def test_every_parameter_of_every_variant_is_trained(variant: str) -> None:
    module = make_module(make_config(variant))
    for parameter in module.parameters():  # layers that start at 0 would block the gradients of those before them
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    module(make_batch())["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert [name for name, grad in gradients.items() if grad is None] == [], "ranks would wait for them forever"
    still = [name for name, grad in gradients.items() if grad is not None and not grad.any()]
    nothing_yet = "decoder.layers.0.sa_"  # the first layer of Conditional DETR has only positions to attend to
    assert [name for name in still if nothing_yet not in name] == []


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms", "fcos"])
def test_in_half_precision_losses_and_boxes_are_float32(variant: str) -> None:
    module, batch = make_module(make_config(variant)), make_batch(noise=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses = module(batch)
        module.eval()
        rows = module.predict(batch)
    assert all(value.dtype == torch.float32 and value.isfinite() for value in losses.values())
    assert rows["box"].dtype == rows["score"].dtype == torch.float32
    module.train()
    assert losses["loss"].item() == pytest.approx(module(batch)["loss"].item(), rel=0.2)  # 8 bits, other denoising


@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_gradient_checkpointing_changes_no_gradient(variant: str) -> None:
    grads = []
    for checkpointing in (False, True):
        module = make_module(make_config(variant, encoder_layers=2))
        if checkpointing:
            assert enable_activation_checkpointing(module) == 4
        torch.manual_seed(1)
        module(make_batch())["loss"].backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True) if a is not None)


@pytest.mark.slow
def test_a_compiled_module_has_the_same_losses() -> None:
    config = make_config()
    losses = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):  # eager: only tracing can go wrong
        module = wrap(make_module(config))
        torch.manual_seed(1)
        losses.append({name: value.item() for name, value in module(make_batch(noise=True)).items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("variant", ["vanilla", "ms"])
def test_padding_next_to_an_image_gets_no_proposals_and_no_attention(variant: str) -> None:
    module = make_module(make_config(variant)).eval()
    batch = make_batch(images=1)
    batch["image_px"] = torch.tensor([[64.0, 32.0]])
    outputs = module.network(batch["image"], batch["affine"], batch["image_px"])
    if outputs.proposals is not None:
        assert (outputs.proposals.boxes_DBQ4[..., 0] < 0.5).all()
    mask = geometry.make_image_mask(batch["affine"], batch["image_px"], (64, 64), (8, 8))
    assert torch.equal(mask[0], (torch.arange(8) < 4).expand(8, -1))
