"""Reading CSV catalogues."""

import csv
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from loguru import logger

from tests.cases.pricing import COLUMNS, format_csv, write_catalogue
from trainyard.config import compose as configs
from trainyard.errors import UserError

from . import catalog
from .config import Config
from .pack import select_columns


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
        ([["1", "x", "2"], ["2", "y"]], None, "line 3: 2 cells, the header has 3"),
    ],
)
def test_a_broken_catalogue_is_refused_with_file_and_line(
    rows: list[list[str]], header: str | None, message: str, tmp_path: Path
) -> None:
    path = write_catalogue(tmp_path, rows, **({"header": header} if header else {}))
    with pytest.raises(UserError, match=re.escape(message)):
        catalog.read(path, COLUMNS)


def test_a_row_without_an_id_cannot_train_but_ends_only_a_prediction(tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, [["1", "x", "2"], ["", "y", "3"]])
    assert [(entry.key, entry.fault) for entry in catalog.read(path, COLUMNS)] == [
        ("1", ""),
        ("line 3", "some.csv, line 3: no sample_id"),
    ]
    with pytest.raises(UserError, match=r"line 3: no sample_id\. Every row to predict needs one"):
        catalog.read(path, replace(COLUMNS, price=""))


@pytest.mark.parametrize(("delimiter", "word"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_file_with_another_delimiter_reads_like_one_with_commas(
    delimiter: str, word: str, quoting: Literal[0, 1], tmp_path: Path
) -> None:
    rows = [["1", 'a; "b",\tc|d\ne', "37.49"], ["2", "x", "5"]]
    expected = catalog.read(write_catalogue(tmp_path, rows), COLUMNS)
    path = tmp_path / "other" / "some.csv"
    path.parent.mkdir()
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter, quoting=quoting).writerows(
            [["sample_id", "catalog_content", "price"], *rows]
        )
    assert catalog.read(path, COLUMNS) == expected
    path.write_text(f"id{delimiter}text\n")
    with pytest.raises(UserError, match=rf"It has: id, text, separated by {word}\. Name the right columns: "):
        catalog.read(path, COLUMNS)


@pytest.mark.parametrize(
    "texts",
    [
        ['"Vans style', 'pot 12"', "pan"],  # a quoted reading merges two rows
        ['"Vans" style', "pot", "pan"],  # is invalid
        ['"Vans style', "pot", "pan"],  # does not end
        ['"Vans', "pot", 'pan"', '"', '" 5'],
    ],
)
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_a_tab_file_without_quoting_keeps_each_line_a_row_and_its_quotes(
    texts: list[str], line_break: str, tmp_path: Path
) -> None:
    lines = ["sample_id\tcatalog_content\tprice", *(f"{i}\t{text}\t{i + 5}" for i, text in enumerate(texts)), ""]
    path = tmp_path / "some.tsv"
    path.write_bytes(line_break.join(lines).encode("utf-8-sig"))
    logged: list[str] = []
    sink = logger.add(logged.append, format="{message}")
    entries = catalog.read(path, COLUMNS)
    logger.remove(sink)
    assert [(entry.text, entry.price) for entry in entries] == [(text, i + 5) for i, text in enumerate(texts)]
    assert any("quotes are read as part of the texts: each line alone has the 3 cells" in line for line in logged)


def test_a_text_at_the_end_of_a_line_does_not_merge_with_one_at_the_beginning_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "some.tsv"
    path.write_text('catalog_content\tprice\tsample_id\nx\t5\t"a\nb"\t6\tc\n')
    assert [entry.key for entry in catalog.read(path, COLUMNS)] == ['"a', "c"]


@pytest.mark.parametrize("field", ['"mug"', '2"" pot', '""'])
def test_a_tab_file_that_may_have_quoting_or_not_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "some.tsv"
    path.write_text(f'sample_id\tcatalog_content\tprice\n1\t"Vans\t5\n2\tpot"\t6\n3\t{field}\t7\n')
    with pytest.raises(UserError, match=r"line 2: are quotes part of the texts\? .* Remove the quotes around"):
        catalog.read(path, COLUMNS)


def apply_remedy(error: pytest.ExceptionInfo[UserError]) -> catalog.Columns:
    """Type what an error says to type, and return the columns that are then read."""
    words = shlex.split(re.split(r"Name the right columns?: |State\b.*?: ", str(error.value))[1])
    config = configs.apply_overrides(Config(), [word.rstrip(".;") for word in words if word.startswith("packing.")])
    assert isinstance(config, Config)
    return select_columns(config.packing)


def test_all_missing_columns_are_named_at_once_and_the_options_work_when_typed(tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, [["1", "x", "2", "3"]], header="sample id,catalogue_content,price,depth (cm)")
    wanted = replace(COLUMNS, numbers=("depth_cm", "price"))
    with pytest.raises(UserError) as caught:
        catalog.read(path, wanted)
    assert (
        "no columns 'sample_id' (nearest: sample id), 'catalog_content' (nearest: catalogue_content), 'depth_cm' "
        "(nearest: depth (cm)). It has: sample id, catalogue_content, price, depth (cm). Name the right columns: "
        "'packing.id_column=sample id' packing.text_column=catalogue_content "
        "'packing.numeric_columns=[\"depth (cm)\",price]'"
    ) in str(caught.value)
    (entry,) = catalog.read(path, apply_remedy(caught))
    assert (entry.key, entry.texts, entry.price, entry.numbers) == ("1", ("x",), 2.0, (3.0, 2.0))
    with pytest.raises(UserError, match=r"Rename the columns in the file: the run was trained with the missing names"):
        catalog.read(path, replace(wanted, price=""))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, [["1", "x", "2", "3"]], header="sample_id,catalog_content,price,price")
    with pytest.raises(UserError, match="several columns are named 'price'"):
        catalog.read(path, COLUMNS)


