"""Collects versions, machine, GPUs and commit: a result depends on them besides its configuration. Loads no torch."""

import contextlib
import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainyard.errors import UserError
from trainyard.hardware import count_cores, list_chosen_gpus
from trainyard.masking import mask_diff

_RECORDED_DISTRIBUTIONS = (
    *("trainyard", "torch", "torchvision", "h5py", "numpy", "hydra-core", "submitit"),
    *("pillow", "pycocotools", "scikit-learn", "scipy", "soundfile", "tokenizers", "transformers", "wsq"),
)
_RECORDED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_GPUS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",  # its name before torch 2.9
)
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
THIS_CODE = Path(__file__).resolve().parent


def collect_environment(checkout: Mapping[str, Any], environ: Mapping[str, str] = NO_VARIABLES) -> dict[str, Any]:
    """Return the versions, machine, GPUs and commit that a result depends on besides its configuration.

    Versions come from the metadata of installed distributions, without importing them; GPUs and the commit from
    `nvidia-smi` and `git`. Where a value is not available, a text has the reason. Git remotes are not recorded, because
    their URLs may contain a password. Takes up to a second on a machine with GPUs.

    Args:
        checkout: as `find_checkout` describes it.
        environ: environment variables; a few known ones are recorded.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "versions": _read_versions(),
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "cpu": describe_cpu(Path("/proc/cpuinfo").read_text()),
            "cores_available": count_cores(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _query_gpus(),
        },
        "code": dict(checkout),
        "environ": {name: environ[name] for name in _RECORDED_VARIABLES if name in environ},
    }


@functools.cache
def _read_versions() -> dict[str, str]:
    dali = {path.name.partition("-")[0] for folder in sys.path for path in Path(folder).glob("nvidia_dali*.dist-info")}
    recorded = {}
    for name in sorted({*_RECORDED_DISTRIBUTIONS, *(package.replace("_", "-").lower() for package in dali)}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            recorded[name] = metadata.version(name)
    return {"python": platform.python_version(), **recorded}


def describe_cpu(cpuinfo: str) -> str:
    """Return the CPU's name, family, model and vector extension: virtual machines use one name for many generations.

    Args:
        cpuinfo: the content of /proc/cpuinfo.
    """
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    first = {name.strip(): value.strip() for name, _, value in lines}
    if "model name" not in first:
        return platform.machine()  # ARM kernels do not state a model
    flags = first.get("flags", "").split()
    vectors = next((wide for flag, wide in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "no AVX2")
    return f"{first['model name']} (family {first.get('cpu family')}, model {first.get('model')}, {vectors})"


def _query_gpus() -> str:
    """Return name, driver and memory of each GPU, separated by ";", or "none", or why they are unknown."""
    try:
        answer = _ask_smi("name,driver_version,memory.total", "csv,noheader")
    except subprocess.TimeoutExpired:
        return "unknown: nvidia-smi did not answer within 20 s"
    if answer is None:
        return "none"
    lines = [line.strip() for line in (answer.stdout or answer.stderr).splitlines() if line.strip()]
    return "; ".join(lines) if answer.returncode == 0 else f"unknown: {lines[0] if lines else 'nvidia-smi failed'}"


def _ask_smi(fields: str, form: str) -> "subprocess.CompletedProcess[str] | None":
    smi = shutil.which("nvidia-smi")
    query = [f"--query-gpu={fields}", f"--format={form}"]
    return subprocess.run([smi, *query], capture_output=True, text=True, timeout=20) if smi else None


@dataclass(frozen=True)
class LocalGpu:
    """A GPU of this machine, as nvidia-smi states it."""

    name: str
    memory_gib: float  # of the whole card
    is_split: bool  # into MIG slices, of which a process gets one


def list_gpus() -> list[LocalGpu]:
    """Return each GPU of this machine. Asks nvidia-smi: torch loads slowly.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    try:
        answer = _ask_smi("name,memory.total,mig.mode.current", "csv,noheader,nounits")
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi did not answer within 20 s, so the driver hangs. Type: nvidia-smi") from None
    cells = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()] if answer else []
    return [
        LocalGpu(name, int(mib) / 1024, mig == "Enabled")
        for name, mib, mig in (row for row in cells if len(row) == 3)
        if mib.isdigit()
    ]


_STATE_FIELDS = "pci.bus_id,clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_throttle_reasons.active"


def read_gpu_states() -> dict[str, dict[str, str]]:
    """Return what nvidia-smi says now of clocks (MHz), power (W) and throttling (a bit mask), by GPU's bus address.

    Empty without GPUs, or where nvidia-smi does not answer.
    """
    try:
        answer = _ask_smi(_STATE_FIELDS, "csv,noheader,nounits")
    except subprocess.TimeoutExpired:
        return {}
    lines = answer.stdout.splitlines() if answer and answer.returncode == 0 else []
    rows = (dict(zip(_STATE_FIELDS.split(","), map(str.strip, line.split(",")), strict=False)) for line in lines)
    return {row["pci.bus_id"].lower(): row for row in rows}


def count_visible_gpus(gpus: Sequence[LocalGpu], environ: Mapping[str, str]) -> int:
    """Return how many of this machine's GPUs a process may use; which ones, CUDA decides: it orders them by speed."""
    chosen = list_chosen_gpus(environ)
    return len(gpus) if chosen is None else min(len(gpus), len(chosen))


def name_chosen_gpus(count: int, environ: Mapping[str, str]) -> list[str]:
    """Return the variable that shows the first `count` GPUs that the user chose to a process; none if nobody chose."""
    chosen = list_chosen_gpus(environ) or []
    return [f"CUDA_VISIBLE_DEVICES={','.join(chosen[:count])}"] if chosen and count else []


def find_checkout(code: Path) -> tuple[dict[str, Any], bytes]:
    """Return commit, dirty flag and untracked files of a git checkout, and its diff against the commit.

    Text that looks like a password or a key is masked in the diff; `masked` lists where, if that was anywhere.
    """
    try:
        commit, _, top = _run_git(code, "rev-parse", "HEAD", "--show-toplevel").decode().rstrip("\n").partition("\n")
        diff = _run_git(top, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
        listed = _run_git(
            top, "ls-files", "--others", "--exclude-standard", "--directory", "--no-empty-directory", "-z"
        )
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None)
        reason = stderr.decode(errors="replace").strip().partition("\n")[0] if stderr else str(error)
        return {"commit": None, "reason": reason}, b""
    untracked = listed.decode(errors="backslashreplace").split("\0")[:-1]
    diff, masked = mask_diff(diff)
    checkout = {"commit": commit, "dirty": bool(diff or untracked), "untracked": untracked}
    return checkout | ({"masked": [str(finding) for finding in masked]} if masked else {}), diff


def _run_git(folder: str | Path, *arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
