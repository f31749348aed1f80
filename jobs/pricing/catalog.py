"""Reads CSV catalogues and checks them against what training and prediction need."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard import foreign
from trainyard.data.amounts import AmountReader
from trainyard.data.raw import list_files
from trainyard.errors import UserError
from trainyard.text import find_nearest, format_override, join_names


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
    tables = [path for path in files if path.suffix.lower() in (".csv", ".tsv")]
    if len(tables) != 1:
        names = ", ".join(path.name for path in tables) or "no .csv"
        raise UserError(
            f"{raw}: expected one CSV file, or one named {prefer}; found {names}. Name the file: packing.file=NAME, or "
            "pass the file itself to a command that takes one."
        )
    return tables[0]


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
    needed = {columns.key, *columns.texts, columns.price, *columns.numbers, columns.image} - {""}
    yield from foreign.read_rows(
        path, columns=needed, describe_missing=lambda names, by: _describe_missing_columns(names, columns, by)
    )


def _describe_missing_columns(names: Sequence[str], columns: Columns, delimiter: str) -> str:
    """List the missing columns, the ones most like them, and the options that name others."""
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
            remedies.append(format_override(f"packing.{option}", chosen if option.endswith("s") else chosen[0]))
    separated = "" if delimiter in ("", ",") else f", separated by {foreign.DELIMITERS[delimiter]}"
    has = join_names(names, most=20) or "none"
    fault = f"no {_plural('column', missing)} {', '.join(missing)}. It has: {has}{separated}."
    if not columns.price:
        return f"{fault} Rename the columns in the file: the run was trained with the missing names."
    return f"{fault} Name the right {_plural('column', missing)}: {' '.join(remedies)}"


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
            message = f"{columns.price} is '{row[columns.price]}', expected a number above 0"
            faults.append((message, _name_price_fault(row[columns.price], price)))
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
