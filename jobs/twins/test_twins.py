"""The twins family: its network, losses, pairs and metrics, packing, sets and synthetic faces."""

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from trainyard.data.order import pxk
from trainyard.data.shards import BadRecord, Sample
from trainyard.errors import UserError
from trainyard.scoring import compute_error_rates
from trainyard.train.module import DataInfo
from trainyard.train.step import enable_activation_checkpointing

from . import protocol
from .config import Config
from .listing import Cut, families, people
from .module import Relation, TwinsModule, arcface_logits, build, pair_loss, triplet_loss
from .network import DualCrossAttention, random_partners, rollout, twin_partners
from .pack import load, samples, splits, synthesize
from .synthesis import DATASET, FAMILY_PICTURES, PAIRS, PICTURES, draw_face, pictures
from .weights import load_weights

SMALL = (
    "data.synthetic=384",
    "image.height_px=32",
    "image.width_px=32",
    "model.dims=24",
    "model.layers=2",
    "model.heads=2",
    "model.patch_px=8",
    "model.pwca_layers=2",
    "model.drop_path=0.1",
    "head.pair_weight=0.1",
    "augment.rotate_deg=0",
    "augment.gain=0",
    "augment.contrast=0",
    "global_batch_size=16",
    "micro_batch_size=0",
    "max_duration=8st",
    "schedule.warmup=0st",
    "eval_every=4st",
    "checkpoint.every=3st",
    "evaluation.bootstrap_draws=5",
    "trackers=[]",
)
"""Makes a run of this family take seconds, for tests that run over all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    rows = {
        "embedding": np.eye(columns["person"].max() + 1, dtype=np.float32)[columns["person"][ids]],
        "sample_id": ids,
    }
    expected = {"eer_twin": 0.0, "auc_twin": 1.0, "eer_random": 0.0, "tar_at_far_1e-2_mixed": 1.0, "accuracy_twin": 1.0}
    return rows, expected


def shared_faces() -> Path:
    """Return the folder of ORL faces, which is not part of the repository."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", beside)) / "faces" / "orl"
    if not folder.is_dir():
        pytest.skip(f"no faces at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def small_network(*, pwca_layers: int = 3, glca: bool = True, drop_path: float = 0.0) -> DualCrossAttention:
    torch.manual_seed(0)
    network = DualCrossAttention(
        image_px=(32, 32),
        patch_px=8,
        channels=3,
        dims=24,
        layers=3,
        heads=4,
        glca=glca,
        local_share=0.25,
        pwca_layers=pwca_layers,
        drop_path=drop_path,
    )
    with torch.no_grad():  # of the size of trained ones, so that attention is far from even
        for block in network.blocks:
            block.attn.qkv.weight.normal_(std=0.5)
    return network


def faces(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def small_config(**head: float | str | bool) -> Config:
    config = Config()
    config.model.dims, config.model.layers, config.model.heads, config.model.patch_px = 24, 2, 4, 8
    config.model.pwca_layers, config.model.drop_path = 2, 0.0
    config.image.height_px = config.image.width_px = 32
    config.image.channels = 3
    config.evaluation.bootstrap_draws = 5
    for name, value in head.items():
        setattr(config.head, name, value)
    return config


def small_data(*, families_of: dict[str, int] | None = None, per_person: int = 4) -> DataInfo:
    """Return columns as `samples` makes them, of twin families in each set."""
    rows: list[tuple[str, str, str]] = []
    number = itertools.count()
    for where, count in (families_of or {"train": 6, "val": 4, "test": 4}).items():
        for family in itertools.islice(number, count):
            rows += [(f"{family:02d}{twin}", f"{family:02d}0", where) for twin in "01" for _ in range(per_person)]
    texts = {"person": [r[0] for r in rows], "family": [r[1] for r in rows], "set": [r[2] for r in rows]}
    pairs = [""] * len(rows)
    for where in ("val", "test"):
        ids = [i for i, row in enumerate(rows) if row[2] == where]
        drawn = protocol.draw([rows[i][0] for i in ids], [rows[i][1] for i in ids], strangers=5, seed=0)
        for i, found in zip(ids, drawn, strict=True):
            pairs[i] = protocol.written([(kind, ids[j]) for kind, j in found])
    columns: dict[str, np.ndarray] = {"number": np.arange(len(rows))}
    vocabulary: dict[str, list[str]] = {}
    for name, values in {**texts, "pairs": pairs}.items():
        names, columns[name] = np.unique(values, return_inverse=True)
        vocabulary[name] = names.tolist()
    train_ids = np.array([i for i, row in enumerate(rows) if row[2] == "train"])
    return DataInfo(columns, vocabulary, train_ids)


def small_module(config: Config | None = None, data: DataInfo | None = None) -> TwinsModule:
    torch.manual_seed(0)
    return build(config or small_config(), data or small_data())


def batch_of(data: DataInfo, ids: np.ndarray) -> dict[str, torch.Tensor]:
    batch = {name: torch.from_numpy(values[ids]) for name, values in data.columns.items()}
    return {**batch, "image": faces(len(ids)), "sample_id": torch.from_numpy(ids)}


def ids_of(data: DataInfo, name: str) -> np.ndarray:
    return splits(data.columns, data.vocabulary, Config())[name]


# Network


def test_pair_wise_attention_with_the_picture_itself_is_self_attention():
    network = small_network().eval()
    seen = network(faces(5), torch.arange(5))
    torch.testing.assert_close(seen.pwca_BD, seen.sa_BD, rtol=0, atol=2e-6)  # fp32 sums of 2N instead of N terms
    other = network(faces(5), random_partners(5, torch.device("cpu")))
    assert not torch.allclose(other.pwca_BD, seen.sa_BD, atol=0.01)
    assert torch.equal(other.sa_BD, seen.sa_BD)


def test_pair_wise_attention_is_one_softmax_over_the_keys_of_both_pictures_at_the_same_depth():
    network, partner = small_network().eval().double(), torch.tensor([2, 0, 1])
    image = faces(3).double()
    tokens = torch.cat([network.cls_token.expand(3, -1, -1), network.patch_embed(image)], dim=1) + network.pos_embed
    for block in network.blocks:
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


def test_both_pictures_of_a_pair_learn_from_the_pair_wise_path():
    image = faces(2).requires_grad_()
    one_number = small_network()(image, torch.tensor([1, 0])).pwca_BD[0, 0]  # a normalised token's sum is constant
    one_number.backward()
    assert image.grad is not None
    assert all(float(gradient.abs().sum()) > 0 for gradient in image.grad)


def test_every_weight_of_the_global_local_block_learns():
    network = small_network()
    network(faces(4)).glca_BD[:, 0].sum().backward()
    weights = dict(network.glca.named_parameters())
    for part, gradient in zip("qkv", weights["attn.qkv.weight"].grad.chunk(3), strict=True):
        assert float(gradient.abs().max()) > 1e-6, part
    for name, weight in weights.items():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0, name


def test_the_global_local_block_answers_by_its_weights_and_by_which_patches_ask():
    network = small_network().eval()
    tokens, image = torch.randn(2, 17, 24), faces(2)
    asked = [network.glca(tokens, torch.tensor([chosen] * 2)) for chosen in ([1, 2, 3, 4], [5, 6, 7, 8])]
    assert not torch.allclose(asked[0], asked[1], atol=1e-3)
    before = network(image).glca_BD
    nn.init.normal_(network.glca.attn.qkv.weight)
    assert not torch.allclose(network(image).glca_BD, before, atol=0.1)


@pytest.mark.parametrize("rows_at_once", [3, 17, 1000])
def test_rollout_of_one_row_is_that_row_of_the_product_of_all_maps(rows_at_once):
    torch.manual_seed(0)
    attended = [(torch.randn(2, 4, 17, 6), torch.randn(2, 4, 17, 6)) for _ in range(5)]
    product = torch.eye(17).expand(2, 17, 17)
    for q, k in attended:
        attention = (q @ k.transpose(2, 3) / 6**0.5).softmax(dim=-1).mean(dim=1)
        product = (attention + torch.eye(17)) / 2 @ product
    row = rollout(attended, rows_at_once)
    torch.testing.assert_close(row, product[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(row.sum(dim=1), torch.ones(2))


def test_no_attention_map_is_kept_for_the_backward_pass():
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        small_network()(faces(3), torch.tensor([1, 2, 0]))
    assert len(kept) > 50
    assert not [shape for shape in kept if len(shape) > 2 and shape[-2] == 17 and shape[-1] in (17, 34)]


def blocks_run(network: DualCrossAttention, *arguments: torch.Tensor) -> int:
    calls: list[int] = []
    handles = [block.register_forward_hook(lambda *_: calls.append(1)) for block in network.blocks]
    network(*arguments)
    for handle in handles:
        handle.remove()
    return len(calls)


@pytest.mark.parametrize("pwca_layers", [0, 1, 3])
def test_the_pair_wise_path_costs_its_own_layers_in_training_and_nothing_afterwards(pwca_layers):
    network = small_network(pwca_layers=pwca_layers)
    assert blocks_run(network, faces(2), torch.tensor([1, 0])) == 3 + pwca_layers
    assert blocks_run(network, faces(2)) == 3


def test_embedding_uses_the_weights_of_self_attention_and_global_local_attention_and_no_others():
    def shapes(network: DualCrossAttention) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in network.state_dict().items()}

    assert shapes(small_network(pwca_layers=3)) == shapes(small_network(pwca_layers=0))
    data = small_data()
    module = small_module(data=data).eval()
    module.predict(batch_of(data, ids_of(data, "val")))["embedding"][:, 0].sum().backward()
    used = {name for name, weight in module.named_parameters() if weight.grad is not None}
    assert used == {f"network.{name}" for name, _ in module.network.named_parameters()}


def test_the_network_of_the_base_preset_is_vit_b_plus_one_block():
    with torch.device("meta"):
        sizes = [
            sum(
                weight.numel()
                for weight in DualCrossAttention(
                    image_px=(448, 448), patch_px=16, channels=3, dims=768, layers=12, heads=12,
                    glca=glca, local_share=0.15, pwca_layers=12,
                ).parameters()
            )
            for glca in (False, True)
        ]  # fmt: skip
    assert sizes[0] == 85_798_656 + (785 - 197) * 768  # timm's vit_base_patch16_224 without head, more positions
    assert sizes[1] - sizes[0] == 7_087_872 + 2 * 768  # 7.09 M of the paper, and a norm of its own


def test_a_stem_of_small_convolutions_gives_as_many_tokens_and_learns():
    network = DualCrossAttention(
        image_px=(32, 32), patch_px=8, channels=3, dims=24, layers=1, heads=2,
        glca=True, local_share=0.2, pwca_layers=1, conv_stem=True,
    )  # fmt: skip
    assert network.patch_embed(faces(2)).shape == (2, 16, 24)
    network(faces(4), torch.tensor([1, 2, 3, 0])).pwca_BD.square().sum().backward()
    assert all(weight.grad is not None for weight in network.patch_embed.parameters())


def test_random_partners_are_a_permutation_without_fixed_points():
    torch.manual_seed(0)
    for count in (2, 3, 4, 17):
        for _ in range(20):
            partner = random_partners(count, torch.device("cpu"))
            assert sorted(partner.tolist()) == list(range(count))
            assert not (partner == torch.arange(count)).any()
    assert random_partners(1, torch.device("cpu")).tolist() == [0]


def test_twin_partners_are_of_the_own_family_and_of_the_other_person_where_there_is_one():
    torch.manual_seed(0)
    person, family = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([0, 0, 0, 0, 1, 2])
    drawn = torch.stack([twin_partners(person, family, share=1.0) for _ in range(50)])
    assert set(drawn[:, 0].tolist()) == {2, 3}
    assert set(drawn[:, 3].tolist()) == {0, 1}
    assert not (drawn == torch.arange(6)).any()


def test_skipped_blocks_keep_the_mean_and_none_is_skipped_in_evaluation():
    network = small_network(drop_path=0.5)
    assert torch.equal(network.eval()(faces(2)).sa_BD, network(faces(2)).sa_BD)
    block, x = network.train().blocks[-1], torch.ones(4000, 1, 1)
    assert sorted(set(block._kept(x).flatten().tolist())) == [0.0, 2.0]
    assert float(block._kept(x).mean()) == pytest.approx(1.0, abs=0.1)


def test_a_p100_holds_a_micro_batch_of_the_fast_preset():
    """What the backward pass keeps, counted on shapes alone: two bytes a number, and weights with AdamW in fp32."""
    kept: dict[int, torch.Tensor] = {}  # by storage; holding the tensors keeps their ids their own

    def note(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, nn.Parameter):
            kept[id(x.untyped_storage())] = x
        return x

    with torch.device("meta"):
        network = DualCrossAttention(
            image_px=(448, 448), patch_px=16, channels=3, dims=768, layers=6, heads=12,
            glca=False, local_share=0.1, pwca_layers=6,
        )  # fmt: skip
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            network(torch.empty(16, 3, 448, 448), torch.zeros(16, dtype=torch.int64))
    blocks = 13 / 12  # the global-local one is a thirteenth; autocast, which it switches off, knows no meta device
    activations = sum(2 * x.untyped_storage().nbytes() // x.element_size() for x in kept.values())
    gib = (blocks * activations + 16 * sum(weight.numel() for weight in network.parameters())) / 2**30
    assert 5 < gib < 12, gib


# Weights from a file


def timm_like(network: DualCrossAttention, *, side: int, layers: int) -> dict[str, torch.Tensor]:
    """Return random weights in timm's names, for a square grid of `side` and `layers` blocks."""
    names = {n: v for n, v in network.state_dict().items() if not n.startswith(("glca.", "blocks."))}
    names["pos_embed"] = torch.zeros(1, 1 + side**2, 24)
    block = {n: v for n, v in network.state_dict().items() if n.startswith("blocks.0.")}
    for layer in range(layers):
        names |= {n.replace("blocks.0.", f"blocks.{layer}."): v for n, v in block.items()}
    torch.manual_seed(5)
    return {n: torch.randn_like(v) for n, v in names.items()} | {"head.weight": torch.zeros(10, 24)}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_in_timms_names_are_loaded_and_the_local_block_starts_from_the_last_one(tmp_path, suffix):
    network, path = small_network(), tmp_path / f"vit.{suffix}"
    weights = timm_like(network, side=4, layers=5)
    save_file(weights, path) if suffix == "safetensors" else torch.save({"state_dict": weights}, path)
    load_weights(network, str(path))
    own = network.state_dict()
    for name in ("patch_embed.proj.weight", "cls_token", "pos_embed", "blocks.2.attn.qkv.bias", "norm.weight"):
        assert torch.equal(own[name], weights[name]), name
    assert torch.equal(own["glca.mlp.fc1.weight"], weights["blocks.2.mlp.fc1.weight"])
    assert torch.equal(own["glca.norm.bias"], weights["norm.bias"])


def test_positions_of_another_picture_size_are_interpolated_and_the_class_token_kept(tmp_path):
    network, path = small_network(), tmp_path / "vit.pth"
    weights = timm_like(network, side=8, layers=3)
    ramp = torch.arange(8.0).repeat(8, 1)  # grows along a row
    weights["pos_embed"] = torch.cat([torch.full((1, 1, 24), 9.0), ramp.flatten()[None, :, None].expand(1, 64, 24)], 1)
    torch.save(weights, path)
    load_weights(network, str(path))
    pos = network.pos_embed.detach()
    assert torch.equal(pos[0, 0], torch.full((24,), 9.0))
    rows = pos[0, 1:, 0].view(4, 4)
    assert (rows.diff(dim=1) > 1).all() and torch.allclose(rows, rows[:1].expand(4, 4))


def test_weights_that_do_not_fit_are_refused_with_what_to_change(tmp_path):
    network, path = small_network(), tmp_path / "vit.pth"
    weights = timm_like(network, side=4, layers=3)
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


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("patch_px", 7, "expected multiples of model.patch_px=7, such as 28"),
        ("patch_px", 12, "expected a power of 2 for model.stem=conv"),
        ("heads", 5, "model.dims=24: expected a multiple of model.heads=5"),
        ("pwca_layers", 3, r"model.pwca_layers=3: expected 0 .. model.layers=2"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(option, value, said):
    config = small_config()
    if value == 12:
        config.model.stem, config.image.height_px, config.image.width_px = "conv", 36, 36
    setattr(config.model, option, value)
    with pytest.raises(UserError, match=said):
        small_module(config)


# Losses


def relation_of(person: list[int], family: list[int], sample: list[int] | None = None) -> Relation:
    ids = sample or list(range(len(person)))
    return Relation(*(torch.tensor(values) for values in (person, family, ids)))


def test_all_pairs_of_a_batch_are_formed_and_a_repeated_picture_is_no_pair_with_itself():
    relation = relation_of([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], [10, 11, 12, 13, 14, 14])
    assert [int(m.sum()) // 2 for m in (relation.same, relation.twin, relation.stranger)] == [2, 4, 8]
    assert float(small_module()._pairs_per_picture(relation)) == pytest.approx((15 - 1) / 6)
    listed = small_module(small_config(pair_strangers=False))
    assert float(listed._pairs_per_picture(relation_of([0, 0, 1, 2], [0, 0, 4, 4]))) == 2 / 4
    assert not (relation.same & relation.different).any()


def test_arcface_adds_the_angle_to_the_true_person_alone():
    angle, target = torch.rand(4, 6) * 2.5 + 0.05, torch.tensor([0, 5, 2, 2])
    logits = arcface_logits(angle.cos(), target, scale=32.0, margin=0.3)
    expected = 32 * (angle + 0.3 * functional.one_hot(target, 6)).cos()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    beyond = arcface_logits(
        torch.linspace(-1, -0.9, 20)[:, None], torch.zeros(20, dtype=torch.long), scale=1, margin=0.3
    )
    assert (beyond.diff(dim=0) > 0).all()


def test_the_triplet_loss_takes_the_hardest_positive_and_the_hardest_picture_of_the_twin():
    torch.manual_seed(0)
    person, family = [0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 0, 0, 1, 1, 2]
    feature = functional.normalize(torch.randn(8, 4), dim=1)
    cosine = feature @ feature.T
    terms = []
    for i in range(8):
        same = [float(cosine[i, j]) for j in range(8) if j != i and person[j] == person[i]]
        twin = [float(cosine[i, j]) for j in range(8) if family[j] == family[i] and person[j] != person[i]]
        other = [float(cosine[i, j]) for j in range(8) if person[j] != person[i]]
        if same:
            terms.append(max(0.0, 0.5 - min(same) + max(twin or other)))
    found = triplet_loss(cosine, relation_of(person, family), margin=0.5)
    assert float(found) == pytest.approx(np.mean(terms), rel=1e-5)
    assert len(terms) == 7
    assert float(triplet_loss(cosine[:1, :1], relation_of([0], [0]), margin=0.5)) == 0.0


def test_the_pair_loss_weighs_same_and_different_pairs_alike_and_may_leave_strangers_out():
    relation = relation_of([0, 0, 1, 2], [0, 0, 0, 1])
    logits = torch.randn(4, 4)
    logits = logits + logits.T

    def mean(pairs: list[tuple[int, int]], target: float) -> float:
        chosen = torch.stack([logits[i, j] for i, j in pairs])
        return float(functional.binary_cross_entropy_with_logits(chosen, torch.full_like(chosen, target)))

    same, twin, strangers = [(0, 1)], [(0, 2), (1, 2)], [(0, 3), (1, 3), (2, 3)]
    all_pairs = (mean(same, 1.0) + mean(twin + strangers, 0.0)) / 2
    assert float(pair_loss(logits, relation, strangers=True)) == pytest.approx(all_pairs, rel=1e-5)
    within = (mean(same, 1.0) + mean(twin, 0.0)) / 2
    assert float(pair_loss(logits, relation, strangers=False)) == pytest.approx(within, rel=1e-5)


def test_branches_add_up_by_learned_uncertainty_or_by_their_shares():
    module, losses = small_module(), torch.tensor([2.0, 3.0, 5.0])
    assert module._weighed(losses) == 5.0
    with torch.no_grad():
        module.uncertainty.copy_(losses.log())  # where the gradient of the weights is zero
    total = module._weighed(losses)
    total.backward()
    assert total.item() == pytest.approx((3 + np.log(30)) / 2, rel=1e-6)
    assert float(module.uncertainty.grad.abs().max()) < 1e-6
    fixed = small_module(small_config(weighting="fixed"))
    assert fixed._weighed(losses).item() == pytest.approx(2 + 3 + 0.3 * 5)


@pytest.mark.parametrize(
    "head", [{"pair_weight": 0.4}, {"arcface_weight": 0.0, "pair_weight": 1.0, "weighting": "fixed"}]
)
@pytest.mark.parametrize("glca", [True, False])
def test_every_parameter_has_a_gradient_and_every_branch_a_loss(head, glca):
    config, data = small_config(**head), small_data()
    config.model.glca = glca
    module = small_module(config, data)
    losses = module(batch_of(data, data.train_ids[:24]))
    losses["loss"].backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None] == []
    assert {"sa", "pwca"} <= set(losses) and ("glca" in losses) == glca


def test_recomputing_activations_changes_no_gradient():
    data = small_data()
    gradients = []
    for recompute in (False, True):
        module = small_module(data=data)
        assert not recompute or enable_activation_checkpointing(module) == 2
        torch.manual_seed(3)  # of the distracting pictures
        module(batch_of(data, data.train_ids[:16]))["loss"].backward()
        gradients.append([weight.grad for weight in module.parameters()])
    for kept, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, computed)


def test_a_batch_of_one_picture_neither_fails_nor_moves_the_statistics():
    data = small_data()
    module = small_module(data=data)
    before = module.necks["sa"].running_var.clone()
    assert torch.isfinite(module(batch_of(data, data.train_ids[:1]))["loss"])
    assert torch.equal(module.necks["sa"].running_var, before)


def test_a_small_model_learns_four_pairs_of_twins_by_heart():
    data = small_data()
    module, batch = small_module(data=data), batch_of(data, data.train_ids[:32])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(60):
        losses = module(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    embedding = module.eval().predict(batch)["embedding"].detach()
    cosine, relation = embedding @ embedding.T, Relation(batch["person"], batch["family"], batch["sample_id"])
    ranked = cosine[relation.same][:, None] > cosine[relation.different]
    assert float(ranked.float().mean()) > 0.99, "the area under the curve; chance: 0.5"


# Order


def test_an_epoch_encodes_each_picture_once_and_forms_the_pairs_of_whole_families():
    data = small_data(families_of={"train": 12, "val": 2, "test": 2}, per_person=8)
    family = data.columns["family"]
    order = pxk(data.train_ids, family[data.train_ids], samples_per_identity=8, seed=0, epoch=3, global_batch_size=32)
    assert sorted(order.ids.tolist()) == data.train_ids.tolist()
    module, encoded = small_module(data=data), []
    module.network.patch_embed.register_forward_hook(lambda _, arguments, out: encoded.append(len(arguments[0])))
    for i in range(len(order)):
        ids = order.batch(i)
        assert (family[ids].reshape(-1, 8) == family[ids].reshape(-1, 8)[:, :1]).all()
        module(batch_of(data, ids))
    assert sum(encoded) == len(data.train_ids)


def test_batches_of_whole_families_form_every_pair_of_the_list_with_a_fortieth_of_its_encodings_or_less():
    data = small_data(families_of={"train": 6, "val": 2, "test": 2}, per_person=PICTURES)
    family, train = data.columns["family"], data.train_ids
    listed = {(i, j) for i, j in itertools.combinations(train.tolist(), 2) if family[i] == family[j]}
    size = FAMILY_PICTURES
    order = pxk(train, family[train], samples_per_identity=size, seed=0, epoch=0, global_batch_size=2 * size)
    formed = [
        tuple(sorted(pair)) for b in range(len(order)) for pair in itertools.combinations(order.batch(b).tolist(), 2)
    ]
    assert sorted(pair for pair in formed if family[pair[0]] == family[pair[1]]) == sorted(listed)
    assert 2 * len(listed) / len(order.ids) == 2 * PICTURES - 1 > 40


def test_the_pair_list_preset_encodes_two_pictures_for_each_pair():
    data = small_data(families_of={"train": 20, "val": 2, "test": 2}, per_person=6)
    module = small_module(small_config(arcface_weight=0.0, pair_weight=1.0, pair_strangers=False), data)
    family, train = data.columns["family"], data.train_ids
    order = pxk(train, family[train], samples_per_identity=2, seed=0, epoch=0, global_batch_size=32)
    losses = module(batch_of(data, order.batch(0)))
    assert float(losses["pairs_per_picture"]) == 0.5
    assert sorted(order.ids.tolist()) == train.tolist()


# Score


def rows_of(data: DataInfo, embedding: np.ndarray, name: str) -> dict[str, np.ndarray]:
    ids = ids_of(data, name)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return {"embedding": unit[ids].astype(np.float32), "sample_id": ids}


def test_a_model_that_knows_families_but_no_persons_fails_on_twins_alone():
    data = small_data(families_of={"train": 4, "val": 12}, per_person=6)
    rng = np.random.default_rng(0)
    embedding = np.eye(data.columns["family"].max() + 1)[data.columns["family"]]
    embedding = embedding + 0.05 * rng.normal(size=embedding.shape)
    metrics = small_module(data=data).score(rows_of(data, embedding, "val"))
    assert metrics["eer_random"] == 0.0
    assert 0.42 < metrics["eer_twin"] < 0.58
    assert metrics["eer_twin_low"] < metrics["eer_twin"] < metrics["eer_twin_high"]
    assert 0.42 < metrics["auc_twin"] < 0.58
    assert 0.0 < metrics["eer_mixed"] < metrics["eer_twin"] < metrics["eer_hard_twin"]
    assert metrics["accuracy_random"] > 0.7 and metrics["accuracy_twin"] == pytest.approx(0.5, abs=0.1)
    assert (metrics["pairs_same"], metrics["pairs_twin"]) == (12 * 2 * 15, 12 * 36)


def test_the_threshold_is_learned_from_validation_saved_with_the_weights_and_used_on_the_test_set():
    data = small_data(per_person=6)
    embedding = np.random.default_rng(0).normal(size=(len(data.columns["person"]), 8))
    module = small_module(data=data)
    assert "accuracy_twin" not in module.score(rows_of(data, embedding, "test"))  # before any validation
    module.score(rows_of(data, embedding, "val"))
    copy = small_module(data=data)
    copy.load_state_dict(module.state_dict())
    found = copy.score(rows_of(data, embedding, "test"))
    rows = rows_of(data, embedding, "test")
    scores = copy.exam.scores(rows["embedding"], rows["sample_id"])
    same, twin = scores.of(protocol.SAME).score, scores.of(protocol.TWIN).score
    threshold = float(module.threshold)
    assert found["accuracy_twin"] == pytest.approx(((same >= threshold).mean() + (twin < threshold).mean()) / 2)
    assert float(copy.threshold) == threshold


def test_a_set_without_twins_is_scored_on_strangers():
    data = small_data()
    alone = DataInfo({**data.columns, "family": data.columns["person"]}, data.vocabulary, data.train_ids)
    columns = {**alone.columns}
    texts = [" ".join(w for w in text.split() if w[0] != "t") for text in data.vocabulary["pairs"]]
    module = small_module(data=DataInfo(columns, {**data.vocabulary, "pairs": texts}, data.train_ids))
    assert module.monitor == ("auc_random", "max")
    embedding = np.eye(columns["person"].max() + 1)[columns["person"]]
    metrics = module.score(rows_of(data, embedding, "val"))
    assert metrics["auc_random"] == 1.0 and "auc_twin" not in metrics


# Pairs


def scores_of(rng: np.random.Generator, count: int, kind: int, families_count: int) -> protocol.Scores:
    score = np.round(rng.normal(kind == 0, 1, count), 1)  # with ties
    one = rng.integers(families_count, size=count)
    other = one if kind < 2 else (one + rng.integers(1, families_count, size=count)) % families_count
    return protocol.Scores(score, np.full(count, kind), np.stack([one, other], axis=1))


def test_metrics_are_those_of_the_definitions():
    rng = np.random.default_rng(0)
    genuine, impostor = scores_of(rng, 300, 0, 10), scores_of(rng, 1200, 2, 10)
    found = protocol.metrics(genuine, impostor, suffix="random", draws=0)
    rates = compute_error_rates(genuine.score, impostor.score)
    assert found["eer_random"] == rates.equal_error_rate().rate
    assert found["tar_at_far_1e-3_random"] == rates.tar_at_far(0.001)
    wins = (genuine.score[:, None] > impostor.score) + 0.5 * (genuine.score[:, None] == impostor.score)
    assert found["auc_random"] == pytest.approx(wins.mean(), abs=1e-12)
    few = protocol.metrics(genuine, scores_of(rng, 99, 1, 10), suffix="twin", draws=0)
    assert set(few) == {"eer_twin", "auc_twin", "d_prime_twin"}  # 99 impostors say nothing about one in a hundred


def test_the_bootstrap_draws_families_and_counts_their_pairs_as_often():
    families_of_pairs = np.array([[0, 0], [1, 1], [0, 1], [1, 2], [2, 2]])
    for weight in protocol._resamples(families_of_pairs, 20):
        counts = np.array([weight[0], weight[1], weight[4]])
        assert counts.sum() == 3
        assert weight[2] == counts[0] * counts[1] and weight[3] == counts[1] * counts[2]


def test_each_pair_is_listed_once_with_its_kind_and_strangers_are_spread_evenly():
    person = [f"{i // 4}" for i in range(80)]
    family = [f"{i // 8}" for i in range(80)]
    drawn = protocol.draw(person, family, strangers=6, seed=1)
    listed = [(i, j, kind) for i, found in enumerate(drawn) for kind, j in found]
    assert all(i < j for i, j, _ in listed) and len({(i, j) for i, j, _ in listed}) == len(listed)
    for i, j, kind in listed:
        assert kind == (0 if person[i] == person[j] else 1 if family[i] == family[j] else 2)
    kinds = [kind for _, _, kind in listed]
    assert kinds.count(protocol.SAME) == 20 * 6 and kinds.count(protocol.TWIN) == 10 * 16
    assert kinds.count(protocol.RANDOM) == pytest.approx(80 * 6, rel=0.05)
    in_strangers = np.bincount([k for i, j, kind in listed if kind == 2 for k in (i, j)], minlength=80)
    assert in_strangers.min() >= 4
    assert drawn == protocol.draw(person, family, strangers=6, seed=1)
    assert drawn != protocol.draw(person, family, strangers=6, seed=2)


def test_pairs_survive_packing_and_those_of_a_picture_left_out_are_dropped():
    data = small_data()
    whole = protocol.PairList.read(data.columns, data.vocabulary)
    gone = int(whole.one[0])
    kept = np.delete(np.arange(len(data.columns["number"])), gone)
    columns = {name: values[kept] for name, values in data.columns.items()}
    rest = protocol.PairList.read(columns, data.vocabulary)
    touched = int(((whole.one == gone) | (whole.other == gone)).sum())
    assert len(rest.one) == len(whole.one) - touched < len(whole.one)
    before = {(int(i), int(j)) for i, j in zip(whole.one, whole.other, strict=True)}
    assert {(int(kept[i]), int(kept[j])) for i, j in zip(rest.one, rest.other, strict=True)} <= before
    assert whole.sha256() == protocol.PairList.read(data.columns, data.vocabulary).sha256() != rest.sha256()


def test_pairs_never_cross_sets():
    data = small_data()
    pairs = protocol.PairList.read(data.columns, data.vocabulary)
    sets = data.columns["set"]
    assert np.array_equal(sets[pairs.one], sets[pairs.other])
    assert not np.isin(pairs.one, data.train_ids).any()
    counted = sum(len(pairs.within(ids_of(data, name)).one) for name in ("val", "test"))
    assert counted == len(pairs.one) > 500


# Listing and packing


def raw_folder(root: Path, people_of: dict[str, int], pairs: object, *, side: int = 64) -> Path:
    """Write pictures `root/<person>/<i>.png` with both files of the listing."""
    listing = {}
    for number, (person, count) in enumerate(people_of.items()):
        (root / person).mkdir(parents=True)
        listing[person] = [f"{person}/{i}.png" for i in range(count)]
        for i, name in enumerate(listing[person]):
            Image.new("RGB", (side, side), (number, i, 9)).save(root / name)
    (root / DATASET).write_text(json.dumps(listing))
    (root / PAIRS).write_text(json.dumps(pairs))
    return root


NAMES = [f"9{i:02d}{twin}" for i in range(10) for twin in (4, 5)]
TWINS = [[NAMES[i], NAMES[i + 1]] for i in range(0, 20, 2)]
CUT = Cut(0.2, 0.2, 0)


def packed(raw: Path, config: Config | None = None) -> list[Sample]:
    return list(samples(raw, config or Config()))


def by_person(found: list[Sample]) -> dict[str, tuple[str, str]]:
    return {str(s.columns["person"]): (str(s.columns["family"]), str(s.columns["set"])) for s in found}


def test_the_seeds_files_and_folders_of_persons_give_the_same_people(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 3), TWINS)
    listed = packed(raw)
    (raw / DATASET).unlink()
    assert [(s.key, s.columns) for s in packed(raw)] == [(s.key, s.columns) for s in listed]
    assert len(listed) == 60
    assert listed[0].key == "9004/0.png" and by_person(listed)["9005"][0] == "9004"


def test_paths_of_another_machine_are_found_by_their_tail(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 2), TWINS)
    before = [s.key for s in packed(raw)]
    listing = json.loads((raw / DATASET).read_text())
    moved = {person: [f"/kaggle/input/nd-twin/{path}" for path in paths] for person, paths in listing.items()}
    (raw / DATASET).write_text(json.dumps(moved))
    assert [s.key for s in packed(raw)] == before


def test_no_family_is_in_two_sets_and_a_triplet_is_one_family(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9999"], 2), [*TWINS, ["9999", NAMES[1]]])
    everybody = people(raw, singles="fail", cut=CUT)
    set_of: dict[str, set[str]] = {}
    for person in everybody:
        set_of.setdefault(person.family, set()).add(person.set)
    assert len(set_of) == 10 and all(len(sets) == 1 for sets in set_of.values())
    assert [len([1 for sets in set_of.values() if name in sets]) for name in ("train", "val", "test")] == [6, 2, 2]
    assert {p.name for p in everybody if p.family == NAMES[0]} == {NAMES[0], NAMES[1], "9999"}
    assert families("abcd", [("b", "c"), ("c", "d")]) == {"a": "a", "b": "b", "c": "b", "d": "b"}


def test_sets_that_the_files_name_hold(tmp_path):
    raw = raw_folder(
        tmp_path / "raw", dict.fromkeys(NAMES, 2), {"train": TWINS[:6], "val": TWINS[6:8], "test": TWINS[8:]}
    )
    found = by_person(packed(raw))
    assert [found[pair[0]][1] for pair in TWINS] == ["train"] * 6 + ["val"] * 2 + ["test"] * 2
    (raw / PAIRS).write_text(json.dumps(TWINS))
    listing = json.loads((raw / DATASET).read_text())
    (raw / DATASET).unlink()
    (raw / f"train_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[:16]}))
    (raw / f"external_test_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[16:]}))
    found = by_person(packed(raw))
    assert {name for name, (_, where) in found.items() if where == "test"} == set(NAMES[16:])
    assert sum(where == "val" for _, where in found.values()) == 4


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([*TWINS, ["9004", "9004"]], "pair 11: '9004' is paired with itself"),
        ([*TWINS, ["9005", "9004"]], r"'9005' and '9004' are listed before, in .*pair 1\. Leave one"),
        ([*TWINS, ["9004", "9404x"]], "'9404x' is not in the data set. Nearest: "),
        (TWINS[1:], r"person '9004' has no twin .*\(2 of 20 persons have none\).*packing.singles=keep"),
        ([*TWINS, ["9004"]], r"pair 11: expected two persons.*found \[\"9004\"\]"),
        ({"tset": TWINS}, "unknown set 'tset'. Expected test"),
        ("9004", "expected a list of pairs"),
        ({"train": TWINS, "test": [["9004", "9015"]]}, "person '9004' is in set train and in set test"),
    ],
)
def test_bad_pairs_are_refused_in_one_sentence_with_the_place(tmp_path, pairs, said):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), pairs)
    with pytest.raises(UserError, match=said):
        packed(raw)


def test_a_bad_listing_is_refused_with_the_place(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    for content, said in (
        ("{", "not JSON"),
        ("[]", "expected {person"),
        ('{"9004": []}', "person '9004': expected a list of one or more paths"),
    ):
        (raw / DATASET).write_text(content)
        with pytest.raises(UserError, match=said):
            packed(raw)
    (raw / DATASET).rename(raw / f"trian_{DATASET}")
    with pytest.raises(UserError, match=f"expected a name of {DATASET}, train_"):
        packed(raw)


def test_persons_without_a_twin_are_kept_or_left_out_if_asked(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9997", "9998"], 1), TWINS)
    config = Config()
    config.packing.singles = "skip"
    assert len(packed(raw, config)) == 20
    config.packing.singles = "keep"
    assert by_person(packed(raw, config))["9998"][0] == "9998"


def test_too_few_families_to_train_on_is_an_error(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES[:10], 1), TWINS[:5])
    with pytest.raises(UserError, match="5 families, of which 1 are left to train"):
        packed(raw)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but there is no such file"),
        ("empty", "the file is empty"),
        ("text", "no image"),
        ("half", "cannot be decoded"),
        ("tiny", r"40 x 64 pixels are no face crop: expected sides of 48 or more"),
        ("strip", r"300 x 64 pixels are no face crop.*at most 1\.6 shorter"),
    ],
)
def test_a_picture_that_is_no_face_crop_is_refused_with_the_reason(tmp_path, content, reason):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    path = raw / "9004/0.png"
    size = {"tiny": (40, 64), "strip": (300, 64)}.get(content, (64, 64))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"a face", "half": data[: len(data) // 2]}.get(content, data))
    if content == "missing":
        path.unlink()
    (sample,) = [s for s in packed(raw) if s.columns["person"] == "9004"]
    with pytest.raises(BadRecord, match=reason):
        sample.load()


def test_jpeg_and_png_are_kept_byte_for_byte_and_others_become_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (60, 64), dtype=np.uint8)
    for name, picture, kept in (
        ("a.jpg", Image.fromarray(pixels), True),
        ("b.png", Image.fromarray(pixels).convert("RGB"), True),
        ("c.pgm", Image.fromarray(pixels), False),
        ("d.png", Image.fromarray(pixels).convert("RGBA"), False),
    ):
        picture.save(tmp_path / name)
        stored = load(tmp_path / name, 48, 1.6)["image"]
        assert isinstance(stored, bytes)
        assert (stored == (tmp_path / name).read_bytes()) == kept, name
        if not kept:
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored)).convert("L")), pixels)


