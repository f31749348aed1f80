"""Reads the texts, tables and JSON files that other people and programs wrote, in one way for every family."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from loguru import logger

from trainyard.errors import UserError
from trainyard.files import parse_json, raise_failed_disk
from trainyard.text import cut, join_names, quote_path, suggest_nearest

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
T = TypeVar("T")

_read: ContextVar[set[Path] | None] = ContextVar("_read", default=None)


@contextmanager
def remember_reads() -> Iterator[set[Path]]:
    """Yield the set of files that are read within the block, which grows as they are."""
    read = set[Path]()
    token = _read.set(read)
    try:
        yield read
    finally:
        _read.reset(token)


def note_read(path: Path) -> None:
    """Record that a file is read, for `remember_reads`."""
    if (read := _read.get()) is not None:
        read.add(path)


def read_text(path: Path) -> str:
    """Read a file in UTF-8, with or without a byte order mark, its line ends as they are.

    Raises:
        UserError: it is missing or not UTF-8.
    """
    note_read(path)
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise UserError(f"{path}: cannot be read (it is not a regular file).")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise_failed_disk(error, path)
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
        line = data.count(b"\n", 0, error.start) + 1
        name, utf8 = quote_path(path), quote_path(f"{path}.utf8")
        raise UserError(
            f"{path}, line {line}: expected UTF-8, found the byte {data[error.start]:#04x}. If it is {encoding}, "
            f"convert it: iconv -f {encoding} -t utf-8 {name} > {utf8} && mv {utf8} {name}"
        ) from None


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a text that are not blank, each with its number from 1."""
    lines = enumerate(re.split(r"\r\n|\r|\n", read_text(path)), 1)
    return [(number, line) for number, line in lines if line.strip()]


def read_json(path: Path, kind: type[T], *, expected: str) -> T:
    """Read JSON, and check every value against a type; unknown keys are ignored.

    Nothing is converted, except that 1.0 is the whole number 1.

    Args:
        kind: a type for `msgspec`.
        expected: content of the file, for the errors.

    Raises:
        UserError: it is not JSON, or a value has another type; the message names its place in the file.
    """
    import msgspec  # here: whoever submits a job reads no JSON of others

    text = read_text(path)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:  # maybe only of NaN, which JSON has not, or of 1.0 for 1: Python programs write both
        pass
    try:
        content = parse_json(text, parse_float=_read_float)
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could not be stored
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).replace("`", "").partition(" - at $")
        what = what.replace("Object missing required field", "has no").replace(", got ", ", found ")
        what = what.replace("Expected", "expected")
        raise UserError(f"{path}: {place.lstrip('.') or 'the content'}: {what}. Expected: {expected}.") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}). Expected: {expected}.") from None


def _read_float(text: str) -> float:
    """Read a number; a whole one is an int, which counts as a float where one is expected."""
    value = float(text)
    return int(value) if value.is_integer() else value


