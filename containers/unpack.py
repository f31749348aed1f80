"""Unpacks Apptainer from Debian's packages into the user's cache folder, for machines without one.

`containers/apptainer` runs it. Needs root, which alone may make the mounts.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from engine import Absent, cache_folder
from once import make_folder_once

PACKAGES = "apptainer,squashfuse,fuse-overlayfs,uidmap,tzdata"
_INSTALL = "https://apptainer.org/docs/admin/latest/installation.html"
_HERE = Path(__file__).resolve().parent
_UNPACK_S = 1800


def provide_apptainer(environ: Mapping[str, str]) -> Path:
    """Return the installed Apptainer, else the folder of the unpacked one; unpack it if missing.

    Safe to call from several processes at once: one unpacks, the others wait.

    Raises:
        Absent: none is installed, and none can be unpacked here.
    """
    # This folder contains a script named apptainer.
    places = [place for place in environ.get("PATH", "").split(os.pathsep) if Path(place).resolve() != _HERE]
    for name in ("apptainer", "singularity"):
        if installed := shutil.which(name, path=os.pathsep.join(places)):
            return Path(installed)
    if os.getuid() != 0:
        raise Absent(f"Apptainer is not installed, and only root can unpack one here. Install it: {_INSTALL}")
    folder = cache_folder(environ) / "apptainer"
    if not folder.exists() and shutil.which("mmdebstrap", path=environ.get("PATH")) is None:
        raise Absent(
            "Apptainer is not installed, and neither is mmdebstrap, to unpack one: apt-get install mmdebstrap. Or "
            f"install Apptainer itself: {_INSTALL}"
        )

    def unpack(partial: Path, lock: int) -> None:
        # sid is never released, so its expiry date is meaningless here.
        options = ['--aptopt=Apt::Install-Recommends "false"', '--aptopt=Acquire::Check-Valid-Until "false"']
        mirror = environ.get("DEBIAN_MIRROR")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", *options]
        command += ["sid", str(partial), *([f"{mirror}/debian"] if mirror else [])]
        partial.chmod(0o755)
        subprocess.run(command, check=True, timeout=_UNPACK_S, env=dict(environ), pass_fds=(lock,))
        for name in ("subuid", "subgid"):
            (partial / "etc" / name).write_text("root:0:65536\n")
        (partial / "etc" / "localtime").touch()

    try:
        make_folder_once(folder, unpack, doing="unpacking Apptainer")
    except subprocess.CalledProcessError as error:
        raise Absent(
            f"Apptainer is not installed, and mmdebstrap could not unpack Debian's packages of it (code "
            f"{error.returncode}; its output is above). Install it: {_INSTALL}"
        ) from None
    return folder
