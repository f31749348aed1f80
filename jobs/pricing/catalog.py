"""Reads CSV catalogues and checks them against what training and prediction need."""

import csv
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TextIO

from loguru import logger

from trainyard.data.raw import list_files
from trainyard.errors import UserError
from trainyard.text import cut, find_nearest

from .amounts import AmountReader

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


@dataclass(frozen=True)
class Entry:
    """One row of a catalogue."""

    key: str
    texts: tuple[str, ...]  # of each text column
    price: float  # nan if the row cannot train
    numbers: tuple[float, ...]  # the further numeric columns; nan where a cell is empty
    image: str  # path or URL, "" if there is none
    fault: str = ""  # why the row cannot train; "" if it can
    reason: str = ""  # the same in two words, to count rows by
    line: int = 0  # on which the row ends
    written_price: str = ""

    @property
    def text(self) -> str:
        """The texts below each other."""
        return "\n".join(self.texts)


@dataclass(frozen=True)
class Columns:
    """The CSV column of each field."""

    key: str
    texts: tuple[str, ...]
    price: str  # "" to read no prices, for prediction
    numbers: tuple[str, ...] = ()
    image: str = ""
    decimal_mark: str = "auto"  # one of `amounts.MARKS`


def find(raw: Path, *, prefer: str) -> Path:
    """Return `raw` if it is a file, else the CSV file in the folder `raw`: `prefer` if it exists, else the only one.

    Raises:
        UserError: there is no CSV file, or several.
    """
    if not raw.exists():
        raise UserError(f"{raw}: no such file or folder. Expected a CSV catalogue, or a folder that contains one.")
    if raw.is_file():
        return raw
    files = list_files(raw, {".csv", ".tsv", Path(prefer).suffix.lower()}, depth=0)
    if raw / prefer in files:
        return raw / prefer
    found = [path for path in files if path.suffix.lower() in (".csv", ".tsv")]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no .csv"
        raise UserError(
            f"{raw}: expected one CSV file, or one named {prefer}; found {names}. Name the file: packing.file=NAME, or "
            "pass the file itself to a command that takes one."
        )
    return found[0]


def read(path: Path, columns: Columns) -> list[Entry]:
    """Read a UTF-8 catalogue; quoted fields may contain line breaks and delimiters.

    A row that cannot train is kept with its `fault`: packing reports it, or skips it.

    Raises:
        UserError: a column is missing, a row has the wrong number of fields, two rows have the same id, a row to
            predict has none, a number could mean two values, or the file is not UTF-8.
    """
    entries: list[Entry] = []
    line_by_key: dict[str, int] = {}
    amounts = AmountReader(str(path), decimal_mark=columns.decimal_mark)
    for line, row in read_rows(path, columns):
        key = row[columns.key].strip()
        if not key and not columns.price:
            raise UserError(f"{path}, line {line}: no {columns.key}. Every row to predict needs one.")
        if key and key in line_by_key:
            raise UserError(
                f"{path}, line {line}: {columns.key} '{key}' is already used in line {line_by_key[key]}; "
                "ids must be unique. Remove or rename one of them."
            )
        line_by_key[key] = line
        entries.append(_parse_row(key, row, columns, amounts, file=path.name, line=line))
    if columns.price:
        amounts.refuse_doubt()
    return entries


def read_rows(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row, as text by column, with the number of the line on which it ends; see `read`."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a description may exceed csv's default of 128 KiB
    line = 0  # the last one read without an error
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = _find_delimiter(file, path, columns)
            quoting = choose_quoting(file, delimiter, name=str(path))
            reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
            names, line = next(reader), reader.line_num
            for values in reader:
                line = reader.line_num
                if len(values) == len(names):
                    yield line, dict(zip(names, values, strict=True))
                elif values:
                    raise UserError(
                        f"{path}, line {line}: {len(values)} fields, the header has {len(names)}. Quote texts that "
                        f"contain {DELIMITERS[delimiter]} or line breaks, and double the quotes within them."
                    )
    except UnicodeDecodeError as error:
        encoding = "utf-16" if path.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}). Convert the file: "
            f"iconv -f {encoding} -t utf-8 {path} > utf8.csv"
        ) from None
    except csv.Error as error:
        raise UserError(f"{path}, line {line + 1}: invalid CSV ({error}). Fix the quotes there.") from None


def choose_quoting(file: TextIO, delimiter: str, *, name: str) -> Literal[0, 3]:
    """Return csv.QUOTE_NONE for a tab-separated file whose quotes are part of its texts, else csv.QUOTE_MINIMAL.

    Many programs write tabs without quoting. Then a text that begins with a quote takes in tabs and line breaks up to
    a text that ends with one, and rows merge. The sign: a quoted reading merges lines, or breaks, although each line
    alone has as many fields as the header. Rewinds the file.

    Args:
        name: of the file, for the error and the log.

    Raises:
        UserError: the sign is there, but also a field that is quoted as a whole, or has doubled quotes.
    """
    if delimiter != "\t":
        return csv.QUOTE_MINIMAL
    line = _find_merged_line(file)
    file.seek(0)
    if not line:
        return csv.QUOTE_MINIMAL
    width, quoted = 0, ""
    for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
        width = width or len(row)
        if (row and len(row) != width) or width < 2:
            file.seek(0)
            return csv.QUOTE_MINIMAL
        quoted = quoted or next((field for field in row if re.fullmatch('".*"|.*"".*', field)), "")
    file.seek(0)
    if quoted:
        raise UserError(
            f"{name}, line {line}: are quotes part of the texts? A quote there would merge lines, which alone have the "
            f"{width} fields of the header, but elsewhere a field is quoted: {cut(quoted, 40)}. Remove the quotes "
            "around and within fields, or write the file with a program that doubles those within."
        )
    _log_unquoted(name, line, width)
    return csv.QUOTE_NONE


