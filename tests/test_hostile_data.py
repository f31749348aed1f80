"""Packed data from a stranger: no file outside its folder is opened, nothing runs, and each case is one sentence."""

import ctypes
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.images import edit_index
from trainyard.data.hdf5 import ShardError
from trainyard.data.shards import ShardSet, verify

COUNT = 26
SECRET = b"root:x:0:0:" * 100
NUMBER = "columns/number"


def replace(file: h5py.File, name: str, **options) -> None:
    """Replace a dataset by one with the same name."""
    del file[name]
    file.create_dataset(name, **options)


def replace_virtually(file: h5py.File, victim: Path) -> None:
    layout = h5py.VirtualLayout((COUNT,), "int64")
    layout[:] = h5py.VirtualSource(victim, "labels", (COUNT,))
    del file[NUMBER]
    file.create_virtual_dataset(NUMBER, layout)


def replace_link(file: h5py.File, name: str, link: object) -> None:
    del file[name]
    file[name] = link


def replace_shard_name(file: h5py.File, name: str) -> None:
    """Replace the name of the first shard; the others keep theirs."""
    group = file["shards/name"]
    old, ends = group["blob"][:].tobytes(), group["offset"][:]
    del group["blob"], group["offset"]
    group["blob"] = np.frombuffer(name.encode() + old[ends[1] :], dtype=np.uint8)
    group["offset"] = np.concatenate([[0], ends[1:] + len(name) - ends[1]])


def set_value(file: h5py.File, name: str, row: int, value: int) -> None:
    file[name][row] = value


HOSTILE: dict[str, tuple[Callable[[h5py.File, Path], object], str]] = {
    "external storage": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype="i8", external=[(str(victim), 0, COUNT * 8)]),
        "/columns/number is stored in another file",
    ),
    "external storage of an artifact": (
        lambda file, victim: file.create_dataset("artifacts/a", (1100,), "u1", external=[(str(victim), 0, 1100)]),
        "/artifacts/a is stored in another file",
    ),
    "external link to a dataset": (
        lambda file, victim: replace_link(file, NUMBER, h5py.ExternalLink(victim, "/labels")),
        "/columns/number is a link to another file",
    ),
    "external link to a group": (
        lambda file, victim: replace_link(file, "artifacts", h5py.ExternalLink(victim, "/")),
        "/artifacts is a link to another file",
    ),
    "soft link": (
        lambda file, victim: replace_link(file, NUMBER, h5py.SoftLink("/records/image/start")),
        "/columns/number is a soft link",
    ),
    "virtual dataset": (replace_virtually, "/columns/number is made of other files"),
    "filter": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype="i8", chunks=(COUNT,), compression="gzip"),
        "/columns/number is stored in chunks, which may run filters",
    ),
    "references": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype=h5py.ref_dtype),
        "/columns/number is no array of numbers",
    ),
    "region references": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype=h5py.regionref_dtype),
        "/columns/number is no array of numbers",
    ),
    "varying length": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype=h5py.vlen_dtype(np.int64)),
        "/columns/number is no array of numbers",
    ),
    "compound": (
        lambda file, victim: replace(file, NUMBER, shape=(COUNT,), dtype=[("a", "i8"), ("b", "S8")]),
        "/columns/number is no array of numbers",
    ),
    "named type": (
        lambda file, victim: file.__setitem__("columns/type", np.dtype("i8")),
        "/columns/type is neither a group nor a dataset",
    ),
    "array of Python objects": (
        lambda file, victim: file["records/points"].attrs.__setitem__("dtype", "object"),
        "/records/points has elements of type 'object'",
    ),
    "structured array": (
        lambda file, victim: file["records/points"].attrs.__setitem__("dtype", "O,i4"),
        "/records/points has elements of type 'O,i4'",
    ),
    "unknown kind": (
        lambda file, victim: file["records/points"].attrs.__setitem__("kind", "pickle"),
        "/records/points is of the unknown kind 'pickle'",
    ),
    "kind that is a list": (
        lambda file, victim: file["records/points"].attrs.__setitem__("kind", ["a"] * 1000),
        "attribute 'kind' is not a text",
    ),
    "absolute shard name": (
        lambda file, victim: replace_shard_name(file, str(victim)),
        "names the shard '/",
    ),
    "shard name with ..": (
        lambda file, victim: replace_shard_name(file, "../victim.h5"),
        "names the shard '../victim.h5', expected one such as shard-00000.h5",
    ),
    "declared size without storage": (
        lambda file, victim: replace(file, NUMBER, shape=(1 << 50,), dtype="i8"),
        "/columns/number declares 9007199254740992 bytes, but stores 0",
    ),
    "count": (
        lambda file, victim: file.attrs.__setitem__("count", 1 << 60),
        "counts 26 samples in its shards, but 1152921504606846976 in all",
    ),
    "shard count": (lambda file, victim: set_value(file, "shards/count", 0, 1 << 60), "samples in its shards, but 26"),
    "negative shard count": (lambda file, victim: set_value(file, "shards/count", 0, -5), "samples in its shards, but"),
    "record before the file": (
        lambda file, victim: set_value(file, "records/image/start", 3, -8),
        "/records/image: a record lies outside the file in shard-00000.h5",
    ),
    "record behind the file": (
        lambda file, victim: set_value(file, "records/image/size", 3, (1 << 63) - 1),
        "/records/image: a record lies outside the file in shard-00000.h5",
    ),
    "shape": (
        lambda file, victim: set_value(file, "records/points/shape", 0, (1 << 31) - 1),
        "/records/points: a shape does not match the size of its record in shard-00000.h5",
    ),
    "arrays far apart": (
        lambda file, victim: set_value(file, "records/points/start", 1, 0),
        "/records/points: arrays of one shape do not follow each other in shard-00000.h5",
    ),
    "code without a text": (
        lambda file, victim: set_value(file, "columns/who", 0, -1),
        "column 'who' names texts that are not in its vocabulary",
    ),
    "texts that overlap": (
        lambda file, victim: set_value(file, "vocabulary/who/offset", 1, 1 << 40),
        "the texts in /vocabulary/who overlap or are cut off",
    ),
    "text that is not UTF-8": (lambda file, victim: set_value(file, "vocabulary/who/blob", 0, 0xFF), "is malformed"),
    "cycle": (
        lambda file, victim: file["artifacts"].__setitem__("again", file["artifacts"]),
        "/artifacts/again/again/again is nested more than 3 deep",
    ),
    "terminal escape in a name": (
        lambda file, victim: file["artifacts"].create_group("\x1b[2J"),
        "'/artifacts/\\x1b[2J' is not a printable name",
    ),
    "JSON bomb": (lambda file, victim: file.attrs.__setitem__("meta", "[" * 50_000), "attribute 'meta' is not JSON"),
    "missing group": (lambda file, victim: file.__delitem__("vocabulary"), "/vocabulary is not a group"),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file next to the packed data that is both a secret text and, at its end, readable as HDF5."""
    path = tmp_path / "victim.h5"
    with h5py.File(path, "w", userblock_size=2048) as file:
        file["labels"] = np.arange(COUNT)
    with path.open("r+b") as raw:
        raw.write(SECRET)
    return path


@contextmanager
def refuse_opening(path: Path) -> Iterator[None]:
    """Fail if anything in this process or another opens the file: inotify(7) sees what Python's audit hook does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK)
    assert watcher >= 0 and libc.inotify_add_watch(watcher, bytes(path), 0x21) >= 0  # IN_ACCESS | IN_OPEN
    try:
        yield
        with pytest.raises(BlockingIOError):
            os.read(watcher, 4096)
    finally:
        os.close(watcher)


