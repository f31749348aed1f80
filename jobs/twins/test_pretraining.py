"""Self-training on faces without labels, and the runs that start from it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cases.twins import make_batch, make_config, make_data, make_module
from tests.training import find_differences, load_state, new_run, read_run_metrics, train, train_whole_and_stopped
from trainyard.cli import main
from trainyard.runs.folder import read_env
from trainyard.train.warm_start import load_weights

from .config import Config
from .module import build
from .network import DualCrossAttention
from .pretraining import MASKED_SHARE, ImageModule

JOBS = Path(__file__).parents[1]


def make_image_config(stem: str = "patch") -> Config:
    config = make_config()
    config.objective, config.model.stem = "image", stem
    return config


def make_image_module(config: Config | None = None) -> ImageModule:
    torch.manual_seed(0)
    module = build(config or make_image_config(), make_data())
    assert isinstance(module, ImageModule)
    return module


def make_faces_batch(count: int) -> dict[str, Tensor]:
    data = make_data()
    return make_batch(data, data.train_ids[:count])


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_the_network_sees_no_masked_pixel_and_the_loss_no_other(stem: str) -> None:
    module, batch, given = make_image_module(make_image_config(stem)).eval(), make_faces_batch(4), []
    mask_B1HW = module._draw_masks(batch)
    module.backbone.patch_embed.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    module.head.weight.data.zero_()  # predicts 0 everywhere
    module.head.bias.data.zero_()
    loss = module(batch)["loss"]
    assert torch.equal(given[0], torch.where(mask_B1HW, 0, batch["image"]))
    torch.testing.assert_close(loss, batch["image"][mask_B1HW.expand(-1, 3, -1, -1)].abs().mean())


def test_pixels_are_predicted_where_they_are() -> None:
    module, batch = make_image_module().train(), make_faces_batch(16)
    batch["image"] = torch.linspace(0, 1, 32)[:, None].expand(16, 3, 32, 32)  # the same in all: rows rise to 1
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = module(batch)["loss"]
        loss.backward()
        optimizer.step()
    assert loss < 0.05, "the mean of the pixels has 0.25"


@pytest.mark.parametrize(("height", "patch_px", "square_px"), [(32, 8, 8), (192, 16, 32), (448, 16, 80), (64, 8, 8)])
def test_squares_scale_with_the_image_and_six_tenths_of_them_are_masked(
    height: int, patch_px: int, square_px: int
) -> None:
    config = make_image_config()
    config.image.height_px, config.image.width_px, config.model.patch_px = height, height + patch_px, patch_px
    module = make_image_module(config)
    batch = {"image": torch.zeros(3, 3, height, height + patch_px), "sample_id": torch.arange(3)}
    mask_B1HW = module.train()._draw_masks(batch)
    corners = mask_B1HW[:, :, ::square_px, ::square_px]
    assert (corners.float().mean(dim=(1, 2, 3)) - MASKED_SHARE).abs().max() < 1 / corners[0].numel() + 1e-6
    grown = corners.repeat_interleave(square_px, 2).repeat_interleave(square_px, 3)[:, :, :height, : height + patch_px]
    assert torch.equal(grown, mask_B1HW) and not torch.equal(*corners[:2]), "each image has its own"


def test_validation_masks_belong_to_samples_and_training_masks_to_the_generator() -> None:
    module, batch = make_image_module().eval(), make_faces_batch(8)
    part = {name: values[3:5] for name, values in batch.items()}
    assert torch.equal(module._draw_masks(batch)[3:5], module._draw_masks(part))
    first, second = (module.train()._draw_masks(batch) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_a_model_with_labels_starts_from_the_backbone_alone(stem: str) -> None:
    source = make_image_module(make_image_config(stem))
    for weight in source.backbone.state_dict().values():
        weight.add_(1)
    config = make_config()
    config.model.stem = stem
    module = make_module(config)
    match = load_weights(module, module.adapt_weights(source.state_dict()), source="here")
    own = module.network.state_dict()
    for name, weight in source.backbone.state_dict().items():
        assert "num_batches" in name or torch.equal(own[name], weight), name
    assert torch.equal(own["glca.mlp.fc1.weight"], own["blocks.1.mlp.fc1.weight"])
    assert {name.partition(".")[0] for name in match.new}.isdisjoint({"network"})
    again = make_image_module(make_image_config(stem))
    match = load_weights(again, again.adapt_weights(source.state_dict()), source="here")
    assert match.new == ["head.bias", "head.weight"]


def test_only_the_backbone_of_self_attention_trains_and_all_of_it() -> None:
    module = make_image_module()
    module(make_faces_batch(8))["loss"].backward()
    assert [name for name, weight in module.named_parameters() if weight.grad is None] == []
    assert not [name for name, _ in module.named_parameters() if "glca" in name]
    assert isinstance(module.backbone, DualCrossAttention)


@pytest.mark.slow
def test_a_run_without_labels_resumes_bitwise_and_starts_one_with_labels_and_says_that_it_embeds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, stopped = train_whole_and_stopped(tmp_path, "objective=image", job="twins_smoke", jobs=JOBS)
    assert find_differences(load_state(run), load_state(stopped)) == []
    assert [set(line) & {"loss", "auc_twin"} for line in read_run_metrics(run) if "split" in line][-1] == {"loss"}
    raw = next((tmp_path / "cache").glob("twins-synthetic-*"))
    one, other = sorted(raw.rglob("*.jpg"))[:2]
    for words in (
        ["embed", run, raw, tmp_path / "a.safetensors"],
        ["compare", run, one, other],
        ["predict", run, raw, tmp_path / "a.csv"],
        ["evaluate", run, raw],
        ["export", run, tmp_path / "a.pt2", "--format", "torch-export"],
    ):
        assert main([*map(str, words), "--jobs", str(JOBS)]) == 2, words
        said = capsys.readouterr().err
        assert "(objective=image), so it has no embeddings" in said and "start_from=RUN" in said, said
    weights = tmp_path / "a.safetensors"
    assert main(["export", str(run), str(weights), "--jobs", str(JOBS)]) == 0 and "head.weight" in load_file(weights)
    for option in (f"start_from={run}", f"model.weights={weights}"):
        labelled = new_run(tmp_path, "max_duration=1st", option, job="twins_smoke", jobs=JOBS)
        assert train(labelled, jobs=JOBS) == 0
        assert not [name for name in read_env(labelled)["choices"]["start_from"]["new"] if name.startswith("network.")]
