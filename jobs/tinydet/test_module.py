"""The module: predictions, merged tiles, rows and figures."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cases.tinydet import TiledData, make_batch, make_config, make_module, make_true_rows
from trainyard.train.step import copy_for_average

from .module import build


def test_averaged_weights_can_be_copied_with_open_data(tiled_data: TiledData) -> None:
    data, config, _ = tiled_data
    data.read("image", np.arange(2))  # opens and maps its files
    module = build(config, data)
    averaged = copy_for_average(module)
    assert averaged.score(make_true_rows(data)) == module.score(make_true_rows(data))
    assert not any(p.requires_grad for p in averaged.parameters())


def test_predictions_have_a_fixed_number_of_detections_in_pixels_of_the_sample() -> None:
    config = make_config(queries=5)
    config.evaluation.detections = 16
    module, batch = make_module(config).eval(), make_batch()
    batch["affine"] = torch.tensor([[[0.5, 0, 0], [0, 0.5, 0]]]).repeat(2, 1, 1)
    batch["image_px"] = torch.tensor([[100.0, 128.0]]).repeat(2, 1)
    rows = module.predict(batch)
    assert rows["box"].shape == (2, 16, 4) and rows["score"].shape == rows["label"].shape == (2, 16)
    assert (rows["score"][:, :10] > 0).all() and (rows["score"][:, 10:] == 0).all()  # 5 queries, 2 categories
    assert (
        (rows["box"] >= 0).all() and (rows["box"][..., [0, 2]] <= 128).all() and (rows["box"][..., [1, 3]] <= 100).all()
    )
    assert rows["box"][..., 2].amax() > 64, "boxes are in pixels of the sample, twice the size of the input"


@pytest.mark.parametrize("by", ["iou", "nwd"])
def test_the_tiles_of_an_image_are_merged_before_scoring(tiled_data: TiledData, by: str) -> None:
    data, config, _ = tiled_data
    config.evaluation.merge, config.evaluation.merge_above = by, 0.1 if by == "iou" else 0.5
    module = build(config, data)
    rows = make_true_rows(data)
    assert (rows["score"] > 0).sum() > 3, "some objects are in several tiles"
    metrics = module.score(rows)
    assert metrics["ap"] == pytest.approx(1.0) and metrics["ar_1500"] == pytest.approx(1.0)
    config.evaluation.merge_above = 1.0
    assert module.score(rows)["ap"] < 0.9, "an object found twice is wrong once"


def test_prediction_rows_have_each_object_once_in_pixels_of_the_whole_image(tiled_data: TiledData) -> None:
    data, config, listed = tiled_data
    config.evaluation.merge_above = 0.1
    rows = list(build(config, data).prediction_rows(make_true_rows(data), [sample.key for sample in listed]))
    assert len(rows) == len(listed)
    assert [row["tile_x"] for row in rows] == [sample.columns["tile_x"] for sample in listed]
    first = [entry for row in rows if row["image_name"] == "0.png" for entry in json.loads(str(row["detections"]))]
    assert sorted(entry[2:] for entry in first) == [[16, 5, 26, 13], [40, 20, 46, 26]]
    assert {entry[0] for entry in first} == {"ball"}


def test_figures_show_precision_by_size_and_samples_with_boxes(tiled_data: TiledData) -> None:
    data, config, _ = tiled_data
    config.evaluation.draw_samples, config.evaluation.draw_above = 3, 0.0
    module, rows = build(config, data), make_true_rows(data)
    assert list(module.report_figures(rows)) == ["Average precision by size"], "no name of a sample"
    found = module.sample_figures(rows)
    assert len(found) == 3
    assert [title.split(": ")[1].split(";")[0] for title in found] == ["worst, F1 1.00"] * 2 + ["best, F1 1.00"]
    titles = [title for title in found if title.startswith("0.png at 0,0")]
    assert len(titles) == 1
    with Image.open(io.BytesIO(found[titles[0]])) as image:
        colours = {colour for _, colour in image.getcolors(1 << 20) or []}
        assert image.size == (704, 704) and (40, 200, 60) in colours and (235, 60, 40) in colours
    rows["score"][rows["sample_id"] == 0] = 0  # so that nothing is found in it
    assert next(iter(module.sample_figures(rows))).startswith("0.png at 0,0: worst, F1 0.00")
