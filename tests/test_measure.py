import json

import pytest

from trainyard.measure import Candidate, Summary, format_table, make_header, measure_candidates, write_new
from trainyard.tools.bench import read_results


def test_ratios_are_computed_within_rounds_and_the_order_changes():
    called: list[str] = []
    state = {"round": 0.0}

    def make_candidate(name: str, factor: float, baseline: str = "") -> Candidate:
        def measure() -> float:
            if len(called) % 2 == 0:
                state["round"] += 1  # the machine has another speed in each round
            called.append(name)
            return factor * state["round"]

        return Candidate(name, measure, "rows/s", baseline=baseline)

    ours, theirs = measure_candidates(
        [make_candidate("ours", 3, "theirs"), make_candidate("theirs", 1)], rounds=6, tell=lambda line: None
    )
    assert ours["ratio"] == {"median": 3.0, "spread": 0.0, "quotable": True}
    assert ours["summary"]["spread"] > 1 and not ours["summary"]["quotable"] and "ratio" not in theirs
    assert {tuple(called[i : i + 2]) for i in range(0, 12, 2)} == {("ours", "theirs"), ("theirs", "ours")}
    assert ours["rounds"] == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]


def test_a_warm_up_round_is_discarded():
    numbers = iter([100.0, 1.0, 1.0])
    (line,) = measure_candidates(
        [Candidate("one", lambda: next(numbers), "s")], rounds=2, warm_up=True, tell=lambda line: None
    )
    assert line["rounds"] == [1.0, 1.0] and not line["summary"]["quotable"], "two rounds are too few to quote"


@pytest.mark.parametrize(
    ("values", "text"), [([10, 10.5, 9.8], "10.0 +-7%"), ([10, 12, 9], "10.0 +-30% ?"), ([0, 0, 0], "0.0 +-0%")]
)
def test_a_number_with_a_wide_spread_is_marked(values, text):
    assert Summary.from_values(values).format() == text


def test_results_are_written_with_their_environment_and_never_overwrite_older_ones(tmp_path):
    lines = measure_candidates(
        [Candidate("a", lambda: 2.0, "x/s", "a note"), Candidate("b", lambda: 4.0, "x/s", baseline="a")], rounds=3
    )
    first = write_new(tmp_path, "demo", [make_header("demo", {"rounds": 3, "folder": tmp_path}), *lines])
    second = write_new(tmp_path, "demo", [make_header("demo", {}), *lines])
    assert second.stem == f"{first.stem}-2" and first.stem.startswith("demo-20")
    head, *results = read_results(first)
    assert head["options"] == {"rounds": 3, "folder": str(tmp_path)} and head["environment"]["machine"]["cpu"]
    assert results == json.loads(json.dumps(lines))
    assert format_table(results).splitlines()[2].split() == ["b", "4.00", "+-0%", "x/s", "2.00", "+-0%", "x", "a"]
