"""The comparison of readers: order, ratios, limits, refusals. The measured numbers are not tested."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import read
from benchmarks.__main__ import main
from benchmarks.results import read_results
from trainyard.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def make_rounds(ours: list[float], other: list[float]) -> list[read.Round]:
    rates = zip(ours, other, strict=True)
    return [{name: make_rates(rate) for name, rate in zip(("ours", "files"), pair, strict=True)} for pair in rates]


def make_rates(rate: float) -> dict[str, float]:
    return {"samples_per_s": rate, "samples_per_core_s": rate / 2}


def test_ratios_are_computed_within_a_round_so_a_machine_that_slows_down_does_not_change_them():
    ours, other = read.build_result_lines(make_rounds([100, 60, 20], [50, 30, 10]))
    assert other["ours_over_this_samples_per_s"] == {"median": 2.0, "spread": 0.0, "quotable": True}
    assert ours["samples_per_s"] == {"median": 60, "spread": 80 / 60, "quotable": False}


@pytest.mark.parametrize(("rates", "quotable"), [([100, 95, 105], True), ([100, 94, 105], False), ([100, 100], False)])
def test_a_number_is_quotable_only_with_little_spread_over_enough_rounds(rates: list[float], quotable: bool):
    ours = read.build_result_lines(make_rounds(rates, rates))[0]
    assert ours["samples_per_s"]["quotable"] is quotable


def test_each_round_runs_every_reader_once_in_a_new_order():
    names = [str(n) for n in range(10)]
    orders = [tuple(read.shuffle_names(names, number)) for number in range(100)]
    assert all(sorted(order) == names for order in orders)
    assert len(set(orders)) == 100
    assert {order[0] for order in orders} == set(names)
    assert orders[0] == tuple(read.shuffle_names(names, 0))


@pytest.mark.slow
def test_measuring_excludes_the_warm_up_and_stops_when_the_time_is_over():
    def batches() -> Iterator[np.ndarray]:
        time.sleep(0.5)  # start-up, in the first batch
        while True:
            yield np.zeros(8)

    result = read.measure(batches(), seconds=0.0)
    assert result["samples"] == 8 and result["seconds"] < 0.25
    assert read.measure(batches(), seconds=0.1)["seconds"] >= 0.1


def test_an_unknown_reader_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match=r"--only mosaic: no such reader\. There are: ours, ours_crc, .*, files\."):
        read.select_readers(["mosaic"])
    assert read.select_readers(["h5py*"]) == ["ours", "h5py_vlen", "h5py_flat"]


def test_a_file_that_is_not_a_result_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such result file"):
        read_results(tmp_path / "rgb.jsonl")
    (tmp_path / "rgb.jsonl").write_text('{"kind": "result"}\n')
    with pytest.raises(UserError, match="expected a header line"):
        read_results(tmp_path / "rgb.jsonl")


@pytest.mark.slow
def test_every_reader_reads_the_same_generated_records_and_a_second_run_gets_its_own_file(tmp_path, capsys):
    data, results = tmp_path / "data", tmp_path / "results"
    words = ["--records=64", "--rounds=1", "--seconds=0.01", f"--data={data}", f"--results={results}"]
    main(words)
    [path] = results.iterdir()
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["suite"] == "read" and head["environment"]["machine"]["cpu"] and "commit" in head["environment"]["code"]
    assert {line["name"] for line in lines} == set(read.READERS) and lines[0]["name"] == "ours"
    assert all(line["rounds"][0]["samples"] >= 64 for line in lines)
    assert lines[1]["ours_over_this_samples_per_core_s"]["median"] > 0
    assert "h5py_flat" in capsys.readouterr().out
    files = sorted((data / "records-64" / "files").iterdir())
    sizes = sorted(file.stat().st_size for file in files)
    for name, (reader, _) in read.READERS.items():
        assert sorted(next(reader(data / "records-64"))) == sizes, name
    main([*words, "--only=files"])
    assert {one.name for one in results.iterdir()} == {path.name, path.name.replace(".jsonl", "-2.jsonl")}


@pytest.mark.parametrize("option", ["--rounds=0", "--records=-2", "--seconds=0", "--seconds=nan"])
def test_a_benchmark_of_nothing_is_refused(option, tmp_path, capsys):
    name, value = option.split("=")
    with pytest.raises(SystemExit, match="2"):
        main([option, "--results", str(tmp_path)])
    said = capsys.readouterr().err
    assert f"error: {name} {value}" in said and f" or more: {name} " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_kept_file_of_results_can_be_shown(path, capsys):
    main(["--show", str(path)])
    shown = capsys.readouterr().out
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line.get("kind") != "header"]
    assert shown.startswith(f"{head['suite']}  ") and len(shown.splitlines()) > len(lines)
    assert all(str(line.get("name", "")) in shown for line in lines)
