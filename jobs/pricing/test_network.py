"""The network, its encoder and its learning rates."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import DebertaV2Model

from tests.cases.pricing import make_batch, make_config, make_module, record_saved_bytes
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.train.module import DataInfo
from trainyard.train.step import enable_activation_checkpointing
from trainyard.train.warm_start import find_file, load_weights
from trainyard.train.weights_file import read_weights

from . import tokenizer
from .config import ModelSettings
from .module import PricingModule, build, mask_tokens
from .network import build_random_encoder
from .pack import splits


def flatten_gradients(module: nn.Module) -> torch.Tensor:
    """Return the gradients of all parameters as one vector; every parameter must have one."""
    gradients = [p.grad for p in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def make_encoder(*, vocabulary: int) -> DebertaV2Model:
    model = ModelSettings(dims=16, layers=1, heads=2, feedforward=32, position_buckets=8, dropout=0.0)
    return build_random_encoder(model, vocabulary=vocabulary, max_tokens=48)


def test_padding_changes_no_prediction(data: ShardSet) -> None:
    module = make_module(data).eval()
    batch = make_batch(data, list(range(6)))
    wider = {**batch, "tokens": torch.nn.functional.pad(batch["tokens"], (0, 9))}
    with torch.no_grad():
        torch.testing.assert_close(
            module.predict(batch)["predicted"], module.predict(wider)["predicted"], rtol=1e-5, atol=0
        )
        shortest = int(batch["tokens_count"].argmin())
        alone = make_batch(data, [shortest])
        torch.testing.assert_close(
            module.predict(batch)["predicted"][shortest], module.predict(alone)["predicted"][0], rtol=1e-5, atol=0
        )


def test_activation_checkpointing_gives_the_same_loss_and_gradients_with_less_memory(data: ShardSet) -> None:
    config = make_config()
    config.model.dropout = 0.2
    batch = make_batch(data, list(range(24)))
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        train_ids = splits(data.columns, data.vocabulary, config)["train"]
        module = build(config, DataInfo.from_shards(data, train_ids)).train()
        if recompute:
            assert enable_activation_checkpointing(module) == config.model.layers
        with record_saved_bytes() as saved:
            torch.manual_seed(1)
            loss = module(batch)["loss"]
        loss.backward()
        results.append((loss.item(), flatten_gradients(module), sum(saved.values())))
    (loss, gradient, saved_bytes), (same_loss, same_gradient, fewer_bytes) = results
    assert loss == pytest.approx(same_loss, abs=1e-5)
    torch.testing.assert_close(gradient, same_gradient, rtol=0, atol=1e-5)
    assert fewer_bytes < 0.5 * saved_bytes


def test_the_head_computes_in_float32_even_if_the_encoder_does_not(data: ShardSet) -> None:
    module = make_module(data).eval()
    batch = make_batch(data, list(range(8)))
    dtypes: list[torch.dtype] = []
    module.network.head[0].register_forward_hook(lambda m, i, o: dtypes.extend([i[0].dtype, o.dtype]))
    with torch.no_grad():
        exact = module.predict(batch)["predicted"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = module.predict(batch)["predicted"]
    assert dtypes == [torch.float32] * 4 and rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)  # the encoder did compute in bfloat16
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0)


def test_learning_rates_fall_from_the_head_to_the_embeddings_and_cover_every_weight(data: ShardSet) -> None:
    config = make_config()
    config.rates.encoder, config.rates.layer_decay = 0.02, 0.5
    module = make_module(data, config)
    groups = cast(list[dict[str, Any]], module.parameter_groups(0.1))
    rate = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(rate) == sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    encoder = cast(Any, module.network.encoder)
    assert rate[id(module.network.head[0].weight)] == 1.0
    assert rate[id(encoder.encoder.layer[1].output.dense.weight)] == pytest.approx(0.02)
    assert rate[id(encoder.encoder.layer[0].output.dense.bias)] == pytest.approx(0.01)
    assert rate[id(encoder.get_input_embeddings().weight)] == pytest.approx(0.005)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in module.parameters() if p.ndim >= 2}
    config.rates.freeze_embeddings = True
    frozen = make_module(data, config)
    groups = cast(list[dict[str, Any]], frozen.parameter_groups(0.1))
    trained = {id(p) for group in groups for p in group["params"]}
    assert id(cast(Any, frozen.network.encoder).get_input_embeddings().weight) not in trained


def test_masking_replaces_only_words_and_drops_titles_as_a_whole() -> None:
    token_BL = torch.tensor([[1, 9, 8, 7, 6, 2, 0], [1, 5, 6, 2, 0, 0, 0]])
    all_masked = mask_tokens(token_BL, torch.tensor([2, 1]), share=1.0, titles=0.0)
    assert all_masked.tolist() == [[1, 3, 3, 3, 3, 2, 0], [1, 3, 3, 2, 0, 0, 0]]
    titles = mask_tokens(token_BL, torch.tensor([2, 1]), share=0.0, titles=1.0)
    assert titles.tolist() == [[1, 3, 3, 7, 6, 2, 0], [1, 3, 6, 2, 0, 0, 0]]


def start(module: PricingModule) -> PricingModule:
    """Load what model.encoder names, as a run does."""
    option, source = module.start_file
    adapted = module.adapt_weights(read_weights(find_file(source, option), option=option).tensors)
    load_weights(module, adapted, source=option)
    return module


def test_an_encoder_from_a_local_folder_has_the_weights_saved_there(data: ShardSet, tmp_path: Path) -> None:
    pieces = tokenizer.parse(data.artifacts["tokenizer"]).get_vocab_size()
    saved = make_encoder(vocabulary=pieces + 7)
    saved.save_pretrained(tmp_path / "there")
    config = make_config()
    config.model.encoder = str(tmp_path / "there")
    found = start(make_module(data, config)).network.encoder.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in saved.state_dict().items())
    published: Any = DebertaV2Model.from_pretrained(tmp_path / "there")
    ours: Any = start(make_module(data, config)).network.encoder
    batch = make_batch(data, list(range(6)))
    mask = (torch.arange(batch["tokens"].shape[1]) < batch["tokens_count"][:, None]).long()
    with torch.no_grad():
        expected, states = (
            encoder(input_ids=batch["tokens"].long(), attention_mask=mask).last_hidden_state
            for encoder in (published.eval(), ours.eval())
        )
    torch.testing.assert_close(states[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    torch.save({f"deberta.{name}": value for name, value in saved.state_dict().items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((tmp_path / "there" / "config.json").read_text())
    config.model.encoder = str(tmp_path)
    assert torch.equal(
        start(make_module(data, config)).network.encoder.state_dict()["embeddings.LayerNorm.weight"], torch.ones(16)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 20}, "it has 20 word embeddings, but the tokenizer has"),
        ({"model_type": "bert"}, "config.json has model_type 'bert', expected 'deberta-v2'"),
        ({"hidden_size": 32}, "tensors have other shapes:\n  'network.encoder.embeddings"),
        ({"num_hidden_layers": 3}, "it contains no 'network.encoder.encoder.layer.1."),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused_with_the_reason(
    change: dict[str, Any], message: str, data: ShardSet, tmp_path: Path
) -> None:
    pieces = tokenizer.parse(data.artifacts["tokenizer"]).get_vocab_size()
    make_encoder(vocabulary=pieces).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    config = make_config()
    config.model.encoder = str(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        start(make_module(data, config))
