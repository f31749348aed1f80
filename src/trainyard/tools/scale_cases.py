"""The cases of `bench_scale`: what each prepares and measures, and the sizes of their inputs."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainyard.tools.lifetime import end_with_parent
from trainyard.tools.worker_memory import STORES, measure_worker, read_private_mib, write_prints


@dataclass(frozen=True)
class Sizes:
    """How large the input of each case is."""

    lines: int = 1_000_000  # of a run's metrics
    runs: int = 2_000  # of a job
    rows: int = 200_000  # that two ranks gather
    dims: int = 512  # of a row, float32
    fingers: int = 250  # of which all pairs are scored, with 8 impressions each
    draws: int = 1_000  # of a bootstrap
    checkpoint_mib: int = 512
    files: int = 50_000  # raw, 100 in a folder
    records: int = 100_000  # small images, packed with a kill in the middle
    prints: int = 2_048  # of 448 px, packed in each way
    ranks: int = 16  # on this machine, each a process
    rank_checkpoint_mib: int = 64  # that each of them resumes from

    def make_quick(self) -> "Sizes":
        """Return sizes that show in seconds that everything runs, and measure nothing."""
        small = Sizes(lines=2_000, runs=20, rows=2_000, dims=64, fingers=8, draws=20, checkpoint_mib=8, files=200)
        return replace(small, records=5_000, prints=20, ranks=3, rank_checkpoint_mib=1)


@dataclass(frozen=True)
class Number:
    """One number that a case measured."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One thing that grows."""

    name: str
    prepare: Callable[[Path, Sizes], None]  # writes the input into a folder, once
    measure: Callable[[Path, Sizes, int], list[Number]]  # called on each rank, in a process of its own
    ranks: int = 1


