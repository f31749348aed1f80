"""Checks of the card itself: kernels, products, copies, peers; and how to time what a device does."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.gpu.check import Figures, Sizes
from trainyard.environment import describe_cpu
from trainyard.hardware import (
    explain_missing_gpu,
    explain_missing_kernels,
    find_gpu_by_name,
    read_driver_version,
)
from trainyard.measure import Summary
from trainyard.train.precision import DTYPES

LARGEST_ERROR = {"fp32": 1e-5, "tf32": 3e-3, "fp16": 5e-3, "bf16": 2e-2}
"""Largest error of a product, relative in the Frobenius norm: some times the rounding of one value of that type. Half
types may be summed in parts that are rounded to the same type."""

_CHECKED_SIZE = 512  # of the matrices whose product is compared with float64: small enough for the host
_ROUNDS = 3  # of each timing


def describe_device(environ: Mapping[str, str]) -> Figures:
    """Return what the card is, or, with "missing", why there is none. Starts CUDA in this process."""
    if not torch.cuda.is_available():
        why = explain_missing_gpu(read_driver_version(), environ) or "this machine has no NVIDIA driver."
        return {"device": "cpu", "missing": why, "card": describe_cpu(Path("/proc/cpuinfo").read_text()), "key": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    name, memory_gib = torch.cuda.get_device_name(0), properties.total_memory / 2**30
    known = find_gpu_by_name(name, memory_gib)
    return {
        "device": "cuda",
        "card": name,
        "key": known.key if known else "",
        "sm": read_capability(torch.device("cuda", 0)),
        "memory_gib": round(memory_gib, 2),
        "gpus": torch.cuda.device_count(),
    }


def read_capability(device: torch.device) -> int | None:
    """Return the compute capability, major * 10 + minor; None for the CPU."""
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_kernels(device: torch.device, sizes: Sizes) -> Figures:
    """Check that torch has kernels for this card; name the versions."""
    figures: Figures = {"torch": torch.__version__, **_read_versions()}
    sm = read_capability(device)
    if sm is None:
        return figures
    fault = explain_missing_kernels(sm, torch.cuda.get_arch_list())
    assert not fault, fault
    figures |= {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": read_driver_version(),
        "arch_list": " ".join(torch.cuda.get_arch_list()),
    }
    total = float(torch.ones(4, device=device).sum())
    assert total == 4, f"the sum of four ones on the card is {total}"
    return figures


def _read_versions() -> dict[str, str]:
    installed = {d.name.lower(): d.version for d in metadata.distributions()}
    wanted = ("triton", "torchvision")
    return {name: v for name, v in sorted(installed.items()) if name in wanted or name.startswith("nvidia-dali")}


def check_products(device: torch.device, sizes: Sizes) -> Figures:
    """Compare products of every data type with float64 on the host, and time large ones."""
    figures: Figures = {}
    sm = read_capability(device)
    for name in _list_types(sm):
        error = _compute_error(name, device)
        assert error <= LARGEST_ERROR[name], (
            f"a {name} product of {_CHECKED_SIZE} x {_CHECKED_SIZE} matrices differs by {error:.1e} from float64, "
            f"allowed is {LARGEST_ERROR[name]:.0e}"
        )
        peak = measure_product_rate(name, device, sizes)
        figures |= {f"{name}_error": float(f"{error:.2g}"), f"{name}_tflop_s": round(peak.median, 3)}
        figures[f"{name}_spread"] = round(peak.spread, 3)
    return figures


def _list_types(sm: int | None) -> list[str]:
    if sm is None:
        return ["fp32", "bf16"]
    return ["fp32", "fp16", *(["tf32", "bf16"] if sm >= 80 else [])]


def _compute_error(name: str, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES.get(name, torch.float32)
    size = (_CHECKED_SIZE, _CHECKED_SIZE)
    a, b = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    with _round_to_tf32_if(name == "tf32"):
        found = (a.to(device) @ b.to(device)).cpu().double()
    return float((found - exact).norm() / exact.norm())


def measure_product_rate(name: str, device: torch.device, sizes: Sizes) -> Summary:
    """Time products of large square matrices: TFLOP/s, a peak that programs reach, unlike the datasheet's.

    Args:
        name: fp32, tf32, fp16 or bf16.
    """
    dtype = DTYPES.get(name, torch.float32)
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> int:
        torch.mm(a, b, out=out)
        return 1

    with _round_to_tf32_if(name == "tf32"):
        multiply()
        rates = [measure_device_rate(multiply, device, seconds=sizes.seconds) for _ in range(_ROUNDS)]
    return Summary.from_values([rate * 2 * sizes.matrix**3 / 1e12 for rate in rates])


@contextmanager
def _round_to_tf32_if(allowed: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has done everything that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_device_rate(work: Callable[[], int], device: torch.device, *, seconds: float) -> float:
    """Repeat `work`, which returns how many samples it started, for `seconds` or more; return samples per second.

    The clock stops when the device has done all of it, and the host never waits in between.
    """
    wait_for_device(device)
    begin, done = time.perf_counter(), work()
    while time.perf_counter() - begin < seconds:
        done += work()
    wait_for_device(device)
    return done / (time.perf_counter() - begin)


def check_copies(device: torch.device, sizes: Sizes) -> Figures:
    """Copy between host and card, from pinned and from pageable memory; compare what arrives, and time it."""
    figures: Figures = {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        figures |= {"free_gib": round(free / 2**30, 2), "total_gib": round(total / 2**30, 2)}
    count = sizes.copy_bytes // 8
    sent, on_card = torch.arange(count), torch.empty(count, dtype=torch.int64, device=device)
    for kind in ("pinned", "pageable"):
        pinned = kind == "pinned" and device.type == "cuda"
        source = sent.pin_memory() if pinned else sent
        returned = torch.empty(count, dtype=torch.int64, pin_memory=pinned)

        def upload(source: torch.Tensor = source) -> int:
            on_card.copy_(source, non_blocking=True)
            return sizes.copy_bytes

        def download(returned: torch.Tensor = returned) -> int:
            returned.copy_(on_card, non_blocking=True)
            return sizes.copy_bytes

        for name, work in (("to_card", upload), ("to_host", download)):
            work()
            rates = [measure_device_rate(work, device, seconds=sizes.seconds / 4) for _ in range(_ROUNDS)]
            figures[f"{kind}_{name}_gb_s"] = round(Summary.from_values(rates).median / 1e9, 2)
        assert torch.equal(returned, sent), f"a copy to the card and back, from {kind} memory, arrives changed"
    return figures


def check_peers(device: torch.device, sizes: Sizes) -> Figures:
    """Copy between every pair of GPUs, compare, and name the pairs that reach each other without the host."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("one GPU is visible, and peers need two")
    changed = find_changed_copies([torch.device("cuda", number) for number in range(count)])
    assert not changed, f"copies between these GPUs arrive changed: {changed}. NCCL_P2P_DISABLE=1 avoids that path"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = [f"{a}-{b}" for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
    return {"gpus": count, "direct_pairs": " ".join(direct), "all_direct": len(direct) == len(pairs)}


def find_changed_copies(devices: Sequence[torch.device]) -> list[str]:
    """Copy from each device to each other one; return the pairs, by their places, between which values change."""
    changed = []
    for a, source in enumerate(devices):
        sent = torch.arange(1 << 20, device=source)
        for b, target in enumerate(devices):
            if a != b and not torch.equal(sent.to(target, copy=True).cpu(), sent.cpu()):
                changed.append(f"{a}-{b}")
    return changed
