"""A changed byte in packed data is noticed before it trains, whichever byte it is: index, shards, list of shards."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.images import edit_index, make_import_environ, pack_folder
from trainyard.config.compose import compose
from trainyard.data.hdf5 import ShardError
from trainyard.data.index import HEADER_BYTES, INDEX, seal_index
from trainyard.data.pack import JOURNAL, PackError
from trainyard.data.prepare import prepare_data
from trainyard.data.shards import ShardSet, verify

JOBS = Path(__file__).parents[1] / "jobs"
SHARD = "shard-00001.h5"


@pytest.mark.parametrize("what", ["columns/number", "key/blob", "records/image/shape", "vocabulary/who/blob"])
def test_one_flipped_bit_in_an_index_is_an_error_of_opening_and_of_verify(what, packed_copy):
    index = packed_copy / INDEX
    with h5py.File(index) as file:
        offset = file[what].id.get_offset()
    content = bytearray(index.read_bytes())
    content[offset] ^= 1
    index.write_bytes(content)
    for read in (ShardSet, lambda folder: list(verify(folder))):
        with pytest.raises(ShardError) as error:
            read(packed_copy)
        assert str(error.value) == (
            f"{index}: damaged: its content differs from the SHA-256 in its first line. Copy it again, or delete it "
            "and run the same trainyard pack again, which keeps the shards."
        )


def test_a_deleted_index_is_written_again_with_the_same_bytes_and_the_shards_are_kept(raw_images, packed_copy):
    index = packed_copy / INDEX
    before, times = index.read_bytes(), {path: path.stat().st_mtime_ns for path in packed_copy.glob("shard-*")}
    index.unlink()
    pack_folder(raw_images, packed_copy)
    assert index.read_bytes() == before
    assert {path: path.stat().st_mtime_ns for path in packed_copy.glob("shard-*")} == times


def test_the_digest_is_in_the_first_line_where_other_tools_find_it_and_not_the_data(packed_images):
    line = (packed_images / INDEX).open("rb").readline().decode()
    content = subprocess.run(["tail", "-c", "+513", packed_images / INDEX], capture_output=True, check=True).stdout
    shown = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True).stdout.decode()
    assert line == f"Trainyard index. SHA-256 of the bytes after the first 512: {shown.split()[0]}\n"
    with h5py.File(packed_images / INDEX) as file:
        assert file.userblock_size == HEADER_BYTES and file.attrs["count"] == 26


def test_packed_data_of_another_family_is_refused_by_name(packed_copy, tmp_path):
    with edit_index(packed_copy) as file:
        file.attrs["meta"] = json.dumps({"family": "antispoof"})
    config = compose("fingerprint_demo", [f"data.path={packed_copy}"], JOBS)
    with pytest.raises(ShardError) as error:
        prepare_data(config, JOBS)
    assert str(error.value) == (
        f"{packed_copy}: packed for the family 'antispoof', but this job's family is 'fingerprint'. "
        "Give it other data: data.path=FOLDER, or pack the raw files for it: trainyard pack JOB RAW OUT"
    )


def test_a_shard_that_was_damaged_while_packing_was_interrupted_is_refused_and_written_again(
    raw_images, packed_images, packed_copy
):
    (packed_copy / INDEX).unlink()
    shard = packed_copy / SHARD
    with h5py.File(shard, "r+") as file:
        file["columns/number"][0] += 1
    with pytest.raises(PackError) as error:
        pack_folder(raw_images, packed_copy)
    assert str(error.value) == (
        f"{shard}: damaged: its SHA-256 differs from {JOURNAL}. "
        "Delete it and run the same command again: the other shards are kept."
    )
    shard.unlink()
    pack_folder(raw_images, packed_copy)
    assert (packed_copy / INDEX).read_bytes() == (packed_images / INDEX).read_bytes()


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"shard-00000.h5": 7}', '{"sha256": "", "shards": {}}', "[" * 9999]
)
def test_a_damaged_list_of_shards_says_what_to_do(content, has_index, raw_images, packed_copy):
    (packed_copy / JOURNAL).write_text(content)
    if not has_index:
        (packed_copy / INDEX).unlink()
    with pytest.raises(PackError) as error:
        pack_folder(raw_images, packed_copy)
    what_next = (
        f"trainyard verify {packed_copy}. If" if has_index else "Delete it and run the same command again, which"
    )
    assert str(error.value).startswith(f"{packed_copy / JOURNAL}: damaged: ") and what_next in str(error.value)


def flip_bits(path: Path, count: int, *, seed: int) -> Iterator[int]:
    """Flip one bit in each of `count` equal regions of a file; the file is whole again afterwards."""
    whole, rng = path.read_bytes(), np.random.default_rng(seed)
    for i in range(count):
        position = int((i + rng.random()) / count * len(whole))
        changed = bytearray(whole)
        changed[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        yield position
    path.write_bytes(whole)


def read_everything(folder: Path) -> list[object]:
    """Return all that training can see of a data set."""
    data = ShardSet(folder)
    ids = np.arange(data.count)
    columns = {name: values.tolist() for name, values in data.columns.items()}
    records = [b"".join(array.tobytes() for array in data.read_arrays(name, ids)) for name in data.records]
    shapes = [entry.shape.tolist() for entry in data.records.values()]
    return [data.read_keys(ids), columns, data.vocabulary, data.artifacts, data.meta, shapes, records]


def check_flips(folder: Path, raw: Path, flips: int) -> None:
    """Flip bits all over packed data; each is refused, or changes nothing that is used."""
    expected = read_everything(folder)
    for _ in flip_bits(folder / INDEX, flips // 2, seed=0):
        for read in (ShardSet, lambda place: list(verify(place))):
            with pytest.raises(ShardError, match=r"index.h5: damaged"):
                read(folder)
    for _ in flip_bits(folder / SHARD, flips // 4, seed=1):
        [damage] = itertools.islice(verify(folder), 1)
        assert damage.shard == folder / SHARD
        try:
            assert read_everything(folder) == expected
        except ShardError as error:
            assert f"{SHARD}: " in str(error)
    index, refused = (folder / INDEX).read_bytes(), 0
    for _ in flip_bits(folder / JOURNAL, flips // 4, seed=2):
        (folder / INDEX).unlink(missing_ok=True)
        try:
            pack_folder(raw, folder)
            assert (folder / INDEX).read_bytes() == index
        except PackError as error:
            assert f"{JOURNAL}: damaged" in str(error)
            refused += 1
    assert refused > 0


def test_forty_flips_all_over_packed_data_are_refused_or_change_nothing(packed_copy, raw_images):
    check_flips(packed_copy, raw_images, 40)


@pytest.mark.long
def test_three_hundred_flips_all_over_packed_data_are_refused_or_change_nothing(packed_copy, raw_images):
    check_flips(packed_copy, raw_images, 300)


OPEN_FLIPPED = """
import sys
from pathlib import Path
from trainyard.data.index import HEADER_BYTES, seal_index
from trainyard.data.shards import ShardSet
from trainyard.errors import UserError

