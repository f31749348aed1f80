"""The fingerprint family: its network, losses, score, packing, splits and synthetic prints."""

import io
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from trainyard.data.shards import BadRecord
from trainyard.errors import UserError
from trainyard.train.module import DataInfo

from . import module as scoring
from .config import Config
from .module import (
    CentreLoss,
    FingerprintModule,
    build,
    cosface_logits,
    fingers_within,
    score_pairs,
)
from .network import Aligner, DeepPrintTex, rigid_matrix, sample_bilinear
from .pack import load, print_centre, samples, splits, synthesize
from .synthesis import impressions

SMALL = (
    "data.synthetic=128",
    "model.width=0.05",
    "model.blocks=[0,1,0]",
    "model.embedding_dims=16",
    "image.height_px=75",
    "image.width_px=75",
    "packing.region_px=320",
    "head.centre_weight=0.1",
    "head.margin_warmup=",
    "global_batch_size=16",
    "max_duration=8st",
    "eval_every=4st",
    "checkpoint.every=3st",
    "evaluation.bootstrap_draws=20",
    "trackers=[]",
)
"""Makes a run of this family take seconds, for tests that run over all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    finger = columns["finger"][ids]
    embedding = np.eye(finger.max() + 1, dtype=np.float32)[finger]
    rows = {"embedding": embedding, "finger": finger, "impression": columns["impression"][ids], "sample_id": ids}
    return rows, {"eer": 0.0, "eer_all_pairs": 0.0, "eer_all_pairs_high": 0.0, "zero_fmr": 0.0}


def shared_data() -> Path:
    """Return the folder of real recordings, which is not part of the repository."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("TRAINYARD_SHARED_DATA", beside)) / "fingerprint"
    if not folder.is_dir():
        pytest.skip(f"no real prints at {folder}: set TRAINYARD_SHARED_DATA")
    return folder


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def small_config() -> Config:
    config = Config()
    config.model.width, config.model.blocks, config.model.embedding_dims = 0.1, [1, 1, 1], 16
    config.image.height_px = config.image.width_px = 75
    config.head.centre_weight = 2.0
    config.evaluation.bootstrap_draws = 20
    return config


def small_module(config: Config | None = None, *, fingers: int = 6) -> FingerprintModule:
    finger = np.repeat(np.arange(fingers), 4)
    names = [f"f{i}" for i in range(fingers)]
    torch.manual_seed(0)
    train_ids = np.flatnonzero(finger >= 2)  # the first two fingers do not train
    return build(config or small_config(), DataInfo({"finger": finger}, {"finger": names}, train_ids))


def batch_of(count: int, *, codes: tuple[int, ...] = (2, 3, 4, 5)) -> dict[str, torch.Tensor]:
    return {
        "image": torch.rand(count, 1, 75, 75, generator=torch.Generator().manual_seed(1)),
        "sample_id": torch.arange(count),
        "finger": torch.tensor(codes).repeat(count)[:count],
        "impression": torch.arange(count),
    }


# Network


def test_every_stage_has_the_shape_and_the_paper_network_the_size_of_the_reference():
    network = DeepPrintTex(embedding_dims=512).eval()
    assert parameters(network.stem) == 605_152
    # with the reference's training head, Linear(512 -> 8000) with a bias
    assert parameters(network) + parameters(nn.Linear(512, 8000)) == 46_033_184

    shapes = []
    with torch.inference_mode():
        x = network.stem(torch.rand(1, 1, 299, 299))
        shapes.append(tuple(x.shape[1:]))
        for block in network.texture.blocks:
            x = block(x)
            shapes.append(tuple(x.shape[1:]))
    assert shapes == [(384, 35, 35)] * 5 + [(1024, 17, 17)] * 8 + [(1536, 8, 8)] * 4


def test_embeddings_have_unit_length_at_any_size_and_width():
    for width, side in ((0.1, 75), (0.25, 128)):
        network = DeepPrintTex(embedding_dims=24, width=width, blocks=(1, 1, 1)).eval()
        embedding = network(torch.rand(3, 1, side, side + 10))
        assert embedding.shape == (3, 24)
        torch.testing.assert_close(embedding.norm(dim=1), torch.ones(3))


