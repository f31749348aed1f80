"""Reads presets and a run's options as Hydra and OmegaConf would, without them, if all in them is plain.

They take ten times as long to load and to do it. What is not plain, and what is wrong, is left to them.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from yaml import YAMLError  # type: ignore[import-untyped]

from trainyard.errors import UserError
from trainyard.frozen import ConfigError
from trainyard.settings import check
from trainyard.yaml_text import load_yaml

SCHEMA = "schema"
"""What presets call the options of their family."""

_T = TypeVar("_T")


def merge_presets(preset: Path) -> dict[str, Any] | None:
    """Return the values of a preset and of those it is based on, as they are written.

    Returns:
        None: a preset has other defaults than `[NAME, _self_]`, or something is wrong.
    """
    try:
        merged: dict[str, Any] = {}
        for values in reversed(_read_chain(preset)):
            merged = _merge(merged, values)
    except (_NotPlain, YAMLError, ValueError, OSError):
        return None
    return merged


def build_config(config_type: type[_T], values: Mapping[str, Any]) -> _T | None:
    """Return a configuration with these values; options that are missing have their defaults.

    Returns:
        None: a value is not of its option's type, refers to another option, or belongs to none.
    """
    try:
        return _build(config_type, values, None)
    except _NotPlain:
        return None


def check_values(config: Any, where: str) -> None:
    """Check every value against its option's choices and range; `where` begins the message of an error.

    Raises:
        ConfigError: a value is not allowed.
    """
    try:
        check(config)
    except UserError as error:
        raise ConfigError(f"{where}: {error}") from None


class _NotPlain(Exception):
    """There is more to it than values of the types that are declared."""


def _read_chain(preset: Path) -> list[dict[str, Any]]:
    """Return the values of a preset, of the one that it is based on, and so on to the family's base preset."""
    if preset.with_name(f"{SCHEMA}.yaml").exists():
        raise _NotPlain
    chain: dict[str, dict[str, Any]] = {}
    name = preset.stem
    while name != SCHEMA:
        text = preset.with_name(f"{name}.yaml").read_text(encoding="utf-8")
        values = load_yaml(text)
        has_header = re.search(r"^\s*#\s*@", text, re.MULTILINE)  # such as `# @package`
        if has_header or name in chain or not isinstance(values, dict) or "hydra" in values:
            raise _NotPlain
        match values.pop("defaults", None):
            case [str(base), "_self_"] if re.fullmatch(r"[A-Za-z]\w*", base):
                chain[name], name = values, base
            case _:
                raise _NotPlain
    return list(chain.values())


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return groups of options with those of `above` where both have one."""
    both = below.keys() & above.keys()
    groups = {name for name in both if isinstance(below[name], dict) or isinstance(above[name], dict)}
    if not all(isinstance(values[name], dict) for name in groups for values in (below, above)):
        raise _NotPlain
    return {**below, **above, **{name: _merge(below[name], above[name]) for name in groups}}


def _build(kind: type[_T], values: Any, defaults: Any) -> _T:
    """Build a dataclass; `defaults` is an instance of it, or None for those that it declares."""
    hints, known = get_type_hints(kind), fields(kind)  # type: ignore[arg-type]
    if not isinstance(values, Mapping) or values.keys() - {f.name for f in known if f.init}:
        raise _NotPlain
    built = {}
    for f in known:
        if defaults is not None:
            default = getattr(defaults, f.name)
        else:
            default = f.default if f.default_factory is MISSING else f.default_factory()
        if is_dataclass(default):
            built[f.name] = _build(type(default), values.get(f.name, {}), default)
        else:
            built[f.name] = _convert(values.get(f.name, default), hints[f.name])
    return kind(**built)


def _convert(value: Any, kind: Any) -> Any:
    """Return a value as its option holds it."""
    if get_origin(kind) is list and type(value) is list:
        return [_convert(part, get_args(kind)[0]) for part in value]
    if kind is Any and type(value) is list:
        return [_convert(part, Any) for part in value]
    if kind is float and type(value) is int:
        return float(value)
    is_plain = type(value) in (int, float, bool, str) if kind is Any else type(value) is kind
    if not is_plain or (isinstance(value, str) and (value == "???" or "${" in value)):
        raise _NotPlain
    return value
