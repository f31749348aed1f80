"""Writes tables: CSV in which no spreadsheet finds a formula, which it reads back, JSON and Parquet.

Excel and LibreOffice compute a cell that begins with = + - @, a tab or a line break, and a file name or an id may come
from a stranger. Such a text gets an apostrophe in front, which marks text in both programs (OWASP, "CSV Injection");
`read_table` takes it off again. Numbers, also those written as text, stay as they are.
"""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from numbers import Number
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from trainyard.errors import UserError
from trainyard.text import quote_path

_FORMULA = re.compile("'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")  # the last four: full-width = + - @
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_WRITE_ANOTHER = "Was it changed by hand? Write another: trainyard predict RUN RAW OUT.csv"


def write_table(
    file: TextIO, columns: Sequence[str], rows: Iterable[Mapping[str, object]], *, line_end: str = "\r\n"
) -> None:
    """Write a header and rows; a column that a row lacks is left empty.

    Args:
        file: opened with newline="".
    """
    table = csv.writer(file, lineterminator=line_end)
    table.writerow([_protect(name) for name in columns])
    for row in rows:
        assert row.keys() <= set(columns), "a value without a column would be lost"
        table.writerow([_protect(row.get(name, "")) for name in columns])


def check_ending(path: Path) -> None:
    """Raise a UserError unless `write_rows` can write a file of this name."""
    suffix, csv_path = path.suffix.lower(), quote_path(path.with_suffix(".csv"))
    if suffix not in (".csv", ".json", ".parquet"):
        raise UserError(
            f"{path}: its ending names no kind of table. Expected .csv, .json or .parquet, such as {csv_path}"
        )
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(
            f"{path}: pyarrow, which writes Parquet, is not installed: pip install pyarrow. Or name {csv_path}"
        )


def write_rows(file: BinaryIO, suffix: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table in the format of a file's ending: CSV as `write_table`, a JSON list of objects, or Parquet.

    JSON has null for numbers that are not finite. Of Parquet, all rows are held in memory.

    Args:
        suffix: one that `check_ending` accepts.
    """
    if suffix.lower() == ".parquet":
        import pyarrow  # here: few have it
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file)
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    if suffix.lower() == ".json":
        text.write("[")
        for number, row in enumerate(rows):
            lost = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            text.write(("," if number else "") + "\n" + json.dumps({**row, **dict.fromkeys(lost)}, ensure_ascii=False))
        text.write("\n]\n")
    else:
        write_table(text, columns, rows)
    text.detach()  # flushes, and leaves the file open


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_rows` wrote; of CSV, all values are texts."""
    if path.suffix.lower() == ".json":
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        return rows
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        return list(parquet.read_table(path).to_pylist())
    return list(read_table(path))


def read_table(path: Path, *, columns: Sequence[str] = (), remedy: str = "") -> Iterator[dict[str, str]]:
    """Yield the rows of a table that `write_table` wrote, with every text as it was before.

    Args:
        columns: that the table must have.
        remedy: how to get such a table, for the errors; "": it comes from `trainyard predict`.

    Raises:
        UserError: the file is missing, not UTF-8 or not CSV, lacks a column, or a row has too many or too few fields.
    """
    if not path.is_file():
        first = f"Write it first: trainyard predict RUN RAW {quote_path(path)}"
        raise UserError(f"{path}: no such file. {remedy or first}")
    remedy = remedy or _WRITE_ANOTHER
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a cell of detections may exceed csv's default of 128 KiB
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.reader(file, strict=True)
            names = [_restore(name) for name in next(table, [])]
            if missing := [name for name in columns if name not in names]:
                raise UserError(
                    f"{path}: no column {', '.join(missing)}; it has: {', '.join(names) or 'none'}. {remedy}"
                )
            for cells in table:
                if len(cells) == len(names):
                    yield dict(zip(names, map(_restore, cells), strict=True))
                elif cells:
                    raise UserError(
                        f"{path}, line {table.line_num}: {len(cells)} fields, the header has {len(names)}. {remedy}"
                    )
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8 ({error}). {remedy}") from None


def _protect(value: object) -> object:
    if isinstance(value, Number):
        return value
    text = str(value)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def _restore(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
