"""Demos learn as well, and as fast, as when their distribution was measured: tests/demo_accuracy.py."""

import pytest

from tests.checkout import ROOT
from tests.demo_accuracy import DEMOS, LEAST_RUNS, Demo, find_worse, read_known, read_reached, train_demo

KNOWN = read_known(ROOT / "benchmarks")
LOWER, HIGHER = Demo("a", "eer", 0.1, "1ep"), Demo("b", "ap", 0.5, "1ep", higher_is_better=True)


def make_run(test: float, steps: int) -> dict[str, object]:
    return {"seed": 0, "test": test, "steps_to_target": steps, "steps_between": 10}


@pytest.mark.parametrize(
    ("demo", "values", "outside", "inside"),
    [
        (LOWER, (0.05, 0.06, 0.07), 0.2, (0.01, 0.08)),
        (HIGHER, (0.80, 0.82, 0.84), 0.6, (0.99, 0.78)),
    ],
)
def test_a_run_that_learns_less_or_more_slowly_than_known_ones_is_found(demo, values, outside, inside):
    known = [make_run(value, steps) for value in values for steps in (90, 100, 110)]
    for value in inside:
        assert find_worse(demo, known, make_run(value, 125)) == []
    assert "steps_to_target 400" in find_worse(demo, known, make_run(values[1], 400))[0]
    [said] = find_worse(demo, known, make_run(outside, 20))
    assert f"test {outside:.4g}, but 9 known runs allow" in said


def test_the_first_step_at_the_target_counts_and_twice_the_run_if_there_is_none():
    lines = [
        {"kind": "train", "step": 10, "loss": 1.0},
        *(
            {"kind": "eval", "step": step, "split": "val", "eer": eer}
            for step, eer in ((0, 0.05), (10, 0.3), (20, 0.09))
        ),
        {"kind": "eval", "step": 30, "split": "val", "eer": 0.2},
        {"kind": "eval", "step": 30, "split": "test", "eer": 0.25},
    ]
    found = read_reached(LOWER, lines)
    assert (found["test"], found["val"], found["steps_to_target"]) == (0.25, 0.09, 20)
    assert read_reached(Demo("a", "eer", 0.01, "1ep"), lines)["steps_to_target"] == 60
    assert read_reached(LOWER, lines[:-1])["test"] == 0.2, "a demo without a test set"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("demo", [demo for demo in DEMOS if demo.job in KNOWN], ids=lambda demo: demo.job)
def test_a_demo_learns_as_well_and_as_fast_as_before(demo, tmp_path):
    known = KNOWN[demo.job]
    assert len(known) >= LEAST_RUNS
    assert find_worse(demo, known, train_demo(demo, 1000, tmp_path)) == []
