"""Geometry is float32: boxes, targets and sampling points, whatever the precision of everything else."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.cases.tinydet import make_batch, make_config, make_module
from trainyard.train.module import Batch

from . import geometry
from .conditional import ConditionalDETR, encode_points
from .exact import ExactLinear, multiply
from .module import TinyDet
from .multiscale import DeformableAttention, DeformableDETR, make_anchors
from .network import MLP, Outputs, encode_grid_positions, inverse_sigmoid

SCALE = 0.1  # the input has 64 pixels, the stored image 640
ROUNDING_PX = 2e-3
"""Over three layers of 32 products and two refinements, float32 is off by less; bfloat16 by pixels."""


@contextmanager
def allow_fast_products() -> Iterator[None]:
    """Let float32 products round their factors, as TF32 does on a GPU; a CPU with AMX or AVX512-BF16 does so, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


PRECISIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bf16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fast float32": allow_fast_products,
}


def make_trained_module(variant: str) -> TinyDet:
    """Return a module whose heads do not return 0, as they do before training."""
    config = make_config(variant)
    config.evaluation.detections = 24  # each query in each category
    module = make_module(config).eval()
    torch.manual_seed(1)
    for parameter in module.network.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return module


def make_scaled_batch() -> Batch:
    batch = make_batch()
    batch["affine"] = torch.tensor([[[SCALE, 0, 0.3], [0, SCALE, 0.7]], [[-SCALE, 0, 64], [0, SCALE, 0]]])
    batch["image_px"] = torch.full((2, 2), 640.0)
    return batch


def run_in_float64(head: nn.Module, token: Tensor) -> Tensor:
    assert isinstance(head, MLP)
    x, last = token.double(), len(head.layers) - 1
    for number, layer in enumerate(head.layers):
        assert isinstance(layer, nn.Linear)
        x = x @ layer.weight.double().T + layer.bias.double()
        x = x if number == last else x.relu()
    return x


class Recorder:
    """Keeps what enters each box head, and what the network returns."""

    def __init__(self, network: nn.Module) -> None:
        self.tokens: dict[nn.Module, Tensor] = {}
        self.outputs: list[Outputs] = []
        for module in network.modules():
            if isinstance(module, MLP):
                module.register_forward_pre_hook(lambda head, args: self.tokens.update({head: args[0].detach()}))
        network.register_forward_hook(lambda network, args, out: self.outputs.append(out))

    def compute(self, head: nn.Module) -> Tensor:
        """Return a head's output for the token it got, in float64."""
        return run_in_float64(head, self.tokens[head])


def compute_boxes(network: nn.Module, recorder: Recorder) -> Tensor:
    """Return (B, Q, 4) float64 boxes of the last layer, from the tokens that entered the heads."""
    if isinstance(network, DeformableDETR):
        proposals = recorder.outputs[-1].proposals
        assert proposals is not None
        boxes = proposals.boxes_DBQ4[0].double()
        for head in network.bbox_embed:
            boxes = (recorder.compute(head) + inverse_sigmoid(boxes)).sigmoid()
        return boxes
    change = recorder.compute(network.get_submodule("bbox_embed"))[-1]
    if isinstance(network, ConditionalDETR):
        reference = recorder.compute(network.ref_point_head).sigmoid()
        change = torch.cat([change[..., :2] + inverse_sigmoid(reference), change[..., 2:]], dim=-1)
    return change.sigmoid()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", ["vanilla", "cond", "ms"])
