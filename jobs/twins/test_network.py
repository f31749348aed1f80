"""The network: attention paths, rollout, partners, size."""

import pytest
import torch
from torch import nn

from tests.cases.twins import list_blocks, make_faces, make_network

from .config import ModelSettings
from .network import DualCrossAttention, compute_rollout, draw_random_partners, draw_twin_partners


def test_pair_wise_attention_with_the_image_itself_is_self_attention() -> None:
    network, faces = make_network().eval().double(), make_faces(5).double()
    tokens = network(faces, torch.arange(5))
    torch.testing.assert_close(tokens.pwca_BD, tokens.sa_BD, rtol=0, atol=1e-13)  # sums over 2N instead of N terms
    other = network(faces, draw_random_partners(5, torch.device("cpu")))
    assert not torch.allclose(other.pwca_BD, tokens.sa_BD, atol=0.01)
    assert torch.equal(other.sa_BD, tokens.sa_BD)


def test_pair_wise_attention_is_one_softmax_over_the_keys_of_both_images_at_the_same_depth() -> None:
    network, partner = make_network().eval().double(), torch.tensor([2, 0, 1])
    image = make_faces(3).double()
    tokens = torch.cat([network.cls_token.expand(3, -1, -1), network.patch_embed(image)], dim=1) + network.pos_embed
    for block in list_blocks(network):
        q, k, v = block.attn.project(block.norm1(tokens))
        changes = []
        for i, other in enumerate(partner.tolist()):
            heads = []
            for h in range(4):
                logits = q[i, h] @ torch.cat([k[i, h], k[other, h]]).T / 6**0.5
                heads.append(logits.softmax(dim=-1) @ torch.cat([v[i, h], v[other, h]]))
            changes.append(block.attn.proj(torch.cat(heads, dim=1)))
        tokens = tokens + torch.stack(changes)
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(network(image, partner).pwca_BD, network.norm(tokens)[:, 0])


def test_both_images_of_a_pair_get_gradients_from_the_pair_wise_path() -> None:
    image = make_faces(2).requires_grad_()
    element = make_network()(image, torch.tensor([1, 0])).pwca_BD[0, 0]  # not the sum, which LayerNorm keeps constant
    element.backward()
    assert image.grad is not None
    assert all(float(gradient.abs().sum()) > 0 for gradient in image.grad)


def test_every_weight_of_the_global_local_block_gets_a_gradient() -> None:
    network = make_network()
    assert network.glca is not None
    network(make_faces(4)).glca_BD[:, 0].sum().backward()
    weights = dict(network.glca.named_parameters())
    qkv_grad = weights["attn.qkv.weight"].grad
    assert qkv_grad is not None
    for part, gradient in zip("qkv", qkv_grad.chunk(3), strict=True):
        assert float(gradient.abs().max()) > 1e-6, part
    for name, weight in weights.items():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0, name


def test_the_global_local_block_depends_on_its_weights_and_on_the_query_patches() -> None:
    network = make_network().eval()
    assert network.glca is not None
    tokens, image = torch.randn(2, 17, 24), make_faces(2)
    outputs = [network.glca(tokens, torch.tensor([chosen] * 2)) for chosen in ([1, 2, 3, 4], [5, 6, 7, 8])]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    before = network(image).glca_BD
    nn.init.normal_(network.glca.attn.qkv.weight)
    assert not torch.allclose(network(image).glca_BD, before, atol=0.1)


