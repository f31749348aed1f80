"""Tests of one file run in one process and share fixtures. When they did not, all still passed, and took longer."""

import os

import pytest


@pytest.mark.parametrize("part", range(8))
def test_tests_of_a_file_run_in_one_process(part, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all processes of this session
    record = shared / "processes"
    with record.open("a") as file:
        file.write(f"{os.getpid()}\n")
    assert set(record.read_text().split()) == {str(os.getpid())}