def _find_merged_line(file: TextIO) -> int:
    """Return the first line on which a quoted reading begins a field of several lines, or breaks; 0 if none."""
    reader = csv.reader(file, delimiter="\t", strict=True)
    line = 0
    try:
        for row in reader:
            if any("\n" in field or "\r" in field for field in row):
                return line + 1
            line = reader.line_num
    except csv.Error:
        return line + 1
    return 0


@cache  # packing reads the file several times
def _log_unquoted(name: str, line: int, count: int) -> None:
    logger.info(
        "{}: quotes are read as part of the texts: each line alone has the {} fields of the header, and the quote in "
        "line {} would merge lines",
        name, count, line,
    )  # fmt: skip


def _find_delimiter(file: TextIO, path: Path, columns: Columns) -> str:
    """Return the delimiter under which the header has every column, and rewind the file.

    Raises:
        UserError: there is none.
        csv.Error: the header's quotes are broken under each.
    """
    headers, errors = {}, []
    for delimiter in DELIMITERS:
        file.seek(0)
        try:
            headers[delimiter] = next(csv.reader(file, delimiter=delimiter, strict=True), [])
        except csv.Error as error:  # so it is for quoted names that another delimiter separates
            errors.append(error)
    file.seek(0)
    needed = {columns.key, *columns.texts, columns.price, *columns.numbers, columns.image} - {""}
    fitting = [delimiter for delimiter, names in headers.items() if needed <= set(names)]
    if not fitting:
        delimiter = max(headers, key=lambda candidate: len(headers[candidate]), default="")
        if errors and len(headers.get(delimiter, [])) < 2:
            raise errors[0]
        raise UserError(_describe_missing_columns(path, headers[delimiter], columns, delimiter))
    names = headers[fitting[0]]
    repeated = [name for name in sorted(needed) if names.count(name) > 1]
    if repeated:
        raise UserError(f"{path}: several columns are named '{repeated[0]}'. Rename all but one of them in the file.")
    if fitting[0] != ",":
        _log_delimiter(path, fitting[0])
    return fitting[0]


@cache  # packing reads the file several times
def _log_delimiter(path: Path, delimiter: str) -> None:
    logger.info("{}: the columns are separated by {}", path, DELIMITERS[delimiter])


def _describe_missing_columns(path: Path, names: Sequence[str], columns: Columns, delimiter: str) -> str:
    """Say which columns are missing, which look most like them, and which options name others."""
    options = {
        "id_column": [columns.key],
        "text_column": [columns.texts[0]],
        "further_text_columns": columns.texts[1:],
        "price_column": [columns.price],
        "numeric_columns": columns.numbers,
        "image_column": [columns.image],
    }
    missing, remedies = [], []
    for option, wanted in options.items():
        lacking = [name for name in wanted if name and name not in names]
        nearest = {name: find_nearest(name, names) for name in lacking}
        missing += [f"'{name}'" + "".join(f" (nearest: {near})" for near in nearest[name]) for name in lacking]
        if lacking:
            chosen = [(nearest.get(name, [name]) or ["COLUMN"])[0] for name in wanted]
            value = _format_list(chosen) if option.endswith("s") else chosen[0]
            remedies.append(shlex.quote(f"packing.{option}={value}"))
    separated = "" if delimiter == "," else f", separated by {DELIMITERS[delimiter]}"
    found = f"no {_plural('column', missing)} {', '.join(missing)}. It has: {', '.join(names) or 'none'}{separated}."
    if not columns.price:
        return f"{path}: {found} Rename the columns in the file: the run was trained with the missing names."
    return f"{path}: {found} Name the right {_plural('column', missing)}: {' '.join(remedies)}"


def _format_list(names: Sequence[str]) -> str:
    """Write a list as an option takes it, with quotes where they are needed."""
    quoted = [name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '\\"') + '"' for name in names]
    return f"[{','.join(quoted)}]"


def _plural(noun: str, counted: Sequence[str]) -> str:
    return noun if len(counted) == 1 else f"{noun}s"


def _parse_row(
    key: str, row: dict[str, str], columns: Columns, amounts: AmountReader, *, file: str, line: int
) -> Entry:
    texts = tuple(row[name] for name in columns.texts)
    faults = [] if key else [(f"no {columns.key}", "no id")]
    price = math.nan
    if columns.price:
        price = amounts.read_price(row[columns.price], line=line)
        if not (price > 0 and math.isfinite(price)):
            found = f"{columns.price} is '{row[columns.price]}', expected a number above 0"
            faults.append((found, _name_price_fault(row[columns.price], price)))
        elif not any(text.strip() for text in texts):
            faults.append((f"{' and '.join(columns.texts)} is empty", "no text"))
    numbers = []
    for name in columns.numbers:
        cell = row[name].strip()
        numbers.append(amounts.read_number(cell, line=line))
        if cell and math.isnan(numbers[-1]):
            faults.append((f"{name} is '{cell}', expected a number or an empty cell", f"{name} unreadable"))
    image = row[columns.image].strip() if columns.image else ""
    fault, reason = (f"{file}, line {line}: {faults[0][0]}", faults[0][1]) if faults else ("", "")
    written = row[columns.price].strip() if columns.price else ""
    price = math.nan if fault else price
    return Entry(key or f"line {line}", texts, price, tuple(numbers), image, fault, reason, line, written)


def _name_price_fault(cell: str, price: float) -> str:
    if not cell.strip():
        return "no price"
    return "price 0" if price == 0 else "price below 0" if -math.inf < price < 0 else "price unreadable"
