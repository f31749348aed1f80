"""Make or update a Python environment from a hash-locked list; behind `make setup`.

    python3.11 containers/make_venv.py .venv containers/dev.lock --editable .

Checks the machine's requirements before it downloads anything. Of several callers one works and the others wait. A
killed call leaves nothing that the next one would build on.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH, set in container images, leaves it out

from machine import why_no_environment
from once import hold_lock

DONE = ".done"  # file in the environment: digest of the lock it was made from
DISK_GIB = 10  # 6.1 for packages, the rest for pip's downloads


def main(arguments: Sequence[str]) -> int:
    """Make the environment; return 0, or 2 after printing the missing requirement."""
    parser = argparse.ArgumentParser(prog="containers/make_venv.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the environment")
    parser.add_argument("lock", type=Path, help="requirements with hashes")
    parser.add_argument("--editable", type=Path, metavar="CHECKOUT", help="also install this project, editable")
    args = parser.parse_args(arguments)
    folder = args.folder.absolute()
    wanted = _digest(args.lock, args.editable)
    done = folder / DONE
    with hold_lock(folder.with_name(f"{folder.name}.lock"), doing=f"setting up {args.folder}") as lock:
        if done.is_file() and done.read_text() == wanted:
            done.touch()  # make compares times only
            return 0
        if lack := why_no_environment(folder, disk_gib=0 if done.is_file() else DISK_GIB):
            print(f"{args.folder}: {lack}", file=sys.stderr)
            return 2
        if done.is_file():
            done.unlink()
        else:
            venv.create(folder, clear=True, symlinks=True, with_pip=True)
        for words in _list_installs(args.lock, args.editable):
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *words]
            code = subprocess.run(command, pass_fds=(lock,)).returncode
            if code:
                return code
        partial = folder / f"{DONE}.partial"
        partial.write_text(wanted)
        partial.replace(done)
    return 0


def _list_installs(lock: Path, checkout: Path | None) -> list[list[str]]:
    locked = ["--quiet", "--progress-bar", "on", "--require-hashes", "-r", str(lock)]
    own = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", str(checkout)]
    return [locked, own] if checkout else [locked]


def _digest(lock: Path, checkout: Path | None) -> str:
    parts = [lock, *([checkout / "pyproject.toml"] if checkout else [])]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()


if __name__ == "__main__":
    # pip needs none of the user's own modules.
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main(sys.argv[1:]))
