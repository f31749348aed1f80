import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from loguru import logger
from PIL import Image

from tests.images import (
    META,
    encode_image,
    is_running,
    list_descendants,
    make_import_environ,
    make_points,
    make_texture,
    pack_folder,
    samples,
    write_folder,
)
from tests.training import FORKSERVER, run_as_command
from tests.waiting import wait_until
from trainyard.data.copies import describe_copies
from trainyard.data.hdf5 import ShardError, open_hdf5
from trainyard.data.pack import JOURNAL, PackError, pack, read_listing
from trainyard.data.shards import BadRecord, Loaded, Ragged, Sample, ShardSet, verify
from trainyard.data.write_shard import ShardTask, open_image, write_shard


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a data set, without the journal, which contains the times of raw files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != JOURNAL}


def read_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.h5")}


def make_samples(rows: list[Loaded], **columns: list) -> Iterator[Sample]:
    """Yield samples of rows in memory. The workers make them with `dict`: this module would import torch in each."""
    for i, row in enumerate(rows):
        yield Sample(f"row {i}", partial(dict, row), {name: values[i] for name, values in columns.items()})


def pack_rows(rows: list[Loaded], out: Path, **options) -> ShardSet:
    return pack(make_samples(rows), out, meta={}, workers=1, **options)


def test_packed_images_and_keys_are_read_back(raw_images, images):
    paths = sorted(raw_images.iterdir())
    ids = np.arange(len(paths))
    assert images.count == len(paths) == 26 and images.skipped == 0 and len(images.shards) > 3
    assert images.read_keys(ids) == [path.name for path in paths]
    assert [record.tobytes() for record in images.read_bytes("image", ids)] == [path.read_bytes() for path in paths]
    assert images.meta == META


def test_records_are_read_in_the_requested_order_across_shards(raw_images, images):
    paths, ids = sorted(raw_images.iterdir()), np.array([25, 0, 13, 13, 7])
    assert [record.tobytes() for record in images.read_bytes("image", ids)] == [paths[i].read_bytes() for i in ids]
    assert images.read_bytes("image", np.array([], dtype=np.int64)) == []


def test_columns_contain_numbers_and_encoded_text(raw_images, images):
    stems = [path.stem for path in sorted(raw_images.iterdir())]
    numbers = np.array([int(stem.partition("-")[2]) for stem in stems])
    who = [stem.partition("-")[0] for stem in stems]
    assert set(images.columns) == {"who", "number", "weight", "listed"}
    assert images.columns["number"].dtype == np.int64 and np.array_equal(images.columns["number"], numbers)
    assert images.columns["listed"].tolist() == [len(path.name) for path in sorted(raw_images.iterdir())]
    assert images.vocabulary == {"who": sorted(set(who))}
    assert [images.vocabulary["who"][code] for code in images.columns["who"]] == who


def test_a_column_of_ints_and_floats_is_float_in_every_shard(images):
    number, weight = images.columns["number"], images.columns["weight"]
    assert weight.dtype == np.float64
    assert np.array_equal(weight, np.where(number % 2, number / 2, number))


def test_numpy_numbers_keep_their_values(tmp_path):
    rows = [{"a": np.float32(0.5), "b": np.int16(7), "c": 1}, {"a": np.float32(0.25), "b": np.int16(-1), "c": 0.5}]
    columns = pack_rows(rows, tmp_path / "out").columns
    assert {name: values.tolist() for name, values in columns.items()} == {
        "a": [0.5, 0.25],
        "b": [7, -1],
        "c": [1, 0.5],
    }
    assert columns["b"].dtype == np.int64


def test_the_index_contains_the_shapes_of_images(raw_images, images):
    number = images.columns["number"]
    expected = np.stack([40 + 7 * number % 50, 40 + 11 * number % 50, np.ones_like(number)], axis=1)
    assert np.array_equal(images.records["image"].shape, expected)


