"""A bundle for machines without network: container image, code, data, bill of materials and file hashes in one tar.

`make_bundle` writes it; `verify_bundle` unpacks it, checks every file's hash and trains a few steps offline.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import Engine, Mistake, find_engine
from local_image import SEALED, format_tag, hash_file
from targets import Target

ROOT = Path(__file__).resolve().parents[1]
APPTAINER = ROOT / "containers" / "apptainer"
CODE = (
    "src",
    "jobs",
    "slurm",
    "containers",
    "Dockerfile",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
)
MANIFEST, SBOM, SIF, ARCHIVE = "manifest.json", "sbom.json", "image.sif", "image.tar"
TRIAL = (
    "fingerprint_demo",
    "data.synthetic=240",
    "max_duration=4st",
    "eval_every=4st",
    "evaluation.bootstrap_draws=20",
)
"""A job that proves that training works, in a minute on two cores."""

_TRIAL_S, _COPY_S = 1800, 3600


def make_bundle(target: Target, out: Path, *, engine: Engine, sif: Path | None, wheels: Path | None) -> None:
    """Write a bundle.

    Args:
        sif: bundled instead of the engine's container image, for machines with Apptainer.
        wheels: folder of wheels, to rebuild the container image on the other machine.
    """
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out.parent) as name:
        folder = Path(name)
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".slurm-lab")
        for part in CODE:
            source, copy = ROOT / part, folder / "code" / part
            copy.parent.mkdir(exist_ok=True)
            shutil.copytree(source, copy, ignore=unwanted) if source.is_dir() else shutil.copy(source, copy)
        if wheels:
            shutil.copytree(wheels, folder / "wheels", copy_function=os.link)
        cache = folder / "made"
        cache.mkdir()
        _train(_container_command(engine, format_tag(target), folder), folder, engine.environ, f"data.cache={cache}")
        next(cache.glob("*/index.h5")).parent.rename(folder / "data")
        for unneeded in (cache, folder / "runs"):
            shutil.rmtree(unneeded)
        printed = ["run", "--rm", *SEALED, "--entrypoint", "cat", format_tag(target), f"/opt/trainyard/{SBOM}"]
        (folder / SBOM).write_text(engine.query(*printed).stdout)
        if sif:
            shutil.copy(sif, folder / SIF)
        else:
            engine.run("save", "--output", str(folder / ARCHIVE), format_tag(target), timeout_s=_COPY_S)
        _seal(target, folder)
        aside = folder / "bundle.tar"
        with tarfile.open(aside, "w") as tar:
            for path in sorted(folder.iterdir()):
                if path != aside:
                    tar.add(path, path.name)
        aside.replace(out)


def verify_bundle(bundle: Path, environ: Mapping[str, str]) -> None:
    """Unpack a bundle next to itself, check each file's hash, train with the network off, and clean up.

    Raises:
        Mistake: names the files that differ, are missing, or do not belong.
        Absent: this machine cannot run the container image.
    """
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=bundle.resolve().parent) as name:
        folder = Path(name)
        manifest = _unpack(bundle, folder)
        if wrong := list(_differences(folder, manifest["files"])):
            raise Mistake(f"{bundle}: differs from its list of hashes: {'; '.join(wrong)}. Copy it again.")
        print(f"{len(manifest['files'])} files match their hashes. Training without network:", flush=True)
        if (folder / SIF).exists():
            _train(_sif_command(folder), folder, environ, f"data.path={folder}/data")
        else:
            engine = find_engine(environ)
            engine.run("load", "--input", str(folder / ARCHIVE), timeout_s=_COPY_S)
            _train(
                _container_command(engine, manifest["image"], folder),
                folder,
                engine.environ,
                f"data.path={folder}/data",
            )


def _seal(target: Target, folder: Path) -> None:
    files = {str(path.relative_to(folder)): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {"image": format_tag(target), "target": target.name, "min_driver": target.min_driver, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": _digest(manifest)}, indent=1) + "\n")


def _unpack(bundle: Path, folder: Path) -> dict[str, Any]:
    """Unpack a bundle, check the hash of its manifest and return it."""
    if not bundle.is_file():
        raise Mistake(f"{bundle}: no such file. Make one: make bundle HW=cpu OUT={bundle}")
    try:
        with tarfile.open(bundle, "r:") as tar:  # not compressed: it cannot unpack to more than its own size
            _refuse_strange_members(bundle, tar)
            _extract_files(tar, folder)
    except (OSError, tarfile.TarError) as error:
        raise Mistake(f"{bundle}: cannot be unpacked: {error}. Copy it again.") from None
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        whole = manifest.pop("digest") == _digest(manifest) and _is_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise Mistake(f"{bundle}: differs from its list of hashes: {MANIFEST} was changed. Copy it again.")
    return manifest


def _extract_files(tar: tarfile.TarFile, folder: Path) -> None:
    """Write the files and folders of a tar, without its owners and times.

    `tarfile` filters members since Python 3.11.4 only, and Debian 12 has 3.11.2.
    """
    for member in tar.getmembers():
        path = folder / member.name
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = tar.extractfile(member)
        assert content is not None, "only files and folders are left"
        with content, path.open("xb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(member.mode & 0o755 | 0o600)  # nobody else writes to it


def _refuse_strange_members(bundle: Path, tar: tarfile.TarFile) -> None:
    """Raise for what `make_bundle` never writes: only files and folders, inside the bundle, each once.

    Raises:
        Mistake: names the member and its fault.
    """
    names: set[str] = set()
    size = bundle.stat().st_size
    for member in tar:
        parts = Path(member.name).parts
        wrong = (
            f"is a {_KINDS.get(member.type, 'special file')}"
            if not (member.isreg() or member.isdir()) or member.issparse()
            else "leads out of it"
            if member.name.startswith("/") or ".." in parts
            else "is there twice"
            if member.name in names
            else f"declares {member.size} bytes, more than the bundle has"
            if member.size > size
            else f"is larger than {_MOST_MANIFEST_BYTES} bytes"
            if member.name == MANIFEST and member.size > _MOST_MANIFEST_BYTES
            else ""
        )
        if wrong:
            raise Mistake(
                f"{bundle}: refused: '{member.name[:80]}' in it {wrong}. A bundle has only its own files and folders: "
                "find out who made it."
            )
        names.add(member.name)


_KINDS = {tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "link", tarfile.FIFOTYPE: "pipe", tarfile.CHRTYPE: "device"}
_MOST_MANIFEST_BYTES = 2**26


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    files, image = manifest["files"], manifest["image"]
    is_listing = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
    return is_listing and isinstance(image, str) and re.fullmatch(r"[a-z0-9][\w./:-]*", image) is not None


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _differences(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted(there | set(files)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in files:
            yield f"{name} does not belong there"
        elif hash_file(folder / name) != files[name]:
            yield f"{name} was changed"


def _train(image: Sequence[str], folder: Path, environ: Mapping[str, str], data: str) -> None:
    places = [data, "--runs", f"{folder}/runs", "--jobs", f"{folder}/code/jobs"]
    subprocess.run([*image, "trainyard", "run", *TRIAL, *places], check=True, timeout=_TRIAL_S, env=dict(environ))


def _container_command(engine: Engine, image: str, folder: Path) -> list[str]:
    words = ["run", "--rm", "--pull", "never", *SEALED, "--user", f"{os.getuid()}:{os.getgid()}", "--entrypoint", "env"]
    words += ["--volume", f"{folder}:{folder}", image, f"PYTHONPATH={folder}/code/src"]
    return [*engine.prefix, *words]


def _sif_command(folder: Path) -> list[str]:
    words = ["exec", "--containall", "--net", "--network", "none", "--bind", str(folder)]
    return [str(APPTAINER), *words, "--env", f"PYTHONPATH={folder}/code/src", str(folder / SIF)]
