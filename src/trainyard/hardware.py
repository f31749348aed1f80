"""Knows the GPU models, chooses precision for each, and counts the CPU cores of this process. Loads no torch."""

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from trainyard.choice import Choice
from trainyard.errors import UserError

CPU_CHANNELS_LAST = True
"""Whether convolutions on the CPU use NHWC, which oneDNN reads directly. Not yet benchmarked against NCHW."""


@dataclass(frozen=True)
class GpuType:
    """Properties of a GPU model that planning and computing need."""

    key: str  # what people type, such as "a100-80-sxm"
    name: str  # what torch.cuda.get_device_name() prints, without a leading "NVIDIA "
    sm: int  # compute capability, major * 10 + minor
    memory_gib: float

    def is_called(self, name: str) -> bool:
        """Return whether a name means this card: its key, or how it begins: p100-16 is p100-16-pcie and p100-16-sxm."""
        return bool(name) and f"{self.key}-".startswith(f"{name}-")


# fmt: off
GPUS: tuple[GpuType, ...] = (  # compute capability and nominal memory, as in NVIDIA's datasheets
    GpuType("p100-12-pcie", "Tesla P100-PCIE-12GB", 60,  12),
    GpuType("p100-16-pcie", "Tesla P100-PCIE-16GB", 60,  16),
    GpuType("p100-16-sxm",  "Tesla P100-SXM2-16GB", 60,  16),
    GpuType("2080ti",       "GeForce RTX 2080 Ti",  75,  11),
    GpuType("a5000",        "RTX A5000",            86,  24),
    GpuType("a100-40-pcie", "A100-PCIE-40GB",       80,  40),
    GpuType("a100-40-sxm",  "A100-SXM4-40GB",       80,  40),
    GpuType("a100-80-pcie", "A100 80GB PCIe",       80,  80),
    GpuType("a100-80-sxm",  "A100-SXM4-80GB",       80,  80),
    GpuType("h100-pcie",    "H100 PCIe",            90,  80),
    GpuType("h100-sxm",     "H100 80GB HBM3",       90,  80),
    GpuType("h200",         "H200",                 90,  140.4),
)

GPU_TYPES: tuple[GpuType, ...] = (
    *GPUS,
    # Other cards that cluster files may name.
    GpuType("v100-16-pcie", "Tesla V100-PCIE-16GB", 70,  16),
    GpuType("v100-32-pcie", "Tesla V100-PCIE-32GB", 70,  32),
    GpuType("v100-16-sxm",  "Tesla V100-SXM2-16GB", 70,  16),
    GpuType("v100-32-sxm",  "Tesla V100-SXM2-32GB", 70,  32),
    GpuType("t4",           "Tesla T4",             75,  16),
    GpuType("3090",         "GeForce RTX 3090",     86,  24),
    GpuType("a6000",        "RTX A6000",            86,  48),
    GpuType("4090",         "GeForce RTX 4090",     89,  24),
    GpuType("l40s",         "L40S",                 89,  48),
    GpuType("b200",         "B200",                 100, 180),
)
# fmt: on


def find_gpu_by_name(cuda_device_name: str, memory_gib: float) -> GpuType | None:
    """Return the entry of a device, or None for an unknown card.

    Args:
        cuda_device_name: what torch.cuda.get_device_name() prints. Old drivers omit "NVIDIA ".
        memory_gib: the device's total memory in GiB. ECC and the driver take up to 8 % of the nominal size; a
            card outside 90-102 % of it is a different one (a MIG slice, a 2080 Ti refitted with 22 GB).
    """
    name = re.sub(r"^NVIDIA ", "", cuda_device_name.strip())
    for gpu in GPU_TYPES:
        if gpu.name == name and 0.90 * gpu.memory_gib <= memory_gib <= 1.02 * gpu.memory_gib:
            return gpu
    return None


def get_gpu(key: str) -> GpuType | None:
    """Return the GPU type with this key, None for "cpu"; a key of `make_gpu_key` describes a type outside the table."""
    if described := re.fullmatch(r"sm(\d{2,3})-(\d+)gib", key):
        sm, memory_gib = (int(number) for number in described.groups())
        return GpuType(key, f"GPU (sm_{sm}, {memory_gib} GiB)", sm, memory_gib)
    return next((gpu for gpu in GPU_TYPES if gpu.key == key), None)


