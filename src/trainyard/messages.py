"""Messages to a person, through loguru, which is loaded with the first one: that takes as long as a whole status.

What runs in every command logs through the `logger` here; what loads much anyway imports loguru's own, the same one.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loguru import Logger
    from loguru import logger as logger


def print_messages() -> None:
    """Print messages on standard error as they are, in this process; loads nothing if none comes."""
    if "loguru" in sys.modules:
        _print_plainly(sys.modules["loguru"].logger)
    elif _PlainFromTheStart not in sys.meta_path:
        sys.meta_path.insert(0, _PlainFromTheStart)


def _print_plainly(logger: "Logger") -> None:
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="INFO")


class _PlainFromTheStart:
    """Finds loguru once for the import system, whoever imports it, and sets it up as soon as it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "loguru":
            return None
        sys.meta_path.remove(_PlainFromTheStart)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_set_up(module: ModuleType) -> None:
            load(module)
            _print_plainly(module.logger)

        spec.loader.exec_module = load_and_set_up  # type: ignore[method-assign]
        return spec


class _LateLogger:
    """Stands for loguru's logger."""

    def __getattr__(self, name: str) -> Any:
        from loguru import logger

        return getattr(logger, name)


if not TYPE_CHECKING:
    logger = _LateLogger()
