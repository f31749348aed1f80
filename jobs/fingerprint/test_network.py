"""The network and its aligner."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.cases.fingerprint import count_parameters, make_config, make_module
from trainyard.errors import UserError

from .network import Aligner, DeepPrint, MinutiaMapHead, build_rigid_matrix, sample_bilinear


def test_every_stage_has_the_shape_and_size_of_the_reference() -> None:
    network = DeepPrint(embedding_dims=512).eval()
    assert count_parameters(network.stem) == 605_152
    # including the reference's training head, Linear(512 -> 8000) with a bias
    assert count_parameters(network) + count_parameters(nn.Linear(512, 8000)) == 46_033_184

    shapes = []
    with torch.inference_mode():
        x = network.stem(torch.rand(1, 1, 299, 299))
        shapes.append(tuple(x.shape[1:]))
        for block in network.list_blocks():
            x = block(x)
            shapes.append(tuple(x.shape[1:]))
    assert shapes == [(384, 35, 35)] * 5 + [(1024, 17, 17)] * 8 + [(1536, 8, 8)] * 4


@pytest.mark.parametrize(
    ("name", "heads", "aligned", "expected"),
    [
        ("deepprint_tex", 1, False, 46_033_184),
        ("deepprint_minu", 1, False, 30_840_582),
        ("deepprint_texminu", 2, False, 71_516_742),
        ("deepprint_texminu", 2, True, 71_828_297),
    ],
)
def test_the_networks_have_the_parameters_of_the_reference(name: str, heads: int, aligned: bool, expected: int) -> None:
    with torch.device("meta"):
        parts: list[nn.Module] = [DeepPrint(name=name, aligner=Aligner(1) if aligned else None)]
        parts += [nn.Linear(512 // heads, 8000) for _ in range(heads)]  # the reference's training heads have a bias
        if "minu" in name:
            parts.append(MinutiaMapHead(384, 1.0))
    assert sum(map(count_parameters, parts)) == expected


def test_the_minutia_branch_has_the_shapes_of_the_reference() -> None:
    with torch.device("meta"):
        network = DeepPrint(name="deepprint_minu").eval()
        outputs = network.compute_branches(torch.rand(2, 1, 299, 299))
        assert network.minutia is not None and outputs.minutia_BCHW is not None
        assert outputs.minutia_BCHW.shape == (2, 384, 35, 35)
        assert network.minutia.embed(outputs.minutia_BCHW).shape == (2, 1024, 9, 9)
        assert MinutiaMapHead(384, 1.0)(outputs.minutia_BCHW).shape == (2, 6, 128, 128)


def test_the_score_of_two_branches_is_the_mean_of_their_cosines() -> None:
    network = DeepPrint(name="deepprint_texminu", embedding_dims=24, width=0.1, blocks=(1, 1, 1)).eval()
    image = torch.rand(2, 1, 75, 80)
    branches = network.compute_branches(image).embeddings
    assert [embedding.shape for embedding in branches] == [(2, 12)] * 2
    one, other = network(image)
    torch.testing.assert_close(one.norm(), torch.ones(()))
    cosines = torch.stack([embedding[0] @ embedding[1] for embedding in branches])
    torch.testing.assert_close(one @ other, cosines.mean())


def test_embeddings_have_unit_length_at_any_size_and_width() -> None:
    for width, side in ((0.1, 75), (0.25, 128)):
        network = DeepPrint(embedding_dims=24, width=width, blocks=(1, 1, 1)).eval()
        embedding = network(torch.rand(3, 1, side, side + 10))
        assert embedding.shape == (3, 24)
        torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))


def test_the_repeated_layers_are_the_inception_blocks() -> None:
    assert len(list(make_module().repeated_layers())) == 1 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("batch", [1, 4])
def test_an_untrained_aligner_is_the_identity_on_every_image_of_a_batch(batch: int) -> None:
    aligner = Aligner(1)
    assert count_parameters(aligner) == 311_555
    image = torch.rand(batch, 1, 299, 299)
    # 1e-4 of the range: coordinates near 299 are rounded to 3e-5 px, and neighbouring noise pixels differ by up to 1
    torch.testing.assert_close(aligner(image), image, rtol=0, atol=1e-4)


def test_the_aligner_stays_within_its_bounds_and_gets_gradients() -> None:
    aligner = Aligner(1, rotate_deg=60, shift=0.2)
    nn.init.constant_(aligner.pose.bias, 100.0)
    image = torch.zeros(1, 1, 101, 101)
    image[0, 0, 50, 50] = 1.0
    y, x = np.unravel_index(int(aligner(image).argmax()), (101, 101))
    # the output's centre samples the input 0.2 sides right and below, so the dot moves left and up, rotated by 60
    offset = np.array([x - 50, y - 50])
    assert np.hypot(*offset) == pytest.approx(0.2 * 101 * np.sqrt(2), abs=1.5)
    assert np.degrees(np.arctan2(offset[1], offset[0])) % 360 == pytest.approx((225 - 60) % 360, abs=4)

    aligner = Aligner(1)
    aligner(torch.rand(2, 1, 64, 64)).square().sum().backward()
    assert all(p.grad is not None for p in aligner.parameters())
    assert aligner.pose.bias.grad is not None
    assert float(aligner.pose.bias.grad.abs().min()) > 0


def test_our_bilinear_sampling_equals_torch_in_value_and_gradient() -> None:
    image = torch.rand(3, 2, 20, 30, dtype=torch.float64)
    matrix = build_rigid_matrix(
        torch.tensor([0.3, -0.5, 0.0]).double(), 0.3 * torch.rand(3, 2).double()
    ).requires_grad_()
    grid = functional.affine_grid(matrix, [3, 2, 20, 30], align_corners=False)
    results = [
        sample_bilinear(image, grid),
        functional.grid_sample(image, grid, padding_mode="border", align_corners=False),
    ]
    gradients = [torch.autograd.grad(r.square().sum(), matrix, retain_graph=True)[0] for r in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_an_image_too_small_for_the_network_is_refused_with_the_required_size() -> None:
    config = make_config()
    config.image.width_px = 74
    with pytest.raises(UserError, match="needs 75 px"):
        make_module(config)