def read_rows(
    path: Path,
    *,
    columns: Collection[str] = (),
    further: Collection[str] | None = None,
    describe_missing: Callable[[Sequence[str], str], str] | None = None,
    lower: bool = False,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row of a table, as text by column, with the number of the line on which it ends; skips empty lines.

    Columns are separated by what gives a header with all of `columns`: commas, semicolons, tabs or vertical bars. Names
    of columns have no spaces around them; cells are as written. Quoted cells may contain line breaks and delimiters.

    Args:
        columns: that must be there.
        further: that may be there, and no others; None: any.
        describe_missing: makes the error's text of the names that are there and their delimiter, "" if there is none.
        lower: whether names of columns count in lower case.

    Raises:
        UserError: as for `read_text`; a column is missing, or two have its name; quotes are broken; or a row has more
            or fewer cells than the header.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a description may exceed csv's default of 128 KiB
    text, line = read_text(path), 0
    try:
        clean = str.lower if lower else str
        delimiter = _find_delimiter(text, path, columns, describe_missing, clean)
        quoting = _choose_quoting(text, delimiter, path)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
        names, line = [clean(name.strip()) for name in next(reader, [])], reader.line_num
        if further is not None and (unknown := [name for name in names if name not in {*columns, *further}]):
            near = suggest_nearest(unknown[0], [*columns, *further])
            raise UserError(
                f"{path}, line 1: expected the columns {', '.join(columns)}, and maybe {', '.join(further)}; found "
                f"'{join_names(unknown[:1])}'.{near} Rename or remove the column."
            )
        for cells in reader:
            line = reader.line_num
            if len(cells) == len(names):
                yield line, dict(zip(names, cells, strict=True))
            elif cells:
                raise UserError(
                    f"{path}, line {line}: {len(cells)} cells, the header has {len(names)}. Quote texts that contain "
                    f"{DELIMITERS[delimiter]} or line breaks, and double the quotes within them."
                )
    except csv.Error as error:
        raise UserError(f"{path}, line {line + 1}: not a table ({error}). Fix the quotes there.") from None


def _choose_quoting(text: str, delimiter: str, path: Path) -> Literal[0, 3]:
    """Return csv.QUOTE_NONE for a tab-separated file whose quotes are part of its texts, else csv.QUOTE_MINIMAL.

    Many programs write tabs without quoting. Then a text that begins with a quote takes in tabs and line breaks up to
    a text that ends with one, and rows merge. The sign: a quoted reading merges lines, or breaks, although each line
    alone has as many cells as the header.

    Raises:
        UserError: the sign is there, but also a cell that is quoted as a whole, or has doubled quotes.
    """
    line = _find_merged_line(text) if delimiter == "\t" and '"' in text else 0
    if not line:
        return csv.QUOTE_MINIMAL
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    widths = {len(row) for row in rows}
    if len(widths) > 1 or widths <= {0, 1}:
        return csv.QUOTE_MINIMAL
    (width,) = widths
    quoted = next((cell for row in rows for cell in row if re.fullmatch('".*"|.*"".*', cell)), "")
    if quoted:
        raise UserError(
            f"{path}, line {line}: are quotes part of the texts? A quote there would merge lines, which alone have the "
            f"{width} cells of the header, but elsewhere a cell is quoted: {cut(quoted, 40)}. Remove the quotes around "
            "and within cells, or write the file with a program that doubles those within."
        )
    _log_unquoted(str(path), line, width)
    return csv.QUOTE_NONE


def _find_merged_line(text: str) -> int:
    """Return the first line on which a quoted reading begins a cell of several lines, or breaks; 0 if none."""
    reader, line = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True), 0
    try:
        for row in reader:
            if any("\n" in cell or "\r" in cell for cell in row):
                return line + 1
            line = reader.line_num
    except csv.Error:
        return line + 1
    return 0


@cache  # packing reads a table several times
def _log_unquoted(path: str, line: int, width: int) -> None:
    logger.info(
        "{}: quotes are read as part of the texts: each line alone has the {} cells of the header, and the quote in "
        "line {} would merge lines",
        path, width, line,
    )  # fmt: skip


@cache
def _log_delimiter(path: str, delimiter: str) -> None:
    logger.info("{}: the columns are separated by {}", path, DELIMITERS[delimiter])


def _find_delimiter(
    text: str,
    path: Path,
    columns: Collection[str],
    describe_missing: Callable[[Sequence[str], str], str] | None,
    clean: Callable[[str], str],
) -> str:
    """Return the delimiter under which the header has every column and, among those, the most."""
    headers: dict[str, list[str]] = {}
    errors: list[csv.Error] = []
    for delimiter in DELIMITERS:
        try:
            cells = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), [])
        except csv.Error as error:  # so it is for quoted names that another delimiter separates
            errors.append(error)
        else:
            headers[delimiter] = [clean(name.strip()) for name in cells]
    fitting = [mark for mark, names in headers.items() if set(columns) <= set(names)]
    best = max(fitting or headers, key=lambda mark: len(headers[mark]), default="")
    names = headers.get(best, [])
    if errors and len(names) < 2:
        raise errors[0]
    if not fitting:
        if describe_missing is not None:
            raise UserError(f"{path}: {describe_missing(names, best)}")
        missing = ", ".join(sorted(set(columns) - set(names)))
        raise UserError(f"{path}, line 1: no column {missing}. It has: {join_names(names, most=20) or 'none'}.")
    repeated = [name for name in names if (name in columns or not columns) and names.count(name) > 1]
    if repeated:
        raise UserError(
            f"{path}: several columns are named '{join_names(repeated[:1])}'. Rename all but one of them in the file."
        )
    if best != ",":
        _log_delimiter(str(path), best)
    return best
