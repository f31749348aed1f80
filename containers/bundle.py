"""A bundle: image, code, data, the bill of materials and a hash of each file in one tar, for places without network.

`make_bundle` writes it, `verify_bundle` unpacks it, compares every byte and trains a few steps with the network off.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from built import SEALED, digest_of, tag_of
from engine import Engine, Mistake, find_engine
from targets import Target, entries_of

ROOT = Path(__file__).resolve().parents[1]
APPTAINER = ROOT / "containers" / "apptainer"
CODE = (
    "src",
    "jobs",
    "slurm",
    "containers",
    "Dockerfile",
    "pyproject.toml",
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
"""A job and options that prove that training works, in a minute on two cores."""

_TRIAL_S, _COPY_S = 1800, 3600


def make_bundle(target: Target, out: Path, *, engine: Engine, sif: Path | None, wheels: Path | None) -> None:
    """Write a bundle.

    Args:
        sif: goes in instead of the engine's image, for places with Apptainer.
        wheels: what the image was built from, to build it again there.
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
        made = folder / "made"
        made.mkdir()
        _train(_in_image(engine, tag_of(target), folder), folder, engine.environ, f"data.cache={made}")
        next(made.glob("*/index.h5")).parent.rename(folder / "data")
        for unneeded in (made, folder / "runs"):
            shutil.rmtree(unneeded)
        debian = engine.ask("run", "--rm", *SEALED, "--entrypoint", "dpkg-query", tag_of(target), "--show").stdout
        (folder / SBOM).write_text(json.dumps(_bill(target, debian), indent=1) + "\n")
        if sif:
            shutil.copy(sif, folder / SIF)
        else:
            engine.run("save", "--output", str(folder / ARCHIVE), tag_of(target), timeout_s=_COPY_S)
        _seal(target, folder)
        aside = folder / "bundle.tar"
        with tarfile.open(aside, "w") as tar:
            for path in sorted(folder.iterdir()):
                if path != aside:
                    tar.add(path, path.name)
        aside.replace(out)


def verify_bundle(bundle: Path, environ: Mapping[str, str]) -> None:
    """Unpack a bundle beside itself, compare each file with its hash, train with the network off, and clean up.

    Raises:
        Mistake: names the files that differ, are missing, or are too many.
        Absent: this machine has nothing that runs the image.
    """
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=bundle.resolve().parent) as name:
        folder = Path(name)
        manifest = _unpack(bundle, folder)
        if wrong := list(_differences(folder, manifest["files"])):
            raise Mistake(f"{bundle}: is not what was bundled: {'; '.join(wrong)}. Copy it anew.")
        print(f"{len(manifest['files'])} files are as they were. Training without network:", flush=True)
        if (folder / SIF).exists():
            _train(_in_sif(folder), folder, environ, f"data.path={folder}/data")
        else:
            engine = find_engine(environ)
            engine.run("load", "--input", str(folder / ARCHIVE), timeout_s=_COPY_S)
            _train(_in_image(engine, manifest["image"], folder), folder, engine.environ, f"data.path={folder}/data")


def _seal(target: Target, folder: Path) -> None:
    files = {str(path.relative_to(folder)): digest_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {"image": tag_of(target), "target": target.name, "min_driver": target.min_driver, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": _digest(manifest)}, indent=1) + "\n")


def _unpack(bundle: Path, folder: Path) -> dict[str, Any]:
    """Unpack a bundle and return its manifest, which is whole."""
    if not bundle.is_file():
        raise Mistake(f"{bundle}: no such file. Make one: make bundle HW=cpu OUT={bundle}")
    try:
        with tarfile.open(bundle) as tar:
            tar.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise Mistake(f"{bundle}: cannot be unpacked: {error}. Copy it anew.") from None
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        whole = manifest.pop("digest") == _digest(manifest)
    except (OSError, ValueError, KeyError):
        whole = False
    if not whole:
        raise Mistake(f"{bundle}: is not what was bundled: {MANIFEST} was changed. Copy it anew.")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _differences(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted(there | set(files)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in files:
            yield f"{name} does not belong there"
        elif digest_of(folder / name) != files[name]:
            yield f"{name} was changed"


def _train(image: Sequence[str], folder: Path, environ: Mapping[str, str], data: str) -> None:
    places = [data, "--runs", f"{folder}/runs", "--jobs", f"{folder}/code/jobs"]
    subprocess.run([*image, "trainyard", "run", *TRIAL, *places], check=True, timeout=_TRIAL_S, env=dict(environ))


def _in_image(engine: Engine, image: str, folder: Path) -> list[str]:
    words = ["run", "--rm", "--pull", "never", *SEALED, "--user", f"{os.getuid()}:{os.getgid()}", "--entrypoint", "env"]
    words += ["--volume", f"{folder}:{folder}", image, f"PYTHONPATH={folder}/code/src"]
    return [*engine.prefix, *words]


def _in_sif(folder: Path) -> list[str]:
    words = ["exec", "--containall", "--net", "--network", "none", "--bind", str(folder)]
    return [str(APPTAINER), *words, "--env", f"PYTHONPATH={folder}/code/src", str(folder / SIF)]


def _bill(target: Target, debian: str) -> dict[str, object]:
    """Return the bill of materials: CycloneDX 1.5, https://cyclonedx.org/docs/1.5/json/"""
    python = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
        }
        for name, version, digests in entries_of(target.lock)
    ]
    packages = [line.split("\t") for line in debian.splitlines()]
    system = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:deb/debian/{name.split(':')[0]}@{version}"}
        for name, version in packages
    ]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": [*python, *system]}
