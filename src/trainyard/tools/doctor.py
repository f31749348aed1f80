"""Finds the limit of a job's training on this machine, with the numbers that show it, and the most that a fix can give.

Three rates answer most of it: steps on a batch that is on the device already, the loader alone, both together. They are
measured in turn, each in several rounds.
"""

import hashlib
import math
import mmap
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.duration import Duration
from trainyard.data.host_memory import read_available_memory
from trainyard.data.loader import MicroBatch
from trainyard.data.shards import ShardSet, find_file_system
from trainyard.hardware import count_cores, read_cpu_quota
from trainyard.measure import WORTH, Summary
from trainyard.text import format_duration, format_size
from trainyard.tools.gpu_facts import read_gpu_facts
from trainyard.tools.stage_sampler import StageSampler
from trainyard.tools.trial import Trial
from trainyard.train import checkpoint, distributed
from trainyard.train.evaluate import predict_share
from trainyard.train.precision import allow_nondeterministic_operators
from trainyard.train.run_context import VALIDATION, compute_total_minutes, compute_total_steps, make_loader
from trainyard.train.run_state import encode_state

T = TypeVar("T")

COMPUTE, LOADER, TOGETHER = "step alone", "loader alone", "both together"

_ROUNDS = 5
_DISK_BYTES = 32 << 20  # read at most, to measure a disk
_STEPS_OF_A_ROUND = 3
_SPIN_S = 0.3
_SMALL_SHM = 64 << 20  # of a container started without --shm-size: Docker's default
_LEAST_DISK_BYTES, _LEAST_DISK_S = 1 << 20, 0.5  # of fewer and shorter reads the rate is that of a few system calls
_MOST_EVALUATED = 4  # batches of a set, from which the time of the whole is computed
_LEAST_EVALUATION_S = 10.0  # of a whole run: to start one takes as long
_FEW_SYNCS = 2  # a micro-batch: a single one costs less than to start the next step's work
_COMPARED_S = 0.2  # of steps in a turn of the ranks: many time slices of the kernel (a few ms)
_TURNS = 15  # of the ranks: that the same one of two equal ranks is last in 12 of them happens once in 28 times
_SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")
"""Operators of aten whose result's value or size the host needs: it waits for all that a GPU has yet to do."""


@dataclass(frozen=True)
class Fault:
    """A cause of slow training."""

    name: str
    found: str
    advice: str
    gain: float = 1.0  # how many times as fast training is at most without it; 1.0: not known


@dataclass
class Diagnosis:
    """Measurements, and the faults that follow."""

    ranks: int
    rates: dict[str, Summary] = field(default_factory=dict)  # samples per second of all ranks
    step_ms: dict[str, float] = field(default_factory=dict)  # by stage of a step on the device
    slowdowns: list[float] = field(default_factory=list)  # by turn: steps alone, as a multiple of both together
    loader_shares: dict[str, float] = field(default_factory=dict)
    around_ms: dict[str, float] = field(default_factory=dict)  # per step: evaluation, save
    facts: dict[str, str] = field(default_factory=dict)  # of the machine, by name
    faults: list[Fault] = field(default_factory=list)

    @property
    def verdict(self) -> Fault | None:
        """The fault whose fixing gives most, if that is worth it."""
        worth = [fault for fault in self.faults if fault.gain >= WORTH]
        return max(worth, key=lambda fault: fault.gain, default=None)


def diagnose(trial: Trial, *, seconds: float) -> Diagnosis:
    """Measure a job, and find its faults; every rank takes part, and only rank 0's result counts.

    Args:
        seconds: for the three rates together; the rest takes a few more.
    """
    diagnosis = Diagnosis(ranks=trial.context.world.world_size)
    cached = trial.read_step()
    trial.take_step(cached)  # creates the optimizer's state, and compiles
    trial.wait()
    _measure_rates(trial, cached, diagnosis, seconds=seconds)
    _split_step(trial, cached, diagnosis)
    _find_slow_rank(trial, cached, diagnosis)
    _find_host_syncs(trial, cached, diagnosis)
    _measure_threads(trial, diagnosis)
    _measure_around(trial, diagnosis)
    _measure_disk(trial, diagnosis)
    _look_at_machine(trial, cached, diagnosis)
    judge_input(diagnosis)
    return diagnosis


