"""Make or update a Python environment from a hash-locked list; `make setup` and `make bench-peers` come here.

    python3.11 containers/make_venv.py .venv containers/dev.lock --editable .

What this machine lacks is said in one sentence before anything is fetched. Several callers at once: one works, the
others wait. One that was killed leaves nothing that the next would build upon.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from machine import why_no_environment
from once import hold_lock

DONE = ".done"  # in the environment: which lock it was made from
DISK_GIB = 10  # 6.1 of packages, and pip's downloads until they are unpacked


def main(arguments: Sequence[str]) -> int:
    """Do it; return 0, or 2 where this machine lacks something, which is printed."""
    parser = argparse.ArgumentParser(prog="containers/make_venv.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("lock", type=Path, help="requirements with hashes")
    parser.add_argument("--editable", type=Path, metavar="CHECKOUT", help="install this project, too, as it is")
    args = parser.parse_args(arguments)
    folder = args.folder.absolute()
    wanted = _digest(args.lock, args.editable)
    done = folder / DONE
    with hold_lock(folder.with_name(f"{folder.name}.lock"), doing=f"setting up {args.folder}") as lock:
        if done.is_file() and done.read_text() == wanted:
            done.touch()  # newer than the lock, which is all that make looks at
            return 0
        if lack := why_no_environment(folder, disk_gib=0 if done.is_file() else DISK_GIB):
            print(f"{args.folder}: {lack}", file=sys.stderr)
            return 2
        if done.is_file():
            done.unlink()
        else:
            venv.create(folder, clear=True, symlinks=True, with_pip=True)
        for words in _installs(args.lock, args.editable):
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *words]
            code = subprocess.run(command, pass_fds=(lock,)).returncode
            if code:
                return code
        partial = folder / f"{DONE}.partial"
        partial.write_text(wanted)
        partial.replace(done)
    return 0


def _installs(lock: Path, checkout: Path | None) -> list[list[str]]:
    locked = ["--quiet", "--progress-bar", "on", "--require-hashes", "-r", str(lock)]
    own = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", str(checkout)]
    return [locked, own] if checkout else [locked]


def _digest(lock: Path, checkout: Path | None) -> str:
    parts = [lock, *([checkout / "pyproject.toml"] if checkout else [])]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()


if __name__ == "__main__":
    # pip talks to nobody but its index: a person's PYTHONPATH is for their own code.
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main(sys.argv[1:]))