def test_arrays_of_the_same_shape_are_read_back(images):
    ids = np.array([25, 3, 3, 11])
    out = np.empty((4, 3, 2), dtype=images.records["points"].dtype)
    images.read_into("points", ids, out)
    assert np.array_equal(out, np.stack([make_points(i) for i in images.columns["number"][ids].tolist()]))


def test_arrays_keep_their_values_whatever_their_type_and_shape(tmp_path):
    fields = {
        f"{dtype} {shape}": (np.arange(3 * np.prod(shape)) % 100).reshape(3, *shape).astype(dtype)
        for dtype in ("uint8", "int16", ">i2", "float16", "float64")
        for shape in ((1,), (5,), (2, 3, 4))
    }
    ragged = [np.arange(1, i + 2, dtype=">i2") for i in range(3)]
    rows = [{name: values[i] for name, values in fields.items()} | {"ragged": Ragged(ragged[i])} for i in range(3)]
    data = pack_rows(rows, tmp_path / "out")
    for values, read in zip(ragged, data.read_arrays("ragged", np.arange(3)), strict=True):
        assert np.array_equal(read, values), "an index names no byte order"
    for name, values in fields.items():
        out = np.empty_like(values, dtype=data.records[name].dtype)
        data.read_into(name, np.arange(3), out)
        assert np.array_equal(out, values), name


