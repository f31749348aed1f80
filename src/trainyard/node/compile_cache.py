"""Decides where torch.compile keeps its code. Loads no torch."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from trainyard.choice import Choice
from trainyard.environment import describe_cpu
from trainyard.errors import UserError
from trainyard.files import make_own_folder

CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

_SCRATCH = "TRAINYARD_SCRATCH"


def choose_cache(environ: Mapping[str, str], *, card: str | None, torch_version: str, attempt: str) -> Choice[Path]:
    """Return the folder in which torch.compile keeps its code for later attempts and runs, and the reason.

    Its content is executed, so only this user can write to it, and no run folder decides where it is. Each
    card, torch and Python has its own; without a card each kind of CPU, whose vector instructions the code uses.

    Args:
        card: its name; None: the CPU.
        attempt: `read_attempt_id`.

    Raises:
        UserError: others can write to it, it cannot be created, or it is mounted noexec.
    """
    if stated := environ.get(CACHE_VARIABLES[0]):
        return Choice(_make_folder(Path(stated)), f"{CACHE_VARIABLES[0]} in the environment")
    if fault := _explain_unusable_scratch(environ.get(_SCRATCH), attempt):
        base, reason = _make_user_cache(environ), f"in this user's cache: {fault}"
    else:
        base, reason = make_own_folder(Path(environ[_SCRATCH]) / f"trainyard-{os.getuid()}"), f"in {_SCRATCH}"
    device = card or f"cpu {describe_cpu(Path('/proc/cpuinfo').read_text())}"
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    name = re.sub(r"[^a-z0-9.+]+", "-", f"{device} torch-{torch_version} {python}".lower()).strip("-")
    return Choice(_make_folder(make_own_folder(base / "compiled") / name), reason)


def _make_folder(path: Path) -> Path:
    """Return a folder that only this user can write to, created if missing, on a file system that runs code."""
    if os.statvfs(make_own_folder(path)).f_flag & os.ST_NOEXEC:
        raise UserError(
            f"{path}: compiled code is kept here, and the system runs no code from there (noexec). Mount it with exec, "
            f"such as docker run --tmpfs /tmp:exec, name another folder (export {CACHE_VARIABLES[0]}=FOLDER), or train "
            "with compile=off."
        )
    return path


def _explain_unusable_scratch(scratch: str | None, attempt: str) -> str:
    """Return why compiled code cannot be kept on scratch; "" if it can."""
    slurm_job_id = attempt.partition("-")[0]
    if scratch is None:
        return f"no {_SCRATCH}"
    if not Path(scratch).is_absolute() or not Path(scratch).is_dir():
        return f"{_SCRATCH} is '{scratch}', which is not a folder here"
    if slurm_job_id.isdigit() and re.search(rf"(?<!\d){slurm_job_id}(?!\d)", scratch):
        return f"{scratch} ends with this Slurm job"
    return ""


def _make_user_cache(environ: Mapping[str, str]) -> Path:
    """Return Trainyard's folder in the user's cache, created if missing."""
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: there is no place for compiled code: {error.strerror}. Name a folder that only you can write "
            f"to: export {CACHE_VARIABLES[0]}=$(mktemp -d)"
        ) from None
    return folder
