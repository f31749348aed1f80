"""Reads CSV catalogues and checks them against what training and prediction need."""

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One row of a catalogue."""

    key: str
    text: str
    price: float  # nan if the row cannot train
    numbers: tuple[float, ...]  # the further numeric columns; nan where a cell is empty
    image: str  # path or URL, "" if there is none
    fault: str = ""  # why the row cannot train; "" if it can


@dataclass(frozen=True)
class Columns:
    """The CSV column of each field."""

    key: str
    text: str
    price: str  # "" to read no prices, for prediction
    numbers: tuple[str, ...] = ()
    image: str = ""


def find(raw: Path, *, prefer: str) -> Path:
    """Return `raw` if it is a file, else the CSV file in the folder `raw`: `prefer` if it exists, else the only one.

    Raises:
        UserError: there is no CSV file, or several.
    """
    if not raw.exists():
        raise UserError(f"{raw}: no such file or folder. Expected a CSV catalogue, or a folder that contains one.")
    if raw.is_file():
        return raw
    found = sorted(raw.glob("*.csv"))
    if raw / prefer in found:
        return raw / prefer
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no .csv"
        raise UserError(
            f"{raw}: expected one CSV file, or one named {prefer}; found {names}. Name the file: packing.file=NAME, or "
            "pass the file itself to a command that takes one."
        )
    return found[0]


def read(path: Path, columns: Columns) -> list[Entry]:
    """Read a UTF-8 catalogue; quoted fields may contain line breaks and commas.

    A row that cannot train is kept with its `fault`: packing reports it, or skips it.

    Raises:
        UserError: a column is missing, a row has the wrong number of fields, two rows have the same id, or the file
            is not UTF-8.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a description may exceed csv's default of 128 KiB
    entries: list[Entry] = []
    line_by_key: dict[str, int] = {}
    for line, row in _read_rows(path, columns):
        key = row[columns.key].strip()
        if not key:
            raise UserError(f"{path}, line {line}: no {columns.key}. Every row needs one.")
        if key in line_by_key:
            raise UserError(
                f"{path}, line {line}: {columns.key} '{key}' is already used in line {line_by_key[key]}; "
                "ids must be unique. Remove or rename one of them."
            )
        line_by_key[key] = line
        entries.append(_parse_row(key, row, columns, f"{path.name}, line {line}"))
    return entries


def _read_rows(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row with the number of the line on which it ends."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            _check_columns(path, names, columns)
            for values in reader:
                if len(values) == len(names):
                    yield reader.line_num, dict(zip(names, values, strict=True))
                elif values:
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(values)} fields, the header has {len(names)}. "
                        "Quote texts that contain commas or line breaks, and double the quotes within them."
                    )
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}). Convert the file: "
            f"iconv -f cp1252 -t utf-8 {path.name} > utf8.csv"
        ) from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: invalid CSV ({error}). Fix the quotes there.") from None


def _check_columns(path: Path, names: Sequence[str], columns: Columns) -> None:
    options = [
        ("packing.id_column", columns.key),
        ("packing.text_column", columns.text),
        ("packing.price_column", columns.price),
        ("packing.picture_column", columns.image),
        *(("packing.numeric_columns", name) for name in columns.numbers),
    ]
    for option, name in options:
        if name and name not in names:
            raise UserError(
                f"{path}: no column '{name}'. It has: {', '.join(names) or 'none'}. "
                f"Name the right column: {option}=COLUMN"
            )


def _parse_row(key: str, row: dict[str, str], columns: Columns, place: str) -> Entry:
    text, fault, price = row[columns.text], "", math.nan
    if columns.price:
        price = _parse_number(row[columns.price])
        if not (price > 0 and math.isfinite(price)):
            fault = f"{place}: {columns.price} is '{row[columns.price]}', expected a number above 0"
        elif not text.strip():
            fault = f"{place}: {columns.text} is empty"
    numbers = []
    for name in columns.numbers:
        cell = row[name].strip()
        numbers.append(_parse_number(cell))
        if cell and math.isnan(numbers[-1]):
            fault = fault or f"{place}: {name} is '{cell}', expected a number or an empty cell"
    image = row[columns.image].strip() if columns.image else ""
    return Entry(key, text, math.nan if fault else price, tuple(numbers), image, fault)


def _parse_number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
