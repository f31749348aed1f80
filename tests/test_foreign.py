"""Texts, tables, JSON and names of files that others wrote: read in one way, or refused with the place."""

import json
from pathlib import Path

import pytest
from msgspec import Struct

from trainyard.data.coco import explain_lost_boxes, read_annotations
from trainyard.data.raw import find_file, find_listed
from trainyard.errors import UserError
from trainyard.foreign import read_json, read_lines, read_rows, remember_reads

ACUTE = "\u0301"  # after an e, what a Mac makes of an e with an accent


class Box(Struct):
    """A type to read."""

    width: float
    name: str = ""


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_byte_order_mark_and_any_line_end_are_no_part_of_a_text(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\rthree")
    with remember_reads() as read:
        assert read_lines(path) == [(1, "one"), (3, "two"), (4, "three")]
    assert read == {path}


@pytest.mark.parametrize("data", ["\xe9".encode("cp1252"), "\xe9".encode("utf-16"), b"\xff\xfe\x00"])
def test_another_encoding_is_refused_everywhere_with_the_line_that_converts_it(tmp_path, data):
    path = write(tmp_path / "a b.csv", b"id\n" + data if data[:2] != b"\xff\xfe" else data)
    for read in (read_lines, lambda path: list(read_rows(path)), lambda path: read_json(path, Box, expected="a box")):
        with pytest.raises(UserError, match=r"expected UTF-8, found the byte 0x.*convert it: iconv -f .* -t utf-8 '"):
            read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"width": 1}, {"width": null}]', r"\[1\].width: expected float, found null. Expected: boxes."),
        ('[{"width": "1"}]', r"\[0\].width: expected float, found str"),
        ("[{}]", r"\[0\]: has no width"),
        ("{}", "the content: expected array, found object"),
        ('[{"width": NaN, "name": 1}]', r"\[0\].name: expected str, found int"),
        ('[{"width": 1, "name": "\\ud800"}]', "not JSON .*surrogates not allowed"),
        ("[" * 100_000, r"not JSON \(nested too deeply\)"),
        ("[{", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_of_another_shape_is_refused_with_its_place(tmp_path, text, said):
    with pytest.raises(UserError, match=f"boxes.json: {said}"):
        read_json(write(tmp_path / "boxes.json", text), list[Box], expected="boxes")


def test_json_may_have_a_byte_order_mark_and_what_nobody_asks_for(tmp_path):
    path = write(tmp_path / "boxes.json", '\ufeff[{"width": 2, "colour": [1]}, {"width": NaN}]')
    first, second = read_json(path, list[Box], expected="boxes")
    assert first == Box(2.0) and second.width != second.width


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_read_whatever_separates_its_columns(tmp_path, delimiter):
    text = f"\ufeff id ,text\r\n1,'a{delimiter}b\nc'\r\n\r\n2,d\r\n".replace(",", delimiter).replace("'", '"')
    assert list(read_rows(write(tmp_path / "a.csv", text), columns=("id",))) == [
        (3, {"id": "1", "text": f"a{delimiter}b\nc"}),
        (5, {"id": "2", "text": "d"}),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,label\n1,2,3\n", r"a.csv, line 2: 3 cells, the header has 2. Quote texts that contain commas"),
        ("id,label\n1,'2\n", r"a.csv, line 2: not a table \(unexpected end of data\)"),
        ("key,label\n", "a.csv, line 1: no column id. It has: key, label"),
        ("id,id\n", "several columns are named 'id'"),
        ("id,labl\n", "line 1: expected the columns id, and maybe label; found 'labl'. Nearest: label. Rename"),
        ("", "no column id. It has: none"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_the_line(tmp_path, text, said):
    path = write(tmp_path / "a.csv", text.replace("'", '"'))
    with pytest.raises(UserError, match=said):
        list(read_rows(path, columns=("id",), further=("label",)))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('a\tb\n"x\t1\ny"\t2\n', [('"x', "1"), ('y"', "2")]),  # two lines, each with two cells
        ('a\tb\n"x\ny\tz"\t2\n', [("x\ny\tz", "2")]),  # a line alone has one cell
        ('a\tb\n"x"\t1\n"y"\t2\n', [("x", "1"), ("y", "2")]),  # merges nothing
        ('a\tb\n"x\t1\n', [('"x', "1")]),
        ('a,b\n"x,1\ny",2\n', [("x,1\ny", "2")]),  # a text with a comma and a line break is usual
    ],
)
def test_quotes_count_unless_they_merge_lines_that_fit_the_header(tmp_path, text, rows):
    path = write(tmp_path / "a.tsv", text)
    assert [tuple(row.values()) for _, row in read_rows(path, columns=("a", "b"))] == rows


def test_names_of_files_are_found_composed_or_decomposed_and_never_outside(tmp_path):
    raw = tmp_path / "raw"
    here = write(raw / f"cafe{ACUTE}" / f"e{ACUTE}1.png", "")
    write(tmp_path / "secret.png", "")
    assert find_listed(raw, "caf\xe9/\xe91.png", where="list") == here
    assert find_listed(raw, f"{raw}/caf\xe9/\xe91.png", where="list") == here
    assert find_listed(raw, "/home/ann/caf\xe9/\xe91.png", where="list") == here
    assert find_listed(raw, "x/caf\xe9/\xe91.png", where="list") is None
    assert find_listed(raw, "x/caf\xe9/\xe91.png", where="list", tails=True) == here
    for name in ("", ".", "no.png", "/etc", "a\0b", "/gone/no.png", "../no.png"):
        assert find_listed(raw, name, where="list") is None, name
    for name in ("../secret.png", f"{tmp_path}/secret.png", "x/../../secret.png", "/etc/passwd"):
        with pytest.raises(UserError, match=f"list: .* is outside of {raw}. Move the file into it"):
            find_listed(raw, name, where="list")
    write(raw / "caf\xe9" / "\xe91.png", "")
    assert find_file(raw, ("caf\xe9", "\xe91.png")) == raw / "caf\xe9" / "\xe91.png", "the exact name counts first"
    write(raw / f"o\xe9e{ACUTE}", "")
    write(raw / f"oe{ACUTE}\xe9", "")
    with pytest.raises(UserError, match="two spellings of one name"):
        find_file(raw, ("o\xe9\xe9",))


def write_coco(path: Path, **changes: object) -> Path:
    entry = {"id": 1, "image_id": "a", "category_id": 1, "bbox": [1, 2, 3, 4]}
    content = {
        "images": [{"id": "a", "file_name": "1.png", "width": 60, "height": 40}],
        "annotations": [entry],
        "categories": [{"id": 1, "name": "car"}],
    }
    for name, change in changes.items():
        (first, *_), keys = content[name], change
        content[name] = [{**first, **keys}] if isinstance(keys, dict) else keys
    return write(path, json.dumps(content))


def test_ids_may_be_texts_and_a_missing_area_is_that_of_the_box(tmp_path):
    content = read_annotations(write_coco(tmp_path / "a.json", annotations={"area": None, "ignore": 1}))
    ((image, ((name, entry),)),) = content.group_objects().items()
    assert (image, name, entry.area, entry.is_ignored) == ("a", "annotation 1", None, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": {"width": None}}, r"images\[0\].width: expected float, found null"),
        ({"images": {"height": 0}}, r"images\[0\].height: expected float >= 1.0"),
        ({"annotations": {"iscrowd": "0"}}, r"annotations\[0\].iscrowd: expected .*bool.*, found str"),
        ({"annotations": {"ignore": [0]}}, r"annotations\[0\].ignore: expected .*found array"),
        ({"annotations": {"bbox": [1, 2, "3", 4]}}, r"annotations\[0\].bbox\[2\]: expected float, found str"),
        ({"annotations": {"bbox": [1, 2, float("inf"), 4]}}, r"annotation 1: bbox .* is not finite"),
        ({"annotations": {"image_id": "b"}}, "annotation 1 refers to image 'b', which is not listed"),
        ({"annotations": {"category_id": "1"}}, "annotation 1 has category '1', which is unknown. Known: 1 car"),
        ({"categories": [{"id": 1, "name": "car"}, {"id": "2", "name": "bus"}]}, "1 and '2' are a number and a text"),
        (
            {"categories": [{"id": 1, "name": "car"}, {"id": 2, "name": "car"}]},
            "1, 2 are all called 'car'.*as 2 classes",
        ),
    ],
)
def test_an_entry_of_another_type_or_meaning_is_refused_with_its_place(tmp_path, changes, said):
    with pytest.raises(UserError, match=f"a.json: .*{said}"):
        read_annotations(write_coco(tmp_path / "a.json", **changes))


def test_whole_numbers_may_be_written_as_floats_and_categories_may_be_digits(tmp_path):
    entry = {"id": 1.0, "image_id": "a", "category_id": 7.0, "bbox": [1, 2, 3, 4], "iscrowd": 0.0}
    path = write_coco(tmp_path / "a.json", annotations=[entry], categories=[{"id": 7, "name": 3}])
    content = read_annotations(path)
    assert content.categories[0].name == "3" and content.annotations[0].category_id == 7
    assert not content.annotations[0].is_ignored
    for name in (None, True, [3], 1.5):
        with pytest.raises(UserError, match=r"categories\[0\]: name: expected a text, found"):
            read_annotations(write_coco(tmp_path / "a.json", categories=[{"id": 1, "name": name}]))


def test_lost_boxes_are_explained_by_what_their_numbers_may_mean():
    assert "shares of the image, as in YOLO" in explain_lost_boxes([[0.1, 0.2, 0.3, 0.4]])
    assert "may be corners" in explain_lost_boxes([[10, 20, 30, 40], [1, 1, 5, 5]])
    assert explain_lost_boxes([[10, 20, 5, 40]]) == "" == explain_lost_boxes([])
