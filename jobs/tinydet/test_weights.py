"""Starting from published weights."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.cases.tinydet import make_config, make_module, make_vanilla, rename_as_published
from trainyard.errors import UserError
from trainyard.train.warm_start import Match, load_weights
from trainyard.train.weights_file import read_weights, rename_tensors

from .module import TinyDet, build_network
from .network import Backbone
from .weights import adapt_backbone, adapt_detector


def load(network: torch.nn.Module, path: Path) -> Match:
    """Load a file into a detector as a run does."""
    adapted = adapt_detector(network, read_weights(path, option="model.weights").tensors)
    return load_weights(network, adapted, source=f"model.weights={path}")


def start(module: TinyDet) -> Match:
    """Load what the options of a module name, as a run does."""
    option, path = module.start_file
    adapted = module.adapt_weights(read_weights(Path(path), option=option).tensors)
    return load_weights(module, adapted, source=option)


@pytest.mark.parametrize("kind", ["pth", "safetensors", "ours"])
def test_a_detector_trained_on_other_categories_gets_a_new_classifier(tmp_path: Path, kind: str) -> None:
    backbone = "resnet18" if kind == "pth" else "small"
    published = make_vanilla(91, backbone=backbone)
    config = make_config("vanilla", backbone=backbone, norm="frozen")
    file = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    config.model.weights = str(file)
    module = make_module(config)
    before = {name: value.clone() for name, value in module.network.state_dict().items()}
    if kind == "safetensors":
        save_file(rename_as_published(published), file)
    elif kind == "pth":
        torch.save({"model": rename_as_published(published), "args": argparse.Namespace(lr=1e-4)}, file)
    else:
        named = {f"network.{name}": value for name, value in published.state_dict().items()}
        torch.save({"model": named, "ema": None, "progress": {"step": 3}}, file)
    match = start(module)
    for name, value in module.network.state_dict().items():
        expected = before[name] if name.startswith("class_embed") else published.state_dict()[name]
        assert torch.equal(value, expected), name
    assert match.new == match.not_used == ["network.class_embed.bias", "network.class_embed.weight"]


def test_a_conditional_detector_loads_weights_with_their_published_names(tmp_path: Path) -> None:
    config = make_config("cond")
    backbone = Backbone("small", norm="frozen", width=8)
    one, other = (build_network(config.model, backbone, categories=2) for _ in range(2))
    moved = ("query_scale.", "ref_point_head.")
    named = {
        (f"transformer.decoder.{name}" if name.startswith(moved) else name): value
        for name, value in rename_as_published(one).items()
    }
    named |= {f"transformer.decoder.{n}": v for n, v in named.items() if n.startswith("bbox_embed.")}  # saved twice
    torch.save({"model": named}, tmp_path / "cond.pth")
    load(other, tmp_path / "cond.pth")
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("input_proj.weight"), r"it contains no 'input_proj.weight'; nearest"),
        (
            lambda w: w.update({"query_embed.weight": torch.zeros(100, 32)}),
            r"(?s)'query_embed.weight' is \(100, 32\).*model.queries",
        ),
        (
            lambda w: w.update({"input_proj.weight": torch.zeros(3)}),
            r"(?s)'input_proj.weight' is \(3,\).*(model\.)?dims",
        ),
        (lambda w: w.update({"mask_head.lay1.weight": torch.zeros(3)}), r"no place in this model.*mask_head.lay1"),
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
        load(make_vanilla(2), tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("variant", "name", "message"),
    [
        ("vanilla", "transformer.decoder.layers.0.ca_qcontent_proj.weight", r"Set model.variant=cond"),
        ("ms", "transformer.decoder.layers.0.multihead_attn.in_proj_weight", r"of DETR. Set model.variant=vanilla"),
    ],
)
def test_another_detector_is_refused_by_name(variant: str, name: str, message: str) -> None:
    network = make_module(make_config(variant)).network
    with pytest.raises(UserError, match=message):
        adapt_detector(network, {name: torch.zeros(2)})


def test_the_image_network_of_another_detector_can_be_taken() -> None:
    class Deformable(torch.nn.Module):  # what is left to load: the names of its authors
        def __init__(self, body: torch.nn.Module) -> None:
            super().__init__()
            self.backbone = torch.nn.ModuleList([torch.nn.ModuleDict({"body": body})])
            self.sampling_offsets = torch.nn.Linear(2, 2)

    options = {"backbone": "resnet18", "norm": "frozen"}
    module = make_module(make_config("ms", **options))
    other = make_module(make_config("ms", **options))
    tensors = Deformable(module.network.backbone.body).state_dict()
    match = load_weights(other, other.adapt_weights(tensors), source="x", partial=["network.backbone.*"])
    found = {name: value for name, value in other.state_dict().items() if name.startswith("network.backbone.")}
    assert len(match.loaded) == len([name for name in found if "num_batches" not in name]) > 50
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in found.items())
    with pytest.raises(UserError, match=r"107 of 182 tensors are missing.*start_from_partial"):
        load_weights(other, other.adapt_weights(tensors), source="x")


def test_missing_weights_and_weights_that_could_run_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load(make_vanilla(2), tmp_path / "none.pth")
    torch.save({"model": Path("/")}, tmp_path / "code.pth")
    with pytest.raises(UserError, match="not a file of tensors"):
        load(make_vanilla(2), tmp_path / "code.pth")


def test_a_backbone_starts_from_torchvision_s_weights_and_learns_slower(tmp_path: Path) -> None:
    import torchvision  # type: ignore[import-untyped]

    torch.manual_seed(3)
    published = torchvision.models.resnet18(weights=None)
    torch.save(published.state_dict(), tmp_path / "resnet18.pth")
    config = make_config(backbone="resnet18", backbone_weights=str(tmp_path / "resnet18.pth"))
    module = make_module(config)
    match = start(module)
    assert all(name.startswith("network.backbone.") != (name in match.new) for name in module.state_dict())
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
    larger = Backbone("resnet50", norm="frozen", width=8, dilated=False).body
    with pytest.raises(UserError, match=r"'layer1.0.conv1.weight' is \(64, 64, 3, 3\), but the model expects"):
        load_weights(larger, adapt_backbone(larger, published.state_dict()), source="here")


def test_a_resnet_trained_from_scratch_has_no_batch_statistics() -> None:
    module = make_module(make_config(backbone="resnet18"))
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules())
    assert all(p.requires_grad for p in module.parameters())


# The same random weights in the class that the layout is of


def randomise(module: torch.nn.Module) -> None:
    """Give all weights and batch statistics values as trained ones have them, so that no part counts for nothing."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * (0.03 if parameter.ndim > 1 else 0.1))
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_the_backbone_computes_what_the_published_class_does(library: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 3, 64, 64)
    published: Any
    if library == "timm":
        published = pytest.importorskip("timm").create_model("resnet18")
    else:
        published = pytest.importorskip("torchvision").models.resnet18(weights=None)
    randomise(published.eval())
    with torch.no_grad():
        expected = torch.nn.Sequential(*list(published.children())[:-2])(x)
    ours = Backbone("resnet18", norm="frozen", width=8).eval()
    load_weights(ours.body, adapt_backbone(ours.body, published.state_dict()), source="here")
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[-1], expected, atol=1e-5, rtol=1e-5)


