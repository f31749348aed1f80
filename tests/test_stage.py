import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.images import load_bytes
from tests.training import FAMILIES, FORKSERVER, new_run
from trainyard.cluster.description import load_cluster
from trainyard.data.hdf5 import ShardError
from trainyard.data.index import INDEX
from trainyard.data.pack import pack
from trainyard.data.shards import Sample, ShardSet
from trainyard.data.stage import NOTE, SCRATCH, Staged, stage
from trainyard.errors import UserError
from trainyard.node.rank_task import execute
from trainyard.runs.folder import ENV_FILE

OTHER_FILE_SYSTEM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack 48 MiB into 4 shards, so that copying takes a while."""
    folder = tmp_path_factory.mktemp("large")
    raw, out = [folder / f"{i:02}" for i in range(48)], folder / "packed"
    for path in raw:
        path.write_bytes(os.urandom(MIB))
    samples = (Sample(path.name, partial(load_bytes, path), source=path) for path in raw)
    assert len(pack(samples, out, meta={}, workers=1, shard_mib=12).shards) == 4
    return out


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on another file system than `tmp_path`."""
    if not OTHER_FILE_SYSTEM.is_dir() or OTHER_FILE_SYSTEM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip(f"{OTHER_FILE_SYSTEM} is not another file system than {tmp_path}")
    with tempfile.TemporaryDirectory(dir=OTHER_FILE_SYSTEM) as folder:
        yield Path(folder)


