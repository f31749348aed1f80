"""Applying the policy of `hardware.precision_for`. The only place that sets switches of torch and the C library."""

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

    TF32 goes through the two calls that exist and agree in every torch from 2.7.1 on; the newer fp32_precision makes
    reading the older ones an error.

    Deterministic kernels are asked for with a warning instead of an error where an operator has none: the caller
    collects these (`nondeterministic_operators`) so that the run's record names them.
    """
    if deterministic:  # without a workspace of its own per stream, cuBLAS may sum in another order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def keep_freed_memory(device: torch.device) -> tuple[str, str]:
    """On the CPU, have the C library keep what tensors give back; return the choice and its reason.

    Torch has no allocator of its own there. What a step needs is tens of MiB, given back at its end: glibc's malloc
    returns it to the system, and the next step pays for every page anew (mallopt(3), M_TRIM_THRESHOLD).
    """
    if device.type != "cpu":
        return "returned", "tensors are on the device, where torch keeps it"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    largest_bytes, never = 32 << 20, -1  # blocks above the largest that glibc allows here are always returned
    if mallopt and mallopt(_M_MMAP_THRESHOLD, largest_bytes) and mallopt(_M_TRIM_THRESHOLD, never):
        return "kept", "on the CPU, or each step would ask the system for it again"
    return "returned", "this C library has no mallopt that could keep it"


def autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a maker of the context that forward passes run in; it does nothing in fp32."""
    dtype = DTYPES[precision.dtype]
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@contextmanager
def nondeterministic_operators(report: Callable[[list[str]], object]) -> Iterator[None]:
    """Collect the operators for which torch says that it has no deterministic kernel; pass other warnings on.

    Args:
        report: called at the end with their names, sorted.
    """
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            others = []
            for warning in caught:
                text = str(warning.message)
                if "does not have a deterministic implementation" in text:
                    found.add(text.split(" ")[0])
                else:
                    others.append(warning)
    for warning in others:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    report(sorted(found))
