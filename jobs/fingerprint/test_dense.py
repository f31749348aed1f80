"""Tests of the descriptors: impressions are placed truly, places of crops correspond, and pairs are told apart."""

import os
import signal
from math import radians
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import ndimage  # type: ignore[import-untyped]

from tests.cases.fingerprint import make_config
from tests.cuda_operators import find_refused_operators
from tests.training import find_differences, load_state, new_run, start, train, wait_for_lines
from trainyard.config.compose import compose
from trainyard.data.prepare import build_meta
from trainyard.errors import UserError
from trainyard.train import precision
from trainyard.train.module import DataInfo
from trainyard.train.warm_start import load_weights

from . import dense
from .config import DENSE, Config
from .dense import DenseModule, choose_places, contrast_places, cut_pairs, find_places, look_up, measure_turn
from .matching import compare_descriptors, load_descriptors, match_pairs, prepare_prints
from .matching.descriptors import WEIGHTS
from .module import build
from .places import CELLS, PlacedPrint, place_nowhere, place_real, place_synthetic
from .synthesis import draw_impression, grow_master

JOBS = Path(__file__).resolve().parents[1]
SEED, FINGER = 3, 5


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Four impressions of one synthetic finger."""
    master = grow_master(SEED, FINGER)
    return [draw_impression(master, SEED, FINGER, number).image for number in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def placed(images: list[np.ndarray]) -> list[PlacedPrint]:
    return [place_synthetic(image, SEED, FINGER, number) for number, image in enumerate(images, start=1)]


def turn(angle: float) -> np.ndarray:
    """Return what turns points (y, x)."""
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def correlate_ridges(one: PlacedPrint, other: PlacedPrint) -> float:
    """Return the mean correlation of cells whose ridges should be alike, by the places of both prints."""
    middle = np.moveaxis(np.mgrid[:CELLS, :CELLS] * 8 + 3.5, 0, -1)
    turns = measure_turn(torch.from_numpy(np.stack([one.place, other.place]))).tolist()
    offset = np.moveaxis(np.mgrid[:16, :16] - 7.5, 0, -1)
    found = []
    for i, j in np.argwhere(one.place[..., 2] > 0).tolist():
        apart = np.hypot(*np.moveaxis(other.place[..., :2] - one.place[i, j, :2], -1, 0))
        k, m = np.unravel_index(np.where(other.place[..., 2] > 0, apart, np.inf).argmin(), apart.shape)
        there = middle[k, m] + turn(-turns[1]) @ (one.place[i, j, :2] - other.place[k, m, :2])
        if apart[k, m] < 6 and 4 <= i < 28 and 4 <= j < 28:
            at = there + offset @ turn(turns[0] - turns[1]).T
            a = one.ridges[8 * i - 4 : 8 * i + 12, 8 * j - 4 : 8 * j + 12]
            b = ndimage.map_coordinates(other.ridges.astype(float), np.moveaxis(at, -1, 0), order=1)
            if a.std() > 0 and b.std() > 0:
                found.append(np.corrcoef(a.ravel(), b.ravel())[0, 1])
    assert len(found) > 20, "too few cells to say anything"
    return float(np.mean(found))


def test_places_of_synthetic_impressions_are_where_their_ridges_agree(placed: list[PlacedPrint]) -> None:
    assert correlate_ridges(placed[0], placed[3]) > 0.4
    moved = PlacedPrint(placed[3].ridges, placed[3].place + np.array([2, 2, 0], dtype=np.float32))
    assert correlate_ridges(placed[0], moved) < 0.2, "this test cannot see a wrong place"


def test_places_of_real_impressions_are_found_by_the_matcher(images: list[np.ndarray]) -> None:
    frame, other = (place_real(image, 500, images[0], 500) for image in (images[0], images[2]))
    assert (frame.place[..., 2] > 0).sum() > 150
    assert (other.place[..., 2] > 0).sum() > 50
    assert correlate_ridges(frame, other) > 0.3


def test_a_print_that_is_like_no_other_has_no_place(images: list[np.ndarray]) -> None:
    stranger = draw_impression(grow_master(SEED, 9), SEED, 9, 1).image
    assert place_real(stranger, 500, images[0], 500).place[..., 2].sum() < 40
    assert not place_nowhere(stranger, 500).place.any()


def make_batch(placed: list[PlacedPrint]) -> dict[str, torch.Tensor]:
    return {
        "ridges": torch.from_numpy(np.stack([one.ridges for one in placed])),
        "place": torch.from_numpy(np.stack([one.place for one in placed])),
        "finger": torch.zeros(len(placed), dtype=torch.int64),
        "impression": torch.arange(len(placed)),
        "sample_id": torch.arange(len(placed)),
    }


def test_found_places_are_the_chosen_ones_of_the_other_crop(placed: list[PlacedPrint]) -> None:
    torch.manual_seed(0)
    batch = make_batch(placed)
    one, other = cut_pairs(batch["ridges"].float(), batch["place"])
    chosen_NP2, usable_NP = choose_places(one)
    frame_NP2 = look_up(one.place_NHW2, chosen_NP2)
    found_NP2, is_found_NP = find_places(other, frame_NP2)
    valid_NP = usable_NP & is_found_NP
    assert valid_NP.float().mean() > 0.3
    apart_NP = (look_up(other.place_NHW2, found_NP2) - frame_NP2).norm(dim=2)
    assert apart_NP[valid_NP].max() < 1.5


def test_crops_of_both_impressions_show_ridges_that_agree(
    placed: list[PlacedPrint], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for randomness in ("TURN_DEG", "STRETCH", "SHEAR", "BEND_PX", "NOISE"):
        monkeypatch.setattr(dense, randomness, 0.0)
    batch = make_batch([placed[0], placed[3]])
    assert abs(np.diff(measure_turn(batch["place"]).numpy())[0]) > radians(4), "these two say nothing about turns"
    one, other = cut_pairs(batch["ridges"].float(), batch["place"])
    chosen_NP2, usable_NP = choose_places(one)
    found_NP2, is_found_NP = find_places(other, look_up(one.place_NHW2, chosen_NP2))
    pairs = torch.cat([chosen_NP2, found_NP2], dim=2)[usable_NP & is_found_NP].tolist()
    ridges = one.ridges_N1HW[0, 0], other.ridges_N1HW[0, 0]
    patches = [
        [part[y - 6 : y + 7, x - 6 : x + 7].flatten() for part, (y, x) in zip(ridges, ((a, b), (c, d)), strict=True)]
        for a, b, c, d in pairs
    ]
    found = [np.corrcoef(torch.stack(pair).numpy())[0, 1] for pair in patches]
    assert len(found) > 5 and np.mean(found) > 0.4


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


def test_a_step_trains_every_weight(placed: list[PlacedPrint]) -> None:
    torch.manual_seed(0)
    module = DenseModule(make_dense_config(), DataInfo({}, {}, np.arange(4)))
    losses = module(make_batch(placed))
    losses["loss"].backward()
    assert losses["places"] > 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_a_step_on_a_gpu_has_deterministic_kernels_and_the_same_loss(
    placed: list[PlacedPrint], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, losses = DenseModule(make_dense_config(), DataInfo({}, {}, np.arange(4))), []

    def take_step() -> None:
        torch.manual_seed(0)
        losses.append(module(make_batch(placed))["loss"])
        losses[-1].backward()

    take_step()
    monkeypatch.setattr(precision, "can_use_grid_sample", lambda device: False)  # as on a GPU
    assert find_refused_operators(take_step) == set()
    torch.testing.assert_close(*losses)


def test_the_descriptors_that_ship_tell_fingers_apart(images: list[np.ndarray]) -> None:
    stranger = draw_impression(grow_master(SEED, 9), SEED, 9, 1).image
    prints = prepare_prints([*images, stranger], [500.0] * 5)
    network = load_descriptors(torch.device("cpu"))
    one, other = np.array([0, 0, 0, 1]), np.array([2, 3, 4, 4])
    evidence = compare_descriptors(network, prints, one, other, least_votes=0)
    assert evidence.votes_P[:2].min() > 3 * evidence.votes_P[2:].max()
    assert evidence.margin_P[:2].min() > 1.2 * evidence.margin_P[2:].max()
    scores = match_pairs(prints, one, other)
    assert scores[:2].min() > scores[2:].max() + 3, "three standard deviations of impostors"
    alone = [match_pairs(prints, one[i : i + 1], other[i : i + 1])[0] for i in range(4)]
    assert scores.tolist() == alone, "a score depends on other pairs"


def test_the_weights_that_ship_fit_the_preset_that_tunes_them() -> None:
    config = compose("fingerprint_few", [], JOBS)
    assert isinstance(config, Config)
    data = DataInfo({}, {}, np.arange(0))
    module = build(config, data)
    load_weights(module, module.adapt_weights(load_file(module.start_file[1])), source="the test")
    assert torch.equal(module.state_dict()["network.project.weight"], load_file(WEIGHTS)["project.weight"])


def test_a_run_scores_pairs_of_new_files_as_its_validation_does(placed: list[PlacedPrint]) -> None:
    stranger = draw_impression(grow_master(SEED, 9), SEED, 9, 1).image
    ridges = np.stack([one.ridges for one in [*placed[:3], place_nowhere(stranger, 500)]])
    config = make_dense_config()
    config.evaluation.matched_pairs = 10
    module = DenseModule(config, DataInfo({}, {}, np.arange(0))).eval()
    rows: dict[str, np.ndarray] = {
        "ridges": ridges,
        "sample_id": np.arange(4),
        "finger": np.array([0, 0, 0, 1]),
        "impression": np.arange(4),
    }
    scores = module.select_pair_scores(rows)
    one, other = np.array([0, 0, 1, 0, 1, 2]), np.array([1, 2, 2, 3, 3, 3])
    data = DataInfo({}, {}, np.arange(0), read=lambda name, ids: list(rows[name][ids]))
    pairs = module.match_samples(data, one, other)
    assert np.allclose(np.sort(pairs[:3]), np.sort(scores["genuine"]))
    assert np.allclose(np.sort(pairs[3:]), np.sort(scores["all_pairs"]))


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


def test_ridges_are_packed_apart_from_images() -> None:
    config = make_dense_config()
    config.packing.ridges = "placed"
    assert build_meta(config) != build_meta(make_config())
    with pytest.raises(UserError, match="this packed data has no ridges"):
        build(config, DataInfo({}, {}, np.arange(4)))


@pytest.mark.parametrize(
    ("job", "option", "hint"),
    [
        ("fingerprint", "model.name=dense", r"Type packing\.ridges=placed"),
        ("fingerprint_dense", "model.name=deepprint_tex", r"Type packing\.ridges=none"),
        ("fingerprint", "model.weights=shipped", "are descriptors, but model"),
        ("fingerprint", "model.name=deepprint_texminu", r"Type packing\.minutiae=extract"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_data_are_made(job: str, option: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        compose(job, [option], JOBS)
