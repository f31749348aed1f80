"""Reads limits of a GPU outside of the job: its clocks, and the distance of this process's cores and of other GPUs."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import torch

from trainyard.environment import read_gpu_states

_HELD_BACK = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of nvidia-smi's clocks_throttle_reasons.active (nvml.h, nvmlClocksThrottleReason*) that mean a fault; that of
the power cap (0x04) is usual at full load."""


def read_gpu_facts(device: torch.device, take_step: Callable[[], object]) -> tuple[dict[str, str], str]:
    """Return facts of a GPU under load by name, and what holds its clocks back, "" if nothing does.

    Args:
        take_step: loads the GPU while nvidia-smi answers.
    """
    if device.type != "cuda":
        return dict.fromkeys(("gpu clocks", "gpu node", "gpu peers"), "not measured: this job runs on the CPU"), ""
    card = torch.cuda.get_device_properties(device)
    domain, bus, slot = (int(getattr(card, f"pci_{part}_id", 0)) for part in ("domain", "bus", "device"))
    address = f"{domain:08x}:{bus:02x}:{slot:02x}.0"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(read_gpu_states)
        while not asked.done():
            take_step()
    facts = {"gpu node": describe_node(address), "gpu peers": _count_peers()}
    state = asked.result().get(address)
    if state is None:
        return {**facts, "gpu clocks": "not measured: nvidia-smi does not say"}, ""
    clocks = f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz, {state['power.draw']} of {state['power.limit']} W"
    mask = state["clocks_throttle_reasons.active"]
    reasons = int(mask, 16) if mask.startswith("0x") else 0
    held_back = ", ".join(name for bit, name in _HELD_BACK.items() if reasons & bit)
    return {**facts, "gpu clocks": f"{clocks}, held back by: {held_back or 'nothing'} ({mask})"}, held_back


def describe_node(address: str, sys: Path = Path("/sys")) -> str:
    """Return on which NUMA node a card is, and how many of this process's cores are there.

    Args:
        address: as nvidia-smi writes it, in lower case: 00000000:1b:00.0.
    """
    stated = sys / "bus" / "pci" / "devices" / address[4:] / "numa_node"
    node = stated.read_text().strip() if stated.is_file() else "-1"
    cores = sys / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    if node == "-1" or not cores.is_file():
        return "not measured: the kernel does not say"
    near = set()
    for part in cores.read_text().strip().split(","):
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1))
    own = os.sched_getaffinity(0)
    return f"{node}, with {len(own & near)} of this process's {len(own)} cores"


def _count_peers() -> str:
    pairs = list(permutations(range(torch.cuda.device_count()), 2))
    if not pairs:
        return "not measured: one GPU is visible"
    return f"{sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)} of {len(pairs)} pairs reach each other"
