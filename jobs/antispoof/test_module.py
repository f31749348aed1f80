"""The antispoof module: maps, gradients, scoring, refusals and warnings."""

import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases.antispoof import ASV, make_batch, make_config, make_data, make_module, make_noise
from trainyard.errors import UserError
from trainyard.train.data_parallel import list_statistics
from trainyard.train.module import SampleSource
from trainyard.train.step import enable_activation_checkpointing

from .module import build
from .pack import LOGISTIC


def test_maps_are_computed_in_float32_whatever_the_precision() -> None:
    module, inputs = make_module(frontend={"name": "lfcc60"}, sound={"rate_hz": 16000}).eval(), make_batch(4)
    plain = module.compute_maps(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.compute_maps(inputs), plain)
        rows = module.predict(inputs)
    assert plain.dtype == rows["score"].dtype == torch.float32


def test_evaluation_is_deterministic_and_needs_no_label() -> None:
    module = make_module(disturb={"reverb": 1.0, "rawboost": 1.0, "codec": 1.0, "mask": 1.0})
    inputs = make_batch(4)
    changed, plain = module.train().compute_maps(inputs), module.eval().compute_maps(inputs)
    assert not torch.allclose(changed, plain, atol=1e-2)
    module.frontend(inputs["wave"])
    assert torch.equal(plain, module.frontend(inputs["wave"]))
    del inputs["label"], inputs["noise"]
    assert torch.equal(module.predict(inputs)["score"], module.predict(inputs)["score"])


