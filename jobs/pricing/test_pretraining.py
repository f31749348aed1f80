"""Masked tokens: what is masked, what the loss depends on, and a run of prices that starts from a run of text."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases.pricing import disable_dropout, make_batch, make_config, make_module
from tests.training import find_differences, load_state, new_run, train, train_whole_and_stopped
from trainyard.cli import main
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError
from trainyard.runs.folder import read_env
from trainyard.train.module import DataInfo
from trainyard.train.warm_start import load_weights

from . import tokenizer
from .module import build
from .network import build_random_encoder
from .pretraining import TextModule

JOBS = Path(__file__).resolve().parents[1]


def make_text_module(data: ShardSet) -> TextModule:
    torch.manual_seed(0)
    module = build(replace(make_config(), objective="text"), DataInfo.from_shards(data, np.arange(data.count)))
    assert isinstance(module, TextModule)
    disable_dropout(module)
    return module


def test_a_seventh_of_the_tokens_is_predicted_and_most_of_them_are_masked(data: ShardSet) -> None:
    module, batch, seen = make_text_module(data), make_batch(data, list(range(300))), []
    module.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    module(batch)
    [(masked_BL, _, place_BK)] = seen
    token_BL = batch["tokens"].long()
    is_changed_BL = masked_BL != token_BL
    assert not (is_changed_BL & (token_BL <= tokenizer.UNK)).any(), "[CLS], [SEP], [UNK] and padding stay"
    assert (is_changed_BL.sum(dim=1) <= place_BK.shape[1]).all()
    kinds = Counter((masked_BL[is_changed_BL] == module.mask).tolist())
    chosen = 0.15 * (token_BL > tokenizer.UNK).sum().item()
    assert kinds[True] == pytest.approx(0.8 * chosen, rel=0.05)  # three standard deviations of 2,000 draws
    assert kinds[False] == pytest.approx(0.1 * chosen, rel=0.25)


def test_every_weight_is_trained_and_without_prices(data: ShardSet) -> None:
    module, batch = make_text_module(data), make_batch(data, list(range(16)))
    module({name: batch[name] for name in ("tokens", "tokens_count", "sample_id")})["loss"].backward()
    assert {name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0} == set()


def test_the_loss_of_a_sample_is_the_same_in_every_evaluation_and_batch(data: ShardSet) -> None:
    module = make_text_module(data).eval()
    with torch.no_grad():
        together = module.predict(make_batch(data, list(range(20))))["loss"]
        alone = torch.cat([module.predict(make_batch(data, [i]))["loss"] for i in range(20)])
    assert len(set(together.tolist())) > 15
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)  # padding changes the rounding


def test_prices_start_from_the_encoder_of_a_text_run_and_the_other_way_round(data: ShardSet) -> None:
    text, price = make_text_module(data), make_module(data)
    for target, source in ((price, text), (text, price)):
        with torch.no_grad():
            next(source.network.encoder.parameters()).add_(1)
        match = load_weights(target, target.adapt_weights(source.state_dict()), source="the test")
        assert all(name.startswith("network.encoder.") for name in match.loaded)
        assert not any(name.startswith("network.encoder.") for name in (*match.new, *match.not_used))
        for mine, theirs in zip(target.network.encoder.parameters(), source.network.encoder.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_tokenizer_without_mask_is_refused(data: ShardSet) -> None:
    artifacts = {**data.artifacts, "tokenizer": data.artifacts["tokenizer"].replace("[MASK]", "[HIDE]")}
    with pytest.raises(UserError, match=r"\[MASK\], which the tokenizer of packing.tokenizer= lacks"):
        build(replace(make_config(), objective="text"), DataInfo({}, {}, np.arange(4), artifacts))


def test_with_start_from_only_the_sizes_of_a_pretrained_encoder_count(data: ShardSet, tmp_path: Path) -> None:
    pieces = tokenizer.parse(data.artifacts["tokenizer"]).get_vocab_size()
    build_random_encoder(make_config().model, vocabulary=pieces, max_tokens=48).save_pretrained(tmp_path)
    config = replace(make_config(), start_from="RUN")
    config.model.encoder = str(tmp_path)
    assert make_module(data, config).start_file == ("", "")


@pytest.mark.slow
def test_a_text_run_resumes_bitwise_predicts_no_prices_and_a_price_run_starts_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = train_whole_and_stopped(tmp_path, "objective=text", job="pricing_smoke", jobs=JOBS)
    assert find_differences(load_state(whole), load_state(stopped)) == []
    raw = str(next(tmp_path.glob("cache/pricing-synthetic-*")))
    for command in (
        ["predict", str(whole), raw, str(tmp_path / "out.csv"), "--jobs", str(JOBS)],
        ["evaluate", str(whole), raw, "--jobs", str(JOBS)],
        ["export", str(whole), str(tmp_path / "out.pt2"), "--format", "torch-export", "--jobs", str(JOBS)],
        ["pricing-baseline", raw, "--results", str(tmp_path), "--runs", str(whole)],
    ):
        assert main(command) == 2
        assert "learned to predict tokens, not prices" in capsys.readouterr().err
    run = new_run(tmp_path, "max_duration=1st", f"start_from={whole}", job="pricing_smoke", jobs=JOBS)
    assert train(run, jobs=JOBS) == 0
    choice = read_env(run)["choices"]["start_from"]
    assert "network.token_bias" in choice["not_used"] and "network.head.0.weight" in choice["new"]
