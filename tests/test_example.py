"""The examples that CONTRIBUTING.md names: they run as they are, and the families among them as a user's own."""

import csv
import math
import os
import random
import runpy
import shutil
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cuda_operators import find_refused_operators
from tests.test_wheel import installed as installed  # the unpacked wheel, a fixture
from tests.test_wheel import run_installed
from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train, wait_for_lines
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.data.loader import Loader
from trainyard.data.order import shuffle
from trainyard.data.pack import pack
from trainyard.data.prepare import build_meta
from trainyard.runs.events import read_metrics
from trainyard.runs.manifest import list_checkpoints
from trainyard.tools.check_family import Family, check_family
from trainyard.tools.new_family import create_family

EXAMPLES = Path(__file__).parents[1] / "examples"
FAMILIES = ("gpt", "segmentation")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both families, of which GPT is the template `text`."""
    folder = tmp_path_factory.mktemp("examples") / "example_families"
    create_family(folder, "gpt", "text")
    shutil.copytree(EXAMPLES / "segmentation", folder / "segmentation")
    return folder


def test_the_example_takes_a_step_and_is_short(tmp_path):
    file = EXAMPLES / "one_step.py"
    loss = runpy.run_path(str(file))["take_one_step"](tmp_path)
    assert math.isfinite(loss) and loss > 0
    assert len(file.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_family_takes_a_step(family, jobs, tmp_path):
    run = new_run(tmp_path, "max_duration=1st", job=f"{family}_smoke", jobs=jobs)
    assert train(run, jobs=jobs) == 0 and math.isfinite(read_metrics(run)[0]["loss"])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_family_meets_the_contract(family, jobs, tmp_path):
    assert [result for result in check_family(jobs, family, tmp_path / "checks") if not result.passed] == []
    subject = Family(jobs, family, tmp_path / "step")
    module, batch = subject.build(), subject.read_micro_batch().batch
    assert find_refused_operators(lambda: module(batch)["loss"].backward()) == set(), "CUDA is as deterministic"


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_kills_change_no_bit_of_an_example(family, jobs, tmp_path):
    options = ("max_duration=60st", "checkpoint.every=4st", "eval_every=20st", "log_every=1st")
    whole, killed = (new_run(tmp_path, *options, job=f"{family}_smoke", jobs=jobs) for _ in range(2))
    ended = start(whole, jobs=jobs)
    ended.join(240)
    rng, resumed = random.Random(family), set()
    for _ in range(int(os.environ.get("TRAINYARD_KILLS", "1"))):
        process = start(killed, jobs=jobs)
        saved = max((entry.step for entry in list_checkpoints(killed / "checkpoints")), default=0)
        wait_for_lines(killed, saved + rng.randrange(6, 11), process)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        resumed.add(max(entry.step for entry in list_checkpoints(killed / "checkpoints")))
    last = start(killed, jobs=jobs)
    last.join(240)
    assert (ended.exitcode, last.exitcode) == (0, 0) and 0 < min(resumed) < max(resumed) + 1 < 60
    assert find_differences(load_state(whole), load_state(killed)) == []
    assert read_run_metrics(whole) == read_run_metrics(killed)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_trains_on_two_ranks_predicts_and_is_exported_by_an_installed_wheel(
    family, jobs, installed, tmp_path
):
    shutil.copytree(jobs / family, tmp_path / "jobs" / family)
    planned = run_installed(installed, tmp_path, "plan", f"{family}_smoke", "--hw", "a100")
    if family == "gpt":
        assert "weights 120 KiB, gradients 120 KiB, optimizer 120 KiB" in planned, "Lion keeps one number for a weight"
    else:
        assert "fits" in planned
    learn = ("max_duration=12ep", "eval_every=12ep")
    run_installed(installed, tmp_path, "run", f"{family}_smoke", "--synthetic", "--name", "r", "--cpu-ranks", 2, *learn)
    run = Path("runs") / f"{family}_smoke" / "r"
    (scored,) = [line for line in read_metrics(tmp_path / run) if line.get("split") == "val"]
    if family == "gpt":
        assert scored["bits_per_character"] < 4.0, "letters by their frequency have 4.1 bits"
    else:
        assert scored["mean_iou"] > 0.6, "the background alone has 0.3"
    (raw,) = (tmp_path / "data").glob(f"{family}-synthetic-*")
    new = raw / ("text.txt" if family == "gpt" else "images")
    run_installed(installed, tmp_path, "predict", run, new, "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) >= 60
    if family == "gpt":
        assert all(0 < float(line["bits_per_character"]) < 8 for line in found)
    else:
        assert all(abs(sum(float(line[name]) for name in ("background", "disc", "bar")) - 1) < 1e-6 for line in found)
    said = run_installed(installed, tmp_path, "export", run, "out.onnx", "--format", "onnx")
    assert (tmp_path / "out.onnx").is_file(), said


def test_a_mask_follows_its_image_through_augmentation(tmp_path):
    options = ["augment.gain=0", "global_batch_size=8", "packing.val_share=0", "packing.test_share=0"]
    config = compose("segmentation_smoke", options, EXAMPLES)
    family = load_family(EXAMPLES, "segmentation", "pack")
    family.synthesize(tmp_path / "raw", count=8, seed=0)
    for path in sorted((tmp_path / "raw" / "images").iterdir()):  # an image that is its mask, in gray
        gray = np.asarray(family.Image.open(tmp_path / "raw" / "masks" / path.name)) * 80 + 80
        family.Image.fromarray(gray.astype(np.uint8)).save(path)
    data = pack(family.samples(tmp_path / "raw", config), tmp_path / "packed", meta=build_meta(config), workers=1)
    loader = Loader(config, data, device=torch.device("cpu"), decode="cpu")
    orders = lambda epoch: shuffle(np.arange(8), seed=0, epoch=epoch, global_batch_size=8)  # noqa: E731
    with closing(loader.train(orders, epoch=0, start=0, micro_batch_size=8)) as stream:
        batch = next(stream).batch
    moved, masks = batch["mask"], sorted((tmp_path / "raw" / "masks").iterdir())
    stored = torch.stack([torch.tensor(np.asarray(family.Image.open(masks[i]))) for i in batch["sample_id"].tolist()])
    shown = (batch["image"][:, 0] * 255 / 80).round().long() - 1  # -1: outside, as image.fill=0 paints it
    agreed = (shown == torch.where(moved == 255, -1, moved)).float().mean()
    kept = (shown == stored).float().mean()
    assert agreed > 0.97 and kept < 0.9, "interpolation at the edges of shapes is the rest"