@pytest.mark.parametrize("rows_at_once", [3, 17, 1000])
def test_the_rollout_of_one_row_equals_that_row_of_the_product_of_all_maps(rows_at_once: int) -> None:
    torch.manual_seed(0)
    queries_keys = [(torch.randn(2, 4, 17, 6), torch.randn(2, 4, 17, 6)) for _ in range(5)]
    product = torch.eye(17).expand(2, 17, 17)
    for q, k in queries_keys:
        attention = (q @ k.transpose(2, 3) / 6**0.5).softmax(dim=-1).mean(dim=1)
        product = (attention + torch.eye(17)) / 2 @ product
    row = compute_rollout(queries_keys, rows_at_once)
    torch.testing.assert_close(row, product[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(row.sum(dim=1), torch.ones(2))


def test_no_attention_map_is_saved_for_the_backward_pass() -> None:
    shapes: list[tuple[int, ...]] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        make_network()(make_faces(3), torch.tensor([1, 2, 0]))
    assert len(shapes) > 50
    assert not [shape for shape in shapes if len(shape) > 2 and shape[-2] == 17 and shape[-1] in (17, 34)]


def count_block_calls(network: DualCrossAttention, *arguments: torch.Tensor) -> int:
    calls: list[int] = []
    handles = [block.register_forward_hook(lambda *_: calls.append(1)) for block in network.blocks]
    network(*arguments)
    for handle in handles:
        handle.remove()
    return len(calls)


@pytest.mark.parametrize("pwca_layers", [0, 1, 3])
def test_the_pair_wise_path_costs_its_layers_in_training_and_nothing_at_inference(pwca_layers: int) -> None:
    network = make_network(pwca_layers=pwca_layers)
    assert count_block_calls(network, make_faces(2), torch.tensor([1, 0])) == 3 + pwca_layers
    assert count_block_calls(network, make_faces(2)) == 3


def test_the_network_of_the_base_preset_is_vit_b_plus_one_block() -> None:
    with torch.device("meta"):
        sizes = [
            sum(
                weight.numel()
                for weight in DualCrossAttention(ModelSettings(glca=glca), image_px=(448, 448), channels=3).parameters()
            )
            for glca in (False, True)
        ]
    assert sizes[0] == 85_798_656 + (785 - 197) * 768  # timm's vit_base_patch16_224 without head, with more positions
    assert sizes[1] - sizes[0] == 7_087_872 + 2 * 768  # 7.09 M as in the paper, plus its own norm


def test_a_stem_of_small_convolutions_gives_as_many_tokens_and_gets_gradients() -> None:
    model = ModelSettings(dims=24, layers=1, heads=2, patch_px=8, local_share=0.2, pwca_layers=1, stem="conv")
    network = DualCrossAttention(model, image_px=(32, 32), channels=3)
    assert network.patch_embed(make_faces(2)).shape == (2, 16, 24)
    network(make_faces(4), torch.tensor([1, 2, 3, 0])).pwca_BD.square().sum().backward()
    assert all(weight.grad is not None for weight in network.patch_embed.parameters())


def test_random_partners_are_a_permutation_without_fixed_points() -> None:
    torch.manual_seed(0)
    for count in (2, 3, 4, 17):
        for _ in range(20):
            partner = draw_random_partners(count, torch.device("cpu"))
            assert sorted(partner.tolist()) == list(range(count))
            assert not (partner == torch.arange(count)).any()
    assert draw_random_partners(1, torch.device("cpu")).tolist() == [0]


def test_twin_partners_are_of_the_same_family_and_of_the_other_person_if_there_is_one() -> None:
    torch.manual_seed(0)
    person, family = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([0, 0, 0, 0, 1, 2])
    partners = torch.stack([draw_twin_partners(person, family, share=1.0) for _ in range(50)])
    assert set(partners[:, 0].tolist()) == {2, 3}
    assert set(partners[:, 3].tolist()) == {0, 1}
    assert not (partners == torch.arange(6)).any()


def test_drop_path_keeps_the_expected_value_and_is_off_in_evaluation() -> None:
    network = make_network(drop_path=0.5)
    assert torch.equal(network.eval()(make_faces(2)).sa_BD, network(make_faces(2)).sa_BD)
    block, x = list_blocks(network.train())[-1], torch.ones(4000, 1, 1)
    assert sorted(set(block._apply_drop_path(x).flatten().tolist())) == [0.0, 2.0]
    assert float(block._apply_drop_path(x).mean()) == pytest.approx(1.0, abs=0.1)


def test_a_micro_batch_of_the_fast_preset_fits_a_p100() -> None:
    """Computed from shapes: two bytes per element saved for the backward pass, and weights with AdamW in fp32."""
    kept: dict[int, torch.Tensor] = {}  # by storage; keeping the tensors alive keeps their ids unique

    def record(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, nn.Parameter):
            kept[id(x.untyped_storage())] = x
        return x

    with torch.device("meta"):
        model = ModelSettings(layers=6, glca=False, local_share=0.1, pwca_layers=6, drop_path=0.0)
        network = DualCrossAttention(model, image_px=(448, 448), channels=3)
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            network(torch.empty(16, 3, 448, 448), torch.zeros(16, dtype=torch.int64))
    blocks = 13 / 12  # plus the global-local block, left out because autocast does not support the meta device
    activations = sum(2 * x.untyped_storage().nbytes() // x.element_size() for x in kept.values())
    gib = (blocks * activations + 16 * sum(weight.numel() for weight in network.parameters())) / 2**30
    assert 5 < gib < 12, gib