def make_gpu_key(sm: int, memory_gib: int) -> str:
    """Return the key of a GPU type that no table needs to contain, such as "sm89-48gib"."""
    return f"sm{sm}-{memory_gib}gib"


def choose_image_target(sm: int | None) -> str:
    """Return the container image target with kernels for a compute capability (major * 10 + minor; None: the CPU).

    CUDA 13 dropped cards older than sm_75, and torch dropped sm_60 after 2.7: containers/README.md.
    """
    if sm is None:
        return "cpu"
    if sm < 75:
        return "cuda12-pascal"
    return "cuda12" if sm < 80 else "cuda13"


@dataclass(frozen=True)
class Precision:
    """The numeric and memory-layout policy of one run, decided once."""

    dtype: str  # of matrix products and convolutions: "fp32", "fp16" or "bf16"
    loss_scaling: bool  # whether gradients need a GradScaler
    tf32: bool  # whether products that stay in fp32 may round their inputs to TF32
    channels_last: bool  # whether images and convolution weights are NHWC in memory
    compile: bool  # whether the model is compiled with torch.compile
    reasons: Mapping[str, str]  # field name -> why, for the log
    cuda_graphs: bool = False  # whether compiled code is started as CUDA graphs


def choose_precision(
    sm: int | None,
    *,
    precision: str = "auto",
    channels_last: str = "auto",
    compile: str = "auto",
    varying_shapes: str = "",
) -> Precision:
    """Choose how to compute on a device.

    Uses the compute capability and never `torch.cuda.is_bf16_supported()`, which by default also returns True for
    cards that only emulate bf16.

    Args:
        sm: compute capability as major * 10 + minor (P100: 60, 2080 Ti: 75, A100: 80), None for the CPU.
        precision: "auto", "fp32", "fp16" or "bf16". An explicit fp32 also switches TF32 off.
        channels_last, compile: "auto", "on" or "off"; compile also "graphs".
        varying_shapes: `TrainConfig.explain_varying_shapes`.

    Raises:
        UserError: the device does not support the request, or not at full speed.
    """
    assert channels_last in ("auto", "on", "off"), channels_last
    assert compile in ("auto", "on", "off", "graphs"), compile
    device = "the CPU" if sm is None else f"sm_{sm}"
    dtype, dtype_reason = _choose_dtype(sm, device, precision)
    tf32, tf32_reason = _choose_tf32(sm, device, precision)
    nhwc, nhwc_reason = _choose_channels_last(sm, device, dtype, channels_last)
    graphs = compile == "graphs"
    compiled, compile_reason = _choose_compile(sm, device, compile, varying_shapes)
    scaling_reason = {
        "fp16": "small gradients underflow in fp16: its smallest normal number is 6e-5",
        "bf16": "bf16 has the exponent range of fp32",
        "fp32": "nothing to scale in fp32",
    }[dtype]
    reasons = {
        "dtype": dtype_reason,
        "loss_scaling": scaling_reason,
        "tf32": tf32_reason,
        "channels_last": nhwc_reason,
        "compile": compile_reason,
        "cuda_graphs": "requested" if graphs else "only where they are requested: compile=graphs",
    }
    return Precision(dtype, dtype == "fp16", tf32, nhwc, compiled, reasons, graphs)


def choose_sync_batchnorm(wanted: bool, *, device_type: str, world_size: int) -> Choice[bool]:
    """Return whether BatchNorm layers use the batch statistics of all ranks, and the reason.

    Raises:
        UserError: they should, but torch cannot synchronise them on this device.
    """
    if not wanted:
        return Choice(False, "sync_batchnorm=false: each rank normalises by its own micro-batch")
    if world_size == 1:
        return Choice(False, "one rank has the whole micro-batch")
    if device_type == "cpu":
        raise UserError(
            f"sync_batchnorm=true on {world_size} ranks on the CPU, but torch synchronises batch statistics only "
            "between GPUs. Use sync_batchnorm=false, one rank, or GPUs."
        )
    return Choice(True, "sync_batchnorm=true: all ranks normalise by the statistics of their micro-batches together")


def read_driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the loaded NVIDIA kernel driver, such as "580.65.06"; None if there is none."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", file.read_text()) if file.exists() else None
    return match[1] if match else None


