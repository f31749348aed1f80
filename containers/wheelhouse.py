"""Downloads the wheels of a container image; for a machine that has torch, in pieces, with a script that installs them.

Standard library and pip only, because this needs no setup.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from engine import Mistake
from local_image import hash_file
from targets import HERE, Target, read_entries

ROOT = Path(__file__).resolve().parents[1]
_MIB = 2**20
_PIP_S = 7200
_PRESENT = ("torch", "torchvision")  # on the other machine, with their dependencies
_LOCKED_PYTHON = "3.11"  # for which the locks of container images are resolved
_EVERY_PYTHON = HERE / "dev.lock"  # resolved for all supported ones, with markers
_GLIBC = (28, 27, 26, 24, 17, 12, 5)  # wheels' oldest systems, as pip names them: manylinux_2_28 ...
_INSTALL = """\
#!/bin/sh
# Joins the pieces in this folder and installs their wheels for ${{PYTHON:-python3}}, which has torch:
#     sh install.sh [options of pip install, such as --target FOLDER]
set -eu
cd "$(dirname "$0")"
python=${{PYTHON:-python3}}
"$python" - <<'EOF'
import sys
if sys.version_info[:2] != {version}:
    found = sys.version.split()[0]
    sys.exit(f"{name}: for Python {python}, and this is {{found}}. Name another: PYTHON=python{python} sh install.sh")
try:
    import torch, torchvision
except ImportError as error:
    sys.exit(f"torch and torchvision are not in these pieces, and must be here: {{error}}")
