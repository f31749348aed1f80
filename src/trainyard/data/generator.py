"""Says what makes a family's synthetic samples: a digest of the source of its `synthesize`."""

import ast
import hashlib
from pathlib import Path


def hash_generator(family: Path) -> str:
    """Return a digest of the file that defines `synthesize`, and of all it imports relatively from its family.

    Args:
        family: folder with `pack.py`, which defines `synthesize` or imports it. Files are read, not imported.
    """
    pack = family / "pack.py"
    files: set[Path] = set()
    pending = _list_imports(pack, name="synthesize") or [pack]
    while pending:
        file = pending.pop()
        if file not in files:
            files.add(file)
            pending += _list_imports(file)
    sources = [(str(file.relative_to(family)), file.read_bytes()) for file in sorted(files)]
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:8]


def _list_imports(file: Path, *, name: str = "") -> list[Path]:
    """List the files that a file imports relatively; with `name`, only those that it imports this name from."""
    found = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [alias.name for alias in node.names]
            if not name or name in names:
                places = [module, *(module / one for one in names)]
                found += [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in found if path.is_file()]