def test_the_layers_offered_for_checkpointing_are_the_inception_blocks():
    assert len(list(small_module().repeated_layers())) == 1 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("batch", [1, 4])
def test_an_untrained_aligner_leaves_every_picture_of_a_batch_where_it_is(batch):
    aligner = Aligner(1)
    assert parameters(aligner) == 311_555
    image = torch.rand(batch, 1, 299, 299)
    # 1e-4 of the range: coordinates near 299 are rounded to 3e-5 px, and neighbours of noise differ by up to 1
    torch.testing.assert_close(aligner(image), image, rtol=0, atol=1e-4)


def test_the_aligner_stays_within_its_bounds_and_learns_from_its_loss():
    aligner = Aligner(1, rotate_deg=60, shift=0.2)
    nn.init.constant_(aligner.pose.bias, 100.0)
    image = torch.zeros(1, 1, 101, 101)
    image[0, 0, 50, 50] = 1.0
    y, x = np.unravel_index(int(aligner(image).argmax()), (101, 101))
    # the output's centre reads the input 0.2 sides right and below, so the dot is seen left and above, turned by 60
    offset = np.array([x - 50, y - 50])
    assert np.hypot(*offset) == pytest.approx(0.2 * 101 * np.sqrt(2), abs=1.5)
    assert np.degrees(np.arctan2(offset[1], offset[0])) % 360 == pytest.approx((225 - 60) % 360, abs=4)

    aligner = Aligner(1)
    aligner(torch.rand(2, 1, 64, 64)).square().sum().backward()
    assert all(p.grad is not None for p in aligner.parameters())
    assert float(aligner.pose.bias.grad.abs().min()) > 0


