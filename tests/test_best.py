"""Checks which evaluation is the best, and that a run ends when its patience does."""

import math
import os
import signal

import pytest

from tests.training import (
    FAMILIES,
    find_differences,
    load_state,
    new_run,
    read_run_metrics,
    start,
    train,
    wait_for_lines,
)
from trainyard.cli import main
from trainyard.config.settings import parse_monitor
from trainyard.errors import UserError
from trainyard.runs.events import find_best_evaluation, read_events
from trainyard.train.best import Plateau, explain_equals, is_better

EER_THEN_SEPARATION = (("eer", "min"), ("d_prime", "max"))
# Weights that hardly move: the accuracy stays, so only the first evaluation is better than those before.
STILL = ("optimizer.lr=1e-12", "schedule.name=constant", "eval_every=1ep", "log_every=1st", "model.sleep_ms=40")


def make_best(eer: float, d_prime: float) -> dict[str, object]:
    return {"step": 1, "metric": "eer", "value": eer, "ties": [d_prime]}


@pytest.mark.parametrize(
    ("eer", "d_prime", "better"),
    [(0.0, 3.0, True), (0.0, 2.0, False), (0.0, 1.0, False), (0.1, 9.0, False), (math.nan, 9.0, False)],
)
def test_equal_rates_are_decided_by_the_separation_then_by_which_came_first(eer, d_prime, better):
    assert is_better({"eer": eer, "d_prime": d_prime}, make_best(0.0, 2.0), EER_THEN_SEPARATION) is better
    values = enumerate([(0.0, 2.0), (eer, d_prime)], start=1)
    lines = [{"split": "val", "step": step, "eer": rate, "d_prime": distance} for step, (rate, distance) in values]
    found = find_best_evaluation(lines, split="val", metric="eer", mode="min", ties=[["d_prime", "max"]])
    assert found is lines[1 if better else 0]


def test_a_validation_that_cannot_choose_is_said():
    lines = [{"eer": rate, "d_prime": 1.0} for rate in (0.2, 0.0, 0.0)]
    said = explain_equals(lines, make_best(0.0, 2.0), EER_THEN_SEPARATION)
    assert said.startswith("validation cannot choose: eer is 0 in 2 of 3 evaluations, so d_prime decided. More")
    assert "the first one won" in explain_equals(lines, make_best(0.0, 2.0), EER_THEN_SEPARATION[:1])
    assert explain_equals(lines, make_best(0.2, 2.0), EER_THEN_SEPARATION) == ""


def test_any_number_is_better_than_nan():
    assert is_better({"eer": 0.5, "d_prime": 0.0}, make_best(math.nan, 0.0), EER_THEN_SEPARATION)


def test_the_option_names_the_metrics_in_their_order():
    assert parse_monitor("") == ()
    assert parse_monitor("d_prime:max, eer:min") == EER_THEN_SEPARATION[::-1]
    with pytest.raises(UserError, match="expected metrics, each with min or max, such as monitor=eer:min,d_prime:max"):
        parse_monitor("eer")


@pytest.mark.parametrize(
    ("values", "count"),
    [([0.5], 0), ([0.5, 0.5], 1), ([0.5, 0.6, 0.4], 0), ([0.5, 0.495, 0.485], 0), ([0.5, 0.495, 0.492], 2)],
)
def test_patience_counts_evaluations_without_a_gain_of_more_than_min_delta(values, count):
    plateau = Plateau()
    for value in values:
        plateau.add(value, "min", 0.01)
    assert plateau.evaluations == count


def test_nan_is_no_gain():
    plateau = Plateau()
    plateau.add(math.nan, "max", 0.0)
    plateau.add(0.1, "max", 0.0)
    plateau.add(math.nan, "max", 0.0)
    assert (plateau.value, plateau.evaluations) == (0.1, 1)


@pytest.mark.slow
def test_a_run_out_of_patience_equals_one_planned_to_end_there_also_after_a_stop(tmp_path):
    planned = new_run(tmp_path, *STILL, "max_duration=3ep")
    patient, stopped = (new_run(tmp_path, *STILL, "max_duration=50ep", "patience=2") for _ in range(2))
    assert train(planned) == train(patient) == 0
    process = start(stopped)
    wait_for_lines(stopped, 7, process)  # after the first evaluation
    os.kill(process.pid, signal.SIGTERM)
    process.join(240)
    assert train(stopped) == 0
    for run in (patient, stopped):
        assert find_differences(load_state(planned), load_state(run)) == []
        assert read_run_metrics(planned) == read_run_metrics(run)
        events = [(event["event"], event.get("metric")) for event in read_events(run)]
        assert events.count(("out_of_patience", "accuracy")) == 1 and events[-1] == ("done", None)
    before = load_state(patient)["progress/step"]
    assert main(["resume", str(patient), "patience=3", "--jobs", str(FAMILIES)]) == 0
    assert load_state(patient)["progress/step"] == before + before // 3


@pytest.mark.slow
def test_a_metric_that_the_validation_lacks_is_named_with_those_there_are(tmp_path):
    run = new_run(tmp_path, "max_duration=1ep", "monitor=eer:min")
    with pytest.raises(UserError, match=r"no metric 'eer'. It has accuracy.*monitor=accuracy:min"):
        train(run)
