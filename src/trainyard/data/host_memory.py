"""Reads the memory of this host that its ranks can still get, and counts their use of it."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from trainyard.hardware import list_cgroups


def count_pinned_bytes(size: int) -> int:
    """Return what torch's allocator of pinned memory takes for `size` bytes: the next power of two.

    So says the documentation of `torch.cuda.memory.host_memory_stats`.
    """
    return 1 << (size - 1).bit_length() if size else 0


class AvailableMemory(NamedTuple):
    """Memory of this host that its ranks can still get."""

    bytes: int
    source: str


def read_available_memory(
    *,
    meminfo: Path = Path("/proc/meminfo"),
    hierarchy: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> AvailableMemory:
    """Return the smallest of the machine's available memory and the memory left by the limits of its cgroups (v2, v1).

    The page cache counts as available: the kernel gives it back.
    """
    free_kib = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    limits = [AvailableMemory(int(free_kib[1]) * 1024, "MemAvailable of this machine")] if free_kib else []
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
                limits.append(AvailableMemory(max(0, left), f"the memory limit of cgroup {group}"))
    return min(limits, default=AvailableMemory(sys.maxsize, "no limit known"))
