import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.images import edit_index, make_import_environ
from trainyard.data.hdf5 import ShardError
from trainyard.data.index import HEADER_BYTES, seal_index
from trainyard.data.shards import Damage, ShardSet, choose_reader, find_file_system, verify
from trainyard.errors import FormatError

EVERY = np.arange(26)
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def damage_record(folder: Path, field: str, sample: int) -> tuple[Path, str]:
    """Flip a bit in the middle of a record; return its shard and key."""
    data = ShardSet(folder)
    shard = next(shard for shard in reversed(data.shards) if shard.first <= sample)
    records = data.records[field]
    flip_bit(shard.path, int(records.start[sample] + records.size[sample] // 2))
    return shard.path, data.read_keys(np.array([sample]))[0]


def test_intact_data_has_no_damage(packed_images):
    read: list[int] = []
    assert list(verify(packed_images, read.append)) == []
    assert read == [shard.size_bytes for shard in ShardSet(packed_images).shards]


@pytest.mark.parametrize(("field", "sample"), [("image", 0), ("image", 20), ("points", 13)])
def test_verify_names_exactly_the_record_and_shard_of_a_flipped_bit(packed_copy, field, sample):
    shard, key = damage_record(packed_copy, field, sample)
    assert list(verify(packed_copy)) == [Damage(shard, f"{field} of '{key}'", "checksum differs")]


@pytest.mark.parametrize("shape", [(60_000, 60_000, 1), (8, 8, 1), (0, 0, 0)])
def test_verify_names_exactly_the_record_whose_shape_is_not_as_the_index_says(packed_copy, shape):
    height, width, channels = ShardSet(packed_copy).records["image"].shape[20]
    with edit_index(packed_copy) as file:
        file["records/image/shape"][20] = shape
    (damage,) = verify(packed_copy)
    assert damage.what.startswith("image of 'anna005-20.")
    stated = " x ".join(map(str, shape))
    assert damage.reason == f"its header says {height} x {width} x {channels}, the index {stated}"


def test_verify_distinguishes_a_damaged_description_from_damaged_records(packed_copy):
    shard = ShardSet(packed_copy).shards[1].path
    with h5py.File(shard, "r+") as file:
        file["columns/number"][0] += 1
    assert list(verify(packed_copy)) == [
        Damage(shard, "the file", "its description is damaged; every record in it is intact")
    ]


def test_verify_lists_the_lost_records_of_a_cut_off_shard_and_continues_after_a_missing_one(packed_copy):
    data = ShardSet(packed_copy)
    missing, cut = data.shards[0], data.shards[1]
    ids = np.arange(cut.first, cut.first + cut.count)
    end = int(data.records["image"].start[ids[3]]) + 5
    lost = {f"image of '{key}'" for key in data.read_keys(ids[3:])}
    lost |= {
        f"points of '{key}'"
        for key, start in zip(data.read_keys(ids), data.records["points"].start[ids], strict=True)
        if start >= end
    }
    missing.path.unlink()
    with cut.path.open("r+b") as file:
        file.truncate(end)
    found = list(verify(packed_copy))
    assert found[0] == Damage(missing.path, "the file", "missing")
    assert found[1] == Damage(cut.path, "the file", f"{end} bytes, expected {cut.size_bytes}")
    assert {(d.shard, d.what, d.reason) for d in found[2:]} == {(cut.path, what, "cut off") for what in lost}


def test_reading_a_flipped_bit_is_an_error_with_record_shard_and_command(packed_copy):
    shard, key = damage_record(packed_copy, "image", 20)
    data = ShardSet(packed_copy)
    with pytest.raises(ShardError) as error:
        data.read_bytes("image", EVERY)
    assert str(error.value) == (
        f"{shard}: image of '{key}' is damaged: its checksum differs. List all damage: trainyard verify {packed_copy}"
    )
    assert len(data.read_bytes("image", EVERY, check_crc="off")) == 26
    assert len(data.read_bytes("image", EVERY[EVERY != 20])) == 25


def test_reading_a_flipped_bit_of_an_array_is_an_error_too(packed_copy):
    shard, key = damage_record(packed_copy, "points", 13)
    data, out = ShardSet(packed_copy), np.empty((26, 3, 2), dtype=np.float32)
    with pytest.raises(ShardError, match=f"{shard}: points of '{key}' is damaged: its checksum differs"):
        data.read_into("points", EVERY, out)
    data.read_into("points", EVERY, out, check_crc="off")


@pytest.mark.parametrize("reader", ["map", "pread"])
def test_a_record_that_changes_after_its_first_reading_is_noticed_when_checked_always(packed_copy, reader):
    data, out = ShardSet(packed_copy), np.empty((26, 3, 2), dtype=np.float32)
    data.reader = reader
    data.read_bytes("image", EVERY)
    data.read_into("points", EVERY, out)
    for field in ("image", "points"):
        damage_record(packed_copy, field, 20)
    assert len(data.read_bytes("image", EVERY)) == 26, "the default checks what it reads for the first time"
    data.read_into("points", EVERY, out)
    with pytest.raises(ShardError, match=r"image of '.*' is damaged: its checksum differs"):
        data.read_bytes("image", EVERY, check_crc="always")
    with pytest.raises(ShardError, match=r"points of '.*' is damaged: its checksum differs"):
        data.read_into("points", EVERY, out, check_crc="always")
    with pytest.raises(ShardError, match=r"image of '.*' is damaged: its checksum differs"):
        ShardSet(packed_copy).read_bytes("image", EVERY)


@pytest.mark.parametrize("reader", ["map", "pread"])
def test_reading_a_file_that_was_cut_off_after_opening_is_an_error(packed_copy, reader):
    data = ShardSet(packed_copy)
    data.reader = reader
    with data.shards[0].path.open("r+b") as file:
        file.truncate(int(data.records["image"].start[2]) + 5)
    assert len(data.read_bytes("image", np.array([0, 1]))) == 2
    with pytest.raises(ShardError, match="is damaged: the file ends early"):
        data.read_bytes("image", np.array([0, 1, 2]))


def test_both_readers_read_the_same_bytes(packed_copy):
    mapped, pread = ShardSet(packed_copy), ShardSet(packed_copy)
    mapped.reader, pread.reader = "map", "pread"
    for a, b in zip(mapped.read_bytes("image", EVERY[::-1]), pread.read_bytes("image", EVERY[::-1]), strict=True):
        assert a.tobytes() == b.tobytes() != b""


@pytest.mark.parametrize(
    ("folder", "kind", "reader"),
    [("/data/my prints/a", "nfs4", "pread"), ("/data", "ext4", "map"), ("/database", "overlay", "map")],
)
def test_the_reader_depends_on_the_file_system_of_the_folder(tmp_path, folder, kind, reader):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:20 / / rw,relatime shared:1 - overlay overlay rw\n"
        "22 21 8:1 / /data rw - ext4 /dev/sda1 rw\n"
        "23 22 0:50 / /data/my\\040prints rw - nfs4 server:/prints rw\n"
    )
    assert find_file_system(Path(folder), mounts) == kind
    assert choose_reader(kind)[0] == reader and kind in choose_reader(kind)[1]
    assert choose_reader(find_file_system(Path(folder), tmp_path / "none"))[0] == "pread"


def test_a_missing_folder_is_an_error_that_says_how_to_pack(tmp_path):
    with pytest.raises(ShardError, match=r"nowhere: no such folder\. .*: trainyard pack JOB RAW .*nowhere"):
        ShardSet(tmp_path / "nowhere")


def test_a_folder_without_an_index_is_refused(packed_copy):
    (packed_copy / "index.h5").unlink()
    for open_folder in (ShardSet, lambda folder: list(verify(folder))):
        with pytest.raises(
            ShardError, match=r"contains no index.h5, so it is not packed data. Pack it: trainyard pack"
        ):
            open_folder(packed_copy)


@pytest.mark.parametrize("content", [b"", b"GIF89a, not HDF5"])
def test_an_index_that_is_not_hdf5_is_refused(packed_copy, content):
    (packed_copy / "index.h5").write_bytes(content)
    with pytest.raises(ShardError, match=r"index.h5: damaged: its content differs from the SHA-256 .*trainyard pack"):
        ShardSet(packed_copy)
    (packed_copy / "index.h5").write_bytes(seal_index(HDF5_SIGNATURE + content))
    with pytest.raises(ShardError, match=r"index.h5: not a readable HDF5 file .*Pack the data again"):
        ShardSet(packed_copy)


def test_a_cut_off_index_is_refused(packed_copy):
    index = packed_copy / "index.h5"
    whole = index.read_bytes()
    index.write_bytes(whole[:10_000])
    with pytest.raises(ShardError, match=r"index.h5: damaged: its content differs from the SHA-256"):
        ShardSet(packed_copy)
    index.write_bytes(seal_index(whole[HEADER_BYTES:10_000]))
    with pytest.raises(ShardError, match=r"index.h5: not a readable HDF5 file"):
        ShardSet(packed_copy)


@pytest.mark.parametrize(("version", "said"), [(2, "2"), (None, "None")])
def test_another_format_is_refused_with_both_numbers(packed_copy, version, said):
    with edit_index(packed_copy) as file:
        del file.attrs["format"]
        if version:
            file.attrs["format"] = version
    with pytest.raises(FormatError, match=rf"index.h5: the format of this packed data is {said}, expected 1, .*pack"):
        ShardSet(packed_copy)


def test_a_missing_shard_is_named(packed_copy):
    (packed_copy / "shard-00002.h5").unlink()
    with pytest.raises(ShardError, match=r"shard-00002.h5: missing, but the index lists it"):
        ShardSet(packed_copy)


@pytest.mark.parametrize(("change", "said"), [(-100, "cut off"), (100, "not the one packed")])
def test_a_shard_of_another_size_is_reported_with_both_sizes(packed_copy, change, said):
    path = packed_copy / "shard-00001.h5"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + change)
    with pytest.raises(ShardError, match=rf"shard-00001.h5: {size + change} bytes, the index says {size}: .*{said}"):
        ShardSet(packed_copy)


