"""The checks of `trainyard gpu-check` as tests, at small sizes on a card. Skipped with a reason without one."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training import run_as_command
from trainyard.tools.gpu_check import FAILED, NOT_RUN, OK, run_in_process
from trainyard.tools.gpu_checks.check import Check, Sizes
from trainyard.tools.gpu_checks.plan import list_checks

JOBS = Path(__file__).parents[2] / "jobs"
CODES = {OK: 0, FAILED: 1, NOT_RUN: 3}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def list_small_checks() -> list[Check]:
    return list_checks(JOBS, small=True, quick=False)


def run_check(name: str, data: Path) -> int:
    """Run one check on the card, in a process that has not started CUDA; print how it ended."""
    check = next(check for check in list_small_checks() if check.full_name == name)
    sizes = Sizes(JOBS, data, Path.cwd(), small=True, rounds=1, seconds=0.2, matrix=2048)
    outcome = run_in_process(
        partial(check.work, torch.device("cuda", 0), sizes), limit_s=200, log=Path("log").resolve()
    )
    print(outcome.status, outcome.error or outcome.reason, outcome.figures, Path("log").read_text(), sep="\n")
    return CODES[outcome.status]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu-check")


@pytest.mark.parametrize("name", [check.full_name for check in list_small_checks()])
def test_a_check_passes_on_this_card(name, data, tmp_path):
    done = run_as_command(partial(run_check, name, data), tmp_path / "here")
    if done.returncode == CODES[NOT_RUN]:
        pytest.skip(done.stdout.splitlines()[1])
    assert done.returncode == 0, done.stdout + done.stderr
