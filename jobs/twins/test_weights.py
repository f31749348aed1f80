"""Pretrained weights from a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cases.twins import make_config, make_faces, make_module, make_network
from trainyard.errors import UserError
from trainyard.train.warm_start import Match, load_weights
from trainyard.train.weights_file import read_weights

from .network import DualCrossAttention
from .weights import adapt_weights

DIMS, HEADS, LAYERS, PATCH_PX, SIDE_PX = 24, 4, 3, 8, 32
"""Of the network that `make_network` builds."""


def load(network: DualCrossAttention, path: Path) -> Match:
    """Load a file as a run does."""
    adapted = adapt_weights(network, read_weights(path, option="model.weights").tensors)
    return load_weights(network, adapted, source=f"model.weights={path}")


def make_timm_weights(network: DualCrossAttention, *, side: int, layers: int) -> dict[str, torch.Tensor]:
    """Make random weights with timm's names, for a square grid of `side` and `layers` blocks."""
    names = {n: v for n, v in network.state_dict().items() if not n.startswith(("glca.", "blocks."))}
    names["pos_embed"] = torch.zeros(1, 1 + side**2, 24)
    block = {n: v for n, v in network.state_dict().items() if n.startswith("blocks.0.")}
    for layer in range(layers):
        names |= {n.replace("blocks.0.", f"blocks.{layer}."): v for n, v in block.items()}
    torch.manual_seed(5)
    return {n: torch.randn_like(v) for n, v in names.items()} | {"head.weight": torch.zeros(10, 24)}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_with_timms_names_are_loaded_and_glca_starts_from_the_last_block(tmp_path: Path, suffix: str) -> None:
    network, path = make_network(), tmp_path / f"vit.{suffix}"
    weights = make_timm_weights(network, side=4, layers=5)
    save_file(weights, path) if suffix == "safetensors" else torch.save({"state_dict": weights}, path)
    match = load(network, path)
    own = network.state_dict()
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed", "blocks.2.attn.qkv.bias", "norm.weight"):
        assert torch.equal(own[name], weights[name]), name
    assert torch.equal(own["glca.mlp.fc1.weight"], weights["blocks.2.mlp.fc1.weight"])
    assert torch.equal(own["glca.norm.bias"], weights["norm.bias"])
    assert match.new == [] and "head.weight" in match.not_used and "blocks.4.norm1.bias" in match.not_used


def test_positions_for_another_image_size_are_interpolated_and_the_class_token_is_kept(tmp_path: Path) -> None:
    network, path = make_network(), tmp_path / "vit.pth"
    weights = make_timm_weights(network, side=8, layers=3)
    ramp = torch.arange(8.0).repeat(8, 1)  # increases along a row
    weights["pos_embed"] = torch.cat([torch.full((1, 1, 24), 9.0), ramp.flatten()[None, :, None].expand(1, 64, 24)], 1)
    torch.save(weights, path)
    load(network, path)
    pos = network.pos_embed.detach()
    assert torch.equal(pos[0, 0], torch.full((24,), 9.0))
    rows = pos[0, 1:, 0].view(4, 4)
    assert (rows.diff(dim=1) > 1).all() and torch.allclose(rows, rows[:1].expand(4, 4))


