"""Finds presets and families, composes a preset and overrides into one typed configuration, saves and loads a run's.

Hydra defines what the YAML files mean: composition.py asks it. Loads no torch, h5py or DALI.
"""

import importlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from trainyard import composition
from trainyard.errors import UserError
from trainyard.families import import_root, list_roots
from trainyard.frozen import LOCATION, ConfigError, read_frozen, write_frozen
from trainyard.settings import TrainConfig
from trainyard.text import find_nearest

_PARTS = {
    "config": ("Config", "a dataclass 'class Config(TrainConfig)' with every option of the family"),
    "pack": ("samples", "a function 'samples(raw, config)' that yields the samples of a raw folder"),
    "commands": ("add", "a function 'add(verbs)' that adds commands of its own"),
    "module": ("build", "a function 'build(config, data)' that returns a TrainModule"),
}


class Option(NamedTuple):
    """One option, for listings."""

    name: str  # dotted, as typed
    value: Any
    doc: str
    choices: tuple[str, ...]  # the allowed words; (): any value of the type


class Difference(NamedTuple):
    """One option whose value differs between two configurations."""

    name: str
    old: Any
    new: Any
    mutable: bool  # whether a resumed run may change it


def find_jobs(jobs_dir: Path) -> dict[str, Path]:
    """Return the YAML file of each preset, by preset name, sorted.

    Raises:
        UserError: there is no such folder, or two families have a preset of the same name.
    """
    if not jobs_dir.is_dir():
        raise UserError(f"{jobs_dir}: no such folder of jobs. Name one: --jobs DIR.")
    found: dict[str, Path] = {}
    for path in sorted(jobs_dir.glob("[!._]*/*.yaml"), key=lambda p: p.stem):
        if path.stem in found:
            raise UserError(
                f"Two presets are named '{path.stem}': {found[path.stem]} and {path}. Preset names must be unique "
                "across families; rename one of the files."
            )
        found[path.stem] = path
    return found


def find_all_jobs() -> dict[str, Path]:
    """Return the presets of all folders that one uses without naming them; of two with one name, the first folder's.

    Raises:
        UserError: as for `find_jobs`.
    """
    found: dict[str, Path] = {}
    for root in reversed(list_roots()):
        found |= find_jobs(root)
    return found


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


def load_family(jobs_dir: Path, family: str, part: str) -> ModuleType:
    """Import one part of a family: `<package>.<family>.<part>`, where `import_root` names the package.

    Args:
        part: "config", "pack", "commands" or "module". Only "module" may load torch.

    Raises:
        UserError: the file is missing or does not define what this part must define, or Python cannot name `jobs_dir`,
            or the family imports its own modules by a name that another folder has.
    """
    file = jobs_dir / family / f"{part}.py"
    name, expected = _PARTS[part]
    if not file.is_file():
        raise UserError(f"{file}: no such file. A family needs it, with {expected}.")
    package = import_root(jobs_dir)
    try:
        module = importlib.import_module(f"{package}.{family}.{part}")
    except ModuleNotFoundError as error:
        if package == jobs_dir.resolve().name or (error.name or "").partition(".")[0] != jobs_dir.resolve().name:
            raise
        raise UserError(
            f"{file}: imports '{error.name}', but another folder of families has the name '{jobs_dir.resolve().name}' "
            "here. Import the family's own modules as 'from .config import Config'."
        ) from None
    if not hasattr(module, name):
        raise UserError(f"{file}: has no '{name}'. Expected {expected}.")
    if part == "config" and not _is_config_type(module.Config):
        raise UserError(f"{file}: 'Config' is not a dataclass that extends TrainConfig. Expected {expected}.")
    return module


def compose(job: str, overrides: Sequence[str], jobs_dir: Path) -> TrainConfig:
    """Return the checked configuration of a preset with overrides such as `optimizer.lr=1e-4` applied.

    Values use Hydra's syntax, with one difference: the value of a free-text option (a path, a column name) is taken
    verbatim, with its spaces, commas and equal signs. Takes about 0.1 s.

    Raises:
        ConfigError: an unknown job or option, a value of the wrong type or out of range, a malformed override, or a
            preset that does not compose.
        UserError: `jobs_dir` or the family's `config.py` is invalid.
    """
    preset = _find_preset(job, jobs_dir)
    family = preset.parent.name
    config_type = load_family(jobs_dir, family, "config").Config
    tree = composition.compose_tree(preset, config_type)
    tree.job, tree.family = job, family
    composition.apply_overrides(tree, overrides)
    return composition.convert_tree(tree, f"job {job}")


