"""Packed data whose images packing resized give the batches of the files' bytes, or are refused with what to type."""

import io
import itertools
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images import edit_index, encode_image, make_texture
from tests.test_loader import BACK_ENDS, are_equal
from tests.training import find_differences, load_state, new_run, read_run_metrics, start, train, wait_for_lines
from trainyard.cli import main
from trainyard.config.compose import compose, load_config
from trainyard.config.families import load_family
from trainyard.config.settings import TrainConfig
from trainyard.data.generator import hash_packing
from trainyard.data.hdf5 import ShardError
from trainyard.data.index import IMAGE, read_index
from trainyard.data.loader import Loader, MicroBatch
from trainyard.data.order import shuffle
from trainyard.data.pack import PackError
from trainyard.data.prepare import build_meta, count_samples, pack_raw, prepare_data
from trainyard.data.shards import ShardSet, verify
from trainyard.data.store import encode_png
from trainyard.errors import UserError
from trainyard.runs.evaluations import read_evaluations
from trainyard.runs.folder import read_env
from trainyard.tools.gc import list_usage

JOBS = Path(__file__).parents[1] / "jobs"
STORES = ("keep", "input-png", "input-raw")
AUGMENTED = [
    f"augment.{name}" for name in ("rotate_deg=20", "shift=0.1", "zoom=0.2", "flip=0.5", "gain=0.2", "contrast=0.3")
]
SAMPLES = {"fingerprint": 24, "twins": 96}
FEW = {"twins": ["packing.val_share=0", "packing.test_share=0"]}  # two families


def compose_smoke(family: str, *options: str) -> TrainConfig:
    return compose(f"{family}_smoke", [*AUGMENTED, *FEW.get(family, []), *options], JOBS)


class Packed(NamedTuple):
    """The same raw files packed in each way."""

    family: str
    raw: Path
    folders: dict[str, Path]  # by packing.store

    def open(self, store: str, **options: Any) -> Loader:
        config = compose_smoke(self.family, f"packing.store={store}")
        settings: dict[str, Any] = {"device": torch.device("cpu"), "decode": "cpu", "threads": 2}
        return Loader(config, ShardSet(self.folders[store]), **settings | options)


