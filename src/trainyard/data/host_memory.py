"""Refuses batches for whose buffers the host has no memory, before any is allocated: the kernel would kill the rank."""

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

from trainyard.data.loader import Loader
from trainyard.errors import UserError
from trainyard.hardware import list_cgroups
from trainyard.text import format_size


class AvailableMemory(NamedTuple):
    """Memory of this host that its ranks can still get."""

    bytes: int
    source: str


def refuse_oversized_batches(
    loader: Loader,
    *,
    run: Path,
    job: str,
    micro_batch_size: int,
    eval_batch_size: int,
    global_batch_size: int,
    train_samples: int,
    local_world_size: int,
    available: AvailableMemory,
    step_bytes: int = 0,
) -> None:
    """Compare what the loader allocates for a batch with the memory that the ranks of this node can still get.

    Memory of the model is not counted: this is a lower bound of what training needs.

    Args:
        step_bytes: what else a step of a rank takes on the host, with micro-batches of `micro_batch_size`.

    Raises:
        UserError: it is too much; says which size would fit, and that a batch has more samples than there are.
    """
    sizes = {"micro_batch_size": micro_batch_size, "eval_batch_size": eval_batch_size}
    for name, size in sizes.items():
        in_step = step_bytes if name == "micro_batch_size" else 0
        needed = (loader.count_host_bytes(size) + in_step) * local_world_size
        if needed <= available.bytes:
            continue
        what = "the loader's buffers and the activations of a step" if in_step else "the loader's buffers"
        fitting = max(1, math.floor(size * available.bytes / needed / 2))  # leaves as much for everything else
        fitting = 2 ** int(math.log2(fitting))
        advice, few = f"Resume with a smaller one: trainyard resume {run} {name}={fitting}", ""
        if name == "micro_batch_size" and global_batch_size > train_samples:
            few = f" The training set has {train_samples:,} samples, fewer than global_batch_size={global_batch_size}."
        if name == "micro_batch_size":  # a run keeps it
            start = f"trainyard run {job}"
            advice = f"Start again with a smaller one: {start} {name}={fitting}"
            if few:
                advice += f", or {start} global_batch_size={train_samples}"
        raise UserError(
            f"{name}={size}: {what} of {local_world_size} ranks on this host would take "
            f"{format_size(needed)}, and {format_size(available.bytes)} are available ({available.source}).{few} "
            f"{advice}"
        )


def read_available_memory(
    *,
    meminfo: Path = Path("/proc/meminfo"),
    hierarchy: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> AvailableMemory:
    """Return the tightest of the machine's available memory and what the limits of its cgroups (v2, v1) leave.

    What the page cache takes counts as available: the kernel gives it back.
    """
    free_kib = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    found = [AvailableMemory(int(free_kib[1]) * 1024, "MemAvailable of this machine")] if free_kib else []
    kinds = (
        (hierarchy, r"0:", "memory.max", "memory.current", "file"),
        (hierarchy / "memory", r"\d+:memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
    )
    for root, controller, limit, usage, cache in kinds:
        for group in list_cgroups(root, membership, controller):
            texts = [(group / name).read_text() for name in (limit, usage, "memory.stat") if (group / name).is_file()]
            if len(texts) == 3 and texts[0].strip() != "max":
                cached = re.search(rf"^{cache} (\d+)$", texts[2], re.MULTILINE)
                left = int(texts[0]) - int(texts[1]) + (int(cached[1]) if cached else 0)
                found.append(AvailableMemory(max(0, left), f"the memory limit of cgroup {group}"))
    return min(found, default=AvailableMemory(sys.maxsize, "no limit known"))
