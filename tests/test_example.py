"""The example that CONTRIBUTING.md names: it runs as it stands."""

import math
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "one_step.py"


def test_the_example_takes_a_step_and_is_short(tmp_path):
    loss = runpy.run_path(str(EXAMPLE))["take_one_step"](tmp_path)
    assert math.isfinite(loss) and loss > 0
    assert len(EXAMPLE.read_text().splitlines()) <= 60