def test_a_picture_of_16_bits_is_refused_and_not_cut_to_white(tmp_path):
    Image.fromarray(np.full((64, 64), 4000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(BadRecord, match="mode I;16, whose range is unknown"):
        load(tmp_path / "deep.png", 48, 1.6)


def test_orl_faces_pack_as_strangers():
    config = Config()
    config.packing.singles, config.packing.val_share, config.packing.test_share = "keep", 0.25, 0.5
    found = packed(shared_faces(), config)
    assert len(found) == 400
    data = [str(s.columns["pairs"]) for s in found if s.columns["set"] == "test"]
    assert len(data) == 200
    words = " ".join(data).split()
    assert sum(word[0] == "s" for word in words) == 20 * 45
    assert "t" not in {word[0] for word in words}
    with Image.open(io.BytesIO(found[0].load()["image"])) as picture:  # type: ignore[arg-type]
        assert picture.size == (92, 112)


# Synthetic faces


def test_synthetic_faces_are_the_same_whoever_draws_them_and_pack(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=2 * FAMILY_PICTURES + 6, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.jp*g"))
    assert len(files) == 2 * FAMILY_PICTURES + 6
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    assert json.loads((tmp_path / "once" / PAIRS).read_text()) == [
        ["00010", "00011"],
        ["00020", "00021"],
        ["00030", "00031"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(UserError, match="already holds files"):
        synthesize(tmp_path / "once", count=48, seed=3)
    with pytest.raises(UserError, match="expected an even number"):
        synthesize(tmp_path / "odd", count=47, seed=3)


def test_twins_share_a_genome_and_have_marks_of_their_own_down_to_difficulty_one():
    one, other = (draw_face(0, 5, twin, 0.3) for twin in (0, 1))
    stranger = draw_face(0, 6, 0, 0.3)
    assert np.array_equal(one.texture, other.texture) and one.moles[:2] == other.moles[:2]
    assert one.moles[2:] != other.moles[2:]
    apart = [sum(abs(one.traits[n] - face.traits[n]) for n in one.traits) for face in (other, stranger)]
    assert 0 < apart[0] < 0.5 * apart[1]
    same, again = (draw_face(0, 5, twin, 1.0) for twin in (0, 1))
    assert same.traits == again.traits and not any(mole.darkness for mole in same.moles[2:])


def test_pictures_of_strangers_differ_more_than_those_of_twins():
    def mean_face(family: int, twin: int) -> np.ndarray:
        shots = itertools.islice(pictures(0, family, twin), 12)
        return np.mean(
            [np.asarray(Image.open(io.BytesIO(shot)).convert("L"), float)[24:76, 24:72] for shot in shots], 0
        )

    found = {(f, t): mean_face(f, t) for f in range(6) for t in range(2)}

    def apart(a: tuple[int, int], b: tuple[int, int]) -> float:
        x, y = (found[k] - found[k].mean() for k in (a, b))
        return float(1 - (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))

    twins = np.mean([apart((f, 0), (f, 1)) for f in range(6)])
    strangers = np.mean([apart((f, 0), (g, 0)) for f in range(6) for g in range(f)])
    assert twins < 0.5 * strangers
