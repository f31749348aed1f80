"""Prints text for people: the only place that does, so that no text of others controls a terminal."""

from typing import TYPE_CHECKING, TextIO

from loguru import logger

from trainyard.text import make_printable

if TYPE_CHECKING:
    from loguru import Record


def say(*texts: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print like `print`, without control characters: names, messages and values may be a stranger's."""
    print(make_printable(" ".join(map(str, texts))), file=file, end=end, flush=flush)


def make_log_printable() -> None:
    """Let no log message contain control characters, whatever it is written to."""

    def patch(record: "Record") -> None:
        record["message"] = make_printable(record["message"])

    logger.configure(patcher=patch)