def measure_work(name: str, work: Callable[[], object], note: str = "") -> list[Number]:
    """Do some work once; return its seconds, and the memory that it had at most beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here: proc(5)
    before, begin = _read_memory_mib("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    peak = _read_memory_mib("VmHWM") - before
    return [Number(name, seconds, "s", note), Number(f"{name}, memory", peak, "MiB")]


def _read_memory_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


# A run with many lines of metrics


def _prepare_metrics(folder: Path, sizes: Sizes) -> None:
    from trainyard.runs.events import EVENTS_FILE, METRICS_FILE
    from trainyard.train.recorder import encode_line

    (folder / "config.yaml").write_text("job: scale\n")
    start = {"kind": "event", "step": 0, "event": "start", "attempt": "local-1", "total_steps": sizes.lines}
    monitor = {"split": "val", "metric": "eer", "mode": "min"}
    (folder / EVENTS_FILE).write_bytes(encode_line({**start, "monitor": monitor, "elapsed_s": 0.0}))
    with (folder / METRICS_FILE).open("wb") as file:
        for step in range(1, sizes.lines + 1):
            numbers = {
                "loss": 1 / step,
                "centre": 2 / step,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "samples_per_s": 900.5 + step % 7,
            }
            times = {"step_ms": 71.25, "data_wait_ms": 1.5, "idle_ms": 0.5, "compute_ms": 70.75, "memory_gib": 11.25}
            line = {"kind": "train", "step": step, "epoch": step // 1000, "samples_seen": 64 * step, **numbers, **times}
            file.write(encode_line({**line, "elapsed_s": step / 14}))


def _measure_metrics(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    from trainyard.report.run_page import write_report
    from trainyard.runs.events import METRICS_FILE
    from trainyard.train.recorder import Recorder

    size = (folder / METRICS_FILE).stat().st_size
    note = f"{sizes.lines:,} lines, {size / 1e6:,.0f} MB"

    def resume() -> None:
        Recorder.rewind(folder, size)
        Recorder(folder, trackers=[], config={}, resume_at=sizes.lines).close()

    small = _make(folder / "small")
    _prepare_metrics(small, replace(sizes, lines=10))
    few = measure_work("report of a short run", lambda: write_report(small), "10 lines; loads what draws")
    numbers = measure_work("resume the metrics", resume, note)
    return [*numbers, *few[:1], *measure_work("report", lambda: write_report(folder), note)]


def _make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


# A job with many runs


def _prepare_runs(folder: Path, sizes: Sizes) -> None:
    from trainyard.runs.folder import ENV_FILE

    for number in range(sizes.runs):
        run = folder / "scale" / f"run-{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("job: scale\n")
        env = {"created": f"2026-01-01T{number:06}", "plan": {"key": "k"}, "versions": {"text": "x" * 4000}}
        (run / ENV_FILE).write_text(json.dumps(env))


def _measure_search(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    from trainyard.runs.observations import find_observations

    note = f"{sizes.runs:,} runs of a job, none fits"
    return measure_work("find what runs took", lambda: list(find_observations(folder, job="scale", key="k")), note)


# A board of many runs


def _prepare_board(folder: Path, sizes: Sizes) -> None:
    from trainyard.runs.events import EVENTS_FILE
    from trainyard.train.recorder import encode_line

    for number in range(sizes.runs):
        run = folder / "runs" / "scale" / f"run-{number}"
        run.mkdir(parents=True)
        _prepare_metrics(run, replace(sizes, lines=_BOARD_LINES))
        (run / "env.json").write_text(json.dumps({"created": f"2026-01-01T{number:06}"}))
        end = {"kind": "event", "step": _BOARD_LINES, "event": "done", "reason": "none", "elapsed_s": 90.0}
        whole = [{**json.loads((run / EVENTS_FILE).read_bytes()), "time": "2026-01-01T00:00:00+00:00"}]
        whole.append({**end, "time": "2026-01-01T00:01:40+00:00", "train_s": 80.0})
        (run / EVENTS_FILE).write_bytes(b"".join(map(encode_line, whole)))


_BOARD_LINES = 500  # of a run's metrics: 180 kB


def _measure_board(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    from trainyard.report.board import write_board

    root, note = folder / "runs", f"{sizes.runs:,} runs that have ended"
    for path in root.glob(".board*"):
        path.unlink()
    first = measure_work("first board", lambda: write_board(root), note)
    return [*first, *measure_work("board again", lambda: write_board(root), note)[:1]]


# Evaluation of many samples on two ranks


def _prepare_nothing(folder: Path, sizes: Sizes) -> None:
    pass


def _measure_gather(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    import numpy as np

    from trainyard.train.distributed import move_to_rank0
    from trainyard.train.evaluate import JoinedRows
    from trainyard.train.module import Rows

    ids = np.arange(sizes.rows)
    own = np.array_split(ids, 2)[rank]
    batches = np.array_split(own, max(1, len(own) // 256))
    share: list[Rows] = []
    joined = JoinedRows(ids)
    kept = joined if rank == 0 else share
    size_mib = sizes.rows * sizes.dims * 4 / 2**20

    def gather() -> None:
        for part in batches:
            kept.append({"sample_id": part, "embedding": np.full((len(part), sizes.dims), 0.5, np.float32)})
        move_to_rank0(share, kept.append)

    seconds, memory = measure_work("gather rows of two ranks", gather, f"{sizes.rows:,} x {sizes.dims}")
    if rank == 0:
        assert joined.finish()["embedding"].shape == (sizes.rows, sizes.dims)
    of = Number(f"gather, memory of rank {rank}", memory.value / size_mib, "of the set", "its own share included")
    return [seconds, of] if rank == 0 else [of]


# Intervals of many scores


def _measure_intervals(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    import numpy as np

    from trainyard.scoring import Pairs

    rng = np.random.default_rng(0)
    finger = np.repeat(np.arange(sizes.fingers), 8)
    one, other = np.triu_indices(len(finger), 1)
    same = finger[one] == finger[other]
    score = rng.normal(size=len(one)) + 3.3 * same  # an EER of 5 %
    identities = np.stack([finger[one], finger[other]], axis=1)
    pairs = Pairs(score[same], score[~same], finger[one][same], identities[~same])
    note = f"{len(score):,} pairs of {sizes.fingers} fingers, {sizes.draws:,} draws"
    return measure_work("intervals", lambda: pairs.compute_intervals(draws=sizes.draws), note)


# A large checkpoint


def _measure_checkpoint(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    import torch

    from trainyard.train import checkpoint
    from trainyard.train.host_copy import HostCopy

    parts = 16
    state = {"model": {str(i): torch.rand(sizes.checkpoint_mib * 2**18 // parts) for i in range(parts)}}
    saves = _make(folder / f"saves-{time.monotonic_ns()}")
    checkpoint.save(saves, state, step=1, meta={})
    host = HostCopy()
    host.take(state)  # the first copy of a run also allocates the buffers

    def save() -> None:
        saved = checkpoint.save(saves, state, step=2, meta={})
        checkpoint.prune(saves, keep_last=1, written=saved.path)

    def load_first() -> None:
        entry = checkpoint.find_newest_valid(saves)
        assert entry is not None
        checkpoint.read_verified(entry.path)

    note = f"{sizes.checkpoint_mib} MiB"
    numbers = measure_work("save and prune", save, f"{note}; training waits for it in the foreground")[:1]
    numbers += measure_work("copy for a save", lambda: host.take(state), f"{note}; training waits for it otherwise")[:1]
    numbers += measure_work("resume, rank 0", load_first, note)[:1]
    (path,) = saves.glob("*.ckpt")
    numbers += measure_work("resume, other ranks", lambda: checkpoint.read_verified(path), note)[:1]
    shutil.rmtree(saves)
    return numbers


# Many raw files


def _prepare_files(folder: Path, sizes: Sizes) -> None:
    for number in range(sizes.files):
        path = folder / f"{number // 100}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.touch()


def _measure_listing(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    from trainyard.data.pack import read_listing
    from trainyard.data.raw import list_files
    from trainyard.data.shards import Sample

    def read() -> None:
        samples = (Sample(path.name, dict, source=path) for path in list_files(folder, {".png"}))
        read_listing(samples, {})

    return measure_work("list raw files", read, f"{sizes.files:,} files")


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
    from trainyard.data.write_shard import read_image

    return {"image": read_image(path)[0]}


def _pack_images(folder: Path, sender: Any, parent: int) -> None:
    """Pack as `trainyard pack` does; send how many samples were done since the last time."""
    from trainyard.data.pack import pack
    from trainyard.data.raw import list_files
    from trainyard.data.shards import Sample
    from trainyard.hardware import count_cores

    end_with_parent(parent)
    os.setsid()  # so that a kill reaches the workers, too
    raw = folder / "raw"
    samples = (Sample(path.name, partial(_load_image, path), source=path) for path in list_files(raw, {".png"}))
    with sender:
        pack(samples, folder / "packed", meta={}, workers=count_cores(), progress=sender.send)


def _measure_packing(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
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
    process = multiprocessing.get_context("spawn").Process(target=_pack_images, args=(folder, sender, os.getpid()))
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


# Memory of a packing worker


def _prepare_prints(folder: Path, sizes: Sizes) -> None:
    write_prints(folder)


def _measure_workers(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    note = f"{sizes.prints:,} prints, shards of 128 MiB; what workers share is not counted"
    return [
        Number(f"packing worker, {store}", measure_worker(folder, store, images=sizes.prints), "MiB", note)
        for store in STORES
    ]


# Many ranks on one machine


def _measure_ranks(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    import torch

    from trainyard.train import checkpoint, run_state  # noqa: F401 (loaded once, and then shared by all)

    torch.set_num_threads(1)
    weights = torch.rand(sizes.rank_checkpoint_mib * 2**18)
    saves = folder / "checkpoints"
    if not saves.exists():
        saves.mkdir()
        checkpoint.save(saves, {"model": {"weight": weights}}, step=1, meta={})
    del weights
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    meeting = str(time.monotonic_ns())
    ranks = [
        context.Process(target=_live_as_rank, args=(folder, i, sizes, meeting, sender)) for i in range(sizes.ranks)
    ]
    for process in ranks:
        process.start()
    sender.close()
    found = [receiver.recv() for _ in ranks]
    for process in ranks:
        process.join()
    note = f"{sizes.ranks} ranks, gloo, {os.cpu_count()} cores, forked after the imports"
    checkpoint_note = f"{sizes.rank_checkpoint_mib} MiB, hashed by rank 0, read by all"
    units = {
        "join": ("s", note),
        "agree": ("ms", "a step, nothing computed meanwhile"),
        "resume": ("s", checkpoint_note),
    }
    numbers = [Number(f"ranks, {name}", max(one[name] for one in found), *units[name]) for name in units]
    return [*numbers, Number("ranks, memory", max(one["memory"] for one in found), "MiB", "of one, not shared")]


def _live_as_rank(folder: Path, rank: int, sizes: Sizes, meeting: str, sender: Any) -> None:
    """Start, agree and resume as a rank of a run does; send what each took."""
    from trainyard.train import distributed
    from trainyard.train.run_state import load_newest_checkpoint
    from trainyard.train.world import World

    world, rounds = World(rank, rank, sizes.ranks, sizes.ranks, rendezvous=meeting), 100
    times = [time.perf_counter()]
    distributed.join(world, folder, os.environ)
    distributed.select_device(world, os.environ)
    times.append(time.perf_counter())
    agreement = distributed.Agreement()
    for _ in range(rounds):
        agreement.exchange(distributed.Decision())
    agreement.settle()
    times.append(time.perf_counter())
    loaded = load_newest_checkpoint(folder, is_main=world.is_main)
    distributed.barrier()
    times.append(time.perf_counter())
    assert loaded is not None
    join, agree, resume = (after - before for before, after in pairwise(times))
    memory = read_private_mib(os.getpid())
    distributed.barrier()
    sender.send({"join": join, "agree": 1000 * agree / rounds, "resume": resume, "memory": memory})
    distributed.leave()


CASES = (
    Case("metrics", _prepare_metrics, _measure_metrics),
    Case("runs", _prepare_runs, _measure_search),
    Case("board", _prepare_board, _measure_board),
    Case("gather", _prepare_nothing, _measure_gather, ranks=2),
    Case("intervals", _prepare_nothing, _measure_intervals),
    Case("checkpoint", _prepare_nothing, _measure_checkpoint),
    Case("listing", _prepare_files, _measure_listing),
    Case("packing", _prepare_images, _measure_packing),
    Case("workers", _prepare_prints, _measure_workers),
    Case("ranks", _prepare_nothing, _measure_ranks),
)
