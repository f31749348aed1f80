import os
from pathlib import Path

import numpy as np
import pytest

from tests.images import edit_index
from trainyard.data.array_map import ArrayMap, Part, can_map
from trainyard.data.hdf5 import ShardError
from trainyard.data.shards import ShardSet

PAGE = os.sysconf("SC_PAGE_SIZE")
COUNTS = (5, 1, 700)


def write_parts(folder: Path, shape: tuple[int, ...], dtype: str) -> tuple[list[Part], list[np.ndarray]]:
    """Write random rows into files, each after another number of pages; return where they are, and the rows."""
    rng, parts, written = np.random.default_rng(0), [], []
    for number, count in enumerate(COUNTS):
        rows = rng.integers(0, 256, (count, *shape)).astype(dtype)
        path = folder / f"{number}.bin"
        path.write_bytes(bytes(number * PAGE) + rows.tobytes() + b"what follows")
        parts.append(Part(path, number * PAGE, count))
        written.append(rows)
    return parts, written


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 1), (PAGE,), (PAGE + 1,), (2, PAGE // 2)])
def test_rows_of_several_files_are_those_that_were_written(tmp_path, shape, dtype):
    parts, written = write_parts(tmp_path, shape, dtype)
    assert can_map(parts, shape, dtype)
    mapped = ArrayMap(parts, shape, dtype)
    is_open = [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve().parent == tmp_path]
    assert not is_open, "no file stays open, however many there are"
    for rows, first in zip(written, mapped.first.tolist(), strict=True):
        assert np.array_equal(mapped.rows[first : first + len(rows)], rows)
    order = np.random.default_rng(1).permutation(
        np.concatenate([f + np.arange(n) for f, n in zip(mapped.first, COUNTS, strict=True)])
    )
    gathered = np.take(mapped.rows, order, axis=0)
    owners = np.searchsorted(mapped.first, order, side="right") - 1
    assert all(
        np.array_equal(row, written[o][n - mapped.first[o]]) for row, o, n in zip(gathered, owners, order, strict=True)
    )


def test_the_maps_live_as_long_as_somebody_holds_rows_and_cannot_be_written(tmp_path):
    parts, written = write_parts(tmp_path, (9,), "uint8")
    mapped = ArrayMap(parts, (9,), "uint8")
    rows = mapped.rows[mapped.first[2] :][: COUNTS[2]]
    for part in parts:
        part.path.unlink()
    del mapped
    assert np.array_equal(rows, written[2])
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 0


def test_a_file_that_is_too_short_is_refused_by_name(tmp_path):
    parts, _ = write_parts(tmp_path, (PAGE,), "uint8")
    os.truncate(parts[2].path, parts[2].start + PAGE * COUNTS[2] - 1)
    with pytest.raises(ShardError, match=f"{parts[2].path}: the file ends early"):
        ArrayMap(parts, (PAGE,), "uint8")


def test_what_does_not_line_up_is_not_mapped(tmp_path):
    path = tmp_path / "rows"
    assert can_map([Part(path, 0, 5), Part(path, PAGE, 5)], (3,), "uint8")
    assert not can_map([Part(path, 0, 5), Part(path, PAGE + 1, 5)], (3,), "uint8"), "not on a page"
    assert not can_map([Part(path, 0, 5)], (3, 0), "uint8"), "rows without a size"
    assert not can_map([Part(path, 0, 5)] * 1000, (10**9 + 1,), "uint8"), "more addresses than there are"


@pytest.mark.parametrize("maps", [True, False])
def test_arrays_of_many_shards_are_gathered_as_packed_mapped_as_one_or_not(images, maps):
    ids = np.random.default_rng(0).integers(0, images.count, 60)
    assert len({np.searchsorted([s.first for s in images.shards], i, side="right") for i in ids}) > 2
    if not maps:
        images._maps["points"] = None
    out = np.zeros((60, 3, 2), dtype=np.float32)
    images.read_into("points", ids, out)
    assert np.array_equal(out, np.stack(images.read_arrays("points", ids)))
    assert (images._maps["points"] is not None) == maps


def test_shards_whose_arrays_differ_in_shape_are_refused(packed_copy):
    """Such an index is a stranger's: the rows of one shard would be taken for longer than they are."""
    with edit_index(packed_copy) as file:
        shape = file["records/points/shape"]
        count = int(file["shards/count"][0])
        shape[:count] = [[2, 3]] * count
    with pytest.raises(ShardError, match="points: arrays that should have one shape differ in shard-00001"):
        ShardSet(packed_copy)


def test_on_a_file_system_that_may_fail_arrays_are_read_and_not_mapped(images):
    """A failed read is an error; touching a map whose file is gone kills the process."""
    images.reader = "pread"
    ids = np.random.default_rng(0).integers(0, images.count, 60)
    out = np.zeros((60, 3, 2), dtype=np.float32)
    images.read_into("points", ids, out)
    assert np.array_equal(out, np.stack(images.read_arrays("points", ids)))
    assert not images._maps
