"""Images that packing encodes again, with losses: smaller, measured, refused where they would be wrong."""

import io
import json
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.images import encode_image, make_texture
from trainyard.config.compose import compose
from trainyard.config.families import load_family
from trainyard.config.settings import ImageSettings, TrainConfig
from trainyard.data.generator import hash_packing
from trainyard.data.index import REGION
from trainyard.data.lossy import LOSS, measure_loss
from trainyard.data.pack import pack
from trainyard.data.prepare import build_meta, pack_raw
from trainyard.data.shards import Loaded, Ragged, Sample, ShardSet
from trainyard.data.store import JpegStore, name_store, read_regions
from trainyard.errors import UserError

JOBS = Path(__file__).parents[1] / "jobs"
JPEG = ("packing.store=jpeg", "packing.longest_side_px=48", "packing.quality=80")


def compose_twins(*options: str) -> TrainConfig:
    return compose("twins_smoke", ["packing.val_share=0", "packing.test_share=0", *options], JOBS)


def make_image(seed: int, height: int, width: int) -> bytes:
    return encode_image(make_texture(seed, height, width, 3), "png")


def pack_images(out: Path, images: dict[str, Loaded], *, longest_side_px: int = 0, quality: int = 80) -> ShardSet:
    meta = {"jpeg": {"longest_side_px": longest_side_px, "quality": quality}}
    return pack(make_samples(images), out, meta=meta, workers=1)


def make_samples(images: dict[str, Loaded]) -> Iterator[Sample]:
    yield from (Sample(key, partial(dict, loaded)) for key, loaded in images.items())


def open_stored(data: ShardSet, number: int) -> Image.Image:
    return Image.open(io.BytesIO(data.read_bytes("image", np.array([number]))[0]))


def test_an_image_becomes_a_jpeg_no_longer_than_asked_or_keeps_its_file(tmp_path):
    small = encode_image(np.full((4, 4, 3), 7, dtype=np.uint8), "png")
    images = {"wide": make_image(0, 60, 100), "tall": make_image(1, 90, 30), "short": make_image(2, 40, 50)}
    data = pack_images(
        tmp_path,
        {key: {"image": image} for key, image in images.items()} | {"small": {"image": small}},
        longest_side_px=50,
    )
    stored = [open_stored(data, number) for number in range(4)]
    assert [image.format for image in stored] == ["JPEG", "JPEG", "JPEG", "PNG"]
    assert [image.size for image in stored] == [(50, 30), (17, 50), (50, 40), (4, 4)]
    assert data.records["image"].shape.tolist() == [[30, 50, 3], [50, 17, 3], [40, 50, 3], [4, 4, 3]]
    assert data.read_bytes("image", np.array([3]))[0].tobytes() == small
    assert (
        JpegStore(0, 95).encode(data.read_bytes("image", np.array([0]))[0].tobytes())
        == data.read_bytes("image", np.array([0]))[0].tobytes()
    ), "a JPEG that would grow"


def test_the_part_that_packing_chose_is_scaled_with_its_image(tmp_path):
    region = dict(zip(REGION, (10, -20, 70, 90), strict=True))
    image = {"image": make_image(0, 100, 200)}
    scaled, whole = (pack_images(tmp_path / str(px), {"one": image | region}, longest_side_px=px) for px in (50, 0))
    assert read_regions(scaled).tolist() == [[2, -5, 18, 23]]  # edges 2.5, -5, 20, 17.5 to the nearest, even of two
    assert read_regions(whole).tolist() == [[10, -20, 70, 90]]
    assert read_regions(pack_images(tmp_path / "none", {"one": image}, longest_side_px=50)).tolist() == [[0, 0, 25, 50]]


def test_images_with_arrays_in_their_pixels_are_not_scaled_and_what_to_type_works(tmp_path):
    boxes = {"one": {"image": make_image(0, 60, 60), "boxes": Ragged(np.ones((2, 4), np.float32))}}
    with pytest.raises(UserError, match=r"not their 'boxes'.* Type packing\.longest_side_px=0, which"):
        pack_images(tmp_path / "scaled", boxes, longest_side_px=50)
    assert open_stored(pack_images(tmp_path / "whole", boxes), 0).size == (60, 60)