_LAYER = r"model\.(encoder|decoder)\.layers\.(\d+)\."
_OURS = r"transformer.\1.layers.\2."
TRANSFORMERS = {
    r"model\.backbone\.(?:conv_encoder\.)?model\.(.*)": r"backbone.body.\1",
    r"model\.input_projection\.(.*)": r"input_proj.\1",
    r"model\.query_position_embeddings\.(.*)": r"query_embed.\1",
    r"model\.decoder\.layernorm\.(.*)": r"decoder_norm.\1",
    r"model\.decoder\.(query_scale|ref_point_head)\.(.*)": r"\1.\2",
    r"class_labels_classifier\.(.*)": r"class_embed.\1",
    r"bbox_predictor\.(.*)": r"bbox_embed.\1",
    _LAYER + r"((?:sa|ca)_\w+_proj)\.(.*)": _OURS + r"\3.\4",
    _LAYER + r"self_attn_layer_norm\.(.*)": _OURS + r"norm1.\3",
    _LAYER + r"encoder_attn_layer_norm\.(.*)": _OURS + r"norm2.\3",
    _LAYER + r"fc([12])\.(.*)": _OURS + r"linear\3.\4",
    _LAYER + r"self_attn\.(.*)": _OURS + r"self_attn.\3",
}
"""Names in transformers' DETR and Conditional DETR -> ours."""