PRICES = [
    (["$37.49"], "auto", [37.49]),
    (["37.49 \u20ac", "\u20ac5"], "auto", [37.49, 5]),
    (["US$\u00a01,234.50"], "auto", [1234.5]),
    (["1'234.50", "1 234.50", "1\u202f234.50"], "auto", [1234.5] * 3),
    (["1,234,567"], "auto", [1234567]),
    (["$1,234", "$37.49"], "auto", [1234, 37.49]),  # the second shows what the comma is
    (["1.234", "37.5"], "auto", [1.234, 37.5]),
    (["0.125", "1e3", "5.", "+7"], "auto", [0.125, 1000, 5, 7]),
    (["1,234", "1.234"], "point", [1234, 1.234]),
    (["37,49", "1.234,56 \u20ac", "1.234", "12"], "comma", [37.49, 1234.56, 1234, 12]),
    (["Rs. 1,299", "Rs 499", "INR 1,29,999", "\u20b912,34,56,789.50"], "auto", [1299, 499, 129999, 123456789.5]),
    (["Rs.99", "Rs. 1,299.00/-", "499 INR", "\u20a8 5", "Rs 5.00 INR"], "auto", [99, 1299, 499, 5, 5]),
    (["USD 12", "12 USD", "US$ 12", "$12", "US $12.50", "12 USD$", "usd12"], "auto", [12, 12, 12, 12, 12.5, 12, 12]),
    (["EUR 12.50", "12.50EUR", "\u20ac 12", "3 Euro"], "auto", [12.5, 12.5, 12, 3]),
    (["12 kr", "12,- kr", "kr. 12.50", "12:- kr", "1 299,- kr"], "auto", [12, 12, 12.5, 12, 1299]),
    (["CHF 10.-", "1'299.-", "Fr. 1,299.\u2013", "10.50 SFr."], "auto", [10, 1299, 1299, 10.5]),
    (["$12 CAD", "C$7.50", "CAD 1,000"], "auto", [12, 7.5, 1000]),
    (["R 129.99", "ZAR 5"], "auto", [129.99, 5]),
    (["1 299,00 \u20ac", "1.299,- EUR"], "comma", [1299, 1299]),
]