def test_weights_that_do_not_fit_are_refused_with_what_to_change(tmp_path: Path) -> None:
    network, path = make_network(), tmp_path / "vit.pth"
    weights = make_timm_weights(network, side=4, layers=3)
    torch.save({("norm.wieght" if n == "norm.weight" else n): v for n, v in weights.items()}, path)
    with pytest.raises(UserError, match=r"no 'norm\.weight'; nearest: norm\.wieght"):
        load(network, path)
    torch.save(weights | {"cls_token": torch.zeros(1, 1, 32)}, path)
    with pytest.raises(UserError, match=r"(?s)'cls_token' is \(1, 1, 32\).*Set model\.dims"):
        load(network, path)
    torch.save(weights | {"blocks.0.extra": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=r"1 of its tensors have no place in this model.*blocks\.0\.extra"):
        load(network, path)
    torch.save({"f": Path}, path)
    with pytest.raises(UserError, match="not a file of tensors"):
        load(network, path)
    with pytest.raises(UserError, match="no such file"):
        load(network, tmp_path / "vti.pth")


@pytest.mark.parametrize(
    ("name", "model"),
    [("dist_token", "distilled DeiT"), ("blocks.0.ls1.gamma", "LayerScale"), ("register_tokens", "register tokens")],
)
def test_another_vision_transformer_is_refused_by_name(name: str, model: str) -> None:
    network = make_network()
    weights = make_timm_weights(network, side=4, layers=3) | {name: torch.zeros(3)}
    with pytest.raises(UserError, match=f"These weights are of .*{model}"):
        adapt_weights(network, weights)


def test_a_module_leaves_its_necks_and_losses_as_they_are() -> None:
    module = make_module(make_config())
    adapted = module.adapt_weights(make_timm_weights(module.network, side=4, layers=2))
    match = load_weights(module, adapted, source="here")
    assert {name.partition(".")[0] for name in match.new} == {
        "necks", "directions", "class_of_code", "threshold", "hard_twin", "uncertainty",
    }  # fmt: skip
    assert all(name.startswith("network.") for name in match.loaded)


# The same random weights in the class that the layout is of


def compare_features(tmp_path: Path, weights: dict[str, torch.Tensor], encode: Any) -> None:
    """Compare the class token of our network, loaded from a file of these weights, with that of `encode`."""
    network = make_network(pwca_layers=0, glca=False).eval()
    torch.save(weights, tmp_path / "vit.pth")
    load(network, tmp_path / "vit.pth")
    image = make_faces(2)
    with torch.no_grad():
        torch.testing.assert_close(network(image).sa_BD, encode(image), atol=1e-5, rtol=0)


def randomise(module: torch.nn.Module) -> None:
    """Give all weights values as large as trained ones have, norms and positions too."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim > 1 else 0.1)
        parameter.data.add_(noise)


@pytest.mark.parametrize("layout", ["timm", "DeiT", "DINO"])
def test_the_network_computes_what_timms_vit_does(tmp_path: Path, layout: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer(
        img_size=SIDE_PX, patch_size=PATCH_PX, embed_dim=DIMS, depth=LAYERS, num_heads=HEADS, num_classes=5
    ).eval()
    randomise(vit)
    weights: dict[str, Any] = dict(vit.state_dict())
    if layout == "DeiT":
        weights = {"model": weights}
    elif layout == "DINO":  # without a classifier, with a projection head, wrapped by DDP
        backbone = {f"module.backbone.{n}": v for n, v in weights.items() if not n.startswith("head.")}
        weights = {"student": {}, "teacher": backbone | {"module.head.mlp.0.weight": torch.zeros(2, 2)}, "epoch": 3}
    compare_features(tmp_path, weights, lambda image: vit.forward_features(image)[:, 0])


def test_the_network_computes_what_torchvisions_vit_does(tmp_path: Path) -> None:
    from torchvision.models import VisionTransformer  # type: ignore[import-untyped]

    torch.manual_seed(0)
    vit = VisionTransformer(SIDE_PX, PATCH_PX, LAYERS, HEADS, DIMS, 4 * DIMS, num_classes=5).eval()
    randomise(vit)
    weights = dict(vit.state_dict())
    vit.heads = torch.nn.Identity()
    compare_features(tmp_path, weights, vit)


def test_the_network_computes_what_transformers_vit_does(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    # Its default epsilon of 1e-12, which is no weight, would move these outputs by 1e-5.
    settings: dict[str, Any] = {
        "hidden_size": DIMS, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 4 * DIMS,
        "image_size": SIDE_PX, "patch_size": PATCH_PX, "layer_norm_eps": 1e-6,
    }  # fmt: skip
    vit: Any = ViTModel(ViTConfig(**settings))
    randomise(vit.eval())
    vit.save_pretrained(tmp_path)
    network = make_network(pwca_layers=0, glca=False).eval()
    load(network, tmp_path / "model.safetensors")
    image = make_faces(2)
    with torch.no_grad():
        expected = vit(image).last_hidden_state[:, 0]
        torch.testing.assert_close(network(image).sa_BD, expected, atol=1e-5, rtol=0)
