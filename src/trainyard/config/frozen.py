"""The frozen options of a run: plain YAML with a digest, which may come damaged, or from another person.

Loads neither torch nor OmegaConf.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainyard.config.yaml_text import EXPONENT, MOST_BYTES, load_yaml
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


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write a list twice that is there twice: an alias would be refused when it is read."""
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


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
    return load_yaml(_read(path), path, error=ConfigError, plain=True)


def read_options(path: Path) -> tuple[dict[str, Any], str]:
    """Return the options by dotted name, and the digest that the file states; "" if it states none.

    Raises:
        ConfigError: as for `read_frozen`.
    """
    data = _read(path)
    options = dict(_walk(load_yaml(data, path, error=ConfigError, plain=True)))
    stated = re.search(rf"^{re.escape(_DIGEST)}(.*)$", data.decode(), re.MULTILINE)
    return options, stated[1] if stated else ""


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


def _read(path: Path) -> bytes:
    try:
        return read_file(path, most_bytes=MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file, so {path.parent} is not the folder of a run. Runs are under runs/."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def _walk(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value:
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