folder, index, opened = Path(sys.argv[1]), Path(sys.argv[1], "index.h5"), 0
whole = index.read_bytes()[HEADER_BYTES:]
for line in sys.stdin:
    position, bit = map(int, line.split())
    changed = bytearray(whole)
    changed[position] ^= 1 << bit
    index.write_bytes(seal_index(bytes(changed)))
    try:
        ShardSet(folder).read_keys(__import__("numpy").arange(26))
        opened += 1
    except UserError as error:
        assert "\\n" not in str(error), error
print(opened)
"""


def open_flipped(folder: Path, flips: int) -> int:
    """Open an index with each of many flips in a process of its own, which must survive; return how many open."""
    size, rng = (folder / INDEX).stat().st_size - HEADER_BYTES, np.random.default_rng(3)
    lines = "".join(f"{int((i + rng.random()) / flips * size)} {rng.integers(8)}\n" for i in range(flips))
    command = [sys.executable, "-c", OPEN_FLIPPED, folder]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=make_import_environ())
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("flips", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_damaged_index_with_a_digest_that_matches_opens_or_is_refused_in_one_sentence(flips, packed_copy):
    """What HDF5 itself makes of flipped bits: no traceback and no crash, though such a change may go unnoticed."""
    assert 0 < open_flipped(packed_copy, flips) < flips


def test_sealing_puts_nothing_but_the_header_in_front(packed_images):
    content = (packed_images / INDEX).read_bytes()
    assert seal_index(content[HEADER_BYTES:]) == content
