import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.results import format_results, read_results
from trainyard.measure import Summary, make_header, write_new


@pytest.mark.parametrize(
    ("values", "text"), [([10, 10.5, 9.8], "10.0 +-7%"), ([10, 12, 9], "10.0 +-30% ?"), ([0, 0, 0], "0.0 +-0%")]
)
def test_a_number_with_a_wide_spread_is_marked(values, text):
    assert Summary.from_values(values).format() == text


def test_results_are_written_with_their_environment_and_never_overwrite_older_ones(tmp_path):
    summaries = {name: asdict(Summary.from_values([value] * 3)) for name, value in (("a", 2.0), ("b", 4.0))}
    lines = [
        {"name": name, "rounds": [summary["median"]] * 3, "summary": summary} for name, summary in summaries.items()
    ]
    first = write_new(tmp_path, "demo", [make_header("demo", {"rounds": 3, "folder": tmp_path}), *lines])
    second = write_new(tmp_path, "demo", [make_header("demo", {}), *lines])
    assert second.stem == f"{first.stem}-2" and first.stem.startswith("demo-20")
    head, *results = read_results(first)
    assert head["options"] == {"rounds": 3, "folder": str(tmp_path)} and head["environment"]["machine"]["cpu"]
    assert results == json.loads(json.dumps(lines))
    assert format_results([head, *results]).splitlines()[3].split() == ["b", "4.00", "+-0%"]


def test_a_header_has_the_command_that_makes_the_file_again(tmp_path):
    (tmp_path / "tool.py").write_text(
        "from trainyard.measure import make_header\nprint(make_header('suite', {})['command'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tool", "--seeds", "a b"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "python -m tool --seeds 'a b'\n"