@pytest.fixture(scope="module")
def packed_by_two_workers(raw_images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two") / "elsewhere"
    pack_folder(raw_images, out, workers=2)
    return out


def test_the_bytes_do_not_depend_on_the_number_of_workers_or_the_folder(packed_images, packed_by_two_workers):
    assert read_files(packed_by_two_workers) == read_files(packed_images)


def test_the_bytes_do_not_depend_on_the_times_of_raw_files(raw_copy, packed_images, tmp_path):
    for path in raw_copy.iterdir():
        os.utime(path, ns=(0, 0))
    pack_folder(raw_copy, tmp_path / "out")
    assert read_files(tmp_path / "out") == read_files(packed_images)


def test_packed_data_without_its_journal_is_not_overwritten(raw_images, packed_copy):
    (packed_copy / JOURNAL).unlink()
    with pytest.raises(PackError, match=r"packed data, but no packing\.json.*Use the data as it is"):
        pack_folder(raw_images, packed_copy)


def test_packing_again_writes_nothing(raw_images, packed_copy):
    before = {path.name: path.stat().st_mtime_ns for path in packed_copy.iterdir()}
    done: list[int] = []
    again = pack(samples(raw_images), packed_copy, meta=META, workers=1, shard_mib=0.01, progress=done.append)
    assert again.count == sum(done) == 26
    assert {path.name: path.stat().st_mtime_ns for path in packed_copy.iterdir()} == before


def test_a_lost_shard_is_written_again_and_the_others_kept(raw_images, packed_images, packed_copy):
    before = read_times(packed_copy)
    (packed_copy / "shard-00001.h5").unlink()
    (packed_copy / "index.h5").unlink()
    pack_folder(raw_images, packed_copy)
    assert read_files(packed_copy) == read_files(packed_images)
    assert {name for name, time in read_times(packed_copy).items() if time != before[name]} == {"shard-00001.h5"}


@pytest.mark.slow
@pytest.mark.parametrize("shards_first", [0, 1, 3])
def test_packing_killed_at_any_moment_is_finished_by_the_next_call(raw_images, packed_images, tmp_path, shards_first):
    out = tmp_path / "out"
    workers = kill_packing(raw_images, out, when=lambda: len(read_times(out)) >= shards_first)
    journal = json.loads((out / JOURNAL).read_text())["shards"] if (out / JOURNAL).exists() else {}
    kept = {name: time for name, time in read_times(out).items() if name in journal}
    assert shards_first - 2 <= len(kept) < len(read_times(packed_images)) and not (out / "index.h5").exists()
    wait_until(lambda: not any(is_running(worker) for worker in workers), "the workers to end with the packing")
    (out / "shard-00004.partial").write_bytes(b"half of it")
    pack_folder(raw_images, out)
    assert read_files(out) == read_files(packed_images)
    assert {name: time for name, time in read_times(out).items() if name in kept} == kept


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_does_not_break_packing_that_handles_it_later(
    raw_images, packed_images, tmp_path
):
    out = tmp_path / "out"
    work = (
        "import signal; [signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGUSR2)]\n"
        f"from tests.images import *; pack_folder(Path({str(raw_images)!r}), Path({str(out)!r}), workers=2, "
        "pause_s=0.1)"
    )
    packing = subprocess.Popen([sys.executable, "-c", work], env=make_import_environ(), start_new_session=True)
    wait_until(lambda: len(read_times(out)) >= 1, "a shard")
    os.killpg(packing.pid, signal.SIGUSR2)
    os.killpg(packing.pid, signal.SIGTERM)
    assert packing.wait() == 0
    assert read_files(out) == read_files(packed_images)


def kill_packing(raw: Path, out: Path, *, when) -> list[int]:
    """Pack slowly with two workers in another process, and kill it; return the workers' process ids."""
    work = f"from tests.images import *; pack_folder(Path({str(raw)!r}), Path({str(out)!r}), workers=2, pause_s=0.1)"
    packing = subprocess.Popen(
        [sys.executable, "-c", work], env=make_import_environ(), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(list_descendants(packing.pid)) >= 4, "workers")  # who forks them, a resource tracker
    workers = list_descendants(packing.pid)
    wait_until(when, "shards")
    packing.send_signal(signal.SIGKILL)
    assert packing.communicate()[1] == "", "multiprocessing's resource tracker found something that is left"
    return workers


@pytest.fixture
def raw_copy(raw_images, tmp_path) -> Path:
    return Path(shutil.copytree(raw_images, tmp_path / "raw"))


def test_a_changed_raw_file_is_refused(raw_copy, packed_copy):
    changed = sorted(raw_copy.iterdir())[0]
    os.utime(changed, ns=(0, 0))
    before = read_files(packed_copy)
    with pytest.raises(PackError, match=r"shard-00000.h5: made from other raw files.*empty folder.*delete this one"):
        pack_folder(raw_copy, packed_copy)
    assert read_files(packed_copy) == before


def test_a_listing_counts_the_samples_and_changes_with_raw_files_and_options(raw_copy):
    before = read_listing(samples(raw_copy), META)
    assert before == read_listing(samples(raw_copy), META) and before[0] == 26
    assert read_listing(samples(raw_copy), {"job": "another"})[1] != before[1]
    changed = sorted(raw_copy.iterdir())[9]
    os.utime(changed, ns=(0, 0))
    assert read_listing(samples(raw_copy), META)[1] != before[1]
    changed.unlink()
    assert read_listing(samples(raw_copy), META)[0] == 25


def test_other_options_are_refused(raw_images, packed_copy):
    with pytest.raises(PackError, match="packed with other options"):
        pack(samples(raw_images), packed_copy, meta={"job": "another"}, workers=1, shard_mib=0.01)


def test_shards_left_over_from_a_longer_data_set_are_refused(raw_copy, packed_copy):
    for path in sorted(raw_copy.iterdir())[ShardSet(packed_copy).shards[-1].first :]:
        path.unlink()
    with pytest.raises(PackError, match=r"left over from another data set"):
        pack_folder(raw_copy, packed_copy)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Collect what is logged."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
def raw_with_bad(tmp_path) -> Path:
    """Write twelve images: one is empty, one cut off and one text, all three in the first shards."""
    raw = write_folder(tmp_path / "raw", 12)
    paths = sorted(raw.iterdir())
    paths[0].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:200])
    paths[4].write_text("no image")
    return raw


def test_unreadable_files_are_counted_and_named_and_no_partial_file_is_left(raw_with_bad, tmp_path):
    out = tmp_path / "out"
    bad = [path.name for path in sorted(raw_with_bad.iterdir())]
    with pytest.raises(PackError) as error:
        pack_folder(raw_with_bad, out)
    text = str(error.value)
    assert text.startswith("3 of 12 raw samples cannot be read:\n")
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:4]] == [bad[0], bad[1], bad[4]]
    assert text.splitlines()[-1] == "Repair or remove them, or leave them out: data.on_error=skip"
    assert not (out / "index.h5").exists() and not list(out.glob("*.partial"))