def test_the_watch_sees_an_opened_file(victim):
    with pytest.raises(pytest.fail.Exception), refuse_opening(victim):
        victim.read_bytes()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused_in_one_sentence_and_nothing_else_is_opened(case, packed_copy, victim):
    change, said = HOSTILE[case]
    with edit_index(packed_copy) as file:
        change(file, victim)
    for read in (ShardSet, lambda folder: list(verify(folder))):
        with refuse_opening(victim), pytest.raises(ShardError) as error:
            read(packed_copy)
        message = str(error.value)
        assert message.startswith(f"{packed_copy / 'index.h5'}: ") and said in message and "\n" not in message
        assert message.endswith("pack the raw files again: trainyard pack JOB RAW OUT") and "root:x" not in message


def test_an_unchanged_index_is_accepted_after_editing(packed_copy):
    with edit_index(packed_copy) as file:
        assert file.attrs["count"] == COUNT
    assert ShardSet(packed_copy).count == COUNT and list(verify(packed_copy)) == []


@pytest.mark.parametrize("read", [ShardSet, lambda folder: list(verify(folder))], ids=["open", "verify"])
def test_a_shard_that_links_to_a_file_elsewhere_is_refused_until_it_is_copied(read, packed_copy, victim):
    shard = packed_copy / "shard-00000.h5"
    whole = shard.read_bytes()
    victim.write_bytes(whole)
    shard.unlink()
    shard.symlink_to("../victim.h5")
    with refuse_opening(victim), pytest.raises(ShardError) as error:
        read(packed_copy)
    assert str(error.value).startswith(f"{shard}: a link to {victim}, outside its folder.")
    subprocess.run(shlex.split(str(error.value).partition("If you trust it: ")[2]), check=True)
    assert not shard.is_symlink() and shard.read_bytes() == whole
    read(packed_copy)


@pytest.mark.parametrize(("name", "said"), [("index.h5", "contains no index.h5"), ("shard-00000.h5", "missing")])
def test_a_named_pipe_does_not_hang(name, said, packed_copy):
    (packed_copy / name).unlink()
    os.mkfifo(packed_copy / name)
    with pytest.raises(ShardError, match=said):
        ShardSet(packed_copy)


def test_packing_reads_no_hostile_shard_that_lies_in_its_folder(packed_copy, raw_images, victim):
    """A shard is read as HDF5 only by packing, which checks it first against the digest that it noted."""
    from tests.images import pack_folder
    from trainyard.data.pack import PackError

    (packed_copy / "index.h5").unlink()
    shard = packed_copy / "shard-00001.h5"
    with h5py.File(shard, "r+") as file:
        replace(file, NUMBER, shape=(5,), dtype="i8", external=[(str(victim), 0, 40)])
    with refuse_opening(victim), pytest.raises(PackError, match=r"shard-00001.h5: damaged: its SHA-256 differs"):
        pack_folder(raw_images, packed_copy)
