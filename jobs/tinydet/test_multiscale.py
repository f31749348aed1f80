"""The detector for tiny objects: deformable attention and denoising queries."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.cases.tinydet import make_batch, make_config, make_module, make_objects
from tests.cuda_operators import find_refused_operators

from . import geometry
from .denoising import build_denoising_queries
from .losses import compute_mean_repeats
from .multiscale import DeformableAttention, DeformableDETR, sample_levels, sum_cells


def make_deformable_case(dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grids = [(5, 4), (3, 2)]
    values = torch.randn(2, 26, 2, 3, generator=generator, dtype=dtype)
    at = torch.rand(2, 4, 2, 2, 3, 2, generator=generator, dtype=dtype) * 1.4 - 0.2  # some outside
    weights = torch.rand(2, 4, 2, 2, 3, generator=generator, dtype=dtype)
    return values, grids, at, weights


def read_at(level: torch.Tensor, x: float, y: float) -> torch.Tensor:
    """Sample (h, w, c) bilinearly at relative x, y, cell by cell; zero outside."""
    h, w, _ = level.shape
    column, row = x * w - 0.5, y * h - 0.5
    found = torch.zeros(level.shape[2], dtype=level.dtype)
    for i, j in itertools.product((math.floor(row), math.floor(row) + 1), (math.floor(column), math.floor(column) + 1)):
        if 0 <= i < h and 0 <= j < w:
            found += (1 - abs(row - i)) * (1 - abs(column - j)) * level[i, j]
    return found


WAYS = pytest.mark.parametrize("sample", [sample_levels, sum_cells])  # on the CPU, and deterministic on a GPU


@WAYS
def test_deformable_attention_equals_a_loop_over_points(sample: Callable[..., torch.Tensor]) -> None:
    values, grids, at, weights = make_deformable_case(torch.float32)
    found = sample(values, grids, at, weights)
    starts = np.cumsum([0, *[h * w for h, w in grids]])
    for b, q, m in itertools.product(range(2), range(4), range(2)):
        expected = torch.zeros(3)
        for number, p in itertools.product(range(2), range(3)):
            level = values[b, starts[number] : starts[number + 1], m].view(*grids[number], 3)
            expected += weights[b, q, m, number, p] * read_at(level, *at[b, q, m, number, p].tolist())
        assert torch.allclose(found[b, q, 3 * m : 3 * m + 3], expected, atol=1e-5)


@WAYS
def test_deformable_attention_has_the_right_gradients(sample: Callable[..., torch.Tensor]) -> None:
    values, grids, at, weights = make_deformable_case(torch.float64)
    for tensor in (values, at, weights):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda v, a, w: sample(v, grids, a, w), (values, at, weights))


def test_both_ways_of_sampling_agree_on_centres_edges_and_far_outside() -> None:
    values, grids, at, weights = make_deformable_case(torch.float64)
    special = torch.tensor([0.0, 0.1, 0.125, 0.375, 0.5, 0.9, 1.0, -0.1, 1.1, 7.0, -1e9, 1e30], dtype=torch.float64)
    at = at.clone()
    at[:, :, :, :, :, 0] = special.repeat(8).view(2, 4, 2, 2, 3)
    at[0, :, :, :, :, 1] = special.flip(0).repeat(4).view(4, 2, 2, 3)
    inputs = [tensor.requires_grad_() for tensor in (values, at, weights)]
    case = (values, grids, at, weights)
    results = [sample(*case) for sample in (sample_levels, sum_cells)]
    gradients = [torch.autograd.grad(found.square().sum(), inputs) for found in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)
    assert find_refused_operators(lambda: torch.autograd.grad(sum_cells(*case).sum(), inputs)) == set()


def test_a_point_that_is_no_number_reads_no_cell_of_another_image() -> None:
    values, grids, at, weights = make_deformable_case(torch.float32)
    at[0, 0, 0, 0, 0] = torch.nan
    at[0, 1, 0, 0, 0] = -torch.inf
    found = sum_cells(values, grids, at, weights)
    at[0, :2] = 0.5
    assert torch.equal(found[1], sum_cells(values, grids, at, weights)[1])


def test_each_head_initially_samples_along_its_own_line_within_the_box() -> None:
    attention = DeformableAttention(32, heads=8, levels=2, points=4)
    offsets = attention.offsets.bias.view(8, 2, 4, 2)
    assert offsets.abs().amax() == 4 and torch.equal(offsets[:, 0], offsets[:, 1])
    assert torch.allclose(offsets[:, 0].abs().amax(dim=-1), torch.arange(1.0, 5).expand(8, -1))
    angles = torch.atan2(offsets[:, 0, 0, 1], offsets[:, 0, 0, 0])
    assert len(set(angles.round(decimals=3).tolist())) == 8


def test_queries_do_not_attend_to_denoising_queries_nor_groups_to_each_other() -> None:
    config = make_config(denoising=24)
    network = make_module(config).network.eval()
    assert isinstance(network, DeformableDETR)
    batch, objects = make_batch(), make_objects(np.random.default_rng(0), 3, images=2)
    objects = objects._replace(
        labels_BL=objects.labels_BL % 2, valid_BL=torch.tensor([[True] * 3, [True, True, False]])
    )
    torch.manual_seed(0)
    one = build_denoising_queries(*objects[:3], count=24, categories=2, label_noise=0.5, box_noise=1.0)
    with torch.no_grad():
        for parameter in [*network.decoder.parameters(), *network.bbox_embed.parameters()]:  # so that leaks would show
            parameter.add_(0.1 * torch.randn_like(parameter))
        args = (batch["image"], batch["affine"], batch["image_px"])
        before = network(*args, one)
        changed = one._replace(boxes_BN4=torch.rand_like(one.boxes_BN4), labels_BN=1 - one.labels_BN)
        after = network(*args, changed)
        assert torch.equal(before.predictions.logits_DBQK, after.predictions.logits_DBQK)
        assert torch.equal(before.predictions.boxes_DBQ4, after.predictions.boxes_DBQ4)
        assert not torch.equal(before.denoising.boxes_DBQ4, after.denoising.boxes_DBQ4)
        first = one.group_N == 0
        other = one._replace(boxes_BN4=torch.where(first[:, None], one.boxes_BN4, changed.boxes_BN4))
        third = network(*args, other)
        assert torch.equal(before.denoising.boxes_DBQ4[:, :, first], third.denoising.boxes_DBQ4[:, :, first])
        assert torch.equal(before.denoising.logits_DBQK[:, :, first], third.denoising.logits_DBQK[:, :, first])
        assert not torch.equal(before.denoising.boxes_DBQ4[:, :, ~first], third.denoising.boxes_DBQ4[:, :, ~first])


@pytest.mark.parametrize(("objects", "groups"), [(1, 10), (3, 3), (10, 1), (25, 0.4)])
def test_the_number_of_denoising_queries_does_not_depend_on_the_objects(objects: int, groups: float) -> None:
    torch.manual_seed(0)
    true_objects = make_objects(np.random.default_rng(0), objects, images=2)
    found = build_denoising_queries(*true_objects[:3], count=20, categories=3, label_noise=0.5, box_noise=1.0)
    assert found.labels_BN.shape == (2, 20) and found.boxes_BN4.shape == (2, 20, 4)
    assert compute_mean_repeats(found, objects) == pytest.approx(groups)
    assert int(found.positive_BN.sum()) == 2 * round(groups * objects)
    assert ((found.boxes_BN4 >= 0) & (found.boxes_BN4 <= 1)).all()


def test_positive_noise_stays_within_half_a_side_and_negative_noise_does_not() -> None:
    torch.manual_seed(0)
    true_objects = make_objects(np.random.default_rng(0), 2, images=50)._replace(
        boxes_BL4=torch.tensor([0.5, 0.5, 0.2, 0.1]).expand(50, 2, 4)
    )
    found = build_denoising_queries(*true_objects[:3], count=8, categories=3, label_noise=0.5, box_noise=1.0)
    true = geometry.cxcywh_to_xyxy(torch.tensor([0.5, 0.5, 0.2, 0.1]))
    half = torch.tensor([0.1, 0.05, 0.1, 0.05])
    near = geometry.cxcywh_to_xyxy(found.boxes_BN4[found.positive_BN])
    assert ((near - true).abs() <= half + 1e-6).all()
    edges = (
        (geometry.cxcywh_to_xyxy(found.boxes_BN4[found.used_BN & ~found.positive_BN]) - true).abs() > half - 1e-6
    ).float()
    assert edges.mean() > 0.7  # swapped edges become a box with the same centre
    labels = (found.labels_BN != true_objects.labels_BL.gather(1, found.target_BN))[found.used_BN].float().mean()
    assert 0.1 < float(labels) < 0.25  # 0.5 / 2; a third of these draw the old label again
