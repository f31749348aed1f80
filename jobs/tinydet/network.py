"""Parts that the variants share: backbones, position encodings, small networks, and the types of their outputs."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d  # type: ignore[import-untyped]

from .exact import ExactLinear
from .geometry import cxcywh_to_xyxy

PRIOR = 0.01
"""Initial probability of a category, where each has its own sigmoid (RetinaNet, arXiv:1708.02002, 4.1)."""


Detections = tuple[Tensor, Tensor, Tensor]
"""As `choose_best` returns them."""


class Predictions(NamedTuple):
    """Predictions of all layers. Axes: D layers, B images, Q queries, K categories (or K + 1, the last: no object)."""

    logits_DBQK: Tensor
    boxes_DBQ4: Tensor  # float32 centre x, centre y, width, height, relative to the input, 0..1


class DenoisingQueries(NamedTuple):
    """Noised objects, decoded alongside the other queries. Axes: B images, N denoising queries, a fixed number."""

    labels_BN: Tensor  # int64 category, noised
    boxes_BN4: Tensor  # float32 centre form, noised
    target_BN: Tensor  # int64, index of the object it was made from
    positive_BN: Tensor  # bool: the decoder restores the object; false: it rejects it as no object
    used_BN: Tensor  # bool: made from an object; false: only fills up the number
    group_N: Tensor  # int64: groups must not attend to each other


class Outputs(NamedTuple):
    """The outputs of a variant for a batch."""

    predictions: Predictions
    proposals: Predictions | None = None  # D = 1: of the first stage, if there are two
    denoising: Predictions | None = None  # Q = N


def choose_best(
    logits_BQK: Tensor, boxes_BQ4: Tensor, *, size_px: tuple[int, int], most: int, is_softmax: bool
) -> Detections:
    """Return the detections with the best scores: corners (B, n, 4) px of the input, scores 0..1 and labels (B, n).

    Args:
        boxes_BQ4: centre form, relative to the input.
        size_px: height and width of the input.
        most: largest n; there are fewer if there are fewer queries times categories.
        is_softmax: the last category is "no object"; else each category has its own sigmoid.
    """
    score_BQK = logits_BQK.softmax(dim=-1)[..., :-1] if is_softmax else logits_BQK.sigmoid()
    categories = score_BQK.shape[2]
    score, index = score_BQK.flatten(1).topk(min(most, score_BQK[0].numel()), dim=1)
    corners = cxcywh_to_xyxy(boxes_BQ4) * boxes_BQ4.new_tensor([size_px[1], size_px[0]] * 2)
    return corners.gather(1, (index // categories)[..., None].expand(-1, -1, 4)), score, index % categories


class Backbone(nn.Module):
    """An image network without its classifier; returns the features of its four stages.

    Args:
        name: one of torchvision's ResNets, or "small".
        norm: "frozen" also freezes the stem and the first stage, as DETR does.
        dilated: the last stage stays at stride 16.
        coarsest: stages at a larger stride are removed: ranks would wait for gradients that never come.
    """

    def __init__(self, name: str, *, norm: str, width: int, dilated: bool = False, coarsest: int = 32) -> None:
        super().__init__()
        norms: dict[str, Callable[[int], nn.Module]]
        norms = {"frozen": FrozenBatchNorm2d, "batch": nn.BatchNorm2d, "group": make_group_norm}
        make_norm = norms[norm]
        self.body: nn.Module
        if name == "small":
            self.body = _SmallBody(width, make_norm, stages=(4, 8, 16, 32).index(coarsest) + 1)
            self.channels = {4: width, 8: 2 * width, 16: 4 * width, 32: 4 * width}
        else:
            options = {"replace_stride_with_dilation": [False, False, True]} if dilated else {}
            resnet = getattr(torchvision.models, name)(weights=None, norm_layer=make_norm, **options)
            del resnet.fc
            for part, stride in (("layer2", 8), ("layer3", 16), ("layer4", 32)):
                if stride > coarsest:
                    delattr(resnet, part)
            if norm == "frozen":
                resnet.conv1.requires_grad_(False)
                resnet.layer1.requires_grad_(False)
            self.body = resnet
            step = 64 * resnet.layer1[0].expansion
            self.channels = {4: step, 8: 2 * step, 16: 4 * step, 32: 8 * step}

    def forward(self, x_BCHW: Tensor) -> list[Tensor]:
        """Return the features of the stages: at strides 4, 8, 16, 32 up to `coarsest`; dilated: 4, 8, 16, 16."""
        if isinstance(self.body, _SmallBody):
            return cast(list[Tensor], self.body(x_BCHW))
        body = cast(Any, self.body)
        stages: list[Tensor] = []
        x = body.maxpool(body.relu(body.bn1(body.conv1(x_BCHW))))
        for name in ("layer1", "layer2", "layer3", "layer4"):
            if hasattr(body, name):
                x = getattr(body, name)(x)
                stages.append(x)
        return stages


def make_group_norm(channels: int) -> nn.GroupNorm:
    """Return a norm over at most 32 groups, with 8 channels or more each (arXiv:1803.08494)."""
    return nn.GroupNorm(math.gcd(32, max(1, channels // 8)), channels)


class _SmallBody(nn.Module):
    """Two convolutions, then a residual block at each of strides 4, 8, 16 and 32, or at the first few."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module], *, stages: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 4 * width][:stages]
        half = max(8, width // 2)
        self.stem = nn.Sequential(
            nn.Conv2d(3, half, 3, 2, 1, bias=False), norm(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, width, 3, 2, 1, bias=False), norm(width), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.stages = nn.ModuleList(
            _Residual(before, after, stride=1 if i == 0 else 2, norm=norm)
            for i, (before, after) in enumerate(zip([width, *sizes], sizes, strict=False))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, *, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after),
        )  # fmt: skip
        # Max-pool plus a 1 x 1 convolution of stride 1 equals one of stride 2. The latter, with 8 channels in
        # channels_last on a CPU, writes out of bounds in the backward pass of torch 2.13.
        subsample = nn.MaxPool2d(1, stride)
        self.aside: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.aside = nn.Sequential(subsample, nn.Conv2d(before, after, 1, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.aside(x))


class MLP(nn.Module):
    """Linear layers with ReLU between them; `linear=ExactLinear` if the output is a coordinate."""

    def __init__(
        self, before: int, hidden: int, after: int, layers: int, *, linear: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        sizes = [before, *[hidden] * (layers - 1), after]
        self.layers = nn.ModuleList(linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


def make_box_head(dims: int, *, initially_zero: bool = True) -> MLP:
    """Build the network from a token to a box or the change of one, as four logits in float32."""
    head = MLP(dims, dims, 4, 3, linear=ExactLinear)
    if initially_zero:
        for parameter in head.layers[-1].parameters():
            nn.init.zeros_(parameter)
    return head


def make_class_head(dims: int, categories: int) -> nn.Linear:
    """Build the layer from a token to a logit per category, initially of probability `PRIOR`."""
    head = nn.Linear(dims, categories)
    nn.init.constant_(head.bias, -math.log((1 - PRIOR) / PRIOR))
    return head


def sine(values: Tensor, dims: int, temperature: float) -> Tensor:
    """Return (..., dims): interleaved sine and cosine of (...) at falling frequencies (arXiv:1706.03762, 3.5)."""
    power = 2 * (torch.arange(dims, device=values.device) // 2) / dims
    phase = values.float()[..., None] / temperature**power
    return torch.stack([phase[..., 0::2].sin(), phase[..., 1::2].cos()], dim=-1).flatten(-2)


def encode_grid_positions(image_Bhw: Tensor, dims: int, temperature: float) -> Tensor:
    """Return (B, h * w, dims) float32: sine positions of row, then column, within the image, as in DETR."""
    y, x = (image_Bhw.cumsum(axis).float() for axis in (1, 2))  # counts: CUDA's cumsum of floats is nondeterministic
    y, x = (at / (at.amax(dim=axis, keepdim=True) + 1e-6) * (2 * math.pi) for at, axis in ((y, 1), (x, 2)))
    return torch.cat([sine(y, dims // 2, temperature), sine(x, dims // 2, temperature)], dim=-1).flatten(1, 2)


def inverse_sigmoid(probability: Tensor) -> Tensor:
    """Return the logit of values clamped to 1e-5 .. 1 - 1e-5."""
    probability = probability.clamp(1e-5, 1 - 1e-5)
    return torch.log(probability / (1 - probability))
