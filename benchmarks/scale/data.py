"""What grows with raw files, shards and samples."""

import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scale.contract import Absent, Case, Number, Sizes, make_folder, measure_work, prepare_nothing

# Many raw files


def _prepare_files(folder: Path, sizes: Sizes) -> None:
    for name, count in (("usual", sizes.files), ("slow", sizes.slow_files)):
        for number in range(count):
            path = folder / name / f"{number // 100}" / f"{number}.png"
            if number % 100 == 0:
                make_folder(path.parent)
            path.touch()


def _measure_listing(folder: Path, sizes: Sizes) -> list[Number]:
    _list(make_folder(folder / "empty"))  # loads what lists
    note = f"{sizes.files:,} files"
    usual = measure_work("list raw files", lambda: _list(folder / "usual"), note)
    with slow_down(0.001) as calls:
        slow = measure_work(
            "list raw files, 1 ms a call", lambda: _list(folder / "slow"), f"{sizes.slow_files:,} files"
        )
    each = Number("list raw files, calls", len(calls) / sizes.slow_files, "a file", "stat, lstat, scandir")
    return [*usual, *slow[:1], each]


def _list(folder: Path) -> None:
    from trainyard.data.pack import read_listing
    from trainyard.data.raw import list_files
    from trainyard.data.shards import Sample

    samples = (Sample(path.name, dict, source=path) for path in list_files(folder, {".png"}))
    read_listing(samples, {})


