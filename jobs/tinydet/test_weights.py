"""Starting from published weights."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from trainyard.errors import UserError

from .cases import make_config, make_module, make_vanilla, rename_as_published
from .module import build_network
from .network import Backbone
from .weights import load_backbone, load_detector


@pytest.mark.parametrize("kind", ["pth", "safetensors", "ours"])
def test_a_detector_trained_on_other_categories_gets_a_new_classifier(tmp_path: Path, kind: str) -> None:
    backbone = "resnet18" if kind == "pth" else "small"
    published, ours = make_vanilla(91, backbone=backbone), make_vanilla(2, backbone=backbone)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    file = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        save_file(rename_as_published(published), file)
    elif kind == "pth":
        torch.save({"model": rename_as_published(published), "args": argparse.Namespace(lr=1e-4)}, file)
    else:
        named = {f"network.{name}": value for name, value in published.state_dict().items()}
        torch.save({"model": named, "ema": None, "progress": {"step": 3}}, file)
    load_detector(ours, str(file))
    for name, value in ours.state_dict().items():
        expected = before[name] if name.startswith("class_embed") else published.state_dict()[name]
        assert torch.equal(value, expected), name


def test_a_conditional_detector_loads_weights_with_their_published_names(tmp_path: Path) -> None:
    config = make_config("cond")
    backbone = Backbone("small", norm="frozen", width=8)
    one, other = (build_network(config.model, backbone, categories=2) for _ in range(2))
    moved = ("query_scale.", "ref_point_head.")
    named = {
        (f"transformer.decoder.{name}" if name.startswith(moved) else name): value
        for name, value in rename_as_published(one).items()
    }
    torch.save({"model": named}, tmp_path / "cond.pth")
    load_detector(other, str(tmp_path / "cond.pth"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("input_proj.weight"), r"it contains no 'input_proj.weight'; nearest"),
        (
            lambda w: w.update({"query_embed.weight": torch.zeros(100, 32)}),
            r"'query_embed.weight' is \(100, 32\).*model.queries",
        ),
        (lambda w: w.update({"input_proj.weight": torch.zeros(3)}), r"'input_proj.weight' is \(3,\).*(model\.)?dims"),
        (lambda w: w.clear(), r"it contains no tensors"),
    ],
)
def test_a_detector_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    weights = rename_as_published(make_vanilla(91))
    change(weights)
    torch.save({"model": weights}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message):
        load_detector(make_vanilla(2), str(tmp_path / "w.pth"))


def test_missing_weights_and_weights_that_could_run_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_detector(make_vanilla(2), str(tmp_path / "none.pth"))
    torch.save({"model": Path("/")}, tmp_path / "code.pth")
    with pytest.raises(UserError, match="not a file of tensors"):
        load_detector(make_vanilla(2), str(tmp_path / "code.pth"))


def test_a_backbone_starts_from_torchvision_s_weights_and_learns_slower(tmp_path: Path) -> None:
    import torchvision  # type: ignore[import-untyped]

    torch.manual_seed(3)
    published = torchvision.models.resnet18(weights=None)
    torch.save(published.state_dict(), tmp_path / "resnet18.pth")
    config = make_config(backbone="resnet18", backbone_weights=str(tmp_path / "resnet18.pth"))
    module = make_module(config)
    body, class_embed = cast(Any, module.network.backbone.body), cast(Any, module.network.class_embed)
    assert torch.equal(body.layer3[1].conv2.weight, published.layer3[1].conv2.weight)
    assert not body.conv1.weight.requires_grad, "stem and first stage are frozen"
    groups = cast(list[dict[str, Any]], module.parameter_groups(1e-4))
    lr_scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert lr_scale[id(body.layer3[1].conv2.weight)] == 0.1
    assert lr_scale[id(class_embed[0].weight)] == 1.0
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(lr_scale) == len(trained) == sum(len(group["params"]) for group in groups)
    assert all((group["weight_decay"] > 0) == (p.ndim >= 2) for group in groups for p in group["params"])
    with pytest.raises(UserError, match=r"'layer1.0.conv1.weight' is \(64, 64, 3, 3\), but the model expects"):
        load_backbone(Backbone("resnet50", norm="frozen", width=8, dilated=False), str(tmp_path / "resnet18.pth"))


def test_a_resnet_trained_from_scratch_has_no_batch_statistics() -> None:
    module = make_module(make_config(backbone="resnet18"))
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules())
    assert all(p.requires_grad for p in module.parameters())
