"""Finds what limits a job's training on this machine, with the numbers that say so, and what fixing it gives at most.

Three rates answer most of it: steps on a batch that is on the device already, the loader alone, both together. They are
measured by turns, each in several rounds.
"""

import math
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.duration import Duration
from trainyard.data.loader import MicroBatch
from trainyard.data.shards import ShardSet, find_file_system
from trainyard.hardware import count_cores
from trainyard.measure import Summary
from trainyard.text import format_duration, format_size
from trainyard.tools.stage_sampler import StageSampler
from trainyard.tools.trial import Trial
from trainyard.train import checkpoint, distributed
from trainyard.train.evaluate import predict_share
from trainyard.train.precision import allow_nondeterministic_operators
from trainyard.train.run_context import VALIDATION
from trainyard.train.run_state import encode_state

T = TypeVar("T")

COMPUTE, LOADER, TOGETHER = "step alone", "loader alone", "both together"
WORTH = 1.1
"""What fixing a fault has to give, as a factor of the rate, to be the verdict. Rates vary by some per cent."""

_ROUNDS = 5
_DISK_BYTES = 32 << 20  # read at most, to measure a disk
_SPIN_S = 0.3
_SMALL_SHM = 64 << 20  # of a container started without --shm-size: Docker's default
_MOST_EVALUATED = 4  # batches of a set, from which the time of the whole is computed
_SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")
"""Operators of aten whose result's value or size the host needs: it waits for all that a GPU has yet to do."""


@dataclass(frozen=True)
class Fault:
    """What slows training down."""

    name: str
    found: str
    advice: str
    gain: float = 1.0  # how many times as fast training is at most without it; 1.0: not known


@dataclass
class Diagnosis:
    """What was measured, and what follows."""

    ranks: int
    rates: dict[str, Summary] = field(default_factory=dict)  # samples per second of all ranks
    step_ms: dict[str, float] = field(default_factory=dict)  # by stage of a step on the device
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
    found = Diagnosis(ranks=trial.context.world.world_size)
    cached = trial.read_step()
    trial.take_step(cached)  # creates the optimizer's state, and compiles
    trial.wait()
    _measure_rates(trial, cached, found, seconds=seconds)
    _split_step(trial, cached, found)
    _find_slow_rank(trial, cached, found)
    _find_host_syncs(trial, cached, found)
    _measure_threads(trial, cached, found)
    _measure_around(trial, found)
    _measure_disk(trial, found)
    _look_at_machine(trial, found)
    judge_input(found)
    return found


# Rates


def _measure_rates(trial: Trial, cached: list[MicroBatch], found: Diagnosis, *, seconds: float) -> None:
    size, ranks = trial.samples_per_step, trial.context.world.world_size
    per_turn_s = seconds / (3 * _ROUNDS)
    once_s = _agree(_time_step(trial, cached))
    steps = max(2, math.ceil(per_turn_s / max(once_s, 1e-6)))
    values: dict[str, list[float]] = {COMPUTE: [], LOADER: [], TOGETHER: []}
    order = random.Random(0)
    with closing(trial.open_stream()) as stream, StageSampler() as sampler:
        for _ in trial.take_micro_batches(stream):
            pass  # what was read ahead while the pipeline was built

        def compute() -> int:
            for _ in range(steps):
                trial.take_step(cached)
            return steps * size

        def load() -> int:
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < per_turn_s:
                count += sum(_count_samples(batch) for batch in trial.take_micro_batches(stream))
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
                    sampler.counts = before  # the loader's stages are those of its own turns
    rates = distributed.gather_to_rank0(values)
    for name in values:
        rounds = [min(rank[name][i] for rank in rates) for i in range(_ROUNDS)] if rates else values[name]
        found.rates[name] = Summary.from_values(rounds)
    found.loader_shares = sampler.compute_shares()


def _drain(trial: Trial, stream: Iterator[MicroBatch]) -> None:
    """Take what the loader has read ahead while it was not measured."""
    for _ in range(trial.context.config.data.prefetch + 2):
        for _ in trial.take_micro_batches(stream):
            pass


def _count_samples(batch: MicroBatch) -> int:
    return len(batch.batch["sample_id"])


