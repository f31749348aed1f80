"""`trainyard coco-results`: tables of predictions as COCO's evaluator reads them."""

import argparse
import contextlib
import io
import json
from pathlib import Path

import pytest
from pycocotools.coco import COCO  # type: ignore[import-untyped]
from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

from tests.cases.tinydet import TiledData, make_true_rows, write_coco
from trainyard.errors import UserError
from trainyard.tables import write_table

from . import commands
from .module import build


def run_verb(*words: object) -> int:
    parser = argparse.ArgumentParser()
    commands.add(parser.add_subparsers())
    args = parser.parse_args([str(word) for word in words])
    return int(args.command(args))


def write_rows(path: Path, rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = [{"image_name": name, "detections": text} for name, text in rows.items()]
        write_table(file, ["image_name", "detections"], lines)
    return path


def test_right_detections_have_an_average_precision_of_1_in_cocos_own_evaluator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotations = write_coco(tmp_path / "raw") / "instances_train.json"
    content = json.loads(annotations.read_text())
    for entry in content["annotations"]:
        entry |= {"id": entry["id"] + 1, "area": 80, "iscrowd": 0}  # the evaluator takes id 0 for "no match"
    annotations.write_text(json.dumps(content))
    rows = {f"{n}.png": json.dumps([["ball", 0.9, 4.0 + n, 5.0, 14.0 + n, 13.0]]) for n in range(3)}
    table, out = write_rows(tmp_path / "out.csv", rows), tmp_path / "results.json"
    assert run_verb("coco-results", table, out, "--annotations", annotations) == 0
    assert capsys.readouterr().out == f"3 detections are in {out}\n"
    assert json.loads(out.read_text())[1] == {"image_id": 15, "category_id": 7, "bbox": [5, 5, 10, 8], "score": 0.9}
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        evaluator = COCOeval(truth, truth.loadRes(str(out)), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    assert evaluator.stats[0] == pytest.approx(1.0)
    with pytest.raises(UserError, match="exists already"):
        run_verb("coco-results", table, out, "--annotations", annotations)
    out.unlink()
    write_rows(table, {"0.png": "[]"})
    assert run_verb("coco-results", table, out, "--annotations", annotations) == 0
    assert "2 images of" in capsys.readouterr().out and out.read_text() == "[]"


@pytest.mark.parametrize(
    ("name", "detections", "message"),
    [
        ("sub/0.png", "[]", r"'sub/0.png' is not in .*\. Nearest: 0.png\. Predict the folder"),
        ("0.png", '[["balls", 1, 0, 0, 1, 1]]', "the category 'balls' is not in .* Nearest: ball"),
        ("0.png", '[["ball", 1, 0, 0, 1]]', "the detections of '0.png' are not"),
        ("0.png", "[" * 100_000, "the detections of '0.png' are not"),
        ("0.png", "7", "the detections of '0.png' are not"),
    ],
)
def test_a_table_that_does_not_fit_the_annotations_is_refused(
    tmp_path: Path, name: str, detections: str, message: str
) -> None:
    annotations = write_coco(tmp_path / "raw") / "instances_train.json"
    table = write_rows(tmp_path / "out.csv", {name: detections})
    with pytest.raises(UserError, match=message):
        run_verb("coco-results", table, tmp_path / "results.json", "--annotations", annotations)
    annotations.write_text('{"images": [{"id": null, "file_name": "0.png"}], "categories": []}')
    with pytest.raises(UserError, match=r"images\[0\].id: expected int \| str, found null"):
        run_verb("coco-results", table, tmp_path / "results.json", "--annotations", annotations)


def test_tables_are_in_pixels_of_the_files_when_packing_scaled_them(tiled_data: TiledData) -> None:
    data, config, listed = tiled_data
    keys, rows = [sample.key for sample in listed], make_true_rows(data)
    plain = list(build(config, data).prediction_rows(rows, keys))
    config.packing.scale = 0.5
    found = list(build(config, data).prediction_rows(rows, keys))
    for one, other in zip(plain, found, strict=True):
        for a, b in zip(json.loads(str(one["detections"])), json.loads(str(other["detections"])), strict=True):
            assert b[2:] == [2 * value for value in a[2:]]
