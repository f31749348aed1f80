"""Finds the folders of families, a person's own and Trainyard's, and presets in them; imports them side by side."""

import hashlib
import importlib
import importlib.util
import pickle
import random
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from trainyard.errors import ConfigError, ContractError, UserError
from trainyard.text import find_nearest, join_names

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "jobs"
"""Where a wheel has the families: setup.py puts them there."""

_PARTS = {
    "config": ("Config", "a dataclass 'class Config(TrainConfig)' with every option of the family"),
    "pack": ("samples", "a function 'samples(raw, config)' that yields the samples of a raw folder"),
    "commands": ("add", "a function 'add(verbs)' that adds commands"),
    "module": ("build", "a function 'build(config, data)' that returns a TrainModule"),
}

_aliases: dict[str, Path] = {}
"""Name -> folder that was imported under it instead of the folder's own name."""


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


def find_jobs(jobs_dir: Path) -> dict[str, Path]:
    """Return the YAML file of each preset, by preset name, sorted.

    Raises:
        UserError: there is no such folder, or two families have a preset of the same name.
    """
    if not jobs_dir.is_dir():
        raise UserError(f"{jobs_dir}: no such folder of jobs. Name one: --jobs DIR.")
    presets: dict[str, Path] = {}
    for path in sorted(jobs_dir.glob("[!._]*/*.yaml"), key=lambda p: p.stem):
        if path.stem in presets:
            raise UserError(
                f"Two presets are named '{path.stem}': {presets[path.stem]} and {path}. Preset names must be unique "
                "across families; rename one of the files."
            )
        presets[path.stem] = path
    return presets


def find_all_jobs() -> dict[str, Path]:
    """Return the presets of all folders that one uses without naming them; of two with one name, the first folder's.

    Raises:
        UserError: as for `find_jobs`.
    """
    presets: dict[str, Path] = {}
    for root in reversed(list_roots()):
        presets |= find_jobs(root)
    return presets


class Root(NamedTuple):
    """A folder of families, and why it was chosen."""

    folder: Path
    reason: str


def choose_root(job: str) -> Root:
    """Return the first folder that has a job, of those that one uses without naming them.

    Raises:
        ConfigError: none of them has it.
        UserError: as for `find_jobs`.
    """
    roots = list_roots()
    for root in roots:
        if job in find_jobs(root):
            return Root(root, f"the first folder with a job {job}")
    raise ConfigError(_describe_unknown_job(job, find_all_jobs(), roots))


def find_preset(job: str, jobs_dir: Path) -> Path:
    """Return the YAML file of a preset.

    Raises:
        ConfigError: there is none of this name.
        UserError: as for `find_jobs`.
    """
    presets = find_jobs(jobs_dir)
    if job not in presets:
        raise ConfigError(_describe_unknown_job(job, presets, [jobs_dir]))
    return presets[job]


def load_family(jobs_dir: Path, family: str, part: str) -> ModuleType:
    """Import one part of a family: `<package>.<family>.<part>`, where `import_root` names the package.

    Args:
        part: "config", "pack", "commands" or "module". Only "module" may load torch.

    Raises:
        UserError: the file is missing or lacks the name that this part must define, or Python cannot name `jobs_dir`,
            or the family imports its own modules by a name that another folder has, or a file is not Python.
    """
    file = jobs_dir / family / f"{part}.py"
    name, expected = _PARTS[part]
    if not file.is_file():
        raise ContractError(f"{file}: no such file. A family needs it, with {expected}.")
    package = import_root(jobs_dir)
    try:
        module = importlib.import_module(f"{package}.{family}.{part}")
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: not Python: {error.msg}.") from None
    except ModuleNotFoundError as error:
        if package == jobs_dir.resolve().name or (error.name or "").partition(".")[0] != jobs_dir.resolve().name:
            raise
        raise UserError(
            f"{file}: imports '{error.name}', but another folder of families has the name '{jobs_dir.resolve().name}' "
            "here. Import the family's own modules as 'from .config import Config'."
        ) from None
    if not hasattr(module, name):
        raise ContractError(f"{file}: has no '{name}'. Expected {expected}.")
    if part == "config" and not _is_config_type(module.Config):
        raise ContractError(f"{file}: 'Config' is not a dataclass that extends TrainConfig. Expected {expected}.")
    return module


