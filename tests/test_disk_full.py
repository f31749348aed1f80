"""A full or read-only disk is one sentence with an exit code of its own, and the same command goes on after it."""

import json
from functools import partial

import pytest

from tests.fill_disk import NO_MOUNT, PARTS, run_parts
from tests.training import run_as_command
from trainyard.runs.state import ExitCode

QUICK = ("checkpoint",)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [QUICK, pytest.param(tuple(PARTS), marks=pytest.mark.long)], ids=["quick", "all"])
def test_a_run_whose_disk_fills_up_says_so_and_ends_with_the_same_bits_after_room_is_made(parts, tmp_path):
    done = run_as_command(partial(run_parts, tmp_path / "disks", parts), tmp_path / "here", timeout_s=500)
    if done.returncode == NO_MOUNT:
        pytest.skip(f"neither root nor a user namespace may mount a tmpfs here: {done.stdout}")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line.removeprefix("result: ")) for line in done.stdout.splitlines() if "result: " in line]
    assert [result["part"] for result in results] == list(parts)
    for result in results:
        part, said = result["part"], result["said"]
        assert result["filled"], part
        assert result["code"] == ExitCode.DISK_FULL, (part, said)
        assert said.count("DiskFull: ") == 1 and "no space left" in said.lower() and "iB " in said, said
        for word in ("Traceback", "Exception", "Logging error"):
            assert word not in said, (part, said)
        assert result["again"] == 0, (part, result["said_again"])
        assert result["differences"] == [] and result["same_metrics"], part
        assert result["left"] == [], part