def list_chosen_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, as CUDA reads it: up to an empty or negative one; None if not set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return list(takewhile(lambda entry: entry and not entry.startswith("-"), map(str.strip, visible.split(","))))


def explain_missing_gpu(driver: str | None, environ: Mapping[str, str]) -> str | None:
    """Return why torch finds no GPU where one is expected; None if the CPU is intended.

    Args:
        driver: what `read_driver_version` returned.
        environ: the container image's TRAINYARD_TARGET, _MIN_DRIVER and _MAX_DRIVER, and CUDA_VISIBLE_DEVICES, which
            users set to the empty string or -1 to train on the CPU.
    """
    target, min_driver = environ.get("TRAINYARD_TARGET", ""), environ.get("TRAINYARD_MIN_DRIVER", "")
    max_driver = environ.get("TRAINYARD_MAX_DRIVER", "")
    on_cpu = "To train on the CPU: CUDA_VISIBLE_DEVICES= (empty)."
    if list_chosen_gpus(environ) == []:
        return None
    if driver is None:
        if not min_driver:
            return None
        return f"container image {target} is for GPUs, but this machine has no NVIDIA driver. {on_cpu}"
    if max_driver and _parse_version(driver)[0] > int(max_driver):
        return (
            f"container image {target} needs driver {max_driver} or older, the last branch for its cards; this machine "
            f"has {driver}. Ask for driver {max_driver}, or use another node. {on_cpu}"
        )
    if min_driver and _parse_version(driver) < _parse_version(min_driver):
        hint = " Use image cuda12, which runs from 525 on, or" if _parse_version(driver) >= (525,) else " Ask for"
        return (
            f"container image {target} needs driver {min_driver} or newer; this machine has {driver}.{hint} a newer "
            f"driver. {on_cpu}"
        )
    if target == "cpu":
        return (
            f"this machine has an NVIDIA driver ({driver}), but this is the CPU image. Use the card's image. {on_cpu}"
        )
    return (
        f"this machine has an NVIDIA driver ({driver}), but torch finds no GPU. In a container, start it with GPUs "
        f"(make run-image prints the command); otherwise nvidia-smi shows the fault. {on_cpu}"
    )


def explain_missing_kernels(sm: int, arch_list: Sequence[str]) -> str | None:
    """Return why this build of torch cannot compute on a card, and which container image can; None if it can.

    A card runs kernels of its major version and of a minor version up to its own, and PTX of any older version,
    which the driver compiles (CUDA C Programming Guide, "Application Compatibility").

    Args:
        sm: the card's compute capability, major * 10 + minor.
        arch_list: torch.cuda.get_arch_list(), such as ["sm_75", "sm_80", "compute_90"].
    """
    built = [(kind, int(re.sub(r"\D", "", number))) for kind, _, number in (a.partition("_") for a in arch_list)]
    if any((kind == "sm" and n // 10 == sm // 10 and n <= sm) or (kind == "compute" and n <= sm) for kind, n in built):
        return None
    return (
        f"this torch has no kernels for this card (sm_{sm}): it was built for {', '.join(arch_list)}. Use image "
        f"{choose_image_target(sm)}: make image HW={choose_image_target(sm)}."
    )


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def count_cores() -> int:
    """Return how many CPU cores this process may keep busy, at least 1.

    Slurm and Docker core lists set the affinity mask; `docker --cpus` and Kubernetes set the CPU quota.
    `os.cpu_count()` ignores both and counts the whole node.
    """
    quota, allowed = read_cpu_quota(), len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def read_cpu_quota() -> float | None:
    """Return how many cores' time this process and its group may take together; None without a quota."""
    return _read_cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))


_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that OpenMP libraries read once, when loaded: the standard's, GNU's (the one torch uses), Intel's."""


def set_openmp_wait_policy(environ: MutableMapping[str, str]) -> None:
    """Make waiting OpenMP threads sleep, unless the user has set another policy. Call it before torch is loaded.

    By default libgomp's threads spin. On shared cores a thread then spins through the time slice of the thread that
    it waits for, and steps of two runs on one machine take many times as long.

    Args:
        environ: the environment of this process, which its children inherit.
    """
    if not any(name in environ for name in _WAIT_VARIABLES):
        environ["OMP_WAIT_POLICY"] = "passive"


