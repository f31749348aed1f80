"""The family meets the contract of a family."""

from pathlib import Path

import numpy as np

from trainyard.tools.check_family import check_family

from .pack import draw_scene


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score: a scene is its number's."""
    most, names = 3, ["disc", "square"]
    rows = {"sample_id": ids, "box": np.zeros((len(ids), most, 4), np.float32)}
    rows |= {"score": np.zeros((len(ids), most), np.float32), "label": np.zeros((len(ids), most), np.int64)}
    for i, number in enumerate(columns["number"][ids].tolist()):
        _, boxes, kinds = draw_scene(number)
        for j, (box, kind) in enumerate(zip(boxes, kinds, strict=True)):
            rows["box"][i, j], rows["score"][i, j], rows["label"][i, j] = box, 1.0, names.index(kind)
    return rows, {"ap": 1.0, "ap50": 1.0, "recall": 1.0}


def test_the_family_meets_the_contract(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parent
    assert [result for result in check_family(folder.parent, folder.name, tmp_path) if not result.passed] == []