def test_the_fingerprint_changes_with_the_data(packed_images, packed_copy):
    before = ShardSet(packed_images).fingerprint
    assert ShardSet(packed_copy).fingerprint == before
    with edit_index(packed_copy) as file:
        file["columns/number"][0] += 1
    assert ShardSet(packed_copy).fingerprint != before


def test_a_closed_data_set_opens_its_files_again_when_read(images):
    before = images.read_bytes("image", EVERY)
    images.close()
    assert all(np.array_equal(a, b) for a, b in zip(images.read_bytes("image", EVERY), before, strict=True))


COUNT = 10_000_000

WRITE_LARGE_INDEX = """
import hashlib, json, sys
import h5py, numpy as np

count = {count}
def text(group, values):
    group["blob"] = np.frombuffer("".join(values).encode(), dtype=np.uint8)
    group["offset"] = np.cumsum([0, *map(len, values)])

with h5py.File(sys.argv[1] + "/index.h5", "w", libver="latest", userblock_size=512) as file:
    file.attrs.update(format=1, count=count, skipped=0, meta=json.dumps({{}}), content="")
    shards = file.create_group("shards")
    text(shards.create_group("name"), ["shard-00000.h5"])
    text(shards.create_group("sha256"), ["0" * 64])
    shards["count"], shards["size_bytes"] = np.array([count]), np.array([0])
    file["key/blob"] = np.full(8 * count, ord("k"), dtype=np.uint8)
    file["key/offset"] = np.arange(count + 1) * 8
    file["columns/label"] = np.arange(count)
    file.create_group("vocabulary")
    file.create_group("artifacts")
    image = file.create_group("records/image")
    image.attrs.update(kind="image", dtype="uint8")
    image["start"], image["size"] = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    image["crc"], image["shape"] = np.zeros(count, dtype=np.uint32), np.zeros((count, 3), dtype=np.int32)
with open(sys.argv[1] + "/index.h5", "r+b") as file:
    file.seek(512)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    file.write(f"Trainyard index. SHA-256 of the bytes after the first 512: {{digest}}\\n".encode().ljust(512, b"\\n"))
open(sys.argv[1] + "/shard-00000.h5", "wb").close()
"""

OPEN_LARGE_INDEX = """
import resource, sys
from pathlib import Path
import numpy as np
from trainyard.data.shards import ShardSet

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

before = peak_mb()
data = ShardSet(Path(sys.argv[1]))
records = data.records["image"]
arrays = [records.start, records.size, records.crc, records.shape, *data.columns.values()]
assert data.read_keys(np.array([7, data.count - 1])) == ["k" * 8] * 2
print(data.count, sum(array.nbytes for array in arrays) / 1e6, peak_mb() - before)
"""


@pytest.mark.slow
def test_ten_million_samples_need_memory_for_arrays_but_no_object_each(tmp_path):
    subprocess.run([sys.executable, "-c", WRITE_LARGE_INDEX.format(count=COUNT), tmp_path], check=True)
    command = [sys.executable, "-c", OPEN_LARGE_INDEX, tmp_path]
    opened = subprocess.run(command, check=True, capture_output=True, env=make_import_environ())
    count, arrays_mb, peak_mb = map(float, opened.stdout.split())
    (tmp_path / "index.h5").unlink()
    assert count == COUNT and arrays_mb == pytest.approx(400)
    assert peak_mb < arrays_mb + 100  # one Python object per sample would be 300 MB and more
