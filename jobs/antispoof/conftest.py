"""Data that several tests of this family read and none changes."""

from pathlib import Path

import pytest

from tests.cases.antispoof import write_asvspoof_2019


@pytest.fixture(scope="session")
def asvspoof_2019(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database in the layout of ASVspoof 2019 LA, the only folder in its parent."""
    return write_asvspoof_2019(tmp_path_factory.mktemp("asvspoof") / "LA")
