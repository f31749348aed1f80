"""Result files: what was measured, on what, with what."""

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainyard.hardware import available_cores

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "pillow", "pycocotools", "trainyard")


def header(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line of a result file."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "kind": "header",
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "options": dict(options),
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}},
        "machine": {"cpu": _cpu(), "cores": available_cores(), "threads": torch.get_num_threads(), "gpu": gpu},
        "commit": _commit(),
    }


def new_file(folder: Path, name: str) -> Path:
    """Return `<name>-<date>.jsonl`, or with -1, -2, ... where that is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{datetime.now(UTC):%Y-%m-%d}"
    number = 0
    while (path := folder / f"{stem}{f'-{number}' if number else ''}.jsonl").exists():
        number += 1
    return path


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines of JSON."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown: no git here"
