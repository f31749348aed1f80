"""Pretrained weights from a file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainyard.errors import UserError

from .cases import make_network
from .network import DualCrossAttention
from .weights import load_weights


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
    load_weights(network, str(path))
    own = network.state_dict()
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed", "blocks.2.attn.qkv.bias", "norm.weight"):
        assert torch.equal(own[name], weights[name]), name
    assert torch.equal(own["glca.mlp.fc1.weight"], weights["blocks.2.mlp.fc1.weight"])
    assert torch.equal(own["glca.norm.bias"], weights["norm.bias"])


def test_positions_for_another_image_size_are_interpolated_and_the_class_token_is_kept(tmp_path: Path) -> None:
    network, path = make_network(), tmp_path / "vit.pth"
    weights = make_timm_weights(network, side=8, layers=3)
    ramp = torch.arange(8.0).repeat(8, 1)  # increases along a row
    weights["pos_embed"] = torch.cat([torch.full((1, 1, 24), 9.0), ramp.flatten()[None, :, None].expand(1, 64, 24)], 1)
    torch.save(weights, path)
    load_weights(network, str(path))
    pos = network.pos_embed.detach()
    assert torch.equal(pos[0, 0], torch.full((24,), 9.0))
    rows = pos[0, 1:, 0].view(4, 4)
    assert (rows.diff(dim=1) > 1).all() and torch.allclose(rows, rows[:1].expand(4, 4))


def test_weights_that_do_not_fit_are_refused_with_what_to_change(tmp_path: Path) -> None:
    network, path = make_network(), tmp_path / "vit.pth"
    weights = make_timm_weights(network, side=4, layers=3)
    torch.save({("norm.wieght" if n == "norm.weight" else n): v for n, v in weights.items()}, path)
    with pytest.raises(UserError, match=r"no 'norm\.weight' in it; nearest: norm\.wieght"):
        load_weights(network, str(path))
    torch.save(weights | {"cls_token": torch.zeros(1, 1, 32)}, path)
    with pytest.raises(UserError, match=r"'cls_token' is \(1, 1, 32\).*Set model\.dims"):
        load_weights(network, str(path))
    torch.save({"f": Path}, path)
    with pytest.raises(UserError, match="not a file of tensors"):
        load_weights(network, str(path))
    with pytest.raises(UserError, match="no such file"):
        load_weights(network, str(tmp_path / "vti.pth"))
