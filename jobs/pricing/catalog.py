"""CSV catalogues: read with a real parser, held against what training and prediction need."""

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
    price: float  # nan where the row has none that trains
    numbers: tuple[float, ...]  # the further numeric columns; nan where a cell is empty
    picture: str  # file name, "" where there is none
    fault: str = ""  # why the row cannot train; "" where it can


@dataclass(frozen=True)
class Columns:
    """Which columns of the CSV are what."""

    key: str
    text: str
    price: str  # "" to read none: the catalogue is to be priced
    numbers: tuple[str, ...] = ()
    picture: str = ""


def find(raw: Path, *, prefer: str) -> Path:
    """Return the CSV file that `raw` is, or that the folder `raw` holds: `prefer` if it is there, else the only one.

    Raises:
        UserError: there is none, or several.
    """
    if not raw.exists():
        raise UserError(f"{raw}: no such file or folder. Expected a CSV catalogue, or a folder that holds one.")
    if raw.is_file():
        return raw
    found = sorted(raw.glob("*.csv"))
    if raw / prefer in found:
        return raw / prefer
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no .csv"
        raise UserError(
            f"{raw}: expected one CSV file, or one named {prefer}; found {names}. Name it: packing.file=NAME, or give "
            "the file itself to a command that takes one."
        )
    return found[0]


def read(path: Path, columns: Columns) -> list[Entry]:
    """Read a catalogue: UTF-8, quoted fields may hold line breaks, commas and anything else.

    A row whose price or text cannot train is kept with its `fault`: packing names it, or leaves it out.

    Raises:
        UserError: a column is missing, a row has another number of fields, two rows have one id, or bytes are no UTF-8.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a description may be longer than csv's 128 KiB
    entries: list[Entry] = []
    line_of: dict[str, int] = {}
    for line, row in _rows(path, columns):
        key = row[columns.key].strip()
        if not key:
            raise UserError(f"{path}, line {line}: no {columns.key}. Every row needs one.")
        if key in line_of:
            raise UserError(
                f"{path}, line {line}: {columns.key} '{key}' stands in line {line_of[key]} too; "
                "an id must name one row. Remove or rename one of them."
            )
        line_of[key] = line
        entries.append(_entry(key, row, columns, f"{path.name}, line {line}"))
    return entries


def _rows(path: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row with the number of the line on which it ends."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            _require(path, names, columns)
            for values in reader:
                if len(values) == len(names):
                    yield reader.line_num, dict(zip(names, values, strict=True))
                elif values:
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(values)} fields, the header has {len(names)}. "
                        'Is a text with a comma or line break not in quotes, or a quote within it not doubled ("")?'
                    )
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}). Convert the file: "
            f"iconv -f cp1252 -t utf-8 {path.name} > utf8.csv"
        ) from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: no CSV ({error}). Mend the quotes there.") from None


def _require(path: Path, names: Sequence[str], columns: Columns) -> None:
    options = [
        ("packing.id_column", columns.key),
        ("packing.text_column", columns.text),
        ("packing.price_column", columns.price),
        ("packing.picture_column", columns.picture),
        *(("packing.numeric_columns", name) for name in columns.numbers),
    ]
    for option, name in options:
        if name and name not in names:
            raise UserError(
                f"{path}: no column '{name}'. It has: {', '.join(names) or 'none'}. "
                f"Name the one that is meant: {option}=COLUMN"
            )


def _entry(key: str, row: dict[str, str], columns: Columns, place: str) -> Entry:
    text, fault, price = row[columns.text], "", math.nan
    if columns.price:
        price = _number(row[columns.price])
        if not (price > 0 and math.isfinite(price)):
            fault = f"{place}: {columns.price} is '{row[columns.price]}', expected a number above 0"
        elif not text.strip():
            fault = f"{place}: {columns.text} is empty"
    numbers = []
    for name in columns.numbers:
        cell = row[name].strip()
        numbers.append(_number(cell))
        if cell and math.isnan(numbers[-1]):
            fault = fault or f"{place}: {name} is '{cell}', expected a number or nothing"
    picture = row[columns.picture].strip() if columns.picture else ""
    return Entry(key, text, math.nan if fault else price, tuple(numbers), picture, fault)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