_STAGE = r"backbone\.body\.encoder\.stages\.(\d)\.layers\.(\d+)\."
_OURS_STAGE = r"backbone.body.layer\1+.\2"
RESNET = {
    r"backbone\.body\.embedder\.embedder\.convolution\.(.*)": r"backbone.body.conv1.\1",
    r"backbone\.body\.embedder\.embedder\.normalization\.(.*)": r"backbone.body.bn1.\1",
    _STAGE + r"shortcut\.convolution\.(.*)": _OURS_STAGE + r".downsample.0.\3",
    _STAGE + r"shortcut\.normalization\.(.*)": _OURS_STAGE + r".downsample.1.\3",
    _STAGE + r"layer\.(\d)\.convolution\.(.*)": _OURS_STAGE + r".conv\3+.\4",
    _STAGE + r"layer\.(\d)\.normalization\.(.*)": _OURS_STAGE + r".bn\3+.\4",
}
"""Names of transformers' ResNetModel -> ours; a number before "+" is one less."""


def rename_transformers(tensors: dict[str, torch.Tensor], *, cross: str) -> dict[str, torch.Tensor]:
    """Return a detector's weights by our names; `cross` begins our name of a decoder's attention to the image."""
    rules = {
        **TRANSFORMERS,
        _LAYER + r"encoder_attn\.(.*)": _OURS + rf"{cross}_attn.\3",
        r"model\.encoder\.layers\.(\d+)\.final_layer_norm\.(.*)": r"transformer.encoder.layers.\1.norm2.\2",
        r"model\.decoder\.layers\.(\d+)\.final_layer_norm\.(.*)": r"transformer.decoder.layers.\1.norm3.\2",
    }
    named = rename_tensors(rename_tensors(tensors, rules), RESNET)
    for name in [name for name in named if ".q_proj." in name]:
        parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        if all(part in named for part in parts):
            named[name.replace(".q_proj.", ".in_proj_")] = torch.cat([named.pop(part) for part in parts])
    return {re.sub(r"(\d)\+", lambda found: str(int(found[1]) + 1), name): value for name, value in named.items()}


@pytest.mark.parametrize("variant", ["vanilla", "cond"])
def test_the_detector_computes_what_transformers_class_does(tmp_path: Path, variant: str) -> None:
    make_backbone: Any = transformers.ResNetConfig
    resnet = make_backbone(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", out_features=["stage4"]
    )
    settings = {
        "backbone_config": resnet, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_queries": 12,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_labels": 5, "dropout": 0.0,
    }  # fmt: skip
    name = "Detr" if variant == "vanilla" else "ConditionalDetr"
    make, make_settings = (getattr(transformers, f"{name}{part}") for part in ("ForObjectDetection", "Config"))
    torch.manual_seed(0)
    published = make(make_settings(**settings)).eval()
    randomise(published)
    published.save_pretrained(tmp_path)
    cross = "multihead" if variant == "vanilla" else "cross"
    torch.save(rename_transformers(load_file(tmp_path / "model.safetensors"), cross=cross), tmp_path / "weights.pth")
    model = make_config(variant, backbone="resnet18", heads=4, encoder_layers=2, temperature=0.0).model
    ours = build_network(model, Backbone("resnet18", norm="frozen", width=8), categories=5).eval()
    match = load(ours, tmp_path / "weights.pth")
    assert match.new == []
    x = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        expected = published(x, torch.ones(2, 64, 96))
        found = ours(x, torch.eye(3)[:2].repeat(2, 1, 1), torch.tensor([[64.0, 96.0]] * 2)).predictions
    torch.testing.assert_close(found.logits_DBQK[-1], expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.boxes_DBQ4[-1], expected.pred_boxes, atol=1e-5, rtol=1e-5)
