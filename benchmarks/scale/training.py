"""What grows with ranks, with the samples of an evaluation and with the weights of a model."""

import inspect
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale.contract import (
    Absent,
    Case,
    Number,
    Sizes,
    make_folder,
    measure_work,
    prepare_nothing,
    read_private_mib,
)

if TYPE_CHECKING:
    import numpy as np

# Evaluation of many samples on two ranks


def _measure_gather(folder: Path, sizes: Sizes) -> list[Number]:
    return [number for numbers in _run_on_ranks(_gather, 2, "spawn", folder, sizes) for number in numbers]


def _gather(folder: Path, sizes: Sizes, world: Any) -> list[Number]:
    import numpy as np

    from trainyard.train import distributed, evaluate

    distributed.join(world, folder, os.environ)
    ids, rank = np.arange(sizes.rows), world.rank
    own = np.array_split(ids, 2)[rank]
    batches = np.array_split(own, max(1, len(own) // 256))
    size_mib = sizes.rows * sizes.dims * 4 / 2**20
    rows: Any = None

    def make_rows() -> "Iterator[dict[str, np.ndarray]]":
        for part in batches:
            yield {"sample_id": part, "embedding": np.full((len(part), sizes.dims), 0.5, np.float32)}

    def gather() -> None:
        nonlocal rows
        if hasattr(evaluate, "JoinedRows"):
            share: list[Any] = []
            joined = evaluate.JoinedRows(ids)
            kept = joined if rank == 0 else share
            for part in make_rows():
                kept.append(part)
            distributed.move_to_rank0(share, kept.append)
            rows = joined.finish() if rank == 0 else None
        else:  # as `evaluate` did itself
            parts = distributed.gather_to_rank0(list(make_rows()))
            rows = None if parts is None else evaluate._join_rows([row for part in parts for row in part], ids)

    seconds, memory = measure_work("gather rows of two ranks", gather, f"{sizes.rows:,} x {sizes.dims}")
    if rank == 0:
        assert rows["embedding"].shape == (sizes.rows, sizes.dims)
    of = Number(f"gather, memory of rank {rank}", memory.value / size_mib, "of the set", "its own share included")
    return [seconds, of] if rank == 0 else [of]


# Intervals of many scores


def _measure_intervals(folder: Path, sizes: Sizes) -> list[Number]:
    import numpy as np

    from trainyard.scoring import Pairs
    from trainyard.train import evaluate

    rng = np.random.default_rng(0)
    finger = np.repeat(np.arange(sizes.fingers), 8)
    one, other = np.triu_indices(len(finger), 1)
    same = finger[one] == finger[other]
    score = rng.normal(size=len(one)) + 3.3 * same  # an EER of 5 %
    identities = np.stack([finger[one], finger[other]], axis=1)
    pairs = Pairs(score[same], score[~same], finger[one][same], identities[~same])
    note = f"{len(score):,} pairs of {sizes.fingers} fingers, {sizes.draws:,} draws"

    def score() -> None:
        pairs.compute_metrics()
        if not hasattr(evaluate, "score_rows"):  # each validation had intervals
            pairs.compute_intervals(draws=sizes.draws)

    numbers = measure_work("score of a validation", score, "of the same pairs; the other ranks wait")[:1]
    return numbers + measure_work("intervals", lambda: pairs.compute_intervals(draws=sizes.draws), note)


# A large checkpoint


def _measure_checkpoint(folder: Path, sizes: Sizes) -> list[Number]:
    import torch

    from trainyard.train import checkpoint

    parts = 16
    state = {"model": {str(i): torch.rand(sizes.checkpoint_mib * 2**18 // parts) for i in range(parts)}}
    saves = make_folder(folder / f"saves-{time.monotonic_ns()}")
    checkpoint.save(saves, state, step=1, meta={})
    trusts_what_it_wrote = "written" in inspect.signature(checkpoint.prune).parameters

    def save() -> None:
        saved = checkpoint.save(saves, state, step=2, meta={})
        checkpoint.prune(saves, keep_last=1, **({"written": saved.path} if trusts_what_it_wrote else {}))

    def load_on_rank_0() -> None:
        if hasattr(checkpoint, "find_newest_valid"):
            entry = checkpoint.find_newest_valid(saves)
            assert entry is not None
            checkpoint.read_verified(entry.path)
        else:
            assert checkpoint.load_newest_valid(saves) is not None

    def load_on_all() -> None:
        load_on_rank_0()  # the others read it at the same time
        if not hasattr(checkpoint, "find_newest_valid"):
            checkpoint.load(path)  # they began when rank 0 had done

    note = f"{sizes.checkpoint_mib} MiB"
    in_front = f"{note}; training waits for it in the foreground"
    numbers = [*measure_work("save and prune", save, in_front)[:1], *_measure_wait(state, save, note)]
    numbers += measure_work("resume, rank 0", load_on_rank_0, note)[:1]
    (path,) = saves.glob("*.ckpt")
    numbers += measure_work("resume, until all ranks have it", load_on_all, f"{note}, a core for each")[:1]
    shutil.rmtree(saves)
    return numbers


def _measure_wait(state: Any, save: Callable[[], None], note: str) -> list[Number]:
    """Measure what training waits for at a save: a copy in host memory, or before there was one, the save."""
    name = "training waits for a save"
    try:
        from trainyard.train.host_copy import HostCopy
    except ImportError:
        return measure_work(name, save, note)[:1]
    host = HostCopy()
    host.take(state)  # the first copy of a run also allocates the buffers
    return measure_work(name, lambda: host.take(state), note)[:1]


# Many ranks on one machine


def _measure_ranks(folder: Path, sizes: Sizes) -> list[Number]:
    import torch

    from trainyard.train import checkpoint, run_state  # loaded once, and then shared by all

    if not hasattr(run_state, "load_newest_checkpoint"):
        raise Absent("every rank hashed the checkpoint, one after the other")

    torch.set_num_threads(1)
    weights = torch.rand(sizes.rank_checkpoint_mib * 2**18)
    saves = folder / "checkpoints"
    if not saves.exists():
        saves.mkdir()
        checkpoint.save(saves, {"model": {"weight": weights}}, step=1, meta={})
    del weights
    found = _run_on_ranks(_live_as_rank, sizes.ranks, "fork", folder, sizes)
    note = f"{sizes.ranks} ranks, gloo, {os.cpu_count()} cores, forked after the imports"
    checkpoint_note = f"{sizes.rank_checkpoint_mib} MiB, hashed by rank 0, read by all"
    units = {
        "join": ("s", note),
        "agree": ("ms", "a step, nothing computed meanwhile"),
        "resume": ("s", checkpoint_note),
    }
    numbers = [Number(f"ranks, {name}", max(one[name] for one in found), *units[name]) for name in units]
    return [*numbers, Number("ranks, memory", max(one["memory"] for one in found), "MiB", "of one, not shared")]


def _live_as_rank(folder: Path, sizes: Sizes, world: Any) -> dict[str, float]:
    """Start, agree and resume as a rank of a run does; return what each took."""
    from trainyard.train import distributed
    from trainyard.train.run_state import load_newest_checkpoint

    rounds = 100
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
    return {"join": join, "agree": 1000 * agree / rounds, "resume": resume, "memory": memory}


def _run_on_ranks(
    work: Callable[[Path, Sizes, Any], Any], count: int, method: str, folder: Path, sizes: Sizes
) -> list[Any]:
    """Call `work` in a process for each rank, which it joins the others from; return what each returned, by rank."""
    context: Any = multiprocessing.get_context(method)
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    meeting = str(time.monotonic_ns())
    ranks = [
        context.Process(target=_be_rank, args=(work, folder, sizes, i, count, meeting, pipes[i][1]))
        for i in range(count)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()  # so that reading ends if the process does
    found = [receiver.recv() for receiver, _ in pipes]
    for process in ranks:
        process.join()
    return found


def _be_rank(
    work: Callable[[Path, Sizes, Any], Any], folder: Path, sizes: Sizes, rank: int, count: int, meeting: str, out: Any
) -> None:
    from trainyard.train import distributed
    from trainyard.train.world import World

    found = work(folder, sizes, World(rank, rank, count, count, rendezvous=meeting))
    distributed.barrier()
    out.send(found)
    distributed.leave()


CASES = (
    Case("gather", prepare_nothing, _measure_gather),
    Case("intervals", prepare_nothing, _measure_intervals),
    Case("checkpoint", prepare_nothing, _measure_checkpoint),
    Case("ranks", prepare_nothing, _measure_ranks),
)