# Rates


def _measure_rates(trial: Trial, cached: list[MicroBatch], diagnosis: Diagnosis, *, seconds: float) -> None:
    size, ranks = trial.samples_per_step, trial.context.world.world_size
    per_turn_s = seconds / (3 * _ROUNDS)
    once_s = _agree(_time_step(trial, cached))
    steps = max(2, math.ceil(per_turn_s / max(once_s, 1e-6)))
    values: dict[str, list[float]] = {COMPUTE: [], LOADER: [], TOGETHER: []}
    order = random.Random(0)
    with closing(trial.open_stream()) as stream, StageSampler() as sampler:

        def compute() -> int:
            for _ in range(steps):
                trial.take_step(cached)
            return steps * size

        def load() -> int:
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < per_turn_s:
                count += sum(len(part.batch["sample_id"]) for part in trial.take_micro_batches(stream))
            return count * ranks

        def train() -> int:
            for _ in range(steps):
                trial.take_step(trial.take_micro_batches(stream))
            return steps * size

        works: dict[str, Callable[[], int]] = {COMPUTE: compute, LOADER: load, TOGETHER: train}
        for _ in range(_ROUNDS):
            for name in order.sample(list(works), len(works)):
                if name != COMPUTE:
                    _drain(trial, stream)
                before = sampler.counts.copy()
                elapsed_s, count = _measure(trial, works[name])
                values[name].append(count / elapsed_s)
                if name != LOADER:
                    sampler.counts = before  # the loader's stages are counted in its turns only
    rates = distributed.gather_to_rank0(values)
    for name in values:
        rounds = [min(rank[name][i] for rank in rates) for i in range(_ROUNDS)] if rates else values[name]
        values[name] = rounds
        diagnosis.rates[name] = Summary.from_values(rounds)
    diagnosis.slowdowns = [alone / both for alone, both in zip(values[COMPUTE], values[TOGETHER], strict=True)]
    diagnosis.loader_shares = sampler.compute_shares()


def _drain(trial: Trial, stream: Iterator[MicroBatch]) -> None:
    """Take batches that the loader has read ahead while it was not measured; the first time, start it."""
    for _ in range(trial.context.config.data.prefetch + 2):
        for _ in trial.take_micro_batches(stream):
            pass


def _measure(trial: Trial, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of work, with the device's part of it, and its result."""
    trial.wait()
    begin = time.perf_counter()
    result = work()
    trial.wait()
    return time.perf_counter() - begin, result


def _time_step(trial: Trial, cached: list[MicroBatch]) -> float:
    return _measure(trial, lambda: trial.take_step(cached))[0]


def _agree(seconds: float) -> float:
    """Return rank 0's time on every rank."""
    agreed: float = distributed.broadcast_from_rank0(seconds)
    return agreed


# The step


class _TimedModel:
    """A module without DDP, whose forward passes are timed."""

    def __init__(self, trial: Trial) -> None:
        self._trial, self.seconds = trial, 0.0

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        losses: dict[str, Tensor]
        seconds, losses = _measure(self._trial, lambda: self._trial.state.module(batch))
        self.seconds += seconds
        return losses


def _split_step(trial: Trial, cached: list[MicroBatch], diagnosis: Diagnosis) -> None:
    """Time the parts of a step without all-reduce, and what all-reduce adds."""
    state, model, optimizer_begins = trial.state, trial.state.model, [0.0]

    def note_begin(*_: object) -> None:
        trial.wait()
        optimizer_begins.append(time.perf_counter())

    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "all-reduce": []}
    hook = state.optimizer.register_step_pre_hook(note_begin)
    for _ in range(_ROUNDS):
        timed = state.model = _TimedModel(trial)
        alone_s = _time_step(trial, cached)
        optimizer_s = time.perf_counter() - optimizer_begins[-1]
        state.model = model
        parts["forward"].append(timed.seconds)
        parts["optimizer"].append(optimizer_s)
        parts["backward"].append(alone_s - timed.seconds - optimizer_s)
        if diagnosis.ranks > 1:
            parts["all-reduce"].append(max(0.0, _time_step(trial, cached) - alone_s))
    hook.remove()
    diagnosis.step_ms = {name: 1e3 * median(seconds) for name, seconds in parts.items() if seconds}