@pytest.mark.slow
def test_packing_prints_and_records_what_it_saves_and_loses(tmp_path, log):
    names = ("ann", "bea", "cat", "dot")
    for i, path in enumerate(tmp_path / "raw" / name / f"{j}.png" for name in names for j in range(20)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(i, 60, 50 + i % 20))
    (tmp_path / "raw" / "twin_pairs_infor.json").write_text(json.dumps([names[:2], names[2:]]))
    config = compose_twins(*JPEG)
    folder = pack_raw(config, tmp_path / "raw", tmp_path / "packed", JOBS, workers=1)
    written = (folder / LOSS).read_bytes()
    (folder / LOSS).unlink()  # as if killed before it was written
    log.clear()
    pack_raw(config, tmp_path / "raw", folder, JOBS, workers=1)
    assert (folder / LOSS).read_bytes() == written
    loss, data = json.loads((folder / LOSS).read_text()), ShardSet(folder)
    ids = np.unique(np.linspace(0, data.count - 1, 64).astype(int))
    stored = dict(zip(data.read_keys(ids), data.read_bytes("image", ids), strict=True))
    listed = load_family(JOBS, "twins", "pack").samples(tmp_path / "raw", config)
    originals = {one.key: one.load()["image"] for one in listed if one.key in stored}
    kept = [key for key, image in originals.items() if stored[key].tobytes() == image]
    size = (config.image.width_px, config.image.height_px)
    psnr = []
    for key in originals.keys() - set(kept):
        one, other = (
            np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.BILINEAR), float)
            for data in (originals[key], stored[key])
        )
        psnr.append(10 * np.log10(255**2 / ((one - other) ** 2).mean()))
    assert (loss["images"], loss["kept"], len(psnr)) == (64, len(kept), 64 - len(kept)) and psnr
    assert loss["file_bytes"] == sum(map(len, originals.values()))
    assert loss["stored_bytes"] == sum(map(len, stored.values()))
    assert loss["psnr_db_min"] == pytest.approx(min(psnr), abs=0.05), "Pillow's resizing rounds otherwise"
    assert loss["psnr_db_median"] == pytest.approx(np.median(psnr), abs=0.05)
    (said,) = (line for line in log if "at the worst" in line)
    assert f"{loss['psnr_db_min']:.1f} dB at the worst, {loss['psnr_db_median']:.1f} dB in the median" in said
    assert said.startswith(f"{folder}: {' '.join(JPEG)}: 64 images")
    assert data.meta == build_meta(config) | {"code": hash_packing(JOBS / "twins")}


def test_a_loss_is_worse_the_lower_the_quality_and_none_where_files_are_kept(tmp_path):
    images = {str(i): {"image": make_image(i, 40, 40)} for i in range(4)}
    image = ImageSettings(height_px=32, width_px=32, channels=3)
    losses = [
        measure_loss(make_samples(images), pack_images(tmp_path / str(quality), images, quality=quality), image)
        for quality in (30, 95)
    ]
    assert losses[0].psnr_db_min < losses[1].psnr_db_min and losses[0].stored_bytes < losses[1].stored_bytes
    flat = {"flat": {"image": encode_image(np.full((8, 8, 3), 7, np.uint8), "png")}}
    loss = measure_loss(make_samples(flat), pack_images(tmp_path / "flat", flat), image)
    assert (loss.kept, loss.psnr_db_min) == (1, None) and "nothing is lost" in loss.describe()


def test_without_it_packed_data_keep_their_name():
    meta = build_meta(compose_twins())
    assert not {"jpeg", "input"} & set(meta) and not {"store", "longest_side_px", "quality"} & set(meta["packing"])
    meta = build_meta(compose_twins("packing.store=input-raw"))
    assert "jpeg" not in meta and set(meta["packing"]) & {"store", "longest_side_px", "quality"} == {"store"}
    meta = build_meta(compose_twins(*JPEG))
    assert meta["jpeg"] == {"longest_side_px": 48, "quality": 80} and "input" not in meta
    assert f"packing.store={name_store({}, meta)}" == " ".join(JPEG)


def test_it_is_refused_for_gray_images_and_its_options_without_it_and_what_to_type_works():
    with pytest.raises(UserError, match=r"is for RGB images.*Type packing\.store=keep\.") as refused:
        compose("fingerprint_smoke", ["packing.store=jpeg"], JOBS)
    compose("fingerprint_smoke", ["packing.store=jpeg", str(refused.value).rpartition("Type ")[2].rstrip(".")], JOBS)
    for option in ("packing.longest_side_px=48", "packing.quality=80"):
        with pytest.raises(UserError, match=r"are for packing\.store=jpeg, but it is keep\.") as refused:
            compose_twins(option)
        compose_twins(option, *shlex.split(str(refused.value).partition("Type ")[2].partition(",")[0]))
    with pytest.raises(UserError, match=r"packing\.store"):
        compose("tinydet_smoke", ["packing.store=jpeg"], JOBS)
    compose_twins(*JPEG, "image.fit=letterbox"), compose_twins(*JPEG, "augment.crop_area_min=0.5")
