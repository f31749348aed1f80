"""The self-attention, compared with Transformers' own and with the formula."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DebertaV2Config, DebertaV2Model

from tests.cases.pricing import make_batch, make_module, record_saved_bytes
from trainyard.data.shards import ShardSet

from .attention import WindowedSelfAttention, replace_attention
from .config import ModelSettings
from .network import build_random_encoder

HEADS = 2
LOG_BUCKETS = {"position_buckets": 8, "max_position_embeddings": 48}  # distances from 5 on share buckets
CLAMPED = {"position_buckets": -1, "max_relative_positions": 6, "max_position_embeddings": 48}


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of all operators that run, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def make_original(*, dims: int, terms: list[str], dropout: float = 0.0, **settings: Any) -> DebertaV2Model:
    """Return an encoder as Transformers builds it, in float64 and with position vectors that matter."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        **{"vocab_size": 50, "hidden_size": HEADS * dims, "num_hidden_layers": 2, "num_attention_heads": HEADS},
        **{"intermediate_size": 16, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
        **{"relative_attention": True, "pos_att_type": terms, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0},
        **{"position_biased_input": False, "pad_token_id": 0, "initializer_range": 0.4},
    }
    return DebertaV2Model(DebertaV2Config(**common, **settings)).double()


def run(encoder: DebertaV2Model, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the states of a padded batch, and the gradient of every parameter."""
    generator = torch.Generator().manual_seed(length)
    token_BL = torch.randint(1, 50, (3, length), generator=generator)
    count_B = torch.tensor([length, max(1, length // 2), max(1, length - 1)])
    mask_BL = torch.arange(length) < count_B[:, None]
    state_BLN = encoder(input_ids=token_BL * mask_BL, attention_mask=mask_BL.long()).last_hidden_state
    direction = torch.randn(state_BLN.shape, generator=generator, dtype=state_BLN.dtype)
    (state_BLN * direction * mask_BL[:, :, None]).sum().backward()
    return state_BLN[mask_BL], {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("positions", [LOG_BUCKETS, CLAMPED], ids=["log buckets", "clamped"])
@pytest.mark.parametrize(
    ("dims", "terms", "shared"),  # sqrt(dims * (terms + 1)) is whole, because Transformers rounds it to float32
    [(12, ["p2c", "c2p"], True), (12, ["p2c", "c2p"], False), (8, ["c2p"], True), (8, ["p2c"], False)],
)
def test_states_and_gradients_equal_those_of_gather_for_any_length_and_padding(
    positions: dict[str, int], dims: int, terms: list[str], shared: bool
) -> None:
    original = make_original(dims=dims, terms=terms, share_att_key=shared, **positions)
    for length in (1, 2, 13, 40):
        expected, gradients = run(copy.deepcopy(original), length)
        state, same_gradients = run(replace_attention(copy.deepcopy(original)), length)
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        assert gradients.keys() == same_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-10, atol=1e-11, msg=name)


def test_scores_equal_the_formula_term_by_term() -> None:
    original = make_original(dims=12, terms=["p2c", "c2p"], share_att_key=True, **CLAMPED)
    attention = cast(Any, replace_attention(original)).encoder.layer[0].attention.self
    assert isinstance(attention, WindowedSelfAttention)
    length, span, dims = 9, 6, 12
    state_LN = torch.randn(length, HEADS * dims, dtype=torch.float64)
    position_PN = torch.randn(2 * span, HEADS * dims, dtype=torch.float64)
    distance_LL = torch.arange(length)[:, None] - torch.arange(length)
    found, _ = attention(
        state_LN[None], torch.ones(1, 1, length, length), relative_pos=distance_LL[None], rel_embeddings=position_PN
    )
    query, key, value = (p(state_LN) for p in (attention.query_proj, attention.key_proj, attention.value_proj))
    position_query, position_key = attention.query_proj(position_PN), attention.key_proj(position_PN)
    for head in range(HEADS):
        part = slice(head * dims, (head + 1) * dims)
        for i in range(length):
            scores = []
            for j in range(length):
                delta = min(max(i - j + span, 0), 2 * span - 1)  # equation 3
                terms = [query[i, part] @ key[j, part], query[i, part] @ position_key[delta, part]]
                terms.append(key[j, part] @ position_query[delta, part])
                scores.append(sum(terms) / math.sqrt(3 * dims))
            context = torch.stack(scores).softmax(0) @ value[:, part]
            torch.testing.assert_close(found[0, i, part], context, rtol=0, atol=1e-12)


def test_a_training_step_neither_gathers_nor_scatters_scores(data: ShardSet) -> None:
    module, batch = make_module(data), make_batch(data, list(range(8)))
    with OperatorRecorder() as recorder:
        module(batch)["loss"].backward()
    assert {"bmm", "embedding_dense_backward"} <= recorder.names  # both passes were recorded
    assert [name for name in recorder.names if "scatter" in name or "gather" in name or "index" in name] == []


def test_weights_their_names_and_their_order_are_those_of_transformers() -> None:
    torch.manual_seed(3)
    model = ModelSettings(dims=16, layers=2, heads=2, feedforward=32, position_buckets=8, dropout=0.0)
    ours = build_random_encoder(model, vocabulary=50, max_tokens=48)
    torch.manual_seed(3)
    theirs = DebertaV2Model(ours.config)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert list(ours_state) == list(theirs_state)
    assert [name for name, value in theirs_state.items() if not torch.equal(value, ours_state[name])] == []


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_less_is_kept_for_the_backward_pass_than_with_gather(dropout: float) -> None:
    original = make_original(dims=12, terms=["p2c", "c2p"], dropout=dropout, share_att_key=True, **LOG_BUCKETS).train()
    kept = []
    for encoder in (original, replace_attention(copy.deepcopy(original))):
        with record_saved_bytes() as saved:
            run(encoder, 40)
        kept.append(sum(saved.values()))
    assert kept[1] < kept[0]


def test_dropout_acts_on_attention_and_positions() -> None:
    encoder = replace_attention(make_original(dims=12, terms=["p2c", "c2p"], share_att_key=True, **LOG_BUCKETS))
    for kind in ("dropout", "pos_dropout"):
        changed = copy.deepcopy(encoder).train()
        dropout = getattr(cast(Any, changed).encoder.layer[0].attention.self, kind)
        assert isinstance(dropout, nn.Dropout)
        dropout.p = 0.5
        assert not torch.allclose(run(changed, 13)[0], run(copy.deepcopy(encoder), 13)[0])
