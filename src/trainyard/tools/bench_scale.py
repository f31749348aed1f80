"""Measures what grows with runs, data and ranks: the time and memory of each, at sizes that a person chooses.

Each case prepares its input once and is measured in new processes, so that memory is its own. Paths, files and ranks
are real; raw images, scores and weights are random numbers of the size asked for, because none of them is looked at.
"""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.measure import Summary, find_free_path, format_table, write_results

SUITE = "scale"
_TIMEOUT_S = 1200  # of one case


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

    def make_quick(self) -> "Sizes":
        """Return sizes that show in seconds that everything runs, and measure nothing."""
        return Sizes(lines=2_000, runs=20, rows=2_000, dims=64, fingers=8, draws=20, checkpoint_mib=8, files=200)


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


def parse_sizes(texts: Sequence[str], sizes: Sizes) -> Sizes:
    """Return sizes with those that a person typed, such as lines=100000.

    Raises:
        UserError: there is no such size, or its value is not a number above 0.
    """
    known = [field.name for field in fields(Sizes)]
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known or not value.isdecimal() or not int(value):
            raise UserError(f"--size {text}: expected NAME=NUMBER, with one of {', '.join(known)}: --size lines=100000")
        sizes = replace(sizes, **{name: int(value)})
    return sizes


def run_scale(sizes: Sizes, *, rounds: int, only: Sequence[str], results: Path, header: Mapping[str, Any]) -> Path:
    """Measure every case `rounds` times, print a table, and return the result file.

    Args:
        only: names of cases; empty: all.
        header: the first line of the result file, to which the sizes are added.

    Raises:
        UserError: there is no such case, or one failed.
    """
    cases = [case for case in CASES if not only or case.name in only]
    if unknown := set(only) - {case.name for case in CASES}:
        raise UserError(f"--only {min(unknown)}: no such case. There are: {', '.join(case.name for case in CASES)}.")
    path = find_free_path(results, f"{SUITE}-{header['date'][:10]}")
    lines: list[dict[str, Any]] = [{**header, "sizes": asdict(sizes)}]
    for case in cases:
        folder = Path(tempfile.mkdtemp(prefix=f"trainyard-{case.name}-"))
        try:
            case.prepare(folder, sizes)
            found = [_measure_case(case, folder, sizes) for _ in range(rounds)]
        finally:
            shutil.rmtree(folder)
        own = [_summarize([numbers[i] for numbers in found]) for i in range(len(found[0]))]
        print(format_table(own), flush=True)
        lines += own
        write_results(path, lines)
    return path


def _measure_case(case: Case, folder: Path, sizes: Sizes) -> list[Number]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(case.ranks)]
    meeting = f"{case.name}-{time.monotonic_ns()}"
    ranks = [
        context.Process(target=_measure_on_rank, args=(case, folder, sizes, rank, meeting, pipes[rank][1]))
        for rank in range(case.ranks)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()  # so that nothing more can come once the process has ended
    numbers: list[Number] = []
    try:
        for receiver, _ in pipes:
            if not receiver.poll(_TIMEOUT_S):
                raise EOFError
            numbers += receiver.recv()
        for process in ranks:
            process.join()
    except EOFError:
        others = ", ".join(f"--only {one.name}" for one in CASES if one != case)
        raise UserError(
            f"bench scale: case '{case.name}' failed, or took over {_TIMEOUT_S} s; what it printed is above. "
            f"Others: {others}"
        ) from None
    finally:
        for process in ranks:
            process.kill()
    return numbers


def _measure_on_rank(case: Case, folder: Path, sizes: Sizes, rank: int, meeting: str, sender: Any) -> None:
    if case.ranks > 1:
        from trainyard.train import distributed
        from trainyard.train.world import World

        world = World(rank, rank, case.ranks, case.ranks, rendezvous=meeting)
        distributed.join(world, folder, os.environ)
    sender.send(case.measure(folder, sizes, rank))
    if case.ranks > 1:
        distributed.barrier()
        distributed.leave()


def _summarize(numbers: Sequence[Number]) -> dict[str, Any]:
    one, values = numbers[0], [number.value for number in numbers]
    summary = asdict(Summary.from_values(values))
    return {
        "kind": "result",
        "name": one.name,
        "unit": one.unit,
        "note": one.note,
        "rounds": values,
        "summary": summary,
    }


def _measure_work(name: str, work: Callable[[], object], note: str = "") -> list[Number]:
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
    few = _measure_work("report of a short run", lambda: write_report(small), "10 lines; loads what draws")
    numbers = _measure_work("resume the metrics", resume, note)
    return [*numbers, *few[:1], *_measure_work("report", lambda: write_report(folder), note)]


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
    return _measure_work("find what runs took", lambda: list(find_observations(folder, job="scale", key="k")), note)


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

    seconds, memory = _measure_work("gather rows of two ranks", gather, f"{sizes.rows:,} x {sizes.dims}")
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
    return _measure_work("intervals", lambda: pairs.compute_intervals(draws=sizes.draws), note)


# A large checkpoint


def _measure_checkpoint(folder: Path, sizes: Sizes, rank: int) -> list[Number]:
    import torch

    from trainyard.train import checkpoint

    parts = 16
    state = {"model": {str(i): torch.rand(sizes.checkpoint_mib * 2**18 // parts) for i in range(parts)}}
    saves = _make(folder / f"saves-{time.monotonic_ns()}")
    checkpoint.save(saves, state, step=1, meta={})

    def save() -> None:
        saved = checkpoint.save(saves, state, step=2, meta={})
        checkpoint.prune(saves, keep_last=1, written=saved.path)

    def load_first() -> None:
        entry = checkpoint.find_newest_valid(saves)
        assert entry is not None
        checkpoint.read_verified(entry.path)

    note = f"{sizes.checkpoint_mib} MiB"
    numbers = _measure_work("save and prune", save, note)[:1]
    numbers += _measure_work("resume, rank 0", load_first, note)[:1]
    (path,) = saves.glob("*.ckpt")
    numbers += _measure_work("resume, other ranks", lambda: checkpoint.read_verified(path), note)[:1]
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

    return _measure_work("list raw files", read, f"{sizes.files:,} files")


CASES = (
    Case("metrics", _prepare_metrics, _measure_metrics),
    Case("runs", _prepare_runs, _measure_search),
    Case("gather", _prepare_nothing, _measure_gather, ranks=2),
    Case("intervals", _prepare_nothing, _measure_intervals),
    Case("checkpoint", _prepare_nothing, _measure_checkpoint),
    Case("listing", _prepare_files, _measure_listing),
)