def apply_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return a copy of `config` with overrides applied, read and checked as `compose` does.

    Raises:
        ConfigError: as for `compose`.
    """
    tree = OmegaConf.structured(config)
    composition.apply_overrides(tree, overrides)
    return composition.convert_tree(tree, f"job {config.job}")


def list_options(config: TrainConfig) -> list[Option]:
    """Return every option, in the order of declaration."""
    return [Option(leaf.name, leaf.value, leaf.doc, leaf.choices) for leaf in _walk_leaves(config)]


def find_differences(old: TrainConfig, new: TrainConfig) -> list[Difference]:
    """Return the options whose values differ. An option is mutable if it, or one of its groups, is declared so."""
    assert type(old) is type(new), "configurations of one family"
    return [
        Difference(a.name, a.value, b.value, a.mutable)
        for a, b in zip(_walk_leaves(old), _walk_leaves(new), strict=True)
        if a.value != b.value
    ]


def list_kept_options(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all options by dotted name: those that a run keeps, and those that may change when it is resumed."""
    leaves = list(_walk_leaves(config))
    kept = {leaf.name: leaf.value for leaf in leaves if not leaf.mutable and leaf.name != LOCATION}
    return kept, {leaf.name: leaf.value for leaf in leaves if leaf.name not in kept}


def freeze(config: TrainConfig, path: Path) -> None:
    """Write every option with its value to `path` as YAML, atomically."""
    write_frozen(asdict(config), path)


def thaw(path: Path, jobs_dir: Path) -> TrainConfig:
    """Read what `freeze` wrote. An option added since then takes its default.

    Raises:
        ConfigError: no such file, invalid YAML, more than plain values, an option that the family no longer has, or a
            value out of range.
        UserError: the family is not in `jobs_dir`.
    """
    frozen = read_frozen(path)
    if not isinstance(frozen, dict) or not frozen.get("family"):
        raise ConfigError(f"{path}: expected the options of a run, including 'family'. The file was changed.")
    family = str(frozen["family"])
    if not re.fullmatch(r"[A-Za-z]\w*", family, re.ASCII):
        raise ConfigError(f"{path}: '{family[:40]}' is not the name of a family. The file was changed.")
    config_type = load_family(jobs_dir, family, "config").Config
    return composition.convert_tree(composition.merge_frozen(path, frozen, config_type), str(path))


# Finding presets and families


def _find_preset(job: str, jobs_dir: Path) -> Path:
    presets = find_jobs(jobs_dir)
    if job not in presets:
        raise ConfigError(_describe_unknown_job(job, presets, [jobs_dir]))
    return presets[job]


def _describe_unknown_job(job: str, presets: Collection[str], roots: Sequence[Path]) -> str:
    places = " and ".join(map(str, roots))
    if not presets:
        return f"{places}: contains no preset (<family>/<preset>.yaml). Name the folder of jobs: --jobs DIR."
    near = find_nearest(job, presets, most=3)
    hint = f"Nearest: {', '.join(near)}." if near else f"{places} has {len(presets)} jobs."
    return f"There is no job '{job}'. {hint} List them: trainyard jobs."


def _is_config_type(candidate: object) -> bool:
    return isinstance(candidate, type) and is_dataclass(candidate) and issubclass(candidate, TrainConfig)


# Walking a configuration


@dataclass(frozen=True)
class _Leaf:
    name: str
    value: Any
    doc: str
    choices: tuple[str, ...]
    mutable: bool


def _walk_leaves(config: Any, prefix: str = "", mutable: bool = False) -> Iterator[_Leaf]:
    for f in fields(config):
        value, name = getattr(config, f.name), prefix + f.name
        is_mutable = mutable or bool(f.metadata.get("mutable_on_resume"))
        if is_dataclass(value):
            yield from _walk_leaves(value, f"{name}.", is_mutable)
        else:
            yield _Leaf(name, value, f.metadata.get("doc", ""), f.metadata.get("choices", ()), is_mutable)