def test_predicted_boxes_are_those_of_float64_geometry(variant: str, precision: str) -> None:
    module, batch = make_trained_module(variant), make_scaled_batch()
    recorder = Recorder(module.network)
    with torch.inference_mode(), PRECISIONS[precision]():
        rows = module.predict(batch)
    logits = recorder.outputs[-1].predictions.logits_DBQK[-1].float()
    softmax = module.terms.classification == "softmax"
    score_BQK = logits.softmax(dim=-1)[..., :-1] if softmax else logits.sigmoid()
    query = score_BQK.flatten(1).topk(24, dim=1).indices // 2
    boxes = compute_boxes(module.network, recorder).gather(1, query[..., None].expand(-1, -1, 4))
    corners = geometry.cxcywh_to_xyxy(boxes) * 64
    a, shift = batch["affine"][:, None, [0, 1], [0, 1]].double(), batch["affine"][:, None, :, 2].double()
    one, other = (corners[..., :2] - shift) / a, (corners[..., 2:] - shift) / a
    expected = torch.cat([torch.minimum(one, other), torch.maximum(one, other)], dim=-1).clamp(0, 640)
    assert (rows["box"] - expected).abs().max().item() < ROUNDING_PX
    assert expected.std(dim=1).min() > 1, "boxes differ"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_proposals_are_anchors_moved_in_float32(precision: str) -> None:
    module, batch = make_trained_module("ms"), make_scaled_batch()
    network = module.network
    assert isinstance(network, DeformableDETR)
    recorder = Recorder(network)
    with torch.inference_mode(), PRECISIONS[precision]():
        module.predict(batch)
    proposals = recorder.outputs[-1].proposals
    assert proposals is not None
    anchors = make_anchors([(8, 8), (4, 4)], [8, 16], (64, 64), side=network.anchor_strides, device=torch.device("cpu"))
    moved = recorder.compute(network.proposal_box)[:, :, None] + inverse_sigmoid(anchors.double())
    off = (proposals.boxes_DBQ4[0][:, :, None] - moved.sigmoid()).abs().amax(dim=-1).amin(dim=-1)
    assert off.max().item() * 640 < ROUNDING_PX, "each proposal is one of the anchors, moved"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_boxes_masks_and_position_codes_are_computed_in_float32(precision: str) -> None:
    torch.manual_seed(0)
    turn = torch.tensor([[[0.31, -0.17, 12.7], [0.17, 0.31, 3.1]]])
    corner = 1000 * torch.rand(1, 500, 2)
    boxes, image_px = torch.cat([corner, corner + 8], dim=2), torch.tensor([[901.0, 1203.0]])

    def map_all() -> list[Tensor]:
        there = geometry.map_to_input(boxes, turn)
        mask = geometry.make_image_mask(turn, image_px, (640, 640), (160, 160))
        codes = encode_grid_positions(mask, 16, 10_000), encode_points(corner / 1000, 16, 20)
        return [there, geometry.map_from_input(there, turn, image_px), mask, *codes]

    exact = map_all()
    with PRECISIONS[precision]():
        found = map_all()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, exact, strict=True))
    moved = corner.double() @ turn[:, :, :2].double().transpose(1, 2)
    low = torch.tensor([-0.17 * 8, 0]) + turn[:, :, 2]  # of the corners of a box of 8 px, turned clockwise
    assert torch.allclose(exact[0][..., :2].double(), moved + low, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_sees_the_same_targets_in_any_precision(precision: str) -> None:
    """A network that returns fixed boxes has the losses of float32: nothing between batch and loss is rounded."""
    losses = []
    for context in (PRECISIONS[precision], torch.enable_grad):
        module, batch = make_trained_module("vanilla").train(), make_scaled_batch()
        batch["boxes"] = batch["boxes"] * 10
        nn.init.zeros_(module.network.get_parameter("class_embed.bias"))
        for name, weight in module.network.named_parameters():
            if "_embed" in name and name.endswith("weight"):
                nn.init.zeros_(weight)
        with context():
            losses.append({name: value.item() for name, value in module(batch).items()})
    assert losses[0] == losses[1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_points_around_a_box_are_placed_in_float32(precision: str) -> None:
    module, batch = make_trained_module("ms"), make_scaled_batch()
    attention = module.network.get_submodule("decoder.0.look")
    assert isinstance(attention, DeformableAttention)
    seen: list[tuple[Tensor, Tensor]] = []
    attention.offsets.register_forward_hook(lambda layer, args, out: seen.append((args[0], out)))
    with torch.inference_mode(), PRECISIONS[precision]():
        module.predict(batch)
    query, offsets = seen[0]
    expected = query.double() @ attention.offsets.weight.double().T + attention.offsets.bias.double()
    assert (offsets - expected).abs().max().item() < 1e-5


def test_the_exact_layer_is_an_operator_that_torch_accepts() -> None:
    layer = ExactLinear(5, 3)
    x = torch.randn(2, 4, 5, requires_grad=True)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(multiply, (x, layer.weight, layer.bias), test_utils=quick)
    assert torch.autograd.gradcheck(multiply, [t.detach().double().requires_grad_() for t in (x, *layer.parameters())])


def test_after_an_exact_product_others_are_as_fast_as_before() -> None:
    with allow_fast_products(), torch.autocast("cpu", torch.bfloat16):
        assert ExactLinear(5, 3)(torch.randn(2, 5)).dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "medium"
        assert nn.Linear(5, 3)(torch.randn(2, 5)).dtype == torch.bfloat16