@pytest.mark.slow
def test_packing_that_may_skip_bad_files_keeps_the_shards_of_a_failed_call(raw_with_bad, tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    with pytest.raises(PackError):
        pack_folder(raw_with_bad, out)
    kept = read_times(out)
    assert kept
    data = pack_folder(raw_with_bad, out, skip_bad=True)
    assert (data.count, data.skipped) == (9, 3)
    assert {name: time for name, time in read_times(out).items() if name in kept} == kept
    pack_folder(raw_with_bad, fresh, skip_bad=True)
    assert read_files(out) == read_files(fresh)
    good = [path for i, path in enumerate(sorted(raw_with_bad.iterdir())) if i not in (0, 1, 4)]
    assert data.read_keys(np.arange(9)) == [path.name for path in good]
    assert [record.tobytes() for record in data.read_bytes("image", np.arange(9))] == [
        path.read_bytes() for path in good
    ]


def test_skipped_files_are_errors_again_if_packing_may_not_skip(raw_with_bad, tmp_path):
    pack_folder(raw_with_bad, tmp_path / "out", skip_bad=True)
    with pytest.raises(PackError, match="3 of 12 raw samples cannot be read"):
        pack_folder(raw_with_bad, tmp_path / "out")


def test_bytes_that_are_not_an_image_are_a_bad_file(tmp_path):
    rows = [{"image": encode_image(make_texture(0, 9, 9), "png")}, {"image": b"not one"}]
    with pytest.raises(PackError, match=r"1 of 2 raw samples cannot be read:\n  row 1: not an image of a known format"):
        pack_rows(rows, tmp_path / "out")


def test_a_folder_of_only_bad_files_is_refused_even_if_they_may_be_skipped(tmp_path):
    with pytest.raises(PackError, match=r"None of the 1 raw files can be read. The first: row 0: not an image"):
        pack_rows([{"image": b"not one"}], tmp_path / "out", skip_bad=True)


def test_a_key_of_two_samples_is_refused(tmp_path):
    twice = [Sample(key, partial(dict, {"x": i})) for i, key in enumerate(["a", "b", "a"])]
    with pytest.raises(PackError, match="Two samples have the key 'a'"):
        pack(twice, tmp_path / "out", meta={}, workers=1)
    assert not (tmp_path / "out" / "index.h5").exists()


def test_an_empty_raw_folder_is_refused_with_what_was_expected(tmp_path):
    with pytest.raises(PackError, match=r"Nothing to pack.*Expected \*.png"):
        pack([], tmp_path / "out", meta={"expects": "Expected *.png"}, workers=1)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Mount a disk of 1,500 KiB: enough for the packed images, but not for much more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_packing_resumes_when_there_is_space(raw_images, packed_images, small_disk):
    out, ballast = small_disk / "out", small_disk / "ballast"
    ballast.write_bytes(bytes(900 * 1024))
    with pytest.raises(PackError, match=r"no space left \(\d+ MiB free\).*Finished shards are kept"):
        pack_folder(raw_images, out)
    kept = read_times(out)
    assert 0 < len(kept) < len(read_times(packed_images))
    assert not list(out.glob("*.partial")) and not (out / "index.h5").exists()
    ballast.unlink()
    pack_folder(raw_images, out)
    assert read_files(out) == read_files(packed_images)
    assert {name: time for name, time in read_times(out).items() if name in kept} == kept


def test_rows_of_one_large_file_share_its_size(tmp_path):
    table = tmp_path / "table.csv"
    table.write_bytes(b"x" * 3_000_000)
    rows = [Sample(f"row {i}", partial(dict, {"i": i}), source=table) for i in range(64)]
    data = pack(iter(rows), tmp_path / "out", meta={}, workers=1, shard_mib=1)
    assert [shard.count for shard in data.shards] == [23, 23, 18], "the target is 1 MiB of the file, not of its copies"


def _pack_and_read_with_few_open_files(folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    row = folder / "row"
    row.write_bytes(b"x" * 2000)
    rows = [
        Sample(f"row {i}", partial(dict, {"i": i, "many": np.full(3, i), "text": Ragged(np.arange(i))}), source=row)
        for i in range(120)
    ]
    data = pack(iter(rows), folder / "out", meta={}, workers=1, shard_mib=0.00001)
    assert len(data.shards) == 120
    ids = np.random.default_rng(0).permutation(120)
    for data.reader in ("map", "pread"):
        assert [len(one) for one in data.read_arrays("text", ids)] == ids.tolist()
        arrays = np.empty((120, 3), dtype=np.int64)
        data.read_into("many", ids, arrays)
        assert arrays.tolist() == [[i] * 3 for i in ids.tolist()]
    assert list(verify(folder / "out")) == []
    return 0


@pytest.mark.slow
def test_more_shards_than_a_process_may_open_files_are_packed_read_and_verified(tmp_path):
    done = run_as_command(partial(_pack_and_read_with_few_open_files, tmp_path), tmp_path / "work")
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"120 shards, but this system allows this process (\d+) more open files .*: (\d+) shards", done.stderr
    )
    assert found is not None and 0 < 2 * int(found[2]) <= int(found[1]) < 64, done.stderr


def test_a_file_that_cannot_be_opened_is_not_called_damaged(packed_images, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Unable to synchronously open file")

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(ShardError, match=r"shard-00000\.h5: cannot be opened: Too many open files\.$"):
        open_hdf5(packed_images / "shard-00000.h5")


def test_a_shard_of_small_files_has_few_enough_samples_that_workers_share_them(tmp_path):
    row = tmp_path / "row"
    row.write_bytes(b"x")
    rows = [Sample(f"row {i}", partial(dict, {"i": i}), source=row) for i in range(2500)]
    data = pack(iter(rows), tmp_path / "out", meta={}, workers=1)
    assert [shard.count for shard in data.shards] == [2048, 452]


@pytest.mark.slow
def test_a_worker_holds_its_shard_once_in_memory(tmp_path):
    rows = [Sample(f"row {i}", partial(_make_large, i), source=tmp_path / "raw") for i in range(16)]
    (tmp_path / "raw").write_bytes(bytes(8 << 20))
    task = ShardTask(tmp_path / "shard.h5", rows, "", False, None)
    process = FORKSERVER.Process(target=_write_and_exit_with_peak, args=(task,))
    process.start()
    process.join()
    assert 128 <= process.exitcode < 160, "MiB beyond what it had before"


def _make_large(i: int) -> Loaded:
    return {"i": i, "array": np.full((8 << 20,), i, dtype=np.uint8)}


def _write_and_exit_with_peak(task: ShardTask) -> None:
    before = _read_peak_kib()
    write_shard(task, on_sample=lambda: None)
    os._exit((_read_peak_kib() - before) >> 10)


def _read_peak_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def write_png(rows: bytes, *, interlaced: int) -> bytes:
    """Return a gray PNG of 9 x 200 pixels with these rows, each after its filter byte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 9, 200, 8, 0, 0, 0, interlaced)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


WHOLE = {0: 200 * 10, 1: 25 * 3 + 25 * 2 + 25 * 4 + 50 * 3 + 50 * 6 + 100 * 5 + 100 * 10}
"""Bytes of the rows of a PNG of 9 x 200 gray pixels, without and with interlacing: filters and pixels."""


@pytest.mark.parametrize("interlaced", [0, 1])
def test_a_png_whose_rows_end_early_is_truncated_although_its_file_is_complete(interlaced):
    assert open_image(write_png(bytes(WHOLE[interlaced]), interlaced=interlaced)).size == (9, 200)
    for missing in (1, 500, 1000):
        with pytest.raises(BadRecord, match="truncated"):
            open_image(write_png(bytes(WHOLE[interlaced] - missing), interlaced=interlaced))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_jpeg_whose_data_end_early_is_truncated_although_it_has_an_end(mode, progressive):
    noise = np.random.default_rng(0).integers(0, 256, (90, 110, 3), dtype=np.uint8)
    image, target = Image.fromarray(noise).convert(mode), io.BytesIO()
    image.save(target, "JPEG", progressive=progressive)
    data = target.getvalue()
    for whole in (data, data + b"what another program wrote behind it", data + bytes(100)):
        assert open_image(whole).size == (110, 90)
    half = data[: len(data) // 2]
    for broken in (half + b"\xff\xd9", half + bytes(len(half))):  # cut and closed; a hole at the end, as of a bad copy
        with pytest.raises(BadRecord, match="truncated"):
            open_image(broken)


def fail(kind: type[Exception]) -> Loaded:
    raise kind("of a library")


def test_any_error_of_one_sample_is_that_samples_with_its_place_in_the_code(tmp_path):
    good = {"image": encode_image(make_texture(0, 9, 9), "png")}
    broken = [Sample("b", partial(fail, RuntimeError)), Sample("c", partial(fail, struct.error))]
    listed = [Sample("a", partial(dict, good), {"label": 0}), *(replace(one, columns={"label": 1}) for one in broken)]
    task = ShardTask(tmp_path / "shard-00000.h5", listed, "", skip_bad=True, artifacts=None)
    written = write_shard(task, on_sample=lambda: None)
    assert written.count == 1 and [key for key, _ in written.bad] == ["b", "c"]
    assert re.fullmatch(r"RuntimeError: of a library \(\S+/test_pack.py:\d+\)", written.bad[0][1])
    with pytest.raises(MemoryError):
        write_shard(replace(task, samples=[Sample("d", partial(fail, MemoryError))]), on_sample=lambda: None)


def test_what_is_left_out_is_named_and_counted_by_class(tmp_path, logged):
    rows = [{"image": encode_image(make_texture(i, 9, 9), "png") if i % 3 else b"broken"} for i in range(6)]
    labels = [i % 2 for i in range(6)]
    with pytest.raises(PackError, match="Of label 0: 1 of 3, of label 1: 1 of 3"):
        pack(make_samples(rows, label=labels), tmp_path / "out", meta={}, workers=1)
    pack(make_samples(rows, label=labels), tmp_path / "out", meta={}, workers=1, skip_bad=True).close()
    (said,) = (line for line in logged if "left out" in line)
    assert "2 of 6 raw samples are left out:\n  row 0: not an image of a known format\n  row 3: " in said
    assert "\nOf label 0: 1 of 3, of label 1: 1 of 3." in said


def test_equal_samples_are_named_if_they_are_of_two_people_or_in_two_sets(tmp_path):
    images = [encode_image(make_texture(i, 9, 9), "png") for i in range(3)]
    rows = [{"image": images[i]} for i in (0, 0, 1, 1, 2)]
    people = ["ann", "bea", "cas", "cas", "dan"]
    with closing(pack(make_samples(rows, person=people), tmp_path / "out", meta={}, workers=1)) as data:
        sets = {"train": np.array([0, 2, 3]), "val": np.array([1, 4])}
        (said,) = describe_copies(data, lambda: sets)
        assert said == (
            "4 samples have the same image, byte for byte, as another one: row 0 = row 1, row 2 = row 3; 2 of them "
            "are under another person; 2 of them are in two sets, where they make scores too good. Remove all but one "
            "of each."
        )
    with closing(pack(make_samples(rows[2:], person=people[2:]), tmp_path / "other", meta={}, workers=1)) as data:
        (said,) = describe_copies(data, lambda: {"train": np.arange(3)})
        assert "another person" not in said and "two sets" not in said
    with closing(pack(make_samples(rows[:2], has_image=[0, 0]), tmp_path / "none", meta={}, workers=1)) as data:
        assert not list(describe_copies(data, lambda: pytest.fail("no image is there")))
    with closing(pack(make_samples(rows[3:]), tmp_path / "third", meta={}, workers=1)) as data:
        assert not list(describe_copies(data, lambda: pytest.fail("nothing is equal")))
