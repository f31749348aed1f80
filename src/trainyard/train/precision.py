"""Applies the policy of `hardware.precision_for`. The only place that sets switches of torch and the C library."""

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from trainyard.hardware import Precision

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def set_switches(precision: Precision, *, deterministic: bool) -> None:
    """Set TF32 and determinism for this process, before its first CUDA call.

    TF32 is set by the two calls that exist and agree in every torch since 2.7.1; after the newer fp32_precision is
    set, reading the older ones is an error.

    An operator without a deterministic kernel gives a warning instead of an error; the caller collects the warnings
    (`collect_nondeterministic_operators`), so that the run's events name these operators.
    """
    if deterministic:  # without a workspace of its own per stream, cuBLAS may sum in another order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


@contextmanager
def multiply_in_float32(device_type: str) -> Iterator[None]:
    """Make matrix products float32, whatever autocast and TF32 say: for coordinates, which need more than 10 bits.

    The switch of TF32 belongs to the process, so only one thread may compute.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def keep_freed_memory(device: torch.device) -> tuple[str, str]:
    """On the CPU, make the C library keep the memory that tensors free; return the choice and its reason.

    Torch has no caching allocator there. A step frees tens of MiB at its end: glibc's malloc returns them to the
    system, and the next step pays for every page again (mallopt(3), M_TRIM_THRESHOLD).
    """
    if device.type != "cpu":
        return "returned", "tensors are on the device, where torch caches freed memory"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    largest_bytes, never = 32 << 20, -1  # blocks above the largest that glibc allows here are always returned
    if mallopt and mallopt(_M_MMAP_THRESHOLD, largest_bytes) and mallopt(_M_TRIM_THRESHOLD, never):
        return "kept", "on the CPU; else each step would request it from the system again"
    return "returned", "this C library has no mallopt to keep it"


def make_autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes the autocast context of a forward pass; in fp32 the context does nothing."""
    dtype = DTYPES[precision.dtype]
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@contextmanager
def collect_nondeterministic_operators(report: Callable[[list[str]], object]) -> Iterator[None]:
    """Collect the operators that, according to torch, have no deterministic kernel; issue other warnings again.

    Args:
        report: called at the end with their names, sorted.
    """
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            other_warnings = []
            for warning in caught:
                text = str(warning.message)
                if "does not have a deterministic implementation" in text:
                    found.add(text.split(" ")[0])
                else:
                    other_warnings.append(warning)
    for warning in other_warnings:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    report(sorted(found))
