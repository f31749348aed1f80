"""Builds, tests and runs container images of this checkout: behind `make image`, `make test-image`, `make run-image`.

Needs Python 3.11 or newer and a container engine, nothing else: `python3 containers/image.py --help`.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH, set in container images, leaves it out

from base import OWN_BASE, base_image, make_base
from bundle import make_bundle, verify_bundle
from engine import ENGINES, Absent, Engine, Mistake, find_engine
from local_image import SEALED, USER, check_image, format_tag, hash_file
from once import hold_lock
from targets import Target, find_target
from unpack import provide_apptainer
from wheelhouse import download_wheels, make_pieces

ROOT = Path(__file__).resolve().parents[1]
_BUILD_S = 7200


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; return the exit code: 2 for a user's mistake, 3 if this machine lacks something."""
    try:
        args = _parse(arguments)
        code: int = args.command(args, environ)
        return code
    except (Mistake, Absent) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, Mistake) else 3
    except subprocess.TimeoutExpired as late:
        print(f"{shlex.join(late.cmd)}: not done after {late.timeout:.0f} s, so it was stopped.", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; OPTION=VALUE may follow --flags too, which argparse alone does not allow."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(args, "options")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.options += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="containers/image.py", description="Container images of this checkout.")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    build = _verb(verbs, "build", _build, "build the container image for a card")
    build.add_argument("--torch-index", default="", metavar="URL", help="cpu: PyTorch's index of CPU builds (smaller)")

    test = _verb(verbs, "test", _test, "run the test suite in the container image: no network, read-only, not root")
    test.add_argument("--quick", action="store_true", help="only tests of a second or less")
    test.add_argument("pytest", nargs="*", help="tests to run instead of all; options after --")
    for verb in (build, test):
        verb.add_argument("--wheelhouse", type=Path, metavar="FOLDER", help="wheels, for a build without network")
        verb.add_argument("--pip-conf", type=Path, metavar="FILE", help="pip's settings, such as your index")
        verb.add_argument("--network", default="host", help="of the build: host (default) or none")

    sif = _verb(verbs, "sif", _sif, "make a SIF of the container image, for Apptainer and SingularityCE")
    sif.add_argument("--out", type=Path, metavar="FILE", help="default: images/trainyard-<image>.sif")

    run = _verb(verbs, "run", _run, "train a job in the container image")
    run.add_argument("job")
    run.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    run.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of this machine (default: 1, cpu: none)")
    run.add_argument("--data", type=Path, metavar="FOLDER", help="raw files or shards; mounted read-only")
    run.add_argument(
        "--runs", type=Path, default=ROOT / "runs", metavar="FOLDER", help="folder of runs (default: runs)"
    )
    run.add_argument("--jobs", type=Path, default=ROOT / "jobs", metavar="FOLDER", help="families (default: jobs)")
    run.add_argument("--name", default="", help="name of the run; the same name resumes that run")
    run.add_argument("--dry", action="store_true", help="only print the command")

    wheels = _verb(
        verbs, "wheelhouse", _wheelhouse, "download the wheels of a container image, to build it without network"
    )
    wheels.add_argument("out", type=Path, metavar="FOLDER")
    wheels.add_argument("--python", type=_read_version, metavar="3.N", help="version they are for; default: this one")
    wheels.add_argument(
        "--pieces",
        type=_read_mib,
        metavar="MIB",
        help="for a machine that has torch: what else it needs, in files of at most so many MiB, and a script that "
        "joins and installs them",
    )

    bundle = _verb(
        verbs, "bundle", _bundle, "write container image, code, data, hashes and bill of materials into one tar"
    )
    bundle.add_argument("out", type=Path, metavar="FILE")
    bundle.add_argument(
        "--sif", type=Path, metavar="FILE", help="bundle this SIF instead of the engine's container image"
    )
    bundle.add_argument(
        "--wheelhouse", type=Path, metavar="FOLDER", help="wheels, to rebuild the container image on the other machine"
    )

    text = "check each file of a bundle against its hash, and train a few steps without network"
    verify = verbs.add_parser("verify-bundle", help=text, description=text)
    verify.add_argument("bundle", type=Path, metavar="FILE")
    verify.set_defaults(command=_verify_bundle)

    for name, command, text in (
        ("base", _base, "build the base image from Debian's packages, where no registry answers"),
        ("engine", _engine, "print which container engine answers"),
        ("apptainer", _apptainer, "provide an Apptainer for `sif`: the installed one, else one from Debian's packages"),
    ):
        verbs.add_parser(name, help=text, description=text).set_defaults(command=command)
    return parser


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: object, text: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("hw", metavar="HW", help="a card such as a100, or a target such as cuda13")
    verb.set_defaults(command=command)
    return verb


def _read_version(text: str) -> str:
    """Check a version of Python, such as 3.12.

    Raises:
        Mistake: it is none. One sentence, where argparse would print the usage first.
    """
    if not re.fullmatch(r"3\.\d{1,2}", text):
        raise Mistake(f"--python {text}: expected a version of Python, such as --python 3.12")
    return text


def _read_mib(text: str) -> int:
    """Read a number of MiB.

    Raises:
        Mistake: it is none, or 0.
    """
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text, re.ASCII):
        raise Mistake(f"--pieces {text}: expected a whole number of MiB, 1 or more, such as --pieces 60")
    return int(text)


