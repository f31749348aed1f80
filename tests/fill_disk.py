"""Runs a job on a disk that fills up at a chosen moment, and again after room is made; for a process of its own.

It mounts small disks in a mount namespace that ends with the process. That needs root, or a user namespace.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.training import FAMILIES, find_differences, load_state, read_run_metrics
from trainyard.cli import main
from trainyard.config.compose import load_config

PARTS = {
    "lock": (r"/\.lock\.\w+$|/lock$", 0),
    "config": (r"^\.config\.yaml\.", 0),
    "heartbeat": (r"^\.heartbeat\.json\.", 0),
    "metrics": (r"/metrics\.jsonl$", 1),  # one page is left for events.jsonl
    "log": (r"/it/log$", 0),
    "checkpoint": (r"/\.step-\d+\.ckpt\..*partial$", 1),
    "report": (r"^\.report\.html\.", 0),
    "pack": (r"/\.stripes-(?!synthetic)[\w-]+\.guard$", 2),
    "index": (r"^\.index\.h5\.", 0),
    "tracker": (r"/events\.out\.tfevents[^/]*$", 0),
}
"""The file whose opening for writing fills the disk, and how many pages of 4 KiB stay free then.

What is written atomically is opened by its name in an open folder.
"""

OPTIONS = ["--name", "it", "--jobs", str(FAMILIES), "max_duration=2ep", "checkpoint.every=3st", "data.decode=cpu"]


PACKING = ("pack", "index")
"""Parts whose disk also holds the data; the others read data that are packed already."""


class Ballast:
    """A file that fills a disk when a certain file is opened for writing. The real disk, no mocks."""

    def __init__(self) -> None:
        self._pattern: re.Pattern[str] | None = None
        self._path, self._pages = Path(), 0
        sys.addaudithook(self._watch)

    def arm(self, path: Path, pattern: str, pages: int) -> None:
        self._path, self._pattern, self._pages = path, re.compile(pattern), pages

    def remove(self) -> bool:
        """Make room again; return whether the disk was filled."""
        filled = self._pattern is None
        self._pattern = None
        self._path.unlink(missing_ok=True)
        return filled

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self._pattern is None or isinstance(arguments[0], int):
            return
        if arguments[2] & (os.O_WRONLY | os.O_RDWR) and self._pattern.search(os.fsdecode(arguments[0])):
            self._pattern = None
            disk = os.statvfs(self._path.parent)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(descriptor, 0, disk.f_bavail * disk.f_bsize - self._pages * 4096)
            os.close(descriptor)


@contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """Collect what is written to file descriptor 2, by whatever means, into a list of one text."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said.append(file.read())


def run_part(part: str, disk: Path, whole: Path, ballast: Ballast) -> dict[str, Any]:
    """Run the job twice with the same words: on a disk that fills up, and after room was made."""
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    words = ["run", "stripes", *OPTIONS, "--runs", str(disk / "runs")]
    words += [f"data.cache={disk / 'cache'}"] if part in PACKING else [f"data.path={read_data_path(whole)}"]
    words += ["trackers=[tensorboard]"] if part == "tracker" else []
    ballast.arm(disk / "ballast", *PARTS[part])
    with capture_stderr() as said:
        code = main(words)
    filled = ballast.remove()
    with capture_stderr() as said_again:
        again = main(words)
    run = disk / "runs" / "stripes" / "it"
    left = sorted(path.name for path in run.iterdir() if path.name.startswith(".") or path.name == "lock")
    return {
        "part": part,
        "filled": filled,
        "code": code,
        "said": said[0],
        "again": again,
        "said_again": said_again[0],
        "differences": find_differences(load_state(whole), load_state(run)),
        "same_metrics": read_run_metrics(whole) == read_run_metrics(run),
        "left": left,
    }


def read_data_path(run: Path) -> str:
    return load_config(run / "config.yaml", FAMILIES).data.path


def run_parts(root: Path, parts: Sequence[str]) -> int:
    """Run each part; print one JSON object for each, after the word "result:". Returns NO_MOUNT if mounting fails."""
    root.mkdir()
    try:
        enter_mount_namespace()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(error)
        return NO_MOUNT
    whole, ballast = root / "runs" / "stripes" / "it", Ballast()
    assert main(["run", "stripes", *OPTIONS, "--runs", str(root / "runs"), f"data.cache={root / 'cache'}"]) == 0
    for part in parts:
        print("result:", json.dumps(run_part(part, root / part, whole, ballast)), flush=True)
    return 0


NO_MOUNT = 77
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 1 << 18  # sched.h, mount.h


def enter_mount_namespace() -> None:
    """Give this process its own mounts; who is not root becomes root of a user namespace."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount")
