"""How benchmarks run: order, ratios, limits, failures. The measured numbers are not tested."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results, suite
from benchmarks.__main__ import main, make_quick
from benchmarks.contract import Configuration, Setting
from benchmarks.results import read_results
from benchmarks.suite import Round, build_result_lines
from benchmarks.worker import measure
from trainyard.errors import UserError
from trainyard.measure import make_header

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HEAD = {"kind": "header", "suite": "rgb", "date": "2026-11-25T10:00:00", "command": "python -m benchmarks"}


def make_configuration(name: str) -> Configuration:
    return Configuration("rgb", name, lambda setting: setting.data, lambda data, setting: iter(()), ())


OURS, OTHER = make_configuration("ours"), make_configuration("other")

# A worker that gives some configurations of the suite rgb another meaning.
WORKER = """
import json, subprocess, sys, time
command, setting, name = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split("/")[-1]
if command == "measure":
    if name == "torch_files":
        sys.exit("no such codec")
    if name == "dali_files":
        time.sleep(60)
    if name == "ours_float":
        child = subprocess.Popen(["sleep", "60"])
        open(setting["data"] + "/left.pid", "w").write(str(child.pid))
    print(json.dumps(dict(name=name, samples_per_s=2.0, samples_per_core_s=1.0)))
"""


def make_rounds(ours: list[float], other: list[float]) -> list[Round]:
    rates = zip(ours, other, strict=True)
    return [{name: make_rates(rate) for name, rate in zip(("ours", "other"), pair, strict=True)} for pair in rates]


def make_rates(rate: float) -> dict[str, float]:
    return {"samples_per_s": rate, "samples_per_core_s": rate / 2}


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path, tmp_path / "results", threads=1, rounds=1)


def run_rgb(setting: Setting, *only: str) -> Path:
    """Run configurations of the suite rgb with the worker above."""
    script = setting.data / "worker.py"
    script.write_text(WORKER)
    return suite.run_suite("rgb", replace(setting, only=only), head=HEAD, worker=[str(script)])


def test_ratios_are_computed_within_a_round_so_a_machine_that_slows_down_does_not_change_them():
    ours, other = build_result_lines([OURS, OTHER], make_rounds([100, 60, 20], [50, 30, 10]))
    assert other["ours_over_this_samples_per_s"] == {"median": 2.0, "spread": 0.0, "quotable": True}
    assert ours["samples_per_s"] == {"median": 60, "spread": 80 / 60, "quotable": False}


def test_a_round_with_one_failed_side_is_left_out_of_the_ratio():
    rounds = make_rounds([100, 100, 100, 100], [50, 50, 50, 1])
    rounds[3]["other"] = {"error": "out of memory"}
    other = build_result_lines([OURS, OTHER], rounds)[1]
    assert other["ours_over_this_samples_per_s"]["median"] == 2.0
    assert other["errors"] == ["out of memory"] and len(other["rounds"]) == 3


@pytest.mark.parametrize(("rates", "quotable"), [([100, 95, 105], True), ([100, 94, 105], False), ([100, 100], False)])
def test_a_number_is_quotable_only_with_little_spread_over_enough_rounds(rates: list[float], quotable: bool):
    ours = build_result_lines([OURS, OTHER], make_rounds(rates, rates))[0]
    assert ours["samples_per_s"]["quotable"] is quotable


def test_each_round_runs_every_configuration_once_in_a_new_order():
    configurations = [make_configuration(str(n)) for n in range(10)]
    orders = [tuple(suite.shuffle_configurations(configurations, number)) for number in range(100)]
    assert all(sorted(order, key=lambda c: c.name) == configurations for order in orders)
    assert len(set(orders)) == 100
    assert {order[0] for order in orders} == set(configurations)
    assert orders[0] == tuple(suite.shuffle_configurations(configurations, 0))


@pytest.mark.slow
def test_measuring_excludes_the_warm_up_and_stops_when_both_limits_are_reached():
    def batches() -> Iterator[list[int]]:
        time.sleep(0.5)  # start-up, in the first batch
        while True:
            yield [0] * 8

    result = measure(batches(), warmup=8, samples=64, seconds=0.0)
    assert result["samples"] == 64 and result["seconds"] < 0.25
    assert measure(batches(), warmup=8, samples=64, seconds=0.1)["seconds"] >= 0.1


def test_core_seconds_include_child_processes_alive_or_ended():
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    alive: list[subprocess.Popen[bytes]] = []

    def batches() -> Iterator[list[int]]:
        yield [0]
        alive.append(subprocess.Popen([sys.executable, "-c", spin + "print(flush=True); input()"], stdin=-1, stdout=-1))
        stdout = alive[0].stdout
        assert stdout is not None
        stdout.read(1)  # it has used its CPU time, and is alive
        yield [0]
        subprocess.run([sys.executable, "-c", spin], check=True)
        yield [0]

    try:
        result = measure(batches(), warmup=1, samples=2, seconds=0.0)
    finally:
        alive[0].kill()
        alive[0].communicate()
    assert result["core_seconds"] >= 0.55  # 2 x 0.3, less a few clock ticks of 10 ms


@pytest.mark.slow
def test_a_configuration_that_fails_or_hangs_is_named_and_the_others_are_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(suite, "WORKER_TIMEOUT_S", 1)
    with pytest.raises(UserError, match=r"torch_files, dali_files failed|dali_files, torch_files failed"):
        run_rgb(setting, "torch_files", "dali_files", "ours_float")
    [path] = setting.results.iterdir()
    lines = {line["name"]: line for line in read_results(path)[1:]}
    assert "no such codec" in lines["torch_files"]["errors"][0]
    assert "no result after 1 s" in lines["dali_files"]["errors"][0]
    assert lines["ours_float"]["ours_over_this_samples_per_s"]["median"] == 1.0
    title, *rows = results.format_results(read_results(path)).splitlines()[1:-1]
    assert "failed" in title and [row.split()[1] for row in rows if "files" in row] == ["1", "1"]


def test_processes_that_a_worker_leaves_behind_are_killed_before_the_next_one(setting: Setting):
    run_rgb(setting, "ours_float")
    status = Path(f"/proc/{(setting.data / 'left.pid').read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_second_run_on_the_same_day_gets_its_own_file(setting: Setting):
    first, second = (run_rgb(setting, "ours") for _ in range(2))
    assert second.name == first.name.replace(".jsonl", "-2.jsonl")


def test_an_unknown_suite_or_pattern_is_answered_with_the_known_ones(setting: Setting):
    with pytest.raises(UserError, match=r"'rbg' is not a benchmark suite\. Choose from: rgb, gray"):
        suite.run_suite("rbg", setting, head=HEAD)
    with pytest.raises(UserError, match=r"--only mosaic: no such configuration in suite rgb\. It has: ours, o"):
        run_rgb(setting, "mosaic")


def test_a_file_that_is_not_a_result_file_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such result file"):
        read_results(tmp_path / "rgb.jsonl")
    (tmp_path / "rgb.jsonl").write_text('{"kind": "result"}\n')
    with pytest.raises(UserError, match="expected a header line"):
        read_results(tmp_path / "rgb.jsonl")


@pytest.mark.slow
def test_a_quick_run_measures_our_reader_and_h5py_on_generated_images_end_to_end(
    setting: Setting, capsys: pytest.CaptureFixture[str]
):
    quick = replace(make_quick(setting), rgb=64, only=("h5py_flat",))
    path = suite.run_suite("read", quick, head=make_header("read", {"data": quick.data}))
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["suite"] == "read" and head["environment"]["machine"]["cpu"] and "commit" in head["environment"]["code"]
    assert [line["name"] for line in lines] == ["ours", "h5py_flat"]
    assert all(line["rounds"][0]["samples"] >= 128 and line["versions"]["numpy"] for line in lines)
    assert lines[1]["ours_over_this_samples_per_core_s"]["median"] > 0
    assert "h5py_flat" in capsys.readouterr().out
    assert len(list(setting.data.glob("rgb-files-64/*/*.jpg"))) == 64


@pytest.mark.parametrize("option", ["--rounds=0", "--threads=0", "--threads=-2", "--seconds=0", "--seconds=nan"])
def test_a_benchmark_of_nothing_is_refused(option, tmp_path, capsys):
    name, value = option.split("=")
    with pytest.raises(SystemExit, match="2"):
        main(["raw", option, "--results", str(tmp_path)])
    said = capsys.readouterr().err
    assert f"error: {name} {value}" in said and f"expected a number above 0: {name} " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_kept_file_of_results_can_be_shown(path, capsys):
    main(["--show", str(path)])
    shown = capsys.readouterr().out
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line.get("kind") != "header"]
    assert shown.startswith(f"{head['suite']}  ") and len(shown.splitlines()) > len(lines)
    assert all(str(line.get("name", "")) in shown for line in lines)
