import json

import pytest

from benchmarks.results import format_results, read_results
from trainyard.measure import Candidate, Summary, make_header, measure_candidates, write_new


def test_every_round_measures_each_candidate_once_and_the_order_changes():
    called: list[str] = []

    def make_candidate(name: str) -> Candidate:
        def measure() -> float:
            called.append(name)
            return float(len(called))

        return Candidate(name, measure, "rows/s")

    ours, theirs = measure_candidates([make_candidate("a"), make_candidate("b")], rounds=6, tell=lambda line: None)
    assert {tuple(called[i : i + 2]) for i in range(0, 12, 2)} == {("a", "b"), ("b", "a")}
    assert ours["rounds"] == [float(i + 1) for i, name in enumerate(called) if name == "a"]
    assert ours["summary"]["spread"] > 1 and not ours["summary"]["quotable"] and theirs["name"] == "b"


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
        [Candidate("a", lambda: 2.0, "x/s"), Candidate("b", lambda: 4.0, "x/s")], rounds=3, tell=lambda line: None
    )
    first = write_new(tmp_path, "demo", [make_header("demo", {"rounds": 3, "folder": tmp_path}), *lines])
    second = write_new(tmp_path, "demo", [make_header("demo", {}), *lines])
    assert second.stem == f"{first.stem}-2" and first.stem.startswith("demo-20")
    head, *results = read_results(first)
    assert head["options"] == {"rounds": 3, "folder": str(tmp_path)} and head["environment"]["machine"]["cpu"]
    assert results == json.loads(json.dumps(lines))
    assert format_results([head, *results]).splitlines()[3].split() == ["b", "4.00", "+-0%"]