def test_own_bilinear_sampling_equals_torch_in_value_and_gradient():
    image = torch.rand(3, 2, 20, 30, dtype=torch.float64)
    matrix = rigid_matrix(torch.tensor([0.3, -0.5, 0.0]).double(), 0.3 * torch.rand(3, 2).double()).requires_grad_()
    grid = functional.affine_grid(matrix, [3, 2, 20, 30], align_corners=False)
    results = [
        sample_bilinear(image, grid),
        functional.grid_sample(image, grid, padding_mode="border", align_corners=False),
    ]
    gradients = [torch.autograd.grad(r.square().sum(), matrix, retain_graph=True)[0] for r in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_a_picture_too_small_for_the_network_is_refused_with_the_size_it_needs():
    config = small_config()
    config.image.width_px = 74
    with pytest.raises(UserError, match="needs 75 px"):
        small_module(config)


# Losses


def test_cosface_without_margin_is_the_softmax_over_scaled_cosines():
    cosine, target = torch.rand(5, 9) * 2 - 1, torch.tensor([0, 3, 8, 1, 1])
    logits = cosface_logits(cosine, target, scale=32.0, margin=0.0)
    assert torch.equal(logits, 32.0 * cosine)
    with_margin = cosface_logits(cosine, target, scale=32.0, margin=0.35)
    expected = 32.0 * (cosine - 0.35 * functional.one_hot(target, 9))
    torch.testing.assert_close(with_margin, expected)


def test_the_centre_loss_of_a_batch_is_the_mean_over_its_parts():
    torch.manual_seed(0)
    loss, embedding, target = CentreLoss(7, 16), torch.randn(12, 16), torch.randint(7, (12,))
    whole = loss(embedding, target)
    parts = torch.stack([loss(e, t) for e, t in zip(embedding.split(3), target.split(3), strict=True)]).mean()
    torch.testing.assert_close(whole, parts)
    distances = [(e - loss.weight[t]).square().sum().item() for e, t in zip(embedding, target, strict=True)]
    assert whole.item() == pytest.approx(sum(distances) / 12, rel=1e-5)


def test_the_margin_rises_with_the_samples_seen_and_needs_no_state():
    config = small_config()
    config.head.margin_warmup, config.global_batch_size = "10st", 8
    module, batch = small_module(config).eval(), batch_of(4)
    config.head.name = "ce"
    without = small_module(config).eval()

    def softmax(model: FingerprintModule, seen: int | None) -> float:
        extra = {} if seen is None else {"samples_seen": torch.tensor(seen)}
        return model(batch | extra)["softmax"].item()

    assert softmax(module, 0) == softmax(without, None)
    assert softmax(module, 0) < softmax(module, 40) < softmax(module, 80)
    assert softmax(module, 80) == softmax(module, 10**9) == softmax(module, None)


def test_codes_of_training_fingers_become_classes_and_others_none():
    module = small_module()
    assert module.class_of_code.tolist() == [-1, -1, 0, 1, 2, 3]
    assert "class_of_code" in module.state_dict()


def test_every_parameter_has_a_gradient_and_lies_in_one_optimizer_group():
    module = small_module()
    module(batch_of(4))["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())
    grouped = [id(p) for group in module.parameter_groups(0.1) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in module.parameters())
    decayed = [id(p) for group in module.parameter_groups(0.1) if group["weight_decay"] for p in group["params"]]
    assert id(module.centres.weight) not in decayed
    assert id(module.directions) in decayed


def test_a_small_model_learns_four_prints_by_heart():
    config = small_config()
    config.model.dropout = 0.0
    module, batch = small_module(config), batch_of(8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(30):
        losses = module(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    assert float(losses["accuracy"]) == 1.0


# Score


def rows_of(embedding: np.ndarray, finger: np.ndarray) -> dict[str, np.ndarray]:
    impression = np.concatenate([1 + np.arange(n) for n in np.unique(finger, return_counts=True)[1]])
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return {"embedding": unit.astype(np.float32), "finger": finger, "impression": impression}


def test_a_perfect_predictor_makes_no_errors():
    finger = np.repeat(np.arange(10), 8)
    metrics = small_module().score(rows_of(np.eye(10)[finger], finger))
    names = ("eer", "eer_low", "eer_high", "eer_all_pairs", "eer_all_pairs_high", "fmr1000_all_pairs", "zero_fmr")
    assert {name: metrics[name] for name in names} == dict.fromkeys(names, 0.0)
    assert (metrics["genuine"], metrics["impostors"], metrics["impostors_all_pairs"]) == (280, 45, 2880)
    assert "fmr1000" not in metrics  # 45 impostors say nothing about one in a thousand


def test_a_blind_predictor_is_wrong_about_half_the_time():
    finger = np.repeat(np.arange(30), 8)
    metrics = small_module().score(rows_of(np.random.default_rng(0).normal(size=(240, 32)), finger))
    assert 0.45 < metrics["eer_all_pairs"] < 0.55
    assert metrics["eer_all_pairs_low"] < metrics["eer_all_pairs"] < metrics["eer_all_pairs_high"]


def test_pairs_scored_in_blocks_are_those_of_two_loops(monkeypatch):
    monkeypatch.setattr(scoring, "ROWS_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    finger = rng.permutation(np.repeat([3, 5, 8, 9], [4, 1, 6, 5]))
    impression = rng.permutation(len(finger))
    embedding = rng.normal(size=(len(finger), 6)).astype(np.float32)
    pairs, is_fvc = score_pairs(embedding, finger, impression)

    genuine, impostor, fvc = [], [], []
    first = {f: impression[finger == f].min() for f in finger}
    for i in range(len(finger)):
        for j in range(i + 1, len(finger)):
            score = float(embedding[i] @ embedding[j])
            (genuine if finger[i] == finger[j] else impostor).append(score)
            if finger[i] != finger[j] and impression[i] == first[finger[i]] and impression[j] == first[finger[j]]:
                fvc.append(score)
    np.testing.assert_allclose(np.sort(pairs.genuine), np.sort(genuine), atol=1e-5)
    np.testing.assert_allclose(np.sort(pairs.impostor), np.sort(impostor), atol=1e-5)
    np.testing.assert_allclose(np.sort(pairs.impostor[is_fvc]), np.sort(fvc), atol=1e-5)
    assert len(fvc) == 4 * 3 // 2
    assert np.array_equal(np.bincount(pairs.genuine_identity), [6, 0, 15, 10])


def test_too_many_pairs_leave_out_whole_fingers_evenly():
    finger = np.repeat(np.arange(100), 8)
    kept = fingers_within(finger, 20_000)
    fingers, counts = np.unique(finger[kept], return_counts=True)
    assert set(counts) == {8}
    pairs = len(kept) ** 2 / 2
    assert 15_000 < pairs <= 20_000
    assert np.diff(fingers).max() <= 5
    assert (fingers[0], fingers[-1]) == (0, 99)
    assert np.array_equal(fingers_within(finger, 10**9), np.arange(800))


def test_predictions_never_use_the_training_fingers():
    module, batch = small_module().eval(), batch_of(4, codes=(0, 1))
    rows = module.predict(batch)
    assert rows["embedding"].shape == (4, 16)
    assert rows["embedding"].dtype == torch.float32
    assert torch.equal(rows["finger"], batch["finger"])


# Packing


def ridges(height: int = 120, width: int = 100) -> np.ndarray:
    """Return a gray picture with stripes in its lower right quarter."""
    picture = np.full((height, width), 255, np.uint8)
    picture[height // 2 :, width // 2 :] = (128 + 120 * np.sin(np.arange(width // 2) * 0.7)).astype(np.uint8)
    return picture


def read(data: object) -> np.ndarray:
    assert isinstance(data, bytes)
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.mode == "L"
        return np.asarray(picture)


load_at_500 = partial(load, set_name="", dpi=500, region_px=64, fill=255)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_gray_pictures_that_loaders_read_are_kept_byte_for_byte(tmp_path, suffix):
    path = tmp_path / f"101_3.{suffix}"
    Image.fromarray(ridges()).save(path)
    assert load_at_500(path)["image"] == path.read_bytes()


def test_other_pictures_become_gray_png_without_loss(tmp_path):
    gray = Image.fromarray(ridges())
    palette = gray.point(lambda v: 255 - v)
    palette = palette.convert("P")
    palette.putpalette([v for level in range(255, -1, -1) for v in (level, level, level)])
    on_glass = Image.merge("LA", (Image.new("L", gray.size, 0), gray.point(lambda v: 255 - v)))
    deep = Image.fromarray(ridges().astype(np.uint16) * 256 + 77)
    for name, picture in {
        "1_1.tif": gray,
        "1_2.bmp": gray,
        "1_3.tif": palette,
        "1_4.png": gray.convert("RGB"),
        "1_5.png": deep,
        "1_6.tiff": deep,
        "1_7.png": on_glass,
    }.items():
        picture.save(tmp_path / name)
        assert np.array_equal(read(load_at_500(tmp_path / name)["image"]), ridges()), name
    gray.save(tmp_path / "1_8.png", transparency=255)
    assert np.array_equal(read(load(tmp_path / "1_8.png", "", 500, 64, fill=9)["image"]) == 9, ridges() == 255)


def test_a_turned_jpeg_is_stored_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(ridges()).save(tmp_path / "1_1.jpg", exif=exif, quality=100)
    stored = read(load_at_500(tmp_path / "1_1.jpg")["image"])
    assert stored.shape == (100, 120)
    assert np.abs(stored.astype(int) - np.rot90(ridges(), -1)).max() < 30


def test_names_split_at_the_last_underscore_and_fingers_are_unique_over_sets(tmp_path):
    for name in ("B/101_1.png", "A/101_1.png", "A/012_10_7.png", "loose_2.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(ridges()).save(path)
    (tmp_path / "A" / "readme.txt").write_text("not a picture")
    listed = list(samples(tmp_path, Config()))
    assert [s.key for s in listed] == ["loose_2.png", "A/012_10_7.png", "A/101_1.png", "B/101_1.png"]
    rows = [s.load() for s in listed]
    assert [r["finger"] for r in rows] == ["loose", "A/012_10", "A/101", "B/101"]
    assert [r["impression"] for r in rows] == [2, 7, 1, 1]
    assert [r["set"] for r in rows] == ["", "A", "A", "B"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("thumb.png", "whole", "the name is not <finger>_<impression>"),
        ("101_left.png", "whole", "the name is not"),
        ("_1.png", "whole", "the name is not"),
        ("101_1.png", "empty", "the file is empty"),
        ("101_1.tif", "text", "no image"),
        ("101_1.png", "half", "cannot be decoded"),
        ("101_1.tif", "half", "cannot be decoded"),
        ("101_1.jpg", "half", "cannot be decoded"),
        ("101_1.tiff", "float", "mode F"),
    ],
)
def test_a_file_that_is_no_print_is_refused_with_the_reason(tmp_path, name, content, reason):
    path = tmp_path / name
    whole = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8))
    (whole.convert("F") if content == "float" else whole).save(path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"scanned in May", "half": data[: len(data) // 2]}.get(content, data))
    with pytest.raises(BadRecord, match=reason):
        load_at_500(path)


def test_the_region_is_a_square_around_the_print_in_source_pixels(tmp_path):
    Image.fromarray(ridges(400, 300)).save(tmp_path / "1_1.png")
    for dpi, side in ((500, 64), (1000, 128)):
        row = load(tmp_path / "1_1.png", "", dpi, 64, 255)
        assert row["box_height"] == row["box_width"] == side
        # the stripes' middle is (300, 225); the estimate is good to a cell or two
        assert row["box_y"] + side / 2 == pytest.approx(300, abs=16)
        assert row["box_x"] + side / 2 == pytest.approx(225, abs=16)


def test_a_picture_without_a_print_is_taken_whole_around_its_middle():
    assert print_centre(np.full((50, 80), 200, np.uint8), 500) == (25, 40)
    assert print_centre(np.zeros((1, 1), np.uint8), 500) == (0.5, 0.5)


def test_real_prints_of_three_sensors_are_packed_and_the_palette_is_undone():
    folder = shared_data()
    listed = list(samples(folder, Config()))
    assert len(listed) == 680
    for key in ("FVC2004_DB1_B/101_1.tif", "FVC2004_DB4_B/101_1.tif", "UareU/012_10_1.tif"):
        (sample,) = [s for s in listed if s.key == key]
        stored = read(sample.load()["image"])
        with Image.open(folder / key) as source:
            assert np.array_equal(stored, np.asarray(source.convert("L")))
        assert np.ptp(stored) > 100


# Splits


def columns_of(*sets: tuple[str, int]) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Return columns and vocabulary of (set, number of fingers) with 3 prints each."""
    names = [f"{name}/{i}" for name, count in sets for i in range(count)]
    finger = np.repeat(np.arange(len(names)), 3)
    codes = np.repeat(np.arange(len(sets)), [3 * count for _, count in sets])
    return {"finger": finger, "set": codes}, {"finger": names, "set": [name for name, _ in sets]}


def test_splits_share_no_finger_and_leave_no_sample_of_a_used_set_out():
    columns, vocabulary = columns_of(("", 50))
    parts = splits(columns, vocabulary, Config())
    assert {name: len(ids) for name, ids in parts.items()} == {"train": 105, "val": 15, "test": 30}
    owners = [set(columns["finger"][ids]) for ids in parts.values()]
    assert len(set.union(*owners)) == sum(map(len, owners)) == 50


def test_a_split_depends_on_the_seed_and_the_names_alone():
    columns, vocabulary = columns_of(("", 50))
    first = splits(columns, vocabulary, Config())
    for name, ids in splits(columns, vocabulary, Config()).items():
        assert np.array_equal(ids, first[name])
    assert not np.array_equal(splits(columns, vocabulary, Config(seed=1))["val"], first["val"])


def test_named_test_sets_are_tested_each_on_its_own_and_never_trained():
    columns, vocabulary = columns_of(("FVC_1", 10), ("FVC_2", 10), ("UareU", 30))
    config = Config()
    config.split.test_sets = ["FVC_*"]
    parts = splits(columns, vocabulary, config)
    assert {name: len(ids) for name, ids in parts.items()} == {
        "train": 81,
        "val": 9,
        "test_FVC_1": 30,
        "test_FVC_2": 30,
    }
    assert set(columns["set"][parts["train"]]) == {2}
    config.split.val_sets, config.split.test_sets = ["FVC_1"], ["FVC_2"]
    assert np.array_equal(splits(columns, vocabulary, config)["val"], np.flatnonzero(columns["set"] == 0))


def test_a_pattern_that_matches_no_set_lists_the_sets_found():
    columns, vocabulary = columns_of(("FVC_1", 10), ("UareU", 30))
    config = Config()
    config.split.test_sets = ["FVC2004_*"]
    with pytest.raises(UserError, match=r"'FVC2004_\*' matches no set.*FVC_1, UareU"):
        splits(columns, vocabulary, config)


def test_a_set_that_both_trains_and_tests_is_refused():
    columns, vocabulary = columns_of(("FVC_1", 10), ("UareU", 30))
    config = Config()
    config.split.train_sets, config.split.test_sets = ["UareU", "FVC_1"], ["FVC_1"]
    with pytest.raises(UserError, match="'FVC_1' is named in two"):
        splits(columns, vocabulary, config)


def test_too_few_fingers_to_hold_any_out_is_an_error():
    columns, vocabulary = columns_of(("", 5))
    with pytest.raises(UserError, match="5 fingers to train on"):
        splits(columns, vocabulary, Config())


# Synthetic prints


def test_synthetic_prints_are_the_same_whoever_draws_them_and_complete_when_they_appear(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=19, seed=3)
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == [f"{f:05d}_{i}.png" for f in (1, 2) for i in range(1, 9)] + [f"00003_{i}.png" for i in (1, 2, 3)]
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(UserError, match="already holds files"):
        synthesize(tmp_path / "once", count=8, seed=3)


def test_many_fingers_are_drawn_in_several_processes_with_the_same_result(tmp_path):
    synthesize(tmp_path / "all", count=8 * 16 + 1, seed=0)
    assert len(list((tmp_path / "all").iterdir())) == 129
    first = next(impressions(0, 16))
    with Image.open(tmp_path / "all" / "00017_1.png") as picture:
        assert np.array_equal(np.asarray(picture), first)


def test_synthetic_prints_have_ridges_of_a_finger_s_width():
    period_px = []
    for number in range(6):
        picture = next(impressions(0, number))[112:240, 96:224].astype(float)
        spectrum = np.abs(np.fft.fft2((picture - picture.mean()) * np.outer(np.hanning(128), np.hanning(128))))
        frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(128), np.fft.fftfreq(128)))
        spectrum[frequency < 1 / 20] = 0
        period_px.append(1 / frequency.flat[spectrum.argmax()])
    assert 7.0 < np.median(period_px) < 11.5  # 9.1 +- 0.9 px at 500 dpi in real prints


def test_impressions_of_a_finger_look_more_alike_than_those_of_two():
    prints, finger = [], []
    for number in range(12):
        stream = impressions(0, number)
        for _ in range(3):
            prints.append(orientation_map(next(stream)))
            finger.append(number)
    metrics = small_module().score(rows_of(np.stack(prints), np.array(finger)))
    assert metrics["eer_all_pairs"] < 0.35


def orientation_map(picture: np.ndarray) -> np.ndarray:
    """Return the doubled-angle orientation of 11 x 10 cells, as one vector."""
    dy, dx = np.gradient(picture.astype(float))
    cells = [v.reshape(11, 32, 10, 32).mean(axis=(1, 3)) for v in (dx * dx - dy * dy, 2 * dx * dy)]
    return np.concatenate([v.ravel() for v in cells])
