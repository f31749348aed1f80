"""The base of the container images: Debian from a registry, or built from Debian's packages where none answers."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine import Absent, Engine

_HERE = Path(__file__).resolve().parent
_, _, PUBLIC_BASE = (_HERE.parent / "Dockerfile").read_text().partition("\nARG BASE_IMAGE=")
PUBLIC_BASE = PUBLIC_BASE.partition("\n")[0]
OWN_BASE = "localhost/trainyard-base:bookworm"
PACKAGES = _HERE / "debian.txt"
_MAKE_S, _PULL_S = 1800, 120


def base_image(engine: Engine, environ: Mapping[str, str]) -> str:
    """Return the base: BASE_IMAGE, else Debian from a registry, else our own from Debian's packages."""
    if wanted := environ.get("BASE_IMAGE"):
        return wanted
    if engine.has(PUBLIC_BASE):
        return PUBLIC_BASE
    if engine.has(OWN_BASE):
        return OWN_BASE
    try:
        answer = engine.query("pull", "--quiet", PUBLIC_BASE, timeout_s=_PULL_S)
        reason = answer.stderr.strip().splitlines()[-1:] if answer.returncode else None
    except subprocess.TimeoutExpired:
        reason = [f"no answer in {_PULL_S} s"]
    if reason is None:
        return PUBLIC_BASE
    print(f"{PUBLIC_BASE} cannot be pulled ({' '.join(reason)}): building a base from Debian's packages.")
    make_base(engine, environ)
    return OWN_BASE


def make_base(engine: Engine, environ: Mapping[str, str]) -> None:
    """Build OWN_BASE: Debian bookworm with the packages of debian.txt. DEBIAN_MIRROR names another mirror."""
    if shutil.which("mmdebstrap", path=environ.get("PATH")) is None:
        raise Absent(
            f"No base image: {PUBLIC_BASE} cannot be pulled, and mmdebstrap is not installed. Install it (apt-get "
            "install mmdebstrap), or name a local container image: BASE_IMAGE=name make image"
        )
    unwanted = [f"--dpkgopt=path-exclude=/usr/share/{what}/*" for what in ("doc", "man", "locale", "info")]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES.read_text().split())}"]
    command += ['--aptopt=Apt::Install-Recommends "false"', *unwanted, "--dpkgopt=path-include=*/copyright"]
    mirror = environ.get("DEBIAN_MIRROR")  # without one, mmdebstrap uses Debian's own, with updates and security
    sources = [
        f"deb {mirror}/debian bookworm main",
        f"deb {mirror}/debian bookworm-updates main",
        f"deb {mirror}/debian-security bookworm-security main",
    ]
    with tempfile.TemporaryDirectory(prefix="trainyard-base-") as folder:
        tar = f"{folder}/base.tar"
        # Makes the build reproducible: the same packages give the same bytes.
        dated = {"SOURCE_DATE_EPOCH": "1735689600", **environ}
        subprocess.run(
            [*command, "bookworm", tar, *(sources if mirror else [])], check=True, timeout=_MAKE_S, env=dated
        )
        engine.run("import", "--change", 'CMD ["bash"]', tar, OWN_BASE, timeout_s=_MAKE_S)
