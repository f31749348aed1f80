"""A local container image: its name, the flags that seal it off, and whether it matches its lock."""

import hashlib
from pathlib import Path

from engine import Engine, Mistake
from targets import Target

USER = "10001:10001"  # of the Dockerfile
SEALED = (
    *("--network", "none", "--read-only", "--tmpfs", "/tmp:exec", "--shm-size", "1g"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)
"""Flags of a container without network, writable files or privileges."""


def format_tag(target: Target) -> str:
    """Return the name of a target's container image."""
    return f"localhost/trainyard:{target.name}"


def check_image(engine: Engine, target: Target, hw: str) -> None:
    """Refuse a container image that is missing, or that was built from another lock than this checkout's."""
    if not engine.has(format_tag(target)):
        raise Mistake(f"{format_tag(target)}: no such container image. Type: make image HW={hw}")
    if engine.labels(format_tag(target)).get("io.trainyard.lock") != hash_file(target.lock):
        raise Mistake(
            f"{format_tag(target)}: was built from another containers/{target.lock.name} than this checkout's. "
            f"Type: make image HW={hw}"
        )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