def _find_slow_rank(trial: Trial, cached: list[MicroBatch], diagnosis: Diagnosis) -> None:
    """Compare the ranks' times of a step without all-reduce."""
    if diagnosis.ranks == 1:
        return
    whole, trial.state.model = trial.state.model, trial.state.module
    steps = max(1, math.ceil(_COMPARED_S / _agree(_time_step(trial, cached))))
    own_s = []
    for _ in range(_TURNS):
        distributed.barrier()
        own_s.append(sum(_time_step(trial, cached) for _ in range(steps)) / steps)
    trial.state.model = whole
    distributed.barrier()
    gathered = distributed.gather_to_rank0((own_s, os.uname().nodename))
    if gathered is not None:
        judge_ranks(diagnosis, [seconds for seconds, _ in gathered], [host for _, host in gathered])


def judge_ranks(diagnosis: Diagnosis, seconds: list[list[float]], hosts: list[str]) -> None:
    """Find a rank that is slower than the others in three of four turns: others' work hits now this, now that.

    Args:
        seconds: of a step, by rank and turn.
    """
    medians = [median(turns) for turns in seconds]
    slowest = int(np.argmax(medians))
    others = median(medians[:slowest] + medians[slowest + 1 :])
    diagnosis.facts["ranks"] = (
        f"a step without all-reduce takes {min(medians) * 1e3:.0f} to {max(medians) * 1e3:.0f} ms"
    )
    by_turns = np.array(seconds)
    ratios = by_turns[slowest] / np.median(np.delete(by_turns, slowest, axis=0), axis=0)
    gain = float(np.median(ratios))
    if gain >= WORTH and np.quantile(ratios, 0.25) >= WORTH:
        diagnosis.faults.append(
            Fault(
                "slow rank",
                f"rank {slowest} on {hosts[slowest]} takes {medians[slowest] * 1e3:.0f} ms a step, the others "
                f"{others * 1e3:.0f} ms, and all wait for it",
                "look at its clocks, its temperature and other processes there; leave out its node (--exclude)",
                gain=gain,
            )
        )


class _SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that make the host wait for a GPU, by the line of the job's code that calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _SYNCS or (name == "_to_copy" and _waits_for_copy(args[0], **(kwargs or {}))):
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
            self.lines[f"{frames[-1].filename}:{frames[-1].lineno}"] += 1
        return func(*args, **kwargs or {})


def _waits_for_copy(tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **_: Any) -> bool:
    """Return whether a copy is one from a GPU that the host waits for, as of tensor.cpu() and tensor.tolist()."""
    return tensor.is_cuda and device is not None and torch.device(device).type == "cpu" and not non_blocking


def _find_host_syncs(trial: Trial, cached: list[MicroBatch], diagnosis: Diagnosis) -> None:
    counter = _SyncCounter()
    with counter, allow_nondeterministic_operators():
        for micro_batch in cached[:1]:
            with trial.autocast():
                trial.state.module(micro_batch.batch)["loss"].backward()
    trial.state.optimizer.zero_grad(set_to_none=True)
    total = sum(counter.lines.values())
    diagnosis.facts["host waits"] = f"{total} in a micro-batch"
    if total >= _FEW_SYNCS:
        on_gpu = trial.context.device.type == "cuda"
        share = _measure_busy_share(trial, cached) if on_gpu else 1.0
        cost = f"the GPU is idle {1 - share:.0%} of a step" if on_gpu else "free on this CPU; a GPU would be idle then"
        diagnosis.faults.append(
            Fault(
                "host waits in the step",
                f"{total} times in each micro-batch a value is read from the device, most often in "
                f"{counter.lines.most_common(1)[0][0]}: {cost}",
                "compute with tensors there, or read the value once per line of the log",
                gain=1 / max(share, 0.01),
            )
        )


def _measure_busy_share(trial: Trial, cached: list[MicroBatch]) -> float:
    """Return the share of a step's time in which a GPU computes: its kernels' time by the profiler, steps without."""
    step_s = median(_time_step(trial, cached) for _ in range(_ROUNDS))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        _time_step(trial, cached)
    busy_us = sum(float(event.self_device_time_total) for event in profiled.key_averages())
    return min(1.0, busy_us / 1e6 / step_s)


