"""The frozen options of a run: plain YAML with a digest, which may come damaged, or from another person.

Loads neither torch nor OmegaConf.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainyard.errors import ConfigError
from trainyard.files import read_file, write_atomically

LOCATION = "data.path"
"""The option that says where the data are. Moving them changes it; which data they are, checkpoints know."""

_DIGEST = "# SHA-256 of the options, to notice a change by hand or by a bad disk: "
_HEADER = f"""\
# Every option of this run, as it was started. Presets are not read again.
# Resume the run: trainyard resume <this folder>
# A resume may change only options that do not affect the mathematics: trainyard resume <this folder> option=value
{_DIGEST}"""
_MOST_BYTES = 2**20
_FORBIDDEN = {yaml.AnchorToken: "an anchor", yaml.AliasToken: "an alias", yaml.TagToken: "a tag"}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-4 as the number that Python and Hydra read, not as YAML 1.1 does, as text; refuses a key twice."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(values) < len(node.value):
            (key, _), *_ = Counter(key.value for key, _ in node.value).most_common(1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key}", node.start_mark)
        return values


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write a list twice that is there twice: an alias would be refused when it is read."""
        return True


_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def write_frozen(tree: Mapping[str, Any], path: Path) -> None:
    """Write every option with its value, and a digest of them, atomically.

    Args:
        tree: groups of options are mappings in it.
    """
    text = yaml.dump(dict(tree), Dumper=_Dumper, allow_unicode=True, sort_keys=False)
    write_atomically(path, f"{_HEADER}{hash_options(dict(_walk(tree)))}\n{text}")


def read_frozen(path: Path) -> Any:
    """Return the tree of a frozen configuration, whatever it holds; the digest is not checked.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has more than plain values.
    """
    return _parse(_read_text(path), path)


def read_options(path: Path) -> tuple[dict[str, Any], str]:
    """Return the options by dotted name, and the digest that the file states; "" if it states none.

    Raises:
        ConfigError: as for `read_frozen`.
    """
    text = _read_text(path)
    stated = re.search(rf"^{re.escape(_DIGEST)}(.*)$", text, re.MULTILINE)
    return dict(_walk(_parse(text, path))), stated[1] if stated else ""


def build_tree(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of options given by dotted name."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *groups, leaf = name.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return tree


def hash_options(options: Mapping[str, Any]) -> str:
    """Hash options by dotted name, all but `LOCATION`."""
    hashed = {name: value for name, value in options.items() if name != LOCATION}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()


def _read_text(path: Path) -> str:
    try:
        return read_file(path, most_bytes=_MOST_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file, so {path.parent} is not the folder of a run. Runs are under runs/."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not YAML: {error}.") from None


def _parse(text: str, path: Path) -> Any:
    try:
        found = "a reference to other values, ${...}" if "${" in text else _find_forbidden(text)
        if found:
            raise ConfigError(
                f"{path}: has {found}, and a run's options are plain values. Trainyard never writes such a file: find "
                "out who did before you use this folder."
            )
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path}{where}: not YAML: {reason or 'cannot be read'}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: not YAML: nested too deeply.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: not YAML: {error}.") from None


def _find_forbidden(text: str) -> str:
    """Return what YAML has that could run code or grow without bound; "" for plain values. Stops where it finds it."""
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > _MOST_LEVELS:
            return "too many levels"
        if type(token) in _FORBIDDEN:
            return _FORBIDDEN[type(token)]
    return ""


_OPENING = (
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
_MOST_LEVELS = 20


def _walk(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value:
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
