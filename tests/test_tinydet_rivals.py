"""The detectors of other libraries that tinydet is measured against."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rivals.tinydet_rivals.module import build

from jobs.tinydet.geometry import iou
from tests.cases.tinydet import ARTIFACTS
from trainyard.config.compose import compose, list_options
from trainyard.train.module import Batch, DataInfo

ROOT = Path(__file__).resolve().parents[1]
RIVALS = ROOT / "tests" / "rivals"


def make_batch() -> Batch:
    """Return two images of 64 px with a bright square each, of samples that are half as large as their images."""
    image, boxes = torch.zeros(2, 3, 64, 64), torch.tensor([[[10.0, 14, 26, 30]], [[36.0, 30, 52, 46]]])
    for number, (x1, y1, x2, y2) in enumerate(boxes[:, 0].int().tolist()):
        image[number, :, y1:y2, x1:x2] = 1
    return {
        "image": image, "boxes": boxes / 2, "labels": torch.ones(2, 1, dtype=torch.int64),
        "boxes_count": torch.ones(2, dtype=torch.int64), "affine": 2 * torch.eye(3)[:2].repeat(2, 1, 1),
        "image_px": torch.full((2, 2), 32.0), "sample_id": torch.arange(2),
    }  # fmt: skip


def test_the_rivals_train_as_tinydet_kit_does():
    ours, theirs = (compose(job, [], jobs) for job, jobs in (("tinydet_kit", ROOT / "jobs"), ("rivals_kit", RIVALS)))
    options = {option.name: option.value for option in list_options(ours)}
    different = {option.name for option in list_options(theirs) if options.get(option.name, "none") != option.value}
    assert different == {"job", "family", "rival"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rival", "backbone", "steps"),
    [
        ("faster_rcnn", "small", 25),
        ("deformable_detr", "small", 240),
        pytest.param("faster_rcnn", "resnet18", 40, marks=pytest.mark.long),
    ],
)
def test_a_rival_finds_what_it_was_trained_on(rival: str, backbone: str, steps: int):
    words = [f"rival={rival}", f"model.backbone={backbone}", "model.queries=10", "model.decoder_layers=2"]
    size = ["image.height_px=64", "image.width_px=64", "photometric.colour_p=0", "photometric.paste_p=0"]
    torch.manual_seed(0)
    module = build(compose("rivals_kit", [*words, *size], RIVALS), DataInfo({}, {}, np.arange(2), ARTIFACTS))
    batch, losses = make_batch(), []
    optimizer = torch.optim.AdamW(module.parameter_groups(1e-4), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    with torch.inference_mode():
        rows = module.eval().predict(batch)
    assert rows["box"].shape == (2, 60, 4) and rows["score"].shape == rows["label"].shape == (2, 60)
    best = rows["score"].argmax(dim=1)
    found = rows["box"][torch.arange(2), best]
    overlap = iou(found, batch["boxes"][:, 0])[0]
    assert (overlap > 0.5).all() and (rows["label"][torch.arange(2), best] == 1).all(), (overlap, losses[::10])