@contextmanager
def slow_down(seconds: float) -> Iterator[list[str]]:
    """Within the block, each stat, lstat and scandir of Python code waits first; yields the paths, one for each call.

    This is how a file system on a network behaves: calls wait, and many can wait at the same time.
    """
    calls: list[str] = []

    def delay(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(path: Any = ".", **options: Any) -> Any:
            calls.append(os.fspath(path))
            time.sleep(seconds)
            return call(path, **options)

        return wait_and_call

    before = os.stat, os.lstat, os.scandir
    os.stat, os.lstat, os.scandir = map(delay, before)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        os.stat, os.lstat, os.scandir = before


# What a submit asks the file system about data that is packed already


def _measure_submit(folder: Path, sizes: Sizes) -> list[Number]:
    import trainyard
    from trainyard import config as configs
    from trainyard.data import prepare

    if not hasattr(prepare, "find_packed"):
        raise Absent("a submit did not look whether data is packed")
    jobs = Path(trainyard.__file__).parents[2] / "jobs"
    cache = folder / Path(trainyard.__file__).parents[2].name
    options = [f"data.synthetic={sizes.submitted}", f"data.cache={cache}"]
    config = configs.compose("fingerprint_smoke", options, jobs)
    prepare.prepare_data(config, jobs)
    with slow_down(0.001) as calls:
        (seconds, _) = measure_work("find packed data, 1 ms a call", lambda: prepare.find_packed(config, jobs))
    asked = sum(str(folder) in call for call in calls)
    return [seconds, Number("find packed data, calls", asked, "calls", f"{sizes.submitted:,} raw files")]


# Many shards, few open files


def _prepare_many(folder: Path, sizes: Sizes) -> None:
    import numpy as np

    raw, rng = make_folder(folder / "raw"), np.random.default_rng(0)
    for number in range(sizes.shards):
        (raw / f"{number}.bin").write_bytes(rng.bytes(100))


def _load_array(path: Path) -> dict[str, Any]:
    import numpy as np

    return {"value": np.frombuffer(path.read_bytes(), dtype=np.uint8)}


def _measure_shards(folder: Path, sizes: Sizes) -> list[Number]:
    import numpy as np

    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample, ShardSet
    from trainyard.hardware import count_cores

    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    paths = [folder / "raw" / f"{number}.bin" for number in range(sizes.shards)]
    packed = folder / "packed"
    shutil.rmtree(packed, ignore_errors=True)  # which an earlier round may have left
    samples = [Sample(path.name, partial(_load_array, path), source=path) for path in paths]
    note = f"{sizes.shards:,} shards of a sample, at most {_OPEN_FILES} open files"
    options = {"meta": {}, "workers": count_cores(), "shard_mib": 1e-6}
    numbers = measure_work("pack many shards", lambda: pack(iter(samples), packed, **options), note)[:1]
    data, ids = ShardSet(packed), np.random.default_rng(0).permutation(sizes.shards)
    assert len(data.shards) == data.count == sizes.shards

    def read() -> None:
        for first in range(0, len(ids), 64):
            data.read_arrays("value", ids[first : first + 64])

    numbers += measure_work("read many shards", read, "64 samples at a time, in random order")[:1]
    data.close()
    shutil.rmtree(packed)
    return numbers


_OPEN_FILES = 64


# Many small images: packed, killed on the way, packed on, and read


def _prepare_images(folder: Path, sizes: Sizes) -> None:
    import io

    import numpy as np
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(64):
        Image.fromarray(rng.integers(0, 256, (32, 32), np.uint8)).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    for number in range(sizes.records):
        path = folder / "raw" / f"{number // 1000}" / f"{number}.png"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(files[number % 64])


def _load_image(path: Path) -> dict[str, Any]:
    from trainyard.data.write_shard import open_image

    data = path.read_bytes()
    open_image(data)  # refuses what cannot be decoded, as a family does
    return {"image": data}


def _pack_images(folder: Path, sender: Any) -> None:
    """Pack as `trainyard pack` does; send how many samples were done since the last time."""
    from trainyard.data.pack import pack
    from trainyard.data.raw import list_files
    from trainyard.data.shards import Sample
    from trainyard.hardware import count_cores

    os.setsid()  # so that a kill reaches the workers, too
    raw = folder / "raw"
    samples = (Sample(path.name, partial(_load_image, path), source=path) for path in list_files(raw, {".png"}))
    with sender:
        pack(samples, folder / "packed", meta={}, workers=count_cores(), progress=sender.send)


def _measure_packing(folder: Path, sizes: Sizes) -> list[Number]:
    import numpy as np

    from trainyard.data.shards import ShardSet

    shutil.rmtree(folder / "packed", ignore_errors=True)
    note = f"{sizes.records:,} images of {(folder / 'raw/0/0.png').stat().st_size:,} bytes"
    before, until_kill_s = _run_packing(folder, most=sizes.records // 2)
    complete = {path.name for path in (folder / "packed").glob("shard-*.h5")}
    _, rest_s = _run_packing(folder, most=None)
    data = ShardSet(folder / "packed")
    assert data.count == sizes.records
    lost = before - sum(shard.count for shard in data.shards if shard.path.name in complete)
    ids, begin = np.random.default_rng(0).permutation(data.count), time.perf_counter()
    for first in range(0, len(ids), 1024):
        data.read_bytes("image", ids[first : first + 1024])
    read_s = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in (folder / "packed").iterdir())
    return [
        Number("pack, until a kill", until_kill_s, "s", f"{note}, killed after {before:,}"),
        Number("pack, after it", rest_s, "s"),
        Number("pack, lost by the kill", 100 * lost / sizes.records, "%", "of all images"),
        Number("packed size", size / 2**20, "MiB", f"{len(data.index.shards):,} shards"),
        Number("read in random order", data.count / read_s / 1000, "thousand/s", "1,024 at a time, checksums included"),
    ]


def _run_packing(folder: Path, *, most: int | None) -> tuple[int, float]:
    """Pack in a process of its own; return how many samples are done, and the seconds.

    Args:
        most: kill it and its workers once it has done so many.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_pack_images, args=(folder, sender))
    begin, done = time.perf_counter(), 0
    process.start()
    sender.close()
    with suppress(EOFError):
        while most is None or done < most:
            done += receiver.recv()
    if most is not None:
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == (0 if most is None else -signal.SIGKILL), process.exitcode
    return done, time.perf_counter() - begin


# The order of an epoch


def _measure_order(folder: Path, sizes: Sizes) -> list[Number]:
    """Measure what training waits for when an epoch ends, with a step of 5 ms and the real loader."""
    import numpy as np
    import torch

    from trainyard.data import order
    from trainyard.data.loader import Loader
    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample
    from trainyard.settings import TrainConfig

    ids, computed = np.arange(sizes.ordered), 0
    identity = ids // 10
    packed = folder / f"packed-{time.monotonic_ns()}"
    few = [Sample(str(i), partial(_make_array, i)) for i in range(64)]
    data = pack(iter(few), packed, meta={}, workers=1)

    def compute(epoch: int) -> order.EpochOrder:
        nonlocal computed
        computed += 1
        whole = order.group_by_identity(
            ids, identity, samples_per_identity=4, seed=0, epoch=epoch, global_batch_size=_BATCH
        )
        return order.EpochOrder(whole.ids[: _BATCHES * _BATCH] % data.count, _BATCH)

    one = measure_work("order of an epoch", lambda: compute(0), f"{sizes.ordered:,} samples, 4 of each identity")
    computed = 0
    orders = order.EpochOrders(compute) if hasattr(order, "EpochOrders") else compute
    loader = Loader.from_config(TrainConfig(), data, device=torch.device("cpu"), decode="cpu")
    orders(0)  # rank 0 asks for the number of steps
    epoch_order, waits = orders(0), []
    stream = loader.train(orders, epoch=0, start=0, micro_batch_size=_BATCH)
    next(stream)
    for epoch in range(2):
        for _ in range(len(epoch_order) - 1):
            time.sleep(0.005)
            next(stream)
        time.sleep(0.005)
        begin = time.perf_counter()
        epoch_order = orders(epoch + 1)
        next(stream)
        waits.append(time.perf_counter() - begin)
    stream.close()
    stall = Number("training waits at an epoch's end", max(waits), "s", f"{_BATCHES} steps of 5 ms, the longer of 2")
    return [*one, stall, Number("orders computed", computed, "orders", "of two epochs and the one after them")]


def _make_array(number: int) -> dict[str, Any]:
    import numpy as np

    return {"value": np.full(8, number, dtype=np.float32)}


_BATCH, _BATCHES = 64, 300

CASES = (
    Case("shards", _prepare_many, _measure_shards),
    Case("listing", _prepare_files, _measure_listing),
    Case("submit", prepare_nothing, _measure_submit),
    Case("packing", _prepare_images, _measure_packing),
    Case("order", prepare_nothing, _measure_order),
)