# build


def _build(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, engine = find_target(args.hw), find_engine(environ)
    engine.require_builds()
    with hold_lock(engine.lock_file(), doing="building a container image") as lock:
        _require_room(engine, target)
        base = base_image(engine, environ)
        values = {"BASE_IMAGE": base, **({"TORCH_INDEX": args.torch_index} if args.torch_index else {})}
        tag, labels = format_tag(target), _labels(target, base, engine)
        _build_stage(target.name, tag, args, environ, engine, lock, values=values, labels=labels)
    print(f"{format_tag(target)} is built. Next: make test-image HW={args.hw}, or make run-image HW={args.hw}")
    return 0


def _require_room(engine: Engine, target: Target) -> None:
    free = engine.free_gib()
    if free < target.build_gib:
        raise Absent(
            f"{free:.0f} GiB are free where {engine.name} keeps images, and building {target.name} takes "
            f"{target.build_gib}. Make room: {engine.name} system prune"
        )


def _build_stage(
    stage: str,
    tag: str,
    args: argparse.Namespace,
    environ: Mapping[str, str],
    engine: Engine,
    lock: int,
    *,
    values: Mapping[str, str],
    labels: Mapping[str, str],
) -> None:
    command = ["build", "--file", str(ROOT / "Dockerfile"), "--target", stage, "--tag", tag, "--network", args.network]
    for option, pairs in (("--build-arg", values), ("--label", labels)):
        command += [word for name, value in pairs.items() for word in (option, f"{name}={value}")]
    if args.wheelhouse:
        command += ["--build-context", f"wheelhouse={args.wheelhouse.resolve()}"]
    # Settings that reach an index are mounted as secrets during the build and are in no layer.
    for secret, path in (("cacert", environ.get("PIP_CERT")), ("pipconf", args.pip_conf)):
        if path:
            command += ["--secret", f"id={secret},src={Path(path).resolve()}"]
    before = engine.find_id(tag)
    engine.run(*command, str(ROOT), timeout_s=_BUILD_S, pass_fds=(lock,))
    if before and before != engine.find_id(tag):
        engine.query("rmi", before, timeout_s=600)  # untagged gigabytes; kept while a container uses them


def _labels(target: Target, base: str, engine: Engine) -> dict[str, str]:
    """Return the labels that the Dockerfile cannot know; their names: https://specs.opencontainers.org/image-spec/annotations/"""
    name, _, digest = base.partition("@")
    origin = _ask_git("remote", "get-url", "origin")
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "trainyard" / "__init__.py").read_text())
    assert version is not None
    labels = {
        # An address that others can open, without a password; not a folder of this machine.
        "source": re.sub("//[^/]*@", "//", origin) if re.match(r"https?://|ssh://|[\w.]+@", origin) else "unknown",
        "created": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "version": version[1],
        "revision": _ask_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "unknown",
        "base.name": name,
        "base.digest": digest or engine.find_digest(base),
    }
    return {f"org.opencontainers.image.{key}": value for key, value in labels.items()} | {
        "io.trainyard.lock": hash_file(target.lock)
    }


