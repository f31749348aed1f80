"""The pricing family as a whole: its contract, and a run from training to prediction."""

import argparse
import csv
import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.cases.pricing import make_config, write_catalogue
from tests.training import new_run, train
from trainyard.errors import UserError
from trainyard.tools.predict import predict

from . import metrics, pack
from .commands import add

JOBS = Path(__file__).resolve().parents[1]


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what a perfect model predicts for the samples `ids`, and what it must score."""
    price = columns["price"][ids]
    rows = {"sample_id": ids, "predicted": price, "price": price, "group": columns["group"][ids]}
    return rows, {"smape": 0.0, "mae_log": 0.0, "bias_log": 0.0, "median_ratio": 1.0, "smape_decile_1": 0.0}


@pytest.mark.slow
def test_training_and_prediction_open_no_connection_and_every_id_gets_one_positive_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tried to open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    run = new_run(tmp_path, job="pricing_smoke", jobs=JOBS)
    assert train(run, jobs=JOBS) == 0
    texts = [
        "Item Name: Never Seen, 3 Bushels\nValue: 3\nUnit: Bushel\n",  # an unknown unit
        "",
        "Item Name: Olive Oil, 17 Fl Oz\nProduct Description: two\nlines, \u4e2d\u6587\n",
        "Value: 99999999999\nUnit: Pound",
    ]
    rows = [[f"id {i}", texts[i % 4], "ignored"] for i in range(30)]
    path = write_catalogue(tmp_path, [row[:2] for row in rows], header="sample_id,catalog_content")
    assert predict(run, path, tmp_path / "out.csv", JOBS) == (30, "prediction")
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [line["sample_id"] for line in found] == [row[0] for row in rows]
    assert list(found[0]) == ["sample_id", "price"]
    assert all(float(line["price"]) > 0 and math.isfinite(float(line["price"])) for line in found)
    with pytest.raises(UserError, match="is already used in line 2"):
        predict(
            run,
            write_catalogue(tmp_path, [["1", "a"], ["1", "b"]], header="sample_id,catalog_content"),
            tmp_path / "other.csv",
            JOBS,
        )

    raw = next(tmp_path.glob("cache/pricing-synthetic-*"))
    predict(run, raw, run / "prices.csv", JOBS)
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    args = parser.parse_args(["pricing-baseline", str(raw), "--results", str(tmp_path / "results"), "--runs", str(run)])
    assert args.command(args) == 0
    _, first, *others = map(json.loads, next(tmp_path.glob("results/*.jsonl")).read_text().splitlines())
    assert not any("run" in line for line in others)
    whole = pack.read_table(raw, make_config())
    prices = {line["sample_id"]: float(line["price"]) for line in csv.DictReader((run / "prices.csv").open(newline=""))}
    test = np.flatnonzero(whole.parts == "test").tolist()
    score = metrics.smape([prices[whole.keys[i]] for i in test], whole.prices[test])
    assert score == pytest.approx(first["run"], abs=1e-3)  # predicted prices have six digits
