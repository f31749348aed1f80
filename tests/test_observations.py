"""What a run was predicted to take and what it took, and plans that use what was observed."""

import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.test_choose_data import JOBS
from tests.test_memory_prediction import predict
from tests.training import FAMILIES, new_run, train
from trainyard import config as configs
from trainyard.cli import main
from trainyard.cli.plan_screen import Known, compute_floor_s, describe_plan
from trainyard.config import freeze
from trainyard.hardware import get_gpu
from trainyard.launch.memory_prediction import Setting, Store, choose_split
from trainyard.launch.observed import correct, make_place
from trainyard.report.run_page import format_summary, write_report
from trainyard.runs.folder import CONFIG, format_run_name, read_env, update_env, write_env
from trainyard.runs.observations import (
    Amounts,
    Observation,
    find_observation,
    find_observations,
    keep_key,
    keep_prediction,
    read_amounts,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Return two runs of the same configuration, one after the other."""
    root = tmp_path_factory.mktemp("observed")
    made = []
    for _ in range(2):
        made.append(new_run(root, "max_duration=4st", "micro_batch_size=8", "data.synthetic=60"))
        assert train(made[-1]) == 0
    return made


@pytest.mark.slow
def test_a_run_records_what_it_took_and_the_next_one_predicts_that(runs):
    predicted, observed = read_amounts(read_env(runs[0])) or ()
    assert (predicted.samples_per_s, predicted.hours, predicted.disk_bytes) == (None, None, None)
    assert predicted.reasons["hours"] == "no plan stored, no run before"
    assert observed.samples_per_s > 0 and observed.hours > 0 and observed.micro_batch_size == 8
    files = list((runs[0] / "checkpoints").iterdir())
    assert observed.disk_bytes == sum(path.stat().st_size for path in files)
    assert observed.memory_gib is None and "only a GPU's allocator" in observed.reasons["memory_gib"]
    again, _ = read_amounts(read_env(runs[1])) or ()
    assert (again.samples_per_s, again.hours) == (observed.samples_per_s, pytest.approx(observed.hours))
    assert again.reasons["hours"] == f"measured by {format_run_name(runs[0])}"
    assert again.disk_bytes >= observed.disk_bytes, "at most"


@pytest.mark.slow
def test_the_report_and_the_summary_show_predicted_next_to_observed(runs):
    text = format_summary(runs[1])
    assert re.search(r"^plan +samples/s +predicted [\d.e+]+ +observed [\d.e+]+$", text, re.MULTILINE)
    assert "memory, peak" not in text and "micro-batch" not in text, "not known here; as predicted"
    assert not re.search("^plan", format_summary(runs[0]), re.MULTILINE), "nothing but the micro-batch was predicted"
    page = write_report(runs[1]).read_text()
    assert "Predicted and observed" in page and f"measured by {format_run_name(runs[0])}" in page
    assert "GPU memory, peak" in page and "not observed" in page


@pytest.mark.slow
def test_the_next_plan_of_the_same_machine_says_hours_as_measured(runs, capsys):
    options = ["max_duration=8st", "micro_batch_size=8", "data.synthetic=60"]
    folder = runs[0].parent.parent
    cache = f"data.cache={folder.parent / 'cache'}"
    config = configs.thaw(runs[0] / CONFIG, FAMILIES)
    words = ["plan", "stripes", *options, cache, f"data.path={config.data.path}", "--hw", "cpu"]
    assert main([*words, "--runs", str(folder), "--jobs", str(FAMILIES)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^cpu +\d+ = 8 x \d+ x 1 .* [\d.e-]+ m$", text, re.MULTILINE), text
    assert f"cpu: {format_run_name(runs[1])}" in text and "hours ?" not in text
    assert re.search(r"each \(measured\), at most .* on disk \(derived\)", text)
    assert main([*words, "model.channels=4", "--runs", str(folder), "--jobs", str(FAMILIES)]) == 0
    assert "hours ?" in capsys.readouterr().out, "another configuration was never observed"


@pytest.mark.slow
def test_a_plan_knows_what_the_line_that_it_proposed_has_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    words = ["plan", "stripes", "max_duration=300st", "--hw", "cpu", "--jobs", str(FAMILIES)]
    assert main(words) == 0
    line = shlex.split(capsys.readouterr().out.partition("on the card, type:\n")[2].partition("\n")[0])
    assert line == ["trainyard", "run", "stripes", "max_duration=200st"]
    assert main([*line[1:3], "max_duration=3st", "--jobs", str(FAMILIES)]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert re.search(r"^cpu +\d+ = .* [\d.e-]+ m$", capsys.readouterr().out, re.MULTILINE)


# Cards, by stored records: no GPU is needed


def observe(card: str, setting: Setting, *, memory_gib: float, gpus: int = 1, run: str = "pricing/one") -> Observation:
    """Return what a run with 100 steps of an hour in all took on a card."""
    amounts = Amounts(memory_gib, setting.micro_batch, 64.0, 1.0, 3 * 2**20, {})
    return Observation(run, make_place(card, gpus, setting), 100, 50, 2**20, 2.0, amounts)


def make_setting(card: str, micro_batch: int) -> Setting:
    """Return in which setting a plan computes pricing on a card."""
    found = get_gpu(card)
    assert found is not None
    config = configs.compose("pricing", ["global_batch_size=64", f"micro_batch_size={micro_batch}"], JOBS)
    return choose_split(config, found, gpus=1, predict=predict).setting


def test_what_a_run_took_on_a_card_replaces_the_estimate_there_and_nowhere_else(tmp_path):
    config = configs.compose("pricing", ["global_batch_size=64", "micro_batch_size=64", "max_duration=200st"], JOBS)
    cards = {key: get_gpu(key) for key in ("a5000", "a100-40-sxm", "a100-80-sxm")}
    seen = observe("a5000", replace(make_setting("a100-80-sxm", 64)), memory_gib=12.5)
    store = Store(tmp_path / "x.json", {}, {"data": "240 synthetic samples"})
    store.read = predict  # type: ignore[method-assign]
    known = Known([seen], None, None, tmp_path, ["pricing"])
    lines = {line.split()[0]: line for line in describe_plan(config, cards, store, known, gpus=1) if line}  # type: ignore[arg-type]
    assert re.search(r" 64 = 64 x 1 x 1 .* 12\.5 m +22\.1 +fits .* 2 m$", lines["a5000"]), "200 steps of 36 s"
    assert re.search(r" 64 = 16 x 4 x 1 .* e +36\.8 +fits +>= [\d.]+ ms +>= [\d.e-]+$", lines["a100-40-sxm"])
    assert re.search(r" e +73\.6 +fits +>= [\d.]+ ms +>= [\d.e-]+$", lines["a100-80-sxm"])
    assert "hours >=     derived: as many steps; a100-40-sxm, a100-80-sxm: not known until" in "\n".join(lines.values())
    assert "Never observed on this card: a100-40-sxm, a100-80-sxm" in " ".join(
        " ".join(describe_plan(config, cards, store, known, gpus=1)).split()  # type: ignore[arg-type]
    )
    two = list(describe_plan(config, cards, store, known, gpus=2))  # type: ignore[arg-type]
    (line,) = (line for line in two if line.startswith("a5000 "))
    assert re.search(r" e +22\.1 +.* >= [\d.e-]+$", line), "nor for another number of GPUs"


def test_an_observed_peak_that_leaves_no_reserve_is_not_planned_again():
    """The estimate says that it fits; a run on that card showed that it hardly does."""
    card = get_gpu("a100-80-sxm")
    assert card is not None
    config = configs.compose("pricing", ["global_batch_size=64", "micro_batch_size=64"], JOBS)
    seen = observe(card.key, make_setting(card.key, 64), memory_gib=73.0)
    assert choose_split(config, card, gpus=1, predict=predict).setting.micro_batch == 64
    chosen = choose_split(config, card, gpus=1, predict=correct(predict, [seen], card, gpus=1))
    assert chosen.setting.micro_batch < 64


def test_a_run_of_another_configuration_or_place_counts_for_nothing(tmp_path):
    config = configs.compose("pricing", [], JOBS)
    setting = make_setting("a5000", 8)
    for name, key in (("first", "k1"), ("other", "k2"), ("damaged", "k1")):
        run = tmp_path / "pricing" / name
        run.mkdir(parents=True)
        freeze(config, run / CONFIG)
        write_env(run, {"created": f"2026-01-0{len(name)}", "choices": {}})
        keep_key(run, key)
        keep_prediction(run, make_place("a5000", 1, setting), Amounts())
        record = {"steps": 4, "steps_per_epoch": 2, "checkpoint_bytes": 1, "checkpoint_s": 0.1}
        update_env(run, "plan", {"observed": {**record, "amounts": asdict(Amounts(memory_gib=3.0))}})
    (tmp_path / "pricing" / "damaged" / "env.json").write_text("{")
    found = list(find_observations(tmp_path, job="pricing", key="k1"))
    assert [one.run for one in found] == ["pricing/first"]
    assert find_observation(found, make_place("a5000", 1, setting)) == found[0]
    assert find_observation(found, make_place("a5000", 2, setting)) is None
    assert find_observation(found, make_place("a6000", 1, setting)) is None


@pytest.mark.parametrize(("card", "tflop_s"), [("p100-16-pcie", 9.3), ("2080ti", 53.8), ("a5000", 111)])
def test_the_floor_of_a_step_is_its_operations_at_the_peak_of_the_precision(card, tflop_s):
    found = get_gpu(card)
    assert found is not None
    config = configs.compose("pricing", ["global_batch_size=64", "micro_batch_size=4"], JOBS)

    def predict_compute(setting: Setting):
        return replace(predict(setting), parameters=4, gradients=4, flops=10**12 * setting.micro_batch)

    split = choose_split(config, found, gpus=1, predict=predict_compute)
    assert compute_floor_s(found, split, samples=64) == pytest.approx(64 / tflop_s)
    unknown = get_gpu("t4")
    assert unknown is not None and compute_floor_s(unknown, split, samples=64) is None
