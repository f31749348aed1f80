"""Reads the names and manifests of checkpoints. Loads no torch.

train/checkpoint.py writes and documents them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import FormatError, UserError
from trainyard.files import CHECKPOINT, check_format, load_json, open_untrusted, raise_failed_disk

DATA_NAME = re.compile(r"step-([0-9]+)(?:-([0-9]+))?\.ckpt")
MOST = 2**63
"""Steps, sizes and counts are below this; torch cannot represent more."""

_MOST_BYTES = 16 * 2**20  # of a manifest, which has a few thousand


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or found."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a directory, as its file name and its manifest describe it."""

    path: Path
    step: int
    bytes: int  # of the data file on disk
    meta: Mapping[str, Any]  # added by the caller of `save`; empty if the manifest is damaged
    sha256: str  # of the data file, as saved; empty if the manifest is damaged
    problem: str | None  # a fault found without reading the data; `verify` also reads the data
    error: OSError | None = None  # of reading the manifest


def list_checkpoints(directory: Path) -> list[Entry]:
    """List the checkpoints of a directory, including damaged ones, newest step first. Reads manifests only.

    Raises:
        FormatError: one is of another format.
    """
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if DATA_NAME.fullmatch(path.name)]
    return [read_entry(path) for path in sorted(paths, key=parse_name, reverse=True)]


def select_checkpoint(entries: Sequence[Entry]) -> Entry:
    """Return the checkpoint whose weights are the run's result: the finished average, else the best, else the newest.

    Args:
        found: what `list_checkpoints` returns; not empty. Damaged manifests say nothing; data are not read.
    """
    intact = [entry for entry in entries if entry.problem is None] or entries
    step = find_result_step(entries)
    return next((entry for entry in intact if entry.step == step), intact[0])


def find_result_step(entries: Sequence[Entry]) -> int | None:
    """Return the step whose weights are the run's result, as the newest intact manifest says; None without one."""
    newest = next((entry for entry in entries if entry.problem is None), None)
    if newest is None:
        return None
    return newest.step if newest.meta.get("swa") or not newest.meta.get("best") else int(newest.meta["best"]["step"])


def verify(entry: Entry) -> str | None:
    """Read the whole data file and return the checkpoint's fault, None if it is as it was saved.

    Raises:
        OSError: the disk failed, which says nothing about the checkpoint.
    """
    if entry.problem:
        if entry.error is not None:
            raise_failed_disk(entry.error, entry.path)
        return entry.problem
    try:
        with open_untrusted(entry.path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise_failed_disk(error, entry.path)
        return f"the data file cannot be read: {error.strerror}"
    return None if digest == entry.sha256 else f"SHA-256 is {digest[:12]}.., the manifest says {entry.sha256[:12]}.."


def hash_fields(fields: Mapping[str, Any]) -> str:
    """Hash a JSON object by its content: a flipped bit may well leave valid JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_entry(path: Path) -> Entry:
    """Describe the checkpoint whose data file `path` is.

    Raises:
        FormatError: it is of another format.
    """
    step, size, failed = parse_name(path)[0], 0, None
    try:
        if path.is_symlink():
            open_untrusted(path)  # raises
        size = path.stat().st_size
        manifest = load_json(path.with_suffix(".json"), most_bytes=_MOST_BYTES)
        problem = _check_manifest(manifest, path, step=step, size=size)
        if problem is None:
            open_untrusted(path).close()
    except OSError as error:
        failed, problem = error, f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        problem = f"the manifest is damaged: {error}"
    if problem:
        return Entry(path, step, size, {}, "", problem, failed)
    return Entry(path, step, size, manifest["meta"], manifest["sha256"], None)


def _check_manifest(manifest: Any, path: Path, *, step: int, size: int) -> str | None:
    if not isinstance(manifest, dict):
        return "the manifest is damaged: not a JSON object"
    if manifest.pop("self_sha256", None) != hash_fields(manifest):
        return "the manifest is damaged: its own SHA-256 does not match"
    check_format(path, manifest.get("format"), kind=CHECKPOINT)
    for name, kind in (("step", int), ("bytes", int), ("sha256", str), ("meta", dict)):
        if type(manifest.get(name)) is not kind:
            return f"the manifest has no valid '{name}': expected {kind.__name__}, found {_show(manifest.get(name))}"
    if manifest["step"] != step:
        return f"renamed: the manifest is of step {str(manifest['step'])[:20]}"
    if step >= MOST:
        return "no run has so many steps"
    if manifest["bytes"] != size:
        return f"the data file has {size} bytes, the manifest says {str(manifest['bytes'])[:20]}"
    best = manifest["meta"].get("best")
    if best is not None and not (isinstance(best, dict) and type(best.get("step")) is int):
        return f"the manifest has no valid 'best': expected an object with a step, found {_show(best)}"
    return None


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)[:40]


def format_name(step: int, revision: int) -> str:
    """Return the name of a data file."""
    return f"step-{step:09d}" + (f"-{revision}" if revision else "") + ".ckpt"


def parse_name(path: Path) -> tuple[int, int]:
    """Return (step, revision) of a data file's path; a later save of the same step has a higher revision."""
    match = DATA_NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)
