"""Checks of the card itself: kernels, products, clocks, copies, peers; and how to time what a device does."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests.gpu.check import Figures, Sizes, cannot_answer
from trainyard.environment import describe_cpu
from trainyard.hardware import (
    explain_missing_gpu,
    explain_missing_kernels,
    find_gpu_by_name,
    read_driver_version,
)
from trainyard.measure import Summary
from trainyard.train.precision import DTYPES, read_capability

LARGEST_ERROR = {"fp32": 1e-5, "tf32": 3e-3, "fp16": 5e-3, "bf16": 2e-2}
"""Largest error of a product, relative in the Frobenius norm: some times the rounding of one value of that type. Half
types may be summed in parts that are rounded to the same type."""

TF32_OVER_FP32 = 20
"""Least error of a TF32 product over that of fp32. Inputs with 10 of 23 bits give 2.9e-4 (computed on a CPU), which is
29 times the largest error that fp32 may have here: below, TF32 was not on."""

HALF_OVER_FP32 = 1.5
"""Least rate of half types over fp32 where there are tensor cores: datasheets say 2 (RTX 3090, 4090) to 16 (A100)."""

LEAST_CLOCK = 0.5
"""Of the card's highest clock, under load. NVML calls a clock that is divided by two or more a hardware slowdown; power
limits take less than that."""

LEAST_COPY_GB_S = 8.0
"""From pinned memory. PCIe 3.0 carries 15.75 GB/s over 16 lanes, of which copies reach 12, and 7.9 over 8. Every card
of `trainyard.hardware` has 16 lanes of PCIe 3.0 or newer, so less shows missing lanes, or an older PCIe."""

PINNED_OVER_PAGEABLE = 0.9
"""Least rate of pinned over pageable memory. The driver copies pageable memory through pinned memory of its own, so it
cannot be faster; a tenth is for the noise of three rounds."""

MOST_OVERLAP = 0.75
"""Largest time of copies during products over the sum of both alone, which take equally long: 0.5 if they overlap, 1 if
one waits for the other; the middle."""

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
    figures: Figures = {"sm": read_capability(device)}
    for name in _list_types(figures["sm"]):
        error = _compute_error(name, device)
        assert error <= LARGEST_ERROR[name], (
            f"a {name} product of {_CHECKED_SIZE} x {_CHECKED_SIZE} matrices differs by {error:.1e} from float64, "
            f"allowed is {LARGEST_ERROR[name]:.0e}"
        )
        peak = measure_product_rate(name, device, sizes)
        figures |= {f"{name}_error": float(f"{error:.2g}"), f"{name}_tflop_s": round(peak.median, 3)}
        figures[f"{name}_spread"] = round(peak.spread, 3)
    least = TF32_OVER_FP32 * figures["fp32_error"]
    assert figures.get("tf32_error", least) >= least, (
        f"a tf32 product differs by {figures['tf32_error']:.1e} from float64, and an fp32 product by "
        f"{figures['fp32_error']:.1e}: TF32 does not switch on"
    )
    return figures


def judge_product_rates(figures: Figures) -> None:
    """Check that half types are faster than fp32 on a card with tensor cores (sm_70 and newer)."""
    for name in ("fp16", "bf16"):
        if (figures["sm"] or 0) < 70 or f"{name}_tflop_s" not in figures:
            continue
        gain = figures[f"{name}_tflop_s"] / figures["fp32_tflop_s"]
        assert gain >= HALF_OVER_FP32, (
            f"{name} products are {gain:.2f} x as fast as fp32 products, at least {HALF_OVER_FP32} x is expected of "
            "tensor cores"
        )


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
    """Repeat `work`, which returns how many samples it started, for about `seconds`; return samples per second.

    The clock stops when the device has done all of it, and the host never waits in between.
    """
    wait_for_device(device)
    begin = time.perf_counter()
    work()
    wait_for_device(device)
    most = max(1, int(seconds / (time.perf_counter() - begin)))  # more would only queue up, for minutes on a slow card
    begin, done = time.perf_counter(), 0
    for _ in range(most):
        done += work()
        if time.perf_counter() - begin > seconds:
            break
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


def judge_copies(figures: Figures) -> None:
    """Check the rates of copies between host and card; not on the CPU, where nothing goes over a bus."""
    for way in ("to_card", "to_host"):
        pinned, pageable = (figures[f"{kind}_{way}_gb_s"] for kind in ("pinned", "pageable"))
        assert pinned >= PINNED_OVER_PAGEABLE * pageable, (
            f"copies {way} from pinned memory have {pinned} GB/s, from pageable memory {pageable}: memory is not pinned"
        )
        assert pinned >= LEAST_COPY_GB_S, (
            f"copies {way} have {pinned} GB/s, at least {LEAST_COPY_GB_S} are expected: ask nvidia-smi "
            "--query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv"
        )


def check_overlap(device: torch.device, sizes: Sizes) -> Figures:
    """Time copies from pinned memory, products, and both at once on two streams."""
    sent = torch.empty(sizes.copy_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_card = torch.empty_like(sent, device=device)
    a = torch.randn(sizes.matrix, sizes.matrix, device=device)
    out = torch.empty_like(a)
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def multiply() -> int:
        torch.mm(a, a, out=out)
        return 1

    def copy(count: int = 1) -> int:
        with torch.cuda.stream(copies):  # type: ignore[arg-type]  # None: the current stream
            for _ in range(count):
                on_card.copy_(sent, non_blocking=True)
        return 1

    multiply()
    copy()
    rounds = partial(_measure_seconds, device=device, sizes=sizes)
    product_s = rounds(multiply)
    count = max(1, round(product_s / rounds(copy)))  # of copies, that take as long as a product
    copies_s = rounds(lambda: copy(count))
    both_s = rounds(lambda: copy(count) and multiply())
    return {"product_s": product_s, "copies": count, "copies_s": copies_s, "both_s": both_s}


def _measure_seconds(work: Callable[[], int], *, device: torch.device, sizes: Sizes) -> float:
    rates = [measure_device_rate(work, device, seconds=sizes.seconds / 4) for _ in range(_ROUNDS)]
    return 1 / Summary.from_values(rates).median


def judge_overlap(figures: Figures) -> None:
    """Check that copies and products run at the same time."""
    apart = figures["product_s"] + figures["copies_s"]
    assert figures["both_s"] <= MOST_OVERLAP * apart, (
        f"copies and products take {figures['both_s']:.3g} s together and {apart:.3g} s one after the other: "
        "they do not overlap"
    )


def check_clock(device: torch.device, sizes: Sizes) -> Figures:
    """Read the card's clock while it multiplies, and its highest one."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is missing here, which reads the clocks")
    a = torch.randn(sizes.matrix, sizes.matrix, device=device)
    out, clocks = torch.empty_like(a), []
    for _ in range(_ROUNDS):
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < sizes.seconds:  # the clock takes a moment to rise
            torch.mm(a, a, out=out)
            wait_for_device(device)
            done += 1
        for _ in range(2 * done):  # for longer than nvidia-smi takes to answer
            torch.mm(a, a, out=out)
        clocks.append(read_clocks(str(torch.cuda.get_device_properties(device).uuid)))
        wait_for_device(device)
    (_, highest, reasons), under_load = clocks[-1], max(clock for clock, *_ in clocks)
    return {"clock_mhz": under_load, "highest_clock_mhz": highest, "held_by": reasons}


