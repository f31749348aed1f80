"""Merges presets that are based on each other, as Hydra would, which takes ten times as long to load and to do it."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from trainyard.yaml_reader import load_yaml

SCHEMA = "schema"
"""What presets call the options of their family."""


def merge_presets(preset: Path, config_type: type[Any]) -> DictConfig | None:
    """Return the typed values of a preset, with its interpolations as they are written.

    Args:
        config_type: the dataclass with the options of the family.

    Returns:
        None: a preset has more defaults than `[NAME, _self_]`, or something is wrong: Hydra knows what.
    """
    try:
        tree = OmegaConf.structured(config_type)
        for values in reversed(_read_chain(preset)):
            tree.merge_with(values)
    except (_NeedsHydra, YAMLError, OmegaConfBaseException, ValueError, OSError):
        return None
    return tree if isinstance(tree, DictConfig) and OmegaConf.get_type(tree) is config_type else None


class _NeedsHydra(Exception):
    """A preset has what only Hydra understands."""


def _read_chain(preset: Path) -> list[dict[str, Any]]:
    """Return the values of a preset, of the one that it is based on, and so on to the family's base preset."""
    if preset.with_name(f"{SCHEMA}.yaml").exists():
        raise _NeedsHydra
    chain: dict[str, dict[str, Any]] = {}
    name = preset.stem
    while name != SCHEMA:
        text = preset.with_name(f"{name}.yaml").read_text(encoding="utf-8")
        values = load_yaml(text)
        has_header = re.search(r"^\s*#\s*@", text, re.MULTILINE)  # such as `# @package`
        if has_header or name in chain or not isinstance(values, dict) or "hydra" in values:
            raise _NeedsHydra
        match values.pop("defaults", None):
            case [str(base), "_self_"] if re.fullmatch(r"[A-Za-z]\w*", base):
                chain[name], name = values, base
            case _:
                raise _NeedsHydra
    return list(chain.values())