def test_the_network_adds_to_the_pooled_regression_that_has_not_seen_the_fold() -> None:
    inputs = make_batch(4) | {"fold": torch.tensor([1, 2, 2, 1])}
    data = make_data([1, 0] * 8, ["-", "A01"] * 8, ["train"] * 8 + ["val"] * 8)
    weights, bias = np.random.default_rng(0).normal(size=(3, 258)), [0.5, -1.0, 2.0]
    state = json.dumps({"weights": weights.tolist(), "bias": bias})
    fitted = replace(data, artifacts={**data.artifacts, LOGISTIC: state})
    torch.manual_seed(0)
    alone, module = make_module(), build(make_config(packing={"logistic": True}), fitted)
    assert module.state_dict().keys() == alone.state_dict().keys()
    start_B = module.eval().predict(inputs)["score"].double()
    module.load_state_dict(alone.state_dict())
    maps_BFT = make_module(frontend={"mean": "none"}).eval().compute_maps(inputs).double()
    pooled_BK = torch.cat([maps_BFT.mean(2), maps_BFT.std(2)], 1)
    log_odds_BR = pooled_BK @ torch.from_numpy(weights).T + torch.tensor(bias)
    torch.testing.assert_close(start_B, log_odds_BR[:, 0], rtol=1e-4, atol=1e-3)
    expected_B = alone.eval().predict(inputs)["score"] + log_odds_BR[:, 0]
    torch.testing.assert_close(module.eval().predict(inputs)["score"].double(), expected_B, rtol=1e-4, atol=1e-3)
    unseen_B = log_odds_BR[torch.arange(4), inputs["fold"]].float()
    embedding_BD = alone.train().network(alone.compute_maps(inputs))
    expected = alone.decision(embedding_BD, inputs["label"], unseen_B)
    torch.testing.assert_close(module.train()(inputs)["loss"], expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(UserError, match=r"the data was packed without it\. Name the raw files with data\.path"):
        build(make_config(packing={"logistic": True}), data)
    with pytest.raises(UserError, match=r"scores of loss\.name=oc_softmax are cosines\. Use loss\.name=wce"):
        build(make_config(packing={"logistic": True}, loss={"name": "oc_softmax"}), fitted)


def test_every_weight_gets_a_gradient() -> None:
    for sections in (
        {},
        {"loss": {"name": "oc_softmax"}},
        {"model": {"name": "seresnet", "layers": [1, 1, 1, 1]}, "loss": {"name": "am_softmax"}},
    ):
        module = make_module(**sections)
        module(make_batch(4))["loss"].backward()
        assert all(weight.grad is not None for weight in module.parameters())


def test_ranks_exchange_batch_statistics_but_no_windows_or_filters() -> None:
    sent = list_statistics(make_module(frontend={"name": "spec129"}))
    assert all(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in sent)
    assert "network.stem.1.running_mean" in sent


def clone_gradient(weight: nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad.clone()


def test_activation_checkpointing_changes_no_gradient() -> None:
    module, inputs = make_module(), make_batch(6)
    module(inputs)["loss"].backward()
    before = [clone_gradient(weight) for weight in module.parameters()]
    module.zero_grad()
    assert enable_activation_checkpointing(module) == 16
    module(inputs)["loss"].backward()
    assert all(torch.equal(a, clone_gradient(weight)) for a, weight in zip(before, module.parameters(), strict=True))


def test_the_direction_of_one_class_softmax_has_its_own_learning_rate() -> None:
    module = make_module(loss={"name": "oc_softmax", "lr_scale": 3.0})
    groups = module.parameter_groups(0.1)
    assert groups[-1]["params"] == [module.decision.direction_D]
    assert (groups[-1]["weight_decay"], groups[-1]["lr_scale"]) == (0.0, 3.0)
    parameters = [weight for group in groups for weight in cast(list[nn.Parameter], group["params"])]
    assert len(parameters) == len({id(weight) for weight in parameters}) == len(list(module.parameters()))


def test_a_set_is_scored_only_with_its_own_asv_rates() -> None:
    sets = ["train", "train", "val", "val", "test_2019", "test_2019"]
    data = make_data([1, 0] * 3, ["-", "A01"] * 3, sets, asv=json.dumps({"val": vars(ASV)}))
    module = build(make_config(), data)
    scored = {
        name: module.score({"score": np.array([1.0, -1.0]), "sample_id": np.array(ids)})
        for name, ids in (("val", [2, 3]), ("test_2019", [4, 5]))
    }
    assert scored["val"]["min_tdcf_2021"] == pytest.approx(0.0627, abs=1e-4)
    assert "min_tdcf_2021" not in scored["test_2019"]
    assert module.monitor == ("eer", "min")
    figures = module.report_figures({"score": np.array([1.0, -1.0]), "sample_id": np.array([2, 3])})
    assert len(figures) == 2 and all(png.startswith(b"\x89PNG") for png in figures.values())


def test_the_regression_beside_a_network_sees_what_front_ends_subtract() -> None:
    labels, sets = [1, 0] * 16, ["train"] * 16 + ["test"] * 16
    data = make_data(labels, ["-", "A01"] * 16, sets)
    module = build(make_config(frontend={"mean": "utterance"}), data).eval()
    wave = make_noise(32, 4000) * (1 + torch.tensor(labels))[:, None]  # bona fide speech is louder
    training = SampleSource(data, np.arange(16), lambda: iter([{"wave": wave[:16]}]))
    evaluated = SampleSource(data, np.arange(16, 32), lambda: iter([{"wave": wave[16:]}]))
    rows = {"score": np.zeros(16), "sample_id": evaluated.ids}
    found = module.score_baselines(rows, evaluated, lambda: training)
    assert found["pooled logistic"].metrics["eer"] == 0


@pytest.mark.parametrize("frames", [40, 3999, 9000])
def test_samples_are_drawn_from_the_wave_that_the_network_gets_however_short_they_are(frames: int) -> None:
    """packing.min_s=0.05 lets recordings pass that are shorter than a window of the front end."""
    waves = [np.random.default_rng(i).integers(-9000, 9000, frames).astype(np.int16) for i in range(16)]
    labels = make_data([1, 0] * 8, ["-", "A01"] * 8, ["val"] * 16)
    data = replace(labels, read=lambda name, ids: [waves[i] for i in ids])
    module = build(make_config(), data)
    seen: list[torch.Tensor] = []
    module.spectra.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    figures = module.sample_figures({"sample_id": np.arange(16), "score": np.arange(16.0)})
    assert len(figures) == 4 and len(seen) == 16
    expected = np.resize(waves[0][:4000], 4000).astype(np.float32) / 2**15
    assert torch.equal(seen[0], torch.from_numpy(expected)[None]), "the first, bona fide and with the lowest score"


def test_a_network_that_does_not_fit_the_front_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"resnet18_oc takes 60 bins.*Use frontend.name=lfcc60"):
        make_module(model={"name": "resnet18_oc"})
    with pytest.raises(UserError, match=r"model.layers=\[2\]: expected four counts"):
        make_module(model={"name": "seresnet", "layers": [2]})
    wave: dict[str, object] = {"name": "wave", "mean": "none"}
    aasist: dict[str, object] = {"name": "aasist"}
    for sections in ({"model": aasist}, {"frontend": wave}):
        with pytest.raises(UserError, match=r"aasist, and no other network, takes the waveform.*run antispoof_aasist"):
            make_module(**sections)
    with pytest.raises(UserError, match=r"has no bins\. Use frontend\.mean=none"):
        make_module(frontend=wave | {"mean": "utterance"}, model=aasist)
    with pytest.raises(UserError, match=r"no bins to mask\. Use disturb\.mask=0"):
        make_module(frontend=wave, model=aasist, disturb={"mask": 0.5})


def test_resampled_files_are_logged_and_a_difference_between_the_classes_is_warned_about() -> None:
    from loguru import logger

    lines: list[str] = []
    handle = logger.add(lambda message: lines.append(str(message)), format="{level} {message}")
    data = make_data([1, 0] * 2, ["-", "A01"] * 2, ["train"] * 4)
    data.columns["source_rate_hz"][[1, 3]] = 44100
    build(make_config(), data)
    logger.remove(handle)
    assert "INFO resampled to 8000 Hz when packed: 2 of 44100 Hz\n" in lines
    assert any("0% of bona fide and 100% of spoofed files were resampled" in line for line in lines)
