"""Reading CSV catalogues."""

import re
from pathlib import Path

import pytest

from trainyard.errors import UserError

from . import catalog
from .cases import COLUMNS, format_csv, write_catalogue


def test_the_reader_handles_line_breaks_quotes_html_a_byte_order_mark_and_a_very_long_text(tmp_path: Path) -> None:
    text = 'Item Name: "Best" <b>caf\u00e9</b>, one\nBullet Point 1: a,b\r\n\nProduct Description: ' + "long " * 40_000
    path = tmp_path / "some.csv"
    path.write_text("\ufeff" + format_csv([["1", text, "3.5"], ["2", "x", "1e3"]]), encoding="utf-8", newline="")
    first, second = catalog.read(path, COLUMNS)
    assert (first.key, first.text, first.price, first.fault) == ("1", text, 3.5, "")
    assert second.price == 1000


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (
            [["1", "x", "2"]],
            "sample_id,text,price",
            "no column 'catalog_content'. It has: sample_id, text, price. Name",
        ),
        ([["1", "x", "2"]], "sample_id,catalog_content,cost", "packing.price_column=COLUMN"),
        ([["1", "x", "2"], ["1", "y", "3"]], None, "line 3: sample_id '1' is already used in line 2"),
        ([["1", "x", "2"], ["2", "y"]], None, "line 3: 2 fields, the header has 3"),
        ([["", "x", "2"]], None, "line 2: no sample_id"),
    ],
)
def test_a_broken_catalogue_is_refused_with_file_and_line(
    rows: list[list[str]], header: str | None, message: str, tmp_path: Path
) -> None:
    path = write_catalogue(tmp_path, rows, **({"header": header} if header else {}))
    with pytest.raises(UserError, match=re.escape(message)):
        catalog.read(path, COLUMNS)


def test_bytes_that_are_not_utf_8_and_unclosed_quotes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(format_csv([["1", "caf", "2"]]).encode().replace(b"caf", b"caf\xe9"))
    with pytest.raises(UserError, match=r"byte 38 is not UTF-8 .* iconv -f cp1252"):
        catalog.read(path, COLUMNS)
    path.write_text('sample_id,catalog_content,price\n1,"open,2\n')
    with pytest.raises(UserError, match="line 2: invalid CSV"):
        catalog.read(path, COLUMNS)


def test_in_a_folder_the_preferred_file_or_the_only_one_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"away.csv: no such file or folder. Expected a CSV catalogue"):
        catalog.find(tmp_path / "away.csv", prefer="train.csv")
    with pytest.raises(UserError, match=r"expected one CSV file, or one named train.csv; found no .csv"):
        catalog.find(tmp_path, prefer="train.csv")
    (tmp_path / "a.csv").touch()
    assert catalog.find(tmp_path, prefer="train.csv").name == "a.csv"
    (tmp_path / "b.csv").touch()
    with pytest.raises(UserError, match=r"found a.csv, b.csv. Name the file: packing.file=NAME"):
        catalog.find(tmp_path, prefer="train.csv")
    (tmp_path / "train.csv").touch()
    assert catalog.find(tmp_path, prefer="train.csv").name == "train.csv"
