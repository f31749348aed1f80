"""Prints the bill of materials of the container image that it runs in: CycloneDX 1.5, https://cyclonedx.org/docs/1.5/json/

python sbom.py LOCK...
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def main(locks: Sequence[str]) -> int:
    """Print it."""
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"]
    debian = [line.split() for line in subprocess.check_output(query, text=True).splitlines()]
    python = list_python("".join(Path(lock).read_text() for lock in locks))
    parts = [*python, *(_name("deb/debian", name, version) for name, version in debian)]
    print(json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": parts}, indent=1))
    return 0


def list_python(lock: str) -> Iterator[dict[str, object]]:
    """Yield the installed packages, with the hashes that the lock allows for each.

    One whose files were all removed is still here as metadata, and marked as excluded.
    """
    entries = re.findall(r"^([\w-]+)(==(?:.*\\\n)*.*)", lock, re.M)
    hashes = {name: re.findall(r"sha256:(\w+)", entry) for name, entry in entries}
    for package in distributions():
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        files = [file for file in package.files or () if not file.parts[0].endswith((".dist-info", ".."))]
        removed = files and not any(Path(str(package.locate_file(file))).exists() for file in files)
        yield {
            **_name("pypi", name, package.version),
            "scope": "excluded" if removed else "required",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes.get(name, ())],
        }


def _name(kind: str, name: str, version: str) -> dict[str, object]:
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:{kind}/{name}@{quote(version)}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
