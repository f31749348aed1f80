"""Finds Docker or podman, with the settings that podman needs on machines that restrict root."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("docker", "podman")

_HYBRID = Path("/sys/fs/cgroup/unified/cgroup.controllers")
_CAP_SYS_RESOURCE = 24
_PODMANS_OWN_NPROC = 32768  # podman 4 lowers its own limit to this before it starts a container


class Mistake(Exception):
    """The request cannot be carried out. The message is for the person who typed it."""


class Absent(Exception):
    """This machine lacks a program, a permission or disk space. The message names it and how to get it."""


@dataclass(frozen=True)
class Engine:
    """A container engine that answers on this machine."""

    name: str  # "docker" or "podman"
    prefix: tuple[str, ...]  # command line before the engine's arguments
    environ: Mapping[str, str]

    def run(self, *arguments: str, timeout_s: float, pass_fds: Sequence[int] = ()) -> None:
        """Run an engine command on this terminal.

        Args:
            pass_fds: file descriptors, such as a lock's, that the command inherits and may keep open.

        Raises:
            subprocess.CalledProcessError: the command failed; it printed the reason.
        """
        command = [*self.prefix, *arguments]
        subprocess.run(command, check=True, env=dict(self.environ), timeout=timeout_s, pass_fds=pass_fds)

    def query(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run an engine command that may fail, and return its output."""
        return subprocess.run(
            [*self.prefix, *arguments], env=dict(self.environ), capture_output=True, text=True, timeout=timeout_s
        )

    def format_command(self, arguments: Sequence[str]) -> str:
        """Return a command as a person would type it."""
        lent = [f"{name}={value}" for name, value in self.environ.items() if name == "CONTAINERS_CONF"]
        return shlex.join([*lent, *self.prefix[:-1], self.name, *arguments])

    def has(self, image: str) -> bool:
        """Return whether a container image is stored locally."""
        return self.query("image", "inspect", image).returncode == 0

    def find_id(self, image: str) -> str:
        """Return the id of a local container image, "" if there is none."""
        answer = self.query("image", "inspect", "--format", "{{.Id}}", image)
        return answer.stdout.strip() if answer.returncode == 0 else ""

    def find_digest(self, image: str) -> str:
        """Return the digest of a local container image's manifest, or its id where it has none."""
        answer = self.query("image", "inspect", "--format", "{{range .RepoDigests}}{{println .}}{{end}}{{.Id}}", image)
        return answer.stdout.split()[0].rpartition("@")[2]

    def labels(self, image: str) -> dict[str, str]:
        """Return the labels of a local container image."""
        template = '{{range $name, $value := .Config.Labels}}{{$name}}={{$value}}{{"\\n"}}{{end}}'
        printed = self.query("image", "inspect", "--format", template, image).stdout
        return dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)

    def require_builds(self) -> None:
        """Check that this engine builds container images; Docker needs its plugin for that, and not to run them.

        Raises:
            Absent: it does not; names the packages to install.
        """
        if self.name == "docker" and (reason := _find_reason(self, ["buildx", "version"])):
            raise Absent(
                f"docker {reason}. Install its plugin, or build with podman: CONTAINER_ENGINE=podman make image"
            )

    def store(self) -> Path:
        """Return the folder that holds container images."""
        template = "{{.DockerRootDir}}" if self.name == "docker" else "{{.Store.GraphRoot}}"
        return Path(self.query("info", "--format", template).stdout.strip() or "/")

    def lock_file(self) -> Path:
        """Return the lock file for building: in the engine's folder if we may write there, else in the user's cache."""
        store = self.store()
        return (store if os.access(store, os.W_OK) else cache_folder(self.environ)) / "trainyard.lock"

    def free_gib(self) -> float:
        """Return the free disk space where container images are stored."""
        place = self.store()
        # Docker's folder may be on another machine, or unreadable for us.
        while not os.access(place, os.X_OK):
            place = place.parent
        return shutil.disk_usage(place).free / 2**30


def find_engine(environ: Mapping[str, str]) -> Engine:
    """Return this machine's container engine; CONTAINER_ENGINE forces one.

    Raises:
        Absent: none answers.
        Mistake: CONTAINER_ENGINE names something else.
    """
    wanted = environ.get("CONTAINER_ENGINE", "")
    if wanted not in ("", *ENGINES):
        raise Mistake(f"CONTAINER_ENGINE={wanted}: expected docker or podman, or nothing.")
    reasons = []
    for name in [wanted] if wanted else ENGINES:
        engine = _docker(environ) if name == "docker" else _podman(environ)
        reason = engine if isinstance(engine, str) else _diagnose(engine, builds=not wanted)
        if reason is None and isinstance(engine, Engine):
            return engine
        reasons.append(f"{name} {reason}")
    raise Absent(f"No container engine answers: {'; '.join(reasons)}. Install one, such as: apt-get install podman")


def _docker(environ: Mapping[str, str]) -> Engine | str:
    program = shutil.which("docker", path=environ.get("PATH"))
    if program is None:
        return "is not installed"
    return Engine("docker", (program,), {**environ, "DOCKER_BUILDKIT": "1"})


def _podman(environ: Mapping[str, str]) -> Engine | str:
    program = shutil.which("podman", path=environ.get("PATH"))
    if program is None:
        return "is not installed"
    return Engine("podman", (*_hide_hybrid_cgroups(), program), {**environ, **_lend_limits(environ)})


def _diagnose(engine: Engine, *, builds: bool) -> str | None:
    """Return why an engine is not used. Nobody named it: then it must build as well, or its images would be missing."""
    if engine.name == "podman":
        return _find_reason(engine, ["info"])
    reason = _find_reason(engine, ["version", "--format", "{{.Server.Version}}"])
    return reason or (_find_reason(engine, ["buildx", "version"]) if builds else None)


def _find_reason(engine: Engine, question: Sequence[str]) -> str | None:
    """Return an engine's error message if it does not answer a question; None if it does."""
    answer = engine.query(*question)
    if answer.returncode == 0:
        return None
    lines = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
    return f"does not answer `{engine.name} {' '.join(question)}`: {lines[-1] if lines else 'says nothing'}"


def _hide_hybrid_cgroups() -> tuple[str, ...]:
    """Hide the second cgroup hierarchy: where it has controllers, crun refuses to start anything."""
    if os.getuid() != 0 or not _HYBRID.exists() or not _HYBRID.read_text().strip():
        return ()
    return ("unshare", "--mount", "sh", "-ec", f'umount {_HYBRID.parent}; exec "$@"', "sh")


def _lend_limits(environ: Mapping[str, str]) -> dict[str, str]:
    """Pass our own resource limits to containers where root may not raise them."""
    if os.getuid() != 0 or "CONTAINERS_CONF" in environ or _may_raise_limits():
        return {}
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ulimits = [f"nofile={soft}:{hard}", f"nproc={_PODMANS_OWN_NPROC}:{_PODMANS_OWN_NPROC}"]
    path = cache_folder(environ) / "containers.conf"
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # another process may be reading it
    partial.write_text(f'[containers]\ndefault_ulimits = {ulimits}\n[engine]\ncgroup_manager = "cgroupfs"\n')
    partial.replace(path)
    return {"CONTAINERS_CONF": str(path)}


def _may_raise_limits() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_RESOURCE & 1)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the user's cache folder; create it if missing."""
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
