"""An image of ours that is here: its name, how it runs sealed off, and whether it is as new as its lock."""

import hashlib
from pathlib import Path

from engine import Engine, Mistake
from targets import Target

USER = "10001:10001"  # of the Dockerfile
SEALED = (
    *("--network", "none", "--read-only", "--tmpfs", "/tmp:exec", "--shm-size", "1g"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)
"""How a container runs that may reach and change nothing."""


def tag_of(target: Target) -> str:
    """Return the name of the image of a target."""
    return f"localhost/trainyard:{target.name}"


def check_image(engine: Engine, target: Target, hw: str) -> None:
    """Refuse an image that is missing, or older than the lock beside the code it would run."""
    if not engine.has(tag_of(target)):
        raise Mistake(f"{tag_of(target)}: there is no such image here. Type: make image HW={hw}")
    if engine.labels(tag_of(target)).get("io.trainyard.lock") != digest_of(target.lock):
        raise Mistake(
            f"{tag_of(target)}: was built from another containers/{target.lock.name} than the one here. "
            f"Type: make image HW={hw}"
        )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
