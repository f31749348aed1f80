"""CSV tables: no cell is a formula to a spreadsheet, and every text reads back as it was."""

import csv
import io
import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainyard.errors import UserError
from trainyard.tables import check_ending, read_rows, read_table, write_rows, write_table

FORMULAS = [
    "=1+1",
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "\uff1d1",
    "-",
    "=",
    "'=1",
    "''@x",
]
PLAIN = ["a=b", "'quoted'", "'", "", " x", "x-1", "-0.5", "+5", "-1e-3", "a,b", 'a"b', "a\r\nb", "\u00e9", "2024-01-01"]


def write(path: Path, *columns: str, rows: list[dict[str, object]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        write_table(file, columns, rows)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_cell_that_a_spreadsheet_would_compute_begins_with_an_apostrophe_and_reads_back(text: str, tmp_path: Path):
    write(tmp_path / "t.csv", "id", text, rows=[{"id": text, text: 1}])
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["id", f"'{text}"], [f"'{text}", "1"]]
    assert list(read_table(tmp_path / "t.csv")) == [{"id": text, text: "1"}]


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_and_numbers_are_written_as_they_are(text: str, tmp_path: Path):
    rows: list[dict[str, object]] = [{"id": text, "score": -0.5}, {"id": text, "score": np.float32(-0.25)}]
    write(tmp_path / "t.csv", "id", "score", rows=rows)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["id", "score"], [text, "-0.5"], [text, "-0.25"]]


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(_TEXT | st.builds(str.__add__, st.text("'=+-@\t\r\n0.5e", max_size=4), _TEXT))
@example("'")
def test_every_text_reads_back_as_it_was_and_no_cell_is_a_formula(text: str):
    file = io.StringIO(newline="")
    write_table(file, ["id", "score"], [{"id": text, "score": 1}])
    file.seek(0)
    cell = list(csv.reader(file))[1][0]
    assert not cell.startswith(("=", "@", "\t", "\r", "\n")) and (cell[:1] not in ("+", "-") or abs(float(cell)) >= 0)


@given(_TEXT | st.builds(str.__add__, st.text("'=+-@\t\r\n0.5e", max_size=4), _TEXT))
def test_a_table_on_disk_gives_back_every_text(tmp_path_factory: pytest.TempPathFactory, text: str):
    path = tmp_path_factory.getbasetemp() / "hostile.csv"
    write(path, "id", "score", rows=[{"id": text, "score": 1}])
    assert [row["id"] for row in read_table(path)] == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id\n1\n", "no column score; it has: id. Was it changed by hand"),
        (b"", "no column id, score; it has: none"),
        (b"id,score\n1,2,3\n", "line 2: 3 fields, the header has 2"),
        (b"id,score\n\xff,2\n", "not a CSV table in UTF-8"),
        (b'id,score\n"a,2\n', "not a CSV table in UTF-8"),
    ],
)
def test_a_table_that_was_changed_is_refused_with_the_place(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_table(path, columns=("id", "score")))
    with pytest.raises(UserError, match=r"no such file\. Write it first: trainyard predict RUN RAW"):
        list(read_table(tmp_path / "none.csv"))


ROWS = [{"id": "=1", "score": 0.5, "list": "a"}, {"id": "\u00e9\n", "score": float("nan"), "list": ""}]


def test_the_ending_decides_the_format_and_each_reads_back(tmp_path: Path):
    for name in ("a.csv", "a.JSON", *(["a.parquet"] if find_spec("pyarrow") else [])):
        check_ending(tmp_path / name)
        with (tmp_path / name).open("wb") as file:
            write_rows(file, Path(name).suffix, ["id", "score", "list"], iter(ROWS))
        assert [row["id"] for row in read_rows(tmp_path / name)] == ["=1", "\u00e9\n"]
    assert json.loads((tmp_path / "a.JSON").read_text())[1] == {"id": "\u00e9\n", "score": None, "list": ""}
    with (tmp_path / "none.json").open("wb") as file:
        write_rows(file, ".json", ["id"], [])
    assert read_rows(tmp_path / "none.json") == []


@pytest.mark.parametrize("name", ["out", "out.xlsx", "my out.tsv", "out.csv.gz"])
def test_another_ending_is_refused_with_a_name_that_works(name: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"names no kind of table. Expected .csv, .json or .parquet, such as ") as error:
        check_ending(tmp_path / name)
    check_ending(Path(shlex.split(str(error.value))[-1]))


def test_parquet_without_its_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainyard.tables.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"pyarrow, which writes Parquet, is not installed: pip install pyarrow. Or name"
    ):
        check_ending(tmp_path / "out.parquet")
