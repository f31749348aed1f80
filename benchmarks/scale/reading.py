"""What the loader of a rank delivers: uncompressed arrays, and prints as `fingerprint_1m` reads them."""

import inspect
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.scale.contract import Case, Number, Sizes, make_folder

_ARRAY_PX, _INPUT_PX = 224, 299
_STORES = ("keep", "input-png", "input-raw")  # `packing.store`


# Uncompressed arrays


def _prepare_arrays(folder: Path, sizes: Sizes) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    for number in range(sizes.arrays):
        (folder / f"{number}.bin").write_bytes(rng.bytes(_ARRAY_PX**2))


def _load_array(path: Path) -> dict[str, Any]:
    import numpy as np

    return {"image": np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(_ARRAY_PX, _ARRAY_PX, 1)}


def _measure_arrays(folder: Path, sizes: Sizes) -> list[Number]:
    from benchmarks.contract import BATCH

    paths = [folder / f"{number}.bin" for number in range(sizes.arrays)]
    packed = _pack(folder, "arrays", paths, _load_array, {})
    note = f"{sizes.arrays:,} of {_ARRAY_PX} x {_ARRAY_PX} bytes, {BATCH} at a time in random order"
    return _measure_loader("read arrays", packed, sizes, px=_ARRAY_PX, note=note)


# Prints


def _prepare_prints(folder: Path, sizes: Sizes) -> None:
    import trainyard
    from trainyard.config import load_family

    jobs = Path(trainyard.__file__).parents[2] / "jobs"
    load_family(jobs, "fingerprint", "pack").synthesize(make_folder(folder / "raw"), count=sizes.read_prints, seed=0)


def _load_print(path: Path) -> dict[str, Any]:
    return {"image": path.read_bytes()}


def _measure_prints(folder: Path, sizes: Sizes) -> list[Number]:
    paths = sorted(path for path in (folder / "raw").rglob("*") if path.suffix == ".png")
    note = f"{len(paths):,} synthetic prints as PNG, to {_INPUT_PX} x {_INPUT_PX} px"
    numbers = []
    for store in _STORES:
        meta = {}
        if store != "keep":
            try:
                from trainyard.data.store import InputStore
            except ImportError:  # an earlier commit resizes nothing when it packs
                break
            meta = {"input": vars(InputStore(store, _INPUT_PX, _INPUT_PX, channels=1, fill=255))}
        packed = _pack(folder, store, paths, _load_print, meta)
        numbers += _measure_loader(f"read prints, {store}", packed, sizes, px=_INPUT_PX, note=note)
    return numbers


# Both


def _pack(folder: Path, name: str, paths: list[Path], load: Any, meta: dict[str, Any]) -> Path:
    """Pack with the code that is measured, once for all rounds; return the folder."""
    import trainyard
    from trainyard.data.pack import pack
    from trainyard.data.shards import Sample
    from trainyard.hardware import count_cores

    out = folder / f"{Path(trainyard.__file__).parents[2].name}-{name}"
    if not out.exists():
        samples = (Sample(path.name, partial(load, path), source=path) for path in paths)
        pack(samples, out, meta=meta, workers=count_cores()).close()
    return out


def _measure_loader(name: str, packed: Path, sizes: Sizes, *, px: int, note: str) -> list[Number]:
    """Measure with one thread and with two, up to where a device would take over."""
    import torch

    from trainyard.train.precision import keep_freed_memory

    torch.set_num_threads(1)  # the loader has its own threads
    keep_freed_memory(torch.device("cpu"))  # as a run does
    rates = {}
    for threads in (1, 2):
        stream = _iterate_batches(packed, px, threads)
        _count_samples(stream, sizes.read_ms / 4)  # reads all files once, if there are not too many
        begin, cpu_before = time.perf_counter(), time.process_time()
        count = _count_samples(stream, sizes.read_ms)
        wall_s, core_s = time.perf_counter() - begin, time.process_time() - cpu_before
        stream.close()
        rates[threads] = count / wall_s / 1000
        if threads == 1:
            per_core = Number(f"{name}, per core", count / core_s / 1000, "thousand/core-s", f"{note}; one thread")
    return [
        per_core,
        Number(f"{name}, one thread", rates[1], "thousand/s", "by the clock"),
        Number(f"{name}, two threads", rates[2], "thousand/s", "by the clock"),
        Number(f"{name}, two to one", rates[2] / rates[1], "times", "by the clock"),
    ]


def _count_samples(stream: Iterator[Any], least_ms: float) -> int:
    end, count = time.perf_counter() + least_ms / 1000, 0
    while True:
        count += len(next(stream))
        if time.perf_counter() >= end:
            return count


def _iterate_batches(packed: Path, px: int, threads: int) -> Any:
    """Yield the images of one batch after another, on the host, without end."""
    import numpy as np
    import torch

    from benchmarks.ours import make_host_loader, order_epoch
    from trainyard.data.index import ARRAY
    from trainyard.data.loader import Loader
    from trainyard.data.shards import ShardSet
    from trainyard.settings import ImageSettings, TrainConfig

    decode = "dali" if find_spec("nvidia.dali") is not None else "cpu"
    options: dict[str, Any] = {"device": torch.device("cpu"), "decode": decode, "threads": threads}
    if "reads_noise" in inspect.signature(Loader.from_config).parameters:
        options["reads_noise"] = False  # as `fingerprint_1m`; earlier code makes it for every job
    data = ShardSet(packed)
    kind = Loader if data.records["image"].kind == ARRAY else make_host_loader()  # arrays are not prepared further
    made = kind.from_config(TrainConfig(image=ImageSettings(height_px=px, width_px=px)), data, **options)
    orders = partial(order_epoch, np.arange(data.count))
    for micro_batch in made.train(orders, epoch=0, start=0, micro_batch_size=0):
        yield micro_batch.batch["image"]


CASES = (
    Case("arrays", _prepare_arrays, _measure_arrays),
    Case("prints", _prepare_prints, _measure_prints),
)
