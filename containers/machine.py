"""Check that a machine has the memory, disk and programs that README's commands need, before minutes are spent.

python3 containers/machine.py --memory-gib 8 --purpose "the tests"
"""

import argparse
import importlib.util
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ((3, 11), (3, 13))  # the oldest and the newest that the tests run on
GLIBC = (2, 28)  # of the locked wheels: manylinux_2_28


def main(arguments: Sequence[str]) -> int:
    """Return 0, or 2 after printing that memory is short."""
    parser = argparse.ArgumentParser(prog="containers/machine.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory-gib", type=float, required=True, metavar="N", help="memory that must be available")
    parser.add_argument("--purpose", required=True, metavar="WHAT", help="for the sentence, such as 'the tests'")
    args = parser.parse_args(arguments)
    lack = why_too_little_memory(args.memory_gib, args.purpose)
    if lack:
        print(lack, file=sys.stderr)
    return 2 if lack else 0


def why_no_environment(folder: Path, *, disk_gib: float) -> str | None:
    """Return why an environment cannot be made in a folder on this machine; None if it can.

    Args:
        disk_gib: free space needed there; 0: not checked.
    """
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        oldest, newest = (".".join(map(str, version)) for version in PYTHONS)
        present = platform.python_version()
        return f"Python {oldest} to {newest} is needed, {present} found. Type: make setup PYTHON=python{oldest}"
    if importlib.util.find_spec("ensurepip") is None:
        return f"this Python comes without ensurepip. Type: apt-get install python3.{sys.version_info.minor}-venv"
    libc, version = platform.libc_ver()
    if (platform.system(), platform.machine(), libc) != ("Linux", "x86_64", "glibc") or _numbers(version) < GLIBC:
        wanted, present = ".".join(map(str, GLIBC)), f"{platform.system()} {platform.machine()} with {libc} {version}"
        return f"the locked packages are built for x86-64 Linux with glibc {wanted} or newer, and this is {present}."
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free / 2**30
    if free < disk_gib:
        return f"setting up takes {disk_gib} GiB of disk, and {free:.1f} are free in {place}. Make room there."
    return None


def why_too_little_memory(memory_gib: float, purpose: str) -> str | None:
    """Return why memory is too short; None if it suffices."""
    available = available_memory_gib()
    if available >= memory_gib:
        return None
    return (
        f"{purpose}: {memory_gib:g} GiB of memory are needed, and {available:.1f} available. Stop other programs first."
    )


def available_memory_gib(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the available memory: the machine's, or less in a container with a limit."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) / 2**20
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, (int(limit.read_text()) - int(used.read_text())) / 2**30)
    return available


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