EOF
sha256sum --check --quiet SHA256SUMS
cat {name}.tar.* | tar -x
exec "$python" -m pip install --no-index --no-deps "$@" {name}/*.whl
"""


def download_wheels(target: Target, out: Path, *, python: str, environ: Mapping[str, str]) -> None:
    """Download each wheel of a target's lock and of the tests' tools into a folder; build what exists as source only.

    Args:
        python: the version they are for, such as "3.12"; "": this interpreter's.

    Raises:
        Mistake: a source distribution makes wheels of this interpreter only, or a requirement is not in the lock.
        subprocess.CalledProcessError: pip failed, and printed the reason.
    """
    for lock in (_read_lock_for(target, python), (HERE / "tests.lock").read_text(encoding="utf-8")):
        _download(lock, out, python, environ)
    refuse_incomplete(out, python=python or _own_version(), present=())


def make_pieces(target: Target, out: Path, *, python: str, piece_mib: int, environ: Mapping[str, str]) -> Path:
    """Write the packages that a machine with torch lacks, for use without network, in files of at most `piece_mib` MiB.

    The wheels are those of the lock without torch, torchvision and their dependencies, and this checkout's own.

    Returns:
        the script in `out` that joins and installs them.

    Raises:
        Mistake: `out` is not empty, or as `download_wheels`.
    """
    if out.is_dir() and any(out.iterdir()):
        raise Mistake(f"{out}: is not empty, and pieces of another time would be joined with these. Name a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    python = python or _own_version()
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=out) as folder:
        wheels = Path(folder) / f"trainyard-{target.name}-py{python.replace('.', '')}"
        lock = _read_lock_for(target, python)
        kept = drop_packages(lock, _PRESENT)
        _download(kept, wheels, python, environ)
        _build_own_wheel(wheels, Path(folder) / "checkout", environ)
        refuse_incomplete(wheels, python=python, present=dict(read_entries(lock)).keys() - dict(read_entries(kept)))
        return pack_wheels(wheels, out, python=python, piece_bytes=piece_mib * _MIB)


def pack_wheels(wheels: Path, out: Path, *, python: str, piece_bytes: int) -> Path:
    """Write a folder of wheels as pieces, their hashes, and a script that checks, joins and installs them."""
    name = wheels.name
    archive = wheels.with_name(f"{name}.tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(wheels, arcname=name)
    pieces = split_file(archive, out, piece_bytes)
    archive.unlink()
    sums = "".join(f"{hash_file(piece)}  {piece.name}\n" for piece in pieces)
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    version = tuple(int(part) for part in python.split("."))
    script = out / "install.sh"
    script.write_text(_INSTALL.format(name=name, python=python, version=version), encoding="utf-8")
    return script


def drop_packages(lock: str, names: Sequence[str]) -> str:
    """Return a lock without some packages and without what only they need.

    pip-tools and uv write under each entry which packages need it ("# via").
    """
    entries = dict(read_entries(lock))
    dropped = set(names) & entries.keys()
    while True:
        more = {name for name, entry in entries.items() if (needed := _read_via(entry)) and needed <= dropped} - dropped
        if not more:
            return "".join(entry for name, entry in entries.items() if name not in dropped)
        dropped |= more


def add_packages_for(python: str, lock: str, every_python: str) -> str:
    """Return a lock with the further requirements of its packages on a Python for which it was not resolved.

    Without markers, which pip compares with the interpreter that it runs on.

    Args:
        lock: resolved for `_LOCKED_PYTHON`.
        every_python: resolved for all supported ones, with markers.
    """
    from pip._vendor.packaging.markers import Marker  # here, because building a container image needs no pip

    names = dict(read_entries(lock)).keys()
    for name, entry in read_entries(every_python):
        _, _, marker = entry.partition("\n")[0].removesuffix("\\").partition(" ; ")
        if marker and name not in names and names & _read_via(entry):
            rule = Marker(marker)
            if rule.evaluate(_describe_python(python)) and not rule.evaluate(_describe_python(_LOCKED_PYTHON)):
                lock += entry.replace(f" ; {marker}", " ", 1)
    return lock


def refuse_incomplete(wheels: Path, *, python: str, present: Collection[str]) -> None:
    """Check that wheels have among them all that they need: they are installed without looking at that.

    Args:
        present: packages that the other machine has, with all that only they need.

    Raises:
        Mistake: something is missing, or of a version that a wheel does not take; names all of it.
    """
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    metadata = [HeaderParser().parsestr(_read_metadata(wheel)) for wheel in sorted(wheels.glob("*.whl"))]
    versions = {canonicalize_name(about["Name"]): about["Version"] for about in metadata}
    missing = []
    for about in metadata:
        for needed in map(Requirement, about.get_all("Requires-Dist", [])):
            name = canonicalize_name(needed.name)
            if name in present or (needed.marker and not needed.marker.evaluate(_describe_python(python))):
                continue
            if name not in versions or not needed.specifier.contains(versions[name], prereleases=True):
                missing.append(f"{about['Name']} needs {needed.name}{needed.specifier}")
    if missing:
        raise Mistake(
            f"On Python {python}, {'; '.join(missing)}, which the lock does not have. Resolve the locks again, commit "
            "them, and repeat this: make lock"
        )


def split_file(path: Path, into: Path, most_bytes: int) -> list[Path]:
    """Cut a file into numbered ones of at most `most_bytes`; `cat NAME.*` joins them."""
    pieces: list[Path] = []
    with path.open("rb") as file:
        while part := file.read(most_bytes):
            pieces.append(into / f"{path.name}.{len(pieces):03}")
            pieces[-1].write_bytes(part)
    return pieces


def _read_via(entry: str) -> set[str]:
    """Return what needs an entry, such as {"torch", "-r runtime.txt"}."""
    comment = entry.partition("# via")[2]
    return {line.strip(" #\t") for line in comment.splitlines()} - {""}


def _download(lock: str, out: Path, python: str, environ: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(lock, encoding="utf-8")
        _pip(
            ["download", "--no-deps", "--require-hashes", *_describe_machine(python), "--dest", str(out)]
            + ["--requirement", str(requirements)],
            environ,
        )
        for source in sorted(path for path in out.iterdir() if path.suffix != ".whl"):
            built = Path(folder) / source.name
            _pip(["wheel", "--no-deps", "--wheel-dir", str(built), str(source)], environ)
            for wheel in built.iterdir():
                if python and not wheel.name.endswith("-py3-none-any.whl") and python != _own_version():
                    raise Mistake(
                        f"{source.name}: exists as source only, and builds for this Python ({_own_version()}) alone. "
                        f"Run this with Python {python}."
                    )
                shutil.move(wheel, out / wheel.name)
            source.unlink()


def _build_own_wheel(out: Path, copy: Path, environ: Mapping[str, str]) -> None:
    """Build this checkout's wheel, from a copy: setuptools writes into the folder that it builds from."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    _pip(["wheel", "--no-deps", "--wheel-dir", str(out), str(copy)], environ)


def _read_lock_for(target: Target, python: str) -> str:
    lock, every_python = (path.read_text(encoding="utf-8") for path in (target.lock, _EVERY_PYTHON))
    return add_packages_for(python or _own_version(), lock, every_python)


def _read_metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return archive.read(name).decode("utf-8")


def _describe_python(python: str) -> dict[str, str]:
    """Return what markers may ask about: this version of CPython on x86-64 Linux, without extras."""
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
    own = {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
    return {"python_version": python, "python_full_version": f"{python}.0", **system, **own}


def _describe_machine(python: str) -> list[str]:
    """Return pip's options for wheels of x86-64 Linux and another version of Python."""
    if not python:
        return []
    tags = [f"manylinux_2_{number}_x86_64" for number in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    return ["--python-version", python, "--implementation", "cp", *platforms]


def _own_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _pip(words: Sequence[str], environ: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, timeout=_PIP_S, env=dict(environ))
