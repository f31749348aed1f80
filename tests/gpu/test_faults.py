"""`pytest tests/gpu --quick`: each check is run where what it checks is broken, on the CPU, and has to fail."""

import pytest

from tests.gpu.faults import FAULTS, NEEDS_CARD, NOT_FOUND, find_fault, write_test_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the test family, and for its data."""
    folder = tmp_path_factory.mktemp("faults")
    write_test_family(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}-{fault.what}")
def test_a_planted_fault_is_found(fault, folder, tmp_path, record_property):
    found = find_fault(fault, folder, tmp_path)
    for name, value in (("check", fault.check), ("fault", fault.what), ("found", found)):
        record_property(name, value)
    assert not found.startswith(NOT_FOUND), found
    if found.startswith(NEEDS_CARD):
        pytest.skip(found)