def _measure(trial: Trial, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of work, with what the device does of it, and what it returns."""
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


def _split_step(trial: Trial, cached: list[MicroBatch], found: Diagnosis) -> None:
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
        if found.ranks > 1:
            parts["all-reduce"].append(max(0.0, _time_step(trial, cached) - alone_s))
    hook.remove()
    found.step_ms = {name: 1e3 * median(seconds) for name, seconds in parts.items() if seconds}


def _find_slow_rank(trial: Trial, cached: list[MicroBatch], found: Diagnosis) -> None:
    """Compare the ranks' times of a step without all-reduce."""
    if found.ranks == 1:
        return
    whole, trial.state.model = trial.state.model, trial.state.module
    distributed.barrier()
    own_s = median(_time_step(trial, cached) for _ in range(_ROUNDS))
    trial.state.model = whole
    distributed.barrier()
    times = distributed.gather_to_rank0((own_s, os.uname().nodename))
    if times is None:
        return
    seconds = [one[0] for one in times]
    slowest = int(np.argmax(seconds))
    others = median(seconds[:slowest] + seconds[slowest + 1 :])
    found.facts["ranks"] = f"a step without all-reduce takes {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"
    if seconds[slowest] >= WORTH * others:
        found.faults.append(
            Fault(
                "slow rank",
                f"rank {slowest} on {times[slowest][1]} takes {seconds[slowest] * 1e3:.0f} ms for what the others do "
                f"in {others * 1e3:.0f} ms, and all wait for it",
                "look at its clocks, its temperature and what else runs there; leave out its node (--exclude)",
                gain=seconds[slowest] / others,
            )
        )


class _SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that make the host wait for a GPU, by the line of the job's code that calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _SYNCS:
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
            self.lines[f"{frames[-1].filename}:{frames[-1].lineno}"] += 1
        return func(*args, **kwargs or {})


def _find_host_syncs(trial: Trial, cached: list[MicroBatch], found: Diagnosis) -> None:
    counter = _SyncCounter()
    with counter, allow_nondeterministic_operators():
        for micro_batch in cached[:1]:
            with trial.autocast():
                trial.state.module(micro_batch.batch)["loss"].backward()
    trial.state.optimizer.zero_grad(set_to_none=True)
    if counter.lines:
        total, line = sum(counter.lines.values()), counter.lines.most_common(1)[0][0]
        found.faults.append(
            Fault(
                "host waits in the step",
                f"{total} times in each micro-batch a value is read from the device, most often in {line}; a GPU is "
                "idle until the host has queued more work",
                "compute with tensors there, or read the value once per line of the log",
            )
        )


def _measure_threads(trial: Trial, cached: list[MicroBatch], found: Diagnosis) -> None:
    """Compare steps with as many threads as there are cores, and with as many as the run uses."""
    used, here = torch.get_num_threads(), trial.context.world.local_world_size
    cores = count_cores()
    found.facts["threads"] = f"{used} of torch and {trial.context.threads} of the loader on {cores} cores"
    fair = max(1, cores // here)
    if used <= fair or trial.context.device.type != "cpu":
        return
    times: dict[int, list[float]] = {used: [], fair: []}
    for _ in range(_ROUNDS):
        for count, seconds in times.items():
            torch.set_num_threads(count)
            seconds.append(_time_step(trial, cached))
    torch.set_num_threads(used)
    gain = median(times[used]) / median(times[fair])
    variable = "OMP_NUM_THREADS"
    found.faults.append(
        Fault(
            "oversubscribed threads",
            f"{here * used} threads of torch share {cores} cores; with {fair} a rank a step takes "
            f"{1e3 * median(times[fair]):.0f} ms instead of {1e3 * median(times[used]):.0f}",
            f"unset {variable}" if variable in os.environ else f"set {variable}={fair}",
            gain=gain,
        )
    )


# Around the step


def _measure_around(trial: Trial, found: Diagnosis) -> None:
    """Measure a save and an evaluation, and compute what they take per step at the run's intervals."""
    context, config = trial.context, trial.context.config
    steps = len(context.orders(0))
    step_ms = 1e3 * trial.samples_per_step / found.rates[TOGETHER].median
    if distributed.is_rank0():
        content = encode_state(trial.state, fingerprint="", metrics_position=0, artifacts={})
        begin = time.perf_counter()
        checkpoint.save(context.run / "measured", content, step=0, meta={})
        found.facts["save"] = f"{time.perf_counter() - begin:.2f} s, while training goes on"
    ids = context.splits.get(VALIDATION, np.empty(0, dtype=np.int64))
    every = Duration.parse(config.eval_every)
    if len(ids):
        batch = min(context.eval_batch_size, len(ids))
        part = ids[: _MOST_EVALUATED * batch * found.ranks]
        begin = time.perf_counter()
        predict_share(trial.state.module, trial.loader, part, [], batch_size=batch, autocast=trial.autocast)
        trial.wait()
        trial.state.module.train()
        seconds = (time.perf_counter() - begin) * len(ids) / len(part)
        between = every.to_steps(steps) if every.unit != "min" else every.to_minutes() * 6e4 / step_ms
        found.around_ms["evaluation"] = 1e3 * seconds / max(1, between)
        share = found.around_ms["evaluation"] / (found.around_ms["evaluation"] + step_ms)
        if share >= 1 - 1 / WORTH:
            found.faults.append(
                Fault(
                    "long validation",
                    f"an evaluation of {len(ids):,} samples takes {format_duration(seconds)}, every "
                    f"{config.eval_every}: {share:.0%} of the time",
                    f"eval_every={2 * every.value:g}{every.unit}, or a larger eval_batch_size",
                    gain=1 / (1 - share),
                )
            )


def _measure_disk(trial: Trial, found: Diagnosis) -> None:
    """Read some of the shards past the page cache, and compare with what training needs."""
    if not distributed.is_rank0():
        return
    data = trial.context.data
    per_sample = sum(int(records.size.sum()) for records in data.records.values()) / max(1, data.count)
    read, seconds = read_past_cache(data)
    rate = read / max(seconds, 1e-9)
    kind = find_file_system(data.folder)
    needed = found.rates[COMPUTE].median * per_sample
    found.facts["disk"] = (
        f"{kind}, {rate / 2**20:,.0f} MiB/s past the page cache ({format_size(read)} read); steps alone would take "
        f"{needed / 2**20:,.1f} MiB/s"
    )
    if rate < needed:
        limit = rate / per_sample
        found.faults.append(
            Fault(
                "slow disk",
                f"{data.folder} ({kind}) gives {limit:,.0f} samples/s where they are not in memory, and the steps "
                f"take {found.rates[COMPUTE].median:,.0f}",
                "data.stage=always with a scratch disk in the cluster file, or packing.store with smaller records",
                gain=found.rates[COMPUTE].median / limit,
            )
        )


def read_past_cache(data: ShardSet, *, most: int = _DISK_BYTES) -> tuple[int, float]:
    """Read pieces of the shards that the kernel has been told to forget; return the bytes and the seconds."""
    read, seconds = 0, 0.0
    for shard in data.shards:
        with shard.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_RANDOM)  # without reading ahead
            begin = time.perf_counter()
            while (part := file.read(1 << 18)) and read < most and seconds < 2:
                read += len(part)
                seconds += time.perf_counter() - begin
                begin = time.perf_counter()
    return read, seconds


def _look_at_machine(trial: Trial, found: Diagnosis) -> None:
    """Look at cores, shared memory and what else runs here."""
    if not distributed.is_rank0():
        distributed.barrier()  # idle, while rank 0 asks for all cores
        return
    cores, machine = count_cores(), os.cpu_count() or 1
    found.facts["cores"] = f"{cores} of {machine}"
    if cores < machine and cores < 2 * found.ranks:
        found.faults.append(
            Fault(
                "few cores",
                f"this process may use {cores} of the machine's {machine} cores: its affinity or its quota says so",
                "ask for more: --cpus N in Slurm, --cpus in Docker, no taskset",
                gain=machine / cores if trial.context.device.type == "cpu" else 1.0,
            )
        )
    share = measure_own_share(cores)
    found.facts["cpu time"] = f"{share:.0%} of the cores' time is this process's when it asks for it"
    if share < 1 / WORTH:
        found.faults.append(
            Fault(
                "busy machine",
                f"of {cores} cores this process gets {share:.0%} of the time: others compute here, too",
                "top, and another node or fewer jobs on this one",
                gain=1 / share,
            )
        )
    shm = os.statvfs("/dev/shm")
    size = shm.f_blocks * shm.f_frsize
    found.facts["shared memory"] = format_size(size)
    if size <= _SMALL_SHM:
        found.faults.append(
            Fault(
                "small shared memory",
                f"/dev/shm has {format_size(size)}: the ranks of a node exchange gradients there (NCCL), and so do "
                "worker processes of other loaders",
                "--shm-size=1g or --ipc=host in Docker",
            )
        )
    distributed.barrier()


def measure_own_share(cores: int, *, seconds: float = _SPIN_S) -> float:
    """Return which share of the cores' time this process gets when it asks for all of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    values = torch.ones(1 << 21)
    begin, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        values.sin_()
    elapsed_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    torch.set_num_threads(before)
    return min(1.0, cpu_s / (elapsed_s * cores))


# The verdict


def judge_input(found: Diagnosis) -> None:
    """Say whether the loader limits the rate, and which of its stages."""
    compute, loader, together = (found.rates[name].median for name in (COMPUTE, LOADER, TOGETHER))
    if compute < WORTH * together or loader > 2 * compute:
        return
    busy = {stage: share for stage, share in found.loader_shares.items() if stage != "idle"}
    stage = max(busy, key=lambda name: busy[name], default="read")
    advice = {
        "read": "data.stage=always, or data on a local disk",
        "decode": "packing.store=input_raw or input_png where the job allows it; data.threads; more cores",
        "augment": "fewer or cheaper augmentations",
        "copy": "a smaller micro_batch_size",
        "prepare": "data.threads; a larger micro_batch_size",
    }[stage]
    found.faults.append(
        Fault(
            f"input: {stage}",
            f"the loader gives {loader:,.0f} samples/s and the steps take {compute:,.0f}; together {together:,.0f}. "
            f"Of the loader's time {busy.get(stage, 0.0) / max(sum(busy.values()), 1e-9):.0%} is {stage}",
            advice,
            gain=compute / together,
        )
    )


def format_diagnosis(name: str, found: Diagnosis) -> list[str]:
    """Return the screen: rates, stages, facts, faults, and the verdict."""
    lines = [f"{title:<16}{rate.format()} samples/s" for title, rate in found.rates.items()]
    whole = sum(found.step_ms.values())
    parts = {
        "a step": [f"{stage} {ms:.1f} ms ({ms / whole:.0%})" for stage, ms in found.step_ms.items()],
        "the loader": [f"{stage} {share:.0%}" for stage, share in found.loader_shares.items()],
        "around a step": [f"{stage} {ms:.1f} ms" for stage, ms in found.around_ms.items()],
    }
    lines += [f"{title:<16}{', '.join(texts)}" for title, texts in parts.items() if texts]
    lines += [f"{title:<16}{text}" for title, text in found.facts.items()]
    for fault in sorted(found.faults, key=lambda fault: -fault.gain):
        gain = f" Without it at most x{fault.gain:.2f}." if fault.gain > 1 else ""
        lines.append(f"found: {fault.name}: {fault.found}.{gain} Try: {fault.advice}.")
    verdict = found.verdict
    if verdict is not None:
        lines.append(f"verdict: {name}: {verdict.name}; fixing it gives at most x{verdict.gain:.2f}")
    else:
        loads = found.rates[LOADER].median / found.rates[COMPUTE].median
        feeds = f"the loader could feed {loads:.1f} times as much"
        lines.append(f"verdict: {name}: healthy: limited by the step itself; {feeds}")
    return lines


def encode_diagnosis(found: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as JSON values."""
    return {**asdict(found), "verdict": None if found.verdict is None else found.verdict.name}


def decode_diagnosis(content: Mapping[str, Any]) -> Diagnosis:
    """Return what `encode_diagnosis` encoded."""
    rates = {name: Summary(**rate) for name, rate in content["rates"].items()}
    faults = [Fault(**fault) for fault in content["faults"]]
    rest = {name: content[name] for name in ("ranks", "step_ms", "loader_shares", "around_ms", "facts")}
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