def read_clocks(uuid: str) -> tuple[float, float, str]:
    """Return the clock of a card and the highest that it has, in MHz, and NVML's mask of what holds it."""
    asked = ["--query-gpu=clocks.sm,clocks.max.sm,clocks_throttle_reasons.active", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        ["nvidia-smi", "-i", f"GPU-{uuid.removeprefix('GPU-')}", *asked], capture_output=True, text=True
    )
    current, highest, reasons = [*done.stdout.strip().split(", "), "", "", ""][:3]
    if not (current.isdigit() and highest.isdigit()):
        cannot_answer(f"nvidia-smi does not say this card's clocks: {(done.stdout + done.stderr).strip()}")
    return float(current), float(highest), reasons


def judge_clock(figures: Figures) -> None:
    """Check that the card is not held at a low clock."""
    share = figures["clock_mhz"] / figures["highest_clock_mhz"]
    assert share >= LEAST_CLOCK, (
        f"under load the clock is {figures['clock_mhz']:.0f} of {figures['highest_clock_mhz']:.0f} MHz: the card is "
        f"held there ({figures['held_by']}): nvidia-smi -q -d PERFORMANCE,CLOCK"
    )


def check_peers(device: torch.device, sizes: Sizes) -> Figures:
    """Copy between every pair of GPUs, compare, and name the pairs that reach each other without the host."""
    gpus = list_gpus()
    if (count := len(gpus)) < 2:
        cannot_answer("one GPU is visible, and peers need two")
    changed = find_changed_copies(gpus)
    assert not changed, f"copies between these GPUs arrive changed: {changed}. NCCL_P2P_DISABLE=1 avoids that path"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = [f"{a}-{b}" for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
    return {"gpus": count, "direct_pairs": " ".join(direct), "all_direct": len(direct) == len(pairs)}


def list_gpus() -> list[torch.device]:
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def find_changed_copies(devices: Sequence[torch.device]) -> list[str]:
    """Copy from each device to each other one; return the pairs, by their places, between which values change."""
    changed = []
    for a, source in enumerate(devices):
        sent = torch.arange(1 << 20, device=source)
        for b, target in enumerate(devices):
            if a != b and not torch.equal(sent.to(target, copy=True).cpu(), sent.cpu()):
                changed.append(f"{a}-{b}")
    return changed