@pytest.fixture(scope="module", params=SAMPLES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Synthetic raw files, a third of them JPEG, packed in each way."""
    root = tmp_path_factory.mktemp(request.param)
    load_family(JOBS, request.param, "pack").synthesize(root / "raw", count=SAMPLES[request.param], seed=0)
    if request.param == "fingerprint":
        for path in sorted((root / "raw").glob("*.png"))[::3]:
            Image.open(path).save(path.with_suffix(".jpg"), quality=90)
            path.unlink()
    for store in STORES:
        config = compose_smoke(request.param, f"packing.store={store}")
        pack_raw(config, root / "raw", root / store, JOBS, workers=1, shard_mib=1)
    return Packed(request.param, root / "raw", {store: root / store for store in STORES})


def read_all(loader: Loader) -> Iterator[MicroBatch]:
    """Yield two epochs of training in micro-batches, and an evaluation."""
    ids = np.arange(loader.data.count)
    stream = loader.train(
        lambda epoch: shuffle(ids, seed=1, epoch=epoch, global_batch_size=9), epoch=2, start=1, micro_batch_size=4
    )
    yield from itertools.islice(stream, 16)
    stream.close()
    yield from loader.evaluate(ids, batch_size=5)


@pytest.mark.slow
@pytest.mark.parametrize("decode", BACK_ENDS)
@pytest.mark.parametrize("store", STORES[1:])
def test_batches_are_bitwise_those_of_the_files_bytes(packed, store, decode):
    expected = list(read_all(packed.open("keep", channels_last=True)))
    found = list(read_all(packed.open(store, decode=decode, channels_last=True)))
    assert len(expected) == len(found) == 16 + -(-SAMPLES[packed.family] // 5)
    assert all(are_equal(one, other) for one, other in zip(expected, found, strict=True))
    images = [micro.batch[IMAGE] for micro in expected[:16]]
    assert any(not torch.equal(image, image.flip(3)) for image in images)
    records = ShardSet(packed.folders[store]).records[IMAGE]
    assert records.kind == store and (records.original_px > records.shape[:, :2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES[1:])
def test_ranks_share_a_batch_of_resized_images_as_of_files(packed, store):
    for rank in range(3):
        ours, theirs = (
            list(packed.open(name, rank=rank, world_size=3).evaluate(np.arange(10), batch_size=2))
            for name in (store, "keep")
        )
        assert all(are_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_the_store_is_part_of_what_identifies_packed_data(packed, store):
    config = compose_smoke(packed.family, f"packing.store={store}")
    index = read_index(packed.folders[store])
    assert index.meta == build_meta(config) | {"code": hash_packing(JOBS / packed.family)}
    if store == "keep":  # as packed before the option existed
        assert "input" not in index.meta and "store" not in index.meta["packing"]
    else:
        image = config.image
        sizes = {name: getattr(image, name) for name in ("height_px", "width_px", "channels", "fill")}
        assert index.meta["input"] == {"kind": store, **sizes}
    others = [replace(config, packing=replace(config.packing, store=name)) for name in STORES if name != store]
    others += [replace(config, image=replace(config.image, height_px=96))] if store != "keep" else []
    for other in others:
        with pytest.raises(PackError, match=r"packed with other options\. Choose an empty folder"):
            pack_raw(other, packed.raw, packed.folders[store], JOBS, workers=1, shard_mib=1)


@pytest.mark.slow
def test_packing_that_was_interrupted_ends_with_the_same_bytes(packed, tmp_path):
    config, out = compose_smoke(packed.family, "packing.store=input-raw"), tmp_path / "again"

    class Killed(Exception):
        pass

    def stop() -> None:
        raise Killed

    with pytest.raises(Killed):
        pack_raw(config, packed.raw, out, JOBS, workers=1, shard_mib=1, on_shard=stop)
    assert not (out / "index.h5").exists()
    pack_raw(config, packed.raw, out, JOBS, workers=2, shard_mib=1)
    ours, theirs = ({p.name: p.read_bytes() for p in f.glob("*.h5")} for f in (out, packed.folders["input-raw"]))
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES[1:])
def test_a_damaged_image_is_found_by_verify_and_by_reading(packed, store, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in packed.folders[store].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    data = ShardSet(folder)
    records = data.records[IMAGE]
    with data.shards[0].path.open("r+b") as file:
        file.seek(int(records.start[0]) + 100)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    key = data.read_keys(np.array([0]))[0]
    assert [damage.what for damage in verify(folder)] == [f"image of '{key}'"]
    with pytest.raises(ShardError, match=r"image of .* is damaged: its checksum differs"):
        list(packed._replace(folders={store: folder}).open(store).evaluate(np.arange(4), batch_size=4))


@pytest.mark.slow
def test_another_size_of_the_input_is_refused_and_what_to_type_works(packed):
    folder, image = packed.folders["input-raw"], compose_smoke(packed.family).image
    wanted = ["image.height_px=96", "image.width_px=96"]
    changed = compose_smoke(packed.family, f"data.path={folder}", *wanted)
    for use in (lambda: prepare_data(changed, JOBS), lambda: count_samples(changed, JOBS), lambda: open_with(changed)):
        with pytest.raises(UserError) as refused:
            use()
        typed = [f"image.height_px={image.height_px}", f"image.width_px={image.width_px}"]
        assert f"this job has {' '.join(wanted)}. Type {' '.join(typed)}, or pack" in str(refused.value)
        prepare_data(compose_smoke(packed.family, f"data.path={folder}", *wanted, *typed), JOBS)
    with pytest.raises(UserError, match=r"for image\.fill=.*this job has image\.fill=7"):
        prepare_data(compose_smoke(packed.family, f"data.path={folder}", "image.fill=7"), JOBS)
    prepare_data(compose_smoke(packed.family, f"data.path={packed.folders['keep']}", *wanted), JOBS)


def open_with(config: TrainConfig) -> Loader:
    data = ShardSet(Path(config.data.path))
    return Loader(config, data, device=torch.device("cpu"), decode="cpu")


MORE_THAN_RESIZE = {
    "augment.crop_area_min=0.5": "augment.crop_area_min=0.5 crop_aspect_max=1 crops at random before resizing",
    "image.scales=[0.8,1.0]": "image.scales=[0.8,1.0] draws a size for each batch",
    "image.fit=letterbox": "image.fit=letterbox scales and pads each image on its own",
}


@pytest.mark.parametrize("option", MORE_THAN_RESIZE)
def test_options_that_need_the_whole_image_are_refused_before_packing(option):
    with pytest.raises(UserError) as refused:
        compose_smoke("fingerprint", "packing.store=input-png", option)
    said = str(refused.value)
    assert f"packing.store=input-png resizes images when they are packed, but {MORE_THAN_RESIZE[option]}," in said
    typed = said.partition("Type ")[2].partition(",")[0]
    compose_smoke("fingerprint", "packing.store=input-png", option, *shlex.split(typed))


@pytest.mark.slow
@pytest.mark.parametrize("option", MORE_THAN_RESIZE)
def test_options_that_need_the_whole_image_are_refused_on_resized_images(packed, option):
    config = compose_smoke(packed.family, f"data.path={packed.folders['input-png']}", option)
    for use in (lambda: prepare_data(config, JOBS), lambda: open_with(config)):
        with pytest.raises(
            UserError, match=r"pack the raw files again: trainyard pack JOB RAW OUT packing\.store=keep"
        ):
            use()
    prepare_data(replace(config, data=replace(config.data, path=str(packed.folders["keep"]))), JOBS)


def test_families_that_do_more_than_resize_have_no_such_option():
    for family in ("tinydet", "pricing"):
        with pytest.raises(UserError, match=r"packing\.store"):
            compose_smoke(family, "packing.store=input-raw")


@pytest.mark.slow
def test_shapes_that_cannot_be_true_are_refused(packed, tmp_path):
    for store, column, value in (("input-raw", 0, 3), ("input-png", 1, 3), ("input-png", 3, 0)):
        folder = tmp_path / f"{store}-{column}"
        folder.mkdir()
        for path in packed.folders[store].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        with edit_index(folder) as file:
            file["records/image/shape"][1, column] = value
        with pytest.raises(ShardError, match="a shape cannot be true"):
            ShardSet(folder)


@pytest.mark.slow
def test_uncompressed_images_that_do_not_follow_each_other_are_refused(packed, tmp_path):
    """They are read as the rows of one array, from the first record of each shard on."""
    folder = tmp_path / "packed"
    shutil.copytree(packed.folders["input-raw"], folder)
    with edit_index(folder) as file:
        start = file["records/image/start"]
        start[1] = start[0]
    with pytest.raises(ShardError, match="uncompressed images do not follow each other in shard-00000"):
        ShardSet(folder)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (31, 17)])
def test_png_holds_the_pixels_it_was_given(channels, size):
    image_HWC = make_texture(0, *size, channels)
    with Image.open(io.BytesIO(encode_png(image_HWC))) as image:
        assert image.mode == {1: "L", 3: "RGB"}[channels]
        assert np.array_equal(np.asarray(image).reshape(image_HWC.shape), image_HWC)
    assert len(encode_image(image_HWC, "png")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_packing_says_what_an_image_takes_and_how_many_a_core_reads(packed, store, tmp_path, log):
    config = compose_smoke(packed.family, f"packing.store={store}", f"data.cache={tmp_path}")
    folder = pack_raw(config, packed.raw, None, JOBS, workers=1)
    mean_kb = ShardSet(folder).records[IMAGE].size.mean() / 1e3
    said = f"{folder}: an image takes {mean_kb:.1f} kB on average (packing.store={store}), and one core of this machine"
    assert [line for line in log if line.startswith(said) and "measured now" in line]
    log.clear()
    assert pack_raw(config, packed.raw, None, JOBS, workers=1) == folder
    assert not [line for line in log if "an image takes" in line], "nothing was packed"


@pytest.mark.long
def test_a_killed_run_on_uncompressed_images_ends_as_a_run_on_files_and_predicts_the_same(tmp_path, capsys):
    """One run on files; one on resized images, killed on the way: same weights, metrics, embeddings and scores."""
    options = ("data.synthetic=64", "split.val_share=0.25", "split.test_share=0.25", *AUGMENTED)
    runs = {}
    for store in ("keep", "input-raw"):
        runs[store] = new_run(tmp_path, *options, f"packing.store={store}", job="fingerprint_smoke", jobs=JOBS)
    assert train(runs["keep"], jobs=JOBS) == 0
    process = start(runs["input-raw"], jobs=JOBS)
    wait_for_lines(runs["input-raw"], 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
    assert train(runs["input-raw"], jobs=JOBS) == 0
    different = find_differences(*(load_state(run) for run in runs.values()))
    assert different == ["data"], "only the fingerprint of the packed data"
    metrics = [read_run_metrics(run) for run in runs.values()]
    assert metrics[0] == metrics[1] and any("eer" in line for line in metrics[0])

    choices = [read_env(run)["choices"] for run in runs.values()]
    assert "images" not in choices[0] and choices[1]["images"]["value"] == "input-raw"

    raw = next((tmp_path / "cache").glob("fingerprint-synthetic-*"))
    embedded = []
    for store, run in runs.items():
        config = load_config(run / "config.yaml", JOBS)
        assert main(["verify", config.data.path]) == 0
        out = tmp_path / f"{store}.npz"
        assert main(["embed", str(run), str(raw), str(out), "--jobs", str(JOBS)]) == 0
        embedded.append(np.load(out)["embedding"])
        words = ["evaluate", str(run), str(raw), config.data.path, "--jobs", str(JOBS)]
        assert main([*words, "--no-baseline"]) == 0
        on_files, on_packed = read_evaluations(run)
        scores = [[{**line, "split": ""} for line in one.lines] for one in (on_files, on_packed)]
        assert scores[0] == scores[1] and scores[0][0]["eer_all_pairs"] > 0
        assert [one.about["seen_in_training"]["samples"] for one in (on_files, on_packed)] == [32, 32]
        assert main([*words, "evaluation.baseline_pairs=20", "evaluation.bootstrap_draws=0"]) == 0
        assert {line["system"] for one in read_evaluations(run)[2:] for line in one.lines} == {
            "run",
            "BLPOC",
            "matcher",
            "untrained matcher",
        }
    assert np.array_equal(*embedded)
    found = list_usage(tmp_path / "runs", data_dirs=[tmp_path / "cache"], environ={})
    assert sorted(item.name for item in found if item.kind == "packed") == sorted(
        load_config(run / "config.yaml", JOBS).data.path for run in runs.values()
    )
    capsys.readouterr()