def locate_code(function: Any) -> str:
    """Return where a function or method of a family is written: 'jobs/mine/module.py:12: Model.forward'."""
    while inner := getattr(function, "func", None) or getattr(function, "__wrapped__", None):  # a partial; decorated
        function = inner
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: {name}" if code else name


def require_mapping(function: Any, returned: Any, expected: str, *, key: str = "") -> Mapping[str, Any]:
    """Check the value that a function of a family returned, and return it.

    Args:
        expected: the rest of a sentence.
        key: a name that must be in it.

    Raises:
        UserError: it is no mapping, or has no `key`.
    """
    if not isinstance(returned, Mapping) or (key and key not in returned):
        named = isinstance(returned, Mapping)
        value = (join_names(list(map(str, returned))) or "no names") if named else describe_value(returned)
        raise ContractError(f"{locate_code(function)} returned {value}; expected {expected}.")
    return returned


def describe_value(value: Any) -> str:
    """Describe a value that other code returned: 'a tensor (4, 3) of float32'."""
    if value is None:
        return "nothing (is a `return` forgotten?)"
    kind = {"Tensor": "a tensor", "Parameter": "a tensor", "ndarray": "an array"}.get(
        type(value).__name__, type(value).__name__
    )
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{kind} {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{kind} {value!r:.40}" if isinstance(value, int | float | str) else kind


@contextmanager
def forbid_own_randomness(where: str, instead: str) -> Iterator[None]:
    """Refuse a block of a family's code that draws from Python's or NumPy's own random state, which no run seeds.

    Args:
        where: the beginning of the sentence.
        instead: the function to use.

    Raises:
        UserError: it does.
    """
    import numpy as np  # here, because status loads this file

    before = random.getstate(), pickle.dumps(np.random.get_state())
    yield
    after = random.getstate(), pickle.dumps(np.random.get_state())
    for name, state, state_after in zip(("Python's random", "numpy.random"), before, after, strict=True):
        if state != state_after:
            raise ContractError(f"{where} draws from {name}, whose state no run seeds or saves. Use {instead}.")


def import_root(root: Path) -> str:
    """Import a folder of families as a package, and return the package's name.

    That is the folder's name, and the folder's parent becomes the first entry of `sys.path`, so that objects of a
    family pickle under a name that another process can import. If another package has the name already, the folder gets
    another one, made from its path; another process knows that name after `import_aliases`.

    Raises:
        UserError: Python cannot name the folder.
    """
    home = root.resolve()
    if home == _INSTALLED:
        return importlib.import_module(f"trainyard.{home.name}").__name__
    if not home.name.isidentifier():
        raise UserError(f"{home}: the folder's name must be a Python name, such as 'jobs'. Rename the folder.")
    known = sys.modules.get(home.name)
    if known is None or _leads_to(known, home):
        parent = str(home.parent)
        sys.path[:] = [parent] + [entry for entry in sys.path if entry != parent]
        if _leads_to(importlib.import_module(home.name), home):
            return home.name
    alias = f"{home.name}_{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"
    _import_as(alias, home)
    return alias


def get_aliases() -> Mapping[str, Path]:
    """Return the folders that were imported under another name, for `import_aliases` in another process."""
    return dict(_aliases)


def import_aliases(aliases: Mapping[str, Path]) -> None:
    """Import folders under the names that another process gave them, so that its pickles can be read."""
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


def _describe_unknown_job(job: str, presets: Collection[str], roots: Sequence[Path]) -> str:
    places = " and ".join(map(str, roots))
    if not presets:
        return f"{places}: contains no preset (<family>/<preset>.yaml). Name the folder of jobs: --jobs DIR."
    near = find_nearest(job, presets, most=3)
    hint = f"Nearest: {', '.join(near)}." if near else f"{places} has {len(presets)} jobs."
    return f"There is no job '{job}'. {hint} List them: trainyard jobs."


def _is_config_type(candidate: object) -> bool:
    from trainyard.config.settings import TrainConfig  # here, because status loads this file and must respond quickly

    return isinstance(candidate, type) and is_dataclass(candidate) and issubclass(candidate, TrainConfig)