@pytest.mark.parametrize(("cells", "mark", "expected"), PRICES)
def test_prices_are_read_as_people_write_them(
    cells: list[str], mark: str, expected: list[float], tmp_path: Path
) -> None:
    path = write_catalogue(tmp_path, [[str(i), "x", cell] for i, cell in enumerate(cells)])
    entries = catalog.read(path, replace(COLUMNS, decimal_mark=mark))
    assert [entry.price for entry in entries] == expected


@pytest.mark.parametrize(
    ("cells", "message", "expected"),
    [
        (["5", "1,234"], "line 3: '1,234' could be 1234 or 1.234, and no other number tells. State which: ", 1234),
        (["5", "$1.234"], "line 3: '1.234' could be 1.234 or 1234, and no other number tells. State which: ", 1.234),
        (["5", "37,49"], "line 3: '37,49' has a decimal comma. State it: packing.decimal_mark=comma.", 37.49),
        (["37.49", "1.234,56"], "'1.234,56' has a decimal comma, but '37.49' in line 2 a decimal point. Write", None),
        (["5", "Rs. 1,299"], "line 3: '1,299' could be 1299 or 1.299, and no other number tells. State which: ", 1299),
        (["5", "1 299,00 \u20ac"], "'1 299,00' has a decimal comma. State it: packing.decimal_mark=comma.", 1299),
        (["5", "1.299,- kr"], "'1.299,' has a decimal comma. State it: packing.decimal_mark=comma.", 1299),
        *(
            (
                [f"{one}5", f"{other}5"],
                f"prices in several currencies: '{one}5' in line 2, '{other}5' in line 3. Convert them to one",
                None,
            )
            for one, other in [
                ("$", "\u20ac"),
                ("USD ", "EUR "),
                ("Rs. ", "$"),
                ("Rs ", "PKR "),
                ("$", "CAD "),
                ("US$", "A$"),
                ("kr ", "SEK "),
                ("\u00a5", "CNY "),
            ]
        ),
    ],
)
def test_prices_that_could_mean_two_values_are_refused_and_the_option_named_decides(
    cells: list[str], message: str, expected: float | None, tmp_path: Path
) -> None:
    path = write_catalogue(tmp_path, [[str(i), "x", cell] for i, cell in enumerate(cells)])
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        catalog.read(path, COLUMNS)
    if expected is not None:
        assert catalog.read(path, apply_remedy(caught))[1].price == expected


@pytest.mark.parametrize(
    "cell",
    [
        *("37.49 XQZ", "99\u00a2", "$5\u20ac", "1,23,4", "-5", "1_000", "inf", "", "$", "12,34.5", "INR", "EUR 5 USD"),
        *("nan", "12 each", "Rs. 5-7", "5-", "1,29,99", "129,99,999", "1.29.999", "1,29.999", "12 EUR/kg", "Rs. -5"),
    ],
)
def test_what_is_no_clear_price_is_a_fault_of_its_row(cell: str, tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, [["1", "x", cell], ["2", "x", "2.50"]])
    assert "expected a number above 0" in catalog.read(path, COLUMNS)[0].fault


def test_bytes_that_are_not_utf_8_and_unclosed_quotes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(format_csv([["1", "caf", "2"]]).encode().replace(b"caf", b"caf\xe9"))
    with pytest.raises(UserError, match=r"line 2: expected UTF-8, found the byte 0xe9.* iconv -f cp1252"):
        catalog.read(path, COLUMNS)
    path.write_text('sample_id,catalog_content,price\n1,"open,2\n')
    with pytest.raises(UserError, match="line 2: not a table"):
        catalog.read(path, COLUMNS)
    path.write_text('sample_id,"catalog_content,price\n1,x,2\n')
    with pytest.raises(UserError, match="line 1: not a table"):
        catalog.read(path, COLUMNS)
    path.write_text("sample_id\tcatalog_content\tprice\n1\tx\t2\n", encoding="utf-16")
    with pytest.raises(UserError, match=r"iconv -f utf-16 -t utf-8 /.*some.csv > /.*some.csv.utf8 && mv"):
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
    (tmp_path / "train.txt").touch()
    assert catalog.find(tmp_path, prefer="train.txt").name == "train.txt"