def read_openmp_wait_policy(environ: Mapping[str, str]) -> Choice[str]:
    """Return how OpenMP threads wait in this environment, and the reason, for the run's env.json."""
    stated = {name: environ[name] for name in _WAIT_VARIABLES if name in environ}
    if stated == {"OMP_WAIT_POLICY": "passive"}:
        return Choice("passive", "waiting threads sleep: a spinning thread takes a core from those it waits for")
    if stated:
        return Choice(" ".join(f"{name}={value}" for name, value in stated.items()), "set in the environment")
    return Choice("library's default", "not set when this process started")


def show_own_mig_slice(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Show a rank only its own MIG slice. Call it before torch is loaded: a process uses the first slice that it sees.

    Slurm shows all slices of a job to each of its ranks on a node.

    Raises:
        UserError: there are fewer slices than ranks.
    """
    slices = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(slices) < 2 or not slices[0].startswith("MIG-"):
        return
    if local_rank >= len(slices):
        raise UserError(
            f"Local rank {local_rank} has no MIG slice: CUDA_VISIBLE_DEVICES has {len(slices)}. Start at most "
            f"{len(slices)} ranks on this node: --gpus {len(slices)}"
        )
    environ["CUDA_VISIBLE_DEVICES"] = slices[local_rank]


def choose_compute_threads(environ: Mapping[str, str], *, cores: int, reason: str, launcher: str) -> Choice[int]:
    """Return how many threads torch uses for CPU computation, and the reason.

    OMP_NUM_THREADS takes precedence, except for the value 1 that torchrun sets by default
    (torch/distributed/run.py): it would leave all other cores of a rank idle.

    Args:
        cores: how many cores this rank may keep busy.
        reason: where that number comes from.
        launcher: what started this rank: `World.launcher`.

    Raises:
        UserError: OMP_NUM_THREADS is not a number of threads.
    """
    stated = environ.get("OMP_NUM_THREADS", "")
    if not stated:
        return Choice(cores, reason)
    if launcher == "torchrun" and stated == "1":
        return Choice(cores, f"{reason}; ignores OMP_NUM_THREADS=1, which torchrun sets by default")
    threads = stated.partition(",")[0].strip()  # further numbers are for nested regions; torch has none
    if not threads.isdigit() or int(threads) < 1:
        raise UserError(f"OMP_NUM_THREADS={stated}: expected a number of threads, such as {cores}. Or unset it.")
    return Choice(int(threads), f"OMP_NUM_THREADS={stated} in the environment")


def reuse_compute_threads(recorded: int | None, chosen: Choice[int]) -> Choice[int]:
    """Return how many threads a run on the CPU computes with, and the reason: as many as when it began.

    The bits of sums depend on the number of threads, and not on the number of cores that run them.

    Args:
        recorded: threads that this rank of the run computed with; None: it has not trained with as many ranks.
        chosen: what `choose_compute_threads` returned.
    """
    if recorded is None or recorded == chosen.value:
        return chosen
    return Choice(
        recorded,
        "as this run began, because on the CPU its bits depend on it; a new run would take "
        f"{chosen.value}: {chosen.reason}",
    )


def _choose_dtype(sm: int | None, device: str, precision: str) -> Choice[str]:
    choices = _list_fast_dtypes(sm)
    if precision == "auto":
        return Choice(choices[0], f"{device}: {_AUTO_REASON[choices[0]]}")
    if precision not in choices:
        raise UserError(
            f"precision={precision} requested, but this device ({device}) runs only {', '.join(choices)} "
            f"at full speed. Use precision={choices[0]}, or precision=auto."
        )
    if sm == 60 and precision == "fp16":
        return Choice(precision, "requested; saves memory, but matrix products gain little without tensor cores")
    return Choice(precision, "requested")


_AUTO_REASON = {
    "fp32": "no tensor cores",
    "fp16": "tensor cores support fp16, and no bf16 before sm_80",
    "bf16": "tensor cores support bf16, and it needs no loss scaling",
}


def _list_fast_dtypes(sm: int | None) -> tuple[str, ...]:
    """Return the data types that run at full speed, the one that "auto" chooses first."""
    if sm is None:
        return ("fp32", "bf16")
    if sm >= 80:
        return ("bf16", "fp16", "fp32")
    if sm >= 70:
        return ("fp16", "fp32")
    # Of the older cards only P100 runs fp16 at twice its fp32 rate; sm_61 runs it at 1/64.
    return ("fp32", "fp16") if sm == 60 else ("fp32",)


def _choose_tf32(sm: int | None, device: str, precision: str) -> Choice[bool]:
    if sm is None or sm < 80:
        return Choice(False, f"{device} has no TF32")
    if precision == "fp32":
        return Choice(False, "precision=fp32 requested, and TF32 rounds inputs to 10 bits of mantissa")
    return Choice(True, f"{device}: products that autocast leaves in fp32 use tensor cores too")


def _choose_channels_last(sm: int | None, device: str, dtype: str, requested: str) -> Choice[bool]:
    if requested != "auto":
        slow = sm is not None and sm < 70 and requested == "on"
        return Choice(
            requested == "on",
            "requested" + (f"; slower than NCHW on {device}, which has no tensor cores" if slow else ""),
        )
    if sm is None:
        return Choice(CPU_CHANNELS_LAST, "the CPU: oneDNN convolutions read NHWC directly")
    if sm >= 70 and dtype != "fp32":
        return Choice(True, f"{device}: cuDNN's tensor-core convolutions read NHWC")
    return Choice(False, f"{device} in {dtype}: cuDNN's NHWC paths need tensor cores")


def _choose_compile(sm: int | None, device: str, requested: str, varying_shapes: str) -> Choice[bool]:
    fault = (
        "CUDA graphs need a GPU"
        if sm is None
        else varying_shapes and f"a CUDA graph is for one shape: {varying_shapes}"
    )
    if requested == "graphs" and fault:
        raise UserError(f"compile=graphs requested on {device}, but {fault}. Use compile=on, or compile=off.")
    if sm is not None and sm < 70:
        reason = f"torch.compile generates Triton kernels, and Triton needs sm_70 or newer, not {device}"
        if requested in ("on", "graphs"):
            raise UserError(f"compile={requested} requested, but {reason}. Use compile=off, or compile=auto.")
        return Choice(False, reason)
    if requested == "auto":
        return Choice(False, "auto is off: whether it pays was not measured; compile=on tries it")
    return Choice(requested in ("on", "graphs"), "requested")


def explain_missing_compiler(sm: int | None, environ: Mapping[str, str], *, headers: Path | None = None) -> str | None:
    """Return why torch.compile cannot build kernels on this machine; None if it can.

    Triton builds a C function that starts each kernel; kernels for the CPU are C++.

    Args:
        sm: the card's compute capability; None: the CPU.
        environ: PATH, and CC or CXX, which may name the compiler.
        headers: where Python.h should be; default: where this Python says it is.
    """
    headers = headers or Path(sysconfig.get_paths()["include"])
    variable, language, usual = ("CXX", "C++", ("g++",)) if sm is None else ("CC", "C", ("gcc", "clang"))
    names = (environ[variable],) if environ.get(variable) else usual
    if not any(shutil.which(name, path=environ.get("PATH")) for name in names):
        return f"there is no {language} compiler here ({' or '.join(names)}), which torch.compile needs"
    if not (headers / "Python.h").is_file():
        return f"there is no {headers}/Python.h, which torch.compile needs"
    return None


def _read_cpu_quota(hierarchy: Path, membership: Path) -> float | None:
    """Return the tightest CPU quota, in cores, of this process's cgroup (v2 or v1) and its ancestors, if any."""
    limits = [folder / "cpu.max" for folder in list_cgroups(hierarchy, membership, r"0:")]
    stated = [limit.read_text().split() for limit in limits if limit.is_file()]  # quota, or "max", and period, in us
    for folder in list_cgroups(hierarchy / "cpu", membership, r"\d+:(?:\w+,)*cpu(?:,\w+)*"):
        files = [folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        if all(file.is_file() for file in files):
            stated.append([file.read_text().strip() for file in files])
    return min((int(quota) / int(period) for quota, period in stated if quota not in ("max", "-1")), default=None)


def list_cgroups(hierarchy: Path, membership: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of its ancestors; `controller` is how its line begins."""
    if not membership.exists():
        return []
    own = re.search(rf"^{controller}:/(.*)$", membership.read_text(), re.MULTILINE)
    if own is None:
        return []
    group = hierarchy / own[1]
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(hierarchy)]
