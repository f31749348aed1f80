"""Records of variable length, from packing to the batch: audio, ragged arrays, boxes that follow images."""

import importlib.util
import io
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.images import edit_index
from trainyard.config.settings import AudioSettings, AugmentSettings, ImageSettings, TrainConfig
from trainyard.data import augment
from trainyard.data.augment import build_neutral, choose_scale, compute_affine, draw, draw_noise, draw_starts
from trainyard.data.hdf5 import ShardError
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import shuffle
from trainyard.data.pack import PackError, pack
from trainyard.data.shards import Audio, Loaded, Ragged, Sample, ShardSet, verify
from trainyard.errors import UserError

HAS_DALI = all(importlib.util.find_spec(name) for name in ("nvidia", "nvidia.dali"))
BACK_ENDS = ["cpu", pytest.param("dali", marks=pytest.mark.skipif(not HAS_DALI, reason="needs nvidia.dali"))]
COUNT, FRAMES = 24, 500


def make_wave(i: int) -> np.ndarray:
    """Return recording i as int16: all lengths differ, and each value tells its position."""
    frames = 90 * i + 200
    return (np.arange(frames) * 7 + 1000 * i).astype(np.int16)


def make_boxes(i: int) -> np.ndarray:
    """Return i % 5 boxes xyxy inside an image of 60 x 40 (width x height) pixels."""
    rng = np.random.default_rng(i)
    corner = rng.integers(0, (50, 30), size=(i % 5, 2))
    return np.concatenate([corner, corner + rng.integers(2, 9, size=corner.shape)], axis=1).astype(np.float32)


def encode_audio(wave: np.ndarray, kind: str, rate_hz: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate_hz, format=kind, subtype="PCM_16")
    return file.getvalue()