def mount(source: str, target: Path, *options: str) -> Callable[[], object]:
    """Mount a file system and return a function that unmounts it; skips if mounting is not allowed."""
    done = subprocess.run(["mount", *options, source, str(target)], capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    return lambda: subprocess.run(["umount", "--lazy", str(target)], check=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unmount = mount("tmpfs", disk, "-t", "tmpfs", "-o", f"size={64 * MIB}")
    yield disk
    unmount()


def write_mounts(source: Path, mounts: Path) -> Path:
    """Write a mount table in which `source` is on a network file system and everything else on local disks."""
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {source} rw - nfs4 server:/data rw\n")
    return mounts


class Stager:
    """Calls `stage` for data that the mount table places on a network file system; keeps the lines it logs."""

    def __init__(self, source: Path, scratch: Path | str, folder: Path) -> None:
        self.source, self.told = source, list[str]()
        self.environ = {SCRATCH: str(scratch)}
        self.mounts = write_mounts(source, folder / "mountinfo")
        self.home = Path(scratch) / f"trainyard-{os.getuid()}"

    def __call__(self, *, wanted: str = "auto", **options: Any) -> Staged:
        options = {"tell": self.told.append, "mounts": self.mounts, **options}
        return stage(self.source, wanted=wanted, environ=self.environ, **options)

    def list_files(self) -> set[str]:
        """Return the names in our folder on scratch, without locks."""
        return {path.name for path in self.home.iterdir() if path.suffix != ".lock"}


@pytest.fixture
def staging(packed_copy: Path, scratch: Path, tmp_path: Path) -> Stager:
    return Stager(packed_copy, scratch, tmp_path)


def test_a_copy_contains_the_same_records_and_its_note_states_the_cost(staging, scratch):
    original = ShardSet(staging.source)
    staged = staging()
    copy = ShardSet(staged.folder)
    assert staged.copied and staged.folder == staging.home / original.fingerprint[:16]
    assert copy.fingerprint == original.fingerprint
    every = np.arange(original.count)
    for name in original.records:
        for a, b in zip(original.read_arrays(name, every), copy.read_arrays(name, every), strict=True):
            assert np.array_equal(a, b)
    amount = r"\d[\d.e-]* [MG]B"
    cost = rf"{amount} copied on [\d-]+ at [\d:]+ UTC in [\d.]+ s \(read there at {amount}/s\)"
    assert re.fullmatch(cost, staged.reason)
    [line] = staging.told
    assert re.fullmatch(rf"copying {amount} from {staging.source} to {staged.folder}, where it stays until .*", line)
    assert {path.name for path in staged.folder.iterdir()} == {
        INDEX,
        NOTE,
        *(shard.path.name for shard in original.shards),
    }
    assert staging.home.stat().st_mode & 0o777 == 0o700


def test_a_second_run_reads_the_copy_without_the_original_shards_and_touches_its_files(staging):
    first = staging()
    for shard in ShardSet(staging.source).shards:
        shard.path.unlink()
    for path in (*first.folder.iterdir(), first.folder):
        os.utime(path, (1e9, 1e9))
    assert staging() == first
    assert len(staging.told) == 1
    assert min(path.stat().st_mtime for path in (*first.folder.iterdir(), first.folder)) > 1.1e9


@pytest.mark.parametrize("damage", ["cut off", "a shard missing", "no note", "another index"])
def test_an_unusable_copy_is_made_again(staging, damage):
    copy = staging().folder
    shard = ShardSet(copy).shards[1].path
    size_bytes = shard.stat().st_size
    match damage:
        case "cut off":
            os.truncate(shard, size_bytes - 1)
        case "a shard missing":
            shard.unlink()
        case "no note":
            (copy / NOTE).unlink()
        case "another index":
            (copy / INDEX).write_bytes((copy / INDEX).read_bytes() + b"x")
    assert staging().copied
    assert len(staging.told) == 2
    assert shard.stat().st_size == size_bytes and staging.list_files() == {copy.name}


def test_a_damaged_shard_is_an_error_of_copying_and_no_file_is_left(staging):
    shard = ShardSet(staging.source).shards[1].path
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ShardError, match=rf"^{shard}: is damaged: .* trainyard verify {staging.source}$"):
        staging()
    assert staging.list_files() == set()


@pytest.mark.slow
def test_two_concurrent_processes_copy_once(large, scratch, tmp_path):
    start, results = FORKSERVER.Barrier(2), FORKSERVER.Queue()
    stager = Stager(large, scratch, tmp_path)
    processes = [FORKSERVER.Process(target=stage_at_once, args=(stager, start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    (a, told_a), (b, told_b) = results.get(timeout=60), results.get(timeout=60)
    for process in processes:
        process.join(60)
    assert a.copied and a == b and sorted((a.is_new, b.is_new)) == [False, True]
    assert sum(line.startswith("copying") for line in told_a + told_b) == 1
    assert stager.list_files() == {a.folder.name}


def stage_at_once(stager: Stager, start: Any, results: Any) -> None:
    start.wait(60)
    results.put((stager(), stager.told))


@pytest.mark.slow
def test_a_killed_copier_leaves_nothing_that_looks_complete(large, scratch, tmp_path):
    stager = Stager(large, scratch, tmp_path)
    process = FORKSERVER.Process(target=die_while_copying, args=(stager,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGXFSZ
    [partial_copy] = stager.list_files()
    assert partial_copy.endswith(".partial")
    staged = stager()
    assert staged.copied and len(stager.told) == 1
    assert stager.list_files() == {staged.folder.name}
    assert [s.path.stat().st_size for s in ShardSet(staged.folder).shards] == [
        s.size_bytes for s in ShardSet(large).shards
    ]


def die_while_copying(stager: Stager) -> None:
    """Let the kernel kill this process, as with SIGKILL, at the first write past 4 MiB of a shard."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    stager()


@pytest.mark.slow
def test_a_stop_while_copying_leaves_no_copy_and_reads_the_original(large, scratch, tmp_path):
    stager = Stager(large, scratch, tmp_path)
    assert stager(stop_requested=lambda: True) == Staged(large, "stop requested while copying")
    assert stager.list_files() == set()


def test_a_stop_while_another_process_copies_ends_the_wait(staging):
    copy = staging().folder
    shutil.rmtree(copy)
    with copy.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        staged = staging(stop_requested=lambda: True)
    assert staged == Staged(staging.source, "stop requested while another process was copying")
    assert staging.told[1:] == [f"waiting for the process on this node that holds {copy}.lock"]


def test_too_little_space_is_found_before_copying(large, small_disk, tmp_path):
    (small_disk / "of others").write_bytes(bytes(15 * MIB))  # the data fits, but not with 5 % to spare
    stager = Stager(large, small_disk, tmp_path)
    staged = stager()
    assert staged.folder == large and staged.failed and stager.told == []
    assert re.fullmatch(rf"{stager.home} has 51\.\d+ MB free, the copy needs 53\.\d+ MB", staged.reason)


def test_a_disk_that_others_fill_while_copying_leaves_no_copy(large, small_disk, tmp_path):
    stager = Stager(large, small_disk, tmp_path)
    staged = stager(tell=lambda line: (small_disk / "of others").write_bytes(bytes(40 * MIB)))
    assert staged.folder == large and staged.failed
    assert re.fullmatch(rf"{stager.home}/.*\.partial/shard-.*: No space left on device", staged.reason)
    assert stager.list_files() == set()


def test_nothing_is_copied_if_switched_off_or_from_a_local_disk(staging, tmp_path):
    assert staging(wanted="off") == Staged(staging.source, "requested")
    none = tmp_path / "none"
    none.write_text("1 0 0:1 / / rw - xfs /dev/sda rw\n")
    assert staging(mounts=none) == Staged(staging.source, "the data is on xfs, which is local")
    staging.environ = {}
    assert staging() == Staged(staging.source, "no TRAINYARD_SCRATCH: the cluster file names no scratch")
    assert not staging.home.exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "TRAINYARD_SCRATCH is '', not an absolute path. Does the node set the variables in it?"),
        ("{scratch}/no/such", "{scratch}/no/such: No such file or directory"),
        ("{tmp}/same-disk", "{tmp}/same-disk is on the same file system as the data"),
        ("{scratch}/network", "{scratch}/network is on lustre, which is not known to be local"),
    ],
)
def test_an_unusable_scratch_is_a_reason_for_no_copy(staging, scratch, tmp_path, place, said):
    names = {"scratch": scratch, "tmp": tmp_path}
    with staging.mounts.open("a") as file:
        file.write(f"3 1 0:3 / {scratch}/network rw - lustre mgs:/scratch rw\n")
    staging.environ = {SCRATCH: place.format(**names)}
    assert staging() == Staged(staging.source, said.format(**names), failed=True)


def test_a_scratch_folder_of_the_user_is_created_on_the_disk(staging, scratch):
    staging.environ = {SCRATCH: f"{scratch}/me"}
    assert staging().folder.is_relative_to(scratch / "me")


@pytest.mark.parametrize("trap", ["a link", "open to all", "of another"])
def test_a_folder_that_others_could_write_to_is_not_trusted(staging, scratch, tmp_path, trap):
    if trap == "a link":
        staging.home.symlink_to(tmp_path)
    else:
        staging.home.mkdir()
        staging.home.chmod(0o777 if trap == "open to all" else 0o700)
        if trap == "of another":
            if os.getuid():
                pytest.skip("only root can give a folder away")
            os.chown(staging.home, 65534, 65534)
    said = f"{staging.home} is not a folder that only this user can write to"
    assert staging() == Staged(staging.source, said, failed=True)


@pytest.mark.parametrize("folder", ["", "/my scratch", "/scratch/$USER", "${SLURM_TMPDIR}/data", "$TMPDIR", "/a_$B.c"])
def test_a_scratch_may_contain_variables(tmp_path, folder):
    assert load_cluster(write_cluster(tmp_path, folder)).scratch == folder


@pytest.mark.parametrize(
    "folder", ["scratch", "~/x", "/a`id`", "/$(id)", '/a"b', "/it's", "/a\\b", "${A:-/b}", "/$1", "/a$", "$((1))/x"]
)
def test_a_scratch_may_not_contain_other_shell_syntax(tmp_path, folder):
    with pytest.raises(UserError, match=r"line \d+: scratch: expected an absolute path, which may hold variables"):
        load_cluster(write_cluster(tmp_path, folder))


def write_cluster(folder: Path, scratch: str) -> Path:
    lines = (Path(__file__).parent / "slurm/golden/cluster.yaml").read_text().splitlines()
    others = [line for line in lines if not line.startswith("scratch:")]
    path = folder / "cluster.yaml"
    path.write_text("\n".join([*others, f"scratch: {json.dumps(scratch)}"]))
    return path


def test_a_run_records_where_it_reads_and_why(tmp_path, scratch):
    run = new_run(tmp_path, "max_duration=1st", "eval_every=1st")
    assert execute(run, FAMILIES, environ={SCRATCH: str(scratch)}, started=0.0) == 0
    choice = json.loads((run / ENV_FILE).read_text())["choices"]["stage"]
    assert choice["value"] == "off" and re.fullmatch(r"the data is on \w+, which is local", choice["reason"])


def test_a_run_reads_the_copy_and_records_both_places(tmp_path, scratch):
    """Use squashfs, which is not one of our local file systems and needs no server."""
    if not shutil.which("mksquashfs"):
        pytest.skip("no mksquashfs")
    run = new_run(tmp_path, "max_duration=1st", "eval_every=1st")
    [packed] = (path.parent for path in (tmp_path / "cache").glob("*/index.h5"))
    disk = tmp_path / "data.squashfs"
    subprocess.run(["mksquashfs", packed, disk, "-quiet"], check=True, timeout=60, stdout=subprocess.DEVNULL)
    unmount = mount(str(disk), packed, "-t", "squashfs", "-o", "loop,ro")
    try:
        assert execute(run, FAMILIES, environ={SCRATCH: str(scratch)}, started=0.0) == 0
    finally:
        unmount()
    env = json.loads((run / ENV_FILE).read_text())
    assert env["choices"]["stage"]["value"].startswith(str(scratch))
    assert env["choices"]["reader"]["value"] == "map"
    assert env["data"]["path"] == str(packed)
