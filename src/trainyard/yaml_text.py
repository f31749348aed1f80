"""Reads and writes YAML as OmegaConf does, without loading OmegaConf; reads it with libyaml where that is installed.

OmegaConf's reader differs from YAML 1.1 in three ways: a key may not come twice, 1e-4 is a number, dates are text. In
what it writes, text that looks like a number or a truth value is always quoted.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

_DATE = "tag:yaml.org,2002:timestamp"
_EXPONENT = r"[-+]?[0-9](?:_?[0-9])*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"
"""What YAML 1.1 takes for text unless it has both a point and a sign: 1e-4 and 1.5e3."""


def load_yaml(text: str) -> Any:
    """Return what a YAML text says, in plain Python objects.

    Raises:
        yaml.YAMLError: with the words of PyYAML's own parser, whichever parser read it.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, UnicodeError):  # libyaml refuses some texts that PyYAML reads, such as lone surrogates
        return yaml.load(text, Loader=_PythonLoader)


def scan_yaml(text: str) -> Iterator[yaml.Token]:
    """Yield the tokens of a YAML text, as far as it is right; no value is constructed, so a small text stays small."""
    count = 0
    try:
        for token in yaml.scan(text, Loader=_Loader):
            count += 1
            yield token
    except (yaml.YAMLError, UnicodeError):
        tokens = yaml.scan(text, Loader=_PythonLoader)
        yield from (token for number, token in enumerate(tokens) if number >= count)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return a YAML text of plain values, in their order."""
    return str(yaml.dump(values, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_Dumper))


class _Dumper(yaml.Dumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write a list twice that is there twice."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        is_ambiguous = text in _TRUTH_VALUES or _is_number(text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if is_ambiguous else None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _Dumper.represent_text)
_WORDS = ("y", "n", "yes", "no", "true", "false", "on", "off")
_TRUTH_VALUES = {spelled for word in _WORDS for spelled in (word, word.capitalize(), word.upper())}


def _read_as_omegaconf(parent: type[Any]) -> type[Any]:
    """Return a loader that reads with the rules of OmegaConf."""

    class Loader(parent):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
            keys = set()
            for key, _ in node.value:
                if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                    continue
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        "while constructing a mapping",
                        node.start_mark,
                        f"found duplicate key {key.value}",
                        key.start_mark,
                    )
                keys.add(key.value)
            return dict(super().construct_mapping(node, deep=deep))

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^{_EXPONENT}$"), list("-+0123456789."))
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


_PythonLoader = _read_as_omegaconf(yaml.SafeLoader)
_Loader = _read_as_omegaconf(yaml.CSafeLoader) if yaml.__with_libyaml__ else _PythonLoader
