"""Says which code makes a family's synthetic samples, and which one packs: digests of its source."""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def hash_generator(family: Path) -> str:
    """Return a digest of the file that defines `synthesize`, and of all it imports relatively from its family.

    Args:
        family: folder with `pack.py`, which defines `synthesize` or imports it. Files are read, not imported.
    """
    pack = family / "pack.py"
    files = _follow_imports(_list_imports(pack, name="synthesize") or [pack])
    sources = [(str(file.relative_to(family)), file.read_bytes()) for file in sorted(files)]
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:8]


def hash_packing(family: Path) -> str:
    """Return a digest of `pack.py` and of all it imports relatively from its family, without docstrings.

    Left out are the files that make synthetic samples, whose folder has another digest, and `config.py`, whose options
    packed data name.
    """
    pack = family / "pack.py"
    files = {pack, *_follow_imports(set(_list_imports(pack)) - set(_list_imports(pack, name="synthesize")))}
    sources = [
        (str(file.relative_to(family)), _drop_docstrings(file.read_text(encoding="utf-8")))
        for file in sorted(files)
        if file != family / "config.py"
    ]
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:12]


def _drop_docstrings(source: str) -> list[str]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            lines[doc.lineno - 1 : doc.end_lineno] = [""] * ((doc.end_lineno or doc.lineno) - doc.lineno + 1)
    return [line.rstrip() for line in lines if line.strip()]


def _follow_imports(pending: Iterable[Path]) -> set[Path]:
    """Return these files, and those that they import relatively, and so on."""
    files: set[Path] = set()
    waiting = list(pending)
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += _list_imports(file)
    return files


def _list_imports(file: Path, *, name: str = "") -> list[Path]:
    """List the files that a file imports relatively; with `name`, only those that it imports this name from."""
    files = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [alias.name for alias in node.names]
            if not name or name in names:
                places = [module, *(module / part for part in names)]
                files += [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in files if path.is_file()]
