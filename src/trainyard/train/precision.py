"""Applies the policy of `hardware.precision_for`. The only place that sets switches of torch and the C library."""

import ctypes
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.utils.deterministic

from trainyard.choice import Choice
from trainyard.hardware import Precision

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def read_capability(device: torch.device) -> int | None:
    """Return a card's compute capability, major * 10 + minor; None for the CPU."""
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def set_switches(precision: Precision, *, deterministic: bool) -> Choice[str]:
    """Set TF32 and determinism for this process, before its first CUDA call; return the policy of cuDNN's benchmark.

    TF32 is set by the two calls that exist and agree in every torch since 2.7.1; after the newer fp32_precision is
    set, reading the older ones is an error.

    Returns:
        Whether cuDNN chooses its algorithms by timing them, and why.
    """
    if deterministic:  # without a separate workspace per stream, cuBLAS may sum in another order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.backends.cudnn.benchmark = not deterministic
    set_determinism(deterministic)
    if deterministic:
        return Choice(
            "off", "deterministic=true: timing may choose another algorithm in each attempt, which sums differently"
        )
    return Choice("on", "deterministic=false: cuDNN times its algorithms at the first use of each shape")


def set_determinism(deterministic: bool, *, exceptions: Sequence[str] = ()) -> None:
    """Choose deterministic kernels, and refuse operators that have none, unless there are exceptions.

    Torch has one switch for both: the flash and memory-efficient kernels of scaled_dot_product_attention have a
    deterministic backward pass, but use it only while every operator without one is refused (`warn_only=False`). So
    with exceptions, attention is computed by its math back end. cuDNN's attention is never deterministic.

    Memory that an operator leaves uninitialised is not filled: no result may depend on it, and filling takes time.

    Args:
        exceptions: the operators of this run's step that have no deterministic kernel; any of them allows all.
    """
    torch.use_deterministic_algorithms(deterministic, warn_only=bool(exceptions))
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    fused = not (deterministic and exceptions)
    torch.backends.cuda.enable_flash_sdp(fused)
    torch.backends.cuda.enable_mem_efficient_sdp(fused)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    torch.backends.cuda.enable_math_sdp(True)


def can_use_grid_sample(device: torch.device) -> bool:
    """Return whether a run may differentiate `grid_sample`, which has no deterministic backward pass on CUDA."""
    return device.type != "cuda" or not torch.are_deterministic_algorithms_enabled()


@contextmanager
def allow_nondeterministic_operators() -> Iterator[None]:
    """Allow operators without a deterministic kernel; those that have one still use it."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def find_nondeterministic_operators(work: Callable[[], object]) -> list[str]:
    """Do `work`, and return the operators in it that have no deterministic kernel on their device, sorted.

    Torch names them in warnings, also those of the backward pass; other warnings are issued again.
    """
    operators: set[str] = set()
    other_warnings = []
    with warnings.catch_warnings(record=True) as caught, allow_nondeterministic_operators():
        warnings.simplefilter("always")
        work()
    for warning in caught:
        text = str(warning.message)
        if (operator := parse_nondeterministic_operator(text)) is not None:
            operators.add(operator)
        elif "defaults to a non-deterministic algorithm" not in text:  # fused attention: see `set_determinism`
            other_warnings.append(warning)
    for warning in other_warnings:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return sorted(operators)


def parse_nondeterministic_operator(text: str) -> str | None:
    """Return the operator that has no deterministic kernel, according to torch's warning or error; None: another."""
    match = re.search(r"(\S+) does not have a deterministic implementation", text)
    return match[1] if match else None


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


def keep_freed_memory(device: torch.device) -> Choice[str]:
    """On the CPU, make the C library keep the memory that tensors free; return the choice and its reason.

    Torch has no caching allocator there. A step frees tens of MiB at its end: glibc's malloc returns them to the
    system, and the next step pays for every page again (mallopt(3), M_TRIM_THRESHOLD).
    """
    if device.type != "cpu":
        return Choice("returned", "tensors are on the device, where torch caches freed memory")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    largest_bytes, never = 32 << 20, -1  # blocks above the largest that glibc allows here are always returned
    if mallopt and mallopt(_M_MMAP_THRESHOLD, largest_bytes) and mallopt(_M_TRIM_THRESHOLD, never):
        return Choice("kept", "on the CPU; else each step would request it from the system again")
    return Choice("returned", "this C library has no mallopt to keep it")


def make_autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes the autocast context of a forward pass; in fp32 the context does nothing."""
    dtype = DTYPES[precision.dtype]
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