def _measure_threads(trial: Trial, diagnosis: Diagnosis) -> None:
    """Compare steps with the run's threads of torch and of the loader, and with as many as there are cores."""
    context = trial.context
    here, cores, on_cpu = context.world.local_world_size, count_cores(), context.device.type == "cpu"
    used = (torch.get_num_threads() if on_cpu else 1, context.threads)
    diagnosis.facts["threads"] = f"{used[0]} of torch and {used[1]} of the loader on {cores} cores"
    most = max(1, cores // here)
    fair = (min(used[0], most), min(used[1], most))
    if used == fair:
        return
    loaders = {used: trial.loader, fair: make_loader(replace(context, threads=fair[1]))}
    times: dict[tuple[int, int], list[float]] = {used: [], fair: []}
    for _ in range(_ROUNDS):
        for count, loader in loaders.items():
            if on_cpu:
                torch.set_num_threads(count[0])
            with closing(trial.open_stream(loader)) as stream:
                trial.take_step(trial.take_micro_batches(stream))
                times[count].append(_measure(trial, partial(_take_steps, trial, stream))[0] / _STEPS_OF_A_ROUND)
    if on_cpu:
        torch.set_num_threads(used[0])
    by_torch, variable = used[0] > most, "OMP_NUM_THREADS"
    advice = f"unset {variable}" if variable in os.environ else f"set {variable}={most}"
    diagnosis.faults.append(
        Fault(
            "oversubscribed threads",
            f"{here * used[0]} threads of torch and {here * used[1]} of the loader share {cores} cores; with "
            f"{here * fair[0]} and {here * fair[1]} a step takes {1e3 * median(times[fair]):.0f} ms instead of "
            f"{1e3 * median(times[used]):.0f}",
            advice if by_torch else f"data.threads={most}, or leave it out",
            gain=median(times[used]) / median(times[fair]),
        )
    )


def _take_steps(trial: Trial, stream: Iterator[MicroBatch]) -> None:
    for _ in range(_STEPS_OF_A_ROUND):
        trial.take_step(trial.take_micro_batches(stream))


# Around the step


def _measure_around(trial: Trial, diagnosis: Diagnosis) -> None:
    """Measure a save and an evaluation, and compute their time per step at the run's intervals."""
    context, config = trial.context, trial.context.config
    steps = len(context.orders(0))
    step_ms = 1e3 * trial.samples_per_step / diagnosis.rates[TOGETHER].median
    if distributed.is_rank0():
        content = encode_state(trial.state, fingerprint="", metrics_position=0, artifacts={})
        begin = time.perf_counter()
        checkpoint.save(context.run / "measured", content, step=0, meta={})
        diagnosis.facts["save"] = f"{time.perf_counter() - begin:.2f} s, while training goes on"
    ids = context.splits.get(VALIDATION, np.empty(0, dtype=np.int64))
    every = Duration.parse(config.eval_every)
    if len(ids):
        batch = min(context.eval_batch_size, len(ids))
        part = ids[: _MOST_EVALUATED * batch * diagnosis.ranks]
        times = [_evaluate(trial, part, batch_size=batch)]  # the first also builds what later ones use
        while len(times) < 4 and sum(times) < 1:
            times.append(_evaluate(trial, part, batch_size=batch))
        seconds = median(times[1:] or times) * len(ids) / len(part)
        between = every.to_steps(steps) if every.unit != "min" else every.to_minutes() * 6e4 / step_ms
        minutes = compute_total_minutes(config)
        total = minutes * 6e4 / step_ms if minutes else compute_total_steps(config, steps) or 0
        in_run_s = seconds * total / max(1, between)
        diagnosis.around_ms["evaluation"] = 1e3 * seconds / max(1, between)
        share = diagnosis.around_ms["evaluation"] / (diagnosis.around_ms["evaluation"] + step_ms)
        diagnosis.facts["evaluation"] = (
            f"{1e3 * seconds:,.0f} ms for {len(ids):,} samples, every {config.eval_every}: {share:.0%} of the time, "
            f"{format_duration(in_run_s)} in the whole run"
        )
        if share >= 1 - 1 / WORTH and in_run_s >= _LEAST_EVALUATION_S:
            diagnosis.faults.append(
                Fault(
                    "long validation",
                    f"an evaluation of {len(ids):,} samples takes {seconds:,.1f} s, every {config.eval_every}: "
                    f"{share:.0%} of the time, and {format_duration(in_run_s)} of the whole run",
                    f"eval_every={2 * every.value:g}{every.unit}, or a larger eval_batch_size",
                    gain=1 / (1 - share),
                )
            )


def _evaluate(trial: Trial, ids: np.ndarray, *, batch_size: int) -> float:
    """Return the slowest rank's seconds of predicting some samples, without scoring."""

    def predict() -> None:
        predict_share(trial.state.module, trial.loader, ids, [], batch_size=batch_size, autocast=trial.autocast)

    seconds, _ = _measure(trial, predict)
    trial.state.module.train()
    slowest: float = distributed.broadcast_from_rank0(max(distributed.gather_to_rank0(seconds) or [seconds]))
    return slowest


def _measure_disk(trial: Trial, diagnosis: Diagnosis) -> None:
    """Read some of the shards past the page cache, and compare with what training needs."""
    if not distributed.is_rank0():
        return
    data = trial.context.data
    per_sample = sum(int(records.size.sum()) for records in data.records.values()) / max(1, data.count)
    read, seconds = read_past_cache(data)
    rate = read / max(seconds, 1e-9)
    kind = find_file_system(data.folder)
    needed = diagnosis.rates[COMPUTE].median * per_sample
    if read < _LEAST_DISK_BYTES and seconds < _LEAST_DISK_S:
        diagnosis.facts["disk"] = f"{kind}, not measured: too little data, {format_size(read)}"
        return
    diagnosis.facts["disk"] = (
        f"{kind}, {rate / 2**20:,.0f} MiB/s past the page cache ({format_size(read)} read); steps alone would take "
        f"{needed / 2**20:,.1f} MiB/s"
    )
    if rate < needed:
        limit, compute = rate / per_sample, diagnosis.rates[COMPUTE].median
        from_disk, where = _count_epochs_from_disk(trial)
        diagnosis.faults.append(
            Fault(
                "slow disk",
                f"{data.folder} ({kind}) gives {limit:,.0f} samples/s where they are not in memory, {where}, and the "
                f"steps take {compute:,.0f}",
                "data.stage=always with a scratch disk in the cluster file, or packing.store with smaller records",
                gain=1 + from_disk * (compute / limit - 1),
            )
        )


def _count_epochs_from_disk(trial: Trial) -> tuple[float, str]:
    """Return the share of a run's epochs that read from the disk, and which: the first, of what fits in memory."""
    context, config = trial.context, trial.context.config
    size = sum(shard.size_bytes for shard in context.data.shards)
    if size > read_available_memory().bytes:
        return 1.0, "as in every epoch"
    epochs = (compute_total_steps(config, len(context.orders(0))) or 0) / len(context.orders(0))
    return 1 / max(1.0, epochs), f"as in the first of {epochs:,.0f} epochs" if epochs > 1 else "as in its one epoch"


def read_past_cache(data: ShardSet, *, most: int = _DISK_BYTES) -> tuple[int, float]:
    """Read pieces of the shards from their disk; return the bytes and the seconds."""
    read, seconds = 0, 0.0
    with mmap.mmap(-1, 1 << 18) as buffer:  # begins on a page, as direct reads need it
        for shard in data.shards:
            file, offset = _open_past_cache(shard.path), 0
            begin = time.perf_counter()
            while read < most and seconds < 2 and (count := os.preadv(file, [buffer], offset)):
                offset, read = offset + count, read + count
                seconds += time.perf_counter() - begin
                begin = time.perf_counter()
            os.close(file)
    return read, seconds


def _open_past_cache(path: Path) -> int:
    """Open a file for reads that pass the page cache by; where the file system has none, forget what can be."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(
            file, 0, 0, os.POSIX_FADV_DONTNEED
        )  # keeps pages that a process has mapped, as the loader does
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead
        return file


def _look_at_machine(trial: Trial, cached: list[MicroBatch], diagnosis: Diagnosis) -> None:
    """Look at cores, GPUs, shared memory and what else runs here."""
    if not distributed.is_rank0():
        distributed.barrier()  # idle, while rank 0 asks for all cores
        return
    judge_cores(trial.context.device.type, diagnosis)
    whole, trial.state.model = trial.state.model, trial.state.module  # the other ranks take no steps
    facts, held_back = read_gpu_facts(trial.context.device, lambda: trial.take_step(cached))
    trial.state.model = whole
    diagnosis.facts |= facts
    if held_back:
        text = f"{facts['gpu clocks']}: its cooling or its power supply does not let it run as fast as it can"
        diagnosis.faults.append(Fault("slow clocks", text, "nvidia-smi -q -d PERFORMANCE, and another node"))
    shm = os.statvfs("/dev/shm")
    size = shm.f_blocks * shm.f_frsize
    diagnosis.facts["shared memory"] = format_size(size)
    if size <= _SMALL_SHM:
        diagnosis.faults.append(
            Fault(
                "small shared memory",
                f"/dev/shm has {format_size(size)}: the ranks of a node exchange gradients there (NCCL), and so do "
                "worker processes of other loaders",
                "--shm-size=1g or --ipc=host in Docker",
            )
        )
    distributed.barrier()


def judge_cores(device: str, diagnosis: Diagnosis) -> None:
    """Find whether this process may use too few cores, or does not get those that it may use.

    A GPU's job gains unknown time from cores: only its loader needs them.
    """
    cores, machine, quota = count_cores(), os.cpu_count() or 1, read_cpu_quota()
    usable = min(cores, quota or cores)
    diagnosis.facts["cores"] = f"{usable:g} of {machine}"
    if usable < machine and cores < 2 * diagnosis.ranks:
        diagnosis.faults.append(
            Fault(
                "few cores",
                f"this process may use {usable:g} of the machine's {machine} cores: by its affinity or its quota; "
                "counted is the gain of twice as many",
                "ask for more: --cpus N in Slurm, --cpus in Docker, no taskset",
                gain=min(2.0, machine / usable) if device == "cpu" else 1.0,
            )
        )
    share = measure_cpu_shares(cores)
    own = min(1.0, share.own * cores / usable)
    taken = f"others take {share.others:.0%} of the machine's, a hypervisor {share.stolen:.0%}"
    diagnosis.facts["cpu time"] = f"{own:.0%} of its cores' time is this process's when it asks for it; {taken}"
    if own < 1 / WORTH:
        diagnosis.faults.append(
            Fault(
                "busy machine",
                f"of {usable:g} cores this process gets {own:.0%} of the time; {taken}",
                "top, and another node or fewer jobs on this one",
                gain=1 / own if device == "cpu" else 1.0,
            )
        )


@dataclass(frozen=True)
class CpuShares:
    """Shares of the cores' time while this process asks for all of it."""

    own: float  # of the cores that it may use
    others: float  # of all cores of the machine, by /proc/stat: other processes
    stolen: float  # of all cores of the machine, by /proc/stat: other virtual machines


def measure_cpu_shares(cores: int, *, seconds: float = _SPIN_S) -> CpuShares:
    """Keep some cores busy with threads that never wait for each other: each hashes, which needs no lock of Python."""
    block, spent = bytes(1 << 22), [0.0] * cores

    def spin(i: int) -> None:
        begin = time.thread_time()
        while time.perf_counter() < end:
            hashlib.sha256(block)
        spent[i] = time.thread_time() - begin

    before, begin = _read_cpu_ticks(), time.perf_counter()
    end = begin + seconds
    threads = [threading.Thread(target=spin, args=(i,)) for i in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - begin
    busy, stolen, total = (now - was for now, was in zip(_read_cpu_ticks(), before, strict=True))
    own_ticks = sum(spent) * os.sysconf("SC_CLK_TCK")
    others = max(0.0, busy - own_ticks) / max(1, total)
    return CpuShares(min(1.0, sum(spent) / (elapsed_s * cores)), others, stolen / max(1, total))


def _read_cpu_ticks() -> tuple[int, int, int]:
    """Return the ticks of all cores since boot: busy, stolen by the hypervisor, all of them (proc_stat(5))."""
    with Path("/proc/stat").open() as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq
    return busy, steal, busy + steal + idle + iowait


# The verdict


def judge_input(diagnosis: Diagnosis) -> None:
    """Find whether the loader limits the rate, and which of its stages."""
    compute, loader, together = (diagnosis.rates[name].median for name in (COMPUTE, LOADER, TOGETHER))
    steady = float(np.quantile(diagnosis.slowdowns or [compute / together], 0.25))  # others' work hits single turns
    gain = median(diagnosis.slowdowns or [compute / together])
    if gain < WORTH or steady <= 1 or loader > 2 * compute:
        return
    busy = {stage: share for stage, share in diagnosis.loader_shares.items() if stage != "idle"}
    stage = max(busy, key=lambda name: busy[name], default="read")
    advice = {
        "read": "data.stage=always, or data on a local disk",
        "decode": "packing.store=input_raw or input_png where the job allows it; data.threads; more cores",
        "augment": "fewer or cheaper augmentations",
        "copy": "a smaller micro_batch_size",
        "prepare": "data.threads; a larger micro_batch_size",
    }[stage]
    diagnosis.faults.append(
        Fault(
            f"input: {stage}",
            f"the loader gives {loader:,.0f} samples/s and the steps take {compute:,.0f}; together {together:,.0f}. "
            f"Of the loader's time {busy.get(stage, 0.0) / max(sum(busy.values()), 1e-9):.0%} is {stage}",
            advice,
            gain=gain,
        )
    )


def format_diagnosis(name: str, diagnosis: Diagnosis) -> list[str]:
    """Return the screen: rates, stages, facts, faults, and the verdict."""
    lines = [f"{title:<16}{rate.format()} samples/s" for title, rate in diagnosis.rates.items()]
    whole = sum(diagnosis.step_ms.values())
    parts = {
        "a step": [f"{stage} {ms:.1f} ms ({ms / whole:.0%})" for stage, ms in diagnosis.step_ms.items()],
        "the loader": [f"{stage} {share:.0%}" for stage, share in diagnosis.loader_shares.items()],
        "around a step": [f"{stage} {ms:.1f} ms" for stage, ms in diagnosis.around_ms.items()],
    }
    lines += [f"{title:<16}{', '.join(texts)}" for title, texts in parts.items() if texts]
    lines += [f"{title:<16}{text}" for title, text in diagnosis.facts.items()]
    for fault in sorted(diagnosis.faults, key=lambda fault: -fault.gain):
        gain = f" Without it at most x{fault.gain:.2f}." if fault.gain > 1 else ""
        lines.append(f"found: {fault.name}: {fault.found}.{gain} Try: {fault.advice}.")
    verdict = diagnosis.verdict
    if verdict is not None:
        lines.append(f"verdict: {name}: {verdict.name}; fixing it gives at most x{verdict.gain:.2f}")
    else:
        loads = diagnosis.rates[LOADER].median / diagnosis.rates[COMPUTE].median
        feeds = f"the loader could feed {loads:.1f} times as much"
        lines.append(f"verdict: {name}: healthy: limited by the step itself; {feeds}")
    return lines


def encode_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON values."""
    return {**asdict(diagnosis), "verdict": None if diagnosis.verdict is None else diagnosis.verdict.name}


def decode_diagnosis(content: Mapping[str, Any]) -> Diagnosis:
    """Return what `encode_diagnosis` encoded."""
    rates = {name: Summary(**rate) for name, rate in content["rates"].items()}
    faults = [Fault(**fault) for fault in content["faults"]]
    rest = {name: content[name] for name in ("ranks", "slowdowns", "step_ms", "loader_shares", "around_ms", "facts")}
    return Diagnosis(rates=rates, faults=faults, **rest)


def trace_steps(trial: Trial, path: Path, *, steps: int = 3) -> list[str]:
    """Write a trace of some steps that Perfetto and chrome://tracing open; return the five most expensive operators."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trial.context.device.type == "cuda" else [])]
    with closing(trial.open_stream()) as stream:
        trial.take_step(trial.take_micro_batches(stream))
        with profile(activities=activities) as profiled:
            for _ in range(steps):
                trial.take_step(trial.take_micro_batches(stream))
            trial.wait()
    profiled.export_chrome_trace(str(path))
    by_device = trial.context.device.type == "cuda"
    costs_us = {
        event.key: float(event.self_device_time_total if by_device else event.self_cpu_time_total)
        for event in profiled.key_averages()
    }
    whole, most = sum(costs_us.values()) or 1.0, sorted(costs_us, key=lambda key: -costs_us[key])[:5]
    return [f"{key}: {costs_us[key] / 1e3 / steps:.1f} ms a step ({costs_us[key] / whole:.0%})" for key in most]