def make_image(i: int) -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, size=(40, 60, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_map(i: int) -> np.ndarray:
    return np.full((i % 4, 1 + i % 3, 2), i, np.float32)


def load_row(i: int) -> Loaded:
    return {
        "flac": Audio(encode_audio(make_wave(i), "FLAC")),
        "wav": Audio(encode_audio(make_wave(i), "WAV")),
        "pcm": Audio(make_wave(i)),
        "boxes": Ragged(make_boxes(i)),
        "tokens": Ragged(np.arange(i, dtype=np.int32)),
        "map": Ragged(make_map(i), varying_axes=2),
        "image": make_image(i),
    }


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("records") / "packed"
    samples = [Sample(f"row {i}", partial(dict, load_row(i))) for i in range(COUNT)]
    pack(iter(samples), out, meta={}, workers=1).close()
    return out


def make_loader(
    packed: Path, *, decode: str = "cpu", rank: int = 0, world_size: int = 1, image=None, augmentation=None
):
    config = TrainConfig(
        image=image or ImageSettings(height_px=32, width_px=32, channels=3),
        sound=AudioSettings(frames=FRAMES),
        augment=augmentation or AugmentSettings(),
        seed=3,
    )
    device = torch.device("cpu")
    return Loader(config, ShardSet(packed), device=device, decode=decode, rank=rank, world_size=world_size)


def take_batches(packed: Path, *, epoch: int = 0, batches: int = 1, micro: int = 0, **how) -> list[MicroBatch]:
    stream = make_loader(packed, **how).train(
        lambda number: shuffle(np.arange(COUNT), seed=3, epoch=number, global_batch_size=8),
        epoch=epoch,
        start=0,
        micro_batch_size=micro,
    )
    try:
        return [next(stream) for _ in range(batches)]
    finally:
        stream.close()


@pytest.mark.slow
def test_records_of_variable_length_are_read_back_equal(packed):
    data, ids = ShardSet(packed), np.array([7, 0, 23, 5])
    for i, boxes, tokens, pcm, flac in zip(
        ids.tolist(), *(data.read_arrays(name, ids) for name in ("boxes", "tokens", "pcm", "flac")), strict=True
    ):
        assert boxes.dtype == np.float32 and np.array_equal(boxes, make_boxes(i))
        assert tokens.dtype == np.int32 and np.array_equal(tokens, np.arange(i))
        assert np.array_equal(pcm, make_wave(i))
        assert flac.tobytes() == encode_audio(make_wave(i), "FLAC")
    assert data.records["wav"].shape[ids].tolist() == [[len(make_wave(i)), 16_000] for i in ids.tolist()]


@pytest.mark.slow
def test_a_batch_contains_ragged_arrays_padded_with_zeros_and_their_lengths(packed):
    (micro,) = take_batches(packed)
    ids = micro.batch["sample_id"].tolist()
    assert micro.batch["tokens_count"].tolist() == ids
    assert micro.batch["tokens"].shape == (8, max(ids)) and micro.batch["boxes"].shape[2] == 4
    for i, tokens, boxes in zip(ids, micro.batch["tokens"], micro.batch["boxes"], strict=True):
        assert tokens[:i].tolist() == list(range(i)) and not tokens[i:].any()
        assert np.array_equal(boxes[: i % 5].numpy(), make_boxes(i)) and not boxes[i % 5 :].any()
    assert micro.batch["map"].shape == (8, max(i % 4 for i in ids), max(1 + i % 3 for i in ids), 2)
    assert micro.batch["map_count"].tolist() == [[i % 4, 1 + i % 3] for i in ids]
    for i, values in zip(ids, micro.batch["map"].numpy(), strict=True):
        assert np.array_equal(values[: i % 4, : 1 + i % 3], make_map(i)) and values.sum() == make_map(i).sum()


@pytest.mark.parametrize(("name", "shape"), [("map", [[2, 2, 1], [1, 1, 4]]), ("tokens", [[], []])])
def test_an_index_whose_arrays_cannot_vary_as_it_says_is_refused(name, shape, packed, tmp_path):
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    with edit_index(copy) as file:
        shapes = file[f"records/{name}/shape"][:]
        del file[f"records/{name}/shape"], file[f"records/{name}/size"]
        shapes = np.resize(np.array(shape, np.int32), (len(shapes), len(shape[0])))
        file[f"records/{name}/shape"] = shapes
        file[f"records/{name}/size"] = shapes.prod(axis=1) * 4
    with pytest.raises(ShardError, match=rf"{name}: a (shape|record) .* in shard-00000.h5"):
        ShardSet(copy)


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_evaluation_takes_the_first_frames_of_each_recording_and_repeats_a_short_one(packed, decode):
    (micro,) = make_loader(packed, decode=decode).evaluate(np.arange(COUNT), batch_size=COUNT)
    for name in ("flac", "wav", "pcm"):
        assert micro.batch[name].dtype == torch.float32
        expected = np.stack([np.resize(make_wave(i), FRAMES) for i in range(COUNT)]).astype(np.float32) / 32768
        assert np.array_equal(micro.batch[name].numpy(), expected)
        assert micro.batch[f"{name}_count"].tolist() == [len(make_wave(i)) for i in range(COUNT)]
    assert "noise" not in micro.batch


@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize(("name", "frames"), [("flac", 10_000), ("wav", 150)])
def test_a_recording_whose_length_is_not_as_stated_ends_reading_with_an_error_that_names_it(
    packed, tmp_path, decode, name, frames
):
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    with edit_index(copy) as file:
        file[f"records/{name}/shape"][7, 0] = frames
    said = f"its header says {len(make_wave(7))} x 16000, the index {frames} x 16000"
    with pytest.raises(ShardError, match=rf"{name} of 'row 7' is damaged: {said}\."):
        list(make_loader(copy, decode=decode).evaluate(np.arange(COUNT), batch_size=8))
    assert [(damage.what, damage.reason) for damage in verify(copy)] == [(f"{name} of 'row 7'", said)]


@pytest.mark.slow
@pytest.mark.parametrize("decode", BACK_ENDS)
def test_training_crops_audio_by_seed_epoch_and_sample(packed, decode):
    crops, again = (
        take_batches(packed, decode=decode, batches=3),
        take_batches(packed, decode=decode, batches=6, micro=4),
    )
    other = take_batches(packed, decode=decode, batches=3, epoch=1)
    starts = find_starts(crops)
    assert starts == find_starts(again) and starts != find_starts(other)
    assert len(set(starts.values())) > 10, "long recordings are cropped anywhere"
    assert all(0 <= start <= max(0, len(make_wave(i)) - FRAMES) for i, start in starts.items())


def find_starts(micro_batches: list[MicroBatch]) -> dict[int, int]:
    """Return the first frame of each crop, which is the same for FLAC, WAV and PCM."""
    found = {}
    for micro in micro_batches:
        assert torch.equal(micro.batch["flac"], micro.batch["pcm"])
        assert torch.equal(micro.batch["wav"], micro.batch["pcm"])
        for i, audio in zip(micro.batch["sample_id"].tolist(), micro.batch["pcm"], strict=True):
            values = (audio * 32768).to(torch.int16).numpy()
            starts = [
                k for k in range(len(make_wave(i))) if np.array_equal(np.resize(make_wave(i)[k:], FRAMES), values)
            ]
            found[i] = starts[0]
    return found


def test_every_start_is_drawn_including_the_last():
    drawn = draw_starts(seed=0, epoch=0, sample_ids=np.arange(4000), spare=np.full(4000, 3))
    counts = np.bincount(drawn)
    assert len(counts) == 4 and counts.min() > 900
    assert not draw_starts(seed=0, epoch=0, sample_ids=np.arange(9), spare=np.arange(-9, 0)).any()


def test_noise_is_uniform_and_depends_on_seed_epoch_and_sample():
    ids = np.arange(2000)
    here = draw_noise(seed=1, epoch=2, sample_ids=ids)
    assert here.dtype == np.float32 and here.shape == (2000, 32) and here.min() >= 0 and here.max() < 1
    assert abs(here.mean() - 0.5) < 0.01 and abs(np.corrcoef(here[:, 0], here[:, 1])[0, 1]) < 0.1
    assert np.array_equal(draw_noise(seed=1, epoch=2, sample_ids=ids[::-1]), here[::-1])
    geometry = augment.draw_uniforms(seed=1, epoch=2, sample_ids=ids, count=32)
    for other in (draw_noise(seed=1, epoch=3, sample_ids=ids), draw_noise(seed=2, epoch=2, sample_ids=ids), geometry):
        assert not np.isin(here, other.astype(np.float32)).any(axis=1).all()
        assert abs(np.corrcoef(here[:, 0], other[:, 0])[0, 1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Audio(b"RIFFnonsense"), "not an audio file of a known format"),
        (Audio(encode_audio(np.zeros((40, 2), dtype=np.int16), "WAV")), "2 channels in PCM_16: expected one channel"),
        (Audio(encode_audio(np.zeros(0, dtype=np.int16), "WAV")), "0 frames"),
    ],
)
def test_packing_refuses_audio_that_is_not_mono_and_16_bit(tmp_path, wrong, said):
    with pytest.raises(PackError, match=said):
        pack(iter([Sample("bad.wav", partial(dict, wave=wrong))]), tmp_path / "out", meta={}, workers=1)


