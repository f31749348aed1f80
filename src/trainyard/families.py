"""Finds the folders of families, a person's own and Trainyard's, and imports them side by side."""

import hashlib
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from trainyard.errors import UserError

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "jobs"
"""Where a wheel has the families: setup.py puts them there."""

_aliases: dict[str, Path] = {}
"""Folders that were imported under a name of their own, by that name."""


def find_own_families() -> Path:
    """Return the folder of Trainyard's own families: inside the package in a wheel, at the top of a checkout."""
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parents[1] / "jobs"


def list_roots() -> list[Path]:
    """Return the folders of families that one uses without naming them: ./jobs, if there is one, and Trainyard's."""
    here, own = Path("jobs"), find_own_families()
    if not here.is_dir():
        return [own]
    return [here] if not own.is_dir() or own.samefile(here) else [here, own]


def format_families(job: str, folder: Path) -> str:
    """Return what names the folder of families in a command about a job: nothing, if the job is found without it."""
    first = next((root for root in list_roots() if any(root.glob(f"[!._]*/{job}.yaml"))), None)
    return "" if first is not None and first.samefile(folder) else f" --jobs {shlex.quote(str(folder))}"


def import_root(root: Path) -> str:
    """Import a folder of families as a package, and return the package's name.

    That is the folder's name, and the folder's parent becomes the first entry of `sys.path`, so that objects of a
    family pickle under a name that another process can import. If another package has the name already, the folder gets
    one of its own, made from its path; another process knows that name after `import_aliases`.

    Raises:
        UserError: Python cannot name the folder.
    """
    home = root.resolve()
    if home == _INSTALLED:
        return importlib.import_module(f"{__package__}.{home.name}").__name__
    if not home.name.isidentifier():
        raise UserError(f"{home}: the folder's name must be a Python name, such as 'jobs'. Rename the folder.")
    if home.name not in sys.modules or _leads_to(sys.modules[home.name], home):
        parent = str(home.parent)
        sys.path[:] = [parent] + [entry for entry in sys.path if entry != parent]
        if _leads_to(importlib.import_module(home.name), home):
            return home.name
    alias = f"{home.name}_{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"
    _import_as(alias, home)
    return alias


def get_aliases() -> Mapping[str, Path]:
    """Return the folders that have a name of their own here, for `import_aliases` in another process."""
    return dict(_aliases)


def import_aliases(aliases: Mapping[str, Path]) -> None:
    """Import folders under the names that another process gave them, so that what it pickled can be read."""
    for name, home in aliases.items():
        _import_as(name, home)


def _leads_to(package: ModuleType, home: Path) -> bool:
    places = list(getattr(package, "__path__", []))
    return bool(places) and Path(places[0]).resolve() == home


def _import_as(name: str, home: Path) -> None:
    if name in sys.modules:
        return
    first = home / "__init__.py"
    if first.is_file():
        spec = importlib.util.spec_from_file_location(name, first, submodule_search_locations=[str(home)])
    else:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(home)]
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    if str(home.parent) not in sys.path:  # for modules next to the folder; after the folder that has the plain name
        sys.path.append(str(home.parent))
    _aliases[name] = home
