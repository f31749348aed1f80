"""Tests of the descriptors: impressions are aligned truly, places of crops correspond, and pairs are told apart."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases.fingerprint import make_config
from tests.training import find_differences, load_state, new_run, start, train, wait_for_lines
from trainyard.data.prepare import build_meta
from trainyard.errors import UserError
from trainyard.train.module import DataInfo

from .aligned import CELLS, AlignedPrint, align_real, align_synthetic, centre_print
from .config import DENSE, Config
from .dense import DenseModule, choose_places, contrast_places, cut_pairs, find_places, look_up
from .matching import compare_descriptors, load_descriptors, prepare_prints
from .module import build
from .synthesis import draw_impression, grow_master

JOBS = Path(__file__).resolve().parents[1]
SEED, FINGER = 3, 5


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Four impressions of one synthetic finger."""
    master = grow_master(SEED, FINGER)
    return [draw_impression(master, SEED, FINGER, number).image for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def aligned(images: list[np.ndarray]) -> list[AlignedPrint]:
    return [align_synthetic(image, SEED, FINGER, number) for number, image in enumerate(images, start=1)]


def correlate_ridges(one: AlignedPrint, other: AlignedPrint) -> float:
    """Return the mean correlation of cells whose ridges should be alike, by the places of both prints."""
    middle = np.moveaxis(np.mgrid[:CELLS, :CELLS] * 8 + 3.5, 0, -1)
    found = []
    for i, j in np.argwhere(one.place[..., 2] > 0).tolist():
        apart = np.hypot(*np.moveaxis(other.place[..., :2] - one.place[i, j, :2], -1, 0))
        k, m = np.unravel_index(np.where(other.place[..., 2] > 0, apart, np.inf).argmin(), apart.shape)
        y, x = np.rint(middle[k, m] + one.place[i, j, :2] - other.place[k, m, :2] - 7.5).astype(int)
        if apart[k, m] < 6 and 0 <= y < 240 and 0 <= x < 240 and 4 <= i < 28 and 4 <= j < 28:
            a, b = one.ridges[8 * i - 4 : 8 * i + 12, 8 * j - 4 : 8 * j + 12], other.ridges[y : y + 16, x : x + 16]
            if a.std() > 0 and b.std() > 0:
                found.append(np.corrcoef(a.ravel(), b.ravel())[0, 1])
    assert len(found) > 20, "too few cells to say anything"
    return float(np.mean(found))


def test_places_of_synthetic_impressions_are_where_their_ridges_agree(aligned: list[AlignedPrint]) -> None:
    assert correlate_ridges(aligned[0], aligned[3]) > 0.4
    moved = AlignedPrint(aligned[3].ridges, aligned[3].place + np.array([2, 2, 0], dtype=np.float32))
    assert correlate_ridges(aligned[0], moved) < 0.2, "this test cannot see a wrong place"


def test_places_of_real_impressions_are_found_by_the_matcher(images: list[np.ndarray]) -> None:
    frame, other = (align_real(image, 500, images[0], 500) for image in (images[0], images[2]))
    assert (frame.place[..., 2] > 0).sum() > 150
    assert (other.place[..., 2] > 0).sum() > 50
    assert correlate_ridges(frame, other) > 0.3


def test_a_print_that_is_like_no_other_has_no_place(images: list[np.ndarray]) -> None:
    stranger = draw_impression(grow_master(SEED, 9), SEED, 9, 1).image
    assert align_real(stranger, 500, images[0], 500).place[..., 2].sum() < 40
    assert not centre_print(stranger, 500).place.any()


def make_batch(aligned: list[AlignedPrint]) -> dict[str, torch.Tensor]:
    return {
        "ridges": torch.from_numpy(np.stack([one.ridges for one in aligned])),
        "place": torch.from_numpy(np.stack([one.place for one in aligned])),
        "finger": torch.zeros(len(aligned), dtype=torch.int64),
        "impression": torch.arange(len(aligned)),
        "sample_id": torch.arange(len(aligned)),
    }


def test_found_places_are_the_chosen_ones_of_the_other_crop(aligned: list[AlignedPrint]) -> None:
    torch.manual_seed(0)
    batch = make_batch(aligned)
    one, other = cut_pairs(batch["ridges"].float(), batch["place"])
    chosen_NP2, usable_NP = choose_places(one)
    frame_NP2 = look_up(one.place_NHW2, chosen_NP2)
    found_NP2, is_found_NP = find_places(other, frame_NP2)
    valid_NP = usable_NP & is_found_NP
    assert valid_NP.float().mean() > 0.3
    apart_NP = (look_up(other.place_NHW2, found_NP2) - frame_NP2).norm(dim=2)
    assert apart_NP[valid_NP].max() < 1.5


def test_the_contrast_is_lowest_if_equal_places_are_alike() -> None:
    torch.manual_seed(0)
    one_NPD = torch.nn.functional.normalize(torch.randn(3, 24, 16), dim=2)
    frame_NP2, valid_NP = 500 * torch.rand(3, 24, 2), torch.ones(3, 24, dtype=torch.bool)
    loss, accuracy = contrast_places(one_NPD, one_NPD, frame_NP2, valid_NP)
    assert accuracy == 1
    assert loss < 0.1
    shuffled, missed = contrast_places(one_NPD, one_NPD.flip(1), frame_NP2, valid_NP)
    assert shuffled > 5
    assert missed < 0.1
    half_NP = valid_NP.clone()
    half_NP[:, ::2] = False
    changed = one_NPD.clone()
    changed[:, ::2] = 0
    assert contrast_places(changed, changed, frame_NP2, half_NP)[0] < loss, "places that are not valid count"


def make_dense_config() -> Config:
    config = make_config()
    config.model.name, config.model.width, config.model.embedding_dims = DENSE, 0.1, 8
    return config


def test_a_step_trains_every_weight(aligned: list[AlignedPrint]) -> None:
    torch.manual_seed(0)
    module = DenseModule(make_dense_config(), DataInfo({}, {}, np.arange(4)))
    losses = module(make_batch(aligned))
    losses["loss"].backward()
    assert losses["places"] > 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_the_descriptors_that_ship_tell_fingers_apart(images: list[np.ndarray]) -> None:
    stranger = draw_impression(grow_master(SEED, 9), SEED, 9, 1).image
    prints = prepare_prints([*images, stranger], [500.0] * 5)
    network = load_descriptors(torch.device("cpu"))
    one, other = np.array([0, 0, 0, 1]), np.array([2, 3, 4, 4])
    margins = compare_descriptors(network, prints, one, other)
    assert margins[:2].min() > 1.2 * margins[2:].max()
    alone = [compare_descriptors(network, prints, one[i : i + 1], other[i : i + 1])[0] for i in range(4)]
    assert margins.tolist() == alone, "a score depends on other pairs"


@pytest.mark.long
def test_a_stopped_run_resumes_bitwise_equal(tmp_path: Path) -> None:
    options = ["data.synthetic=32", "global_batch_size=8", "max_duration=5st", "eval_every=5st", "log_every=1st"]
    options += ["checkpoint.every=2st", "model.width=0.1", "split.val_share=0.5", "evaluation.matched_pairs=10"]
    options += [f"data.cache={tmp_path / 'data'}", "evaluation.bootstrap_draws=0"]
    whole, stopped = (new_run(tmp_path, *options, job="fingerprint_dense", jobs=JOBS) for _ in range(2))
    assert train(whole, jobs=JOBS) == 0
    process = start(stopped, jobs=JOBS)
    wait_for_lines(stopped, 2, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(240)
    assert process.exitcode == 85, "expected it to stop in the middle"
    assert train(stopped, jobs=JOBS) == 0
    assert find_differences(load_state(whole), load_state(stopped)) == []


def test_ridges_are_packed_apart_from_images_and_only_for_this_model() -> None:
    config = make_dense_config()
    with pytest.raises(UserError, match=r"Type packing\.ridges=aligned"):
        build(config, DataInfo({}, {}, np.arange(4)))
    config.packing.ridges = "aligned"
    assert build_meta(config) != build_meta(make_config())
    with pytest.raises(UserError, match="this packed data has no ridges"):
        build(config, DataInfo({}, {}, np.arange(4)))
    config.model.name = "deepprint_tex"
    with pytest.raises(UserError, match=r"Type packing\.ridges=none"):
        build(config, DataInfo({}, {}, np.arange(4)))
