"""Reads YAML that may be damaged or another person's: bounded in nesting and in the digits of numbers, no key twice."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainyard.errors import UserError

MOST_BYTES = 2**20
"""Of a file of YAML: those that people write have a few thousand."""

EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
"""1e-4, which Python and Hydra read as a number, and YAML 1.1 as text."""


def load_yaml(data: bytes, path: Path, *, error: type[UserError], plain: bool = False) -> Any:
    """Return what YAML holds.

    Args:
        data: up to one byte more than `MOST_BYTES`.
        path: where they are from, for the error.
        error: the class of the exception.
        plain: refuse anchors, aliases and tags, which could run code or grow without bound.

    Raises:
        UserError: of the class `error`: it is not YAML, or more than is allowed.
    """
    with _explain(path, error):
        text = _check(data, path, error, _FORBIDDEN if plain else {})
        return yaml.load(text, Loader=_Loader)


def compose_yaml(data: bytes, path: Path, *, error: type[UserError]) -> yaml.Node | None:
    """Return the nodes of YAML, which know their lines; as `load_yaml`."""
    with _explain(path, error):
        text = _check(data, path, error, {})
        loader = yaml.SafeLoader(text)
        loader.name = str(path)  # the nodes' errors say it
        return loader.get_single_node()


@contextmanager
def _explain(path: Path, error: type[UserError]) -> Iterator[None]:
    try:
        yield
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(problem, "problem", None) or str(problem).strip().partition("\n")[0]
        raise error(f"{path}{where}: not YAML: {reason or 'cannot be read'}.") from None
    except RecursionError:
        raise error(f"{path}: not YAML: nested too deeply.") from None
    except UserError:
        raise
    except ValueError as problem:
        raise error(f"{path}: not YAML: {problem}.") from None


def _check(data: bytes, path: Path, error: type[UserError], forbidden: dict[type, str]) -> str:
    """Return the text if it is small enough, not nested too deeply, and has nothing forbidden."""
    if len(data) > MOST_BYTES:
        raise error(f"{path}: is larger than {MOST_BYTES} bytes, the most that is expected.")
    text, depth = data.decode(), 0
    construct = "a reference to other values, ${...}" if forbidden and "${" in text else ""
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > _MOST_LEVELS:
            raise RecursionError
        if construct := construct or forbidden.get(type(token), ""):
            raise error(
                f"{path}: has {construct}, and a run's options are plain values. Trainyard never writes such a file: "
                "find out who did before you use this folder."
            )
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-4 as a number, and refuses a key twice."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(values) < len(node.value):
            (key, _), *_ = Counter(key.value for key, _ in node.value).most_common(1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key}", node.start_mark)
        return values


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
_FORBIDDEN: dict[type, str] = {yaml.AnchorToken: "an anchor", yaml.AliasToken: "an alias", yaml.TagToken: "a tag"}
_MOST_LEVELS = 20
_OPENING = (
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