def _ask_git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def _base(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    engine = find_engine(environ)
    with hold_lock(engine.lock_file(), doing="building a container image"):
        make_base(engine, environ)
    print(f"{OWN_BASE} is built; builds on this machine use it from now on.")
    return 0


def _engine(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    print(find_engine(environ).name)
    return 0


def _apptainer(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    print(f"{provide_apptainer(environ)}: run it as containers/apptainer")
    return 0


# test, run, sif


def _test(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, engine = find_target(args.hw), find_engine(environ)
    check_image(engine, target, args.hw)
    engine.require_builds()
    tag = f"{format_tag(target)}-tests"
    with hold_lock(engine.lock_file(), doing="building a container image") as lock:
        values = {"TESTED": format_tag(target)}
        _build_stage("tests", tag, args, environ, engine, lock, values=values, labels={})
    # As this user, who can read the checkout; never as root.
    user = [*_keep_ids(engine), "--user", f"{os.getuid()}:{os.getgid()}" if os.getuid() else USER]
    command = ["run", "--rm", "--pull", "never", *SEALED, *user, "--volume", f"{ROOT}:/workspace:ro"]
    command += ["--env", "PYTHONPATH=/workspace/src", "--env", "CUDA_VISIBLE_DEVICES="]  # CPU tests only
    if data := environ.get("TRAINYARD_SHARED_DATA"):  # real samples that some tests read
        command += ["--env", "TRAINYARD_SHARED_DATA=/shared", "--volume", f"{Path(data).resolve()}:/shared:ro"]
    command += ["--entrypoint", "python", tag]  # process 1 is the test runner
    marks = "not long and not slow and not cluster" if args.quick else "not long"
    tests = ["-m", "pytest", "-p", "no:cacheprovider", "-n", "auto", "--no-loadscope-reorder", "-rs", "-m", marks]
    engine.run(*command, *tests, *(args.pytest or ["tests", "jobs"]), timeout_s=_BUILD_S)
    return 0


def _run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, engine = find_target(args.hw), find_engine(environ)
    check_image(engine, target, args.hw)
    check_driver(target, read_driver(Path("/proc/driver/nvidia/version")))
    command = _build_command(args, engine, target)
    print(engine.format_command(command), flush=True)
    if not args.dry:
        args.runs.mkdir(parents=True, exist_ok=True)
        (ROOT / "data").mkdir(exist_ok=True)
        os.execvpe(engine.prefix[0], [*engine.prefix, *command], dict(engine.environ))
    return 0


def _build_command(args: argparse.Namespace, engine: Engine, target: Target) -> list[str]:
    """Return the engine command that trains, with this checkout's code, runs and data at their own paths."""
    gpus = 0 if target.name == "cpu" else args.gpus or 1
    runs, jobs, data = args.runs.resolve(), args.jobs.resolve(), args.data.resolve() if args.data else None
    train = ["run", args.job, *args.options, *([f"data.path={data}"] if data else [])]
    train += ["--runs", str(runs), "--jobs", str(jobs), *(["--name", args.name] if args.name else [])]
    train += ["--gpus", str(gpus)] if gpus > 1 else []
    return [
        *["run", "--rm", "--pull", "never", *_keep_ids(engine), "--user", f"{os.getuid()}:{os.getgid()}"],
        *["--cap-drop", "ALL"],
        *["--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp:exec", "--shm-size", "8g"],
        *["--stop-timeout", "120", *_request_gpus(engine, gpus)],  # time for the last step and its checkpoint
        *_volume(ROOT, "ro"),
        *_volume(ROOT / "data"),
        *_volume(runs),
        *([] if jobs.is_relative_to(ROOT) else _volume(jobs, "ro")),
        *(_volume(data, "ro") if data else []),
        *["--workdir", str(ROOT), "--env", f"PYTHONPATH={ROOT / 'src'}", format_tag(target), *train],
    ]


def _keep_ids(engine: Engine) -> list[str]:
    """Return the flags with which a user has the same id inside: rootless podman maps all to this user otherwise."""
    return ["--userns", "keep-id"] if engine.name == "podman" and os.getuid() else []


def _request_gpus(engine: Engine, gpus: int) -> list[str]:
    """Return the flags that request GPUs. podman before 5.0 accepts --gpus and silently gives none."""
    if not gpus:
        return []
    if engine.name == "docker":
        return ["--gpus", str(gpus)]
    return [word for index in range(gpus) for word in ("--device", f"nvidia.com/gpu={index}")]


def _volume(folder: Path, *options: str) -> list[str]:
    if ":" in str(folder):
        raise Mistake(f"{folder}: {' or '.join(ENGINES)} cannot mount a folder with a colon in its name.")
    return ["--volume", ":".join([str(folder), str(folder), *options])]


def check_driver(target: Target, driver: str | None) -> None:
    """Refuse a container image that the machine's driver does not support.

    Raises:
        Mistake: names the driver that is needed.
    """
    if not target.min_driver:
        return
    if driver is None:
        raise Mistake(f"{target.name} needs an NVIDIA driver, and none is loaded here. Without a GPU: HW=cpu")
    if _numbers(driver) < _numbers(target.min_driver):
        older = " HW=cuda12 runs from 525 on." if target.name == "cuda13" else ""
        raise Mistake(
            f"{target.name} needs driver {target.min_driver} or newer; this machine has {driver}.{older} Otherwise "
            "ask your administrator for a newer driver."
        )
    if target.max_driver and _numbers(driver)[0] > int(target.max_driver):
        raise Mistake(
            f"{target.name} needs driver {target.max_driver} or older, the last branch that supports its cards; this "
            f"machine has {driver}. Use another machine, or ask for driver {target.max_driver}."
        )


def read_driver(path: Path) -> str | None:
    """Return the version of the loaded NVIDIA driver, read from the kernel's file; None without a driver."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", path.read_text()) if path.exists() else None
    return match[1] if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _sif(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, engine = find_target(args.hw), find_engine(environ)
    check_image(engine, target, args.hw)
    provide_apptainer(environ)
    out = (args.out or ROOT / "images" / f"trainyard-{target.name}.sif").resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free / 2**30
    if free < target.build_gib:
        needed = f"making a SIF of {target.name} takes {target.build_gib}"
        raise Mistake(f"{free:.0f} GiB are free in {out.parent}, and {needed}. Make room, or name another: --out FILE")
    with tempfile.TemporaryDirectory(prefix=".sif-", dir=out.parent) as folder:
        engine.run("save", "--output", f"{folder}/image.tar", format_tag(target), timeout_s=_BUILD_S)
        # gzip: SingularityCE 4.1 cannot open what newer compressors write. Level 1 takes a sixth of level 9's time.
        compression = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
        source = ["--build-arg", "FROM=image.tar", "image.sif", str(ROOT / "containers" / "trainyard.def")]
        subprocess.run(
            [str(ROOT / "containers" / "apptainer"), "build", *compression, *source],
            check=True,
            timeout=_BUILD_S,
            cwd=folder,
            env={**environ, "APPTAINER_TMPDIR": folder, "APPTAINER_CACHEDIR": folder},
        )
        Path(folder, "image.sif").replace(out)
    print(f"{out} is written. Name it in slurm/<cluster>.yaml: container: {{kind: apptainer, image: {out}}}")
    return 0


# without network


def _wheelhouse(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target = find_target(args.hw)
    if args.pieces:
        script = make_pieces(target, args.out, python=args.python or "", piece_mib=args.pieces, environ=environ)
        print(f"On the machine without network, in this checkout: sh {script} && python3 -m trainyard jobs")
        return 0
    download_wheels(target, args.out, python=args.python or "", environ=environ)
    print(f"Build with it where there is no network: containers/image.py build {args.hw} --wheelhouse {args.out}")
    return 0


def _bundle(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, engine = find_target(args.hw), find_engine(environ)
    check_image(engine, target, args.hw)
    make_bundle(target, args.out.resolve(), engine=engine, sif=args.sif, wheels=args.wheelhouse)
    unpack = f"tar -xf {args.out.name} code && python3 code/containers/image.py verify-bundle {args.out.name}"
    print(f"{args.out} is written. On the other machine: {unpack}")
    return 0


def _verify_bundle(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    verify_bundle(args.bundle, environ)
    print(f"{args.bundle} is intact, and trains.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