@pytest.mark.slow
def test_artifacts_are_passed_to_load_and_stored(tmp_path):
    samples = [Sample(f"row {i}", count_words) for i in range(3)]
    artifacts = {"words": "a b ä"}
    pack(iter(samples), tmp_path / "out", meta={}, workers=1, artifacts=artifacts).close()
    data = ShardSet(tmp_path / "out")
    assert data.artifacts == artifacts and data.columns["words"].tolist() == [3, 3, 3]


def count_words(artifacts: dict[str, str]) -> Loaded:
    return {"words": len(artifacts["words"].split())}


def test_a_damaged_ragged_record_is_named(packed, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in packed.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    place = ShardSet(packed).records["boxes"].start[9]
    with (copy / "shard-00000.h5").open("r+b") as file:
        file.seek(int(place))
        file.write(b"\xff\xff")
    with pytest.raises(ShardError, match="boxes of 'row 9' is damaged: its checksum differs"):
        ShardSet(copy).read_arrays("boxes", np.array([9]))


# boxes follow images

LETTERBOX = {"height_px": 48, "width_px": 64}
sides = st.integers(1, 300)


@given(height=sides, width=sides, out=st.tuples(st.integers(8, 200), st.integers(8, 200)))
def test_a_letterbox_contains_the_whole_region_without_stretching_it(height, width, out):
    regions = np.array([[3, 5, height, width]], dtype=np.int32)
    y, x, box_height, box_width = build_neutral(regions, letterbox=out).box[0].tolist()
    assert (y, x) == (3, 5) and box_height >= height and box_width >= width
    assert box_height == height or box_width == width
    scale_y, scale_x = out[0] / box_height, out[1] / box_width
    assert abs(scale_y / scale_x - 1) <= 0.5 / min(box_height, box_width) + 1e-9, "only rounding to whole pixels"


def test_a_crop_keeps_one_whole_box_where_it_fits():
    rng = np.random.default_rng(0)
    regions = np.tile(np.array([0, 0, 400, 600], dtype=np.int32), (300, 1))
    corner = rng.integers(0, (560, 360), size=(300, 3, 2))
    boxes = np.concatenate([corner, corner + rng.integers(3, 40, size=corner.shape)], axis=2).astype(np.float32)
    settings = AugmentSettings(scale_min=2, scale_max=4)
    how = {"seed": 0, "epoch": 0, "sample_ids": np.arange(300), "regions": regions, "letterbox": True}
    p = draw(settings, **how, **LETTERBOX, keep_boxes=boxes)
    y, x, height, width = p.box.T
    assert height.max() <= 225 and (p.box[:, :2] >= 0).all() and (y + height <= 400).all() and (x + width <= 600).all()
    inside = (boxes[:, :, 0] >= x[:, None]) & (boxes[:, :, 1] >= y[:, None])
    inside &= (boxes[:, :, 2] <= (x + width)[:, None]) & (boxes[:, :, 3] <= (y + height)[:, None])
    assert inside.any(axis=1).all()
    without = draw(settings, **how, **LETTERBOX)
    assert not np.array_equal(without.box, p.box)


def test_scales_are_within_their_limits_and_empty_box_lists_change_nothing():
    regions = np.tile(np.array([0, 0, 96, 128], dtype=np.int32), (500, 1))
    settings = AugmentSettings(scale_min=0.5, scale_max=2)
    how = {"seed": 0, "epoch": 0, "sample_ids": np.arange(500), "regions": regions, "letterbox": True}
    p = draw(settings, **how, **LETTERBOX)
    scale = 48 / p.box[:, 2] / 0.5
    assert 0.49 < scale.min() < 0.55 and 1.85 < scale.max() < 2.05
    assert abs(np.median(np.log(scale))) < 0.1
    empty = [np.zeros((0, 4), dtype=np.float32)] * 500
    assert np.array_equal(draw(settings, **how, **LETTERBOX, keep_boxes=empty).box, p.box)


def draw_spot(width: int, height: int, x: float, y: float) -> bytes:
    """Return a PNG of a bright spot, standard deviation 2 px, at (x, y)."""
    columns, rows = np.arange(width) + 0.5, np.arange(height) + 0.5
    spot = np.exp(-((columns - x) ** 2) / 8)[None] * np.exp(-((rows - y) ** 2) / 8)[:, None]
    file = io.BytesIO()
    Image.fromarray(np.rint(255 * spot).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize("fit", ["stretch", "letterbox"])
def test_affine_maps_a_point_to_its_position_in_the_image(tmp_path, decode, fit):
    """To a fraction of a pixel: the centre of mass of a spot in the model's input, with all geometry at once."""
    rng = np.random.default_rng(2)
    spots = rng.uniform((80, 60), (120, 90), size=(COUNT, 2))
    rows = [Sample(f"{i}", partial(dict, image=draw_spot(200, 150, *spots[i]))) for i in range(COUNT)]
    pack(iter(rows), tmp_path / "out", meta={}, workers=1).close()
    crops = {"scale_min": 1.0, "scale_max": 1.6} if fit == "letterbox" else {"crop_area_min": 0.7}
    micro_batches = take_batches(
        tmp_path / "out",
        decode=decode,
        batches=3,
        image=ImageSettings(height_px=120, width_px=160, channels=1, fill=0, fit=fit),
        augmentation=AugmentSettings(flip=0.5, rotate_deg=20, shift=0.05, zoom=0.1, **crops),
    )
    checked = 0
    for micro in micro_batches:
        assert micro.batch["image_px"].tolist() == [[150, 200]] * 8
        for i, image, move in zip(
            micro.batch["sample_id"].tolist(), micro.batch["image"][:, 0], micro.batch["affine"].numpy(), strict=True
        ):
            x, y = move @ [*spots[i], 1]
            if 15 < x < 145 and 15 < y < 105:
                checked += 1
                found = find_centre(image.numpy())
                assert abs(found[0] - x) < 0.1 and abs(found[1] - y) < 0.1, (found, (x, y))
    assert checked > COUNT // 2


def find_centre(image: np.ndarray) -> tuple[float, float]:
    total = image.sum()
    rows, columns = (np.arange(n) + 0.5 for n in image.shape)
    return (image.sum(axis=0) @ columns) / total, (image.sum(axis=1) @ rows) / total


def test_affine_of_an_image_without_augmentation_is_its_scale():
    p = build_neutral(np.array([[0, 0, 40, 60]], dtype=np.int32))
    assert compute_affine(p, height_px=80, width_px=30)[0].tolist() == [[0.5, 0, 0], [0, 2, 0]]


@pytest.mark.parametrize("decode", BACK_ENDS)
def test_each_global_batch_has_one_of_the_requested_sizes(packed, decode):
    image = ImageSettings(height_px=32, width_px=64, channels=3, scales=[0.5, 1.0, 2.0])
    micro_batches = take_batches(packed, decode=decode, batches=12, micro=4, image=image)
    assert {tuple(micro.batch["image"].shape[2:]) for micro in micro_batches} == {(16, 32), (32, 64), (64, 128)}
    drawn = [
        choose_scale([0.5, 1.0, 2.0], seed=3, epoch=e, batch=b) for e in (0, 1) for b in range(3) for _ in range(2)
    ]
    assert [tuple(micro.batch["image"].shape[2:]) for micro in micro_batches] == [(32 * s, 64 * s) for s in drawn]
    (whole,) = make_loader(packed, decode=decode, image=image).evaluate(np.arange(COUNT), batch_size=COUNT)
    assert whole.batch["image"].shape[2:] == (32, 64)


@pytest.mark.parametrize(
    ("image", "augmentation", "said"),
    [
        ({}, {"scale_max": 2.0}, "need image.fit=letterbox"),
        ({"fit": "letterbox"}, {"crop_area_min": 0.5}, "use augment.scale_min"),
        ({"fit": "letterbox"}, {"scale_min": 2.0}, "scale_min=2.0 is above scale_max=1.0"),
        (
            {"fit": "letterbox"},
            {"crop_keeps": "cars"},
            "crop_keeps=cars: the data has no such boxes, only boxes, flac",
        ),
        ({"fit": "letterbox"}, {"crop_keeps": "image"}, "crop_keeps=image: the data has no such boxes"),
    ],
)
def test_options_that_exclude_each_other_are_refused(packed, image, augmentation, said):
    with pytest.raises(UserError, match=said):
        take_batches(packed, image=ImageSettings(**image), augmentation=AugmentSettings(**augmentation))


def test_an_array_without_axes_reads_back(tmp_path):
    samples = [Sample(str(i), partial(dict, {"weight": np.array(i, np.float32)})) for i in range(3)]
    data = pack(iter(samples), tmp_path / "packed", meta={}, workers=1)
    assert [float(weight) for weight in data.read_arrays("weight", np.arange(3))] == [0, 1, 2]
