"""Measures all-reduce between the ranks of a Slurm job, over the network that training would use.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there). With S bytes on each of n ranks and t seconds for
one all-reduce, the algorithm bandwidth is S/t, and the bus bandwidth is S/t * 2(n-1)/n: what each rank has to send and
to receive at least, which can be compared with the speed of a link, whatever the number of ranks.

The submitting side imports this file to pickle the task, so torch is imported inside the functions.
"""

import ctypes
import math
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.environment import collect_environment
from trainyard.errors import UserError
from trainyard.hardware import set_openmp_wait_policy, show_own_mig_slice
from trainyard.measure import Summary, write_new
from trainyard.runs.state import choose_exit_code
from trainyard.text import align_columns
from trainyard.train.stop import STOP_SIGNALS
from trainyard.train.world import World, read_world

if TYPE_CHECKING:
    from torch import Tensor

SUITE = "bandwidth"

_ROUND_S = 0.1  # of repeated all-reduces of one size
_MOST_REPEATS = 50
_ADAPTERS = Path("/sys/class/infiniband")  # of InfiniBand and RoCE

Choices = dict[str, tuple[str, str]]
"""What was chosen, each with its reason."""


@dataclass(frozen=True)
class BandwidthTask:
    """What each rank of the job does; rank 0 prints a table and writes the result file."""

    folder: Path  # shared by all nodes: the ranks meet here
    results: Path  # folder of result files
    hw: str  # GPU type of the cluster
    sizes_mib: tuple[int, ...]
    rounds: int
    header: dict[str, Any]  # of the result file: what the submitting side knows, such as the commit

    def __call__(self) -> None:
        """Measure, and exit with the code of the error if there is one."""
        _end_on_signals()
        set_openmp_wait_policy(os.environ)
        try:
            self._measure()
        except UserError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(choose_exit_code(error))

    def _measure(self) -> None:
        from trainyard.train import distributed

        world = read_world(os.environ)
        show_own_mig_slice(os.environ, world.local_rank)
        log = self.folder / f"nccl-rank{world.rank}.log"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        network = distributed.join(world, self.folder, os.environ)
        try:
            device = distributed.select_device(world, os.environ)
            seconds = time_all_reduces([size << 20 for size in self.sizes_mib], self.rounds, device=str(device))
            backend = distributed.choose_collectives(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            ranks = distributed.gather_to_rank0(_describe_rank(world, str(device)))
        finally:
            distributed.leave()
        if ranks is None:
            return
        choices: Choices = {"backend": backend, **network}
        if "nccl" in backend[0]:
            text = log.read_text(errors="replace") if log.exists() else ""
            choices["nccl_network"] = explain_nccl_network(
                text, _list_adapters(), has_verbs=_can_load("libibverbs.so.1")
            )
        lines = [summarize(size, times, len(ranks)) for size, times in seconds.items()]
        print(format_table(lines, choices, ranks))
        head = {**self._complete_header(), "ranks": ranks, "choices": _record(choices)}
        print(f"written to {write_new(self.results, f'{SUITE}-{self.hw}', [head, *lines])}")

    def _complete_header(self) -> dict[str, Any]:
        """Return the header with this node's machine and versions, and the commit of the checkout it was typed in."""
        environment = {**collect_environment(os.environ), "code": self.header["environment"]["code"]}
        return {**self.header, "date": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in MiB, such as "1,16,256".

    Raises:
        UserError: one is no whole number from 1 to 65536.
    """
    if not re.fullmatch(r"0*[1-9]\d{0,4}(,0*[1-9]\d{0,4})*", text, re.ASCII) or max(map(int, text.split(","))) > 65536:
        raise UserError(f"--sizes {text}: expected whole numbers of MiB from 1 to 65536, such as --sizes 1,16,256")
    return tuple(sorted({int(size) for size in text.split(",")}))


def time_all_reduces(sizes: Sequence[int], rounds: int, *, device: str) -> dict[int, list[float]]:
    """Return, for each size in bytes, the seconds of one all-reduce in each round. Every rank takes part.

    A round repeats each size until 0.1 s have passed, in a new random order of sizes, and counts the slowest rank's
    time. Only rank 0's answer is of use: other ranks do not know the slowest.

    Raises:
        RuntimeError: the sum of ones is not the number of ranks.
    """
    import torch

    from trainyard.train.distributed import broadcast_from_rank0

    buffer = torch.empty(max(sizes) // 4, dtype=torch.float32, device=device)
    parts = {size: buffer[: size // 4] for size in sizes}
    repeats = {}
    for size, values in parts.items():
        _check_sum(values)  # the first all-reduce of a size also opens connections
        once = _time(values.zero_(), 1)
        repeats[size] = broadcast_from_rank0(max(1, min(_MOST_REPEATS, math.ceil(_ROUND_S / once))))
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in random.Random(number).sample(list(sizes), len(sizes)):
            seconds[size].append(_time(parts[size], repeats[size]))
    return seconds


def _check_sum(values: "Tensor") -> None:
    import torch.distributed as dist

    from trainyard.train.distributed import sum_over_ranks

    sum_over_ranks(values.fill_(1))
    low, high = (float(end) for end in values.aminmax())
    if (low, high) != (dist.get_world_size(), dist.get_world_size()):
        raise RuntimeError(
            f"all-reduce of {values.numel()} ones over {dist.get_world_size()} ranks gave {low:g} to {high:g}"
        )


def _time(values: "Tensor", repeats: int) -> float:
    """Return the seconds of one of several all-reduces; on rank 0 those of the slowest rank."""
    import torch

    from trainyard.train.distributed import barrier, gather_to_rank0, sum_over_ranks

    barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        sum_over_ranks(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    own = (time.perf_counter() - begin) / repeats
    slowest: float = max(gather_to_rank0(own) or [own])
    return slowest


# What was measured, for people and files


def compute_bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s (1e9 bytes) of an all-reduce of `size` bytes on each rank."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def summarize(size: int, seconds: Sequence[float], ranks: int) -> dict[str, Any]:
    """Return the line of the result file for one size."""
    algorithm, bus = zip(*(compute_bandwidths(size, one, ranks) for one in seconds), strict=True)
    return {
        "kind": "result",
        "name": f"all_reduce {size >> 20} MiB",
        "size_bytes": size,
        "ranks": ranks,
        "seconds": list(seconds),
        "ms": asdict(Summary.from_values([1000 * one for one in seconds])),
        "algorithm_gb_s": asdict(Summary.from_values(algorithm)),
        "bus_gb_s": asdict(Summary.from_values(bus)),
    }


def format_table(lines: Sequence[Mapping[str, Any]], choices: Choices, ranks: Sequence[Mapping[str, str]]) -> str:
    """Format the results, with where and over what they were measured."""
    hosts = [rank["host"] for rank in ranks]
    rows: list[tuple[str, ...]] = [("", "ms", "algorithm GB/s", "bus GB/s")]
    for line in lines:
        cells = (Summary(**line[name]).format(",.2f") for name in ("ms", "algorithm_gb_s", "bus_gb_s"))
        rows.append((str(line["name"]), *cells))
    where = ", ".join(f"{hosts.count(host)} x {host}" for host in dict.fromkeys(hosts))
    notes = [
        ("ranks", f"{len(ranks)}: {where}"),
        *((name, f"{value}  ({why})") for name, (value, why) in choices.items()),
    ]
    legend = "Median +- (largest - smallest) / median; ?: do not quote. bus = algorithm * 2(n-1)/n, as in nccl-tests."
    return "\n".join([*align_columns(notes), "", *align_columns(rows), legend])


def explain_nccl_network(log: str, adapters: Sequence[str], *, has_verbs: bool) -> tuple[str, str]:
    """Return over what NCCL sends between nodes, such as IB or Socket, and why.

    Args:
        log: what NCCL wrote with NCCL_DEBUG=INFO.
        adapters: InfiniBand and RoCE adapters of this node.
        has_verbs: whether libibverbs, which NCCL reaches them with, can be loaded.
    """
    used = re.findall(r"Using network (\S+)", log)
    if not used:
        return "unknown", "NCCL's log does not say"
    if used[-1] != "Socket":
        devices = re.search(r"NET/\S+ : Using (.*)", log)
        return used[-1], devices[1].strip() if devices else "chosen by NCCL"
    if not adapters:
        return "Socket", "this node has no InfiniBand or RoCE adapter: TCP"
    if not has_verbs:
        return "Socket", (
            f"TCP, although this node has {', '.join(adapters)}: libibverbs.so.1 does not load. Type: apt-get install "
            "libibverbs1 ibverbs-providers librdmacm1, or use the container images, which have them"
        )
    return "Socket", f"TCP, although this node has {', '.join(adapters)}: nccl-rank0.log says why"


def _record(choices: Choices) -> dict[str, dict[str, str]]:
    return {name: {"value": value, "reason": why} for name, (value, why) in choices.items()}


# This node


def _describe_rank(world: World, device: str) -> dict[str, str]:
    """Return where a rank ran, and on what."""
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    version = torch.cuda.nccl.version() if device.startswith("cuda") else None  # type: ignore[no-untyped-call]
    nccl = {"nccl": ".".join(map(str, version))} if version else {}
    return {"rank": str(world.rank), "host": socket.gethostname(), "device": name, **nccl}


def _list_adapters() -> list[str]:
    return sorted(path.name for path in _ADAPTERS.iterdir()) if _ADAPTERS.is_dir() else []


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _end_on_signals() -> None:
    """Let through what `start_rank` holds back: there is nothing to save. Slurm's warning before the limit is none."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR2 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
